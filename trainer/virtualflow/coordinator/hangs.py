"""Whose training thread hangs: a pure function of what the workers tell of theirs. Who does not come is evicted, never
who waits.

A worker is *busy* if its training thread waits for nobody. The coordinator knows for how long, and it is too long only
if somebody is the worse for it:

- Other members wait for it, in an exchange or to enter a generation. Its limit is the **hang limit**.
- Nobody waits, because all members are busy: what takes long on all of them, such as an evaluation of the script's own,
  may. All of them hang if all are inside a step, and for the longer limit.
- It has never been a member: it does not become ready.

Who waits for its turn on a device that jobs share waits for none of these: that wait has an end of its own.

The hang limit follows from the job's own steps, unless it is set: a few times the slowest of the latest ones, and some
minutes at least. Work that is longer than a step by nature has the longer limit, a multiple of it: the first step of a
process (kernels are chosen, models compiled), warming up, entering, evaluating, checkpoints, and the script's own code
between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.coordinator.snapshot import Cluster, Worker
from virtualflow.protocol.messages import Doing
from virtualflow.protocol.turns import STAGE as AWAITING_TURN
from virtualflow.protocol.wording import counted

_WITHIN_STEP = frozenset({"loading samples", "computing", "synchronizing"})
"""Stages of the library's own making, which take no longer than a step."""


class Delay(NamedTuple):
    """Somebody is the worse for it that a worker's training thread does not come on."""

    share: float
    """Of its limit that has passed."""
    reason: str


def find_hung(cluster: Cluster, settings: MembershipSettings) -> dict[str, str]:
    """Who is declared lost because its training thread hangs, by incarnation, with the reason for each."""
    return {
        incarnation: delay.reason for incarnation, delay in find_delays(cluster, settings).items() if delay.share >= 1
    }


def find_delays(cluster: Cluster, settings: MembershipSettings) -> dict[str, Delay]:
    """Who holds up the others, or itself, by incarnation."""
    told = {i: worker for i, worker in cluster.workers.items() if _tells(worker)}
    busy = {i: worker.doing for i, worker in told.items() if worker.doing is not None and not worker.doing.waits}
    if not any(doing.seconds >= least_delay(settings) for doing in busy.values()):
        return {}
    hang_limit = _hang_limit(settings, (worker.doing.slowest for worker in told.values() if worker.doing is not None))
    members = _members(cluster)
    waiting = cluster.names(i for i in members if i in told and i not in busy and not _awaits_turn(told[i]))
    all_in_step = all(i in busy and busy[i].stage in _WITHIN_STEP for i in members)
    delays = {}
    for i, doing in busy.items():
        worker, limit = told[i], hang_limit
        patient = doing.first or doing.stage not in _WITHIN_STEP
        if i in members and waiting:
            because = f"while {_who(waiting)}"
        elif i in members and all_in_step:
            because, patient = "and so do all others" if len(members) > 1 else "and there is no other worker", True
        elif i not in members and worker.entered is None:
            because, patient = "and has not become ready", True
        else:
            continue
        limit *= settings.hang_patience if patient else 1.0
        delays[i] = Delay(doing.seconds / limit, _explain(worker, doing, limit, because))
    return delays


def least_delay(settings: MembershipSettings) -> float:
    """Seconds without progress that may call for a decision."""
    return settings.stacks_share * (settings.hang_limit or settings.hang_floor)


def _tells(worker: Worker) -> bool:
    return worker.doing is not None and worker.present and worker.connected and not worker.done


def _awaits_turn(worker: Worker) -> bool:
    """Whether it waits for its turn on a device that other jobs have, too, and so for nobody of its own."""
    return worker.doing is not None and worker.doing.stage == AWAITING_TURN


def _hang_limit(settings: MembershipSettings, slowest: Iterable[float]) -> float:
    if settings.hang_limit is not None:
        return settings.hang_limit
    return max([settings.hang_floor, *(settings.hang_steps * seconds for seconds in slowest)])


def _members(cluster: Cluster) -> set[str]:
    """Whose exchanges need each other: those of the running generation who have its state; at the start, all."""
    plan = cluster.running or cluster.proposed
    if plan is None:
        return set()
    return {
        member.incarnation
        for member in plan.members
        if cluster.running is None or cluster.workers[member.incarnation].entered is not None
    }


def _who(waiting: list[str]) -> str:
    return f"{waiting[0]} waits for it" if len(waiting) == 1 else f"{counted(len(waiting), 'worker')} wait for it"


def _explain(worker: Worker, doing: Doing, limit: float, because: str) -> str:
    place = f", at {worker.place}" if worker.place else ""
    return f"its training thread hangs: {describe(doing)} (limit {limit:g} s), {because}{place}"


def describe(doing: Doing) -> str:
    """What a training thread does, in words."""
    step = f" in step {doing.step}" if doing.step else ""
    return f"{doing.stage}{step} for {doing.seconds:.0f} s"

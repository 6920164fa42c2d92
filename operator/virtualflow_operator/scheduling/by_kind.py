"""A queue with kinds of device: which kind a job is to have, then a policy for each kind, then what those leave.

1. Every job has a home, the kind on which it is expected to cost all of them least time (``homes``).
2. Within each kind the policy of the queue decides as it does for any queue: the same function, asked about the jobs at
   home there, with their curves on that kind. So minimums, maximums, turns, limits and on-demand capacity hold there as
   they do everywhere, and with one kind nothing is different at all.
3. What a kind has left when its own jobs have what they can use is lent: to jobs that wait for their home and may run
   elsewhere meanwhile, then to those that may be on several kinds at once, the shortest first. It is taken back as soon
   as the jobs at home there can use it. A job that waits while it runs on what was lent keeps its place in the queue of
   its home, so being lent to can make nobody wait longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from virtualflow_operator.scheduling.demand import Allocation, Demand, Policy
from virtualflow_operator.scheduling.device_kinds import (
    NONE,
    DeviceKind,
    KindAllocation,
    KindDemand,
    joined,
    mixed_speed,
)
from virtualflow_operator.scheduling.homes import HomeChoice, choose_homes
from virtualflow_operator.scheduling.kind_estimates import KnownCurves, know
from virtualflow_operator.scheduling.room import Room
from virtualflow_operator.settings import SchedulingSettings

_FASTER = 1 + 1e-6
"""By less, one more worker is not worth its place."""


def decide_by_kind(
    policy: Policy,
    now: float,
    demands: Sequence[KindDemand],
    kinds: Mapping[str, DeviceKind],
    settings: SchedulingSettings,
    *,
    elastic: bool = True,
) -> dict[str, KindAllocation]:
    """Say what each job gets of each kind.

    As with a :data:`.demand.Policy`, the order of the jobs does not matter, and when every job is ``given`` what it was
    allocated, the same moment's decision is the same.

    Args:
        policy: of the queue.
        kinds: by name; there is at least one.
        elastic: whether the policy gives turns to those who have waited for long, who then keep their home, and lets
            jobs have what those of another kind leave. Not with fixed sizes: there a job has its size or waits.

    Raises:
        ValueError: two jobs bear the same name, or there is no kind.
    """
    if not kinds:
        raise ValueError("a queue that is shared by kind has at least one kind")
    _check_names(demands)
    if len(kinds) == 1:
        return _decide_for_all(policy, now, demands, *next(iter(kinds.items())), settings)
    kinds = dict(sorted(kinds.items()))  # sums of floats are the same in the same order
    demands = sorted(demands, key=lambda demand: demand.job.name)
    known = know(demands, kinds)
    choices = choose_homes(now, demands, kinds, known, settings, turns=elastic)
    found: dict[str, Allocation] = {}
    rooms: dict[str, Room] = {}
    for kind in kinds:
        members = [_at_home(choice.demand, kind, known) for choice in choices if choice.kind == kind]
        decided = policy(now, members, kinds[kind].capacity, settings)
        rooms[kind] = Room(kinds[kind].capacity)
        for member in members:
            if decided[member.name].workers:
                rooms[kind].start(member, decided[member.name].workers)
        found |= decided
    lent = _lend(now, choices, found, rooms, known, settings) if elastic else {}
    return {
        choice.demand.job.name: _allocation(
            choice,
            found.get(choice.demand.job.name),
            lent.get(choice.demand.job.name, {}),
            known,
        )
        for choice in choices
    }


def _decide_for_all(
    policy: Policy, now: float, demands: Sequence[KindDemand], kind: str, of: DeviceKind, settings: SchedulingSettings
) -> dict[str, KindAllocation]:
    """The policy's own answer, where all devices are of one kind."""
    able = [d for d in demands if kind in d.curves and not (d.mobility == "stays" and d.bound and d.home != kind)]
    decided = policy(now, [replace(d.at(kind), curve=d.curves[kind]) for d in able], of.capacity, settings)
    found = {
        name: KindAllocation(joined(kind, a.workers, NONE), kind, a.reason, a.on_demand, a.shortage)
        for name, a in decided.items()
    }
    return {d.job.name: found.get(d.job.name) or _unusable(d) for d in demands}


def _check_names(demands: Sequence[KindDemand]) -> None:
    seen: set[str] = set()
    for demand in demands:
        if demand.job.name in seen:
            raise ValueError(f"two jobs are called {demand.job.name}; give each a name of its own")
        seen.add(demand.job.name)


def _at_home(demand: KindDemand, kind: str, known: Mapping[str, KnownCurves]) -> Demand:
    job = demand.at(kind)
    return replace(job, curve=known[job.name].curve(kind))


def _lend(
    now: float,
    choices: Sequence[HomeChoice],
    found: Mapping[str, Allocation],
    rooms: Mapping[str, Room],
    known: Mapping[str, KnownCurves],
    settings: SchedulingSettings,
) -> dict[str, dict[str, int]]:
    """What jobs get of kinds where they are not at home, by job and kind."""
    lent: dict[str, dict[str, int]] = {}
    able = [choice for choice in choices if choice.kind and choice.demand.mobility != "stays"]
    for choice in able:
        job = choice.demand.job
        answer = found[job.name]
        if answer.workers or answer.shortage is not None:
            continue
        guest = _guest(choice, rooms, known[job.name], settings)
        if guest:
            lent[job.name] = guest
    for choice in able:
        job = choice.demand.job
        if choice.demand.mobility != "mixes":
            continue
        at_home, elsewhere = found[job.name].workers, lent.get(job.name, {})
        if not (at_home or elsewhere):
            continue
        more = _mix(choice, at_home, elsewhere, rooms, known[job.name])
        if at_home and job.allocated and now < job.changed + settings.hold:
            more = {kind: count for kind, held in choice.demand.lent.items() if (count := min(held, more.get(kind, 0)))}
        if more:
            lent[job.name] = more
    return lent


def _guest(
    choice: HomeChoice, rooms: Mapping[str, Room], known: KnownCurves, settings: SchedulingSettings
) -> dict[str, int]:
    """A place to run meanwhile for a job that waits for its home: where it is fastest."""
    job = choice.demand.job
    best: tuple[float, str, int] | None = None
    for kind in known.weights:
        room = rooms[kind]
        if kind == choice.kind or room.lacks(job, job.minimum):
            continue
        most = known.curve(kind).worthwhile(job.minimum, min(job.maximum, room.most(job)), settings.efficiency)
        speed = known.speed(kind, most)
        if best is None or (speed, kind) > best[:2]:
            best = speed, kind, most
    if best is None:
        return {}
    _, kind, workers = best
    rooms[kind].start(job, workers)
    return {kind: workers}


def _mix(
    choice: HomeChoice, at_home: int, elsewhere: Mapping[str, int], rooms: Mapping[str, Room], known: KnownCurves
) -> dict[str, int]:
    """What the job has elsewhere once it has all the workers that make it faster; the fastest kinds first."""
    job = choice.demand.job
    workers = joined(choice.kind, at_home, elsewhere)
    fastest = mixed_speed(known.speed, workers)
    for kind in sorted(known.weights, key=lambda kind: (-known.weights[kind], kind)):
        if kind == choice.kind:
            continue
        room = rooms[kind]
        while sum(workers.values()) < job.maximum and room.most(job):
            tried = workers | {kind: workers.get(kind, 0) + 1}
            reached = mixed_speed(known.speed, tried)
            if reached <= fastest * _FASTER:
                break
            room.grow(job, 1)
            workers, fastest = tried, reached
    return {kind: count for kind, count in workers.items() if kind != choice.kind}


def _allocation(
    choice: HomeChoice,
    answer: Allocation | None,
    lent: Mapping[str, int],
    known: Mapping[str, KnownCurves],
) -> KindAllocation:
    job, home = choice.demand.job, choice.kind
    if answer is None:
        return _unusable(choice.demand)
    reason = f"{answer.reason} (on {home}{known[job.name].told(home)})"
    on_demand = answer.on_demand
    if lent:
        places = " and ".join(f"{count} on {kind}" for kind, count in sorted(lent.items()))
        reason += f"; {'beside that' if answer.workers else 'meanwhile'} {places}, as long as nobody there needs them"
    if lent and not answer.workers and job.minimum_on_demand:
        on_demand = job.minimum
    return KindAllocation(joined(home, answer.workers, lent), home, reason, on_demand, answer.shortage)


def _unusable(demand: KindDemand) -> KindAllocation:
    """For a job that may use nothing of what there is."""
    named = demand.home if demand.bound and demand.mobility == "stays" else ""
    named = named or ", ".join(sorted(demand.curves)) or "none"
    reason = f"cannot run: the queue has no device of a kind that it may use ({named}); add nodes of one"
    return KindAllocation({}, demand.home, reason)

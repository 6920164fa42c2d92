"""Who is in the next generation, and why: one pure function of the time and of what is known.

:func:`decide` is called by the coordinator after every message and when a limit that it named has passed. It has no
clock, no I/O and no memory; the same arguments give the same decision. The rules, first match wins:

1. Nobody trains yet: found the first generation once the wanted workers are ready, or those that are there once the
   start-up grace is over.
2. A member of the running generation is lost: its survivors recover at once (draining ones too, nobody else).
3. A collective broke and nobody is known to be lost: wait a moment for the news, then rebuild over the same members.
4. The job is to stop: everyone leaves at the same step.
5. Members drain or joiners are ready: a planned change, prepared beside the training.

While a job evaluates, only members that drain are a reason for a change: a joiner has no part in an evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from virtualflow.assignment import order_members
from virtualflow.messages import Cause, Generation, Plan
from virtualflow.settings import MembershipSettings


@dataclass(frozen=True)
class Worker:
    """A worker process as the coordinator knows it; times are of the coordinator's monotonic clock."""

    name: str
    incarnation: str
    last_heard: float
    connected: bool = True
    disconnected_at: float = 0.0
    known_in_person: bool = True
    """``False``: only named by others since the coordinator started; it may be on its way."""
    ready_at: float | None = None
    draining: bool = False
    deadline: float | None = None
    gone: str | None = None
    """Why it is known to be gone for ever."""
    left: bool = False
    done: bool = False


@dataclass(frozen=True)
class Cluster:
    """All that a decision is made of. Workers and members are keyed by their incarnation: a name may come again."""

    virtual_nodes: int | None
    wanted: int
    founded_at: float
    """Since when the job waits for its first workers."""
    workers: Mapping[str, Worker] = field(default_factory=dict)
    running: Plan | None = None
    """The newest generation that a worker has entered."""
    proposed: Plan | None = None
    """The newest generation, while nobody has entered it."""
    broken: Mapping[Generation, float] = field(default_factory=dict)
    """Since when a collective of that generation is reported broken."""
    rebuilds: int = 0
    """Communicators rebuilt in a row over unchanged members without a step in between."""
    evaluating: bool = False
    stop: str | None = None
    trained: bool = False
    """A generation has run before (its members may all be lost)."""


@dataclass(frozen=True)
class Proposal:
    """A generation to be made: its members by incarnation, in the order of their ranks."""

    mode: Literal["planned", "recovery"]
    members: tuple[str, ...]
    joiners: tuple[str, ...]
    cause: Cause


@dataclass(frozen=True)
class Decision:
    """What to do now, and why."""

    reason: str
    proposal: Proposal | None = None
    lost: Mapping[str, str] = field(default_factory=dict)
    """Workers given up by this decision, with the reason."""
    fail: bool = False
    """The job cannot go on."""
    wake_at: float | None = None
    """Decide again then at the latest."""


def decide(now: float, cluster: Cluster, settings: MembershipSettings) -> Decision:
    """The membership decision at ``now`` (see the module's text for the rules)."""
    lost = find_lost(now, cluster, settings)
    base = _base(cluster)
    members = tuple(member.incarnation for member in base.members) if base else ()
    survivors = tuple(m for m in members if m not in lost and not _worker(cluster, m).left)
    lost_members = {m: why for m, why in lost.items() if m in members}

    if base is None or (base.members and not survivors):
        return _found(now, cluster, settings, lost)
    if lost_members:
        reason = "; ".join(f"{_worker(cluster, m).name} lost: {why}" for m, why in lost_members.items())
        return Decision(reason, Proposal("recovery", survivors, (), "lost"), lost)
    broken_since = cluster.broken.get(base.generation)
    if broken_since is not None:
        return _rebuild(now, cluster, settings, broken_since, survivors, lost)
    return _plan_change(now, cluster, settings, members, lost)


def find_lost(now: float, cluster: Cluster, settings: MembershipSettings) -> dict[str, str]:
    """Which workers are to be given up now, with the reason for each; those that are through are never lost."""
    lost = {}
    broken = {
        member.incarnation
        for plan in (cluster.running, cluster.proposed)
        if plan is not None and plan.generation in cluster.broken
        for member in plan.members
    }
    for incarnation, worker in cluster.workers.items():
        silence = now - (worker.last_heard if worker.connected else worker.disconnected_at)
        if worker.left or (worker.done and not worker.connected):
            continue
        if worker.gone is not None:
            lost[incarnation] = worker.gone
        elif worker.connected and silence >= settings.heartbeat_limit:
            lost[incarnation] = f"no sign of life for {settings.heartbeat_limit:g} s"
        elif not worker.connected and silence >= settings.heartbeat_limit:
            lost[incarnation] = f"not connected for {settings.heartbeat_limit:g} s"
        elif not worker.connected and incarnation in broken:
            # A connection that closed while a collective broke is a death; a worker that a new coordinator has only
            # heard of may still be on its way.
            grace = 0.0 if worker.known_in_person else settings.reconnect_grace
            if silence >= grace:
                lost[incarnation] = "its connections closed"
    return lost


def next_limit(cluster: Cluster, settings: MembershipSettings) -> float | None:
    """The earliest time at which a worker that stays silent would be given up."""
    limits = []
    for worker in cluster.workers.values():
        if worker.left or worker.gone is not None:
            continue
        if worker.connected:
            limits.append(worker.last_heard + settings.heartbeat_limit)
        elif not worker.done:
            limits.append(worker.disconnected_at + settings.heartbeat_limit)
            if cluster.broken:
                limits.append(worker.disconnected_at + settings.reconnect_grace)
    return min(limits, default=None)


def _base(cluster: Cluster) -> Plan | None:
    """The generation whose members are at stake: a planned change that nobody has entered leaves the running one so."""
    if cluster.proposed is None:
        return cluster.running
    if cluster.proposed.mode == "planned" and cluster.running is not None:
        return cluster.running
    return cluster.proposed


def _worker(cluster: Cluster, incarnation: str) -> Worker:
    return cluster.workers[incarnation]


def _ready(cluster: Cluster, lost: Mapping[str, str]) -> list[Worker]:
    """Workers that could enter a generation, those that have waited longest first."""
    ready = [
        worker
        for worker in cluster.workers.values()
        if worker.ready_at is not None
        and worker.connected
        and worker.incarnation not in lost
        and not (worker.draining or worker.left or worker.done)
    ]
    return sorted(ready, key=lambda worker: (worker.ready_at or 0.0, worker.name))


def _found(now: float, cluster: Cluster, settings: MembershipSettings, lost: dict[str, str]) -> Decision:
    again = "no worker survived; " if cluster.trained else ""
    if cluster.stop is not None:
        return Decision(f"{again}stopping: {cluster.stop}", lost=lost)
    ready = _ready(cluster, lost)
    wanted = min(cluster.wanted, cluster.virtual_nodes or cluster.wanted)
    start_at = cluster.founded_at + settings.startup_grace
    if len(ready) < wanted and (now < start_at or not ready):
        reason = f"{again}waiting for workers: {len(ready)} of {wanted} ready"
        return Decision(reason, lost=lost, wake_at=start_at if ready and now < start_at else None)
    chosen = sorted(ready[: cluster.virtual_nodes], key=lambda worker: _natural(worker.name))
    members = tuple(worker.incarnation for worker in chosen)
    cause: Cause = "restart" if cluster.trained else "start"
    reason = f"{again}starting with {_count(len(members))}"
    return Decision(reason, Proposal("recovery", members, members, cause), lost)


def _rebuild(
    now: float,
    cluster: Cluster,
    settings: MembershipSettings,
    broken_since: float,
    survivors: tuple[str, ...],
    lost: dict[str, str],
) -> Decision:
    missing = [_worker(cluster, m) for m in survivors if not _worker(cluster, m).connected]
    if missing:
        names = ", ".join(worker.name for worker in missing)
        wake = min(worker.disconnected_at for worker in missing) + settings.reconnect_grace
        return Decision(f"a collective broke; waiting for news of {names}", lost=lost, wake_at=wake)
    if now < broken_since + settings.suspicion_grace:
        wake = broken_since + settings.suspicion_grace
        return Decision("a collective broke; waiting for the news of who is lost", lost=lost, wake_at=wake)
    if cluster.rebuilds >= settings.rebuilds:
        reason = (
            f"the communicator between the workers broke {cluster.rebuilds} times in a row with nobody lost; "
            "check that the workers reach each other's addresses"
        )
        return Decision(reason, lost=lost, fail=True)
    reason = "the communicator broke with nobody lost: rebuilding it"
    return Decision(reason, Proposal("recovery", survivors, (), "broken"), lost)


def _plan_change(
    now: float, cluster: Cluster, settings: MembershipSettings, members: tuple[str, ...], lost: dict[str, str]
) -> Decision:
    latest = cluster.proposed or cluster.running
    assert latest is not None  # _found() answers otherwise
    newest = tuple(member.incarnation for member in latest.members)
    stay = [m for m in members if not _worker(cluster, m).draining and not _worker(cluster, m).left]
    leaving = [_worker(cluster, m) for m in members if m not in stay]
    if cluster.stop is not None:
        return _propose((), (), "stop", f"stopping: {cluster.stop}", newest, lost)
    if not newest and not leaving:
        return Decision("everyone has left", lost=lost)
    if cluster.evaluating and not leaving:
        return Decision(f"{_count(len(members))} evaluating; changes wait", lost=lost)

    joiners: list[Worker] = []
    wake_at = None
    if not cluster.evaluating:
        room = (cluster.virtual_nodes or len(members)) - len(stay)
        joiners = [worker for worker in _ready(cluster, lost) if worker.incarnation not in members][: max(room, 0)]
        complete = len(stay) + len(joiners) >= cluster.wanted or not stay
        if joiners and not complete and not any(joiner.incarnation in newest for joiner in joiners):
            window_ends = (joiners[0].ready_at or now) + settings.admission_window
            if now < window_ends:
                joiners, wake_at = [], window_ends
    if not stay and not joiners:
        deadline = min((w.deadline for w in leaving if w.deadline is not None), default=now)
        if now < deadline - settings.drain_margin:
            names = ", ".join(worker.name for worker in leaving)
            reason = f"{names} drains and nobody else is there: training on until a replacement is ready"
            return Decision(reason, lost=lost, wake_at=deadline - settings.drain_margin)
        return _propose((), (), "stop", "the last worker leaves", newest, lost)

    target = [*stay, *(joiner.incarnation for joiner in joiners)]
    first = {m.incarnation: m.first for m in (cluster.running or latest).members}
    target = order_members(first, target)
    arriving = [joiner for joiner in joiners if joiner.incarnation in target]
    parts = [f"{worker.name} joins" for worker in arriving] + [f"{worker.name} drains" for worker in leaving]
    reason = ", ".join(parts) or f"{_count(len(target))} training"
    cause: Cause = "resize" if arriving and leaving else "join" if arriving else "drain" if leaving else "broken"
    arrivals = tuple(worker.incarnation for worker in arriving)
    decision = _propose(tuple(target), arrivals, cause, reason, newest, lost)
    if decision.proposal is None and latest.generation in cluster.broken and latest is cluster.proposed:
        # The communicator of a planned change could not be built: try again, the training goes on meanwhile.
        retry_at = cluster.broken[latest.generation] + settings.reconnect_grace
        if now >= retry_at:
            return Decision(reason, Proposal("planned", tuple(target), arrivals, cause), lost)
        wake_at = retry_at
    return decision if wake_at is None else Decision(decision.reason, decision.proposal, decision.lost, wake_at=wake_at)


def _propose(
    target: tuple[str, ...],
    joiners: tuple[str, ...],
    cause: Cause,
    reason: str,
    newest: tuple[str, ...],
    lost: dict[str, str],
) -> Decision:
    """Propose ``target`` unless the newest generation has these members already."""
    if set(target) == set(newest):
        return Decision(reason, lost=lost)
    return Decision(reason, Proposal("planned", target, joiners, cause), lost)


def _natural(name: str) -> tuple[str, int]:
    """Sort key: ``worker-10`` comes after ``worker-9``."""
    head = name.rstrip("0123456789")
    tail = name[len(head) :]
    return head, int(tail) if tail else -1


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"

"""Who is in the next generation, and why: one pure function of the time and of what is known.

:func:`decide` is called by the coordinator after every message and when a limit that it named has passed. It has no
clock, no I/O and no memory; the same arguments give the same decision. The rules, first match wins:

1. Nobody trains yet: start with the first generation once the wanted workers are ready. Once the minimum is, the
   others are waited for as long as the start-up grace; with fewer than the minimum, nothing begins, nor while somebody
   may train elsewhere. An initial start that loses a worker goes on with the others, unless they are too few and could
   not have begun yet.
2. Nobody who has the training's state is left: the generation is over, and the job waits for workers as if it began.
3. A member is lost: its survivors recover at once (draining ones too, nobody else), if no others could go on as well
   (:mod:`virtualflow.protocol.lineage`); else when the end of those is confirmed, and nobody may train elsewhere.
4. A collective broke and nobody is known to be lost: wait a moment for the news, then rebuild over the same members.
5. A change is under way, or a joiner is receiving the state: everything else waits until all members have entered.
6. The job is to stop: everyone leaves at the same step.
7. Members drain or joiners are ready: a planned change, prepared beside the training
   (:mod:`virtualflow.coordinator.planned_changes`, which also decides 5 and 6).

The state lives in the members alone, so no proposal ever replaces all of them at once.

A worker may be several processes, each of them a member: they enter together, drain together, and all are lost with
the first.
"""

from __future__ import annotations

from collections.abc import Collection

from virtualflow.coordinator.hangs import find_hung
from virtualflow.coordinator.planned_changes import plan_change
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.coordinator.snapshot import (
    Cluster,
    Decision,
    Proposal,
    Worker,
    listed,
    processes_of,
    ready_since,
    ready_workers,
    within,
)
from virtualflow.protocol.lineage import Stage, open_members
from virtualflow.protocol.messages import Cause, Plan
from virtualflow.protocol.wording import counted


def decide(now: float, cluster: Cluster, settings: MembershipSettings) -> Decision:
    """The membership decision at ``now`` (see the module's text for the rules)."""
    lost = find_lost(now, cluster, settings)
    running, proposed, workers = cluster.running, cluster.proposed, cluster.workers
    # A planned change that nobody has entered leaves the running generation at stake, a recovery takes its place.
    base = proposed if proposed is not None and (proposed.mode == "recovery" or running is None) else running
    if base is None:
        return _start(now, cluster, settings, lost)
    members = tuple(member.incarnation for member in base.members)
    survivors = tuple(m for m in members if m not in lost and not workers[m].left)
    broken_since = cluster.broken.get(base.generation)
    # One that leaves the running generation with the others' agreement does so by the next one: others may be in it.
    gone = {m for m in members if workers[m].left and (base is proposed or workers[m].deserted)}
    missing = [m for m in members if m in lost or (m in gone and (base is proposed or broken_since is not None))]
    first_of_each = {workers[m].launch_id: m for m in reversed(missing)}
    ends = {
        m: "left" if workers[m].left else f"lost: {lost[m]}"
        for m in missing
        if first_of_each[workers[m].launch_id] == m
    }
    reason = listed([f"{workers[m].name} {end}" for m, end in ends.items()])
    if not members:
        late = [
            w.name for i, w in workers.items() if w.entered is not None and i not in lost and not (w.left or w.through)
        ]
        if late:
            return Decision(f"waiting for {listed([*dict.fromkeys(late)])} to leave")
        return Decision("the last worker has left", over=True)
    if running is not None:
        # It was proposed before the running generation was known here: those who are in that alone must agree, too.
        there = [member.incarnation for member in running.members]
        others = set(there).difference(members, lost)  # a large job's, so nobody is looked for in a tuple
        survivors += tuple(m for m in there if m in others and workers[m].present)
    if missing or not survivors or broken_since is not None:
        in_order = frozenset(i for i, worker in workers.items() if worker.left or worker.through)
        objectors = _find_objectors(cluster, survivors, cluster.ended | in_order)
        if objectors:
            # Of those who were to begin elsewhere, some may be here and have no place in this beginning.
            agreed = _find_beginning(cluster, survivors, lost, in_order) if running is None else ()
            if agreed:
                return Decision(
                    f"{reason or 'a collective broke'}; beginning with those who were to begin before",
                    Proposal("recovery", agreed, agreed, base.cause),
                )
            left = len(cluster.by_worker(survivors))
            return Decision(f"{reason or 'a collective broke'}; {_wait_for(objectors, left)}")
        if cluster.unheard != frozenset() and _find_objectors(cluster, survivors, in_order):
            # Those who have ended may have handed the training on, before, to workers that were never heard here.
            return Decision(f"{reason or 'a collective broke'}; {_wait_for_word(cluster.unheard)}")
    if not survivors:
        return Decision("no worker survived", over=True)
    if running is not None:
        survivors = tuple(m for m in survivors if not workers[m].through)
        if not survivors:
            return Decision("all workers are through")
        if not any(workers[m].may_have_state for m in survivors):
            return Decision("nobody who has the state of the training survived", over=True)
    starting = running is None
    joiners = survivors if starting else ()
    cause: Cause = base.cause if starting else "lost"

    if missing:
        if starting and not cluster.prepared and len(survivors) < cluster.fewest:
            return Decision(f"{reason}; at least {counted(cluster.fewest, 'worker')} needed to start", over=True)
        return Decision(reason, Proposal("recovery", survivors, joiners, cause))
    if broken_since is not None:
        proposal = Proposal("recovery", survivors, joiners, base.cause if starting else "broken")
        return _rebuild(now, cluster, settings, broken_since, proposal)
    if base is proposed:
        return Decision(base.reason)
    return plan_change(now, cluster, settings, lost)


def find_lost(now: float, cluster: Cluster, settings: MembershipSettings) -> dict[str, str]:
    """Which workers are declared lost at ``now``, with the reason for each; those that are through are never lost."""
    lost = {}
    for incarnation, limit, why in _limits(now, cluster, settings):
        if limit <= now and incarnation not in lost:
            lost[incarnation] = why
    return _with_siblings(cluster, {**find_hung(cluster, settings), **lost})


def _with_siblings(cluster: Cluster, lost: dict[str, str]) -> dict[str, str]:
    """These, and the other processes of their workers: none of them can do anything alone.

    So it is with those whose sibling has gone by itself, unless they are on their way to leave as well.
    """
    several = {i: worker for i, worker in cluster.workers.items() if worker.launch}
    broken = {worker.launch: lost[i] for i, worker in several.items() if i in lost}
    deserted = {worker.launch for worker in several.values() if worker.deserted}
    for i, worker in several.items():
        if worker.left or worker.done or i in lost:
            continue
        if worker.launch in broken:
            lost[i] = broken[worker.launch]
        elif worker.launch in deserted and not worker.draining:
            lost[i] = "another process of it has ended its training"
    return lost


def _find_objectors(cluster: Cluster, survivors: Collection[str], ended: Collection[str]) -> list[str]:
    """Names of the processes that could go on without ``survivors``, but for those that have ended."""
    objectors = {}
    for plan, stage in _stages(cluster, survivors):
        open_ = open_members(plan, stage, survivors, ended)
        objectors.update({x.launch_id: x.worker for x in plan.members if x.incarnation in open_})
    return sorted(objectors.values())


def _stages(cluster: Cluster, survivors: Collection[str]) -> list[tuple[Plan, Stage]]:
    """The generations that may count as far as is known here, and what workers may know of each."""
    running, proposed = cluster.running, cluster.proposed
    stages: list[tuple[Plan, Stage]] = [
        (plan, "settled" if plan.generation <= cluster.settled else "attempted") for plan in cluster.contested
    ]
    if running is not None:
        stages.append((running, "settled" if running.generation <= cluster.settled else "counted"))
    if proposed is not None and (running is not None or cluster.prepared or not survivors):
        # A survivor of an initial start knows whether it has begun, and says so when it enters another generation.
        stages.append((proposed, "attempted"))
    return stages


def _find_beginning(
    cluster: Cluster, survivors: Collection[str], lost: dict[str, str], in_order: frozenset[str]
) -> tuple[str, ...]:
    """Members of a beginning to which nobody objects: of the survivors, and of all who wait here; empty: there is none.

    Two coordinators may each have called some of the workers to begin, and neither generation counts: a majority of
    both is needed, and not more members than virtual nodes.
    """
    ended = in_order if cluster.unheard != frozenset() else cluster.ended | in_order
    stages = _stages(cluster, survivors)
    waiting = (worker.incarnation for worker in processes_of(ready_workers(cluster, lost)))
    here = list(dict.fromkeys((*survivors, *waiting)))
    launched = {x[0].launch_id: [process.incarnation for process in x] for x in cluster.by_worker(here)}
    plans = {i: sum(plan.includes(i) for plan, _ in stages) for i in here}
    most_called = sorted(here, key=lambda i: -plans[i])
    chosen: list[str] = []
    for plan, stage in stages:
        while open_ := open_members(plan, stage, chosen, ended):
            called = next((i for i in most_called if i in open_), None)
            if called is None:
                return ()
            chosen += launched[cluster.workers[called].launch_id]
    limit = cluster.virtual_nodes or len(here)
    if len(chosen) > limit:
        return ()
    fitting = processes_of(within(cluster.by_worker(dict.fromkeys((*chosen, *survivors))), limit))
    return tuple(worker.incarnation for worker in fitting)


def _wait_for(objectors: list[str], survivors: int) -> str:
    names = listed(objectors)
    return (
        f"{counted(survivors, 'worker')} left, which is no majority: waiting for the word of whoever runs {names} that "
        f"{'it has' if len(objectors) == 1 else 'they have'} ended"
    )


def _wait_for_word(unheard: frozenset[str] | None) -> str:
    if unheard is None:
        return "waiting for the word of whoever runs the workers that nobody trains elsewhere"
    it, they_have = ("it", "it has") if len(unheard) == 1 else ("them", "they have")
    names = listed(sorted(unheard)).replace("; ", ", ")
    return (
        f"{names} may train elsewhere: waiting for {it} to come, or for the word of whoever runs {it} that {they_have} "
        "ended"
    )


def find_suspects(now: float, cluster: Cluster, settings: MembershipSettings) -> frozenset[str] | None:
    """Whom it may be due to that the proposed generation cannot be built although nobody of it is lost.

    Returns:
        The workers whose failures are to be counted, for this generation once and for all; ``None``: not now.
    """
    plan, running, workers = cluster.proposed, cluster.running, cluster.workers
    if plan is None or plan.generation <= cluster.failures_counted or plan.generation not in cluster.broken:
        return None
    members = frozenset(member.incarnation for member in plan.members)
    if not all(workers[i].present and workers[i].connected for i in members):
        return None
    planned = plan.mode == "planned"
    if now < cluster.broken[plan.generation] + (settings.reconnect_grace if planned else settings.suspicion_grace):
        return None
    if planned:
        arriving = members - {member.incarnation for member in (running.members if running is not None else ())}
        return arriving & cluster.absent or arriving
    long_enough = now - cluster.proposed_at >= settings.heartbeat_limit
    return cluster.absent if long_enough and cluster.absent < members else frozenset()


def build_ends(cluster: Cluster, settings: MembershipSettings) -> float | None:
    """When the proposed generation counts as broken, if nothing more is heard of it; ``None``: that is not near."""
    plan = cluster.proposed
    if plan is None or cluster.prepared or plan.generation in cluster.broken:
        return None
    members = (cluster.workers[member.incarnation] for member in plan.members)
    if not all(worker.present and worker.connected for worker in members):
        return None
    return cluster.proposed_at + settings.build_limit


def next_limit(now: float, cluster: Cluster, settings: MembershipSettings) -> float | None:
    """The earliest time after ``now`` at which a worker that stays silent would be declared lost."""
    return min((limit for _, limit, _ in _limits(now, cluster, settings) if limit > now), default=None)


def _limits(now: float, cluster: Cluster, settings: MembershipSettings) -> list[tuple[str, float, str]]:
    """When each worker is declared lost if nothing more is heard of it, and why: the most telling reason first."""
    running, proposed = cluster.running, cluster.proposed
    torn = {
        member.incarnation
        for plan in (running, proposed)
        if plan is not None and plan.generation in cluster.broken
        for member in plan.members
    }
    awaited = (
        {x.incarnation for x in proposed.members} if proposed is not None and proposed.mode == "recovery" else set()
    )
    # Where none of those who train is connected and heard of, closed connections are no news of them either.
    heard_at = cluster.heard_at
    isolated = cluster.isolated or now - heard_at >= settings.heartbeat_limit
    wanted = frozenset() if isolated else torn | awaited
    limits: list[tuple[str, float, str]] = []
    for i, worker in cluster.workers.items():
        if worker.left:
            continue
        if worker.gone is not None:
            limits.append((i, float("-inf"), worker.gone))
            continue
        if worker.failures >= settings.join_attempts:
            limits.append((i, float("-inf"), f"it could not be connected with the others {worker.failures} times"))
        since = worker.last_heard if worker.connected else worker.disconnected_at
        # A thousand that come back at once wait for one another: who is still away may be next.
        returns = not worker.connected and cluster.may_return(worker, settings.reconnect_grace)
        newest = cluster.returned_at if returns else float("-inf")
        since = max(since, newest)
        silence_ends = _silence_ends(now, since, _heard_at(cluster, worker, heard_at), settings)
        silence = f"for {silence_ends - since:.4g} s"
        if worker.connected:
            limits.append((i, silence_ends, f"no sign of life {silence}"))
            continue
        if i in wanted:
            why = "its connections closed" if i in torn else "not connected when it was needed"
            ends = worker.disconnected_at + _grace(worker, i in torn, cluster, settings)
            limits.append((i, max(ends, newest + settings.reconnect_grace), why))
        if not worker.through:
            limits.append((i, silence_ends, f"not connected {silence}"))
    return limits


def _grace(worker: Worker, torn: bool, cluster: Cluster, settings: MembershipSettings) -> float:
    """How long others who need that worker now wait for it to connect again.

    A connection that closed while a collective broke is a death. But a worker that a new coordinator has only heard of
    may still be on its way, and where the coordinator itself did not run or was cut off, all connections have closed.
    """
    if worker.disconnected_at <= cluster.excused_at + settings.reconnect_grace:
        return settings.restart_grace
    return 0.0 if torn and worker.known_in_person and not worker.done else settings.reconnect_grace


def _heard_at(cluster: Cluster, worker: Worker, heard_at: float) -> float:
    """When somebody was last heard of to whom the training that this worker may be in would be known.

    Where nobody trains, a worker is only waited for, and its silence tells all; unless it may train elsewhere, with a
    state that it got just before the others were lost.

    Args:
        heard_at: ``cluster.heard_at``, which looks at all of them.
    """
    if cluster.running is not None or cluster.proposed is not None:
        return heard_at
    elsewhere = cluster.unheard is None or worker.name in cluster.unheard
    return float("-inf") if elsewhere and not worker.connected else float("inf")


def _silence_ends(now: float, since: float, heard_at: float, settings: MembershipSettings) -> float:
    """When a worker that is silent ``since`` then is lost.

    Its silence tells something of it only if somebody who trains was heard of meanwhile, well after that began.
    """
    limit = since + settings.heartbeat_limit
    told = heard_at >= since + settings.heartbeat_limit / 2
    return limit if told or now < limit else since + settings.silence_patience * settings.heartbeat_limit


def _start(now: float, cluster: Cluster, settings: MembershipSettings, lost: dict[str, str]) -> Decision:
    again = "no worker survived; " if cluster.trained else ""
    if cluster.stop is not None:
        return Decision(f"{again}stopping: {cluster.stop}")
    ready = ready_workers(cluster, lost)
    fewest = cluster.fewest
    wanted = max(fewest, min(cluster.wanted, cluster.most or cluster.wanted))
    reason = f"{again}waiting for workers: {len(ready)} of {wanted} ready"
    if len(ready) < fewest:
        return Decision(f"{reason}, at least {fewest} needed" if fewest > 1 else reason)
    if len(ready) < wanted:
        enough_since = sorted(map(ready_since, ready))[fewest - 1]
        start_at = max(cluster.waiting_since, enough_since) + settings.startup_grace
        if now < start_at:
            return Decision(reason, wake_at=start_at)
    if cluster.unheard is None or cluster.unheard:
        return Decision(f"{again}{counted(len(ready), 'worker')} ready; {_wait_for_word(cluster.unheard)}")
    listen_until = cluster.waiting_since + settings.restart_grace
    if not (cluster.trained or cluster.confirmed) and now < listen_until:
        return Decision("listening for workers that train already", wake_at=listen_until)
    chosen = within(ready, cluster.virtual_nodes)
    if not chosen:
        return Decision(
            f"a worker has {len(ready[0])} processes and the job "
            f"{counted(cluster.virtual_nodes or 0, 'virtual node')}, of which each process is assigned at least one; "
            "give the job more virtual nodes, or its workers fewer processes",
            fail=True,
        )
    # As ``order_members`` does: of neighbours, each is of another worker.
    ranked = sorted(
        processes_of(chosen), key=lambda worker: (worker.local_rank, _natural(worker.name), worker.launch_id)
    )
    members = tuple(worker.incarnation for worker in ranked)
    cause: Cause = "restart" if cluster.trained else "start"
    return Decision(
        f"{again}starting with {counted(len(chosen), 'worker')}", Proposal("recovery", members, members, cause)
    )


def _rebuild(
    now: float, cluster: Cluster, settings: MembershipSettings, broken_since: float, proposal: Proposal
) -> Decision:
    missing = [w for w in (cluster.workers[m] for m in proposal.members) if not w.connected]
    if missing:
        names = listed(cluster.names(worker.incarnation for worker in missing))
        wake = min(worker.disconnected_at for worker in missing) + settings.reconnect_grace
        return Decision(f"a collective broke; waiting for news of {names}", wake_at=wake)
    settled_at = broken_since + settings.suspicion_grace
    if now < settled_at:
        return Decision("a collective broke; waiting for the news of who is lost", wake_at=settled_at)
    if cluster.rebuilds >= settings.rebuilds:
        reason = (
            f"the communicator between the workers broke {cluster.rebuilds} times in a row with nobody lost; "
            "check that the workers reach each other's addresses"
        )
        return Decision(reason, fail=True)
    return Decision("the communicator broke with nobody lost: rebuilding it", proposal)


def _natural(name: str) -> tuple[str, int]:
    """Sort key: ``worker-10`` comes after ``worker-9``."""
    stem = name.rstrip("0123456789")
    number = name[len(stem) :]
    return stem, int(number) if number else -1

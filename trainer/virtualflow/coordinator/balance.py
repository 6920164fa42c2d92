"""The split of the virtual nodes by the workers' speeds, and whether another is worth a change.

Pure, like the membership decision that it serves. A worker's *pace* is its computing time per virtual node: as
measured while it trained, else by a profile of its device, else what is usual among the others. A step takes as long
as its slowest worker computes, and the rest (gradient synchronization, update) on top, which no split changes.

An uneven split must be worth it: ranges that are not aligned to the tree cost more buffers and traffic. So where an
even one is about as good, it is taken, and then noise does not move virtual nodes to and fro.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from virtualflow.coordinator.assignment import assign
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.coordinator.snapshot import Cluster, Worker
from virtualflow.protocol.messages import Pace


def split(cluster: Cluster, members: Sequence[str], settings: MembershipSettings) -> list[range]:
    """What each of ``members`` is assigned in a generation of them, in their order."""
    virtual_nodes = cluster.virtual_nodes or len(members)
    even = assign(virtual_nodes, [1.0] * len(members))
    paces = expected_paces([cluster.workers[member] for member in members])
    if paces is None:
        return even
    best = assign(virtual_nodes, [1.0 / pace for pace in paces])
    rest = least_rest([cluster.workers[member] for member in members])
    worth = gain(_slowest(even, paces), _slowest(best, paces), rest) >= settings.rebalance_gain
    return best if worth else even


def predicted_step(cluster: Cluster) -> float | None:
    """Seconds that a step of the running generation should take; ``None`` while a member's pace is not known."""
    if cluster.running is None or not cluster.running.members:
        return None
    workers = [cluster.workers[member.incarnation] for member in cluster.running.members]
    paces = [known_pace(worker) for worker in workers]
    assigned = [member.virtual_nodes for member in cluster.running.members]
    known = [pace for pace in paces if pace is not None]
    return None if len(known) < len(paces) else _slowest(assigned, known) + least_rest(workers)


def better_split(cluster: Cluster, settings: MembershipSettings) -> str | None:
    """Why the members of the running generation should divide the virtual nodes otherwise; ``None``: they should not.

    All of them must have been measured in this generation, and the gain must be there even if each worker that gets
    less was as fast as in the better quarter of its samples, and each that gets more as slow as in the worse one.
    """
    running = cluster.running
    if running is None or len(running.members) < 2:
        return None
    workers = [cluster.workers[member.incarnation] for member in running.members]
    measured = [w.pace for w in workers if w.pace is not None and w.pace.generation == running.generation]
    if len(measured) < len(workers):
        return None
    present = [member.virtual_nodes for member in running.members]
    medians, rest = [pace.median for pace in measured], least_rest(workers)
    # No split is faster than all workers computing all the time: mostly this says at once that nothing can be gained.
    bound = sum(map(len, present)) / sum(1.0 / pace for pace in medians)
    if gain(_slowest(present, medians), bound, rest) < settings.rebalance_gain:
        return None
    target = split(cluster, [member.incarnation for member in running.members], settings)
    careful = [_careful(pace, len(t) - len(p)) for pace, p, t in zip(measured, present, target, strict=True)]
    if gain(_slowest(present, careful), _slowest(target, careful), rest) < settings.rebalance_gain:
        return None
    last = max(range(len(workers)), key=lambda rank: len(present[rank]) * medians[rank])
    before, after = _slowest(present, medians) + rest, _slowest(target, medians) + rest
    return (
        f"{workers[last].name} needs {1_000 * medians[last]:.3g} ms for each of its {len(present[last])} virtual nodes "
        f"and the others wait for it: with {len(target[last])}, a step takes {1_000 * after:.3g} ms instead of "
        f"{1_000 * before:.3g}"
    )


def known_pace(worker: Worker) -> float | None:
    """Seconds per virtual node of that worker, as measured or else by a profile."""
    return worker.guess if worker.pace is None else worker.pace.median


def expected_paces(workers: Sequence[Worker]) -> list[float] | None:
    """Seconds per virtual node of each; one of which nothing is known is as fast as the others. ``None``: all are."""
    paces = [known_pace(worker) for worker in workers]
    known = [pace for pace in paces if pace is not None]
    if not known:
        return None
    usual = statistics.median(known)
    return [usual if pace is None else pace for pace in paces]


def least_rest(workers: Sequence[Worker]) -> float:
    """Seconds of a step that are no computing: of whoever waits least for others, since all the rest are waiting."""
    return min((worker.pace.rest for worker in workers if worker.pace is not None), default=0.0)


def gain(before: float, after: float, rest: float) -> float:
    """By which share of it a step becomes shorter when its slowest worker computes ``after`` instead of ``before``."""
    return (before - after) / (before + rest)


def _slowest(assigned: Sequence[range], paces: Sequence[float]) -> float:
    return max(len(nodes) * pace for nodes, pace in zip(assigned, paces, strict=True))


def _careful(pace: Pace, more: int) -> float:
    return pace.high if more > 0 else pace.low if more < 0 else pace.median

"""The split of the virtual nodes by the workers' speeds, and whether another is worth a change.

Pure, like the membership decision that it serves. A worker's *pace* is its computing time per virtual node: as
measured while it trained, else by a profile of its device, else what is usual among the others. A step takes as long
as its slowest worker computes, and the rest (gradient synchronization, update) on top, which no split changes.

Where backward passes of some virtual nodes end early (:class:`~virtualflow.protocol.settings.PassClass`), a pace is
that of a virtual node with a whole pass, and a virtual node counts for what it costs. Where they are the same ones for
a job's life, workers with less memory stand behind those with more, and are assigned only classes whose passes reach no
larger part of the blocks than their memory is of the largest: what activations take goes with that. If these are too
few for all, somebody is assigned more. Which virtual nodes a worker is assigned changes no bit.

A virtual node need not take as long under another load: a process with a CPU quota is fast until it has used that up.
So what a worker has measured under former loads counts too, until its speed changes: with more virtual nodes it takes
no less time than it took with fewer. Otherwise two splits that both look better from the other one would follow each
other for ever.

An uneven split must be worth it: ranges that are not aligned to the tree cost more buffers and traffic. So where an
even one is about as good, it is taken, and then noise does not move virtual nodes to and fro.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from virtualflow.coordinator.assignment import assign, assign_by_cost, assign_by_time
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.coordinator.snapshot import Cluster, LoadTime, Worker
from virtualflow.protocol.messages import Pace
from virtualflow.protocol.settings import PassClass, class_of
from virtualflow.protocol.wording import counted

KNOWN_LOADS = 16
"""Loads of a worker that are remembered: the latest."""
KNOWN_FIRST, KNOWN_FOR = 4.0, 60.0
"""Seconds for which a former load counts: whether it was only the speed of that time is tried again then. They double
with each load that a worker has come back to in vain, up to the second number."""
SLOW = 0.1
"""By this share a slow worker takes longer than usual."""
CHANGED = 1.1
"""The speed of a worker has changed if even the nearer quartiles are apart by this factor."""


def arrange(cluster: Cluster, members: Sequence[str]) -> tuple[str, ...]:
    """``members`` in the order in which they are assigned virtual nodes: as they are, but the most memory first."""
    if not _falls(cluster.classes):
        return tuple(members)
    shares = _shares_of_memory([cluster.workers[member] for member in members])
    by_share = sorted(zip(members, shares, strict=True), key=lambda pair: -pair[1])
    return tuple(member for member, _ in by_share)


def note_pace(cluster: Cluster, worker: Worker, pace: Pace, now: float) -> tuple[LoadTime, ...]:
    """What is known of ``worker`` under each load, now that it has told this pace; other generations' say nothing."""
    running = cluster.running
    members = running.members if running is not None and running.generation == pace.generation else ()
    own = next((member.virtual_nodes for member in members if member.incarnation == worker.incarnation), None)
    if own is None:
        return worker.times
    (load,) = _loads(cluster, [own])
    present = next((one for one in worker.times if one.load == load), LoadTime(load, pace, pace, now))
    back = present in worker.times and worker.times[-1] is not present
    latest = replace(present, pace=pace, at=now, visits=present.visits + back)
    if pace.low > CHANGED * present.first.high or CHANGED * pace.high < present.first.low:
        return (replace(latest, first=pace, visits=1),)
    return (*[one for one in worker.times if one.load != load][1 - KNOWN_LOADS :], latest)


def split(cluster: Cluster, members: Sequence[str], settings: MembershipSettings, now: float) -> list[range]:
    """What each of ``members`` is assigned in a generation of them, in their order."""
    workers = [cluster.workers[member] for member in members]
    even = _divide(cluster, workers, [1.0] * len(workers))
    paces = expected_paces(workers)
    if paces is None:
        return even
    best = _divide_by_time(cluster, workers, paces, now)
    before, after = (_slowest(_loads(cluster, ranges), paces, workers, now) for ranges in (even, best))
    worth = gain(before, after, least_rest(workers)) >= settings.rebalance_gain
    return best if worth else even


def predicted_step(cluster: Cluster) -> float | None:
    """Seconds that a step of the running generation should take; ``None`` while a member's pace is not known."""
    computing = predicted_computing(cluster)
    return None if computing is None else computing + least_rest(_members(cluster))


def predicted_computing(cluster: Cluster) -> float | None:
    """For how many of these its slowest member computes."""
    if cluster.running is None or not cluster.running.members:
        return None
    paces = [known_pace(worker) for worker in _members(cluster)]
    loads = _loads(cluster, [member.virtual_nodes for member in cluster.running.members])
    known = [pace for pace in paces if pace is not None]
    return None if len(known) < len(paces) else _slowest(loads, known)


def _members(cluster: Cluster) -> list[Worker]:
    return [cluster.workers[member.incarnation] for member in cluster.running.members] if cluster.running else []


def better_split(cluster: Cluster, settings: MembershipSettings, now: float) -> str | None:
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
    loads = _loads(cluster, present)
    medians, rest = [pace.median for pace in measured], least_rest(workers)
    # No split is faster than all workers computing all the time: mostly this says at once that nothing can be gained.
    bound = sum(loads) / sum(1.0 / pace for pace in medians)
    if gain(_slowest(loads, medians), bound, rest) < settings.rebalance_gain:
        return None
    target = split(cluster, [member.incarnation for member in running.members], settings, now)
    wanted = _loads(cluster, target)
    careful = [_careful(pace, after - before) for pace, before, after in zip(measured, loads, wanted, strict=True)]
    present_time, other = _slowest(loads, careful), _slowest(wanted, careful, workers, now)
    if gain(present_time, other, rest) < settings.rebalance_gain:
        return None
    last = max(range(len(workers)), key=lambda rank: loads[rank] * medians[rank])
    before, after = _slowest(loads, medians) + rest, _slowest(wanted, medians, workers, now) + rest
    each = 1_000 * loads[last] * medians[last] / len(present[last])
    return (
        f"{workers[last].name} needs {each:.3g} ms for each of its {counted(len(present[last]), 'virtual node')} "
        f"and the others wait for it: with {len(target[last])}, a step takes {1_000 * after:.3g} ms instead of "
        f"{1_000 * before:.3g}"
    )


def slow_workers(cluster: Cluster) -> dict[str, float]:
    """Which members are slower than the others, and how many times the usual pace each takes.

    Usual is the median of what the members measured, of two the faster. A worker is slower if it is so by ``SLOW``
    even with its own better and the usual worse quartile.
    """
    measured = [(worker, worker.pace) for worker in _members(cluster) if worker.pace is not None]
    paces = sorted((pace for _, pace in measured), key=lambda pace: pace.median)
    if not paces:
        return {}
    usual = paces[(len(paces) - 1) // 2]
    return {
        worker.incarnation: pace.median / usual.median
        for worker, pace in measured
        if gain(pace.low, usual.high, 0.0) >= SLOW
    }


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


def _divide(cluster: Cluster, workers: Sequence[Worker], speeds: Sequence[float]) -> list[range]:
    """The virtual nodes among workers that are so fast."""
    classes, virtual_nodes = cluster.classes, cluster.virtual_nodes or len(workers)
    if len({one.cost for one in classes}) <= 1 or len(workers) > virtual_nodes:
        return assign(virtual_nodes, speeds)
    shares = _shares_of_memory(workers) if _falls(classes) else [1.0] * len(workers)
    earliest = [_first_within(share, classes, virtual_nodes) for share in shares]
    return assign_by_cost(_costs_until(classes, virtual_nodes), speeds, earliest)


def _loads(cluster: Cluster, assigned: Sequence[range]) -> list[float]:
    """What these cost, in virtual nodes with a whole pass."""
    if not cluster.classes:
        return [float(len(nodes)) for nodes in assigned]
    until = _costs_until(cluster.classes, max(nodes.stop for nodes in assigned))
    return [until[nodes.stop] - until[nodes.start] for nodes in assigned]


@lru_cache(maxsize=8)
def _costs_until(classes: tuple[PassClass, ...], virtual_nodes: int) -> tuple[float, ...]:
    """What all virtual nodes before each of them cost, and all."""
    costs = (classes[class_of(node, virtual_nodes, len(classes))].cost for node in range(virtual_nodes))
    return tuple(accumulate(costs, initial=0.0))


def _falls(classes: Sequence[PassClass]) -> bool:
    """Whether later virtual nodes need less memory, for a job's life."""
    reaches = [one.reach for one in classes]
    return len(set(reaches)) > 1 and reaches == sorted(reaches, reverse=True)


def _first_within(share: float, classes: Sequence[PassClass], virtual_nodes: int) -> int:
    """The first virtual node from which on no pass reaches more than that share of the blocks."""
    deeper = sum(one.reach > share for one in classes)
    return -(-deeper * virtual_nodes // len(classes))


def _shares_of_memory(workers: Sequence[Worker]) -> list[float]:
    """How much memory each has beside the one with the most; one of which nobody says it may have as much."""
    most = max((worker.capacity or 0 for worker in workers), default=0)
    return [worker.capacity / most if worker.capacity else 1.0 for worker in workers]


def _slowest(
    loads: Sequence[float], paces: Sequence[float], workers: Sequence[Worker] | None = None, now: float = 0.0
) -> float:
    """How long the slowest one computes; of ``workers``, what they have measured under other loads counts too."""
    if workers is None:
        return max(load * pace for load, pace in zip(loads, paces, strict=True))
    times = [_time_of(worker, pace, now) for worker, pace in zip(workers, paces, strict=True)]
    return max(time(load) for time, load in zip(times, loads, strict=True))


def _time_of(worker: Worker, pace: float, now: float, cost: float = 1.0) -> Callable[[float], float]:
    """How long it should compute for so many virtual nodes of that ``cost``: no less than for fewer, and no more than
    for more of them.
    """
    in_vain = sum(one.visits - 1 for one in worker.times)
    known_for = min(KNOWN_FOR, KNOWN_FIRST * 2.0**in_vain)
    known = [(one.load, one.load * one.pace.median) for one in worker.times if now - one.at < known_for]

    def time(count: float) -> float:
        load = count * cost
        most = min((seconds for other, seconds in known if other >= load), default=float("inf"))
        least = max((seconds for other, seconds in known if other <= load), default=0.0)
        return max(least, min(load * pace, most))

    return time


def _divide_by_time(cluster: Cluster, workers: Sequence[Worker], paces: Sequence[float], now: float) -> list[range]:
    """The virtual nodes among workers, by what these have measured."""
    virtual_nodes = cluster.virtual_nodes or len(workers)
    alike = len({one.cost for one in cluster.classes}) <= 1 and len(workers) <= virtual_nodes
    if not alike or not any(len(worker.times) > 1 for worker in workers):
        return _divide(cluster, workers, [1.0 / pace for pace in paces])
    cost = cluster.classes[0].cost if cluster.classes else 1.0
    times = [_time_of(worker, pace, now, cost) for worker, pace in zip(workers, paces, strict=True)]
    return assign_by_time(virtual_nodes, times)


def _careful(pace: Pace, more: float) -> float:
    return pace.high if more > 0 else pace.low if more < 0 else pace.median

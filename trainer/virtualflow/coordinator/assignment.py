"""Which worker is assigned which virtual nodes: pure functions of counts and measured speeds."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

_TOLERANCE = 1e-9
"""By so much sums of costs may be off, and the longest time be longer than the least."""


def assign(virtual_nodes: int, speeds: Sequence[float]) -> list[range]:
    """Divide ``virtual_nodes`` into one contiguous range per worker, in the order of the workers.

    The slowest worker decides how long a step takes, so the counts minimise the longest ``count / speed``; with equal
    speeds they differ by at most one. Counts are found greedily: each virtual node goes to the worker that would be
    through with it first. That is exact: should another division be faster, the worker that is last here would have
    fewer there and some other one more, and that one would have been given its last virtual node before (VirtualFlow,
    section 5.3 solves the same for measured step times).

    Args:
        virtual_nodes: how many there are, at least one for each worker.
        speeds: relative speed of each worker, all positive.

    Raises:
        ValueError: no worker, more workers than virtual nodes, or a speed that is not positive.
    """
    if not speeds:
        raise ValueError("no worker to assign virtual nodes to")
    if len(speeds) > virtual_nodes:
        raise ValueError(f"{len(speeds)} workers cannot share {virtual_nodes} virtual nodes: each needs at least one")
    if not all(speed > 0 for speed in speeds):
        raise ValueError("every worker's speed must be positive")
    if len(set(speeds)) == 1:
        share, extra = divmod(virtual_nodes, len(speeds))
        counts = [share + (index < extra) for index in range(len(speeds))]
    else:
        counts = _greedy_counts(virtual_nodes, speeds)
    return _contiguous(counts)


def assign_by_time(virtual_nodes: int, times: Sequence[Callable[[int], float]]) -> list[range]:
    """Divide virtual nodes as :func:`assign` does, among workers of which each says how long it takes for so many.

    Args:
        virtual_nodes: how many there are, at least one for each worker.
        times: of each worker, from a number of virtual nodes to seconds; these never fall.
    """
    counts = [1] * len(times)
    soonest = [(time(2), index) for index, time in enumerate(times)]
    heapq.heapify(soonest)
    for _ in range(virtual_nodes - len(times)):
        index = soonest[0][1]
        counts[index] += 1
        heapq.heapreplace(soonest, (times[index](counts[index] + 1), index))
    return _contiguous(counts)


def _contiguous(counts: Sequence[int]) -> list[range]:
    return [range(last - count, last) for count, last in zip(counts, accumulate(counts), strict=True)]


def assign_by_cost(until: Sequence[float], speeds: Sequence[float], earliest: Sequence[int]) -> list[range]:
    """Divide virtual nodes that cost more or less into one contiguous range per worker, in the order of the workers.

    As with :func:`assign`, the longest ``cost / speed`` is the least that there is: for a given longest time each
    worker in turn takes as many as it can within it, which leaves the fewest to those behind and lets them begin as
    late as possible; the least time for which that works is found by bisection.

    Args:
        until: the cost of all virtual nodes before each of them, and of all.
        speeds: relative speed of each worker, all positive; no more workers than virtual nodes.
        earliest: the first virtual node that each may have, where there are enough of them behind it for all others.
    """
    workers, nodes = len(speeds), len(until) - 1
    latest = [nodes - workers + rank for rank in range(workers)]
    earliest = [0, *(min(one, bound) for one, bound in zip(earliest[1:], latest[1:], strict=True))]

    def begins(limit: float) -> list[int] | None:
        """Where each begins if nobody computes for longer; ``None``: that is too short."""
        found = [0]
        for rank, speed in enumerate(speeds):
            start = found[-1]
            end = bisect_right(until, until[start] + limit * speed * (1 + _TOLERANCE), start) - 1
            if rank == workers - 1:
                return found if end == nodes else None
            end = min(end, latest[rank + 1])
            if end <= start or end < earliest[rank + 1]:
                return None
            found.append(end)
        return None

    low, high = until[-1] / sum(speeds), until[-1] / min(speeds)
    best = begins(high)
    assert best is not None
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        found = begins(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return [range(start, stop) for start, stop in pairwise([*best, nodes])]


def _greedy_counts(virtual_nodes: int, speeds: Sequence[float]) -> list[int]:
    """How many virtual nodes each worker gets if each goes to whoever would be through with it first."""
    # What everyone gets in any case need not be handed out one by one: nobody is through before this time.
    total = sum(speeds)
    least = [int((virtual_nodes - len(speeds)) * (speed / total)) - 1 for speed in speeds]
    counts = [max(1, count) for count in least]
    soonest = [((count + 1) / speed, index) for index, (count, speed) in enumerate(zip(counts, speeds, strict=True))]
    heapq.heapify(soonest)
    for _ in range(virtual_nodes - sum(counts)):
        index = soonest[0][1]
        counts[index] += 1
        heapq.heapreplace(soonest, ((counts[index] + 1) / speeds[index], index))
    return counts


def order_members(current: Mapping[str, int], places: Mapping[str, tuple[str, int]]) -> list[str]:
    """Order who is in the next generation so that few virtual nodes change hands: survivors keep their order, joiners
    follow.

    Of workers of several processes, the first processes of all come before the second ones: whoever keeps a copy of
    what a member has, its neighbour, is of another worker then, and not lost with it.

    Args:
        current: the first virtual node of each member of the running generation.
        places: for each member of the next one, its worker and which of its processes it is.
    """
    stay = sorted((member for member in places if member in current), key=lambda member: current[member])
    join = sorted((member for member in places if member not in current), key=lambda member: places[member])
    return sorted(stay + join, key=lambda member: places[member][1])

"""The most work done by the whole queue: each worker goes where it brings most, by measured speed-ups.

What a job's workers do is measured in units: ``weight * units * speed-up`` is the number of units that its workers are
worth, those of one worker counting in full. So jobs of different models can be added up. (Sharing by measured scaling
and dynamic programming: Saxena et al., "Effective elastic scaling of deep learning workloads", MASCOTS 2020.)

Speed-ups are concave. Where all workers need the same number of units, it is exact to hand them out one by one, each to
the job that gains most from it, also within limits of namespaces (these form a laminar matroid). Where they need
different numbers, that is a knapsack, and solved by dynamic programming as long as it is small; a large one is filled
by gain per unit, which misses at most what the units that are left over would have brought.

Gains are whole numbers, so that no rounding can make two equal plans differ.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from virtualflow_operator.scheduling.demand import Allocation, Capacity, Demand, Room, allocation
from virtualflow_operator.scheduling.minimums import Rank, grant_minimums, hold_back
from virtualflow_operator.settings import SchedulingSettings

_FINE = 1 << 20
"""Gains are counted in this part of a unit."""
_SCALE = 1_000
"""And the margin in this part of a gain."""


def max_throughput(
    now: float, demands: Sequence[Demand], capacity: Capacity, settings: SchedulingSettings
) -> dict[str, Allocation]:
    """Share capacity by what it brings; a :data:`.demand.Policy`.

    Where the minimums of all do not fit, those go first that do most with theirs, by unit; a running job gives way only
    to one that does more by ``margin``, and a worker moves only for a gain that is larger by it.
    """

    def rank(demand: Demand) -> Rank:
        done = demand.weight * demand.curve.speedup(demand.minimum) / demand.minimum
        return (-done * (1 + settings.margin if demand.allocated else 1),)

    admission = grant_minimums(now, demands, capacity, settings, rank)
    growing = [
        _Growth(demand, _gains(demand, admission.room.most(demand), settings.margin))
        for demand in sorted(admission.admitted, key=lambda demand: (demand.submitted, demand.name))
    ]
    more = _share(growing, capacity, admission.room, settings.exact_work)
    result: dict[str, Allocation] = {}
    for demand in admission.admitted:
        workers = demand.minimum + more[demand.name]
        result[demand.name] = allocation(demand, workers, _why(demand, workers))
    hold_back(now, admission, result, settings)
    return admission.waiting | result


@dataclass(frozen=True)
class _Growth:
    """What each worker above a job's minimum brings: whole numbers above 0, which never rise."""

    demand: Demand
    gains: tuple[int, ...]


def _gains(demand: Demand, most: int, margin: float) -> tuple[int, ...]:
    """The gains of the workers above the minimum, up to ``most`` of them, as long as they bring anything."""
    gains: list[int] = []
    highest = min(demand.maximum, demand.minimum + most)
    worth = demand.weight * demand.units * _FINE / demand.curve.speed(1)
    kept = _SCALE + round(margin * _SCALE)
    workers = demand.minimum
    steps = demand.curve.gains
    for corner, gain in (*steps[:-1], (highest, steps[-1][1])):
        upto = min(corner, highest)
        whole = round(worth * gain)
        if whole <= 0:
            break
        has = max(workers, min(demand.allocated, upto))
        gains += [whole * kept] * (has - workers) + [whole * _SCALE] * (max(has, upto) - has)
        workers = max(workers, upto)
        if workers == highest:
            break
    return tuple(gains)


def _share(growing: Sequence[_Growth], capacity: Capacity, room: Room, exact_work: int) -> dict[str, int]:
    """How many workers each job gets above its minimum."""
    able = [growth for growth in growing if growth.gains]
    more = {growth.demand.name: 0 for growth in growing}
    if len({growth.demand.units for growth in able}) > 1:
        step = gcd(*(growth.demand.units for growth in able))
        limited: dict[str, list[_Growth]] = {}
        for growth in able:
            namespace = growth.demand.namespace
            limited.setdefault(namespace if namespace in capacity.limits else "", []).append(growth)
        limits = {name: (room.limit(name) if name else max(0, room.total)) // step for name in limited}
        whole = max(0, room.total) // step
        work = sum(len(growth.gains) * limits[name] for name, group in limited.items() for growth in group)
        work += sum(limit * whole for limit in limits.values()) if len(limits) > 1 else 0
        if work <= exact_work:
            return more | _knapsack(limited, limits, whole, step)
    return more | _greedy(able, room)


def _greedy(growing: Sequence[_Growth], room: Room) -> dict[str, int]:
    more = {growth.demand.name: 0 for growth in growing}

    def key(index: int, workers: int) -> tuple[float, int, int]:
        # Of equal gains the one goes first that belongs to the smaller job, then to the older.
        growth = growing[index]
        return -growth.gains[workers] / growth.demand.units, growth.demand.minimum + workers, index

    heap = [key(index, 0) for index in range(len(growing))]
    heapq.heapify(heap)
    while heap:
        index = heapq.heappop(heap)[2]
        demand, gains = growing[index].demand, growing[index].gains
        if not room.most(demand):
            continue
        room.grow(demand, 1)
        more[demand.name] += 1
        if more[demand.name] < len(gains):
            heapq.heappush(heap, key(index, more[demand.name]))
    return more


def _knapsack(
    groups: Mapping[str, Sequence[_Growth]], limits: Mapping[str, int], whole: int, step: int
) -> dict[str, int]:
    """Exact, by dynamic programming: first within each namespace, then between them.

    ``best[u]`` is the most that can be gained with at most u steps of units; ``choices`` how many workers the last job
    (steps the last namespace) has in it, the fewest of several.
    """
    solved = [(name, *_within(group, limits[name], step)) for name, group in sorted(groups.items())]
    total = [0] * (whole + 1)
    shares: list[list[int]] = []
    for name, best, _ in solved:
        share, total_after = [0] * (whole + 1), list(total)
        for units in range(1, limits[name] + 1):
            if best[units] == best[units - 1]:
                continue
            for at in range(units, whole + 1):
                value = total[at - units] + best[units]
                if value > total_after[at]:
                    total_after[at], share[at] = value, units
        total = total_after
        shares.append(share)

    more: dict[str, int] = {}
    left = whole
    for (name, _, choices), share in zip(reversed(solved), reversed(shares), strict=True):
        units = share[left]
        left -= units
        for growth, choice in zip(reversed(groups[name]), reversed(choices), strict=True):
            more[growth.demand.name] = choice[units]
            units -= choice[units] * growth.demand.units // step
    return more


def _within(group: Sequence[_Growth], limit: int, step: int) -> tuple[list[int], list[list[int]]]:
    best = [0] * (limit + 1)
    choices: list[list[int]] = []
    for growth in group:
        size = growth.demand.units // step
        after, choice = list(best), [0] * (limit + 1)
        value = 0
        for workers, gain in enumerate(growth.gains, start=1):
            value += gain
            for units in range(workers * size, limit + 1):
                if best[units - workers * size] + value > after[units]:
                    after[units], choice[units] = best[units - workers * size] + value, workers
        best = after
        choices.append(choice)
    return best, choices


def _why(demand: Demand, workers: int) -> str:
    if workers == demand.maximum:
        return "has its maximum"
    if demand.curve.gain(workers + 1) <= 0:
        return "has as many workers as make it faster"
    if workers == demand.minimum:
        return "has its minimum: other jobs gain more from what is free"
    return "has the workers that bring more here than in other jobs"

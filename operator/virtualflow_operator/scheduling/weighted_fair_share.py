"""Weighted fair shares: the elastic policy of the VirtualFlow paper (Or, Zhang and Freedman, MLSys 2022).

Shares are units, not workers: of two jobs with equal weights, the one with twice the GPUs a worker has half the
workers. What a job cannot use (its maximum, its namespace's limit) is shared by the others, again by weight, which is
max-min fairness, found by water filling: every job has ``level * weight`` units, not less than its minimum and not
more than its maximum, and the level is as high as the capacity allows.

A share is seldom a whole number of workers. Each job gets it rounded down; the rest goes, a worker each, to those that
have that worker already, and then to those that rounding has cost most. So every job is within one worker of its share,
and a share that moves by less than that changes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, gcd, inf

from virtualflow_operator.scheduling.demand import Allocation, Capacity, Demand, Room, allocation
from virtualflow_operator.scheduling.minimums import Rank, grant_minimums, hold_back
from virtualflow_operator.settings import SchedulingSettings

_EXACT = 1e-9
"""Shares that are closer than this to a whole number of workers are that number: sums of floats err by less."""


def weighted_fair_share(
    now: float, demands: Sequence[Demand], capacity: Capacity, settings: SchedulingSettings
) -> dict[str, Allocation]:
    """Share capacity by weight; a :data:`.demand.Policy`.

    Where the minimums of all do not fit, the higher priority goes first, then those that run, then the oldest.
    """

    def rank(demand: Demand) -> Rank:
        return (-demand.priority, not demand.allocated)

    admission = grant_minimums(now, demands, capacity, settings, rank)
    shares = fair_shares(admission.admitted, capacity)
    workers = _round(admission.admitted, shares, admission.room)
    result = {
        demand.name: allocation(demand, workers[demand.name], _why(demand, workers[demand.name], shares[demand.name]))
        for demand in admission.admitted
    }
    hold_back(now, admission, result, settings)
    return admission.waiting | result


def fair_shares(demands: Sequence[Demand], capacity: Capacity) -> dict[str, float]:
    """Max-min fair shares by weight, in workers (not whole ones).

    Args:
        demands: jobs whose minimums fit together.
    """
    ranges = {
        demand.name: _Range(demand.weight, demand.minimum * demand.units, demand.maximum * demand.units)
        for demand in sorted(demands, key=lambda demand: demand.name)
    }
    units = {demand.name: demand.units for demand in demands}
    spaces = {demand.name: demand.namespace for demand in demands}
    for namespace, limit in sorted(capacity.limits.items()):
        members = [name for name in ranges if spaces[name] == namespace]
        level = _level([ranges[name] for name in members], _whole(limit, [units[name] for name in members]))
        for name in members:
            ranges[name] = _Range(ranges[name].weight, ranges[name].least, ranges[name].at(level))
    level = _level(ranges.values(), _whole(capacity.total, units.values()))
    return {name: spread.at(level) / units[name] for name, spread in ranges.items()}


@dataclass(frozen=True)
class _Range:
    """What one job can have, in units."""

    weight: float
    least: float
    most: float

    def at(self, level: float) -> float:
        return min(max(level * self.weight, self.least), self.most)


def _whole(units: int, sizes: Iterable[int]) -> int:
    """The part of the units that workers of these sizes can use."""
    step = gcd(*sizes)
    return units - units % step if step else units


def _level(ranges: Iterable[_Range], units: float) -> float:
    """The level at which the ranges sum up to these units; infinite if they do not even at their most.

    The sum is a piecewise linear function of the level, whose slope changes where a job leaves its minimum and where it
    reaches its maximum.
    """
    ranges = list(ranges)
    total: float = sum(spread.least for spread in ranges)
    corners = [(spread.least / spread.weight, spread.weight) for spread in ranges]
    corners += [(spread.most / spread.weight, -spread.weight) for spread in ranges]
    level = slope = 0.0
    for corner, change in sorted(corners):
        reached = total + slope * (corner - level)
        if reached > units:
            return level + (units - total) / slope if slope > 0 else level
        total, level, slope = reached, corner, slope + change
    return inf


def _round(demands: Sequence[Demand], shares: Mapping[str, float], room: Room) -> dict[str, int]:
    """Whole workers for jobs that have their minimum already, as close to the shares as they can be."""
    workers: dict[str, int] = {}
    for demand in demands:
        lower = max(demand.minimum, floor(shares[demand.name] + _EXACT))
        more = min(lower - demand.minimum, room.most(demand))
        room.grow(demand, more)
        workers[demand.name] = demand.minimum + more

    def order(demand: Demand) -> tuple[bool, float, float, str]:
        lower = workers[demand.name]
        return demand.allocated <= lower, lower - shares[demand.name], demand.submitted, demand.name

    for demand in sorted((d for d in demands if workers[d.name] + _EXACT < shares[d.name]), key=order):
        if room.most(demand):
            room.grow(demand, 1)
            workers[demand.name] += 1

    # Units that are too few for the workers of those that should have them are better used than idle.
    places = [(workers[d.name] * d.units / d.weight, d.name, d) for d in demands if workers[d.name] < d.maximum]
    heapq.heapify(places)
    while places:
        _, name, demand = heapq.heappop(places)
        if room.most(demand):
            room.grow(demand, 1)
            workers[name] += 1
            if workers[name] < demand.maximum:
                heapq.heappush(places, (workers[name] * demand.units / demand.weight, name, demand))
    return workers


def _why(demand: Demand, workers: int, share: float) -> str:
    if demand.minimum == demand.maximum:
        return "has the one number of workers that it can have"
    if workers == demand.maximum:
        return "has its maximum"
    if workers == demand.minimum and ceil(share - _EXACT) <= demand.minimum:
        return f"has its minimum: its share by weight {demand.weight:g} is not more"
    more = ", and what others cannot use" if workers >= share + 1 else ""
    return f"has its share by weight {demand.weight:g}: {share:.1f} workers{more}"

"""The least remaining service first: the mean completion time is lowest when short jobs do not wait for long ones.

The service that a job still needs is counted in unit-seconds at its minimum, from the steps that are left and its
measured speed; where these are not known, from what jobs like it have needed (``service_time``). Because a job may
shrink, the shortest gets what it can use well, the next what is left, and so on; a worker that brings little
(``SchedulingSettings.efficiency``) is worth more to the next job, since speed-ups are concave (the reason that Berg,
Vesilo and Harchol-Balter give for sharing in "heSRPT", 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from virtualflow_operator.scheduling.demand import Allocation, Capacity, Demand, Room, allocation
from virtualflow_operator.scheduling.minimums import Rank, grant_minimums, hold_back
from virtualflow_operator.settings import SchedulingSettings

_SHORTER = "waits: shorter jobs use what is free"


def shortest_first(
    now: float, demands: Sequence[Demand], capacity: Capacity, settings: SchedulingSettings
) -> dict[str, Allocation]:
    """Give the jobs with the least remaining service what they can use; a :data:`.demand.Policy`.

    Those that run keep their minimum, except for the minimum of one that is shorter by ``margin``. A job that waits
    begins when shorter ones leave room for it. A job whose speed nobody knows yet is not stopped before it is measured,
    and grows after those that are. It begins with its minimum beside them, unless jobs like it say how long it is: then
    it has its place among them. One of which nothing says how long it is counts as the longest.
    """

    def rank(demand: Demand) -> Rank:
        runs = demand.allocated > 0
        if _to_be_measured(demand) and runs:
            return (0, 0)
        left = service(demand)
        if left < inf:
            return (0, left * (1 - settings.margin if runs else 1))
        return (1, 0) if _to_be_measured(demand) else (2, not runs)

    admission = grant_minimums(now, demands, capacity, settings, rank)
    # Who runs or begins a turn is sure of its minimum, and who has yet to be measured, or it would never be. So is
    # everyone if someone lost its minimum to them; else that would have been for somebody's growth.
    sure = {
        demand.name
        for demand in admission.admitted
        if demand.allocated or demand.name in admission.due or admission.suspends or _to_be_measured(demand)
    }
    room = Room(capacity)
    for demand in admission.admitted:
        if demand.name in sure:
            room.start(demand, demand.minimum)

    workers: dict[str, int] = {}
    result: dict[str, Allocation] = {}
    # Ranks know who runs; this order must not, or those who have just begun would change it.
    ordered = sorted(admission.admitted, key=lambda demand: (service(demand), demand.submitted, demand.name))
    for demand in ordered:
        if demand.name not in sure:
            if room.lacks(demand, demand.minimum):
                result[demand.name] = Allocation(0, _SHORTER)
                continue
            room.start(demand, demand.minimum)
        useful = demand.curve.worthwhile(demand.minimum, demand.maximum, settings.efficiency)
        useful = demand.minimum if _only_expected(demand) else useful
        workers[demand.name] = demand.minimum + _grow(demand, demand.minimum, useful, room)
    for demand in sorted(ordered, key=_only_expected):
        if demand.name in workers:
            had = workers[demand.name]
            got = had + _grow(demand, had, demand.curve.worthwhile(demand.minimum, demand.maximum, 0.0), room)
            result[demand.name] = allocation(demand, got, _why(demand, got, settings.efficiency))
    hold_back(now, admission, result, settings)
    return admission.waiting | result


def service(demand: Demand) -> float:
    """Unit-seconds at the job's minimum that it still needs; infinite if nothing says that."""
    if demand.steps_left is None or not demand.curve.measured:
        return inf if demand.expected_left is None else demand.expected_left
    return demand.steps_left / demand.curve.speed(demand.minimum) * demand.minimum * demand.units


def _to_be_measured(demand: Demand) -> bool:
    return demand.steps_left is not None and not demand.curve.measured


def _only_expected(demand: Demand) -> bool:
    """Whether it has a place among the others by what jobs like it needed, though nobody knows how it scales."""
    return demand.expected_left is not None and not demand.curve.measured


def _grow(demand: Demand, workers: int, most: int, room: Room) -> int:
    more = max(0, min(most - workers, room.most(demand)))
    room.grow(demand, more)
    return more


def _why(demand: Demand, workers: int, efficiency: float) -> str:
    if workers == demand.maximum:
        return "has its maximum"
    if workers == demand.curve.worthwhile(demand.minimum, demand.maximum, 0.0):
        return "has as many workers as make it faster"
    if workers == demand.minimum:
        return "has its minimum: shorter jobs grow first"
    if workers == demand.curve.worthwhile(demand.minimum, demand.maximum, efficiency):
        return f"has the workers that bring at least {efficiency:.0%} of what the first ones do"
    return "has what jobs that are shorter have left"

"""Fixed sizes, in a given order: FIFO, and the priorities that the VirtualFlow paper compares with (MLSys 2022).

A job gets the size that it asks for (or all that the empty queue has for it, if that is less), or waits. Nobody who
runs is stopped for another. The first in order who does not fit holds back all behind it: there is no backfill, so no
small job can keep a large one waiting for ever. One exception: a job that only its namespace's limit holds back holds
back only its own namespace.

Where capacity has vanished under those that run, they shrink, the last in order first, and one whose minimum is gone
waits; they grow back to their size before any other starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from virtualflow.protocol.wording import counted
from virtualflow_operator.scheduling.demand import Allocation, Capacity, Demand, Room, allocation, sort_out
from virtualflow_operator.settings import SchedulingSettings


def place(demands: Sequence[Demand], capacity: Capacity, order: Callable[[Demand], float]) -> dict[str, Allocation]:
    """Place those that run, then those that wait.

    Args:
        order: the key of the order; ties go by name.
    """
    able, result = sort_out(demands, capacity)
    room = Room(capacity)
    sizes = {demand.name: min(demand.fixed, room.most(demand)) for demand in able}
    waiting: list[Demand] = []
    ranked = sorted(able, key=lambda demand: (order(demand), demand.name))
    for demand in sorted(ranked, key=lambda demand: not demand.allocated):
        if not demand.allocated or room.lacks(demand, demand.minimum):
            waiting.append(demand)
            continue
        workers = min(sizes[demand.name], room.most(demand))
        room.start(demand, workers)
        result[demand.name] = _placed(demand, workers, sizes[demand.name])

    blocker: str | None = None
    blockers: dict[str, str] = {}
    for demand in sorted(waiting, key=lambda demand: (order(demand), demand.name)):
        size = sizes[demand.name]
        ahead = blocker or blockers.get(demand.namespace)
        if ahead is not None:
            result[demand.name] = Allocation(0, f"waits behind {ahead}")
            continue
        lack = room.lacks(demand, size)
        if not lack:
            room.start(demand, size)
            result[demand.name] = _placed(demand, size, size)
        elif lack == "namespace":
            blockers[demand.namespace] = demand.name
            result[demand.name] = Allocation(
                0, f"waits until the limit of namespace {demand.namespace} has room for {counted(size, 'worker')}"
            )
        else:
            blocker = demand.name
            result[demand.name] = Allocation(
                0, f"waits, first in the queue, until there is room for {counted(size, 'worker')}"
            )
    return result


def _placed(demand: Demand, workers: int, size: int) -> Allocation:
    if workers < size:
        return allocation(
            demand, workers, f"has {workers} of its {counted(size, 'worker')}: the queue has no more for it now"
        )
    if size < demand.fixed:
        return allocation(
            demand, workers, f"has {size} of its {counted(demand.fixed, 'worker')}: the whole queue has no more"
        )
    return allocation(demand, workers, "has its fixed size")


def fifo(
    now: float, demands: Sequence[Demand], capacity: Capacity, settings: SchedulingSettings
) -> dict[str, Allocation]:
    """Start jobs with their fixed size in the order in which they came; a :data:`.demand.Policy`.

    Nobody starves as long as jobs end: a job waits only for those before it.
    """
    del now, settings
    return place(demands, capacity, lambda demand: demand.submitted)


def priority(
    now: float, demands: Sequence[Demand], capacity: Capacity, settings: SchedulingSettings
) -> dict[str, Allocation]:
    """Start jobs with their fixed size, the highest priority first; a :data:`.demand.Policy`.

    A job's priority grows by one with each ``aging`` seconds since it came. All age alike, so the order of two jobs
    never changes, and a job waits at most for those that came until its age has made up for their priority, as long as
    jobs end.
    """
    del now
    return place(demands, capacity, lambda demand: demand.submitted - demand.priority * settings.aging)

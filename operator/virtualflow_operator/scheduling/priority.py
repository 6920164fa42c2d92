"""Priorities with fixed sizes: the baseline that the VirtualFlow paper compares with (MLSys 2022)."""

from __future__ import annotations

from collections.abc import Sequence

from virtualflow_operator.scheduling import gang
from virtualflow_operator.scheduling.demand import Allocation, Capacity, Demand
from virtualflow_operator.settings import SchedulingSettings


def priority(
    now: float, demands: Sequence[Demand], capacity: Capacity, settings: SchedulingSettings
) -> dict[str, Allocation]:
    """Start jobs with their fixed size, the highest priority first; a :data:`.demand.Policy`.

    A job's priority grows by one with each ``aging`` seconds since it came. All age alike, so the order of two jobs
    never changes, and a job waits at most for those that came until its age has made up for their priority, as long as
    jobs end.
    """
    del now
    return gang.place(demands, capacity, lambda demand: demand.submitted - demand.priority * settings.aging)

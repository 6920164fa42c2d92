"""First in, first out, with fixed sizes: a baseline."""

from __future__ import annotations

from collections.abc import Sequence

from virtualflow_operator.scheduling import gang
from virtualflow_operator.scheduling.demand import Allocation, Capacity, Demand
from virtualflow_operator.settings import SchedulingSettings


def fifo(
    now: float, demands: Sequence[Demand], capacity: Capacity, settings: SchedulingSettings
) -> dict[str, Allocation]:
    """Start jobs with their fixed size in the order in which they came; a :data:`.demand.Policy`.

    Nobody starves as long as jobs end: a job waits only for those before it.
    """
    del now, settings
    return gang.place(demands, capacity, lambda demand: demand.submitted)

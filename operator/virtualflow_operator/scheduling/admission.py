"""Who runs at all under an elastic policy, so that nobody starves."""

from __future__ import annotations

from collections.abc import Iterable

from virtualflow_operator.scheduling.demand import Demand
from virtualflow_operator.settings import SchedulingSettings


def next_change(now: float, demands: Iterable[Demand], settings: SchedulingSettings) -> float | None:
    """When a decision may become another one only because time passes; ``None``: not at all.

    Args:
        demands: as they are after the decision was applied (:meth:`Demand.given`).
    """
    times = [
        time
        for demand in demands
        for time in (
            (demand.changed + settings.hold, demand.began + settings.turn)
            if demand.allocated
            else (demand.began + settings.starvation_bound,)
        )
        if time > now
    ]
    return min(times, default=None)

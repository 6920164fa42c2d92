"""Every default of carrying out plans of memory, once. Sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from virtualflow.memory.settings import PlannerSettings

SMALL_BUFFER = 64 << 10
"""Of buffers of a recomputed block, a copy of no more is kept between its two forward passes, whoever changes them;"""
MANY_ITEMS = 1000
"""and a list or the like that a module has is put back if it is no longer."""


@dataclass(frozen=True)
class ActivationSettings:
    """How a model is measured before there is a plan for it."""

    warm_up: int = 1
    """Micro-batches whose times do not count,"""
    samples: int = 3
    """and those whose times do, before the plan is made. Until then each block is recomputed, which needs little."""
    probe: int = 32 << 20
    """A copy of so many bytes shows the bandwidth between device and host,"""
    copies: int = 5
    """the median of so many."""
    planner: PlannerSettings = field(default_factory=PlannerSettings)

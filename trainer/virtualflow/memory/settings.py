"""Every default of the planner and of what carries plans out, once.

Durations are seconds and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PlannerSettings:
    """How hard the search tries: a count and no time, so that one profile always has the same plan."""

    rungs: int = 18
    """Sizes of device memory, from the least that works to what keeps everything, at which plans are improved;
    closer to one another where there is little."""
    moves: int = 160_000
    """Blocks in all the plans that these improvements try: a hundredth of it are plans for 100 blocks."""
    kept: int = 12
    """Numbers of blocks that are kept in plans that the search begins with."""
    shares: int = 4
    """Shares of the other blocks that are swapped in them, the rest being recomputed."""
    segments: tuple[int, ...] = (1, 2, 4, 8)
    """Most blocks of a segment that is recomputed at once in them."""
    cuts: int = 64
    """Sizes of device memory at most for which the fastest plan without copies is looked for,"""
    worth: float = 0.01
    """until those between two take at most this share longer than with the larger,"""
    followed: int = 48
    """and so many beginnings of plans that end with the same block are followed."""
    pairs: int = 12
    """Up to so many blocks, two of any distance are changed at a time; of longer chains only neighbours are."""


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

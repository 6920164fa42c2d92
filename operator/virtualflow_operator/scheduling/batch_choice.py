"""How large a statistical job's global batch is, within bounds that its user allows, for each number of workers. Pure.

A larger batch exchanges gradients less often for as many samples, so a job scales to more devices with it (Saxena,
Jayaram, Basu, Sabharwal and Verma, "Effective Elastic Scaling of Deep Learning Workloads", MASCOTS 2020, arXiv
2006.13878). That the result is as good within the bounds is the user's word: nothing here knows of accuracy. It is
never equal, so a bitwise job has no such bounds, and its batch never changes.

Policies need not know of it: a job whose batch is chosen scales better, which is all that its curve says.
"""

from __future__ import annotations

from dataclasses import dataclass

from virtualflow_operator.scheduling.packing import Phases

_NEGLIGIBLE = 0.03
"""A smaller batch that is slower by no more than that is the better one: it makes more updates of the same samples."""


@dataclass(frozen=True)
class BatchBounds:
    """Samples of a step: at least, as its speeds were measured, and at most.

    Raises:
        ValueError: they are not in this order.
    """

    least: int
    measured: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.measured <= self.most:
            raise ValueError(f"give 1 <= least <= measured <= most, not {self.least}, {self.measured}, {self.most}")


def speedup(phases: Phases, batch: int, measured: int) -> float:
    """How many times as many samples a second it trains with ``batch`` as with the batch of these phases.

    A device computes for as much longer as there are more samples, and is away for as long as before.
    """
    ratio = batch / measured
    return ratio * phases.step / (ratio * phases.compute + phases.away)


def choose_batch(phases: Phases, bounds: BatchBounds) -> int:
    """The smallest of the bounds and the doublings of the least that is about as fast as the fastest.

    Args:
        phases: of a step with the measured batch, on the workers for which to choose.
    """
    sizes = [bounds.least]
    while sizes[-1] < bounds.most:
        sizes.append(min(2 * sizes[-1], bounds.most))
    enough = (1 - _NEGLIGIBLE) * speedup(phases, bounds.most, bounds.measured)
    return next(size for size in sizes if speedup(phases, size, bounds.measured) >= enough)

"""Whether something grows with the steps of a job: a slope, how certain it is, and what that means. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

BATCHES, STUDENT = 20, 2.101
"""Samples that follow each other are alike, so the slope is fitted to means of so many batches of them; Student's t of
18 degrees of freedom, for 95 %."""

Verdict = Literal["flat", "grows", "unclear"]


@dataclass(frozen=True)
class Slope:
    """A straight line through samples over steps."""

    mean: float
    per_thousand: float
    """How much the value grows in 1,000 steps."""
    low: float
    high: float
    """The 95 % confidence interval of that."""
    steps: int
    """From the first sample to the last."""

    @property
    def growth(self) -> tuple[float, float]:
        """The interval over all of these steps."""
        return self.low * self.steps / 1_000, self.high * self.steps / 1_000


def fit(points: Sequence[tuple[int, float]]) -> Slope | None:
    """The slope of values over steps, by least squares over means of batches; ``None``: there are too few samples."""
    if len(points) < 2 * BATCHES:
        return None
    bounds = [len(points) * n // BATCHES for n in range(BATCHES + 1)]
    batches = [points[first:last] for first, last in pairwise(bounds)]
    x = [statistics.fmean(step / 1_000 for step, _ in batch) for batch in batches]
    y = [statistics.fmean(value for _, value in batch) for batch in batches]
    middle = statistics.fmean(x)
    spread = sum((at - middle) ** 2 for at in x)
    if not spread:
        return None
    slope, intercept = statistics.linear_regression(x, y)
    residual = sum((value - intercept - slope * at) ** 2 for at, value in zip(x, y, strict=True))
    margin = STUDENT * (residual / (BATCHES - 2) / spread) ** 0.5
    mean = statistics.fmean(value for _, value in points)
    return Slope(mean, slope, slope - margin, slope + margin, points[-1][0] - points[0][0])


def judge(slope: Slope | None, tolerance: float) -> Verdict:
    """What a slope means.

    Args:
        slope: of the samples.
        tolerance: how much more at the end than at the beginning does not matter.
    """
    if slope is None:
        return "unclear"
    least, most = slope.growth
    if most <= tolerance:
        return "flat"
    return "grows" if least > 0 else "unclear"

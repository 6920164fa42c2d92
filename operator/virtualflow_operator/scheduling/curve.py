"""How a job's speed grows with its workers, as far as it was measured.

A policy compares what another worker would bring to each job, and its choice is only stable and exact when no worker
brings more than the one before it. So the measured points are never used as they are: the curve is their least concave
majorant through the origin, which never falls.

A job tells its own speeds, so no figure makes it scale better than linearly from its smallest measured size, and what
it has not told it gains no more by than by telling: see ``DOUBLING``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite

_EXACT = 1e-9
"""Differences below this part of a speed are rounding."""
DOUBLING = 0.9
"""The default curve: with each doubling beyond the largest measured size, a worker brings this part of what it did."""
_DOUBLINGS = 4
"""So many; beyond them a worker brings no less. Each costs a decision about a thousand jobs some ms."""


@dataclass(frozen=True)
class ScalingCurve:
    """Steps per second by number of workers.

    Nothing measured: the default curve from one worker on. One number of workers: a line up to it. Beyond the largest:
    the default curve from what a worker brings between the last two; the measurement that follows a growth puts it
    right.
    """

    points: tuple[tuple[int, float], ...] = ()
    """(workers, steps per second), in any order; of several for one number the largest counts."""

    def __post_init__(self) -> None:
        for workers, speed in self.points:
            if workers < 1 or not isfinite(speed) or speed <= 0:
                raise ValueError(
                    f"a measured point is (workers from 1, steps per second above 0), not {workers, speed}"
                )

    @staticmethod
    def of(points: Iterable[tuple[int, float]]) -> ScalingCurve:
        """The curve of these points, with those left out that are no measurement (a speed of 0, or not a number)."""
        return ScalingCurve(tuple(sorted((w, s) for w, s in points if w >= 1 and isfinite(s) and s > 0)))

    @property
    def measured(self) -> bool:
        """Whether its speeds are steps per second; otherwise they are relative to one worker."""
        return bool(self.points)

    @cached_property
    def _corners(self) -> tuple[tuple[int, float], ...]:
        best: dict[int, float] = {}
        for workers, speed in self.points:
            best[workers] = max(speed, best.get(workers, 0.0))
        measured = sorted(best.items()) or [(1, 1.0)]
        most = measured[0][1] / measured[0][0]
        corners = [(0, 0.0)]
        highest = 0.0
        for workers, speed in measured:
            highest = max(highest, min(speed, most * workers))  # more are never slower: they need not be used
            while len(corners) > 1:  # slopes stand here in full: a decision about many jobs does little else
                (first, low), (second, high) = corners[-2:]
                if (high - low) / (second - first) > (highest - high) / (workers - second):
                    break
                corners.pop()
            corners.append((workers, highest))
        slope = _slope(*corners[-2:])
        for _ in range(_DOUBLINGS if slope > 0 else 0):
            workers, speed = corners[-1]
            slope *= DOUBLING
            corners.append((2 * workers, speed + slope * workers))
        return tuple(corners)

    def speed(self, workers: int) -> float:
        """Steps per second with ``workers``; relative to one worker if nothing was measured."""
        if workers <= 0:
            return 0.0
        corners = self._corners
        for left, right in pairwise(corners):
            if workers <= right[0]:
                return left[1] + _slope(left, right) * (workers - left[0])
        return corners[-1][1] + _slope(corners[-2], corners[-1]) * (workers - corners[-1][0])

    def speedup(self, workers: int) -> float:
        """The speed relative to one worker: at most ``workers``."""
        return self.speed(workers) / self.speed(1)

    @cached_property
    def gains(self) -> tuple[tuple[int, float], ...]:
        """What a worker more brings, in steps per second: (up to which number of workers, each of them so much).

        It falls from one to the next; the last holds beyond its number, too.
        """
        return tuple((right[0], _slope(left, right)) for left, right in pairwise(self._corners))

    def gain(self, workers: int) -> float:
        """Steps per second that the last of so many workers brings."""
        return next((gain for upto, gain in self.gains if workers <= upto), self.gains[-1][1])

    def worthwhile(self, minimum: int, maximum: int, efficiency: float) -> int:
        """Up to how many workers each further one brings more than ``efficiency`` of what one brings at the minimum.

        Args:
            efficiency: from 0 (whatever makes the job faster) to 1 (nothing but linear scaling).
        """
        least = efficiency * self.speed(minimum) / minimum * (1 - _EXACT)
        low, high = minimum, maximum
        while low < high:  # gains only fall, so the last good one can be found by halving
            middle = (low + high + 1) // 2
            if self.gain(middle) > least:
                low = middle
            else:
                high = middle - 1
        return low


def _slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])

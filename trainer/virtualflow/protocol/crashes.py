"""Crashes: each is counted once, waited after, and in the end too many. Pure.

The operator and ``virtualflow run`` decide by this alike, so a run on one machine shows what a cluster would do.

A crash without a step since the last one counts against a limit; crashes close to each other make the wait grow.
Workers that began before the last counted crash belong to the same round: eight workers that all miss a module are one
failure, not eight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

_DOUBLINGS = 32
"""More are past every limit, and a float has an end."""


@dataclass(frozen=True)
class CrashWaits:
    first: float
    """The first wait; it doubles with every further crash of a streak."""
    most: float
    """The longest."""
    reset: float
    """Crashes that are further apart than this are no streak."""


@dataclass(frozen=True)
class Crashes:
    """What is remembered of a job's crashes; times are seconds on one clock."""

    count: int = 0
    """In a row, without a step between them."""
    streak: int = 0
    """Close to each other."""
    step: int = 0
    """The step that the job had made at the latest one."""
    last: float | None = None
    """When that was."""
    retry: float | None = None
    """No worker is started before then."""

    def begins_round(self, begun: Iterable[float]) -> bool:
        """Whether one of the workers that began at these times is of another round than the last crash."""
        return any(self.last is None or time >= self.last for time in begun)

    def after(self, step: int, now: float, waits: CrashWaits, *, at_once: int) -> Crashes:
        streak = self.streak + 1 if self.last is not None and now < self.last + waits.reset else 1
        count = self.count + 1 if step <= self.step else 1
        return Crashes(count, streak, step, now, now + wait_after(streak, waits, at_once=at_once))

    def waiting(self, now: float, waits: CrashWaits) -> Crashes:
        """Count nothing, and wait all the same from ``now`` on, as after the latest crash."""
        return replace(self, retry=now + wait_after(self.streak, waits, at_once=0))


def wait_after(streak: int, waits: CrashWaits, *, at_once: int) -> float:
    """Seconds to wait after the ``streak``-th crash in a row, of which the first ``at_once`` need no wait."""
    doublings = streak - 1 - at_once
    return 0.0 if doublings < 0 else float(min(waits.first * 2 ** min(doublings, _DOUBLINGS), waits.most))

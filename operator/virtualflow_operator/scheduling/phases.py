"""A job's step in phases, and how fast jobs are that share one device in turns. Pure.

A step *computes* on the device; then it is *away*: gradients are exchanged, the update is applied, samples are loaded.
Jobs that share a device compute one after the other and are away whenever they like (the turn server's rule, first
come, first served), so each begins to compute when it is back and everybody who asked before it has computed once.

What is left out: phases always take equally long, a device computes for one job as fast as it did for that job alone,
and the away phases of several jobs do not slow each other down.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from virtualflow_operator.scheduling.curve import ScalingCurve

_SETTLING, _COUNTED = 8, 24
"""Steps of the slowest job that a prediction leaves out, and that it is the mean of: by then turns have fallen into
their rhythm, or wander evenly."""
_TURNS = 20_000
"""So many turns are looked at in the end: of jobs that differ by more, the slowest is taken at its bound."""


@dataclass(frozen=True)
class Phases:
    """Seconds of one step of a job that has its devices to itself, on each of them."""

    compute: float
    away: float = 0.0
    """Exchange and update, and loading where that is not hidden behind something."""

    def __post_init__(self) -> None:
        if not (isfinite(self.compute) and isfinite(self.away) and self.compute > 0 and self.away >= 0):
            raise ValueError(f"a step computes for more than 0 s and is away for 0 or more, not {self}")

    @property
    def step(self) -> float:
        """Of the whole step."""
        return self.compute + self.away

    @staticmethod
    def at(curve: ScalingCurve, workers: int) -> Phases:
        """What a measured curve says of a step on that many workers.

        They divide what one worker computes among them, so what a step takes beyond its part of that is no computing.
        One worker alone is taken to compute all the time.
        """
        step = 1 / curve.speed(workers)
        compute = min(step, 1 / (curve.speed(1) * workers))
        return Phases(compute, step - compute)


def slowdown_bound(jobs: Sequence[Phases], job: int) -> float:
    """How many times as long a step takes at the most: everybody else computes once before each of its turns."""
    return (jobs[job].away + sum(other.compute for other in jobs)) / jobs[job].step


def share(jobs: Sequence[Phases]) -> tuple[float, ...]:
    """Seconds of a step of each job when they share a device in turns, after they have fallen into their rhythm."""
    if len(jobs) == 1:
        return (jobs[0].step,)
    if all(job == jobs[0] for job in jobs):
        return (max(jobs[0].step, sum(job.compute for job in jobs)),) * len(jobs)
    bounds = [slowdown_bound(jobs, n) * job.step for n, job in enumerate(jobs)]
    begin, end = _SETTLING * max(bounds), (_SETTLING + _COUNTED) * max(bounds)
    queue = [(0.0, n) for n in range(len(jobs))]  # when each is back, by time: first come, first served
    free = 0.0
    first, last, steps = [0.0] * len(jobs), [0.0] * len(jobs), [-1] * len(jobs)
    for _ in range(_TURNS):
        back, n = heapq.heappop(queue)
        free = max(free, back) + jobs[n].compute
        heapq.heappush(queue, (free + jobs[n].away, n))
        if free >= begin:
            steps[n] += 1
            last[n] = free
            if not steps[n]:
                first[n] = free
        if back >= end:
            break
    return tuple(
        min((last[n] - first[n]) / steps[n], bound) if steps[n] > 0 else bound for n, bound in enumerate(bounds)
    )

"""What came of a simulation, and how well the policy did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from virtualflow_operator.simulator.trace import JobEvent


@dataclass(frozen=True)
class Outcome:
    job: JobEvent
    started: float | None
    """When it was first given workers; ``None``: never."""
    finished: float | None
    """``None``: never; ``reason`` says why."""
    queued: float
    """Seconds between arrival and end in which it had no workers, of its own or on another job's devices: before its
    start, and while it was suspended."""
    service: float
    """Seconds times workers that it was given."""
    resizes: int
    """Changes of its workers between start and end, suspensions included."""
    suspensions: int
    changes: tuple[tuple[float, int], ...]
    """When it was given which number of workers; 0 when it ended."""
    reason: str
    """What the policy last said of it."""
    expected: float | None = None
    """Unit-seconds at its minimum that it was expected to need when it came; ``None``: nothing was."""
    needed: float | None = None
    """Those that it needed, as far as its speed was seen."""
    computed: float = 0.0
    """Unit-seconds in which devices computed for it."""
    lodged: bool = False
    """Whether it has computed on another job's devices."""
    slowdown: float = 1.0
    """How many times as long as alone a step of it took on shared devices, at the most."""

    @property
    def completion(self) -> float | None:
        """Seconds from arrival to end."""
        return None if self.finished is None else self.finished - self.job.time


@dataclass(frozen=True)
class Result:
    outcomes: tuple[Outcome, ...]
    """In the order of arrival."""
    capacity: tuple[tuple[float, int], ...]
    """Units from each time on."""
    decisions: int

    @property
    def unfinished(self) -> tuple[Outcome, ...]:
        """Those that the policy never let end."""
        return tuple(outcome for outcome in self.outcomes if outcome.finished is None)


class Measures(msgspec.Struct, frozen=True):
    """Of the jobs that ended. Times are seconds; with no such job, they and the shares are 0."""

    jobs: int
    unfinished: int
    makespan: float
    """From the first arrival to the last end."""
    mean_completion: float
    """Completion: from a job's arrival to its end."""
    median_completion: float
    p95_completion: float
    mean_queueing: float
    """Queueing: the part of the completion in which the job had no workers, suspensions included."""
    median_queueing: float
    p95_queueing: float
    utilisation: float
    """Units that jobs had, over units that there were, from the first arrival to the last end."""
    fairness: float
    """Jain's index (Jain, Chiu and Hawe, DEC-TR-301, 1984) of service over weight: with x_i = (the workers that job i
    had on average from arrival to end) / (its weight), it is (sum x)² / (n · sum x²): 1 if all x are equal, 1/n if one
    job had everything."""
    resizes: int
    """Changes of a job's workers between its start and its end, suspensions included."""
    suspensions: int
    decisions: int
    expected: int = 0
    """Jobs of which others said, when they came, how long they would be."""
    expected_factor: float = 0.0
    """The median factor by which what those needed differed from it: 1 if it did not, 2 if it was half or double."""
    computing: float = 0.0
    """Unit-seconds in which devices computed, over those that there were, from the first arrival to the last end."""
    lodgers: int = 0
    """Jobs that computed on devices of others at some time."""
    longest_slowdown: float = 1.0
    """How many times as long as alone any step took on shared devices."""


def measure(result: Result) -> Measures:
    ended = [outcome for outcome in result.outcomes if outcome.finished is not None]
    completions = [outcome.completion or 0.0 for outcome in ended]
    queueing = [outcome.queued for outcome in ended]
    first = min((outcome.job.time for outcome in result.outcomes), default=0.0)
    last = max((outcome.finished or first for outcome in ended), default=first)
    used = sum(outcome.service * outcome.job.units for outcome in result.outcomes)
    offered = _offered(result.capacity, first, last)
    shares = [
        outcome.service / completion / outcome.job.weight
        for outcome, completion in zip(ended, completions, strict=True)
        if completion > 0
    ]
    factors = [
        max(outcome.expected / outcome.needed, outcome.needed / outcome.expected)
        for outcome in ended
        if outcome.expected and outcome.needed
    ]
    return Measures(
        jobs=len(result.outcomes),
        unfinished=len(result.unfinished),
        makespan=last - first,
        mean_completion=_mean(completions),
        median_completion=percentile(completions, 50),
        p95_completion=percentile(completions, 95),
        mean_queueing=_mean(queueing),
        median_queueing=percentile(queueing, 50),
        p95_queueing=percentile(queueing, 95),
        utilisation=used / offered if offered else 0.0,
        fairness=jain(shares),
        resizes=sum(outcome.resizes for outcome in result.outcomes),
        suspensions=sum(outcome.suspensions for outcome in result.outcomes),
        decisions=result.decisions,
        expected=len(factors),
        expected_factor=percentile(factors, 50),
        computing=sum(outcome.computed for outcome in result.outcomes) / offered if offered else 0.0,
        lodgers=sum(outcome.lodged for outcome in result.outcomes),
        longest_slowdown=max((outcome.slowdown for outcome in result.outcomes), default=1.0),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of all lie, on the line between the two next to it; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def jain(shares: Sequence[float]) -> float:
    """Jain's index of these shares; 0 without any."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _offered(capacity: Sequence[tuple[float, int]], first: float, last: float) -> float:
    spans = pairwise((*capacity, (last, 0)))
    return sum(units * max(0.0, min(end, last) - max(begin, first)) for (begin, units), (end, _) in spans)

"""How fast this worker is: its computing time per virtual node with a whole backward pass, measured as it trains.

The coordinator gives the more virtual nodes to a worker the faster it is, so the measurement must not take for speed
what is none: the exchange and the waiting for others are left out, and so are attempts that came to nothing, steps that
were held, the first ones of a generation and those of short micro-batches. One slow step says little, and a process
that is stopped and continued many times a second (a CPU quota) is slow in some short steps and fast in others;
therefore short steps are put together, and the middle of several such samples counts, with the quartiles for those who
want to be careful.

Pure: times come in, in seconds of one steady clock (``reporter``).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

# How a worker measures its own computing time per virtual node, and when it tells of it.
SAMPLE = 0.05
"""A sample covers at least this long: shorter steps are put together. The interruptions of a slowed process (a CPU
quota is granted by the tenth of a second) must average out within few samples."""
WINDOW = 10
"""Latest samples that the estimate is made of."""
FEWEST = 5
"""Samples before there is an estimate."""
SKIPPED = 2
"""First steps after an entry that are left out: loaders and caches warm up again."""
CHANGE = 0.05
"""The coordinator is told when the estimate has changed by this share."""
INTERVAL = 0.25
"""And at most this often,"""
INTERVAL_PER_MEMBER = 0.004
"""or this often times the members, so that all of them together tell at most 250 times a second."""


@dataclass(frozen=True)
class Estimate:
    """Seconds per virtual node."""

    median: float
    low: float
    high: float
    rest: float
    """Seconds of a step that were not its own computing: exchange, update, waiting for others."""
    samples: int


class PaceMeter:
    """Measures the attempts of one generation after the other."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """Of each sample: seconds per virtual node, and the rest of a step."""
        self.estimate: Estimate | None = None
        """What the latest samples say, ``None`` as long as they are few."""
        self._began: float | None = None
        self._computed: float | None = None
        self._nodes = 0.0
        self._committed_at: float | None = None
        self._to_skip = 0
        self.enter()

    def enter(self) -> None:
        self._samples.clear()
        self.estimate = None
        self._to_skip = SKIPPED
        self._began = self._computed = self._committed_at = None
        self._empty()

    def begin(self, now: float, virtual_nodes: float) -> None:
        """An attempt begins to fetch its first micro-batch; one whose pass ends early is a part of a virtual node."""
        self._began, self._computed, self._nodes = now, None, virtual_nodes

    def disregard(self) -> None:
        """The attempt says nothing: some of its micro-batches are short or empty."""
        self._began = self._computed = None

    def end(self, now: float) -> None:
        if self._began is not None:
            self._computed = now - self._began

    def exclude(self, seconds: float) -> None:
        """So much of the attempt was waiting for a device that others had, which is nobody's time either."""
        if self._began is not None:
            self._began += seconds
        if self._committed_at is not None:
            self._committed_at += seconds

    def interrupt(self) -> None:
        """Something else came between two steps, on purpose: that time is nobody's."""
        self._committed_at = None

    def commit(self, now: float) -> None:
        before, self._committed_at = self._committed_at, now
        computed, self._began, self._computed = self._computed, None, None
        if self._to_skip > 0:
            self._to_skip -= 1
            return
        if computed is None or computed <= 0.0 or before is None:
            return
        self._steps += 1
        self._computing += computed
        self._computed_nodes += self._nodes
        self._passed += now - before
        if self._passed >= SAMPLE:
            rest = max(0.0, self._passed - self._computing) / self._steps
            self._samples.append((self._computing / self._computed_nodes, rest))
            self.estimate = self._estimate()
            self._empty()

    def _empty(self) -> None:
        self._steps = 0
        self._computed_nodes = self._computing = self._passed = 0.0

    def _estimate(self) -> Estimate | None:
        if len(self._samples) < FEWEST:
            return None
        low, median, high = quartiles([pace for pace, _ in self._samples])
        return Estimate(median, low, high, statistics.median(rest for _, rest in self._samples), len(self._samples))


class PaceReportPolicy:
    """When the coordinator is to hear of an estimate: not of every step, and soon of what matters."""

    def __init__(self) -> None:
        self._told: Estimate | None = None
        self._told_at = float("-inf")

    def enter(self) -> None:
        self._told = None

    def is_due(self, now: float, estimate: Estimate, members: int) -> bool:
        """Whether to tell ``estimate`` now; if so, it is taken for told."""
        interval = max(INTERVAL, INTERVAL_PER_MEMBER * members)
        if now - self._told_at < interval or not self._differs(estimate):
            return False
        self._told, self._told_at = estimate, now
        return True

    def _differs(self, estimate: Estimate) -> bool:
        if self._told is None:
            return True
        # The quartiles follow a change later than the median, and decisions are made by them.
        pairs = zip(
            (self._told.low, self._told.median, self._told.high),
            (estimate.low, estimate.median, estimate.high),
            strict=True,
        )
        return any(abs(after - before) >= CHANGE * before for before, after in pairs)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile of at least one value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high

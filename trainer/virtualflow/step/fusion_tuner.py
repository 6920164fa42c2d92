"""How many neighbouring virtual nodes a worker of a ``statistical`` job runs as one micro-batch: a pure decision.

A worker starts with one virtual node at a time and measures, as it trains, the time for a virtual node and the memory
that a micro-batch takes. It goes to the next larger micro-batch while the memory for it, predicted as a straight line,
is there, and stays with the smallest that is as fast as the fastest. On a CPU a larger micro-batch may be the slower
one, because it leaves the caches. Sizes are measured in a few rounds, since a machine has quiet and busy times, and
then never again, so the choice does not swing to and fro; another range of virtual nodes makes other sizes possible,
which are measured then.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from virtualflow.data import chunks
from virtualflow.device import MemoryUse

# How sizes are compared.

WARM_UP = 1
"""Attempts with a new size whose time does not count: kernels are chosen and memory is taken in them. On a CPU
memory is measured in the first one."""
ATTEMPTS = 3
"""Attempts whose median time counts: one bad one does not."""
ROUNDS = 3
"""How often every size is measured; its best time counts, since a machine's other work only makes it slower."""
TOLERANCE = 0.03
"""A smaller size that is slower than the fastest by no more than this share is as good: it needs less memory."""
HOPELESS = 0.25
"""Beyond a size that is slower than the fastest by more than this share, larger ones are not tried."""


def widths(nodes: int, cap: int | None) -> list[int]:
    """The sizes worth trying for a range of ``nodes``, ascending: doubling from 1 up to the range and the cap.

    Each is the longest stretch that :func:`chunks` really makes of it.
    """
    most = nodes if cap is None else min(nodes, cap)
    tried = {most}
    width = 1
    while width < most:
        tried.add(width)
        width *= 2
    return sorted({len(chunks(range(nodes), width)[0]) for width in tried if width})


class Tuner:
    """The choice of one worker; :attr:`width` is in force.

    Args:
        cap: the most virtual nodes of a micro-batch, ``None`` for as many as memory and time allow.
    """

    def __init__(self, cap: int | None) -> None:
        self.width = 1
        """Virtual nodes of a micro-batch, at most."""
        self.exploring = False
        """Whether the next attempt is to be measured: its time, or its memory."""
        self._cap = cap
        self._nodes = 0
        self._seen = 0
        self._times: list[float] = []
        self._rounds: dict[int, list[float]] = {}
        """Of each size: its time in each round."""
        self._used: dict[int, int] = {}
        self._room: int | None = None

    @property
    def fresh(self) -> bool:
        """Whether the next attempt is the first one of a round with its size: its time does not count."""
        return self.exploring and self._seen == 0

    def assign(self, nodes: int) -> None:
        if nodes != self._nodes:
            self._nodes = nodes
            self._choose()

    def forbid(self) -> None:
        self._cap = 1
        self._choose()

    def observe(self, seconds: float, usage: MemoryUse | None) -> None:
        """Take note of an attempt with micro-batches of :attr:`width`.

        Args:
            usage: its memory, ``None`` when that was not, or cannot be measured.
        """
        if not self.exploring:
            return
        if usage is not None:
            self._used[self.width] = max(usage.used, self._used.get(self.width, 0))
            self._room = usage.room
        self._seen += 1
        if self._seen <= WARM_UP:
            return
        self._times.append(seconds)
        if len(self._times) >= ATTEMPTS:
            self._rounds.setdefault(self.width, []).append(statistics.median(self._times))
            self._seen, self._times = 0, []
            self._choose()

    def _choose(self) -> None:
        if not self._nodes:
            return
        possible = widths(self._nodes, self._cap)
        before = self.width
        measured = [width for width in possible if width in self._rounds]
        todo = [(self._rounds_of(width), width) for width in possible if self._is_worth_measuring(width)]
        self.exploring = len(possible) > 1 and bool(todo)
        if self.exploring:
            _, self.width = min(todo)
        else:
            self.width = self._best(measured) if measured else possible[0]
        if self.width != before:
            self._seen, self._times = 0, []

    def _rounds_of(self, width: int) -> int:
        return len(self._rounds.get(width, ()))

    def _best(self, measured: Iterable[int]) -> int:
        """The smallest that is as fast as the fastest, but for what may be chance."""
        seconds = {width: min(self._rounds[width]) for width in measured}
        enough = min(seconds.values()) * (1 + TOLERANCE)
        return min(width for width in seconds if seconds[width] <= enough)

    def _is_worth_measuring(self, width: int) -> bool:
        if self._rounds_of(width) >= ROUNDS:
            return False
        if not self._rounds:
            return width == 1
        fastest = self._best(self._rounds)
        hopeless = min(self._rounds[fastest]) * (1 + HOPELESS)
        slow = [other for other, seconds in self._rounds.items() if fastest < other < width and min(seconds) > hopeless]
        # What is much smaller than the best of another range need not be tried for this one.
        known = width in self._rounds
        return known or (not slow and 2 * width > fastest and self._fits(width))

    def _fits(self, width: int) -> bool:
        """Whether the memory for it is there, by a straight line through what was measured."""
        if not self._used or self._room is None:
            return True
        least, most = min(self._used), max(self._used)
        if width <= most:
            return True
        if least == most:
            predicted = self._used[most] * width / most
        else:
            slope = max(0.0, (self._used[most] - self._used[least]) / (most - least))
            predicted = self._used[most] + slope * (width - most)
        return predicted <= self._room

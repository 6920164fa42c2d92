"""A device that is played on the CPU: its activations leave and return on two lanes of a given bandwidth.

The device's time is a clock that stands still while this process moves bytes, which a real engine would do: the CPU
seconds of the thread that computes, and what it has waited for copies. So other work on the machine counts less.

Bytes really move, and as late as they may: a copy is carried out when its time is over and somebody waits for it. Until
then what returns is not a number, so that nobody can use it too early without changing the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from virtualflow.memory.activations.copies import Event, HostCopy, LaneCopies
from virtualflow.memory.activations.live_bytes import LiveBytes


class Clock:
    """The device's time, in seconds.

    Args:
        wall: by the clock on the wall, with real waits: for a machine that has nothing else to do.
    """

    def __init__(self, *, wall: bool = False) -> None:
        self._wall = wall
        self._shift = 0.0

    def now(self) -> float:
        """The time."""
        return (time.perf_counter() if self._wall else time.thread_time()) + self._shift

    def wait(self, until: float) -> None:
        """Do nothing until then."""
        left = until - self.now()
        if left > 0 and self._wall:
            time.sleep(left)
        elif left > 0:
            self._shift += left

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What is done meanwhile takes no time of the device."""
        began = self.now()
        try:
            yield
        finally:
            self._shift -= self.now() - began


@dataclass
class Carried:
    """A copy on a lane."""

    clock: Clock
    lane: str
    start: float
    end: float
    copy: Callable[[], object] | None
    """Moves the bytes; ``None``: it is done."""

    def query(self) -> bool:
        """Whether its time is over."""
        return self.clock.now() >= self.end

    def synchronize(self) -> None:
        """Wait for it."""
        self.clock.wait(self.end)
        self.finish()

    def finish(self) -> None:
        """Move the bytes now, if they were not."""
        copy, self.copy = self.copy, None
        if copy is not None:
            with self.clock.stopped():
                copy()


class ThrottledCopies(LaneCopies):
    """Lanes of the CPU.

    Args:
        clock: the device's.
        bandwidth: of each lane, in bytes a second.
    """

    def __init__(self, clock: Clock, bandwidth: float) -> None:
        super().__init__(torch.device("cpu"))
        self.carried: list[Carried] = []
        """All copies, in the order in which they were issued."""
        self.live: LiveBytes | None = None
        """Counts what is on the device: not the host's buffers."""
        self._clock, self._bandwidth = clock, bandwidth
        self._free = {"out": 0.0, "in": 0.0}
        """When each lane has nothing more to do."""
        self._bringing: list[Carried] = []

    def out(self, tensor: Tensor, gone: Callable[[int], object]) -> HostCopy | None:
        """As in the base class."""
        with self._unseen():
            return super().out(tensor, gone)

    def _copy_out(self, source: Tensor, buffer: Tensor) -> Event:
        for event in self._bringing:
            event.finish()  # whose buffer this may be
        self._bringing = []

        def copy() -> None:
            with self._unseen():
                buffer.copy_(source)

        return self._carry("out", self._free["in"], source.numel(), copy)

    def _copy_in(self, buffer: Tensor, there: Tensor) -> Event:
        with self._clock.stopped():
            there.fill_(0xFF)
        event = self._carry("in", 0.0, buffer.numel(), lambda: there.copy_(buffer))
        self._bringing.append(event)
        return event

    def _unseen(self) -> AbstractContextManager[None]:
        return nullcontext() if self.live is None else self.live.pause()

    def _carry(self, lane: str, earliest: float, size: int, copy: Callable[[], object]) -> Carried:
        start = max(self._clock.now(), self._free[lane], earliest)
        self._free[lane] = start + size / self._bandwidth
        self.carried.append(Carried(self._clock, lane, start, self._free[lane], copy))
        return self.carried[-1]

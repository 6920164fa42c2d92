"""Copies between a device and the host's memory, in a bounded number of buffers that are used again and again.

:class:`Copies` are done when the call returns. :class:`LaneCopies` go on beside the computation, on a lane for each
direction; with CUDA these are streams, and buffers are pinned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass
class HostCopy:
    """The bytes of one storage on the host; its buffer is used again when they are back, or nobody wants them."""

    buffer: Tensor
    """uint8."""
    ring: Ring

    def __del__(self) -> None:
        self.ring.take_back(self.buffer)


class Ring:
    """Buffers on the host, at most ``limit`` bytes of them (``None``: no limit).

    Those that nobody needs are kept for the next micro-batch, as long as all of them together are no more than have
    been in use at a time: micro-batches of one size want the same buffers every time, those of another size make room.
    """

    def __init__(self, pinned: bool) -> None:
        self.limit: int | None = None
        self.used = 0
        """Bytes that hold something now,"""
        self.peak = 0
        """and the most at a time."""
        self.idle = 0
        """Bytes that are kept."""
        self._pinned = pinned
        self._kept: dict[int, list[Tensor]] = {}
        """By size; the size that was wanted last comes last."""

    def give(self, size: int) -> Tensor | None:
        """A buffer of that size; ``None``: there is no room."""
        if self.limit is not None and self.used + size > self.limit:
            return None
        kept = self._kept.pop(size, [])
        buffer = kept.pop() if kept else None
        if kept:
            self._kept[size] = kept
        self.used += size
        self.peak = max(self.peak, self.used)
        if buffer is None:
            self._drop(self.peak if self.limit is None else min(self.peak, self.limit))
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        self.idle -= size
        return buffer

    def forget(self) -> None:
        """Keep nothing of what was needed so far."""
        self._drop(self.used)
        self.peak = self.used

    def _drop(self, most: int) -> None:
        """Keep no more than leaves it at so many bytes."""
        while self._kept and self.used + self.idle > most:
            size = next(iter(self._kept))
            self._kept[size].pop()
            self.idle -= size
            if not self._kept[size]:
                del self._kept[size]

    def take_back(self, buffer: Tensor) -> None:
        self._kept.setdefault(buffer.numel(), []).append(buffer)
        self.idle += buffer.numel()
        self.used -= buffer.numel()


class Copies:
    """Copies that are done at once."""

    beside = False
    """Whether they go on beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ring = Ring(pinned=device.type == "cuda")

    def out(self, tensor: Tensor, gone: Callable[[int], object]) -> HostCopy | None:
        """Copy the storage of ``tensor`` to the host; ``None``: there is no room.

        Args:
            gone: told how many bytes of the device are free, as soon as they are.
        """
        source = _bytes_of(tensor)
        buffer = self.ring.give(source.numel())
        if buffer is None:
            return None
        self._send(source, buffer, gone)
        return HostCopy(buffer, self.ring)

    def back(self, copy: HostCopy) -> Tensor:
        """A new storage on the device with these bytes, as uint8; before it is read it must :meth:`arrive`."""
        there = torch.empty_like(copy.buffer, device=self.device)
        self.bring(copy.buffer, there)
        return there

    def bring(self, source: Tensor, there: Tensor) -> None:
        """Copy ``source``, uint8 ``[n]``, to the device, where ``there`` is made; see :meth:`back`."""
        there.copy_(source)

    def arrive(self, tensor: Tensor) -> None:
        """Let what computes wait until ``tensor`` is there."""

    def clear(self) -> bool:
        """Whether nothing is leaving any more, so that a copy back may take its memory."""
        return True

    def reclaim(self, leaving: int = 0) -> None:
        """Give the memory back of what has left; wait until no more than ``leaving`` bytes are on their way."""

    def _send(self, source: Tensor, buffer: Tensor, gone: Callable[[int], object]) -> None:
        buffer.copy_(source)
        gone(source.numel())


class Event(Protocol):
    """A copy that is on its way."""

    def query(self) -> bool:
        """Whether it is over."""

    def synchronize(self) -> object:
        """Wait until it is."""


class LaneCopies(Copies, ABC):
    """Copies beside what computes, on two lanes: one out, one back. A copy back begins when nothing is leaving."""

    beside = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._leaving: deque[tuple[Event, Tensor, Callable[[int], object]]] = deque()
        self._leaving_bytes = 0
        self._coming: dict[int, Event] = {}

    def back(self, copy: HostCopy) -> Tensor:
        self.reclaim()
        return super().back(copy)

    def bring(self, source: Tensor, there: Tensor) -> None:
        self._coming[there.untyped_storage()._cdata] = self._copy_in(source, there)

    def arrive(self, tensor: Tensor) -> None:
        event = self._coming.pop(tensor.untyped_storage()._cdata, None)
        if event is not None:
            self._await(event)

    def clear(self) -> bool:
        self.reclaim(self._leaving_bytes)
        return not self._leaving

    def reclaim(self, leaving: int = 0) -> None:
        while self._leaving:
            event, source, gone = self._leaving[0]
            if self._leaving_bytes <= leaving and not event.query():
                return
            event.synchronize()
            self._leaving.popleft()
            self._leaving_bytes -= source.numel()
            gone(source.numel())

    def _send(self, source: Tensor, buffer: Tensor, gone: Callable[[int], object]) -> None:
        self._leaving.append((self._copy_out(source, buffer), source, gone))
        self._leaving_bytes += source.numel()

    def _await(self, event: Event) -> None:
        event.synchronize()

    @abstractmethod
    def _copy_out(self, source: Tensor, buffer: Tensor) -> Event:
        """Begin when ``source`` is computed and all that was issued before, in both directions, is over."""

    @abstractmethod
    def _copy_in(self, buffer: Tensor, there: Tensor) -> Event:
        """Begin when the copies back that were issued before are over."""


class StreamCopies(LaneCopies):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def clear(self) -> bool:
        """Wait for it: this thread is ahead of the device, and a copy that it issues later begins there later."""
        self.reclaim()
        return True

    def _await(self, event: Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)  # type: ignore[arg-type]

    def _copy_out(self, source: Tensor, buffer: Tensor) -> Event:
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        # A buffer is given to the next copy out when nobody holds it, so it must have been read by then.
        self._out.wait_stream(self._in)
        with torch.cuda.stream(self._out):
            buffer.copy_(source, non_blocking=True)
        return self._out.record_event()  # type: ignore[no-any-return]

    def _copy_in(self, buffer: Tensor, there: Tensor) -> Event:
        self._in.wait_stream(torch.cuda.current_stream(self.device))  # which may still use what was in that memory
        with torch.cuda.stream(self._in):
            there.copy_(buffer, non_blocking=True)
        there.record_stream(self._in)
        return self._in.record_event()  # type: ignore[no-any-return]


def open_copies(device: torch.device) -> Copies:
    return StreamCopies(device) if device.type == "cuda" else Copies(device)


def _bytes_of(tensor: Tensor) -> Tensor:
    blank = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return blank.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),), (1,))

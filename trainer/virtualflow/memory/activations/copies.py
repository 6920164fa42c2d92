"""Copies between a device and the host's memory, in a bounded number of buffers that are used again and again.

A copy is done when the call returns. With CUDA buffers are pinned, and :class:`StreamCopies` runs copies on two streams
beside the computation, one for each direction. **That class has never run on a device**, so it is used only where
``ActivationSettings.streams`` says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    """Buffers on the host, at most ``limit`` bytes of them (``None``: no limit)."""

    def __init__(self, pinned: bool) -> None:
        self.limit: int | None = None
        self.used = 0
        """Bytes that hold something now,"""
        self.peak = 0
        """and the most at a time."""
        self._pinned = pinned
        self._idle: dict[int, list[Tensor]] = {}
        self._idle_bytes = 0

    def give(self, size: int) -> Tensor | None:
        """A buffer of that size; ``None``: there is no room."""
        if self.limit is not None and self.used + size > self.limit:
            return None
        idle = self._idle.get(size)
        if idle:
            self._idle_bytes -= size
            buffer = idle.pop()
        else:
            # Micro-batches of one size want the same buffers every time; those of another size make room.
            if self.limit is not None and self.used + self._idle_bytes + size > self.limit:
                self._idle.clear()
                self._idle_bytes = 0
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        self.used += size
        self.peak = max(self.peak, self.used)
        return buffer

    def take_back(self, buffer: Tensor) -> None:
        """Nobody needs it any more."""
        self._idle.setdefault(buffer.numel(), []).append(buffer)
        self._idle_bytes += buffer.numel()
        self.used -= buffer.numel()


class Copies:
    """Copies that are done at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ring = Ring(pinned=device.type == "cuda")

    def out(self, tensor: Tensor, gone: Callable[[int], object]) -> HostCopy | None:
        """Copy the storage of ``tensor`` to the host; ``None``: there is no room.

        Args:
            tensor: nobody changes its storage any more.
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
        return torch.empty_like(copy.buffer, device=self.device).copy_(copy.buffer)

    def arrive(self, tensor: Tensor) -> None:
        """Let what computes wait until ``tensor`` is there."""

    def reclaim(self, over: int | None = None) -> None:
        """Give the memory back of what has left; wait for ``over`` bytes of it, or (``None``) for all."""

    def _send(self, source: Tensor, buffer: Tensor, gone: Callable[[int], object]) -> None:
        buffer.copy_(source)
        gone(source.numel())


class StreamCopies(Copies):
    """Copies on streams of their own, beside what computes. Never run on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._leaving: deque[tuple[Any, Tensor, Callable[[int], object]]] = deque()
        self._coming: dict[int, Any] = {}

    def back(self, copy: HostCopy) -> Tensor:
        """As in the base class; issued behind all that leaves."""
        computing = torch.cuda.current_stream(self.device)
        there = torch.empty_like(copy.buffer, device=self.device)
        self._in.wait_stream(computing)  # which may still use what was in that memory before
        self._in.wait_stream(self._out)
        with torch.cuda.stream(self._in):
            there.copy_(copy.buffer, non_blocking=True)
        there.record_stream(self._in)
        # The buffer is given to the next copy out when nobody holds it, so it must have been read by then.
        self._out.wait_stream(self._in)
        self._coming[there.untyped_storage()._cdata] = self._in.record_event()
        return there

    def arrive(self, tensor: Tensor) -> None:
        """As in the base class."""
        event = self._coming.pop(tensor.untyped_storage()._cdata, None)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def reclaim(self, over: int | None = None) -> None:
        """As in the base class."""
        freed = 0
        while self._leaving:
            event, source, gone = self._leaving[0]
            if not event.query():
                if over is not None and freed >= over:
                    return
                event.synchronize()
            self._leaving.popleft()
            gone(source.numel())
            freed += source.numel()

    def _send(self, source: Tensor, buffer: Tensor, gone: Callable[[int], object]) -> None:
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            buffer.copy_(source, non_blocking=True)
        self._leaving.append((self._out.record_event(), source, gone))


def open_copies(device: torch.device, streams: bool) -> Copies:
    """What copies from and to that device; ``streams``: beside the computation, where it can."""
    return StreamCopies(device) if streams and device.type == "cuda" else Copies(device)


def _bytes_of(tensor: Tensor) -> Tensor:
    """All of its storage, as uint8."""
    blank = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return blank.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),), (1,))

"""Memory beside a device: sums wait there, and it may be where an optimizer steps.

Up to log2(V) sums of a worker wait at a time, and the sum of 2^k virtual nodes is touched once in as many. So the
widest are moved out, and come back place by place as their additions need them, a bounded number of bytes ahead: a
device holds a constant number of them. Beside an accelerator they wait in host memory, beside a CPU in files, if the
user names a directory for them.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from virtualflow.protocol.tree import Key
from virtualflow.reduction.settings import ReductionSettings

logger = logging.getLogger("virtualflow.worker")

Sum = list[Tensor | None]
"""A sum, as ``accumulation.Tensors``: one tensor for each place."""


def choose_offloaded(keys: Sequence[Key], room: int) -> frozenset[Key]:
    """Which of the sums that wait do so in host memory: the widest, and of those that are alike the leftmost.

    Args:
        room: how many stay on the device, at least one.
    """
    by_wait = sorted(keys, key=lambda key: (key[0] - key[1], key[0]))
    return frozenset(by_wait[: max(0, len(keys) - max(1, room))])


class Coming(Protocol):
    """A tensor on its way to the device."""

    def get(self) -> Tensor:
        """It, for what runs on the current stream from now on."""


class HostMemory(Protocol):
    """Host memory in which tensors of a device wait."""

    def store(self, tensor: Tensor) -> Tensor:
        """Begin to move a tensor out: where it comes to, which must not be read before :meth:`finish`.

        A tensor that is not on the device stays, and is returned itself.
        """

    def bring(self, tensor: Tensor) -> Coming:
        """Begin to bring one back; it stays where it was, too."""

    def write(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy a tensor of host memory to memory of the device, for what runs on the current stream from now
        on; nobody writes to ``source`` any more.
        """

    def finish(self) -> None:
        """Wait until all that was moved out is there, to be read in host memory."""


@dataclass(frozen=True)
class Offload:
    """Where sums wait that are too many for a device."""

    memory: HostMemory
    room: int
    """How many sums wait on the device."""
    ahead: int
    """Bytes that are brought back before they are needed, but at least one tensor."""


@dataclass(frozen=True)
class Landing:
    """Sums that come to host memory, since whoever uses them is there."""

    memory: HostMemory
    places: int
    """The first so many; further ones come to where their tensors are."""


def host_memory(device: torch.device) -> HostMemory | None:
    """Host memory beside that device; ``None``: it has no memory of its own."""
    if device.type in ("cpu", "meta", "mps"):
        return None
    return PinnedMemory(device) if device.type == "cuda" else PlainMemory(device)


def plan_offload(device: torch.device, size: int, settings: ReductionSettings) -> Offload | None:
    """Where the sums of gradients on ``device`` wait; ``None``: all where they are.

    Args:
        size: bytes of one sum. Small ones stay: to move them takes the host longer than the device computes meanwhile.
    """
    if size < settings.offload_from:
        return None
    memory = host_memory(device)
    if memory is None and settings.scratch is not None:
        memory = FileMemory(settings.scratch)
    return None if memory is None else Offload(memory, settings.sums_on_device, settings.fetch_ahead)


class Fetch:
    """Brings sums back place by place, some bytes before they are asked for.

    Args:
        sums: those that are offloaded, each with the places that were moved, in the order in which the additions of a
            place need them.
    """

    def __init__(self, offload: Offload, sums: Sequence[tuple[Sum, Set[int]]]) -> None:
        self._offload = offload
        self._moved = {id(tensors): (tensors, places) for tensors, places in sums}
        # A backward pass finishes gradients roughly in the reverse order of the parameters' registration.
        order = range(max((len(tensors) for tensors, _ in sums), default=0) - 1, -1, -1)
        self._queue = deque((tensors, place) for place in order for tensors, places in sums if place in places)
        self._coming: dict[tuple[int, int], Coming] = {}
        self._bytes = self._in_hand = 0
        """What is on its way or here, and of that the tensor that was asked for last."""
        self._look_ahead()

    def take(self, tensors: Sum, place: int) -> Tensor | None:
        tensor, tensors[place] = tensors[place], None
        if tensor is None or id(tensors) not in self._moved or place not in self._moved[id(tensors)][1]:
            return tensor
        coming = self._coming.pop((id(tensors), place), None)
        self._bytes -= self._in_hand  # that is added up by now
        self._in_hand = tensor.nbytes
        if coming is None:
            coming = self._bring(tensor)
        del tensor
        found = coming.get()
        self._look_ahead()
        return found

    def _look_ahead(self) -> None:
        while self._queue:
            tensors, place = self._queue[0]
            tensor = tensors[place]
            if tensor is not None and self._coming and self._bytes + tensor.nbytes > self._offload.ahead:
                return
            self._queue.popleft()
            if tensor is None:  # taken already, or nothing was contributed
                continue
            self._coming[id(tensors), place] = self._bring(tensor)

    def _bring(self, tensor: Tensor) -> Coming:
        self._bytes += tensor.nbytes
        return self._offload.memory.bring(tensor)


@dataclass(frozen=True)
class _There:
    tensor: Tensor

    def get(self) -> Tensor:
        return self.tensor


class PlainMemory:
    """Host memory of a device without streams that this library knows: every move is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def store(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()  # itself, if it is there

    def bring(self, tensor: Tensor) -> Coming:
        return _There(tensor.to(self._device))

    def write(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def finish(self) -> None:
        """Everything is there."""


class FileMemory:
    """Files that are mapped into memory, for a CPU: the kernel writes them out and drops them when memory is scarce.

    They have no names, so nothing stays behind, however the process ends.

    Args:
        directory: on a disk, not in memory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def store(self, tensor: Tensor) -> Tensor:
        """See :class:`HostMemory`; where there is no room left, a tensor stays where it is."""
        if not tensor.nbytes:
            return tensor
        try:
            with tempfile.TemporaryFile(dir=self._directory) as file:
                os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # else a full disk would be a signal, SIGBUS
                mapped = mmap.mmap(file.fileno(), tensor.nbytes)
        except OSError as error:
            logger.warning(
                "a sum of gradients stays in memory, since %s cannot take it (%s); free some space there, or let "
                "vf.Memory(scratch=...) name another directory",
                self._directory,
                error.strerror,
            )
            return tensor
        there = torch.frombuffer(mapped, dtype=tensor.dtype)
        dense = tensor.untyped_storage().nbytes() == tensor.nbytes
        there = there.as_strided(tensor.shape, tensor.stride()) if dense else there.view(tensor.shape)
        return there.copy_(tensor)

    def bring(self, tensor: Tensor) -> Coming:
        return _There(tensor.clone())

    def write(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def finish(self) -> None:
        """Everything is there."""


@dataclass(frozen=True)
class _OnStream:
    tensor: Tensor
    event: torch.cuda.Event

    def get(self) -> Tensor:
        current = torch.cuda.current_stream(self.tensor.device)
        current.wait_event(self.event)
        self.tensor.record_stream(current)
        return self.tensor


class PinnedMemory:
    """Pinned host memory of a CUDA device; moves go by a stream of their own, beside what is computed.

    They are in order on that stream, so what is brought back was moved out before. torch keeps freed pinned memory for
    the next move, and lends it to nobody before a copy from it has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def store(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cuda":
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is free for others behind the copy
        return host

    def bring(self, tensor: Tensor) -> Coming:
        if tensor.device.type == "cuda":
            return _There(tensor)
        with torch.cuda.stream(self._stream):
            moved = tensor.to(self._device, non_blocking=True)
            return _OnStream(moved, self._stream.record_event())

    def write(self, source: Tensor, target: Tensor) -> None:
        """See :class:`HostMemory`. It takes the current stream, on which the target is used before and behind it."""
        target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        self._stream.synchronize()

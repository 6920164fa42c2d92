"""Micro-batches on their way to a device: copied beside its computation, from pinned memory, on a stream of their own.

A copy from ordinary memory makes the host wait for all kernels that were launched before it, so that the device idles
while the next ones are launched (CUDA C++ Best Practices Guide, "Asynchronous and overlapping transfers with
computation"). From pinned memory it is only queued. What is copied are the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from virtualflow.data.dataloader import MicroBatch


@dataclass(frozen=True)
class Staged:
    """A micro-batch whose tensors are on their way; nothing may use it before :meth:`Staging.finish`."""

    batch: MicroBatch
    leaves: list[Any] = field(default_factory=list)
    """Its tensors on the device, and whatever else is in it, as ``shape`` has them,"""
    shape: pytree.TreeSpec | None = None
    copied: torch.cuda.Event | None = None
    """and when those of the host are there; ``None``: nothing has set out."""


class Staging:
    """Brings micro-batches to one device: tensors in lists, tuples and dicts, and whatever has a method ``to``.

    Args:
        device: where to; ``None`` leaves them as they are.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device is not None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

    @property
    def beside(self) -> bool:
        """Whether copies go on beside the computation, so that a micro-batch is better sent ahead of its use."""
        return self._stream is not None

    def start(self, batch: MicroBatch) -> Staged:
        """Let the tensors that are on the host set out; if the device is another one, they may change afterwards."""
        if self._stream is None:
            return Staged(batch)
        leaves, shape = pytree.tree_flatten(batch.data)
        with torch.cuda.stream(self._stream):
            sent = [self._send(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return Staged(batch, sent, shape, self._stream.record_event())

    def finish(self, staged: Staged) -> MicroBatch:
        """The micro-batch on the device; what is launched on the current stream from now on finds it complete."""
        batch, shape = staged.batch, staged.shape
        if self._device is None:
            return batch
        if shape is None or staged.copied is None:
            return replace(batch, data=pytree.tree_map(self._put, batch.data))
        current = torch.cuda.current_stream(self._device)
        current.wait_event(staged.copied)
        for leaf in staged.leaves:
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                # Its memory belongs to the other stream, which must not use it again before this one is done.
                leaf.record_stream(current)
        return replace(batch, data=pytree.tree_unflatten([self._put(leaf) for leaf in staged.leaves], shape))

    def move(self, batch: MicroBatch) -> MicroBatch:
        return self.finish(self.start(batch))

    def _send(self, tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
            return tensor  # of another device: the stream that computes it is the one to copy it
        if tensor.is_pinned():
            # Whoever pinned it may write to it next, so the host waits: for this stream only, and for no kernel.
            return tensor.to(self._device)
        # torch frees pinned memory for other uses when the copies that were queued from it are over. Not pin_memory(),
        # which refuses tensors of expand().
        pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return pinned.to(self._device, non_blocking=True)

    def _put(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device == self._device:
            return leaf
        move = getattr(leaf, "to", None)
        return move(self._device) if callable(move) else leaf

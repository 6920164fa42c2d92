"""Tensors on their way between the host, where a model lives, and a device that holds only a few of its blocks.

A copy is done when the call returns. **This has run on the CPU only**, where it stands in for a device; on one, copies
beside the computation would be another :class:`Carrier`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from virtualflow.memory.activations.live_bytes import LiveBytes


class Carrier:
    """Copies tensors to a device and back, and counts the bytes.

    A copy has the strides of its original, gaps included: kernels may come to other bits with other strides.

    Args:
        device: that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.weight_bytes = 0
        """Parameters and buffers that were brought to the device."""
        self.bytes_in = 0
        """All that was brought there, with these,"""
        self.bytes_out = 0
        """and back."""
        self._watchers: list[LiveBytes] = []

    def bring(self, tensor: Tensor) -> Tensor:
        """A copy on the device."""
        with self._unseen():
            made = copy_to(tensor, self.device)
        for live in self._watchers:
            live.add([made])
        self.bytes_in += made.untyped_storage().nbytes()
        return made

    def take(self, tensor: Tensor) -> Tensor:
        """A copy on the host."""
        with self._unseen():
            made = copy_to(tensor, torch.device("cpu"))
        self.bytes_out += made.untyped_storage().nbytes()
        return made

    @contextmanager
    def seen_by(self, live: LiveBytes) -> Iterator[None]:
        """Meanwhile somebody counts what is on the device: not what is taken from there."""
        self._watchers.append(live)
        try:
            with live:
                yield
        finally:
            self._watchers.remove(live)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        with ExitStack() as stack:
            for live in self._watchers:
                stack.enter_context(live.pause())
            yield


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides, in memory of its own."""
    source = tensor.detach().resolve_conj().resolve_neg()
    made = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=device)
    _row(made).copy_(_row(source))
    return made


def _row(tensor: Tensor) -> Tensor:
    """The memory from the first of its elements to the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return tensor.as_strided((span,), (1,), tensor.storage_offset())

"""A device that is played on the CPU: its copies to and from the host take as long as a real one's would.

Each direction is one engine, which copies one tensor after the other at a given bandwidth, beside what computes. The
tensors are copied by the CPU as well, which a real engine would not ask of it, so what is measured is an upper bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from virtualflow.worker import setup

BANDWIDTH = 12e9
"""Bytes per second in each direction: what PCIe 3.0 with 16 lanes reaches."""


class Engine:
    """Copies in one direction."""

    def __init__(self, bandwidth: float) -> None:
        self.copied = 0
        """Bytes so far."""
        self._bandwidth, self._free_at = bandwidth, 0.0

    def copy(self, source: Tensor, target: Tensor) -> Tensor:
        """Begin a copy behind those that are under way."""
        began = time.perf_counter()
        target.copy_(source)
        self.copied += source.nbytes
        self._free_at = max(self._free_at, began) + source.nbytes / self._bandwidth
        return target

    def wait(self) -> None:
        """Until all is there."""
        left = self._free_at - time.perf_counter()
        if left > 0:
            time.sleep(left)


@dataclass(frozen=True)
class There:
    """A tensor that is on the device."""

    tensor: Tensor

    def get(self) -> Tensor:
        """It."""
        return self.tensor


class PlayedMemory:
    """Host memory (``reduction.HostMemory``) beside that device."""

    def __init__(self, bandwidth: float = BANDWIDTH) -> None:
        self.out, self.back = Engine(bandwidth), Engine(bandwidth)

    def store(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor out."""
        return self.out.copy(tensor, torch.empty_like(tensor))

    def bring(self, tensor: Tensor) -> There:
        """Copy one back, and wait for it."""
        there = self.back.copy(tensor, torch.empty_like(tensor))
        self.back.wait()
        return There(there)

    def write(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy one back to where it was; the device must wait for that before it computes."""
        self.back.copy(source, target)

    def finish(self) -> None:
        """Wait for what was copied out."""
        self.out.wait()


def play() -> PlayedMemory:
    """Let this process's CPU be such a device for optimizers that are on the host."""
    memory = PlayedMemory()
    setup.host_memory = lambda device: memory
    return memory

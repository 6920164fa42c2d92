"""Host memory of a device that is played: all tensors are on the CPU, and what is moved is counted."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class There:
    tensor: Tensor

    def get(self) -> Tensor:
        return self.tensor


class CountedMemory:
    """Host memory that counts; what is in it must not be read before it has arrived."""

    def __init__(self) -> None:
        self.moved = self.brought = 0
        self._inside: list[weakref.ref[Tensor]] = []
        self._arriving: list[tuple[Tensor, Tensor]] = []

    def store(self, tensor: Tensor) -> Tensor:
        self.moved += tensor.nbytes
        host = torch.full_like(tensor, float("nan"))
        self._inside.append(weakref.ref(host))
        self._arriving.append((host, tensor.clone()))
        self.finish() if len(self._arriving) > 3 else None
        return host

    def bring(self, tensor: Tensor) -> There:
        self.brought += tensor.nbytes
        self.finish()  # as moves of one stream are in order
        return There(tensor.clone())

    def write(self, source: Tensor, target: Tensor) -> None:
        self.brought += source.nbytes
        self.finish()
        target.copy_(source)

    def finish(self) -> None:
        for host, tensor in self._arriving:
            host.copy_(tensor)
        self._arriving.clear()

    @property
    def bytes(self) -> int:
        self.finish()
        return sum(tensor.nbytes for tensor in (ref() for ref in self._inside) if tensor is not None)

"""A network that flips bits: a real communicator's, of which one member's messages are damaged on their way."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import virtualflow.transport.gloo
from virtualflow.transport.gloo import Communicator
from virtualflow.transport.mesh import build_mesh


class Damaging:
    """A group that damages what is sent: the operation number ``at``, counted from 1, in the bit that is drawn."""

    def __init__(self, group: c10d.ProcessGroup, at: int, seed: int) -> None:
        self._group = group
        self._draw = random.Random(seed)
        self.at = at
        self.sent = 0

    def _pass(self, tensor: Tensor) -> Tensor:
        """What goes out in place of ``tensor``."""
        self.sent += 1
        if self.sent != self.at or tensor.numel() == 0:
            return tensor
        damaged = tensor.clone()
        raw = damaged.view(-1).view(torch.uint8)
        raw[self._draw.randrange(len(raw))] ^= 1 << self._draw.randrange(8)
        return damaged

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> c10d.Work:
        return self._group.send([self._pass(tensors[0])], peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> c10d.Work:
        return self._group.recv(tensors, peer, tag)

    def _allgather_base(self, out: Tensor, block: Tensor, options: Any) -> c10d.Work:
        return self._group._allgather_base(out, self._pass(block), options)


def damage(communicator: Communicator, at: int, seed: int) -> Damaging:
    """Let what that member sends be damaged."""
    assert communicator._group is not None
    faulty = Damaging(communicator._group, at, seed)
    communicator._group = faulty  # type: ignore[assignment]
    return faulty


def damage_first_generation(at: int) -> None:
    """Let one thing that this process sends in its first generation be damaged."""
    made: list[Damaging] = []

    def build(*arguments: Any) -> Any:
        group = build_mesh(*arguments)
        if made:
            return group
        made.append(Damaging(group, at, seed=at))
        return made[0]

    virtualflow.transport.gloo.build_mesh = build  # type: ignore[attr-defined]

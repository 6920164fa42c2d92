"""What a reduction needs of a communicator, and the one of a process that carries everything."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """A collective that was started."""

    def wait(self) -> None:
        """Wait until what it brings is there."""


class Collectives(Protocol):
    """Collectives among the members of a generation; all members start theirs in the same order.

    Messages are contiguous rows of bytes (uint8) on the CPU, and stay as they are until the collective is complete.
    """

    rank: int
    size: int

    def all_gather(self, block: Tensor) -> Tensor:
        """Gather equal blocks: uint8 ``[n]`` to ``[size, n]`` in the order of the ranks."""

    def start_all_gather(self, out: Tensor, block: Tensor) -> Pending:
        """Gather ``block`` of every member into ``out``."""

    def start_all_to_all(self, out: Tensor, block: Tensor, out_sizes: list[int], in_sizes: list[int]) -> Pending:
        """Exchange stretches of ``block``; sizes in bytes."""


class _Done:
    def wait(self) -> None:
        """It is there."""


DONE: Pending = _Done()
"""A collective that was complete at once."""


class Alone:
    """A group of one member."""

    rank = 0
    size = 1

    def all_gather(self, block: Tensor) -> Tensor:
        """``[n]`` to ``[1, n]``."""
        return block.unsqueeze(0)

    def start_all_gather(self, out: Tensor, block: Tensor) -> Pending:
        """Copy."""
        out.copy_(block)
        return DONE

    def start_all_to_all(self, out: Tensor, block: Tensor, out_sizes: list[int], in_sizes: list[int]) -> Pending:
        """Copy."""
        out.copy_(block)
        return DONE


ALONE = Alone()


def as_bytes(text: str) -> Tensor:
    """UTF-8 of ``text`` as uint8 ``[n]``."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def gather_bytes(communicator: Collectives, block: Tensor, alignment: int) -> list[Tensor]:
    """Every member's uint8 ``[n]``, each of its own length, in the order of the ranks."""
    length = torch.tensor([block.numel()], dtype=torch.int64).view(torch.uint8)
    lengths = communicator.all_gather(length).contiguous().view(-1).view(torch.int64).tolist()
    room = max(1, -(-max(lengths) // alignment) * alignment)
    padded = torch.zeros(room, dtype=torch.uint8)
    padded[: block.numel()] = block
    return [row[:length] for row, length in zip(communicator.all_gather(padded), lengths, strict=True)]

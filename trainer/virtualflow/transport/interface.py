"""What a reduction needs of a communicator, and the one of a process that is alone."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_BOUNDARY = 16
"""Gathered rows begin at a multiple of so many bytes: the largest element's, so that tensors in them need no copy."""


@dataclass(frozen=True)
class Message:
    """A stretch of host memory to be sent to a member or received from it, without a copy."""

    peer: int
    stretch: Tensor
    """Contiguous, of any type."""
    incoming: bool


class Pending(Protocol):
    """A collective that was started, or messages; bytes are those of the content, without heads and tags."""

    @property
    def sent(self) -> int:
        """Bytes for others."""

    @property
    def received(self) -> int:
        """Bytes from others."""

    @property
    def ended(self) -> int:
        """When the last of it had come and left, by ``time.perf_counter_ns``; 0: there was nothing."""

    def wait(self) -> None:
        """Wait until what it brings is there."""


class Collectives(Protocol):
    """Collectives among the members of a generation; all members start theirs in the same order.

    Their tensors are contiguous, on the CPU, and stay as they are until the collective is complete; those of gathers
    are bytes (uint8).
    """

    rank: int
    size: int

    @property
    def beside(self) -> Collectives:
        """The same for another thread than the one that trains; neither knows of what the other one starts."""

    def all_gather(self, block: Tensor) -> Tensor:
        """Gather equal blocks: uint8 ``[n]`` to ``[size, n]`` in the order of the ranks."""

    def start_all_gather(self, out: Tensor, block: Tensor) -> Pending:
        """Gather ``block`` of every member into ``out``."""

    def start_messages(self, messages: Sequence[Message]) -> Pending:
        """Send and receive between pairs of members; what one sends to another arrives in the order of sending."""

    def flush(self) -> None:
        """Wait until all that was started has left: nothing moves while nobody waits."""

    def settle(self, outcome: Future[T]) -> T:
        """Wait for what another thread makes of these collectives, as long as it is worth it."""

    def cut(self) -> None:
        """Break off all that is under way: no message is read or written any more."""


class _Done:
    sent = received = ended = 0

    def wait(self) -> None:
        """It is there."""


DONE: Pending = _Done()
"""A collective that was complete at once."""


def as_bytes(text: str) -> Tensor:
    """UTF-8 of ``text`` as uint8 ``[n]``."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def gather_bytes(communicator: Collectives, block: Tensor) -> list[Tensor]:
    """Every member's uint8 ``[n]``, each of its own length, in the order of the ranks."""
    length = torch.tensor([block.numel()], dtype=torch.int64).view(torch.uint8)
    lengths = communicator.all_gather(length).contiguous().view(-1).view(torch.int64).tolist()
    room = max(1, -(-max(lengths) // _BOUNDARY) * _BOUNDARY)
    padded = torch.zeros(room, dtype=torch.uint8)
    padded[: block.numel()] = block
    return [row[:length] for row, length in zip(communicator.all_gather(padded), lengths, strict=True)]

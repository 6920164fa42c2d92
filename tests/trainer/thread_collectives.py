"""Workers of tests as threads: their collectives are a table that they all write to, and may fail at any operation.

Nothing here depends on the time that anything takes: an operation fails by its number, and those who wait for somebody
who has failed are told, as by a connection that closes. What a worker sends is copied as late as it may be, so that
what is not awaited and then overwritten arrives so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from virtualflow.errors import CommunicatorBroken
from virtualflow.transport.interface import DONE, Message, Pending

T = TypeVar("T")
PATIENCE = 60


class Alone:
    """A group of one member."""

    rank = 0
    size = 1

    @property
    def beside(self) -> Alone:
        """The same."""
        return self

    def all_gather(self, block: Tensor) -> Tensor:
        """``[n]`` to ``[1, n]``."""
        return block.unsqueeze(0)

    def start_all_gather(self, out: Tensor, block: Tensor) -> Pending:
        out.copy_(block)
        return DONE

    def start_messages(self, messages: Sequence[Message]) -> Pending:
        assert not messages
        return DONE

    def flush(self) -> None:
        """Nothing leaves."""

    def settle(self, outcome: Future[T]) -> T:
        return outcome.result()

    def cut(self) -> None:
        """Nothing is under way."""


ALONE = Alone()


class Table:
    """Where threads that stand for workers leave what others are to receive."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=PATIENCE)
        self._letters: dict[tuple[int, int], SimpleQueue[Tensor | None]] = {
            (sender, receiver): SimpleQueue() for sender in range(size) for receiver in range(size)
        }
        self._blocks: list[list[Tensor]] = [[] for _ in range(size)]

    def swap(self, rank: int, blocks: list[Tensor]) -> list[list[Tensor]]:
        """Give these and get everybody's."""
        self._blocks[rank] = [block.clone() for block in blocks]
        try:
            self._barrier.wait()
            received = list(self._blocks)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise CommunicatorBroken("another one has failed") from None
        return received

    def send(self, sender: int, receiver: int, letter: Tensor) -> None:
        """Leave a message."""
        self._letters[sender, receiver].put(letter)

    def receive(self, sender: int, receiver: int) -> Tensor:
        """Wait for the next message."""
        letter = self._letters[sender, receiver].get(timeout=PATIENCE)
        if letter is None:
            self._letters[sender, receiver].put(None)
            raise CommunicatorBroken("another one has failed")
        return letter

    def abort(self) -> None:
        """Somebody has failed: nobody waits any more, but for what has been sent before."""
        self._barrier.abort()
        for letters in self._letters.values():
            letters.put(None)


@dataclass
class Seat:
    """The collectives of one worker; the operation ``fails_at``, counted from 1, fails in the way ``how``."""

    table: Table
    rank: int
    fails_at: int = 0
    how: Literal["before", "after"] = "before"
    """Nothing of it is done; or it works for the others, and this worker is told that it broke."""
    operations: int = 0

    @property
    def size(self) -> int:
        """Of the group."""
        return self.table.size

    @property
    def beside(self) -> Seat:
        """The same: at one table, no two threads of a worker do anything at the same time."""
        return self

    def all_gather(self, block: Tensor) -> Tensor:
        """Gather at once."""
        fails = self._begin()
        received = self.table.swap(self.rank, [block])
        self._end(fails)
        return torch.stack([blocks[0] for blocks in received])

    def start_all_gather(self, out: Tensor, block: Tensor) -> Pending:
        """Gather at once."""
        assert out.dtype == block.dtype == torch.uint8
        out.copy_(self.all_gather(block).view(out.shape))
        return DONE

    def start_messages(self, messages: Sequence[Message]) -> Pending:
        """Send when it is waited for."""
        return Letters(self, messages, self._begin())

    def flush(self) -> None:
        """All leaves when it is waited for."""

    def settle(self, outcome: Future[T]) -> T:
        """Wait."""
        return outcome.result(timeout=PATIENCE)

    def cut(self) -> None:
        """Fail for all."""
        self.table.abort()

    def _begin(self) -> bool:
        self.operations += 1
        fails = self.operations == self.fails_at
        if fails and self.how == "before":
            self.table.abort()
            raise CommunicatorBroken("injected by the test")
        return fails

    def _end(self, fails: bool) -> None:
        if fails:
            self.table.abort()
            raise CommunicatorBroken("injected by the test")


class Letters:
    """Messages that leave as late as they may."""

    ended = 0

    def __init__(self, seat: Seat, messages: Sequence[Message], fails: bool) -> None:
        self._seat, self._messages, self._fails = seat, messages, fails
        self.sent = sum(message.stretch.nbytes for message in messages if not message.incoming)
        self.received = sum(message.stretch.nbytes for message in messages if message.incoming)
        assert all(message.stretch.is_contiguous() and message.peer != seat.rank for message in messages)

    def wait(self) -> None:
        """Send and receive."""
        table, rank = self._seat.table, self._seat.rank
        for message in self._messages:
            if not message.incoming:
                table.send(rank, message.peer, message.stretch.clone())
        for message in self._messages:
            if message.incoming:
                arrived = table.receive(message.peer, rank)
                assert (arrived.dtype, arrived.numel()) == (message.stretch.dtype, message.stretch.numel())
                message.stretch.copy_(arrived.view(message.stretch.shape))
        self._seat._end(self._fails)


def take_seats(size: int) -> list[Any]:
    """Those of one table, by rank; whoever is alone needs none."""
    if size == 1:
        return [ALONE]
    table = Table(size)
    return [Seat(table, rank) for rank in range(size)]


def together(seats: Sequence[Any], work: Callable[[int], T]) -> list[T | None]:
    """Let each rank work in a thread of its own, and nobody wait for one that has failed.

    Args:
        seats: a `Seat` of one table for each, or ``ALONE``.
        work: what a rank does.

    Returns:
        What each came to, ``None`` where its communicator broke. Any other error is raised.
    """

    def one(rank: int) -> T | None:
        try:
            return work(rank)
        except BaseException as error:
            if isinstance(seats[rank], Seat):
                seats[rank].table.abort()
            if isinstance(error, CommunicatorBroken):
                return None
            raise

    with ThreadPoolExecutor(len(seats)) as pool:
        return list(pool.map(one, range(len(seats))))

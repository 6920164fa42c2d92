"""What is under way between the members of a generation, and how it is waited for: gloo's works, and checksums.

Nothing of it is used before it has been compared with the checksum that came with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from virtualflow.errors import CommunicatorBroken
from virtualflow.transport.activity import Activity
from virtualflow.transport.checksum import verify
from virtualflow.transport.interface import Message, Pending
from virtualflow.transport.settings import CommunicatorSettings


class Operation:
    """A collective under way."""

    def __init__(
        self, work: c10d.Work, check: Callable[[], None], activity: Activity, settings: CommunicatorSettings
    ) -> None:
        self._work = work
        self._check = check
        self._activity = activity
        self._settings = settings

    def wait(self) -> None:
        """Wait for it in slices, looking at the coordinator's news in between.

        Raises:
            CommunicatorBroken: a peer is lost, or the coordinator says that the generation is.
        """
        with self._activity.waiting:
            self._wait()

    def _wait(self) -> None:
        limit = time.monotonic() + self._settings.operation_timeout
        part = timedelta(seconds=self._settings.wait_slice)
        while True:
            # Whether it is complete is asked before: it may well complete between a slice's end and a later question.
            complete = self._work.is_completed()
            try:
                self._work.wait(part)
                return
            except RuntimeError as error:
                if complete or time.monotonic() >= limit:
                    raise CommunicatorBroken(brief(error)) from error
            self._check()


class Gather:
    """Blocks of all members under way, and their checksums behind them or beside them."""

    def __init__(self, out: Tensor, rows: Tensor, checks: Tensor, names: Sequence[str], parts: list[Pending]) -> None:
        self._out, self._rows, self._checks = out, rows, checks
        self._names = names
        self._parts = parts

    def wait(self) -> None:
        """Wait for all of it, and compare.

        Raises:
            CommunicatorBroken: a peer is lost, the generation is over, or a block is not what was sent.
        """
        for part in self._parts:
            part.wait()
        target = self._out.view(len(self._names), -1)
        if self._rows.data_ptr() != target.data_ptr():
            target.copy_(self._rows)
        for row, check, name in zip(target, self._checks, self._names, strict=True):
            verify(row, check, name)


class Landing:
    """Whether what has arrived may still be copied to where it belongs: no more once all is broken off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False

    def copy(self, target: Tensor, arrived: Tensor) -> None:
        """Copy it.

        Raises:
            CommunicatorBroken: the memory is free for other uses by now.
        """
        with self._lock:
            if self._over:
                raise CommunicatorBroken("the connections were cut")
            target.copy_(arrived)

    def end(self) -> None:
        """Nothing is copied any more when this has returned."""
        with self._lock:
            self._over = True


@dataclass(frozen=True)
class Letter:
    """A message between a pair under way, with its checksum."""

    message: Message
    raw: Tensor
    """Its bytes as they travel, uint8 ``[n]``: the message's own memory, or that of a small one and its checksum."""
    check: Tensor
    works: tuple[c10d.Work, ...]
    """torch's works hold the memory that they are read from or written to."""
    sender: str
    landing: Landing

    def wait(self, timeout: timedelta) -> None:
        """Wait for it to its end.

        Raises:
            Damaged: it is not what was sent.
            RuntimeError: a peer is lost, or the connections were cut.
        """
        # The checksum of a large message comes behind it on the same connection. It is waited for first, since gloo
        # never ends the wait for a message of which a part had come when its connection closed.
        for work in reversed(self.works):
            work.wait(timeout)
        if not self.message.incoming:
            return
        verify(self.raw, self.check, self.sender)
        target = self.message.stretch.view(-1).view(torch.uint8)
        if target.data_ptr() != self.raw.data_ptr():
            self.landing.copy(target, self.raw)


class Letters:
    """Messages between pairs under way."""

    def __init__(self, letters: Sequence[Letter], timeout: timedelta) -> None:
        self._letters = letters
        self._timeout = timeout

    def wait(self) -> None:
        """Wait for them to their end.

        Raises:
            CommunicatorBroken: a peer is lost, the connections were cut, or a message is not what was sent.
        """
        try:
            for letter in self._letters:
                letter.wait(self._timeout)
        except RuntimeError as error:
            raise CommunicatorBroken(brief(error)) from error


def brief(error: Exception) -> str:
    """The first line of a collective's error without the path of torch's source file."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line.rsplit("] ", 1)[-1][:300] if line.startswith("[") else line[:300]

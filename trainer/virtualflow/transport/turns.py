"""A worker's turns on the device that its job shares with others: asks the node's turn server, and gives back.

Without a server that answers, it computes at once. A server that hangs, or a connection that ends, costs one wait: then
there are no turns until a later attempt to connect succeeds.
"""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from virtualflow.protocol.turns import (
    MAX_LINE,
    STAGE,
    Ask,
    Attach,
    FromSharer,
    GiveBack,
    Granted,
    ToSharer,
    line,
    to_sharer,
)
from virtualflow.transport.activity import Activity
from virtualflow.transport.settings import TurnSettings


class Turns:
    """For the training thread, which never waits for a turn while it has one, nor for other workers.

    Args:
        job: all workers of this job give the same.
        device: all jobs on it give the same.
        tell: hears once, in words, that there are no turns.
    """

    def __init__(
        self, path: Path, job: str, device: str, settings: TurnSettings, activity: Activity, tell: Callable[[str], None]
    ) -> None:
        self._path, self._attach = path, Attach(job, device)
        self._settings, self._activity, self._tell = settings, activity, tell
        self._socket: socket.socket | None = None
        self._received = b""
        self._turn = 0
        self._held = False
        self._retry_at = 0.0
        self._told = False
        _open.add(self)

    def take(self, step: int, check: Callable[[], object]) -> float:
        """Wait for the device; seconds that it took. Whoever has it has it at once."""
        if self._held or not self._connected():
            return 0.0
        began = time.monotonic()
        self._turn += 1
        self._held = True  # from now on there is something to give back
        self._activity.mark(STAGE, step)
        try:
            with self._activity.waiting:
                self._send(Ask(self._turn))
                self._await(check)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._lose(error)
        return time.monotonic() - began

    def give_back(self) -> None:
        """The device is not needed until the next :meth:`take`, or was never given."""
        if not self._held:
            return
        self._held = False
        try:
            self._send(GiveBack(self._turn))
        except OSError as error:
            self._lose(error)

    def close(self) -> None:
        self._held = False
        self._disconnect()
        self._retry_at = float("inf")
        _open.discard(self)

    def _await(self, check: Callable[[], object]) -> None:
        limit = time.monotonic() + self._settings.answer
        while True:
            for message in self._messages(min(limit, time.monotonic() + self._settings.wait_slice)):
                if message.turn != self._turn:
                    continue
                if isinstance(message, Granted):
                    return
                limit = time.monotonic() + message.most + self._settings.answer
            if time.monotonic() >= limit:
                raise TimeoutError("it does not answer")
            check()

    def _messages(self, until: float) -> list[ToSharer]:
        assert self._socket is not None
        looking = select.poll()  # a process of many files has numbers that select does not take
        looking.register(self._socket, select.POLLIN)
        if not looking.poll(max(0.0, 1_000 * (until - time.monotonic()))):
            return []
        data = self._socket.recv(MAX_LINE)
        if not data:
            raise ConnectionError("it has closed the connection")
        *lines, self._received = (self._received + data).split(b"\n")
        return [to_sharer.decode(text) for text in lines]

    def _send(self, message: FromSharer) -> None:
        assert self._socket is not None
        self._socket.sendall(line(message))

    def _connected(self) -> bool:
        if self._socket is not None:
            return True
        if time.monotonic() < self._retry_at:
            return False
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(self._settings.answer)
        self._socket, self._received = connection, b""
        try:
            connection.connect(str(self._path))
            self._send(self._attach)
        except OSError as error:
            self._lose(error)
            return False
        self._told = False
        return True

    def _lose(self, error: Exception) -> None:
        self._held = False
        self._disconnect()
        self._retry_at = time.monotonic() + self._settings.retry
        if not self._told:
            self._told = True
            cause = getattr(error, "strerror", None) or error
            self._tell(
                f"no turns on a shared device: the turn server at {self._path} is not there ({cause}); computing "
                "without, which disturbs other jobs and changes no result"
            )

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


_open: weakref.WeakSet[Turns] = weakref.WeakSet()


def _let_go() -> None:
    """A process was forked: the connection is its parent's, and is to end with that."""
    for turns in list(_open):
        turns.close()


os.register_at_fork(after_in_child=_let_go)

"""Answers to what the other members of a generation ask, given by a thread beside those that train.

Collectives need all members at the same place of the script. What a member only keeps for the others, it can give them
whenever they ask, and take from them whenever they have something for it. Each pair has a connection for what the one
asks and one for what the other does, so a frame on it is a request, what belongs to it, or an answer.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from virtualflow.errors import VirtualFlowError
from virtualflow.transport.channel import Channel, FrameExchange, checksum
from virtualflow.transport.settings import CommunicatorSettings


@dataclass(frozen=True)
class Give:
    """The answer is these bytes."""

    content: memoryview


@dataclass(frozen=True)
class Take:
    """There is no answer; what the asker sends behind its request comes into ``room``."""

    room: memoryview
    taken: Callable[[], None]


Handler = Callable[[int, bytes], Give | Take | None]
"""Gets the rank of whoever asks, and the request; ``None``: not yet, ask again when :meth:`Answers.stir` was called."""


class Answers:
    """Serves the other members, once it is told how.

    Args:
        channels: those on which the others ask, by their ranks.
        check: raises ``CommunicatorBroken`` if the generation is over.
        hashes: whether what is sent bears a checksum.
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        check: Callable[[], None],
        settings: CommunicatorSettings,
        *,
        hashes: bool,
    ) -> None:
        self._channels = channels
        self._check, self._slice, self._hashes = check, settings.wait_slice, hashes
        self._poll = select.poll()
        self._channels_by_number = {channel.number: channel for channel in channels.values()}
        self._asked: dict[int, int] = {}
        self._stirred, self._stirs = socket.socketpair()
        self._stirred.setblocking(False)
        self._stirs.setblocking(False)
        self._thread: threading.Thread | None = None
        self._waiting: dict[int, bytes] = {}
        """Requests that cannot be answered yet, by who asks."""
        self._coming: dict[int, tuple[FrameExchange, int, Callable[[], None]]] = {}
        """What is expected of each, in how many bytes, and what then happens."""
        self._size = 0
        self._handle: Handler = _refuse_all
        self.broken: Exception | None = None
        """Why nobody is served any more, if so."""
        self._failed: Callable[[], None] | None = None
        self.sent = self.received = 0
        """Bytes of all frames that were begun, or have come, without heads and tags."""

    def begin(self, size: int, handle: Handler, failed: Callable[[], None]) -> None:
        """Serve from now on.

        Args:
            size: bytes of a request.
            handle: called by the thread that serves.
            failed: called by it when it ends, which ``broken`` explains.
        """
        self._size, self._handle, self._failed = size, handle, failed
        self._thread = threading.Thread(target=self._run, name="virtualflow-answers", daemon=True)
        self._thread.start()

    def stir(self) -> None:
        """What could not be answered may be answered now."""
        with contextlib.suppress(OSError):  # it is awake, or at its end
            self._stirs.send(b"\0")

    def cut(self) -> None:
        for channel in self._channels.values():
            channel.cut()
        self.stir()

    def close(self) -> None:
        self.cut()
        if self._thread is not None:
            self._thread.join()
        for channel in self._channels.values():
            channel.close()
        self._stirs.close()
        self._stirred.close()

    def _run(self) -> None:
        try:
            self._poll.register(self._stirred, select.POLLIN)
            for peer in self._channels:
                self._await_request(peer)
            while True:
                self._move()
        except Exception as error:  # noqa: BLE001 - the training thread raises it
            self.broken = error
            if self._failed is not None:
                self._failed()

    def _move(self) -> None:
        for channel in self._channels.values():
            interest = channel.interest
            if self._asked.get(channel.number) != interest:
                self._poll.register(channel.number, interest)
                self._asked[channel.number] = interest
        ready = self._poll.poll(1e3 * self._slice)
        if not ready:
            self._check()
        for number, _ in ready:
            if number == self._stirred.fileno():
                self._stirred.recv(1 << 12)
                for peer, request in list(self._waiting.items()):
                    self._answer(peer, request)
                continue
            self._channels_by_number[number].advance()
        while done := [peer for peer, (exchange, *_) in self._coming.items() if not exchange.left]:
            for peer in done:
                _, size, then = self._coming.pop(peer)
                self.received += size
                then()

    def _expect(self, peer: int, room: memoryview, then: Callable[[], None]) -> None:
        exchange = FrameExchange()
        self._channels[peer].expect(room, exchange)
        self._coming[peer] = exchange, len(room), then
        self._channels[peer].advance()

    def _await_request(self, peer: int) -> None:
        room = bytearray(self._size)
        self._expect(peer, memoryview(room), lambda: self._answer(peer, bytes(room)))

    def _answer(self, peer: int, request: bytes) -> None:
        answer = self._handle(peer, request)
        if answer is None:
            self._waiting[peer] = request
            return
        self._waiting.pop(peer, None)
        if isinstance(answer, Take):
            taken = answer.taken

            def then() -> None:
                taken()
                self._await_request(peer)

            self._expect(peer, answer.room, then)
            return
        content = answer.content
        self._channels[peer].send(content, checksum(content) if self._hashes else 0, FrameExchange())
        self.sent += len(content)
        self._await_request(peer)


def _refuse_all(peer: int, request: bytes) -> Give | Take | None:
    raise VirtualFlowError(f"member {peer} asks for something, and this worker serves nobody")

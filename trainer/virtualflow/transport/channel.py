"""Connections to peers: frames of bytes, each with its length and a checksum, or sealed, in their order.

Nothing of a channel waits. Whoever waits for frames (:class:`Lane`) polls the connections, lets each move what it can,
and looks at the news between, so a wait can be given up at any time, and nothing moves any more behind it. A peer whose
process dies closes its connections, which is noticed at once. One that is stopped, or whose machine lost its power,
does not; then the coordinator's word ends the wait.

What arrives as something else than what was sent is not used. TCP's own checksum has 16 bits, and ends where the
network card takes over; memory, cards and switches damage data behind its back (Stone and Partridge, "When the CRC and
TCP checksum disagree", SIGCOMM 2000). XXH3 reads at the speed of memory, so that the sender hashes what it is about to
send, and the receiver what it is about to use, while that is in the caches. It finds faults; it is no guard against
somebody who makes them. Against such people a frame is sealed: tags take the checksum's place.

A sealed frame is a sealed length and sealed pieces of the content (AES-256-GCM), each with a tag of 16 bytes. Pieces
let a large frame be sealed while what is before it is on its way. A piece's number is its nonce: what is lost,
repeated, moved or of another connection opens with none. What a piece opens to is written where it belongs, which is
used when the whole frame has opened.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from virtualflow.errors import CommunicatorBroken, Damaged, VirtualFlowError
from virtualflow.transport.settings import CommunicatorSettings

checksum: Callable[[memoryview | bytes], int] = xxhash.xxh3_64_intdigest
"""XXH3 of bytes, 64 bits."""
HEAD = struct.Struct("<QQQ")
"""Bytes of the content, its checksum, and the checksum of these two."""
KEY = 32
"""Bytes of what one direction of a connection is sealed by."""
PIECE = 1 << 20
"""Most bytes under one tag: two buffers of it, at most, belong to a connection, and stay in a processor's cache."""
_TAG = 16
_LENGTH = struct.Struct("<Q")
_SEALED_HEAD = _LENGTH.size + _TAG
"""As long as a plain frame's."""
_HEAD_OF, _PIECE_OF = b"head", b"piece of "
"""What else a tag holds for; behind the second one the frame's length."""
_NONCE = struct.Struct("<IQ")
_NOTHING = memoryview(b"")
_CALLS = 16
"""Of the kernel, before another peer has its turn."""
CLOSED = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)
"""What polling says of a connection that the peer has closed."""


_NONE: Iterator[list[memoryview]] = iter(())


class FrameExchange:
    """Frames that are waited for together."""

    __slots__ = ("ended", "left")

    def __init__(self) -> None:
        self.left = 0
        """How many have not come, or not left, yet."""
        self.ended = 0
        """When none was left, by ``time.perf_counter_ns``."""

    def finish_one(self) -> None:
        self.left -= 1
        if not self.left:
            self.ended = time.perf_counter_ns()


class Arrival:
    """A frame that is expected."""

    __slots__ = ("at", "content", "exchange", "head")

    def __init__(self, content: memoryview, exchange: FrameExchange) -> None:
        self.content, self.exchange = content, exchange
        self.head = memoryview(bytearray(HEAD.size))
        self.at = 0
        """Bytes that have come, of both."""


class Departure:
    """A frame that is to leave."""

    __slots__ = ("exchange", "left", "more", "views")

    def __init__(
        self, views: list[memoryview], exchange: FrameExchange, left: int, more: Iterator[list[memoryview]] = _NONE
    ) -> None:
        self.views, self.exchange = views, exchange
        self.left = left
        """Bytes of the frame that have not left yet, those that ``more`` makes included."""
        self.more = more
        """The rest of a frame that is made while it leaves."""


class Channel:
    """One connection, for one thread at a time."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.number = connection.fileno()
        """To poll it by."""
        self.closed = False
        """Whether the peer was seen to have closed it."""
        self._connection = connection
        self._lock = threading.Lock()
        """Held while memory is read or written, so that none is behind :meth:`cut`."""
        self._over = False
        self._incoming: deque[Arrival] = deque()
        self._outgoing: deque[Departure] = deque()
        self._sent = self._received = 0
        """Frames so far: their number is part of their checksum, so that one that is lost or comes twice is noticed."""

    @property
    def interest(self) -> int:
        moves = (select.POLLIN if self._incoming else 0) | (select.POLLOUT if self._outgoing else 0)
        return moves if self.closed else moves | CLOSED

    @property
    def expects(self) -> bool:
        return bool(self._incoming)

    @property
    def leaves(self) -> bool:
        return bool(self._outgoing)

    @property
    def waits(self) -> bool:
        return bool(self._incoming or self._outgoing)

    def expect(self, content: memoryview, exchange: FrameExchange) -> None:
        exchange.left += 1
        self._incoming.append(Arrival(content, exchange))

    def send(self, content: memoryview, check: int, exchange: FrameExchange) -> None:
        """Send a frame behind those before it; its memory must not change until it has left."""
        exchange.left += 1
        head = _write_head(len(content), check, self._sent)
        self._sent += 1
        self._outgoing.append(Departure([memoryview(head), content], exchange, HEAD.size + len(content)))

    def advance(self) -> bool:
        """Send and receive what goes without waiting; whether anything has moved.

        Raises:
            CommunicatorBroken: the connection is closed, or what came is not what was sent.
            VirtualFlowError: the peer sends something else than what is expected.
        """
        try:
            sent = self._send_on() if self._outgoing else False
            return self._receive_on() or sent if self._incoming else sent
        except OSError as error:
            raise CommunicatorBroken(f"the connection to {self.peer} is broken: {error.strerror or error}") from error

    def cut(self) -> None:
        """Close the connection; its memory is neither read nor written behind this."""
        self._over = True  # before the lock is had, which the other thread may take again and again
        with self._lock:
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it is closed already

    def close(self) -> None:
        self.cut()
        self._connection.close()

    def _send_on(self) -> bool:
        moved = False
        for _ in range(_CALLS):
            if not self._outgoing:
                break
            departure = self._outgoing[0]
            try:
                with self._lock:
                    self._refuse_if_over()
                    if not departure.views:
                        departure.views = next(departure.more)
                    sent = self._connection.sendmsg(departure.views, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            moved = True
            departure.views = without(departure.views, sent)
            departure.left -= sent
            if not departure.left:
                self._outgoing.popleft()
                departure.exchange.finish_one()
        return moved

    def _receive_on(self) -> bool:
        moved = False
        for _ in range(_CALLS):
            if not self._incoming:
                break
            arrival = self._incoming[0]
            try:
                with self._lock:
                    self._refuse_if_over()
                    received = self._connection.recvmsg_into(self._room_for(arrival))[0]
            except BlockingIOError:
                break
            if received == 0:
                raise CommunicatorBroken(f"{self.peer} has closed its connection")
            moved = True
            if self._take(arrival, received):
                self._incoming.popleft()
                self._received += 1
                arrival.exchange.finish_one()
        return moved

    def _room_for(self, arrival: Arrival) -> list[memoryview]:
        """Where what comes next belongs."""
        return without([arrival.head, arrival.content], arrival.at)

    def _take(self, arrival: Arrival, received: int) -> bool:
        """Look at so many bytes that have come into that room; whether the frame is whole."""
        before, arrival.at = arrival.at, arrival.at + received
        if before < HEAD.size <= arrival.at:
            length, check, _ = HEAD.unpack(arrival.head)
            if bytes(arrival.head) != _write_head(length, check, self._received):
                raise self._damaged(HEAD.size)
            self._refuse_other_length(length, arrival)
        if arrival.at < HEAD.size + len(arrival.content):
            return False
        if checksum(arrival.content) != HEAD.unpack(arrival.head)[1]:
            raise self._damaged(len(arrival.content))
        return True

    def _refuse_if_over(self) -> None:
        if self._over:
            raise CommunicatorBroken("the connections were cut")

    def _refuse_other_length(self, length: int, arrival: Arrival) -> None:
        if length != len(arrival.content):
            raise VirtualFlowError(
                f"{self.peer} has sent {length} bytes where {len(arrival.content)} were expected, so workers are at "
                "different places of the script: end the training by steps= or step.number (a counter of the script's "
                "own begins anew in a joiner), and call vf.evaluate and vf.predict at the same step on every worker"
            )

    def _damaged(self, size: int, how: str = "their checksum differs") -> Damaged:
        return Damaged(
            f"{size} bytes from {self.peer} arrived damaged: {how}; if it comes again, look at the "
            "memory and the network of that machine and of this one"
        )


def _write_head(length: int, check: int, number: int) -> bytes:
    return HEAD.pack(length, check, checksum(HEAD.pack(length, check, number)))


def without(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of ``views`` behind their first ``done`` bytes."""
    left = []
    for view in views:
        if done < len(view):
            left.append(view[done:] if done else view)
        done = max(0, done - len(view))
    return left


class _Seal:
    """One direction of a connection: its key, and the number of the next piece."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._number = 0
        self._head = memoryview(bytearray(_SEALED_HEAD))
        self._room = memoryview(bytearray())

    def room(self, size: int) -> memoryview:
        """For a sealed piece of ``size`` bytes."""
        if len(self._room) < size:
            self._room = memoryview(bytearray(size))
        return self._room[:size]

    def seal(self, content: memoryview | bytes, about: bytes, sealed: memoryview) -> memoryview:
        self._cipher.encrypt_into(self._next(), content, about, sealed)
        return sealed

    def open(self, sealed: memoryview, about: bytes, content: memoryview | bytearray) -> None:
        self._cipher.decrypt_into(self._next(), sealed, about, content)

    def frame(self, content: memoryview) -> Iterator[list[memoryview]]:
        """The frame of ``content``, each piece sealed when it is asked for, in the place of the one before it."""
        length = _LENGTH.pack(len(content))
        views = [self.seal(length, _HEAD_OF, self._head)]
        for at in range(0, len(content), PIECE):
            piece = content[at : at + PIECE]
            yield [*views, self.seal(piece, _PIECE_OF + length, self.room(len(piece) + _TAG))]
            views = []
        if views:
            yield views

    def forget(self) -> None:
        """Put a key that nobody knows in this one's place."""
        self._cipher = AESGCM(os.urandom(KEY))

    def _next(self) -> bytes:
        self._number += 1
        return _NONCE.pack(0, self._number)


class SealedChannel(Channel):
    """A connection whose frames are sealed."""

    def __init__(self, connection: socket.socket, peer: str, sending: bytes, receiving: bytes) -> None:
        super().__init__(connection, peer)
        self._sending, self._receiving = _Seal(sending), _Seal(receiving)
        self._opened = 0
        """Bytes of the content that have come and opened, of the frame that is coming,"""
        self._target = self._sealed = _NOTHING
        """where its next piece belongs, and where that comes."""

    def send(self, content: memoryview, check: int, exchange: FrameExchange) -> None:
        exchange.left += 1
        left = _SEALED_HEAD + len(content) + _TAG * -(-len(content) // PIECE)
        self._outgoing.append(Departure([], exchange, left, self._sending.frame(content)))

    def close(self) -> None:
        super().close()
        with self._lock:
            self._sending.forget()
            self._receiving.forget()

    def _room_for(self, arrival: Arrival) -> list[memoryview]:
        if not len(self._target):
            self._target = arrival.content[self._opened : self._opened + PIECE]
            self._sealed = self._receiving.room(len(self._target) + _TAG if len(self._target) else 0)
        return without([arrival.head, self._sealed], arrival.at)

    def _take(self, arrival: Arrival, received: int) -> bool:
        before, arrival.at = arrival.at, arrival.at + received
        if before < _SEALED_HEAD <= arrival.at:
            length = bytearray(_LENGTH.size)
            self._open(arrival.head, _HEAD_OF, length)
            self._refuse_other_length(_LENGTH.unpack(length)[0], arrival)
        if arrival.at < _SEALED_HEAD + len(self._sealed):
            return False
        if len(self._target):
            self._open(self._sealed, _PIECE_OF + _LENGTH.pack(len(arrival.content)), self._target)
            self._opened += len(self._target)
            self._target, arrival.at = _NOTHING, _SEALED_HEAD
        if self._opened < len(arrival.content):
            return False
        self._opened = 0
        return True

    def _open(self, sealed: memoryview, about: bytes, content: memoryview | bytearray) -> None:
        with self._lock:
            self._refuse_if_over()
            try:
                self._receiving.open(sealed, about, content)
            except InvalidTag:
                raise self._damaged(len(content), "their seal does not hold") from None


class Lane:
    """The channels of one thread, by the peers' ranks.

    Args:
        check: raises ``CommunicatorBroken`` if nothing is to be waited for any longer.
    """

    def __init__(
        self, channels: Mapping[int, Channel], check: Callable[[], None], settings: CommunicatorSettings
    ) -> None:
        self.channels = channels
        self._check = check
        self._settings = settings
        self._poll = select.poll()
        self._by_number = {channel.number: channel for channel in channels.values()}
        self._asked: dict[int, int] = {}
        """What is polled for, by descriptor."""
        self._moved = set(channels.values())
        """Those for which it may be something else now."""
        self.sent = self.received = 0
        """Bytes of all frames that were begun, without heads and tags."""

    def expect(self, peer: int, content: memoryview, exchange: FrameExchange) -> None:
        channel = self.channels[peer]
        channel.expect(content, exchange)
        self._moved.add(channel)

    def send(self, peer: int, content: memoryview, check: int, exchange: FrameExchange) -> None:
        """See :meth:`Channel.send`; it is under way behind this, as far as it goes without waiting."""
        channel = self.channels[peer]
        channel.send(content, check, exchange)
        channel.advance()
        self._moved.add(channel)

    def advance(self) -> None:
        for channel in self.channels.values():
            if channel.waits:
                channel.advance()
                self._moved.add(channel)

    @property
    def leaves(self) -> bool:
        return any(channel.leaves for channel in self.channels.values())

    def wait(self, done: Callable[[], bool], timeout: float) -> None:
        """Send and receive until it is done.

        Args:
            timeout: seconds in which nothing has moved that are too many: the last resort.

        Raises:
            CommunicatorBroken: a peer is lost, what came is damaged, or the coordinator says that it is over.
        """
        self.advance()
        if done():
            return
        slice_ = self._settings.wait_slice
        checked = moved = time.monotonic()
        while not done():
            any_moved = self._poll_once(slice_)
            now = time.monotonic()
            if any_moved:
                moved = now
            if now - checked >= slice_:
                checked = now
                self._check()
                self.advance()  # also tells whether the connections were cut meanwhile
                self._give_up(now - moved, timeout)

    def _poll_once(self, seconds: float) -> bool:
        for channel in self._moved:
            interest = channel.interest
            if self._asked.get(channel.number) != interest:
                self._poll.register(channel.number, interest)
                self._asked[channel.number] = interest
        self._moved.clear()
        any_moved = False
        for number, events in self._poll.poll(1e3 * seconds):
            channel = self._by_number[number]
            if events & CLOSED and not channel.expects:
                if channel.leaves:
                    # What a peer does not read any more, though it has not let go of the connection, leaves never.
                    raise CommunicatorBroken(f"{channel.peer} has closed its connection")
                # It may be through with all that these members exchange.
                channel.closed = True
                self._poll.unregister(number)
                self._asked[number] = channel.interest
            elif channel.waits:
                any_moved |= channel.advance()
                self._moved.add(channel)
        return any_moved

    def _give_up(self, still: float, timeout: float) -> None:
        if still >= timeout:
            raise CommunicatorBroken(f"nothing has moved for {still:.0f} s")
        lost = [channel.peer for channel in self.channels.values() if channel.closed]
        if lost and still >= self._settings.lost_wait:
            raise CommunicatorBroken(f"{' and '.join(lost)} closed the connection")

    def cut(self) -> None:
        """Close all connections; no memory is read or written behind this."""
        for channel in self.channels.values():
            channel.cut()

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()

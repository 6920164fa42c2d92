"""The coordinator's door: who has not shown who it is yet gets little time, little memory and few places.

Whoever reaches the port may connect and say nothing, or say a request one byte a minute. Such a stranger is shut out
after ``handshake`` seconds. There are places for some of them; one more takes the place of the one that has been there
longest, since who has the token or a certificate shows it within milliseconds. So strangers never use up the
descriptors of this process, after which nobody could connect, and nothing that they do is logged line by line.

A coordinator with an identity takes both on one port: by the first byte it knows whether TLS is spoken. With a
certificate one is known when the handshake is over; without TLS one stays a stranger, to whom the server shows the live
page and a sentence.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import logging
import socket
import ssl
import time
from typing import Any

from aiohttp import WSCloseCode, web

from virtualflow._process import raise_descriptor_limit
from virtualflow.coordinator.settings import CoordinatorSettings
from virtualflow.protocol.certificates import NotTrusted, Party
from virtualflow.protocol.identity import Identity, expect_many_connections

logger = logging.getLogger("virtualflow.coordinator.door")
"""For what strangers cause, that is for whatever they can cause a million times."""

UNREAD = 16_384
"""Bytes that are taken from a stranger before its token is looked at."""
_HANDSHAKE = b"\x16"
"""What TLS begins with, and no request."""
ACCEPTED_AT_ONCE = 128
"""Connections that asyncio accepts in one turn, before any of them can be shut out."""

QUEUE = 4_096
"""Connections that wait in the kernel to be accepted: one beyond them tries again a second later."""


class Seldom(logging.Filter):
    """Lets a kind of record through once in a while, with how often it would have come since.

    Args:
        interval: seconds between two of a kind.
    """

    def __init__(self, interval: float) -> None:
        super().__init__()
        self._interval = interval
        self._kinds: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is logged. The kinds are the few texts of the program, before anything is filled in."""
        kind, now = str(record.msg), time.monotonic()
        next_at, left_out = self._kinds.get(kind, (now, 0))
        if now < next_at:
            self._kinds[kind] = next_at, left_out + 1
            return False
        self._kinds[kind] = now + self._interval, 0
        if left_out:
            record.msg, record.args = "%s (and %d more like it)", (record.getMessage(), left_out)
        return True


class Door:
    """The strangers, the longest there first, and how many there may be.

    Args:
        identity: of a coordinator that knows its parties by their certificates; ``None``: no connection is encrypted.
    """

    def __init__(self, settings: CoordinatorSettings, identity: Identity | None = None) -> None:
        self._settings = settings
        self.identity = identity
        self.context = None if identity is None else identity.server_context()
        self._parties: dict[asyncio.BaseTransport, Party] = {}
        self._strangers: dict[asyncio.BaseTransport, _Visitor] = {}
        self._places = settings.strangers
        for known in [known for known in logger.filters if isinstance(known, Seldom)]:
            logger.removeFilter(known)
        logger.addFilter(Seldom(settings.log_interval))

    async def open(self, server: web.Server, host: str, port: int) -> asyncio.Server:
        """Listen, with as many descriptors as this process may have.

        Raises:
            OSError: the address cannot be used.
        """
        expect_many_connections()
        limit = raise_descriptor_limit()
        self._places = min(self._settings.strangers, max(1, limit // 2 - 2 * ACCEPTED_AT_ONCE, limit // 8))
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_log_seldom)
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        at_once = min(ACCEPTED_AT_ONCE, max(1, limit // 8))
        listening = await loop.create_server(lambda: _Visitor(self, server()), sock=listener, backlog=at_once)
        listener.listen(QUEUE)  # asyncio takes its number for both
        return listening

    @property
    def patience(self) -> float:
        """Seconds that a stranger has."""
        return self._settings.handshake

    def party_of(self, transport: asyncio.BaseTransport | None) -> Party | None:
        """Whose certificate a connection has shown; ``None``: nobody's."""
        return self._parties.get(transport) if transport is not None else None

    def name_of(self, request: web.Request) -> str | None:
        """Whose certificate the sender of a request has; ``None``: it has none."""
        party = self.party_of(request.transport)
        return party.name if party is not None else None

    def recognise(self, wire: asyncio.Transport, transport: asyncio.Transport) -> bool:
        """Look at the certificate of a connection whose handshake is over; whether it is of a party of this job."""
        assert self.identity is not None
        certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        try:
            party = self._parties[transport] = self.identity.believe(certificate)
        except NotTrusted as error:
            logger.warning("a connection is closed: %s", error)
            return False
        if party.role != "view":  # who only looks gets no place for long
            self.admit(wire)
        return True

    def admit(self, transport: asyncio.BaseTransport | None) -> None:
        """Whoever is behind that connection has shown who it is, and is no stranger any more."""
        visitor = self._strangers.pop(transport, None) if transport is not None else None
        if visitor is not None:
            visitor.welcome()

    def enter(self, transport: asyncio.BaseTransport, visitor: _Visitor) -> asyncio.TimerHandle:
        """A stranger has come; if there are too many, the one that was here longest goes. The timer of its time."""
        if len(self._strangers) >= self._places:
            logger.warning("more than %d connections have not shown who they are; closing the oldest", self._places)
            self.shut_out(next(iter(self._strangers)))
        self._strangers[transport] = visitor
        return asyncio.get_running_loop().call_later(self._settings.handshake, self._too_slow, transport)

    def leave(self, transport: asyncio.BaseTransport) -> None:
        self._strangers.pop(transport, None)
        self._parties.pop(transport, None)

    def shut_out(self, transport: asyncio.BaseTransport) -> None:
        self.leave(transport)
        if isinstance(transport, asyncio.WriteTransport):
            transport.abort()

    def _too_slow(self, transport: asyncio.BaseTransport) -> None:
        if transport in self._strangers:
            logger.warning("a connection is closed: it did not show who it is in %g s", self._settings.handshake)
            self.shut_out(transport)


class _Visitor(asyncio.Protocol):
    """One connection: what comes in goes on to aiohttp's ``protocol``, a little of it until the token was seen."""

    def __init__(self, door: Door, protocol: asyncio.Protocol) -> None:
        self._door, self._protocol = door, protocol
        self._transport: asyncio.Transport | None = None
        """What the server reads and writes."""
        self._wire: asyncio.Transport | None = None
        """The connection beneath it."""
        self._begun = door.context is None
        """Whether it is known if TLS is spoken."""
        self._timer: asyncio.TimerHandle | None = None
        self._heard = 0
        # What needs no look at it goes there directly.
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]
        self.eof_received = protocol.eof_received  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self._wire is None:
            self._wire = transport
            self._timer = self._door.enter(transport, self)
            if not self._begun:
                return
        elif not self._door.recognise(self._wire, transport):
            transport.abort()
            return
        self._transport = transport
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            assert self._wire is not None
            assert self._door.context is not None
            if data[:1] == _HANDSHAKE:
                self._seal(self._wire, self._door.context, data)
                return
            self._transport = self._wire
            self._protocol.connection_made(self._wire)
        if self._transport is None:
            return  # of somebody who is shut out already
        if self._timer is not None:
            self._heard += len(data)
            if self._heard > UNREAD:
                self._transport.pause_reading()
        self._protocol.data_received(data)

    def _seal(self, wire: asyncio.Transport, context: ssl.SSLContext, data: bytes) -> None:
        """Speak TLS from here on. The public ``start_tls`` does not take bytes that have come already."""
        loop = asyncio.get_running_loop()
        shaken: asyncio.Future[None] = loop.create_future()
        shaken.add_done_callback(self._shaken)
        sealed = asyncio.sslproto.SSLProtocol(
            loop,
            self,
            context,
            shaken,
            server_side=True,
            ssl_handshake_timeout=self._door.patience,  # type: ignore[arg-type]
        )
        wire.set_protocol(sealed)
        sealed.connection_made(wire)
        at_once = sealed.max_size
        for piece in (data[at : at + at_once] for at in range(0, len(data), at_once)):
            sealed.get_buffer(len(piece))[: len(piece)] = piece
            sealed.buffer_updated(len(piece))

    def _shaken(self, handshake: asyncio.Future[None]) -> None:
        error = None if handshake.cancelled() else handshake.exception()
        if error is not None:
            logger.warning("a connection is closed: its TLS handshake failed: %s", error)
        if self._transport is None:
            self.connection_lost(None)  # nobody else says it

    def connection_lost(self, error: Exception | None) -> None:
        self._forget_timer()
        for transport in (self._wire, self._transport):
            if transport is not None:
                self._door.leave(transport)
        if self._transport is not None:
            self._protocol.connection_lost(error)

    def welcome(self) -> None:
        self._forget_timer()
        if self._heard > UNREAD and self._transport is not None:
            self._transport.resume_reading()

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _log_seldom(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What the event loop cannot tell anybody else, such as that no connection can be accepted: not in a flood."""
    if isinstance(context.get("exception"), OSError):
        logger.error("a connection failed: %s: %s", context.get("message"), context["exception"])
    else:
        loop.default_exception_handler(context)


class WorkerLine:
    """The way to one worker: what waits to be sent, already encoded, and the socket.

    It is bounded, so that a worker that does not read costs the others nothing.
    """

    def __init__(self, socket: web.WebSocketResponse, transport: asyncio.BaseTransport | None, backlog: int) -> None:
        self._socket = socket
        self._transport = transport
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(backlog)
        self._finishing = False

    def put(self, data: bytes) -> bool:
        """Queue a message; ``False``: too many wait already."""
        if self._queue.full():
            return False
        self._queue.put_nowait(data)
        return True

    def finish(self) -> None:
        """Close the connection when all that waits is sent."""
        if not self._finishing:
            self._finishing = True
            if self._queue.full():
                self.abort()
            else:
                self._queue.put_nowait(None)

    def abort(self) -> None:
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()

    async def write(self) -> None:
        """Send what is queued until :meth:`finish` or the end of the connection."""
        try:
            while (data := await self._queue.get()) is not None:
                await self._socket.send_bytes(data)
            await self._socket.close(code=WSCloseCode.GOING_AWAY)
        except ConnectionError:
            pass  # the reader of the socket learns it too
        finally:
            self.abort()

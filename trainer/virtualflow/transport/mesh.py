"""Connects the members of a generation to each other: each listens until all others have come, then nobody does.

Each publishes where it listens, with a secret that whoever connects must know: it has it from the coordinator, as only
members have. Members that seal their frames publish a signed key instead, and only the pair of them knows the secret.
Strangers that find the port meanwhile are turned away.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - getaddrinfo asks for it, from wherever the script looks for modules then
import errno
import os
import secrets
import selectors
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from virtualflow._process import raise_descriptor_limit
from virtualflow.errors import CommunicatorBroken
from virtualflow.protocol.messages import member_key as _key
from virtualflow.transport.key_agreement import SECRET, Introduction

LANES = 2
"""Connections of each pair: of the thread that trains, and of the one that exchanges beside it."""
ASKING_LANES = 2
"""Further ones of members that ask one another: of what the lower rank asks, and of what the higher one does."""
_GREETING = struct.Struct(f"<{SECRET}sIB")
"""The secret, the rank of whoever connects, and which of its connections this is."""
_SEALED = b"\0"
"""Between a member's address and what it says of its key; no address has it."""
_STRANGERS = 64
"""Connections that have not said who they are; from there on the oldest is closed. Members say it as they connect."""
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""There are too many connections."""
_SLICE = 0.1
"""Seconds between two questions whether it is still worth it."""


class MeshRendezvous(Protocol):
    """Where members leave their addresses."""

    def publish(self, key: str, value: bytes) -> None:
        """Leave a value for the others."""

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """The values of these keys, which are waited for."""


def build_mesh(
    rendezvous: MeshRendezvous,
    rank: int,
    size: int,
    address: str,
    timeout: float,
    superseded: Callable[[], bool] = lambda: False,
    introduction: Introduction | None = None,
    count: int = LANES,
) -> list[dict[int, socket.socket]]:
    """Connect to the other members; blocks until all connections stand.

    Args:
        address: where this member listens meanwhile, on a port of the system's choice.
        introduction: of a member that seals its frames; behind this it knows the others.
        count: of the lanes, the same on all members.

    Returns:
        For each lane, the connections to the peers by their ranks.
    """
    limit = time.monotonic() + timeout
    raise_descriptor_limit()  # until the mesh stands, strangers are accepted
    with ExitStack() as undo:
        try:
            listener = undo.enter_context(listen(address, count * size))
            secret = secrets.token_bytes(SECRET)
            host, port = listener.getsockname()[:2]
            where = f"{host} {port}".encode()
            said = b"" if introduction is None else _SEALED + introduction.say(where)
            rendezvous.publish(_key(rank), secret + where + said)
            lanes: list[dict[int, socket.socket]] = [{} for _ in range(count)]
            undo.callback(close_all, lanes)
            asked = [peer for peer in range(size if introduction else rank) if peer != rank]
            told = rendezvous.wait([_key(peer) for peer in asked], limit - time.monotonic())
            met = {peer: _meet(peer, value, introduction) for peer, value in zip(asked, told, strict=True)}
            for lower in range(rank):
                known, place = met[lower]
                for number, lane in enumerate(lanes):
                    shown = introduction.greeting(lower, number) if introduction else known
                    greeting = _GREETING.pack(shown, rank, number)
                    lane[lower] = _connect(place, greeting, max(_SLICE, limit - time.monotonic()))
            missing = {
                (peer, number): introduction.greeting(peer, number) if introduction else secret
                for peer in range(rank + 1, size)
                for number in range(count)
            }
            _accept(listener, missing, lanes, limit, superseded)
        except OSError as error:
            raise CommunicatorBroken(f"a member was not reached: {error.strerror or error}") from error
        listener.close()
        undo.pop_all()
    return lanes


def listen(address: str, backlog: int) -> socket.socket:
    """Listen on a port of the system's choice, without blocking, for so many connections and some of strangers."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    _ours.add(listener)
    try:
        listener.bind(where)
        listener.listen(backlog + _STRANGERS)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _meet(peer: int, told: bytes, introduction: Introduction | None) -> tuple[bytes, bytes]:
    """A peer's secret and its address, of which nothing is used before its signature holds."""
    secret, (where, sealed, said) = told[:SECRET], told[SECRET:].partition(_SEALED)
    if bool(sealed) != (introduction is not None):
        ways = ("seals what it sends", "sends in plaintext")
        theirs, own = ways if sealed else reversed(ways)
        raise CommunicatorBroken(
            f"member {peer} {theirs} and this one {own}: start all workers of a job with the same security"
        )
    if introduction is not None:
        introduction.meet(peer, where, said)
    return secret, where


def _connect(where: bytes, greeting: bytes, timeout: float) -> socket.socket:
    host, port = where.decode().rsplit(" ", 1)
    connection = socket.create_connection((host, int(port)), timeout=timeout)
    _ours.add(connection)
    try:
        connection.sendall(greeting)
    except OSError:
        connection.close()
        raise
    return connection


def _accept(
    listener: socket.socket,
    missing: dict[tuple[int, int], bytes],
    lanes: list[dict[int, socket.socket]],
    limit: float,
    superseded: Callable[[], bool],
) -> None:
    """Let in whoever knows the secret of a rank and a lane that are missing, once each, and nobody else."""
    unknown: deque[socket.socket] = deque()
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def greet(connection: socket.socket) -> bool:
            who = _greeting_of(connection, missing)
            if who in missing:
                del missing[who]
                lanes[who[1]][who[0]] = connection
            elif who is not None:
                connection.close()
            return who is not None

        def forget(connection: socket.socket) -> None:
            selector.unregister(connection)
            unknown.remove(connection)

        def let_in() -> None:
            full = False
            try:
                connection, _ = listener.accept()
            except OSError as error:
                full = error.errno in _FULL
                if full and not unknown:
                    time.sleep(_SLICE)
            else:
                _ours.add(connection)
                connection.setblocking(False)
                if not greet(connection):
                    unknown.append(connection)
                    selector.register(connection, selectors.EVENT_READ)
            if unknown and (full or len(unknown) > _STRANGERS):
                oldest = unknown[0]
                forget(oldest)
                oldest.close()

        try:
            while missing:
                if superseded() or time.monotonic() >= limit:
                    raise CommunicatorBroken(f"{len(missing)} connections of other members have not come")
                ready = [key.fileobj for key, _ in selector.select(min(_SLICE, max(0.0, limit - time.monotonic())))]
                for connection in ready:
                    if isinstance(connection, socket.socket) and connection is not listener and greet(connection):
                        forget(connection)
                if listener in ready:
                    let_in()
        finally:
            for connection in unknown:
                connection.close()


def _greeting_of(connection: socket.socket, missing: Mapping[tuple[int, int], bytes]) -> tuple[int, int] | None:
    """The rank and lane of whoever connects, ``(-1, -1)`` for a stranger; ``None``: it has said nothing yet.

    So few bytes come at once, or are a stranger's.
    """
    try:
        greeting = connection.recv(_GREETING.size)
    except BlockingIOError:
        return None
    except OSError:
        return -1, -1
    if len(greeting) < _GREETING.size:
        return -1, -1
    told, rank, lane = _GREETING.unpack(greeting)
    return (rank, lane) if secrets.compare_digest(told, missing.get((rank, lane), b"")) else (-1, -1)


def close_all(lanes: list[dict[int, socket.socket]]) -> None:
    for lane in lanes:
        for connection in lane.values():
            connection.close()


_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _let_go() -> None:
    """A process was forked: the connections are its parent's, and are to end with that."""
    for connection in list(_ours):
        connection.close()


os.register_at_fork(after_in_child=_let_go)

"""Connects the members of a generation to each other: each listens until all others have come, then nobody does.

Each publishes where it listens, with a secret that whoever connects must know: it has it from the coordinator, as only
members have. Strangers that find the port meanwhile are turned away.
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

from virtualflow._process import raise_descriptor_limit
from virtualflow.errors import CommunicatorBroken
from virtualflow.protocol.messages import member_key as _key

LANES = 2
"""Connections of each pair: of the thread that trains, and of the one that exchanges beside it."""
_SECRET = 16
_GREETING = struct.Struct(f"<{_SECRET}sIB")
"""The secret, the rank of whoever connects, and which of its connections this is."""
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
) -> list[dict[int, socket.socket]]:
    """Connect to the other members; blocks until all connections stand.

    Args:
        address: where this member listens meanwhile, on a port of the system's choice.

    Returns:
        For each lane, the connections to the peers by their ranks.
    """
    limit = time.monotonic() + timeout
    raise_descriptor_limit()  # until the mesh stands, strangers are accepted
    with ExitStack() as undo:
        try:
            listener = undo.enter_context(_listen(address, LANES * size))
            secret = secrets.token_bytes(_SECRET)
            host, port = listener.getsockname()[:2]
            rendezvous.publish(_key(rank), secret + f"{host} {port}".encode())
            lanes: list[dict[int, socket.socket]] = [{} for _ in range(LANES)]
            undo.callback(close_all, lanes)
            told = rendezvous.wait([_key(lower) for lower in range(rank)], limit - time.monotonic())
            for lower, value in enumerate(told):
                for number, lane in enumerate(lanes):
                    lane[lower] = _connect(value, rank, number, max(_SLICE, limit - time.monotonic()))
            _accept(listener, secret, lanes, range(rank + 1, size), limit, superseded)
        except OSError as error:
            raise CommunicatorBroken(f"a member was not reached: {error.strerror or error}") from error
        listener.close()
        undo.pop_all()
    return lanes


def _listen(address: str, backlog: int) -> socket.socket:
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


def _connect(told: bytes, rank: int, lane: int, timeout: float) -> socket.socket:
    host, port = told[_SECRET:].decode().rsplit(" ", 1)
    connection = socket.create_connection((host, int(port)), timeout=timeout)
    _ours.add(connection)
    try:
        connection.sendall(_GREETING.pack(told[:_SECRET], rank, lane))
    except OSError:
        connection.close()
        raise
    return connection


def _accept(
    listener: socket.socket,
    secret: bytes,
    lanes: list[dict[int, socket.socket]],
    ranks: range,
    limit: float,
    superseded: Callable[[], bool],
) -> None:
    """Let in the members of these ranks, and nobody else."""
    missing = {(rank, lane) for rank in ranks for lane in range(len(lanes))}
    unknown: deque[socket.socket] = deque()
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def greet(connection: socket.socket) -> bool:
            who = _greeting_of(connection, secret)
            if who in missing:
                missing.discard(who)
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


def _greeting_of(connection: socket.socket, secret: bytes) -> tuple[int, int] | None:
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
    return (rank, lane) if secrets.compare_digest(told, secret) else (-1, -1)


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

"""``virtualflow turns``: lends a node's devices to the jobs that share them, a turn each, over a Unix socket.

It knows nothing of the jobs but their names, keeps nothing, and decides nothing that a result depends on. Workers that
cannot reach it compute as if there was none. Whose connection ends, as it does when a process is killed, has no turn.

Who connects is known from the kernel: the pod, where the server sees the node's processes, else the user. Each may have
so many connections and names of jobs, and no more.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.turns import (
    MAX_LINE,
    Ask,
    Attach,
    FromSharer,
    Granted,
    ToSharer,
    Wait,
    from_sharer,
    line,
)

logger = logging.getLogger("virtualflow.turns")


MOST = 1_024
"""Connections in all."""
FIRST_LIMIT = 10.0
"""Seconds in which a connection is to say for which job and device it is."""
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
_CREDENTIALS = struct.Struct("3i")


class Asked(NamedTuple):
    worker: int
    job: str


@dataclass
class Device:
    """One device, and who shares it: pure, and fair by construction. Workers are numbered by their connections; times
    are seconds of one clock.

    Jobs take turns in the order in which they asked. A turn is a job's, so its workers on the node have it
    together, each once: what they exchange with each other waits for the last of them. Nobody can have a turn for
    long while others wait, so whoever hangs in it, or is stopped, holds them up for ``limit`` seconds at most. It
    is not told: what it goes on to compute disturbs others for once.
    """

    limit: float
    waiting: list[Asked] = field(default_factory=list)
    """By arrival."""
    job: str | None = None
    holders: set[int] = field(default_factory=set)
    """Its workers that compute."""
    _until: float = 0.0
    _took_part: set[int] = field(default_factory=set)
    """In this turn."""

    def ask(self, worker: int, job: str, now: float) -> list[int]:
        """A worker wants the device, which it has not and has not asked for; who gets it now."""
        if job == self.job and not self.waiting:
            self._until = now + self.limit
        elif job != self.job or worker in self._took_part:
            self.waiting.append(Asked(worker, job))
            return self.look(now)
        self._admit(worker)
        return [worker]

    def give_back(self, worker: int, now: float) -> list[int]:
        """A worker does not want it any more, or is gone; who gets it now."""
        self.holders.discard(worker)
        self.waiting = [asked for asked in self.waiting if asked.worker != worker]
        return self.look(now)

    def look(self, now: float) -> list[int]:
        """Who gets it now, because it is free or was held for too long."""
        if not self.waiting or (self.holders and now < self._until):
            if not self.holders:
                self.job = None
            return []
        self.job, self._until = self.waiting[0].job, now + self.limit
        granted = [asked.worker for asked in self.waiting if asked.job == self.job]
        self.waiting = [asked for asked in self.waiting if asked.job != self.job]
        self.holders.clear()
        self._took_part.clear()
        for worker in granted:
            self._admit(worker)
        return granted

    def due(self) -> float | None:
        """When to :meth:`look` again, whatever happens until then; ``None``: nobody waits."""
        return self._until if self.waiting and self.holders else None

    def most(self, worker: int, now: float) -> float:
        """Seconds until a worker that waits has its turn, at most."""
        place = next(n for n, asked in enumerate(self.waiting) if asked.worker == worker)
        ahead = {asked.job for asked in self.waiting[:place]} - {self.waiting[place].job}
        return max(0.0, self._until - now) + len(ahead) * self.limit

    def _admit(self, worker: int) -> None:
        self.holders.add(worker)
        self._took_part.add(worker)


class Peer(NamedTuple):
    """Who has connected, as the kernel says, and what it may have at once."""

    name: str
    connections: int
    jobs: int


def find_pod(cgroups: str) -> str | None:
    """The uid of the pod whose process is in these control groups (``/proc/PID/cgroup``)."""
    found = _POD.search(cgroups)  # the outermost: what is inside may be of the pod's own making
    return found[1].replace("_", "-") if found else None


def identify(connection: socket.socket) -> Peer:
    """Who has connected: a pod, where its process can be seen from here, else a user of the machine."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(told)
    pod = None
    with suppress(OSError):  # it has ended meanwhile
        pod = find_pod(Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")) if pid else None  # 0: not seen
    return Peer(f"the pod {pod}", 64, 4) if pod else Peer(f"the user {user}", MOST // 2, 64)


@dataclass
class _Sharer:
    number: int
    writer: asyncio.StreamWriter
    peer: str
    job: str
    device: str
    turn: int | None = None
    """What it has asked for and not given back."""

    def tell(self, message: ToSharer) -> None:
        if not self.writer.is_closing():
            self.writer.write(line(message))


class TurnServer:
    """Turns of any number of devices. Everything happens in one event loop, in which it is made.

    Args:
        limit: seconds that a turn may take while others wait.
        identify: says who has connected.
    """

    def __init__(self, limit: float, identify: Callable[[socket.socket], Peer] = identify) -> None:
        self._limit, self._identify = limit, identify
        self._peers: Counter[str] = Counter()
        """Connections of each."""
        self._refused: set[str] = set()
        """Of whom that has been logged."""
        self._devices: dict[str, Device] = {}
        self._sharers: dict[int, _Sharer] = {}
        self._numbers = count(1)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._open: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def close(self) -> None:
        for writer in self._open.values():
            writer.close()
        while self._open:
            await asyncio.wait([task for task in self._open if task is not None])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sharer: _Sharer | None = None
        peer = self._identify(writer.get_extra_info("socket"))
        self._peers[peer.name] += 1
        self._open[asyncio.current_task()] = writer
        try:
            self._count(peer)
            async with asyncio.timeout(FIRST_LIMIT):
                first = await _read(reader)
            sharer = self._attach(writer, peer, first) if first is not None else None
            while sharer is not None and (message := await _read(reader)) is not None:
                self._take(sharer, message)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            if peer.name not in self._refused:
                self._refused.add(peer.name)
                logger.warning("a connection of %s was ended: %s; further ones of it are not logged", peer.name, error)
        except (ConnectionError, TimeoutError):
            pass  # it has ended itself
        finally:
            if sharer is not None:
                self._forget(sharer)
            writer.close()
            del self._open[asyncio.current_task()]
            self._peers[peer.name] -= 1
            if not self._peers[peer.name]:
                del self._peers[peer.name]
                self._refused.discard(peer.name)

    def _count(self, peer: Peer) -> None:
        if self._peers[peer.name] > peer.connections:
            raise ValueError(f"it has {peer.connections} others already")
        if len(self._open) > MOST:
            raise ValueError(f"{MOST} others are open already")

    def _attach(self, writer: asyncio.StreamWriter, peer: Peer, first: FromSharer) -> _Sharer:
        if not isinstance(first, Attach):
            raise ValueError("its first message does not say for which job and device")
        names = {other.job for other in self._sharers.values() if other.peer == peer.name} | {first.job}
        if len(names) > peer.jobs:
            raise ValueError(f"it has the names of {peer.jobs} other jobs already")
        sharer = _Sharer(next(self._numbers), writer, peer.name, first.job, first.device)
        self._sharers[sharer.number] = sharer
        self._devices.setdefault(sharer.device, Device(self._limit))
        logger.info("%s shares %s", sharer.job, sharer.device)
        return sharer

    def _take(self, sharer: _Sharer, message: FromSharer) -> None:
        now, device = time.monotonic(), self._devices[sharer.device]
        if isinstance(message, Attach):
            raise ValueError("it attaches twice")
        if isinstance(message, Ask):
            if sharer.turn is not None:
                raise ValueError("it asks for a turn before it has given back the last")
            sharer.turn = message.turn
            self._grant(sharer.device, device.ask(sharer.number, sharer.job, now))
            if any(asked.worker == sharer.number for asked in device.waiting):
                sharer.tell(Wait(message.turn, device.most(sharer.number, now)))
        elif message.turn == sharer.turn:
            sharer.turn = None
            self._grant(sharer.device, device.give_back(sharer.number, now))

    def _grant(self, name: str, workers: list[int]) -> None:
        """Tell who has a device now, and see that it is looked at again in time."""
        for number in workers:
            sharer = self._sharers[number]
            assert sharer.turn is not None
            sharer.tell(Granted(sharer.turn))
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        due = self._devices[name].due()
        if due is not None:
            wait = max(0.0, due - time.monotonic())
            self._timers[name] = asyncio.get_running_loop().call_later(wait, self._expire, name)

    def _expire(self, name: str) -> None:
        device = self._devices[name]
        late = device.job
        granted = device.look(time.monotonic())
        if granted:
            logger.warning("%s has computed on %s for %g s: the next turn begins", late, name, self._limit)
        self._grant(name, granted)

    def _forget(self, sharer: _Sharer) -> None:
        del self._sharers[sharer.number]
        self._grant(sharer.device, self._devices[sharer.device].give_back(sharer.number, time.monotonic()))
        if not any(other.device == sharer.device for other in self._sharers.values()):
            del self._devices[sharer.device]
        logger.info("%s shares %s no more", sharer.job, sharer.device)


async def _read(reader: asyncio.StreamReader) -> FromSharer | None:
    """The next message; ``None``: the connection has ended."""
    data = await reader.readline()  # a line that is too long is a ValueError
    return from_sharer.decode(data) if data.endswith(b"\n") else None


def serve_turns(path: Path, limit: float) -> int:
    """Lend this node's devices until SIGTERM or SIGINT; the exit code."""
    _make_room(path)
    asyncio.run(_listen(path, TurnServer(limit)))
    path.unlink(missing_ok=True)
    return 0


async def _listen(path: Path, server: TurnServer) -> None:
    try:
        listening = await asyncio.start_unix_server(server.serve, path, limit=MAX_LINE)
    except OSError as error:
        raise ConfigurationError(f"cannot listen at {path}: {error.strerror or error}; name another place") from error
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    logger.info("listening at %s", path)
    async with listening:
        await ended.wait()
        listening.close()
        await server.close()


def _make_room(path: Path) -> None:
    """Remove what a server that was killed has left there."""
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigurationError(f"{path} is there already, and no socket; name another place")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno != errno.ECONNREFUSED:
                raise ConfigurationError(f"cannot listen at {path}: {error.strerror}; name another place") from error
            with suppress(FileNotFoundError):
                path.unlink()
            return
    raise ConfigurationError(f"a turn server listens at {path} already; end it, or name another place")

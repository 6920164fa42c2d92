"""``virtualflow turns``: lends a node's devices to the jobs that share them, a turn each, over a Unix socket.

It knows nothing of the jobs but their names, keeps nothing, and decides nothing that a result depends on. Workers that
cannot reach it compute as if there was none. Whose connection ends, as it does when a process is killed, has no turn.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from virtualflow.errors import ConfigurationError
from virtualflow.launcher.lending import Device
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


@dataclass
class _Sharer:
    """A connection."""

    number: int
    writer: asyncio.StreamWriter
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
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._devices: dict[str, Device] = {}
        self._sharers: dict[int, _Sharer] = {}
        self._numbers = count(1)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._open: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def close(self) -> None:
        """End all connections."""
        for writer in self._open.values():
            writer.close()
        while self._open:
            await asyncio.wait([task for task in self._open if task is not None])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        sharer: _Sharer | None = None
        self._open[asyncio.current_task()] = writer
        try:
            while (message := await _read(reader)) is not None:
                if sharer is None:
                    sharer = self._attach(writer, message)
                else:
                    self._take(sharer, message)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            logger.warning("a connection was ended: %s", error)
        except ConnectionError:
            pass  # it has ended itself
        finally:
            if sharer is not None:
                self._forget(sharer)
            writer.close()
            del self._open[asyncio.current_task()]

    def _attach(self, writer: asyncio.StreamWriter, first: FromSharer) -> _Sharer:
        if not isinstance(first, Attach):
            raise ValueError("its first message does not say for which job and device")
        sharer = _Sharer(next(self._numbers), writer, first.job, first.device)
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
    """Lend this node's devices until SIGTERM or SIGINT; the exit code.

    Raises:
        ConfigurationError: nothing can listen at ``path``.
    """
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
    """Remove what a server that was killed has left there.

    Raises:
        ConfigurationError: one is there and lives, or it is something else.
    """
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

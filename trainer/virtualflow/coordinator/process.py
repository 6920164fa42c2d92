"""The coordinator as a process: it listens, says where, and ends on a signal when its job lets it."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import sys
from pathlib import Path

from aiohttp import web

from virtualflow.atomic_file import write_whole
from virtualflow.coordinator.door import logger as seldom
from virtualflow.coordinator.server import CoordinatorServer
from virtualflow.coordinator.settings import CoordinatorSettings

logger = logging.getLogger("virtualflow.coordinator")


async def serve(
    *,
    host: str,
    port: int,
    token: str,
    wanted: int,
    minimum: int,
    settings: CoordinatorSettings,
    ready_file: Path | None,
) -> int:
    """Serve one job until SIGTERM or SIGINT; the exit code.

    SIGTERM while the job stops lets it stop first (``stop_grace``); a second one, or SIGINT, ends it at once.

    Args:
        port: the port to listen on; 0 takes a free one.
        token: what every request must bear.
        wanted: how many workers the job is to start with.
        minimum: with fewer ready workers nothing begins.
        ready_file: where to write ``http://host:port`` once it listens.
    """
    coordinator = CoordinatorServer(token, wanted, settings, minimum)
    runner = web.AppRunner(coordinator.application(), access_log=None, logger=seldom, shutdown_timeout=settings.goodbye)
    await runner.setup()
    assert runner.server is not None
    listening: asyncio.Server | None = None
    try:
        try:
            listening = await coordinator.door.open(runner.server, host, port)
        except OSError as error:
            what = (
                "is taken by another program"
                if error.errno == errno.EADDRINUSE
                else f"cannot be used ({error.strerror})"
            )
            sys.stderr.write(f"virtualflow: port {port} of {host} {what}; choose another with --port\n")
            return 1
        bound = listening.sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{bound}"
        logger.info("listening on %s", url)
        if ready_file is not None:
            write_whole(ready_file, f"{url}\n".encode())
        ended = asyncio.Event()

        def end(number: signal.Signals) -> None:
            if number == signal.SIGINT or ended.is_set():
                coordinator.hurry()
            ended.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        await ended.wait()
        await coordinator.finish_stop()
        return 0
    finally:
        if listening is not None:
            listening.close()
        await coordinator.close()
        await runner.cleanup()

"""A turn server in a thread of a test."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from virtualflow.launcher.turn_server import Peer, TurnServer, identify

PATIENCE = 60.0


@contextmanager
def turn_server(
    path: Path, limit: float = PATIENCE, identify: Callable[[socket.socket], Peer] = identify
) -> Iterator[TurnServer]:
    """One that listens at ``path`` as long as the block lasts."""
    ready, found = threading.Event(), []

    async def listen() -> None:
        ended, server = asyncio.Event(), TurnServer(limit, identify)
        found[:] = [asyncio.get_running_loop(), ended, server]
        async with await asyncio.start_unix_server(server.serve, path):
            ready.set()
            await ended.wait()
            await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(listen()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    loop, ended, server = found
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(PATIENCE)
        path.unlink()
        assert not thread.is_alive()

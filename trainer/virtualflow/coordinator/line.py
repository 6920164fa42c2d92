"""The way from the coordinator to one worker: bounded, so that one that does not read costs the others nothing."""

from __future__ import annotations

import asyncio

from aiohttp import WSCloseCode, web


class Line:
    """The way to one worker: what waits to be sent, already encoded, and the socket."""

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
        """Cut the connection off."""
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

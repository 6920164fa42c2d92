"""Who looks at a job through the coordinator: the status for one look, and a stream of it for those who watch."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from virtualflow.coordinator.settings import MAX_PROGRESS, WATCH_HEARTBEAT
from virtualflow.coordinator.state import JobState
from virtualflow.coordinator.status_view import describe
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_MESSAGE


class Watchers:
    """Answers who asks for the status of ``job``.

    Args:
        interval: a watcher gets at most one message in so many seconds.
        rate: and of a brief status at most so many bytes a second.
        paid_interval: and one in so many seconds while workers are there and nothing happens.
    """

    def __init__(self, job: JobState, interval: float, rate: float, paid_interval: float) -> None:
        self._job = job
        self._interval, self._rate, self._paid_interval = interval, rate, paid_interval
        self._told_version, self._told_paid, self._told_at = -1, 0.0, 0.0
        self._changed = asyncio.Event()
        self._news = asyncio.Event()
        self._seen = (-1, -1)
        self._encoded: dict[bool, tuple[int, bytes]] = {}
        self._closing = False

    def notice(self) -> None:
        version, news = self._seen
        self._seen = (self._job.version, self._job.news)
        if self._job.version != version:
            self._changed.set()
        if self._job.news != news:
            self._news.set()

    def notice_time(self, now: float) -> None:
        """Time passes, and workers are paid for it; to be called every now and then, whatever happens."""
        job, paid = self._job, self._job.history.goodput.paid
        if job.version != self._told_version:
            self._told_version, self._told_paid, self._told_at = job.version, paid, now
        elif paid > self._told_paid and now - self._told_at >= self._paid_interval:
            job.version += 1
            self.notice()

    def close(self) -> None:
        """Let the streams end, with what has not been told yet."""
        self._closing = True
        self._changed.set()
        self._news.set()

    async def show(self, request: web.Request) -> web.Response:
        """``GET /v1/status``: the status now."""
        brief = _asked_brief(request)
        if brief is None:
            return answer(400, "brief must be 0 or 1")
        return web.Response(body=self._encode(brief), content_type="application/json")

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/watch``: the status now and whenever it has changed.

        With ``progress=S``, what is only progress is sent at most once in S seconds.
        """
        brief, progress = _asked_brief(request), _asked_progress(request)
        if brief is None or progress is None:
            return answer(400, f"brief must be 0 or 1, and progress between 0 and {MAX_PROGRESS:g} seconds")
        socket = web.WebSocketResponse(heartbeat=WATCH_HEARTBEAT, max_msg_size=MAX_MESSAGE, compress=False)
        refusal = await upgrade(socket, request)
        if refusal is not None:
            return refusal
        reader = asyncio.create_task(_drain(socket))
        try:
            await self._tell(socket, reader, brief, progress)
        except ConnectionError:
            pass  # the watcher is gone, and nobody needs to know
        finally:
            reader.cancel()
            with contextlib.suppress(ConnectionError):
                await socket.close()
        return socket

    async def _tell(
        self, socket: web.WebSocketResponse, reader: asyncio.Task[None], brief: bool, progress: float
    ) -> None:
        clock = asyncio.get_running_loop().time
        job, version, news, due, free = self._job, -1, -1, 0.0, 0.0
        while not socket.closed and not reader.done():
            if news != job.news or (version != job.version and (clock() >= due or self._closing)):
                version, news, due = job.version, job.news, clock() + progress
                encoded = self._encode(brief)
                await socket.send_bytes(encoded)
                free = clock() + len(encoded) / self._rate if brief else 0.0
            if self._closing:
                return
            await asyncio.sleep(self._interval)
            while clock() < free and not self._closing:  # noqa: ASYNC110 - a large one waits in small pieces
                await asyncio.sleep(self._interval)
            if news != job.news or self._closing:
                continue
            if version == job.version:
                await _happens(self._changed, reader, None)
            else:
                await _happens(self._news, reader, max(0.0, due - clock()))

    def _encode(self, brief: bool) -> bytes:
        """The status, encoded once for all who read it."""
        version, encoded = self._encoded.get(brief, (-1, b""))
        if version != self._job.version:
            encoded = m.encode(describe(self._job, brief))
            self._encoded[brief] = (self._job.version, encoded)
        return encoded


async def upgrade(socket: web.WebSocketResponse, request: web.Request) -> web.Response | None:
    """Make a WebSocket of a request; what to answer if it is no handshake of one, or nobody is there any more."""
    try:
        await socket.prepare(request)
    except (web.HTTPBadRequest, ValueError):  # aiohttp repeats a header in its sentence, or fails where that is no text
        return answer(400, "this is no handshake of a WebSocket")
    except ConnectionError:
        return answer(400, "the connection was closed")
    return None


def answer(code: int, sentence: str) -> web.Response:
    return web.Response(status=code, body=m.encode(http_api.Answer(sentence)), content_type="application/json")


async def _happens(event: asyncio.Event, reader: asyncio.Task[None], within: float | None) -> None:
    """Wait until ``event`` is set from now on, ``reader`` is at its end, or so many seconds are over."""
    event.clear()
    waiter = asyncio.create_task(event.wait())
    await asyncio.wait({waiter, reader}, timeout=within, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()


async def _drain(socket: web.WebSocketResponse) -> None:
    """Read a watcher's socket to its end: it has nothing to say, but its closing must be noticed."""
    async for _ in socket:
        pass


def _asked_brief(request: web.Request) -> bool | None:
    """Whether a brief status is asked for; ``None``: that is not clear."""
    return {"0": False, "1": True}.get(request.query.get("brief", "0"))


def _asked_progress(request: web.Request) -> float | None:
    """How many seconds a watcher wants to hear nothing of mere progress; ``None``: that makes no sense."""
    try:
        seconds = float(request.query.get("progress", "0"))
    except ValueError:
        return None
    return seconds if 0.0 <= seconds <= MAX_PROGRESS else None

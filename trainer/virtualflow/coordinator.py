"""The coordinator of one job: an HTTP and WebSocket server around :class:`virtualflow.job.Job`.

It authenticates, decodes, bounds and forwards; every decision is the job's. Without torch, so that it fits into a small
pod; without state on disk, so that it may be killed and started again at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from virtualflow import messages as m
from virtualflow.job import Job
from virtualflow.settings import MAX_MESSAGE, CoordinatorSettings

logger = logging.getLogger("virtualflow.coordinator")

_OUTBOX = 1_000
"""Messages that may wait for one slow worker before its connection is closed (it comes back with a Hello)."""

_FIRST_MESSAGE = 10.0
"""Seconds that a new connection has to say Hello."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Coordinator:
    """The server's state: the job, the open connections, and the time to decide again."""

    def __init__(self, token: str, wanted: int, settings: CoordinatorSettings) -> None:
        self._digest = hashlib.sha256(token.encode()).digest()
        self._settings = settings
        self.job = Job(
            incarnation=time.time_ns() // 1_000_000,
            wanted=wanted,
            settings=settings.membership,
            now=time.monotonic(),
            wall=time.time(),
        )
        self._links: dict[str, asyncio.Queue[m.ToWorker]] = {}
        self._changed = asyncio.Event()
        self._seen_version = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    def application(self) -> web.Application:
        """The routes, behind the token."""
        app = web.Application(client_max_size=MAX_MESSAGE, middlewares=[self._guard])
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/v1/status", self._status)
        app.router.add_get("/v1/watch", self._watch)
        app.router.add_get("/v1/worker", self._worker)
        calls: list[tuple[str, type[Any], Callable[[Any], str]]] = [
            ("drain", m.DrainCall, self.job.drain),
            ("gone", m.GoneCall, self.job.gone),
            ("scale", m.ScaleCall, lambda call: self.job.scale(call.workers)),
            ("hold", m.HoldCall, lambda call: self.job.set_hold(call.step)),
            ("stop", m.StopCall, lambda call: self.job.request_stop(call.reason)),
            ("fail", m.FailCall, lambda call: self.job.fail(call.reason)),
        ]
        for name, kind, act in calls:
            app.router.add_post(f"/v1/{name}", self._call(kind, act))
        return app

    # --- turning the job's wheel ------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.job.now, self.job.wall = time.monotonic(), time.time()

    def _turn(self) -> None:
        """Decide, send what there is to send, and see to it that the next limit is not missed."""
        self._tick()
        wake_at = self.job.decide()
        outbox, self.job.outbox = self.job.outbox, []
        for incarnation, message in outbox:
            queue = self._links.get(incarnation)
            if queue is None:
                continue
            if queue.full():
                logger.warning("a worker does not read its messages; closing its connection")
                del self._links[incarnation]
            else:
                queue.put_nowait(message)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_at is not None:
            delay = max(wake_at - time.monotonic(), 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay, self._turn)
        if self.job.version != self._seen_version:
            self._seen_version = self.job.version
            self._changed.set()

    async def close(self) -> None:
        """End all connections."""
        self._closing = True
        self._changed.set()
        if self._timer is not None:
            self._timer.cancel()

    # --- requests -----------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/healthz":
            return await handler(request)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        if not hmac.compare_digest(given, self._digest) or scheme.lower() != "bearer":
            return _answer(401, "the job's token is missing or wrong; send it as 'Authorization: Bearer TOKEN'")
        return await handler(request)

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _status(self, request: web.Request) -> web.Response:
        return web.Response(body=m.encode(self.job.status()), content_type="application/json")

    def _call(self, kind: type[Any], act: Callable[[Any], str]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            try:
                body = await request.read()
                call = msgspec.json.decode(body or b"{}", type=kind)
            except web.HTTPRequestEntityTooLarge:
                return _answer(413, f"the body is larger than {MAX_MESSAGE} bytes")
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                return _answer(400, f"the body is not a valid {kind.__name__}: {error}")
            self._tick()
            try:
                sentence = act(call)
            except KeyError as error:
                return _answer(404, f"the job has no worker {error.args[0]}; GET /v1/status lists them")
            self._turn()
            return _answer(200, sentence)

        return handle

    async def _watch(self, request: web.Request) -> web.WebSocketResponse:
        """Send the status now and whenever it has changed, at most once an interval."""
        socket = web.WebSocketResponse(heartbeat=10.0, max_msg_size=MAX_MESSAGE)
        await socket.prepare(request)
        reader = asyncio.create_task(_drain_socket(socket))
        sent = -1
        try:
            while not socket.closed and not reader.done():
                if sent != self.job.version:
                    sent = self.job.version
                    await socket.send_bytes(m.encode(self.job.status()))
                await asyncio.sleep(self._settings.watch_interval)
                if self._closing:
                    break
                if sent == self.job.version:
                    self._changed.clear()
                    changed = asyncio.create_task(self._changed.wait())
                    await asyncio.wait({changed, reader}, return_when=asyncio.FIRST_COMPLETED)
                    changed.cancel()
        except ConnectionError:
            pass  # the watcher is gone, and nobody needs to know
        finally:
            reader.cancel()
            with contextlib.suppress(ConnectionError):
                await socket.close()
        return socket

    async def _worker(self, request: web.Request) -> web.WebSocketResponse:
        """One worker's connection: a Hello, then messages both ways until either side closes it."""
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE)
        await socket.prepare(request)
        incarnation = ""
        queue: asyncio.Queue[m.ToWorker] = asyncio.Queue(_OUTBOX)
        writer: asyncio.Task[None] | None = None
        try:
            hello = await self._first_message(socket)
            if hello is None:
                return socket
            self._tick()
            incarnation = hello.incarnation
            self._links[incarnation] = queue
            refusal = self.job.hello(hello)
            if refusal is not None:
                self.job.event("refused", f"{hello.worker} refused: {refusal}")
                await socket.send_bytes(m.encode(m.Refuse(refusal)))
                return socket
            writer = asyncio.create_task(self._write(socket, incarnation, queue))
            self._turn()
            async for frame in socket:
                if frame.type not in (WSMsgType.BINARY, WSMsgType.TEXT):
                    break
                try:
                    message = m.from_worker.decode(frame.data)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    logger.warning("%s sent a message that is refused: %s", hello.worker, error)
                    await socket.close(code=1007, message=b"malformed message")
                    break
                self._tick()
                self.job.receive(incarnation, message)
                self._turn()
        except ConnectionError:
            pass  # said below, as for a connection that was closed in order
        finally:
            if writer is not None:
                writer.cancel()
            if self._links.get(incarnation) is queue:
                del self._links[incarnation]
                self._tick()
                self.job.disconnected(incarnation)
                self._turn()
        return socket

    async def _first_message(self, socket: web.WebSocketResponse) -> m.Hello | None:
        try:
            frame = await asyncio.wait_for(socket.receive(), _FIRST_MESSAGE)
            if frame.type not in (WSMsgType.BINARY, WSMsgType.TEXT):
                return None
            message = m.from_worker.decode(frame.data)
        except (TimeoutError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.warning("a connection is refused: %s", error or "it said nothing")
            message = None
        if isinstance(message, m.Hello):
            return message
        await socket.close(code=1007, message=b"the first message must be a valid Hello")
        return None

    async def _write(self, socket: web.WebSocketResponse, incarnation: str, queue: asyncio.Queue[m.ToWorker]) -> None:
        with contextlib.suppress(ConnectionError):
            while self._links.get(incarnation) is queue or not queue.empty():
                await socket.send_bytes(m.encode(await queue.get()))
            await socket.close()


async def _drain_socket(socket: web.WebSocketResponse) -> None:
    """Read a watcher's socket to its end: it has nothing to say, but its closing must be noticed."""
    async for _ in socket:
        pass


def _answer(code: int, sentence: str) -> web.Response:
    return web.Response(status=code, body=m.encode(m.Answer(sentence)), content_type="application/json")


async def _serve(
    host: str, port: int, token: str, wanted: int, settings: CoordinatorSettings, ready_file: Path | None
) -> int:
    coordinator = Coordinator(token, wanted, settings)
    runner = web.AppRunner(coordinator.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            what = "is taken by another program" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            print(f"virtualflow: port {port} of {host} {what}; choose another with --port", file=sys.stderr)
            return 1
        bound = runner.addresses[0][1]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{bound}"
        logger.info("listening on %s", url)
        if ready_file is not None:
            temporary = ready_file.with_name(ready_file.name + ".writing")
            temporary.write_text(url + "\n", encoding="utf-8")
            os.replace(temporary, ready_file)
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await ended.wait()
        return 0
    finally:
        await coordinator.close()
        await runner.cleanup()


def serve(
    host: str, port: int, token: str, wanted: int, settings: CoordinatorSettings, ready_file: Path | None
) -> int:
    """Serve one job until SIGTERM or SIGINT; the exit code.

    Args:
        host: the address to listen on.
        port: the port to listen on; 0 takes a free one.
        token: what every request must bear.
        wanted: how many workers the job is to start with.
        settings: time-outs.
        ready_file: where to write ``http://host:port`` once it listens.
    """
    return asyncio.run(_serve(host, port, token, wanted, settings, ready_file))

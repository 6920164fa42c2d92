"""The server of one job: HTTP and WebSockets around :class:`virtualflow.coordinator.state.JobState`.

It authenticates, decodes, bounds and forwards; what is said changes the state, and every decision is a function of it.
Without torch, so that it fits into a small pod; without state on disk, so that it may be killed and started again at
any moment. :func:`serve` is it as a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import ipaddress
import logging
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from virtualflow.atomic_file import write_whole
from virtualflow.coordinator.admission import admit, describe_run_over, refuse_borrowed_name, refuse_unread, run_over
from virtualflow.coordinator.calls import carry_out
from virtualflow.coordinator.decisions import decide
from virtualflow.coordinator.door import Door, WorkerLine
from virtualflow.coordinator.door import logger as seldom
from virtualflow.coordinator.generations import excuse
from virtualflow.coordinator.memory_copies import JobRecords, KeptCopies, copy_limit
from virtualflow.coordinator.roster import UnknownWorker
from virtualflow.coordinator.settings import CoordinatorSettings, LivePageSettings
from virtualflow.coordinator.snapshot import listed
from virtualflow.coordinator.state import JobState
from virtualflow.coordinator.status_stream import Watchers, answer, upgrade
from virtualflow.coordinator.worker_messages import disconnect, handle
from virtualflow.errors import ConfigurationError
from virtualflow.protocol import framing, http_api, job_record, live_view
from virtualflow.protocol import messages as m
from virtualflow.protocol.certificates import Role
from virtualflow.protocol.identity import TLS_ONLY, Identity
from virtualflow.protocol.settings import MAX_MESSAGE, MAX_TEXT
from virtualflow.protocol.versions import RUNS_PROTOCOL
from virtualflow.protocol.wording import PLAINTEXT

if TYPE_CHECKING:
    from virtualflow.coordinator.page.live_page import LivePage

logger = logging.getLogger("virtualflow.coordinator")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


PLACES: dict[str, Role] = {
    "/v1/worker": "worker",
    http_api.COPY_PATH: "worker",
    job_record.PATH: "worker",
    live_view.VIEW_PATH: "view",
    live_view.LOG_PATH: "view",
}
"""Who may go where; everything else is for whoever runs the job."""
_MAY: dict[Role, frozenset[Role]] = {
    "worker": frozenset({"worker"}),
    "view": frozenset({"view"}),
    "control": frozenset({"control", "view"}),
    "coordinator": frozenset(),
}
_MAY_ALL: frozenset[Role] = frozenset({"worker", "view", "control"})
"""What the token of a job in plaintext opens."""


class CoordinatorServer:
    """The server's state: the job, the open connections, and the time to decide again.

    Args:
        token: what opens everything in plaintext; with an identity it opens nothing, and the live page's token is
            derived from it all the same.
        identity: of a coordinator whose parties have certificates; ``None``: connections are in plaintext.

    Raises:
        ConfigurationError: the token is empty.
    """

    def __init__(
        self,
        token: str,
        wanted: int,
        settings: CoordinatorSettings,
        minimum: int = 1,
        identity: Identity | None = None,
    ) -> None:
        if not token:
            raise ConfigurationError("a coordinator needs a token that all who talk to it know")
        self.door = Door(settings, identity)
        self._digest, self._view_digest = (
            hashlib.sha256(known.encode()).digest() for known in (token, live_view.view_token(token))
        )
        self._settings = settings
        self._ticked_at = self._beats_at = time.monotonic()
        self._excused = 0.0
        self.state = JobState(time.time_ns() // 1_000_000, wanted, settings.membership, self._ticked_at, minimum)
        if settings.confirmed_start:
            self.state.next_ticket = secrets.randbits(52)
            self.state.ask_who_may_train()
        self._lines: dict[str, WorkerLine] = {}
        self._writers: set[asyncio.Task[None]] = set()
        self.state.copy_limit = copy_limit(settings.memory_copy)
        self._watchers = Watchers(self.state, settings.watch_interval, settings.watch_rate, settings.paid_interval)
        self._page = _page_of(self.state, settings.live_page)
        self.state.record_interval = settings.live_page.record_interval
        self._records = JobRecords(self.state, identity)
        self._copies = KeptCopies(self.state, settings.memory_copy, self._watchers.notice, self.door.name_of)
        self._timer: asyncio.TimerHandle | None = None
        self._due: asyncio.TimerHandle | None = None
        self._turned_at = 0.0
        self._stopped = asyncio.Event()
        self._hurried = False
        self._pulse: asyncio.TimerHandle | None = None
        self._closing = False

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_MESSAGE, middlewares=[self._guard])
        app.on_startup.append(self._start)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get(live_view.PAGE_PATH, _no_page if self._page is None else self._page.show)
        app.router.add_get(live_view.VIEW_PATH, _no_page if self._page is None else self._page.view)
        app.router.add_get(live_view.LOG_PATH, _no_page if self._page is None else self._page.log)
        app.router.add_get("/v1/status", self._watchers.show)
        app.router.add_get("/v1/watch", self._watchers.serve)
        app.router.add_get("/v1/worker", self._worker)
        app.router.add_put(http_api.COPY_PATH, self._copies.receive)
        app.router.add_get(http_api.COPY_PATH, self._copies.give)
        app.router.add_get(job_record.PATH, self._records.give)
        app.router.add_put(job_record.PATH, self._records.take)
        for kind, path in http_api.PATHS.items():
            app.router.add_post(path, self._calls(kind))
        return app

    # --- turning the job's wheel -------------------------------------------------------------------------------------

    async def _start(self, app: web.Application) -> None:
        self._beat()

    def _beat(self) -> None:
        """Look at the clock often enough to notice when this process did not run, or does not keep up."""
        self._tick()
        self.state.count_goodput(self._ticked_at)
        self._watchers.notice_time(self._ticked_at)
        behind = self._ticked_at - self._beats_at - self._excused
        if behind > self._settings.stall:
            # It runs, but what the workers sent waits behind what others sent.
            logger.warning("the coordinator is %.1f s behind", behind)
            excuse(self.state, behind, self._ticked_at)
        self._excused = 0.0
        self._beats_at = self._ticked_at + self._settings.stall / 2
        if not self._closing:
            self._pulse = asyncio.get_running_loop().call_later(self._settings.stall / 2, self._beat)

    def _tick(self) -> float:
        """The time, which nothing is left out of: what this process did not run for is no worker's silence."""
        now = time.monotonic()
        stalled, self._ticked_at = now - self._ticked_at, now
        self.state.history.wall = time.time()
        if stalled > self._settings.stall:
            # What the workers sent meanwhile is read after this: their silence is this process's own.
            logger.warning("the coordinator did not run for %.1f s", stalled)
            excuse(self.state, stalled, now)
            self._excused += stalled
        return now

    def _turn_soon(self) -> None:
        """Take a turn when one is due: what comes until then is decided on together."""
        if self._due is None and not self._closing:
            loop = asyncio.get_running_loop()
            self._due = loop.call_at(self._turned_at + self._settings.rest * len(self._lines), self._turn)

    def _turn(self) -> None:
        """Decide, send what there is to send, and see to it that the next limit is not missed."""
        if self._closing:
            return
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._turned_at = asyncio.get_running_loop().time()
        now = self._tick()
        wake_at = decide(self.state, now)
        while not self._deliver():
            wake_at = decide(self.state, now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_at is not None:
            delay = max(wake_at - time.monotonic(), 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay, self._turn)
        self._watchers.notice()
        if self._page is not None:
            self._page.notice()
        if not self.stopping:
            self._stopped.set()

    def _turn_within(self, seconds: float) -> None:
        """Decide in so many seconds at the latest: what is heard until then counts too."""
        loop = asyncio.get_running_loop()
        if self._timer is None or self._timer.when() > loop.time() + seconds:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(seconds, self._turn)

    def _deliver(self) -> bool:
        """Send what the job has to say; ``False``: a connection was cut off over it."""
        outbox, self.state.outbox = self.state.outbox, []
        encoded: dict[int, bytes] = {}
        undisturbed = True
        for incarnation, message in outbox:
            line = self._lines.get(incarnation)
            if line is None:
                continue
            if id(message) not in encoded:
                encoded[id(message)] = framing.pack(message)  # once for all who are told
            data = encoded[id(message)]
            if not line.put(data):
                logger.warning("%s does not read its messages; closing its connection", incarnation)
                self._drop(incarnation)
                undisturbed = False
            elif isinstance(message, m.Refuse | m.RunOver):
                line.finish()
        return undisturbed

    def _drop(self, incarnation: str) -> None:
        self._lines.pop(incarnation).abort()
        disconnect(self.state, incarnation, self._ticked_at)

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for and somebody has still to leave, or to be told that it may."""
        return self.state.stop is not None and (self.state.phase not in http_api.ENDED or bool(self._lines))

    async def finish_stop(self) -> None:
        """Stay until a stop that is under way is done, ``stop_grace`` seconds at most; see also :meth:`hurry`."""
        if self._hurried or not self.stopping:
            return
        logger.info("told to end; staying until the job has stopped (%s)", self.state.stop)
        self._stopped.clear()
        try:
            async with asyncio.timeout(self._settings.stop_grace):
                await self._stopped.wait()
        except TimeoutError:
            logger.warning("the job has not stopped within %g s; ending all the same", self._settings.stop_grace)

    def hurry(self) -> None:
        self._hurried = True
        self._stopped.set()

    async def close(self) -> None:
        self._closing = True
        self._watchers.close()
        if self._page is not None:
            self._page.close()
        for timer in (self._timer, self._due, self._pulse):
            if timer is not None:
                timer.cancel()
        for line in self._lines.values():
            line.finish()
        if self._writers:
            await asyncio.wait(self._writers, timeout=self._settings.goodbye)
        for line in self._lines.values():
            line.abort()

    # --- requests ----------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in ("/healthz", live_view.PAGE_PATH):
            return await handler(request)
        party = self.door.party_of(request.transport)
        may = _MAY[party.role] if party is not None else self._may_by_token(request)
        if PLACES.get(request.path, "control") in may:
            if may != _MAY["view"]:  # who only looks gets no place for long
                self.door.admit(request.transport)
            return await handler(request)
        if party is not None:
            refusal = answer(403, f"the certificate is of {party}, and {request.path} is not for its role")
        elif may:
            refusal = answer(
                403,
                f"that token is for looking: it opens GET {live_view.VIEW_PATH} and {live_view.LOG_PATH}, and "
                "nothing else",
            )
        elif self.door.identity is not None:
            refusal = answer(
                426,
                f"the coordinator {TLS_ONLY}; without TLS, it shows the live page on its own machine",
            )
            refusal.headers["Upgrade"] = "TLS/1.3"
        else:
            refusal = answer(401, "the job's token is missing or wrong; send it as 'Authorization: Bearer TOKEN'")
        refusal.force_close()
        return refusal

    def _may_by_token(self, request: web.Request) -> frozenset[Role]:
        """Where somebody without a certificate may go: with an identity, nobody but viewers of this machine."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        knows = hmac.compare_digest(given, self._digest) and scheme.lower() == "bearer"
        looks = hmac.compare_digest(given, self._view_digest) and scheme.lower() == "bearer"
        if self.door.identity is not None:
            knows, looks = False, looks and _is_local(request.remote)
        return _MAY_ALL if knows else _MAY["view"] if looks else frozenset()

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    def call(self, call: http_api.Call) -> str:
        """Do what a call says, and what follows from it; the answer in one sentence."""
        sentence = carry_out(self.state, call, self._tick())
        self._turn()
        return sentence

    def _calls(self, kind: type[http_api.Call]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            try:
                body = await request.read()
                call = msgspec.json.decode(body or b"{}", type=kind)
            except web.HTTPRequestEntityTooLarge:
                return answer(413, f"the body is larger than {MAX_MESSAGE} bytes")
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                return answer(400, f"the body is not a valid {kind.__name__}: {error}")
            try:
                return answer(200, self.call(call))
            except UnknownWorker as error:
                names = sorted(worker.name for worker in self.state.roster.workers.values() if worker.present)
                has = f"it has {listed(names)}" if names else "it has none now"
                text = f"the job has no worker {error.args[0]}; {has} (virtualflow status shows them)"
                return answer(404, text[:MAX_TEXT])

        return handle

    async def _worker(self, request: web.Request) -> web.StreamResponse:
        """One worker's connection: a Hello, then messages both ways until either side closes it."""
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE, compress=False)
        no_handshake = await upgrade(socket, request)
        if no_handshake is not None:
            return no_handshake
        certified = self.door.name_of(request)
        hello = await self._first_message(socket, certified)
        if hello is None or self._closing:
            return socket
        now = self._tick()
        borrowed = refuse_borrowed_name(self.state, hello.worker, certified)
        if borrowed is not None:
            await self._refuse(socket, borrowed)
            return socket
        self._deliver()  # what a former connection was still to be told is not for this one
        over = run_over(self.state, hello)
        if over is not None:
            await self._answer(socket, over if hello.protocol >= RUNS_PROTOCOL else m.Refuse(describe_run_over(over)))
            return socket
        refusal = admit(self.state, hello, now)
        if refusal is not None:
            await self._refuse(socket, refusal)
            return socket
        worker, incarnation = hello.worker, hello.incarnation
        del hello  # else each connection would keep a plan of its own, with all members
        line = WorkerLine(socket, request.transport, self._settings.backlog)
        former = self._lines.get(incarnation)
        if former is not None:
            former.abort()  # half open: the worker would not have come again otherwise
        self._lines[incarnation] = line
        writer = asyncio.create_task(line.write())
        self._writers.add(writer)
        writer.add_done_callback(self._writers.discard)
        try:
            self._turn_soon()
            await self._listen(socket, worker, incarnation, line)
        except ConnectionError:
            pass  # said below, as for a connection that was closed in order
        finally:
            if not self._closing:
                writer.cancel()
            if self._lines.get(incarnation) is line:
                self._tick()
                self._drop(incarnation)
                self._turn_soon()
        return socket

    async def _listen(self, socket: web.WebSocketResponse, worker: str, incarnation: str, line: WorkerLine) -> None:
        async for frame in socket:
            if frame.type not in (WSMsgType.BINARY, WSMsgType.TEXT) or self._lines.get(incarnation) is not line:
                return
            try:
                message = framing.unpack_from_worker(frame.data)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                logger.warning("%s sent a message that is refused: %s", worker, error)
                await socket.close(code=WSCloseCode.INVALID_TEXT, message=b"malformed message")
                return
            news = self.state.news
            handle(self.state, incarnation, message, self._tick())
            if isinstance(message, m.Pace):
                self._turn_within(self._settings.weighing)
            elif self.state.news != news or isinstance(message, m.Publish):
                self._turn_soon()
            else:  # a heartbeat, progress, something stale: these can only put decisions off
                self._watchers.notice()

    async def _refuse(self, socket: web.WebSocketResponse, refusal: str) -> None:
        self._turn()
        await self._answer(socket, m.Refuse(refusal))

    async def _answer(self, socket: web.WebSocketResponse, message: m.ToWorker) -> None:
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(framing.pack(message))

    async def _first_message(self, socket: web.WebSocketResponse, certified: str | None) -> m.Hello | None:
        message: m.FromWorker | None = None
        frame = None
        try:
            frame = await asyncio.wait_for(socket.receive(), self._settings.first_message)
            if frame.type not in (WSMsgType.BINARY, WSMsgType.TEXT):
                return None
            message = framing.unpack_from_worker(frame.data)
        except TimeoutError:
            seldom.warning("a connection is refused: it said nothing for %g s", self._settings.first_message)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            seldom.warning("a connection is refused: %s", error)
            self._tick()
            refusal = refuse_unread(self.state, frame.data, certified) if frame is not None else None
            if refusal is not None:
                await self._refuse(socket, refusal)
                return None
        if isinstance(message, m.Hello):
            return message
        await socket.close(code=WSCloseCode.INVALID_TEXT, message=b"the first message must be a valid Hello")
        return None


def _is_local(address: str | None) -> bool:
    return address is not None and ipaddress.ip_address(address).is_loopback


_PAGE = "virtualflow.coordinator.page"


def _page_of(state: JobState, settings: LivePageSettings) -> LivePage | None:
    """The live page; ``None``: this installation has none."""
    try:
        from virtualflow.coordinator.page.live_page import LivePage
    except ModuleNotFoundError as error:
        if error.name != _PAGE:
            raise
        return None
    return LivePage(state, settings)


async def _no_page(request: web.Request) -> web.StreamResponse:
    refusal = answer(501, f"this coordinator was installed without {_PAGE}; install all of virtualflow to see the page")
    refusal.force_close()
    return refusal


# --- the process: it listens, says where, and ends on a signal when its job lets it -----------------------------------


async def serve(
    *,
    host: str,
    port: int,
    token: str,
    wanted: int,
    minimum: int,
    settings: CoordinatorSettings,
    ready_file: Path | None,
    identity: Identity | None = None,
) -> int:
    """Serve one job until SIGTERM or SIGINT; the exit code.

    SIGTERM while the job stops lets it stop first (``stop_grace``); a second one, or SIGINT, ends it at once.

    Args:
        port: the port to listen on; 0 takes a free one.
        token: as :class:`CoordinatorServer` has it.
        wanted: how many workers the job is to start with.
        minimum: with fewer ready workers nothing begins.
        ready_file: where to write ``http://host:port`` once it listens; with an identity ``https://host:port``.
        identity: of this coordinator; ``None``: in plaintext.
    """
    coordinator = CoordinatorServer(token, wanted, settings, minimum, identity)
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
        url = f"{'http' if identity is None else 'https'}://{shown}:{bound}"
        logger.info("listening on %s", url)
        if identity is None:
            coordinator.state.plaintext = True
            coordinator.state.tell("warning", f"the job's connections are in plaintext: {PLAINTEXT}")
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

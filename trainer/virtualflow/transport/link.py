"""A worker's connection to its coordinator: a thread that outlives coordinators and never stops the training.

The training thread reads the newest facts under :attr:`Link.changed` and queues messages; the thread behind it
connects, says Hello, beats, and comes back with another Hello whenever the connection is lost. What a restarted
coordinator must know and Hello does not say is kept and sent again (:meth:`Link.send` with ``keep``).
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import aiohttp
import msgspec

from virtualflow.errors import ConfigurationError, CoordinatorAbsent
from virtualflow.protocol import framing
from virtualflow.protocol import messages as m
from virtualflow.protocol.identity import TLS_ONLY, Credential, context_of, explain_refusal, headers_of
from virtualflow.protocol.job_record import AGE, PATH
from virtualflow.protocol.settings import MAX_MESSAGE
from virtualflow.transport.activity import Activity
from virtualflow.transport.settings import LinkSettings

logger = logging.getLogger("virtualflow.worker")

T = TypeVar("T")

_BACKLOG = 200
"""Messages kept while there is no connection; the oldest go first (Hello tells the state anyway)."""


_USAGE_EVERY = 5.0
"""Seconds between two looks at what this process takes of its machine."""

_REFUSALS = {
    401: "the coordinator at {} refuses the token; check VIRTUALFLOW_TOKEN",
    403: "the coordinator at {} takes no worker by this certificate or token; give it those of a worker of its job",
    426: f"the coordinator at {{}} {TLS_ONLY}",
}
"""What an answer to a worker that would connect means: it is not asked again."""

_TOLD = 8
"""Latest plans that are remembered as told by the coordinator that is connected; it remembers more."""


class Link:
    """The connection of one worker process.

    All attributes below are written by the link's thread and read under :attr:`changed`, notified on each news.
    """

    def __init__(
        self,
        url: str,
        credential: Credential,
        hello: Callable[[], m.Hello],
        on_plan: Callable[[m.Plan], None],
        settings: LinkSettings,
        on_over: Callable[[], None] | None = None,
    ) -> None:
        self.activity = Activity()
        self.usage: Callable[[], m.Usage] | None = None
        """What this process takes of its machine; called by the link's thread, now and then."""
        self._usage_due = 0.0
        self.changed = threading.Condition()
        self.connected = False
        self.welcome: m.Welcome | None = None
        self.plan: m.Plan | None = None
        self.hold: int | None = None
        self.drain: m.Drain | None = None
        self.drain_until = 0.0
        self.ended: m.End | None = None
        self.refused: str | None = None
        self.released = False
        self.run_over: m.RunOver | None = None
        """This worker's run of the script was over before it was admitted, so it never is."""
        self.rejected: str | None = None
        """Why the coordinator cannot be used at all (a wrong token, another job's certificate)."""
        self.failure: Exception | None = None
        """A defect that ended something behind the training thread, which is to raise it."""
        self._asked = self._granted = 0
        """Numbers of the last lease that was asked for, and of the last that the coordinator has granted."""
        self._keys: dict[tuple[m.Generation, str], bytes] = {}
        self._told: deque[m.Generation] = deque(maxlen=_TOLD)
        """Plans that came over the present connection."""
        self._published: dict[tuple[m.Generation, str], m.Publish] = {}
        self._url = url
        self._credential = credential
        self._trouble = "nothing is heard of it"
        """What became of the latest attempt."""
        self.record = RecordKeeper(url, settings.connect_timeout)
        self._hello = hello
        self._on_plan = on_plan
        self._on_over = on_over
        self._settings = settings
        self._queue: deque[m.FromWorker] = deque(maxlen=_BACKLOG)
        self._kept: dict[type, m.FromWorker] = {}
        self._unbuilt: m.Broken | None = None
        """The communicator of the newest plan could not be built here."""
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = threading.Event()
        self._lost_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="virtualflow-link", daemon=True)

    # --- for the training thread -------------------------------------------------------------------------------------

    def start(self, limit: float | None = None) -> None:
        """Connect, and wait until the coordinator has answered.

        Args:
            limit: seconds to wait at the most, instead of the orphan limit.
        """
        self._thread.start()
        limit = self._settings.orphan_limit if limit is None else limit
        if not self.wait(self._answered, limit):
            raise CoordinatorAbsent(
                f"no coordinator answers at {self._url} for {limit:g} s ({self._trouble}); check "
                "VIRTUALFLOW_COORDINATOR"
            )
        if self.rejected is not None:
            raise ConfigurationError(self.rejected)

    def _answered(self) -> bool:
        return bool(self.welcome or self.rejected or self.refused or self.run_over or self.failure)

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def send(self, message: m.FromWorker, *, keep: bool = False) -> None:
        """Queue a message; with ``keep`` it is sent again to every coordinator to come (the latest of its kind)."""
        with self.changed:
            if keep:
                self._kept[type(message)] = message
            self._queue.append(message)
        self._stir()

    def keep(self, message: m.FromWorker) -> None:
        """Send it to every coordinator to come; the present one need not know."""
        with self.changed:
            self._kept[type(message)] = message

    def forget(self, kind: type) -> None:
        """A message that was kept has served its purpose."""
        with self.changed:
            self._kept.pop(kind, None)

    def send_unbuilt(self, message: m.Broken) -> None:
        """Tell each coordinator that a plan's communicator could not be built here, until a newer plan has come.

        It is kept beside what became of the running generation: both must be known to whoever makes the next one.
        """
        with self.changed:
            if self.plan is None or self.plan.generation <= message.generation:
                self._unbuilt = message
        self.send(message)

    def wait(self, predicate: Callable[[], T], timeout: float) -> T:
        """Wait until ``predicate()`` is true (called under the lock) or the time is over; its last value."""
        with self.activity.waiting, self.changed:
            return self.changed.wait_for(predicate, timeout)

    def notify(self) -> None:
        """Wake those who wait: something that their predicate looks at has changed elsewhere."""
        with self.changed:
            self.changed.notify_all()

    def publish(self, generation: m.Generation, key: str, value: bytes) -> None:
        message = m.Publish(generation, key, value)
        with self.changed:
            self._keys[generation, key] = value
            self._published[generation, key] = message
        self.send(message)

    def renew_lease(self, timeout: float) -> bool:
        """Ask the coordinator whether this worker still has its place; False if it does not say so in time."""
        with self.changed:
            self._asked += 1
        self.send(m.RenewLease(self._asked), keep=True)
        self.wait(lambda: self._granted >= self._asked or self.refused or self.failure, timeout)
        self.forget(m.RenewLease)
        return self._granted >= self._asked

    def lookup(self, generation: m.Generation, key: str) -> bytes | None:
        return self._keys.get((generation, key))

    def flush(self, timeout: float) -> bool:
        """Wait until all that was queued has been written to a connection, or there will be none any more."""
        return bool(
            self.wait(
                lambda: (not self._queue and self.connected) or self.rejected or self.refused or self.run_over, timeout
            )
        )

    @property
    def silent_for(self) -> float:
        """Seconds since the connection was lost; 0 while it stands."""
        return 0.0 if self.connected else time.monotonic() - self._lost_at

    def close(self) -> None:
        self._closing.set()
        self._stir()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=self._settings.connect_timeout)

    # --- the link's thread -------------------------------------------------------------------------------------------

    def _stir(self) -> None:
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(wake.set)
            except RuntimeError:
                logger.debug("the link's loop has just closed")

    def fail(self, error: Exception) -> None:
        """Let the training thread raise ``error``, which has ended something behind it."""
        with self.changed:
            if self.failure is None and not self._closing.is_set():
                self.failure = error
            self.changed.notify_all()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                asyncio.run(self._stay_connected())
                return
            except Exception as error:  # noqa: BLE001 - the training thread raises it, and tells it over this link
                self.fail(error)
                self._closing.wait(self._settings.retry_most)

    async def _stay_connected(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        pause, said = self._settings.retry_first, False
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout)
        connector = aiohttp.TCPConnector(ssl=context_of(self._credential))
        async with aiohttp.ClientSession(
            timeout=timeout, headers=headers_of(self._credential), connector=connector
        ) as session:
            while not (self._closing.is_set() or self.rejected or self.refused or self.run_over):
                try:
                    # A coordinator that accepts connections and then does nothing must not hold this up for ever.
                    async with asyncio.timeout(self._settings.connect_timeout):
                        socket = await session.ws_connect(
                            f"{self._url}/v1/worker",
                            max_msg_size=MAX_MESSAGE,
                            heartbeat=2 * self._settings.connect_timeout,
                            timeout=aiohttp.ClientWSTimeout(ws_close=self._settings.connect_timeout),
                        )
                    welcome = self.welcome
                    async with socket:
                        await self._converse(session, socket)
                    if self.welcome is not welcome:
                        pause, said = self._settings.retry_first, False
                except aiohttp.WSServerHandshakeError as error:
                    sentence = _REFUSALS.get(error.status)
                    if sentence is not None:
                        self._reject(sentence.format(self._url))
                    logger.debug("the coordinator answers %s", error.status)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    if isinstance(error, aiohttp.ClientSSLError) and self.welcome is None:
                        self._reject(explain_refusal(self._url, error))
                    self._trouble = str(error) or type(error).__name__
                    if not said:
                        logger.debug("no connection to the coordinator: %s", error)
                        said = True
                if self._closing.is_set():
                    break
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, self._settings.retry_most)

    async def _converse(self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        # The queue is taken before Hello is made: what is queued from now on may be missing in it.
        self._queue_anew()
        await socket.send_bytes(_encode_hello(self._hello()))
        with self.changed:
            self.connected = True
            self.changed.notify_all()
        tasks = [asyncio.create_task(self._write(socket))]
        try:
            async for frame in socket:
                if frame.type not in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT):
                    break
                try:
                    message = framing.unpack_to_worker(frame.data)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    logger.warning("the coordinator sent a message that is refused: %s", error)
                    continue
                self._take(message)
                if isinstance(message, m.Welcome) and message.record:
                    tasks.append(asyncio.create_task(self.record.keep(session, message.record)))
        finally:
            for task in tasks:
                task.cancel()
            with self.changed:
                self.connected = False
                self._lost_at = time.monotonic()
                self.changed.notify_all()

    def _queue_anew(self) -> None:
        """Queue what a coordinator that is about to read Hello has to know beside it; what else waited is old news."""
        with self.changed:
            queued = [x for x in self._queue if isinstance(x, m.Note | m.Resumed)]
            unbuilt = [] if self._unbuilt is None else [self._unbuilt]
            self._queue.clear()
            self._told.clear()
            self._queue.extend([*queued, *self._kept.values(), *unbuilt, *self._published.values()])

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        assert self._wake is not None
        try:
            while True:
                while self._queue:
                    message = self._queue[0]
                    await socket.send_bytes(framing.pack(self._short(message)))
                    with self.changed:
                        # A queue that was full has lost its first message meanwhile.
                        if self._queue and self._queue[0] is message:
                            self._queue.popleft()
                        self.changed.notify_all()
                if self._closing.is_set():
                    await socket.close()
                    return
                self._wake.clear()
                if self._queue or self._closing.is_set():
                    continue
                welcome = self.welcome
                every = self._settings.heartbeat if welcome is None else welcome.heartbeat
                usage = self._look_at_usage()  # also of a worker that says so much that it needs no sign of life
                try:
                    async with asyncio.timeout(every):
                        if usage is None:
                            await self._wake.wait()
                            continue
                except TimeoutError:
                    pass
                await socket.send_bytes(m.encode(m.Heartbeat(self.activity.report(2 * every), usage)))
        except Exception as error:  # noqa: BLE001 - nobody waits for this task; the training thread raises it
            if not isinstance(error, aiohttp.ClientError | OSError):
                self.fail(error)
            await socket.close()

    def _look_at_usage(self) -> m.Usage | None:
        now = time.monotonic()
        if self.usage is None or now < self._usage_due:
            return None
        self._usage_due = now + _USAGE_EVERY
        return self.usage()

    def _take(self, message: m.ToWorker) -> None:
        with self.changed:
            match message:
                case m.Welcome():
                    self.welcome, self.hold = message, message.hold
                case m.Lease(number):
                    self._granted = number
                case m.Plan():
                    self._told.append(message.generation)
                    if self.plan is None or message.generation > self.plan.generation:
                        self.plan, self._unbuilt = message, None
                        self._keys = {key: value for key, value in self._keys.items() if key[0] >= message.generation}
                        self._published = {k: v for k, v in self._published.items() if k[0] >= message.generation}
                    else:
                        return
                case m.Drain():
                    self.drain, self.drain_until = message, time.monotonic() + message.deadline
                case m.Hold(step):
                    self.hold = step
                case m.Release():
                    self.released = True
                case m.Refuse(reason):
                    self.refused = reason
                case m.RunOver(current):
                    if self.welcome is None:
                        self.run_over = message
                    elif m.Done in self._kept:
                        self.released = True
                    else:
                        self.refused = f"the job went on to run {current} of its script without this process"
                case m.End():
                    self.ended = message
                case m.Keys(generation, values):
                    self._keys.update({(generation, key): value for key, value in values.items()})
            self.changed.notify_all()
        if isinstance(message, m.Plan):
            self._on_plan(message)
        elif isinstance(message, m.ShowStacks):
            self.send(self.activity.stacks())
        elif isinstance(message, m.Refuse | m.RunOver | m.End) and self._on_over is not None:
            self._on_over()

    def _short(self, message: m.FromWorker) -> m.FromWorker:
        """``message`` without what this very coordinator has told."""
        if isinstance(message, m.Entered) and message.plan.generation in self._told:
            return m.EnteredTold(message.plan.generation, message.step, message.restored)
        return message

    def _reject(self, sentence: str) -> None:
        with self.changed:
            self.rejected = sentence
            self.changed.notify_all()


def _encode_hello(hello: m.Hello) -> bytes:
    """JSON of ``hello``, without the oldest membership changes if it would be more than the coordinator reads."""
    while hello.changes and len(m.encode(hello)) > MAX_MESSAGE:
        hello = msgspec.structs.replace(hello, changes=hello.changes[len(hello.changes) // 2 + 1 :])
    return framing.pack(hello)


# The record of the job, kept by a few workers for the coordinator that takes the present one's place.
#
# The bytes are a coordinator's own; nobody looks into them here. One that knows no records answers 404, and a record
# that does not arrive is no loss for the training: so whatever goes wrong is logged, and tried again with the next
# one.


class RecordKeeper:
    """Keeps the newest record that it could fetch from the coordinators at ``url`` (link's thread).

    Args:
        url: ``http://host:port``.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.fetches = False
        """Whether this worker is one of those that keep it; set by the training thread."""
        self._url = f"{url}{PATH}"
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._record: bytes | None = None
        self._fetched_at = 0.0

    async def keep(self, session: aiohttp.ClientSession, interval: float) -> None:
        """Hand over what is kept, then fetch anew every ``interval`` seconds, until the connection ends."""
        await self._hand_over(session)
        while True:
            await asyncio.sleep(interval)
            if self.fetches:
                await self._fetch(session)

    async def _hand_over(self, session: aiohttp.ClientSession) -> None:
        if self._record is None:
            return
        age = {AGE: f"{time.monotonic() - self._fetched_at:.3f}"}
        try:
            async with session.put(self._url, data=self._record, params=age, timeout=self._timeout) as answer:
                if answer.status != 200:
                    logger.debug("the record of the job is not taken: %s", await answer.text())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.debug("the record of the job was not handed over: %s", error)

    async def _fetch(self, session: aiohttp.ClientSession) -> None:
        try:
            async with session.get(self._url, timeout=self._timeout) as answer:
                if answer.status == 200 and (answer.content_length or 0) <= MAX_MESSAGE:  # more would not be taken
                    self._record, self._fetched_at = await answer.read(), time.monotonic()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.debug("the record of the job was not fetched: %s", error)

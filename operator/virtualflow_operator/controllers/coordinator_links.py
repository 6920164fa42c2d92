"""The connections to the jobs' coordinators: one a job, opened and closed as its coordinator comes and goes.

Each follows the coordinator's status (what is news at once, mere progress now and then) and wakes the reconciler; calls
go the other way. All of it may fail at any time: training goes on, and the next reconciliation says what is still true.

Who answers may be anything that a job's user has put there. It costs its own job only: few connections, bounded
answers, a bounded stream, and silence for longer and longer when it does not behave like a coordinator. Many that each
stay within these bounds cost their own namespace only.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec

from virtualflow.protocol.http_api import Call, Status, StopCall
from virtualflow.protocol.http_client import (
    CallRefused,
    CoordinatorClient,
    CoordinatorMisbehaves,
    CoordinatorUnreachable,
    ProtocolMismatch,
    StatusTooLarge,
)
from virtualflow.protocol.identity import Credential, expect_many_connections
from virtualflow_operator.api import CoordinatorLink, Pod
from virtualflow_operator.constants import COORDINATOR_PORT
from virtualflow_operator.controllers.issuer import Issuer
from virtualflow_operator.k8s import Key, TokenBucket
from virtualflow_operator.observability import Metrics
from virtualflow_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

Outcome = Literal["ok", "refused", "misbehaved", "unreachable"]

_MISBEHAVED_MOST = 600.0
"""One that does what no coordinator does is left alone for ``refused_retry``, then twice as long each time, at most
this."""
MAX_REASON = 400
"""Characters of what is said of a coordinator that misbehaves."""


_BUFFERED = 64 << 10
"""Bytes of a stream that come in at once while it has to wait."""
_AT_ONCE = 3
"""Statuses that do: the one that is read next, the one after it, and one that is coming in."""
_KEPT_LOST = 64
_KEPT_CHANGES = 20
_KEPT_RUNS = 10
"""What a real coordinator's brief status has at most."""
_STRANGERS = 64
"""Workers that a status may list beyond twice as many as the job has ever had pods."""


@dataclass
class _Line:
    link: CoordinatorLink
    address: str
    connect: Callable[[], CoordinatorClient]
    client: CoordinatorClient
    most: int
    """Bytes of the largest status that it may send just now."""
    news: TokenBucket
    """Times that news may have the job reconciled."""
    bytes: TokenBucket
    """That may be read of it."""
    task: asyncio.Task[None] | None = None
    pods: int = 0
    """The most worker pods that the job was seen to have."""
    kept: int = 0
    flooding_since: float | None = None
    misbehaved: int = 0
    """How often in a row."""
    quiet_until: float = -math.inf
    """Loop time until which it is left alone."""


class CoordinatorLinks:
    """All connections to coordinators.

    Args:
        issuer: issues the operator's identity in each job, or the token of one in plaintext.
        wake: called with the job when there is news, and with the seconds that may pass before it is looked at.
    """

    def __init__(
        self,
        issuer: Issuer,
        wake: Callable[[Key, float], None],
        settings: OperatorSettings,
        metrics: Metrics,
    ) -> None:
        expect_many_connections()
        self._issuer, self._settings, self._metrics = issuer, settings, metrics
        self._wake_later = wake
        self._limits = settings.statuses
        self._holdings = Holdings(self._limits.held)
        self._turns = Turns(self._limits.rate, self._limits.rate)
        self._lines: dict[Key, _Line] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def view(self, key: Key) -> CoordinatorLink | None:
        line = self._lines.get(key)
        return line.link if line is not None else None

    def follow(self, key: Key, uid: str, coordinator: Pod | None, workers: int) -> None:
        """See to it that the job's connection leads to that coordinator's pod; ``None``: to none."""
        line = self._lines.get(key)
        if line is not None:
            line.pods = max(line.pods, workers)
        usable = coordinator if coordinator is not None and coordinator.ip and coordinator.phase == "Running" else None
        if line is not None and usable is not None and (line.link.pod, line.address) == (usable.uid, usable.ip):
            return
        if line is not None and coordinator is not None and line.link.pod == coordinator.uid and usable is None:
            return  # it was reachable and may be again; the reconciler replaces it when it is time
        self.drop(key)
        if usable is None:
            return
        host = f"[{usable.ip}]" if ":" in usable.ip else usable.ip
        url = f"{'https' if usable.identity else 'http'}://{host}:{COORDINATOR_PORT}"
        credential: Credential = self._issuer.control(uid) if usable.identity else self._issuer.token(uid)
        limits, connect = self._limits, partial(CoordinatorClient, url, credential, self._settings.signals)
        line = _Line(
            CoordinatorLink(usable.uid, False, time.time()),
            usable.ip,
            connect,
            connect(),
            limits.usual,
            TokenBucket(limits.news_burst, limits.news_refill),
            TokenBucket(limits.job_rate, limits.job_rate),
            pods=workers,
        )
        self._lines[key] = line
        self._listen_from_now_on(key, line, 0.0)

    def _listen_from_now_on(self, key: Key, line: _Line, pause: float) -> None:
        # Without this job's log context: what it wakes may be logged, and begun, on behalf of others.
        line.task = asyncio.create_task(
            self._listen(key, line, pause), name=f"coordinator of {key[0]}/{key[1]}", context=contextvars.Context()
        )

    def drop(self, key: Key) -> None:
        line = self._lines.pop(key, None)
        if line is not None:
            self._holdings.hold(key, 0)
            self._end(line)

    def _end(self, line: _Line) -> None:
        if line.task is not None:
            line.task.cancel()
            self._closing.add(line.task)
            line.task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for key in list(self._lines):
            self.drop(key)
        if self._closing:
            await asyncio.wait(self._closing, timeout=2.0)

    async def send(self, key: Key, call: Call) -> Outcome:
        """Make a call; how that went."""
        line = self._lines.get(key)
        name = type(call).__name__.removesuffix("Call").lower()
        if line is None or asyncio.get_running_loop().time() < line.quiet_until:
            return "unreachable"
        await self._turns.take(key, self._limits.least)
        try:
            async with asyncio.timeout(self._settings.signals.patience):
                await line.client.send(call)
        except CoordinatorMisbehaves as error:
            self._metrics.coordinator_call(name, "misbehaved")
            self._leave_alone(key, line, error)
            return "misbehaved"
        except CallRefused as error:
            # A worker that the coordinator does not know (any more) needs no telling.
            logger.info("the coordinator refuses %s: %s", name, error)
            self._metrics.coordinator_call(name, "refused")
            return "refused"
        except (CoordinatorUnreachable, TimeoutError) as error:
            logger.warning("%s was not told: %s", name, str(error) or "no answer")
            self._metrics.coordinator_call(name, "unreachable")
            return "unreachable"
        self._metrics.coordinator_call(name, "ok")
        return "ok"

    async def stop(self, key: Key, reason: str) -> bool:
        """Have all workers of a job leave behind the same step; whether its coordinator sees to it."""
        link = self.view(key)
        if link is None or not link.connected or link.status is None or link.status.phase in ("done", "failed"):
            return False
        return link.status.phase == "stopped" or await self.send(key, StopCall(reason)) == "ok"

    async def _listen(self, key: Key, line: _Line, pause: float) -> None:
        """Follow the coordinator's status for as long as the connection is wanted, after a pause."""

        def note(connected: bool) -> None:
            # An open stream counts once it has said something: until then the status is a former process's.
            if not connected and line.link.connected:
                line.link = replace(line.link, connected=False, since=time.time())
                self._wake(key)

        async def admit(size: int) -> None:
            await self._admit(key, line, size)

        def keep(status: Status) -> Status:
            if len(status.workers) > 2 * line.pods + _STRANGERS:
                what = f"it lists {len(status.workers)} workers of a job that has had {line.pods} worker pods at most"
                raise CoordinatorMisbehaves(200, what)
            return kept(status)

        await asyncio.sleep(pause)
        async with line.client:
            while True:
                pause = self._settings.refused_retry
                await self._turns.take(key, self._limits.usual)  # buffers fill before anything is admitted
                try:
                    watch = line.client.watch(
                        self._settings.progress_interval,
                        brief=True,
                        on_link=note,
                        most=line.most,
                        admit=admit,
                        keep=keep,
                    )
                    async for status in watch:
                        self._take(key, line, status)
                except CoordinatorMisbehaves as error:
                    if isinstance(error, StatusTooLarge) and line.most < self._settings.signals.max_answer:
                        line.most = min(2 * line.most, self._settings.signals.max_answer)
                        self._hold(key, line)
                        continue
                    pause = self._leave_alone(key, line, error)
                except CallRefused as error:
                    line.link = replace(
                        line.link,
                        connected=False,
                        since=time.time(),
                        refused=str(error),
                        incompatible=isinstance(error, ProtocolMismatch),
                    )
                    logger.warning("the coordinator of %s/%s refuses this operator: %s", *key, error)
                    self._wake(key)
                await asyncio.sleep(pause)  # not above, where the error would keep alive all that has led to it

    def _take(self, key: Key, line: _Line, status: Status) -> None:
        since = line.link.since if line.link.connected else time.time()
        line.link = CoordinatorLink(line.link.pod, True, since, status)
        now = asyncio.get_running_loop().time()
        wait = line.news.wait(now)
        if not wait:
            line.news.spend(now)
        self._wake_later(key, wait)

    def _wake(self, key: Key) -> None:
        self._wake_later(key, 0.0)

    # --- what others are spared --------------------------------------------------------------------------------------

    async def _admit(self, key: Key, line: _Line, size: int) -> None:
        """Wait until a status of that size may be read."""
        limits, now = self._limits, asyncio.get_running_loop().time()
        counted = max(size, limits.least)
        debt = line.bytes.spend(now, counted)
        if not debt:
            line.flooding_since = None
        elif line.flooding_since is None:
            line.flooding_since = now
        elif now - line.flooding_since > limits.flood:
            raise CoordinatorMisbehaves(200, f"it sends more than {limits.job_rate / 2**20:g} MiB/s without a pause")
        line.kept = size
        # What one has sent just now may lie in buffers: it counts until it has sent less.
        buffered = int(min(line.bytes.spent(now), _AT_ONCE * size + _BUFFERED))
        self._hold(key, line, buffered)
        await asyncio.sleep(debt)
        await self._turns.take(key, counted)

    def _hold(self, key: Key, line: _Line, buffered: int = 0) -> None:
        """Note what is held for a connection; where all hold too much, leave others alone, or it."""
        beyond = _AT_ONCE * (line.most - self._limits.usual)
        for loser in self._holdings.hold(key, line.kept + max(beyond, buffered)):
            self._shed(loser, self._lines[loser])

    def _release(self, key: Key, line: _Line) -> None:
        """Hold nothing for a connection that is left alone."""
        line.most, line.kept, line.flooding_since = self._limits.usual, 0, None
        self._holdings.hold(key, 0)

    def _shed(self, key: Key, line: _Line) -> None:
        """Leave a coordinator alone that has most of what there is too little of."""
        pause = self._settings.refused_retry
        self._release(key, line)
        line.quiet_until = asyncio.get_running_loop().time() + pause
        busy = f"all coordinators say too much, and those of the namespace {key[0]} say most"
        line.link = CoordinatorLink(line.link.pod, False, time.time(), busy=busy)
        self._metrics.shed.labels(key[0]).inc()
        self._end(line)
        line.client = line.connect()
        self._listen_from_now_on(key, line, pause)
        self._wake(key)

    def _leave_alone(self, key: Key, line: _Line, error: CoordinatorMisbehaves) -> float:
        """Note that what answers is no coordinator; for how many seconds it is not asked again."""
        pause = min(self._settings.refused_retry * 2.0 ** min(line.misbehaved, 16), _MISBEHAVED_MOST)
        line.misbehaved += 1
        line.quiet_until = asyncio.get_running_loop().time() + pause
        self._release(key, line)
        line.link = replace(line.link, connected=False, since=time.time(), misbehaves=str(error)[:MAX_REASON])
        self._metrics.misbehaved.inc()
        logger.warning("%s/%s: %s; left alone for %g s", *key, line.link.misbehaves, pause)
        self._wake(key)
        return pause


def kept(status: Status) -> Status:
    """What the operator needs of a status: whoever made it may have filled all else."""
    wanted = {"loss", status.non_finite.metric if status.non_finite is not None else ""}
    return msgspec.structs.replace(
        status,
        lost=status.lost[-_KEPT_LOST:],
        proposed_workers=(),
        reason="",
        metrics={name: value for name, value in status.metrics.items() if name in wanted},
        changes=status.changes[-_KEPT_CHANGES:],
        events=(),
        runs=tuple(msgspec.structs.replace(run, metrics={}) for run in status.runs[-_KEPT_RUNS:]),
    )


# --- what one job, one namespace and all together may cost; time comes in ---------------------------------------------
#
# A job that floods slows itself down (a token bucket). Where the sum of many is too much, namespaces share evenly: in
# what is held in memory (Holdings) and in what is read and decided (Turns).


class Holdings:
    """Bytes that jobs hold of what all share."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held: dict[str, dict[Key, int]] = {}
        self._sums: Tally[str] = Tally()

    def hold(self, key: Key, size: int) -> list[Key]:
        """Let a job hold so much from now on; who holds nothing any more, so that all fits.

        It is the job with most, of the namespace with most, again and again.
        """
        self._set(key, size)
        losers = []
        while self._sums.total() > self._total:
            held = self._held[max(self._sums, key=self._sums.__getitem__)]
            losers.append(max(held, key=held.__getitem__))
            self._set(losers[-1], 0)
        return losers

    def _set(self, key: Key, size: int) -> None:
        namespace = key[0]
        held = self._held.setdefault(namespace, {})
        self._sums[namespace] += size - held.pop(key, 0)
        if size:
            held[key] = size
        if not held:
            del self._held[namespace], self._sums[namespace]


class Turns:
    """Units of work a second, shared evenly by the namespaces that want some; each serves its jobs as they come.

    Args:
        rate: units a second.
        burst: units that may be spent at once after a rest.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._bucket = TokenBucket(burst, rate)
        self._waiting: dict[str, deque[tuple[float, asyncio.Future[None]]]] = {}
        self._had: dict[str, float] = {}
        """Units that each namespace has had."""
        self._served = 0.0
        """Those of the one that was served last, before it was; a namespace that comes anew begins with as many."""
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, key: Key, units: float) -> None:
        """Wait until it is this job's turn to use so many units."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        namespace = key[0]
        if namespace not in self._waiting:
            self._waiting[namespace] = deque()
            self._had[namespace] = max(self._had.get(namespace, 0.0), self._served)
        self._waiting[namespace].append((units, turn))
        if self._timer is None:
            self._serve()
        await turn

    def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._waiting:
            wait = self._bucket.wait(loop.time())
            if wait > 0:
                self._timer = loop.call_later(wait, self._serve)
                return
            namespace = min(self._waiting, key=self._had.__getitem__)
            units, turn = self._waiting[namespace].popleft()
            if not self._waiting[namespace]:
                del self._waiting[namespace]
            if turn.done():
                continue  # it waits no longer
            self._served = self._had[namespace]
            self._had[namespace] += units
            self._bucket.spend(loop.time(), units)
            turn.set_result(None)
        # Who has had no more than the one served last begins like one that is new.
        self._had = {name: had for name, had in self._had.items() if had > self._served}

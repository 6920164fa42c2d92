"""The connections to the jobs' coordinators: one a job, opened and closed as its coordinator comes and goes.

Each follows the coordinator's status (what is news at once, mere progress now and then) and wakes the reconciler; calls
go the other way. All of it may fail at any time: training goes on, and the next reconciliation says what is still true.

Who answers may be anything that a job's user has put there. It costs its own job only: few connections, bounded
answers, a bounded stream, and silence for longer and longer when it does not behave like a coordinator.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from virtualflow.protocol.http_api import Call, StopCall
from virtualflow.protocol.http_client import (
    CallRefused,
    CoordinatorClient,
    CoordinatorMisbehaves,
    CoordinatorUnreachable,
    ProtocolMismatch,
)
from virtualflow_operator.api import CoordinatorLink, Pod
from virtualflow_operator.constants import COORDINATOR_PORT
from virtualflow_operator.jobs import derive_token
from virtualflow_operator.k8s import Key
from virtualflow_operator.observability import Metrics
from virtualflow_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

Outcome = Literal["ok", "refused", "misbehaved", "unreachable"]

_MISBEHAVED_MOST = 600.0
"""One that does what no coordinator does is left alone for ``refused_retry``, then twice as long each time, at most
this."""
MAX_REASON = 400
"""Characters of what is said of a coordinator that misbehaves."""


@dataclass
class _Line:
    """One connection."""

    link: CoordinatorLink
    address: str
    client: CoordinatorClient
    task: asyncio.Task[None] | None = None
    misbehaved: int = 0
    """How often in a row."""
    quiet_until: float = -math.inf
    """Loop time until which it is left alone."""


class CoordinatorLinks:
    """All connections to coordinators.

    Args:
        key: the operator's, from which the jobs' tokens are derived.
        wake: called with the job when there is news.
        settings: the operator's.
        metrics: counts the calls.
    """

    def __init__(self, key: bytes, wake: Callable[[Key], None], settings: OperatorSettings, metrics: Metrics) -> None:
        self._key, self._wake, self._settings, self._metrics = key, wake, settings, metrics
        self._lines: dict[Key, _Line] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def view(self, key: Key) -> CoordinatorLink | None:
        """How the connection to that job's coordinator stands."""
        line = self._lines.get(key)
        return line.link if line is not None else None

    def follow(self, key: Key, uid: str, coordinator: Pod | None) -> None:
        """See to it that the job's connection leads to that coordinator's pod; ``None``: to none."""
        line = self._lines.get(key)
        usable = coordinator if coordinator is not None and coordinator.ip and coordinator.phase == "Running" else None
        if line is not None and usable is not None and (line.link.pod, line.address) == (usable.uid, usable.ip):
            return
        if line is not None and coordinator is not None and line.link.pod == coordinator.uid and usable is None:
            return  # it was reachable and may be again; the reconciler replaces it when it is time
        self.drop(key)
        if usable is None:
            return
        host = f"[{usable.ip}]" if ":" in usable.ip else usable.ip
        url, token = f"http://{host}:{COORDINATOR_PORT}", derive_token(self._key, uid)
        client = CoordinatorClient(url, token, self._settings.signals)
        line = _Line(CoordinatorLink(usable.uid, False, time.time()), usable.ip, client)
        self._lines[key] = line
        # Without this job's log context: what it wakes may be logged, and begun, on behalf of others.
        line.task = asyncio.create_task(
            self._listen(key, line), name=f"coordinator of {key[0]}/{key[1]}", context=contextvars.Context()
        )

    def drop(self, key: Key) -> None:
        """Close the job's connection, if there is one."""
        line = self._lines.pop(key, None)
        if line is not None and line.task is not None:
            line.task.cancel()
            self._closing.add(line.task)
            line.task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all connections."""
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

    async def _listen(self, key: Key, line: _Line) -> None:
        """Follow the coordinator's status for as long as the connection is wanted."""

        def note(connected: bool) -> None:
            # An open stream counts once it has said something: until then the status is a former process's.
            if not connected and line.link.connected:
                line.link = replace(line.link, connected=False, since=time.time())
                self._wake(key)

        async with line.client:
            while True:
                try:
                    watch = line.client.watch(self._settings.progress_interval, brief=True, on_link=note)
                    async for status in watch:
                        since = line.link.since if line.link.connected else time.time()
                        line.link = replace(
                            line.link,
                            connected=True,
                            since=since,
                            status=status,
                            refused="",
                            incompatible=False,
                            misbehaves="",
                        )
                        self._wake(key)
                except CoordinatorMisbehaves as error:
                    await asyncio.sleep(self._leave_alone(key, line, error))
                    continue
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
                await asyncio.sleep(self._settings.refused_retry)

    def _leave_alone(self, key: Key, line: _Line, error: CoordinatorMisbehaves) -> float:
        """Note that what answers is no coordinator; for how many seconds it is not asked again."""
        pause = min(self._settings.refused_retry * 2.0 ** min(line.misbehaved, 16), _MISBEHAVED_MOST)
        line.misbehaved += 1
        line.quiet_until = asyncio.get_running_loop().time() + pause
        line.link = replace(line.link, connected=False, since=time.time(), misbehaves=str(error)[:MAX_REASON])
        self._metrics.misbehaved.inc()
        logger.warning("%s/%s: %s; left alone for %g s", *key, line.link.misbehaves, pause)
        self._wake(key)
        return pause

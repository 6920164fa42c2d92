"""What anyone in the runner may do to the whole job: ask for another number of workers, or end it as failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from virtualflow.launcher.log_relay import LogRelay
from virtualflow.launcher.shutdown import Shutdown
from virtualflow.launcher.worker_table import WorkerProcess, WorkerTable
from virtualflow.protocol.http_api import Call, FailCall, ScaleCall, Status
from virtualflow.protocol.http_client import CallRefused, CoordinatorClient, CoordinatorUnreachable
from virtualflow.protocol.settings import MAX_TEXT


@dataclass(frozen=True, kw_only=True)
class JobControl:
    """A job's state, and the changes of it that its coordinator is told at once."""

    state: RunState
    table: WorkerTable
    calls: CoordinatorCalls
    relay: LogRelay
    tell: Callable[[str], None]
    patience: float
    """Seconds for which the coordinator's status may still say another number of workers."""

    def scale(self, workers: int) -> None:
        now = time.monotonic()
        self.state.wanted = workers
        self.state.awaited = (workers, now + self.patience)
        self.table.barred.clear()
        self.calls.make(("scale", workers, now), ScaleCall(workers))

    def fail(self, reason: str, worker: WorkerProcess | None = None) -> None:
        if self.state.shutdown is not None and self.state.shutdown.kind != "done":
            return
        self.relay.withholding = True
        self.state.shutdown = Shutdown("failed", time.monotonic(), reason, witness=worker)
        self.calls.make("fail", FailCall(reason[:MAX_TEXT]))


# Calls of the coordinator's API in the background, each made once in each of its lives.


class CoordinatorCalls:
    """Makes calls without waiting for their answers.

    Args:
        refused: told the sentence of a call that was refused.
        answered: told that some call has come to an end.
    """

    client: CoordinatorClient
    """Of the coordinator; set once its address is known."""

    def __init__(self, refused: Callable[[str], None], answered: Callable[[], None]) -> None:
        self._refused, self._answered = refused, answered
        self._made: dict[object, tuple[int, Call]] = {}
        self._under_way: dict[object, asyncio.Task[None]] = {}

    def ensure(self, key: object, call: Call, status: Status | None) -> None:
        """Make a call, unless the coordinator whose status this is was told the same under this key."""
        if status is None or key in self._under_way:
            return
        content = (status.incarnation, call)
        if self._made.get(key) != content:
            self._made[key] = content
            self.make(key, call)

    def make(self, key: object, call: Call, patience: float | None = None) -> None:
        """Make a call now, unless one of that key is under way."""
        if key in self._under_way:
            return
        task = asyncio.create_task(self._send(key, call, patience))
        self._under_way[key] = task
        task.add_done_callback(lambda _: self._ended(key))

    def close(self) -> None:
        for task in list(self._under_way.values()):
            task.cancel()

    def _ended(self, key: object) -> None:
        self._under_way.pop(key, None)
        self._answered()

    async def _send(self, key: object, call: Call, patience: float | None) -> None:
        try:
            await self.client.send(call, patience)
        except CallRefused as error:
            # A worker may have left by itself meanwhile (404): what was to be told is true already.
            if error.code != 404:
                self._refused(str(error))
        except CoordinatorUnreachable:
            self._made.pop(key, None)


# What a runner knows and has decided. Everything else it looks up anew whenever something happens.


@dataclass
class RunState:
    wanted: int
    status: Status | None = None
    """The latest one of a living coordinator."""
    shutdown: Shutdown | None = None
    interrupts: int = 0
    """Signals that asked this process to end."""
    dead_coordinators: set[int] = field(default_factory=set)
    """Incarnations whose statuses no longer count."""
    elders: int = 0
    """So many workers had been started when the last coordinator before the present one had ended: they may be in a
    generation that this one does not know."""
    awaited: tuple[int, float] | None = None
    """The number of workers that the coordinator was told, and until when its status may still say another."""

    def forget_coordinator(self) -> None:
        """The coordinator is dead or dying: what it last said no longer holds."""
        if self.status is not None:
            self.dead_coordinators.add(self.status.incarnation)
        if self.status is None or self.status.phase != "done":  # what is done stays done, whoever has told it
            self.status = None

    def follow_wanted(self, now: float) -> bool:
        """Take over the number of workers from the status; whether it is another one."""
        if self.status is None:
            return False
        if self.awaited is not None:
            workers, until = self.awaited
            if self.status.wanted != workers and now < until:
                return False
            self.awaited = None
        changed = self.status.wanted != self.wanted
        self.wanted = self.status.wanted
        return changed

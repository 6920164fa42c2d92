"""What anyone in the runner may do to the whole job: ask for another number of workers, or end it as failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from virtualflow.launcher.coordinator_calls import CoordinatorCalls
from virtualflow.launcher.log_relay import LogRelay
from virtualflow.launcher.run_state import RunState
from virtualflow.launcher.shutdown import Shutdown
from virtualflow.launcher.worker_table import WorkerProcess, WorkerTable
from virtualflow.protocol.http_api import FailCall, ScaleCall
from virtualflow.protocol.settings import MAX_TEXT


@dataclass(frozen=True, kw_only=True)
class JobControl:
    """A job's state, and the changes of it that its coordinator is told at once."""

    state: RunState
    table: WorkerTable
    calls: CoordinatorCalls
    relay: LogRelay
    tell: Callable[[str], None]
    """Shows a person what happens."""
    patience: float
    """Seconds for which the coordinator's status may still say another number of workers."""

    def scale(self, workers: int) -> None:
        """Provide that many workers from now on."""
        now = time.monotonic()
        self.state.wanted = workers
        self.state.awaited = (workers, now + self.patience)
        self.table.barred.clear()
        self.calls.make(("scale", workers, now), ScaleCall(workers))

    def fail(self, reason: str, worker: WorkerProcess | None = None) -> None:
        """End the job; that worker's error is the reason."""
        if self.state.shutdown is not None and self.state.shutdown.kind != "done":
            return
        self.relay.withholding = True
        self.state.shutdown = Shutdown("failed", time.monotonic(), reason, witness=worker)
        self.calls.make("fail", FailCall(reason[:MAX_TEXT]))

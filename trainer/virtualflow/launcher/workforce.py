"""Starts the worker processes of a local job, keeps them as they should be, and moves them towards its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from virtualflow.launcher.coordinator_process import BACKOFF_FIRST, BACKOFF_MOST, HOST
from virtualflow.launcher.exit_policy import judge
from virtualflow.launcher.job_control import JobControl
from virtualflow.launcher.log_relay import last_exception, last_traceback
from virtualflow.launcher.processes import split_line
from virtualflow.launcher.registry import JobAccess
from virtualflow.launcher.report import JobHistory
from virtualflow.launcher.shutdown import FAILURE_GRACE, Shutdown, end_signals
from virtualflow.launcher.supervisor import Stream, Supervisor, describe_exit, ourselves
from virtualflow.launcher.training_program import ALLOCATOR_ENVIRONMENT
from virtualflow.launcher.worker_table import WorkerProcess, WorkerTable
from virtualflow.protocol.crashes import Crashes, CrashWaits
from virtualflow.protocol.http_api import BeginCall, DrainCall, GoneCall, LivingWorker
from virtualflow.protocol.machine_faults import find_told_fault
from virtualflow.protocol.settings import (
    BACKOFF_LIMIT,
    CUBLAS_WORKSPACE,
    ENV_ADDRESS,
    ENV_AUDIT_DIR,
    ENV_COORDINATOR,
    ENV_CUBLAS_WORKSPACE,
    ENV_HASH_SEED,
    ENV_IDENTITY,
    ENV_TOKEN,
    ENV_WORKER,
    HASH_SEED,
    STOP_GRACE,
)
from virtualflow.protocol.wording import counted

VERDICT_GRACE = 2.0
"""A worker ended and the status does not say why: how long to wait for it before the exit itself is the reason."""
_BACKOFF_RESET = 10.0
"""Workers that crash further apart than this begin again with the first delay."""


class Workforce:
    """The workers of one job: those whose process ended are judged, missing ones started, surplus ones drained.

    Args:
        backoff_limit: how often workers may crash without progress before the job has failed.
    """

    def __init__(
        self,
        control: JobControl,
        *,
        job: str,
        command: WorkerCommand,
        supervisor: Supervisor,
        history: JobHistory,
        backoff_limit: int = BACKOFF_LIMIT,
    ) -> None:
        self._control, self._job, self._command = control, job, command
        self._supervisor, self._history = supervisor, history
        self._backoff_limit = backoff_limit
        self._waits = CrashWaits(BACKOFF_FIRST, BACKOFF_MOST, _BACKOFF_RESET)
        self._crashes = Crashes()
        self._absent = AbsentEnds()
        self._faulty: set[int] = set()
        """Ordinals of workers that a fault of their machine has ended before they joined."""

    def take(self, now: float) -> None:
        """Update the workers by what the coordinator says of them, and judge the ends of their processes."""
        status = self._control.state.status
        if status is not None:
            self._control.table.take(status, now)
            members = [worker.ordinal for worker in self._control.table.living() if worker.assigned]
            self._absent.advance(status.job_step, members)
        self._judge_exits(now)

    def mend(self, now: float) -> None:
        """Report the dead, kill the hung, drain the surplus and start the missing."""
        self.report()
        self._kill_lost(now)
        self._drain_surplus()
        self._start_missing(now)

    def report(self) -> None:
        """Tell the coordinator what only this process knows for certain: who may train, and who has ended."""
        self._tell_elders()
        self._report_gone()

    def end(self, shutdown: Shutdown, now: float) -> None:
        signals = end_signals(shutdown, self._control.table.living(), now, FAILURE_GRACE)
        for worker in signals.terminate:
            worker.terminated = True
            worker.process.send(signal.SIGTERM)
        for worker in signals.kill:
            worker.kill()

    def _judge_exits(self, now: float) -> None:
        status = self._control.state.status
        refused: list[WorkerProcess] = []
        for worker in self._control.table.unexplained():
            fault = worker.fault if worker.incarnation is not None else _told_fault(worker)
            if fault is not None and worker.incarnation is None:
                self._faulty.add(worker.ordinal)
            verdict = judge(
                worker.name,
                worker.process.code or 0,
                over=self._control.state.shutdown is not None,
                done=status is not None and status.phase == "done",
                alone=not self._control.table.living(),
                joined=worker.incarnation is not None,
                left=worker.draining or worker.state == "done",
                killed=worker.killed,
                declared_lost=worker.declared_lost,
                refused=worker.refused,
                fault=fault,
                others_well=any(
                    other.incarnation is not None or other.ordinal not in self._faulty
                    for other in self._control.table.living()
                ),
                said=_last_sentence(worker),
                unknown=worker.unknown,
                expired=now - (worker.ended_at or now) > VERDICT_GRACE,
            )
            worker.judged = verdict.kind != "open"
            if verdict.kind == "lost":
                self._lose(worker, verdict.reason, now)
            elif verdict.kind == "refused" and not worker.draining:
                refused.append(worker)
            elif verdict.kind == "failed":
                self._control.fail(verdict.reason, worker)
            elif verdict.kind == "fine":
                self._absent.forget(worker.ordinal)  # it has left in order, even if nobody saw it take part
        if refused:
            self._do_without(refused, "would be refused again")

    def _do_without(self, refused: list[WorkerProcess], why: str) -> None:
        """Go on with fewer workers: these would end again. ``why`` is said of their names."""
        fewer = self._control.state.wanted - len(refused)
        if fewer < 1:
            self._control.fail(f"{refused[0].name} was refused: {refused[0].refused}", refused[0])
            return
        barred = self._control.table.barred | {worker.ordinal for worker in refused}
        self._control.scale(fewer)
        self._control.table.barred = barred
        names = ", ".join(worker.name for worker in refused)
        self._control.tell(
            f"{names} {why}: not started any more, {counted(fewer, 'worker')} wanted from now "
            f"on; once the reason is mended, run: virtualflow scale {fewer + len(refused)} --job {self._job}"
        )

    def _lose(self, worker: WorkerProcess, how: str, now: float) -> None:
        if worker.incarnation is None:
            self._control.tell(f"{worker.name} ended before it joined: {how}")
        if worker.killed and not worker.declared_lost:
            return  # as a fault
        ends, status = self._absent.note_end(worker.ordinal), self._control.state.status
        if self._crashes.begins_round([worker.begun]):
            step = status.job_step if status is not None else 0
            self._crashes = self._crashes.after(step, now, self._waits, at_once=1)
        others = any(other.assigned for other in self._control.table.living())
        if others and ends > self._backoff_limit:
            self._absent.forget(worker.ordinal)
            self._do_without([worker], f"ended {ends} times in a row without taking part in a step, at last by {how}")
        elif not others and self._crashes.count > self._backoff_limit:
            count = self._crashes.count
            said = f"workers ended {count} times in a row without a step of progress, at last {worker.name}: {how}"
            self._control.fail(said, worker)

    def _tell_elders(self) -> None:
        """Tell a new coordinator who may be in a generation of the one before: it begins nothing beside them."""
        state = self._control.state
        if state.status is not None and state.status.start_ticket is not None:
            elders = tuple(LivingWorker(worker.name) for worker in self._control.table.elders(state.elders))
            self._control.calls.ensure("begin", BeginCall(state.status.start_ticket, elders), state.status)

    def _report_gone(self) -> None:
        for worker in self._control.table.workers:
            counted_on = worker.listed or worker.declared_lost  # of one declared lost, the end is to be confirmed
            if not worker.alive and worker.judged and counted_on and worker.state != "done":
                call = GoneCall(worker.name, worker.incarnation, describe_exit(worker.process.code or 0))
                self._control.calls.ensure(("gone", worker.number), call, self._control.state.status)

    def _kill_lost(self, now: float) -> None:
        for worker in self._control.table.living():
            if worker.declared_lost and not worker.killed:
                self._control.tell(f"{worker.name} was declared lost; its process {worker.process.pid} is killed")
                worker.kill()
            elif worker.released_at is not None and now - worker.released_at > STOP_GRACE:
                worker.kill()

    def _drain_surplus(self) -> None:
        staying = [worker for worker in self._control.table.living() if not worker.draining and not worker.killed]
        for worker in staying[self._control.state.wanted :]:
            worker.draining = worker.surplus = True
            if worker.incarnation is None:
                worker.kill()
        for worker in self._control.table.living():
            if worker.surplus and worker.listed and worker.state in ("starting", "ready", "training"):
                call = DrainCall((worker.name,), None, f"{counted(self._control.state.wanted, 'worker')} wanted")
                self._control.calls.ensure(("drain", worker.number), call, self._control.state.status)

    def _start_missing(self, now: float) -> None:
        table = self._control.table
        while now >= (self._crashes.retry or 0.0) and len(table.staying()) < self._control.state.wanted:
            try:
                worker = start_worker(self._command, self._supervisor, table, self._control.relay.line)
            except OSError as error:
                self._control.fail(f"{self._command.command[0]} cannot be executed: {error.strerror}")
                return
            worker.begun = now
            self._history.add_process(worker.name, worker.process.pid)


def _told_fault(worker: WorkerProcess) -> str | None:
    """The fault of its machine that has ended a worker's script, as its traceback tells; ``None``: it tells of none."""
    if not worker.process.code or worker.process.code < 0:
        return None
    return find_told_fault(last_traceback(worker.said))


def _last_sentence(worker: WorkerProcess) -> str:
    """What the library said last as it ended a worker's script, or the exception that did; empty: neither is told."""
    mark, last = "virtualflow: ", next(reversed(worker.said), "")
    return last.removeprefix(mark).strip() if last.startswith(mark) else last_exception(worker.said)


class AbsentEnds:
    """Counts the ends of workers that have made no step, in a row, by their ordinals.

    Progress of others says nothing of a worker that ends before it takes part: the job can do without that one.
    """

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        self._highest_step = 0

    def advance(self, step: int, members: Iterable[int]) -> None:
        """The job has completed that step: if no step was higher, the counts of those who made it begin anew.

        Args:
            members: ordinals of the workers that virtual nodes are assigned to.
        """
        if step > self._highest_step:
            self._highest_step = step
            for ordinal in members:
                self._ends.pop(ordinal, None)

    def forget(self, ordinal: int) -> None:
        """The last one of that ordinal has left in order, or no more are started until it is asked for."""
        self._ends.pop(ordinal, None)

    def note_end(self, ordinal: int) -> int:
        """A worker has ended; how many times in a row it has."""
        self._ends[ordinal] = ends = self._ends.get(ordinal, 0) + 1
        return ends


# --- starting worker processes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerCommand:
    """What all workers of a job have in common."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Beyond this process's."""
    coordinator: str
    access: JobAccess
    logs: Path
    """The directory of their output."""
    processes: int = 1
    """Of each worker."""
    audit: Path | None
    """The directory in which they note who processed which samples."""


def start_worker(
    what: WorkerCommand, supervisor: Supervisor, table: WorkerTable, sink: Callable[[WorkerProcess, Stream, str], None]
) -> WorkerProcess:
    """Start one more worker under the lowest name that is free, and enter it in the table.

    Raises:
        OSError: the program cannot be executed.
    """
    ordinal, number = table.free_ordinal(), len(table.workers)
    name = f"worker-{ordinal}"
    held: list[WorkerProcess] = []
    several = what.processes > 1

    def take(stream: Stream, text: str) -> None:
        local_rank, line = split_line(text) if several else (0, text)
        if not local_rank:  # all print the same, and the first may be the leader
            sink(held[0], stream, line)

    process = supervisor.start(
        name,
        (*ourselves("processes", str(what.processes), "--"), *what.command) if several else what.command,
        worker_environment(what, name, str(number)),
        what.logs / f"{name}.log",
        take,
    )
    worker = WorkerProcess(name, ordinal, number, process, process.pid, several=several)
    held.append(worker)
    table.workers.append(worker)
    return worker


_OF_THIS_JOB = (ENV_AUDIT_DIR, ENV_IDENTITY, ENV_TOKEN)
"""Variables that are never taken from this process's environment."""


def worker_environment(what: WorkerCommand, name: str, uid: str) -> dict[str, str]:
    environment = {
        **ALLOCATOR_ENVIRONMENT,
        ENV_HASH_SEED: str(HASH_SEED),
        ENV_CUBLAS_WORKSPACE: CUBLAS_WORKSPACE,
        **{key: value for key, value in os.environ.items() if key not in _OF_THIS_JOB},
        "PYTHONUNBUFFERED": "1",
        **what.environment,
        ENV_COORDINATOR: what.coordinator,
        **what.access.environment("worker", name, uid),
        ENV_WORKER: name,
        ENV_ADDRESS: HOST,
    }
    if what.audit is not None:
        environment[ENV_AUDIT_DIR] = str(what.audit)
    return environment

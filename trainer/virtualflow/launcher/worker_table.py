"""The worker processes of a local job, and what the coordinator's status says about each of them."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from virtualflow.launcher.processes import split_line
from virtualflow.launcher.supervisor import Process
from virtualflow.protocol.http_api import ENDED, Refusal, Status, WorkerStatus


@dataclass(eq=False)
class WorkerProcess:
    """A worker process, from its start to the moment its end is understood."""

    name: str
    ordinal: int
    number: int
    """Counts starts: the lower, the longer it has served."""
    process: Process
    speaker: int
    """The process that talks to the coordinator: this one, or one that it started (a shell's child)."""
    incarnation: str | None = None
    """As the coordinator lists it; ``None`` until it has connected."""
    listed: bool = False
    listed_by: int | None = None
    """The incarnation of the coordinator that listed it last."""
    unlisted_at: float = 0.0
    state: str = ""
    assigned: bool = False
    leads: bool = False
    """Virtual node 0 is one of them."""
    served: bool = False
    """It has been a member of a running generation."""
    draining: bool = False
    surplus: bool = False
    """It is drained because fewer workers are wanted."""
    killed: bool = False
    """It was killed on purpose: its death says nothing about the job."""
    stopped: bool = False
    """By SIGSTOP: it hangs."""
    terminated: bool = False
    declared_lost: bool = False
    refused: str | None = None
    """Why the coordinator has not admitted it, or that nothing fits into its memory, if so."""
    fault: str | None = None
    """The fault of the machine that has ended it, if so: the coordinator goes on without it."""
    ended_at: float | None = None
    unknown: bool = False
    """It has ended, and the coordinator's status of after that says nothing of it."""
    judged: bool = False
    begun: float = 0.0
    """When it was started, on the runner's clock."""
    several: bool = False
    """It is several processes, whose lines bear their numbers."""

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def said(self) -> list[str]:
        """The last lines of its standard error that are not empty; of several processes, of the one that spoke last
        and so, most likely, of the one that has ended it.
        """
        lines = [line for line in self.process.tail if line.strip()]
        if not self.several:
            return lines
        told = [split_line(line) for line in lines]
        last = next((rank for rank, _ in reversed(told) if rank is not None), None)
        return [text for rank, text in told if rank == last]

    @property
    def able(self) -> bool:
        """It was neither asked to leave nor killed nor stopped."""
        return not (self.draining or self.killed or self.stopped)

    @property
    def released_at(self) -> float | None:
        """When the coordinator has let it go, to end by itself: it drains, or a fault of its machine ends it."""
        ends = self.draining or self.fault is not None
        return self.unlisted_at if ends and self.unlisted_at and not self.listed else None

    def kill(self) -> None:
        self.killed = True
        self.process.signal_group(signal.SIGKILL)


def mentions(status: Status, worker: WorkerProcess) -> bool:
    """Whether a status says that a worker has joined, or why it was not admitted."""
    return any(worker.process.owns(entry.pid) for entry in status.workers if entry.pid) or any(
        event.refusal is not None and event.refusal.worker == worker.name for event in status.events
    )


@dataclass
class WorkerTable:
    silence_limit: float
    workers: list[WorkerProcess] = field(default_factory=list)
    barred: set[int] = field(default_factory=set)
    """Ordinals under which no process is started: the last one was refused, and the next would be, too."""
    _run: int = 1
    """Of the script."""
    _coordinator: int | None = None
    _coordinator_since: float = 0.0

    def living(self) -> list[WorkerProcess]:
        """Those whose process has not ended, by ordinal."""
        return sorted((worker for worker in self.workers if worker.alive), key=lambda worker: worker.ordinal)

    def elders(self, count: int) -> list[WorkerProcess]:
        """Those of the first ``count`` that were started whose process has not ended."""
        return [worker for worker in self.living() if worker.number < count]

    def staying(self) -> list[WorkerProcess]:
        """Those whose place is filled: living ones that were not asked to leave, and ended ones that have seen the end
        of the training, or of which it is not yet known why. The end may be seen before its news is here.
        """
        return [
            worker
            for worker in self.workers
            if not worker.draining and (worker.alive or not worker.judged or worker.state == "done")
        ]

    def unexplained(self) -> list[WorkerProcess]:
        """Those that ended without a verdict on it."""
        return [worker for worker in self.workers if not worker.alive and not worker.judged]

    def free_ordinal(self) -> int:
        """The lowest ordinal that no living process bears and that is not barred."""
        taken = {worker.ordinal for worker in self.workers if worker.alive or not worker.judged} | self.barred
        return next(ordinal for ordinal in range(len(taken) + 1) if ordinal not in taken)

    def expected(self) -> list[str | None]:
        """What ``fault_schedule.in_effect`` compares with the membership."""
        return [worker.incarnation if worker.listed else None for worker in self.living() if worker.able]

    def serving(self) -> list[WorkerProcess]:
        """Members that can be acted upon: those who began first, and so the leader, come first."""
        return sorted(
            (worker for worker in self.living() if worker.assigned and worker.able), key=lambda worker: worker.number
        )

    def take(self, status: Status, now: float) -> None:
        if status.incarnation != self._coordinator:
            self._coordinator, self._coordinator_since = status.incarnation, now
        if status.run > self._run:
            self._run = status.run
            for worker in self.workers:
                if not worker.alive and worker.state == "done":
                    worker.state = ""  # it has seen the end of a former run, and its place is free
        entries = {entry.incarnation: entry for entry in status.workers}
        unfit = {lost.incarnation: lost.reason for lost in status.lost if lost.does_not_fit}
        faults = {lost.incarnation: lost.reason for lost in status.lost if lost.machine_fault}
        unknown = [
            entry for entry in status.workers if not any(w.incarnation == entry.incarnation for w in self.workers)
        ]
        for worker in self.workers:
            if worker.incarnation is None:
                self._recognise(worker, unknown)
            entry = entries.get(worker.incarnation) if worker.incarnation is not None else None
            if entry is not None:
                worker.listed, worker.listed_by = True, status.incarnation
                worker.state, worker.assigned = entry.state, entry.assigned
                worker.leads = worker.assigned and entry.first == 0
                worker.served = worker.served or worker.assigned
                worker.draining = worker.draining or entry.state == "draining"
            elif worker.incarnation in unfit:
                worker.refused = unfit[worker.incarnation]
                worker.listed = worker.assigned = worker.leads = False
            elif worker.incarnation in faults:
                if worker.listed:
                    worker.unlisted_at = now
                worker.fault = faults[worker.incarnation]
                worker.listed = worker.assigned = worker.leads = False
            elif worker.incarnation is not None:
                self._miss(worker, status, now)

    def note_refusal(self, refusal: Refusal) -> None:
        """The coordinator has not admitted somebody: the latest process of that name."""
        worker = next((worker for worker in reversed(self.workers) if worker.name == refusal.worker), None)
        if worker is not None and worker.incarnation is None:  # else it was admitted once, and declared lost since
            worker.refused = refusal.reason

    def _recognise(self, worker: WorkerProcess, unknown: list[WorkerStatus]) -> None:
        for entry in unknown:
            if entry.worker == worker.name and entry.pid and worker.process.owns(entry.pid):
                worker.incarnation, worker.speaker = entry.incarnation, entry.pid

    def _miss(self, worker: WorkerProcess, status: Status, now: float) -> None:
        over = status.phase in ENDED
        expected = not (over or worker.draining or worker.state == "done")
        if worker.listed:
            worker.unlisted_at = now
            worker.declared_lost = expected and worker.listed_by == status.incarnation
            worker.listed = worker.assigned = worker.leads = False
        elif expected and worker.listed_by != status.incarnation:
            worker.declared_lost = worker.declared_lost or now - self._coordinator_since > self.silence_limit

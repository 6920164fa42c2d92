"""The worker processes of a local job, and what the coordinator's status says about each of them."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from virtualflow.admission import describe_refusal
from virtualflow.calls import Status, WorkerStatus
from virtualflow.local.processes import Process
from virtualflow.local.schedule import Staff


@dataclass(eq=False)
class Worker:
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
    """The last one listed."""
    carries: bool = False
    served: bool = False
    """It has been a member of a running generation."""
    draining: bool = False
    surplus: bool = False
    """It is drained because fewer workers are wanted."""
    doomed: bool = False
    """It was killed on purpose: its death says nothing about the job."""
    stopped: bool = False
    dropped: bool = False
    """The coordinator has given it up."""
    refused: str = ""
    """Why the coordinator has not admitted it."""
    ended_at: float | None = None
    judged: bool = False

    @property
    def alive(self) -> bool:
        """Its process has not ended."""
        return self.process.alive

    def kill(self) -> None:
        """SIGKILL it and all that it started."""
        self.doomed = True
        self.process.signal_group(signal.SIGKILL)


@dataclass
class Crew:
    """All worker processes that a job has had.

    Args:
        silence_limit: seconds after which a worker that a restarted coordinator does not know is taken for
            hung.
    """

    silence_limit: float
    workers: list[Worker] = field(default_factory=list)
    barred: set[int] = field(default_factory=set)
    """Ordinals under which no process is started: the last one was refused, and the next would be, too."""
    _coordinator: int | None = None
    _coordinator_since: float = 0.0

    def living(self) -> list[Worker]:
        """Those whose process has not ended, by ordinal."""
        return sorted((worker for worker in self.workers if worker.alive), key=lambda worker: worker.ordinal)

    def staying(self) -> list[Worker]:
        """Living ones that were not asked to leave, and ended ones of which it is not yet known why."""
        return [worker for worker in self.workers if not worker.draining and (worker.alive or not worker.judged)]

    def unexplained(self) -> list[Worker]:
        """Those that ended without a verdict on it."""
        return [worker for worker in self.workers if not worker.alive and not worker.judged]

    def free_ordinal(self) -> int:
        """The lowest ordinal that no living process bears and that is not barred."""
        taken = {worker.ordinal for worker in self.workers if worker.alive or not worker.judged} | self.barred
        return next(ordinal for ordinal in range(len(taken) + 1) if ordinal not in taken)

    def staff(self) -> list[Staff | None]:
        """What ``schedule.settled`` compares with the membership."""
        able = [worker for worker in self.living() if not (worker.draining or worker.doomed or worker.stopped)]
        return [
            Staff(worker.name, worker.incarnation) if worker.incarnation is not None and worker.listed else None
            for worker in able
        ]

    def serving(self) -> dict[str, Worker]:
        """Members that can be acted upon, by name."""
        return {
            worker.name: worker
            for worker in self.living()
            if worker.carries and not (worker.draining or worker.doomed or worker.stopped)
        }

    def take(self, status: Status, now: float) -> None:
        """Update every worker by what the coordinator says of it."""
        if status.incarnation != self._coordinator:
            self._coordinator, self._coordinator_since = status.incarnation, now
        entries = {entry.incarnation: entry for entry in status.workers}
        unknown = [
            entry for entry in status.workers if not any(w.incarnation == entry.incarnation for w in self.workers)
        ]
        for worker in self.workers:
            if worker.incarnation is None:
                self._recognise(worker, unknown)
            entry = entries.get(worker.incarnation) if worker.incarnation is not None else None
            if entry is not None:
                worker.listed, worker.listed_by = True, status.incarnation
                worker.state, worker.carries = entry.state, entry.first < entry.last
                worker.served = worker.served or worker.carries
                worker.draining = worker.draining or entry.state == "draining"
            elif worker.incarnation is not None:
                self._miss(worker, status, now)

    def note_refusal(self, event: str) -> None:
        """The coordinator has told that somebody was not admitted: the latest process of that name."""
        for worker in reversed(self.workers):
            said = describe_refusal(worker.name)
            if event.startswith(said):
                if worker.incarnation is None:  # else it was admitted once, and given up since
                    worker.refused = event.removeprefix(said)
                return

    def _recognise(self, worker: Worker, unknown: list[WorkerStatus]) -> None:
        for entry in unknown:
            if entry.worker == worker.name and entry.pid and worker.process.owns(entry.pid):
                worker.incarnation, worker.speaker = entry.incarnation, entry.pid

    def _miss(self, worker: Worker, status: Status, now: float) -> None:
        over = status.phase in ("done", "stopped", "failed")
        expected = not (over or worker.draining or worker.state == "done")
        if worker.listed:
            worker.unlisted_at = now
            worker.dropped = expected and worker.listed_by == status.incarnation
            worker.listed = worker.carries = False
        elif expected and worker.listed_by != status.incarnation:
            worker.dropped = worker.dropped or now - self._coordinator_since > self.silence_limit

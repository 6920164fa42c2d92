"""How a local job ends: who is still given time, what is said, and the exit code. Values in, commands out."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from virtualflow.launcher.usage import EXIT_FAILED
from virtualflow.launcher.worker_table import WorkerProcess
from virtualflow.protocol.http_api import Event, Status
from virtualflow.protocol.messages import Change
from virtualflow.protocol.settings import STOP_GRACE
from virtualflow.protocol.wording import counted, describe_steps

FAILURE_GRACE = 5.0
"""The job failed: how long workers may take to end by themselves."""


@dataclass
class Shutdown:
    """Why and since when a job ends."""

    kind: Literal["done", "stopped", "failed"]
    since: float
    reason: str = ""
    signal: signal.Signals | None = None
    traceback: str = ""
    witness: WorkerProcess | None = None
    """The worker whose traceback explains a failure."""
    planned: bool = False
    """It was asked for when the job was started."""
    started: bool = True
    """Processes were started, so there may be something in their output."""
    concluded: bool = False
    """All workers have ended."""
    impatient_since: float = float("inf")
    """When a signal asked for the end of scripts that go on after the training."""
    run: int = 1
    """The run of the script that is done."""

    @property
    def note(self) -> str:
        return "stopping" if self.kind == "stopped" and not self.concluded else self.kind


def next_shutdown(current: Shutdown | None, status: Status, now: float) -> Shutdown | None:
    """How the job ends in view of the coordinator's ``status``; ``None`` while it goes on, as in a further run."""
    kind = current.kind if current is not None else None
    if status.phase == "failed" and kind in (None, "done"):
        return Shutdown("failed", now, status.error or status.reason, traceback=status.traceback or "")
    if status.phase == "done" and kind in (None, "stopped"):
        return Shutdown("done", now, run=status.run)
    if current is not None and kind == "done" and status.run > current.run and status.phase != "done":
        return None
    if status.phase == "stopped" and kind is None:
        return Shutdown("stopped", now, "asked to stop")
    return current


@dataclass(frozen=True)
class EndSignals:
    """Which workers are to be sent SIGKILL, and which SIGTERM."""

    kill: Sequence[WorkerProcess]
    terminate: Sequence[WorkerProcess]


def end_signals(shutdown: Shutdown, living: Iterable[WorkerProcess], now: float, failure_grace: float) -> EndSignals:
    """What moves everyone towards the end; those who take too long are killed."""
    kill: list[WorkerProcess] = []
    terminate: list[WorkerProcess] = []
    elapsed = now - shutdown.since
    for worker in living:
        booting = worker.incarnation is None
        match shutdown.kind:
            case "done":
                # Connected, but never a member: it is told that the job is over, and has nothing to lose. The others
                # end when their script does.
                idle = worker.state in ("starting", "ready", "silent") and not worker.served
                late = (idle and elapsed > failure_grace) or now - shutdown.impatient_since > failure_grace
            case "stopped":
                late = elapsed > STOP_GRACE
                if booting and not worker.terminated:
                    terminate.append(worker)
            case "failed":
                late = elapsed > failure_grace
        if late or worker.stopped or (booting and shutdown.kind != "stopped"):
            kill.append(worker)
    return EndSignals(kill, terminate)


@dataclass(frozen=True)
class JobOutcome:
    """What is known of a job when all its workers have ended."""

    shutdown: Shutdown
    status: Status | None
    seconds: float
    changes: Sequence[Change]
    last_checkpoint: Event | None
    checkpoint_dir: Path | None
    newest_checkpoint: int | None
    """Its step."""
    unreached: Sequence[int]
    """Steps of the schedule at which nothing was done."""
    unwritten: str | None
    """Why the report or the audit could not be written."""
    logs: Path | None
    """Where the output of the processes can be read."""
    training_seconds: float | None = None
    """How much of its time was the training; ``None``: it did not end."""
    resumed: str | None = None
    """What was said of the checkpoint that it began from."""


@dataclass(frozen=True)
class Conclusion:
    """What is said at the end of a job, and the exit code."""

    code: int
    sentences: Sequence[str]


def conclude(facts: JobOutcome) -> Conclusion:
    shutdown = facts.shutdown
    match shutdown.kind:
        case "failed":
            where = f" (the output of every process is in {facts.logs})" if facts.logs is not None else ""
            failed = "the job failed: " if shutdown.started else ""
            left = [_describe_rest(facts)] if facts.status is not None and facts.status.job_step else []
            return Conclusion(EXIT_FAILED, [f"{failed}{shutdown.reason}{where}", *left])
        case "stopped":
            otherwise = 0 if shutdown.planned else EXIT_FAILED
            code = 128 + shutdown.signal if shutdown.signal is not None else otherwise
            return Conclusion(code, [_describe_stop(facts)])
        case "done":
            return _conclude_done(facts)


def _conclude_done(facts: JobOutcome) -> Conclusion:
    status = facts.status
    assert status is not None
    sentences = [
        f"the schedule's step {step} was never reached: the job has {counted(status.job_step, 'step')}"
        for step in facts.unreached
    ]
    repeated = sum(change.repeated_steps for change in facts.changes)
    resumed = "" if facts.resumed is None else f" ({facts.resumed})"
    trained = "" if facts.training_seconds is None else f", {facts.training_seconds:.1f} s of it training"
    sentences.append(
        f"done: {_describe_steps(status)}{resumed} in {facts.seconds:.1f} s{trained}, digest {status.digest}, "
        f"{counted(len(facts.changes), 'membership change')}, {counted(repeated, 'repeated step')}"
    )
    unsaved = _failed_checkpoint(facts)
    trouble = facts.unwritten or (unsaved.text if unsaved is not None else None)
    if trouble is None:
        return Conclusion(0, sentences)
    return Conclusion(EXIT_FAILED, [*sentences, trouble])


def _describe_steps(status: Status) -> str:
    made = describe_steps(status.step, status.total_steps, status.stopped_early)
    early = f"stopped early by the script, {made}"
    if status.run == 1:
        return early if status.stopped_early else made
    last = f", the last one {early}" if status.stopped_early else ""
    return f"{counted(status.job_step, 'step')} in {status.run} runs of the script{last}"


def _describe_stop(facts: JobOutcome) -> str:
    step = facts.status.step if facts.status is not None else 0
    of_run = f" of run {facts.status.run}" if facts.status is not None and facts.status.run > 1 else ""
    return f"stopped after step {step}{of_run} ({facts.shutdown.reason}); {_describe_rest(facts)}"


def _describe_rest(facts: JobOutcome) -> str:
    """What is left of a training that is not complete, and where the next run starts."""
    unsaved, directory = _failed_checkpoint(facts), facts.checkpoint_dir
    if unsaved is not None:
        return unsaved.text
    if directory is None:
        return "without --checkpoint-dir no checkpoint was written: the next run starts from step 1"
    if facts.newest_checkpoint is None:
        return f"there is no checkpoint in {directory}: the next run starts from step 1"
    return f"the same command resumes from the checkpoint of step {facts.newest_checkpoint} in {directory}"


def _failed_checkpoint(facts: JobOutcome) -> Event | None:
    last = facts.last_checkpoint
    return last if last is not None and last.kind == "checkpoint-failed" else None

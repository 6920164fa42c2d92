"""How a local job ends: who is still given time, what is written, what is said, and the exit code."""

from __future__ import annotations

import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from virtualflow import settings as s
from virtualflow.local.report import build_report, write_audit, write_report
from virtualflow.signals import CallRefused, CoordinatorUnreachable

if TYPE_CHECKING:
    from virtualflow.local.crew import Worker
    from virtualflow.local.runner import Runner

EXIT_FAILED = 1


@dataclass
class Ending:
    """Why and since when a job ends."""

    kind: Literal["done", "stopped", "failed"]
    signal: signal.Signals | None = None
    """What stopped it."""
    reason: str = ""
    traceback: str = ""
    witness: Worker | None = None
    """The worker whose last words explain a failure."""
    started: bool = True
    """Processes were started, so there may be something in their output."""
    concluded: bool = False
    """All workers have ended."""
    since: float = field(default_factory=time.monotonic)
    impatient_since: float = float("inf")
    """When a signal asked for the end of scripts that go on after the training."""
    _told: set[int] = field(default_factory=set)

    @property
    def note(self) -> str:
        """For the view."""
        return "stopping" if self.kind == "stopped" and not self.concluded else self.kind

    def enforce(self, runner: Runner, now: float) -> None:
        """Move everyone towards the end; those who take too long are killed."""
        strangers = [worker for worker in runner.crew.living() if worker.incarnation is None]
        match self.kind:
            case "done":
                # They were booting to join a job that is complete now. The others end when their script does.
                limit = float("inf")
                for worker in strangers:
                    worker.kill()
                # Connected, but never a member: they are told that the job is over, and have nothing to lose.
                grace = runner.settings.failure_grace
                for worker in runner.crew.living():
                    idle = worker.state in ("starting", "ready", "silent") and not worker.served
                    if (idle and now - self.since > grace) or now - self.impatient_since > grace:
                        worker.kill()
            case "stopped":
                limit = s.STOP_GRACE
                runner.tell_stop(self.reason)
                for worker in strangers:
                    if worker.number not in self._told:
                        self._told.add(worker.number)
                        worker.process.send(signal.SIGTERM)
            case "failed":
                limit = runner.settings.failure_grace
                for worker in strangers:
                    worker.kill()
        for worker in runner.crew.living():
            if worker.stopped or now - self.since > limit:
                worker.kill()


async def conclude(runner: Runner) -> int:
    """Collect what is left, write report and audit, say how it went; the exit code. All workers have
    ended.
    """
    ending = runner.ending
    assert ending is not None
    for worker in runner.crew.workers:
        await runner.supervisor.flush(worker.process)
    if ending.started:
        await _last_status(runner)
        await runner.coordinator.stop()
    if ending.kind == "stopped" and runner.status is not None and runner.status.phase == "done":
        ending.kind = "done"  # It was complete before the signal reached it.
    if ending.kind != "failed":
        for worker in runner.crew.workers:
            runner.relay.ended(worker, with_error=False)
    trouble = _write(runner) if ending.started else ""
    ending.concluded = True
    runner.show()
    runner.view.close()
    match ending.kind:
        case "failed":
            return _failed(runner, ending)
        case "stopped":
            _say(_stopped(runner, ending))
            return 128 + ending.signal if ending.signal is not None else EXIT_FAILED
        case "done":
            return _done(runner, trouble)


async def _last_status(runner: Runner) -> None:
    try:
        status = await runner.client.status(patience=1.0)
    except (CoordinatorUnreachable, CallRefused):
        return
    if status.phase in ("done", "stopped", "failed") or runner.status is None:
        runner.take(status)


def _write(runner: Runner) -> str:
    trouble = ""
    try:
        if runner.options.audit is not None:
            write_audit(runner.options.audit, runner.fragments)
        if runner.options.report is not None:
            seconds = time.monotonic() - runner.started
            write_report(runner.options.report, build_report(runner.chronicle, runner.status, runner.job.name, seconds))
    except OSError as error:
        what = error.filename or "its report"
        trouble = f"the training is over, but {what} cannot be written: {error.strerror}"
    return trouble


def _done(runner: Runner, trouble: str) -> int:
    status, chronicle = runner.status, runner.chronicle
    assert status is not None
    for group in runner.rehearsal.unreached:
        _say(f"the schedule's step {group.step} was never reached: the job has {status.step} steps")
    changes = chronicle.ordered_changes()
    repeated = sum(change.repeated_steps for change in changes)
    seconds = time.monotonic() - runner.started
    _say(
        f"done: {status.step} steps in {seconds:.1f} s, digest {status.digest}, "
        f"{_plural(len(changes), 'membership change')}, {_plural(repeated, 'repeated step')}"
    )
    last = chronicle.last_checkpoint
    if last is not None and last.kind == "checkpoint-failed":
        trouble = trouble or last.text
    if trouble:
        _say(trouble)
        return EXIT_FAILED
    return 0


def _stopped(runner: Runner, ending: Ending) -> str:
    step = runner.status.step if runner.status is not None else 0
    said = f"stopped after step {step} ({ending.reason})"
    last, directory = runner.chronicle.last_checkpoint, runner.options.checkpoint_dir
    if last is not None and last.kind == "checkpoint-failed":
        return f"{said}; {last.text}"
    if directory is None:
        return f"{said}; without --checkpoint-dir no checkpoint was written: the next run starts from step 1"
    newest = newest_checkpoint(directory)
    if newest is None:
        return f"{said}; there is no checkpoint in {directory}: the next run starts from step 1"
    return f"{said}; the same command resumes from the checkpoint of step {newest} in {directory}"


def newest_checkpoint(directory: Path) -> int | None:
    """The step of the newest checkpoint by its name (see virtualflow.checkpoint_files, which checks what is in it)."""
    names = (re.fullmatch(r"step-([0-9]+)", path.name) for path in directory.glob("step-*"))
    return max((int(name[1]) for name in names if name is not None), default=None)


def _failed(runner: Runner, ending: Ending) -> int:
    traceback = ending.traceback
    if not traceback and ending.witness is not None:
        traceback = runner.traceback_of(ending.witness)
    lines = traceback.rstrip("\n").split("\n") if traceback.strip() else []
    if lines and not runner.relay.has_shown(lines[-1]):
        print("\n".join(lines), file=sys.stderr)
    where = ""
    if ending.started and runner.crew.workers:
        runner.keep_logs = True
        where = f" (the output of every process is in {runner.logs})"
    _say(f"{ending.reason}{where}" if not ending.started else f"the job failed: {ending.reason}{where}")
    return EXIT_FAILED


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _say(sentence: str) -> None:
    print(f"virtualflow: {' '.join(sentence.split())}", file=sys.stderr, flush=True)

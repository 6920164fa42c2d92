"""What a worker tells its coordinator of the training: progress, checkpoints, the result, a failure."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch

from virtualflow.data import CountWatch, MicroBatch
from virtualflow.device import status_bytes
from virtualflow.errors import DoesNotFit, NonFiniteMetric, ScriptExited, StatesDiffer, VirtualFlowError, describe
from virtualflow.protocol import messages as m
from virtualflow.protocol.machine_faults import is_machine_fault
from virtualflow.protocol.settings import MAX_TEXT
from virtualflow.protocol.wording import as_metrics
from virtualflow.state import digests
from virtualflow.step import Attempt, StepPart, Told
from virtualflow.worker.member_state import MemberState
from virtualflow.worker.pace import Estimate, PaceMeter, PaceReportPolicy
from virtualflow.worker.settings import WorkerSettings
from virtualflow.worker.standalone import AnySession
from virtualflow.worker.stopwatch import Stopwatch
from virtualflow.worker.train_state import Training

if TYPE_CHECKING:
    from virtualflow.memory import Plan
    from virtualflow.memory.activations import Activations


class Reporter(StepPart):
    """Reports one worker's training."""

    def __init__(
        self,
        session: AnySession,
        training: Training,
        stopwatch: Stopwatch,
        total_steps: int | None,
        settings: WorkerSettings,
    ) -> None:
        self._session = session
        self._training = training
        self._stopwatch = stopwatch
        self._total_steps = total_steps
        self._phase: Literal["training", "evaluating"] = "training"
        self._reported_at = 0.0
        self._pace_policy = PaceReportPolicy()
        self._interval = settings.link.progress
        self._told_non_finite: m.NonFinite | None = None

    def progress(self, now: bool) -> None:
        """Tell where the training is: the first member does, and not too often unless it is to be ``now``."""
        session, training, moment = self._session, self._training, time.monotonic()
        if session.rank != 0 or not session.coordinated or (not now and moment - self._reported_at < self._interval):
            return
        self._reported_at = moment
        progress = m.Progress(
            session.generation,
            training.completed_steps,
            training.position[0],
            self._total_steps,
            as_metrics(training.numbers),
            self._stopwatch.steps_per_second,
            self._phase,
            self._stopwatch.latest_ms,
            training.non_finite,
            session.state.draws_early,
        )
        session.send(progress)

    def non_finite(self) -> None:
        """Tell at once that a metric is not finite, the first time that one is."""
        found = self._training.non_finite
        if found is None or found == self._told_non_finite:
            return
        self._told_non_finite = found
        self.progress(now=True)
        if not self._session.coordinated:
            self._session.note("warning", str(found))

    def pace(self, estimate: Estimate | None) -> None:
        """Tell how fast this worker is, when that is news; a coordinator to come is told the latest."""
        session = self._session
        if estimate is not None and self._pace_policy.is_due(time.monotonic(), estimate, len(session.state.ranges)):
            told = m.Pace(
                session.generation, estimate.median, estimate.low, estimate.high, estimate.rest, estimate.samples
            )
            session.send(told, keep=True)

    def plan(self, plan: Plan) -> None:
        from virtualflow.memory import Action  # who has made a plan has it

        kept, swapped, recomputed = map(plan.count, (Action.KEEP, Action.SWAP, Action.RECOMPUTE))
        told = self._session.state.memory = m.MemoryPlan(kept, swapped, recomputed, plan.reason[:MAX_TEXT])
        self._session.send(m.Note("info", f"{self._session.worker}: {plan.reason}"[:MAX_TEXT], told))

    def enter(self, assigned: Sequence[int]) -> None:
        self._pace_policy.enter()
        self.progress(now=True)

    def phase(self, phase: Literal["training", "evaluating"]) -> None:
        self._phase = phase
        self.progress(now=True)

    def result(self, stopped_early: bool) -> m.Done:
        """What the training came to, to its last step or ``stopped_early``."""
        training, shards = self._training, self._training.update.shards
        whole = shards is None or shards.states == shards.all
        return m.Done(
            step=training.completed_steps,
            digest=training.digest or digests.digest(training.model.state_dict()),
            # Of a sharded optimizer, only the leader has the whole by then.
            optimizer_digest=training.companion_digest() if whole else "",
            metrics=as_metrics(training.numbers),
            step_ms=self._stopwatch.median_ms,
            timed_steps=self._stopwatch.timed_steps,
            non_finite=training.non_finite,
            stopped_early=stopped_early,
        )


class UsageMeter:
    """What this process takes of its machine and device, and the samples that it trains; for another thread to read.

    Args:
        device: of the model.
        state: where the training is.
        batch_size: of a step, of all workers together.
    """

    def __init__(self, device: torch.device, state: MemberState, batch_size: int) -> None:
        self._device, self._state = device, state
        self._node = batch_size / state.virtual_nodes
        self._looked, self._spent, self._step = time.monotonic(), time.process_time(), state.step
        self._assigned = bool(state.assigned)

    def read(self) -> m.Usage:
        """What that was since it was last read; a change of the assignment meanwhile is not gone into.

        But who had none yet has come to a step that others made.
        """
        now, spent, step = time.monotonic(), time.process_time(), self._state.step
        passed, steps, trained = max(now - self._looked, 1e-3), step - self._step, self._assigned
        processors = (spent - self._spent) / passed
        self._looked, self._spent, self._step, self._assigned = now, spent, step, bool(self._state.assigned)
        held = share = None
        if self._device.type == "cuda":
            held = torch.cuda.memory_reserved(self._device)
            share = _busy(self._device)
        return m.Usage(
            processors=processors,
            samples=steps * self._node * len(self._state.assigned) / passed if trained and steps >= 0 else None,
            memory=status_bytes().get("VmRSS"),
            device_memory=held,
            device_share=share,
        )


def _busy(device: torch.device) -> float | None:
    """The share of the last moments in which a GPU was busy; ``None``: its driver does not tell."""
    if find_spec("pynvml") is None:
        return None
    import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

    try:
        return torch.cuda.utilization(device) / 100
    except (pynvml.NVMLError, RuntimeError):  # torch turns one of the first kind into the second
        return None


class PlannedActivations(StepPart):
    """What becomes of activations goes by a plan, which is made once enough is measured."""

    def __init__(self, activations: Activations, reporter: Reporter) -> None:
        self._activations, self._reporter = activations, reporter

    def enter(self, assigned: Sequence[int]) -> None:
        plan = self._activations.entered()
        if plan is not None:
            self._reporter.plan(plan)

    def before_pass(self, attempt: Attempt) -> None:
        self._activations.begin()

    def after_pass(self, attempt: Attempt) -> None:
        self._activations.end(attempt.present.size if attempt.whole else 0)

    def commit(self, attempt: Attempt) -> None:
        plan = self._activations.committed()
        if plan is not None:
            self._reporter.plan(plan)

    def close(self) -> None:
        self._activations.close()


class Pacing(StepPart):
    """The pace of this worker, measured in each step."""

    def __init__(self, reporter: Reporter) -> None:
        self.pace = PaceMeter()
        self._reporter = reporter

    def enter(self, assigned: Sequence[int]) -> None:
        self.pace.enter()

    def begin(self, attempt: Attempt) -> None:
        self.pace.begin(time.monotonic(), attempt.work)

    def computed(self, attempt: Attempt) -> None:
        if attempt.timed:
            self.pace.end(time.monotonic())
        else:
            self.pace.disregard()

    def commit(self, attempt: Attempt) -> None:
        self.pace.commit(time.monotonic())
        self._reporter.pace(self.pace.estimate)

    def abandon(self) -> None:
        self.pace.enter()


class Cautions:
    """What a script may not have meant, told once: what a micro-batch counts by, and buffers that count."""

    def __init__(self, session: AnySession) -> None:
        self._session = session
        self._counts: CountWatch | None = CountWatch()
        """``None``: there was a doubt, and it was told."""

    def look_at(self, batch: MicroBatch, told: Told) -> None:
        """A micro-batch has been computed: does it hold as many samples as it counts by?"""
        if self._counts is None or told.weight is not None:
            return
        doubt = self._counts.doubts(batch.size, batch.count)
        if doubt is not None:
            self._counts = None
            self._session.note(
                "warning",
                f"{doubt}, and a micro-batch counts by the samples that were loaded for it; if collate_fn drops some, "
                "say how many are left, by weight=lambda batch: len(batch[0]) in vf.elastic or by step.weight",
            )

    def tell_of_copied(self, names: Sequence[str]) -> None:
        """A step is made in which these buffers have changed, of types that have no mean; each is told of once."""
        if names and self._session.state.leader:
            buffers, have = ("buffer", "has") if len(names) == 1 else ("buffers", "have")
            self._session.note(
                "warning",
                f"the forward pass changes the {buffers} {', '.join(names)}, which {have} no mean: of each step the "
                "first virtual node's change alone counts; where a buffer counts samples or calls, let the changes be "
                f'added up by vf.elastic(..., buffers={{"{names[0]}": "sum"}})',
            )

    def tell_of_averaged(self, names: Sequence[str]) -> None:
        """A step is made in which these buffers of the script's own modules have changed; each is told of once."""
        if names and self._session.state.leader:
            buffers = "buffer" if len(names) == 1 else "buffers"
            self._session.note(
                "info",
                f"the forward pass changes the {buffers} {', '.join(names)}, of which the mean over the step's virtual "
                "nodes is kept, as batch norm's statistics need it; where a buffer counts, or holds something of each "
                f'sample, let the changes be added up by vf.elastic(..., buffers={{"{names[0]}": "sum"}})',
            )


def report_failure(session: AnySession, error: Exception, training: Training | None = None) -> None:
    """Tell why this process ends: one sentence for an error raised on purpose, the traceback for any other."""
    if not session.connect():
        return
    if isinstance(error, VirtualFlowError):
        found = training.non_finite if training is not None and isinstance(error, NonFiniteMetric) else None
        odd = error.odd if isinstance(error, StatesDiffer) else ()
        exited = error.__cause__ if isinstance(error, ScriptExited) else None
        # Exit code 0 hides nothing; another one may follow from an error that the script has caught.
        caught = isinstance(exited, SystemExit) and bool(exited.code)
        trace = "".join(traceback.format_exception(exited)) if caught and exited is not None else ""
        session.report_failed(
            describe(error), trace, found, odd, isinstance(error, DoesNotFit), is_machine_fault(error)
        )
    else:
        trace = "".join(traceback.format_exception(error))
        session.report_failed(describe(error), trace, machine_fault=is_machine_fault(error))

"""The parts of a step, in their order. What is off is not among them, and costs no call.

No two workers need the same parts, but those that they have in common come in this order: it decides what a part sees
of the others', and what counts as computing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from virtualflow.memory.activations import Activations
from virtualflow.step import Attempt, Guard, MicrobatchFusion, Parts, StepPart, Update
from virtualflow.worker.loading import Loading
from virtualflow.worker.pace import Estimate, Pace
from virtualflow.worker.records import Audit, Explanation, TraceWriter
from virtualflow.worker.reporter import Reporter
from virtualflow.worker.settings import PaceSettings
from virtualflow.worker.tracking import Tracking
from virtualflow.worker.turns import DeviceTurns


class PlannedActivations(StepPart):
    """What becomes of activations goes by a plan, which is made once enough is measured.

    Args:
        activations: of the model.
        reporter: tells of the plan.
    """

    def __init__(self, activations: Activations, reporter: Reporter) -> None:
        self._activations, self._reporter = activations, reporter

    def before_pass(self, attempt: Attempt) -> None:
        """The user's code gets a micro-batch."""
        self._activations.begin()

    def after_pass(self, attempt: Attempt) -> None:
        """It has computed on it. A plan is for the longest pass."""
        if attempt.whole:
            self._activations.end(attempt.present.size)

    def commit(self, attempt: Attempt) -> None:
        """The optimizer has its state now."""
        plan = self._activations.committed()
        if plan is not None:
            self._reporter.plan(plan)

    def close(self) -> None:
        """Leave the model as it was."""
        self._activations.close()


class Pacing(StepPart):
    """The pace of this worker, measured in each step.

    Args:
        settings: what counts as a sample.
        tell: gets the estimate behind each step.
    """

    def __init__(self, settings: PaceSettings, tell: Callable[[Estimate | None], None]) -> None:
        self.pace = Pace(settings)
        self._tell = tell

    def enter(self, assigned: range) -> None:
        """What was measured was under other circumstances."""
        self.pace.enter()

    def begin(self, attempt: Attempt) -> None:
        """All is ready to compute."""
        self.pace.begin(time.monotonic(), attempt.work)

    def computed(self, attempt: Attempt) -> None:
        """The last backward pass of the attempt is over."""
        if attempt.timed:
            self.pace.end(time.monotonic())
        else:
            self.pace.disregard()

    def commit(self, attempt: Attempt) -> None:
        """The attempt counts."""
        self.pace.commit(time.monotonic())
        self._tell(self.pace.estimate)

    def abandon(self) -> None:
        """What the next attempt takes is no measure of a step."""
        self.pace.enter()


def in_order(
    *,
    guard: Guard,
    turns: DeviceTurns | None,
    update: Update,
    fusion: MicrobatchFusion | None,
    loading: Loading,
    activations: PlannedActivations | None,
    audit: Audit | None,
    trace: TraceWriter | None,
    tracking: Tracking | None,
    explanation: Explanation | None,
    pacing: Pacing | None,
    reporter: Reporter,
) -> Parts:
    """The parts of a run; ``None`` is off."""
    order: tuple[StepPart | None, ...] = (
        # Before all others: what it refuses is not to be hashed, traced or timed as if it were right.
        guard,
        # A worker waits for its device before anything of a pass is prepared, and gives it back before the others look
        # at what the attempt came to.
        turns,
        # The state is hashed as the step begins with it, before any forward pass changes buffers.
        update.watch,
        # Behind the state: from different ones, workers come to different gradients, and nobody has computed wrong. It
        # sees gradients as autograd left them, so before whatever takes them.
        update.spot_checker,
        # It says how much work an attempt is, and whether a pass is whole, before those that measure ask.
        update.cut,
        # It divides the range into portions, which loading reads by.
        fusion,
        loading,
        # Behind the cut: only whole passes are measured for a plan.
        activations,
        # What is written down is written before the attempt can count.
        audit,
        trace,
        tracking,
        # Behind the commit of all others: it reads what they have left.
        explanation,
        # Its clock begins when everybody is ready, and its estimate is told with the step's progress.
        pacing,
        reporter,
    )
    return Parts([part for part in order if part is not None])

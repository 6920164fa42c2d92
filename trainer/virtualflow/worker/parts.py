"""The parts of a step, in their order. What is off is not among them, and costs no call.

No two workers need the same parts, but those that they have in common come in this order: it decides what a part sees
of the others', and what counts as computing.
"""

from __future__ import annotations

from virtualflow.step import Guard, MicrobatchFusion, Parts, StepPart, Update
from virtualflow.worker.loading import Loading
from virtualflow.worker.records import Audit, Explanation, TraceWriter
from virtualflow.worker.reporter import Pacing, PlannedActivations, Reporter
from virtualflow.worker.tracking import Tracking
from virtualflow.worker.turns import DeviceTurns


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

"""A job's conditions: one changes its time only with its status, and the message of each has a bound. Pure.

What is amiss in a training that goes on all the same are conditions that appear once there is something to say.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from virtualflow.protocol.http_api import Status
from virtualflow.protocol.messages import CheckpointState, NonFinite
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow.protocol.wording import Metric, counted, printable, show_metric
from virtualflow_operator import reasons
from virtualflow_operator.api import Condition, ConditionType, Job, JobStatus, Truth, format_time

_DIGITS = 6
"""Significant digits of a loss."""
MAX_MESSAGE = 4_096
"""Characters of a condition's message; the API takes 32,768, people less."""
_CORRECTABLE = (reasons.INVALID_SPEC, reasons.TEMPLATE_REJECTED, reasons.CREATION_REFUSED, reasons.NAME_TAKEN)
Aspect = tuple[ConditionType, Truth, str, str]
"""A condition that is to be: its type, status, reason and message."""


def with_conditions(status: JobStatus, generation: int, now: float, *aspects: Aspect) -> JobStatus:
    """Set these conditions; the time of one changes only with its status."""
    conditions = []
    for kind, truth, reason, message in aspects:
        before = status.condition(kind)
        same = before is not None and before.status == truth
        since = before.last_transition_time if before is not None and same else format_time(now)
        shown = printable(message)
        shown = shown if len(shown) <= MAX_MESSAGE else shown[: MAX_MESSAGE - 2] + " …"
        conditions.append(Condition(kind, truth, reason, shown, since, generation))
    return msgspec.structs.replace(status, conditions=tuple(conditions))


def amend(status: JobStatus, job: Job, now: float, *aspects: Aspect) -> JobStatus:
    """Replace or add to the conditions that ``build_status`` made, keeping the times of the job's present ones."""
    changed = {aspect[0]: aspect for aspect in aspects}
    merged: list[Aspect] = []
    for condition in status.conditions:
        kind: ConditionType = condition.type  # type: ignore[assignment]  # it was made from one
        kept: Aspect = (kind, condition.status, condition.reason, condition.message)
        merged.append(changed.pop(kind, kept))
    merged += changed.values()
    return with_conditions(
        msgspec.structs.replace(status, conditions=job.status.conditions), job.generation, now, *merged
    )


def with_kstatus(status: JobStatus, job: Job, now: float, *, waits: bool) -> JobStatus:
    """The status as kstatus reads it, by which Helm, Flux and others wait: what follows from all that is decided.

    A job that nobody needs to wait for has neither condition, nor ``Ready``: kstatus would take ``False`` for "in
    progress". So it is with a batch Job that is suspended, by its user or Kueue.

    Args:
        status: the job's next one, but for these.
        waits: whether it has no workers because whoever admits it has decided so.
    """
    ready, progressing = status.condition("Ready"), status.condition("Progressing")
    rests = status.phase in ("Complete", "Failed", "Suspended") or (waits and status.phase == "Pending")
    because: Condition | None = None
    kind: ConditionType = "Stalled"
    if status.phase == "Failed":
        because = status.condition("Failed")
    elif progressing is not None and progressing.reason in _CORRECTABLE:
        because = progressing
    elif progressing is not None and not rests:
        kind, moves = "Reconciling", progressing.reason in (reasons.ROLLING, reasons.SUSPENDING)
        if moves or ready is None or ready.status != "True":
            because = ready if ready is not None and progressing.reason == reasons.TRAINING else progressing
    dropped = ("Reconciling", "Stalled", "Ready") if rests else ("Reconciling", "Stalled")
    kept = tuple(condition for condition in status.conditions if condition.type not in dropped)
    if because is None:
        return msgspec.structs.replace(status, conditions=kept)
    before = job.status.condition(kind)
    since = before.last_transition_time if before is not None else format_time(now)
    made = Condition(kind, "True", because.reason, because.message, since, job.generation)
    return msgspec.structs.replace(status, conditions=(*kept, made))


# --- what is amiss in a training that goes on all the same ------------------------------------------------------------


def shown_loss(metrics: Mapping[str, Metric]) -> str | None:
    loss = metrics.get("loss")
    return None if loss is None else show_metric(loss, _DIGITS)


def training_health(status: JobStatus, told: Status | TerminationMessage | None) -> list[Aspect]:
    """The conditions that there are to be beside those that every job has."""
    finite = _finite(told.metrics, told.non_finite) if told is not None else None
    checkpoint = told.checkpoint if isinstance(told, Status) else None
    saved = _saved(status, checkpoint) if checkpoint is not None else None
    aspects = (
        finite or _former(status, "NonFinite"),
        saved or _former(status, "CheckpointFailed"),
        _fits(status, told if isinstance(told, Status) else None) or _former(status, "DoesNotFit"),
        (_offloads(status, told) if isinstance(told, Status) else None) or _former(status, "FitsWithOffload"),
    )
    return [aspect for aspect in aspects if aspect is not None]


def _finite(metrics: Mapping[str, Metric], found: NonFinite | None) -> Aspect | None:
    if found is None:
        return None
    if any(isinstance(value, str) for value in metrics.values()):
        message = (
            f"{found}. Lower the learning rate, clip gradients or look at the data, and start from a checkpoint of "
            "before."
        )
        return ("NonFinite", "True", reasons.METRIC_NOT_FINITE, message)
    return ("NonFinite", "False", reasons.METRICS_FINITE, f"{found}, and all metrics are finite again.")


def _saved(status: JobStatus, checkpoint: CheckpointState) -> Aspect | None:
    if checkpoint.failure is not None:
        failure = checkpoint.failure
        return ("CheckpointFailed", "True", reasons.CHECKPOINT_NOT_WRITTEN, f"{failure[:1].upper()}{failure[1:]}.")
    if status.condition("CheckpointFailed") is None:
        return None
    message = f"The checkpoint of step {checkpoint.step} is complete."
    return ("CheckpointFailed", "False", reasons.CHECKPOINT_WRITTEN, message)


def _fits(status: JobStatus, told: Status | None) -> Aspect | None:
    why = [f"Worker group {unfit.group}: {unfit.message}." for unfit in status.failures.unfit]
    if not why and told is not None and told.does_not_fit and told.error:
        why = [f"{told.error[:1].upper()}{told.error[1:]}."]
    if why:
        return ("DoesNotFit", "True", reasons.NO_PLAN_FITS, " ".join(why))
    report = told.memory if told is not None else None
    if status.condition("DoesNotFit") is None or report is None or report.planned < report.budgets:
        return None
    return ("DoesNotFit", "False", reasons.PLANS_FIT, "All workers fit into the memory that they may use.")


def _offloads(status: JobStatus, told: Status) -> Aspect | None:
    report, known = told.memory, status.condition("FitsWithOffload") is not None
    if told.does_not_fit:
        return ("FitsWithOffload", "False", reasons.NO_PLAN_FITS, "No plan fits.") if known else None
    if report is not None and report.offloading:
        others = f" and {counted(report.offloading - 1, 'other')}" if report.offloading > 1 else ""
        message = f"Activations are swapped or recomputed by {report.worker}{others}: {report.plan}."
        return ("FitsWithOffload", "True", reasons.ACTIVATIONS_OFFLOADED, message)
    if not known or report is None or report.planned < report.budgets:
        return None
    return ("FitsWithOffload", "False", reasons.ACTIVATIONS_KEPT, "All workers keep all activations.")


def _former(status: JobStatus, kind: ConditionType) -> Aspect | None:
    known = status.condition(kind)
    return None if known is None else (kind, known.status, known.reason, known.message)

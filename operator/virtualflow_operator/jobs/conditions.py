"""A job's conditions: one changes its time only with its status, and the message of each has a bound. Pure."""

from __future__ import annotations

import msgspec

from virtualflow_operator.api import Condition, ConditionType, Job, JobStatus, Truth, format_time

MAX_MESSAGE = 4_096
"""Characters of a condition's message; the API takes 32,768, people less."""
Aspect = tuple[ConditionType, Truth, str, str]
"""A condition that is to be: its type, status, reason and message."""


def with_conditions(status: JobStatus, generation: int, now: float, *aspects: Aspect) -> JobStatus:
    """Set these conditions; the time of one changes only with its status."""
    conditions = []
    for kind, truth, reason, message in aspects:
        before = status.condition(kind)
        same = before is not None and before.status == truth
        since = before.last_transition_time if before is not None and same else format_time(now)
        shown = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 2] + " …"
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

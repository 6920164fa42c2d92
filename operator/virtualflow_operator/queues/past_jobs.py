"""What a queue remembers of the jobs that have ended, to judge by it how long others are. Pure.

It stands in the queue's status, in few numbers for each kind of jobs: the jobs themselves are deleted after a while,
and the operator may start anew. A job is counted once, when it has ended after the latest that was counted; of two
that end in the same second one may be left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, isfinite, log

from virtualflow_operator.api import ANY_KIND, Job, PastKind, QueueStatus
from virtualflow_operator.queues.curves import curve_of
from virtualflow_operator.scheduling.service_time import AlikeJobs, Past, left
from virtualflow_operator.settings import SchedulingSettings


def least_workers(job: Job) -> int:
    """The job's minimum, within what its groups can have."""
    return max(job.spec.least, 1)  # groups of none are refused by the schema


def served(job: Job, units: int) -> float | None:
    """Unit-seconds at the job's minimum that its steps so far were worth; ``None``: its speed was never measured.

    Where devices are of several kinds, it is told by the one on which it was measured last.
    """
    known = job.status.scaling
    curve, least = curve_of(known, known[0].kind if known else ANY_KIND), least_workers(job)
    return (job.status.step or 0) / curve.speed(least) * least * units if curve.measured else None


def expected_left(past: Past, job: Job, units: int) -> float | None:
    """Unit-seconds at the job's minimum that jobs like it would still need; ``None``: nobody has ended yet."""
    expected = past.expects(job.namespace, job.name)
    return None if expected is None else left(expected, served(job, units) or 0.0)


def read_past(status: QueueStatus, scale: int) -> Past:
    """What the status says; a kind whose numbers make no sense is left out."""
    kinds = []
    for kind in status.past:
        service, factor = _number(kind.unit_seconds), _number(kind.off_by)
        if service is not None and factor is not None:
            kinds.append(
                AlikeJobs(kind.namespace, kind.pattern, kind.jobs, log(service * scale), log(max(factor, 1.0)))
            )
    return Past(tuple(kinds))


def write_past(past: Past, scale: int) -> tuple[PastKind, ...]:
    return tuple(
        PastKind(kind.namespace, kind.pattern, kind.jobs, f"{exp(kind.service) / scale:.4g}", f"{exp(kind.error):.3g}")
        for kind in past.kinds
    )


def count_ended(
    past: Past, until: str, ended: Sequence[tuple[Job, int]], settings: SchedulingSettings
) -> tuple[Past, str]:
    """Count the jobs that completed after ``until``; what is known then, and until when.

    Args:
        until: the latest completion that was counted, as the status has it.
    """
    for job, units in sorted(ended, key=lambda pair: (pair[0].status.completion_time or "", pair[0].name)):
        at, needed = job.status.completion_time or "", served(job, units)
        if job.status.phase == "Complete" and at > until:
            until = at
            past = past if not needed else past.after(job.namespace, job.name, needed, settings)
    return past, until


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) and number > 0 else None

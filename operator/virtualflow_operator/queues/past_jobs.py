"""What a queue knows of how fast its jobs are, and remembers of those that have ended, to judge by it how long others
are. Pure.

The latter stands in the queue's status, in few numbers for each kind of jobs: the jobs themselves are deleted after a
while, and the operator may start anew. A job is counted once, when it has ended after the latest that was counted; of
two that end in the same second one may be left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, log

from virtualflow_operator.api import ANY_KIND, Job, Measured, PastKind, QueueStatus
from virtualflow_operator.jobs.scaling_history import computing_of, positive, speed_of
from virtualflow_operator.scheduling import ScalingCurve
from virtualflow_operator.scheduling.service_time import AlikeJobs, Forecast, Past
from virtualflow_operator.settings import SchedulingSettings


def curve_of(known: Sequence[Measured], kind: str = ANY_KIND) -> ScalingCurve:
    """The scaling curve through what was measured on a kind of device."""
    return ScalingCurve.of((point.workers, speed_of(point)) for point in known if point.kind == kind)


def phases_of(known: Sequence[Measured], kind: str = ANY_KIND) -> ScalingCurve:
    """The same, for what a step computes: beside the speeds with several workers, that of a lone one that computes as
    they do together, all the time. (``scheduling.Phases.at`` takes the difference for no computing.)
    """
    points = [point for point in known if point.kind == kind]
    alone = [1_000 / (computing_of(point) * point.workers) for point in points if computing_of(point)][:1]
    several = [(point.workers, speed_of(point)) for point in points if point.workers > 1 or not alone]
    return ScalingCurve.of([*several, *((1, speed) for speed in alone)])


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


def foresee(past: Past, jobs: Iterable[tuple[Job, int]], settings: SchedulingSettings) -> Forecast:
    """What jobs are expected to need, by what is remembered and by how far those are that are not over.

    Args:
        jobs: those of the queue, with the units of a worker.
    """
    return Forecast(past, ((job.namespace, job.name, served(job, units) or 0.0) for job, units in jobs), settings)


def read_past(status: QueueStatus, scale: int) -> Past:
    """What the status says; a kind whose numbers make no sense is left out."""
    kinds = []
    for kind in status.past:
        service, factor = positive(kind.unit_seconds), positive(kind.off_by)
        if service and factor:
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

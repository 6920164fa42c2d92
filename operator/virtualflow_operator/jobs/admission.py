"""The port by which a job is admitted: how many workers it may have now, where their pods may run, and why.

A queue of ours and Kueue are two adapters, each in a room of its own; a job of neither is admitted at once. What is
admitted acts as ``kubectl scale`` and ``suspend`` would: the reconciler sees the job with so many ``replicas``, or
suspended. The user's own fields are never written, so what is under version control stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from virtualflow.protocol.wording import counted
from virtualflow_operator import reasons
from virtualflow_operator.api import (
    AllocationStatus,
    Condition,
    Job,
    JobStatus,
    Node,
    Object,
    Pod,
    Truth,
    WorkerGroup,
    format_time,
)
from virtualflow_operator.jobs.actions import Draft
from virtualflow_operator.jobs.conditions import MAX_MESSAGE
from virtualflow_operator.jobs.pod_classification import ClassifiedPod, PodClassification
from virtualflow_operator.jobs.scaling_history import efficient_limit, no_further
from virtualflow_operator.jobs.worker_plan import NewWorker


class Placement:
    """Where a job's pods may run, beside what their templates say: anywhere. Adapters say more by overriding this."""

    @property
    def surges(self) -> bool:
        """Whether there may be one worker more than were admitted, so that a successor comes before its predecessor."""
        return True

    @property
    def kinds_differ(self) -> bool:
        """Whether devices are told apart by kind, so that speeds are remembered by kind, too."""
        return False

    @property
    def crowds(self) -> Mapping[str, int]:
        """Workers of all jobs on each node, where those go first that are alone on theirs."""
        return {}

    def sort(self, pods: PodClassification, nodes: Mapping[str, Node] | None) -> PodClassification:
        """Note which workers are to be replaced because of where they are."""
        return pods

    def find_lacking(
        self, workers: Sequence[ClassifiedPod], groups: Sequence[WorkerGroup], nodes: Mapping[str, Node] | None
    ) -> tuple[Sequence[str], Collection[tuple[str, str]]]:
        """The kind of device of each worker that is lacking; groups, and kinds on which their templates may not be."""
        return (), ()

    def place_workers(
        self, made: Sequence[tuple[NewWorker, Object]], job: Job, workers: Sequence[ClassifiedPod]
    ) -> None:
        """Change the manifests of new workers of the job, beside those that it has."""

    def place_coordinator(self, pod: Object) -> None:
        """Change the manifest of a new coordinator."""

    def complete_template(self, pod: Object) -> None:
        """Add to a pod that the API server is only asked about what each worker's pod has more than its template."""


ANYWHERE = Placement()


@dataclass(frozen=True)
class AdmissionWait:
    """Why a job has no workers although its user wants some."""

    why: str
    """A sentence without its capital."""
    leave: str
    """What workers are told that leave because of it."""
    whose: str
    """For what it waits, behind "It waits"."""
    reason: str


@dataclass(frozen=True)
class Admitted:
    """A job as it may run now."""

    job: Job
    """With so many replicas, so many of each worker group at most, or suspended."""
    placement: Placement = ANYWHERE
    wait: AdmissionWait | None = None
    """``None``: it runs, or is suspended by its user."""
    allocation: AllocationStatus | None = None
    """As its status shows it; ``None``: nobody but its user decides."""
    reason: str = ""
    """Of its condition ``Allocated``; empty: it has none."""
    message: str = ""
    """Of the same; empty: as its allocation says."""
    limit: str = ""
    """Why it has fewer workers than its user asks for, a sentence; empty: it has not."""
    limit_reason: str = reasons.EFFICIENT
    """Of its condition ``Progressing`` in that case."""
    still: bool = False

    @property
    def decision(self) -> str:
        """Why it has as many workers as it has; empty: its user wants so many."""
        return describe_allocation(self.allocation) if self.allocation is not None else self.limit


class Admission:
    """Who admits a job: nobody, so it runs at once with what its user wants, as long as each worker is worth it."""

    def admit(self, job: Job, *, sound: bool, now: float) -> Admitted:
        if not job.spec.elasticity.min_efficiency:
            return Admitted(job)
        return _as_far_as_efficient(job)

    def keep(
        self,
        job: Job,
        admitted: Admitted,
        pods: Sequence[Pod],
        draft: Draft,
        status: JobStatus,
        *,
        sound: bool,
        now: float,
    ) -> None:
        """Ask whoever admits the job for what it is to have, give back what it has left, and say how it does."""


AT_ONCE = Admission()


def _as_far_as_efficient(job: Job) -> Admitted:
    spec, limit = job.spec, ""
    percent = spec.elasticity.min_efficiency
    efficient = efficient_limit(job.status.scaling, percent, spec.desired)
    most = max(efficient, min(spec.min_replicas, spec.desired))
    if most < spec.desired:
        why = no_further(percent)
        limit = f"It has {most} of the {spec.desired} workers that replicas asks for: {why}; lower it to have more."
    return Admitted(with_workers(job, min(spec.replicas, most)), limit=limit)


def with_workers(job: Job, workers: int) -> Job:
    return replace(job, spec=msgspec.structs.replace(job.spec, replicas=workers))


def without_workers(job: Job) -> Job:
    """The job without workers: suspended, as by its user."""
    return replace(job, spec=msgspec.structs.replace(job.spec, replicas=0, min_replicas=0, suspend=True))


def with_allocation(status: JobStatus, job: Job, admitted: Admitted, now: float) -> JobStatus:
    """The status with the condition ``Allocated``, or without it for a job whose user alone decides."""
    others = tuple(condition for condition in status.conditions if condition.type != "Allocated")
    if not admitted.reason:
        return msgspec.structs.replace(status, conditions=others, allocation=None)
    allocation = None if status.finished else admitted.allocation
    truth: Truth = "True" if allocation is not None and allocation.workers else "False"
    reason, message = admitted.reason, admitted.message
    if status.finished:
        reason, message = reasons.FINISHED, "The job is over."
    elif not message and allocation is not None:
        message = describe_allocation(allocation)
    before = job.status.condition("Allocated")
    since = before.last_transition_time if before is not None and before.status == truth else format_time(now)
    own = Condition("Allocated", truth, reason, message[:MAX_MESSAGE], since, job.generation)
    return msgspec.structs.replace(status, conditions=(*others, own), allocation=allocation)


def describe_allocation(allocation: AllocationStatus) -> str:
    count = counted(allocation.workers, "worker") if allocation.workers else "No workers"
    return f"{count} of the queue {allocation.queue}: {allocation.reason}"

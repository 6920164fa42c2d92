"""What Kueue has admitted of a job, and what the job makes of it. Pure.

The reconciler sees the job with so many ``replicas``, so many of each worker group, or suspended. ``workloads`` keeps
the Workloads that ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from virtualflow_operator import reasons
from virtualflow_operator.api import (
    AllocationStatus,
    Job,
    JobStatus,
    Object,
    Pod,
    PodAdditions,
    Workload,
    format_time,
    kueue_priority,
    kueue_queue,
    parse_time,
)
from virtualflow_operator.constants import ANNOTATION_KUEUE_ELASTIC, COORDINATOR
from virtualflow_operator.jobs.actions import Draft
from virtualflow_operator.jobs.admission import AT_ONCE, Admission, AdmissionWait, Admitted, Placement, without_workers
from virtualflow_operator.jobs.conditions import MAX_MESSAGE
from virtualflow_operator.jobs.pod_classification import ClassifiedPod
from virtualflow_operator.jobs.worker_plan import NewWorker
from virtualflow_operator.kueue.pod_sets import add_to, pod_sets_hash
from virtualflow_operator.kueue.workloads import (
    Kueue,
    QuotaRequest,
    WorkloadChain,
    admitted_counts,
    chain_of,
    follows_kueue,
    keep_workloads,
)
from virtualflow_operator.settings import OperatorSettings


@dataclass(frozen=True)
class KueueAdmission(Admission):
    """Kueue admits a job as far as it has a say in it; else whoever would do so without it."""

    kueue: Kueue
    settings: OperatorSettings
    otherwise: Admission = AT_ONCE

    def admit(self, job: Job, *, sound: bool, now: float) -> Admitted:
        asked = self.otherwise.admit(job, sound=sound, now=now)
        kueue = self.kueue
        if not follows_kueue(job, kueue):
            return asked
        return _settle(asked.job, kueue, pod_sets_hash(job) if sound else None, now, asked.limit)

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
        asked = self.otherwise.admit(job, sound=sound, now=now).job
        request = QuotaRequest(
            job, asked, tuple(pods), self.kueue, self.settings, now, sound, admitted.wait is not None
        )
        keep_workloads(request, draft, status)


@dataclass(frozen=True)
class KueuePlacement(Placement):
    additions: Mapping[str, PodAdditions]
    """By worker group, and under ``coordinator``."""

    @property
    def surges(self) -> bool:
        """Kueue has admitted so many and no more."""
        return False

    def place_workers(
        self, made: Sequence[tuple[NewWorker, Object]], job: Job, workers: Sequence[ClassifiedPod]
    ) -> None:
        """Let new workers run where Kueue has given their job quota."""
        for worker, pod in made:
            if worker.group.name in self.additions:
                add_to(pod, self.additions[worker.group.name])

    def place_coordinator(self, pod: Object) -> None:
        if COORDINATOR in self.additions:
            add_to(pod, self.additions[COORDINATOR])


def _settle(job: Job, kueue: Kueue, shape: str | None, now: float, limit: str) -> Admitted:
    """Say what a job is to have.

    Args:
        shape: the hash of what the job's pods ask for now; ``None``: its specification makes no sense.
        limit: why the job asks for fewer workers than its user.
    """
    if job.status.finished:
        return Admitted(job, KueuePlacement({}), reason=reasons.FINISHED, limit=limit)
    if job.spec.suspend:
        allocation = _allocated(job, 0, "the job is suspended by its user", now)
        return Admitted(job, KueuePlacement({}), None, allocation, reason=reasons.SUSPENDED, limit=limit)
    if kueue.trouble:
        return _as_it_is(job, kueue.trouble, reasons.KUEUE_NOT_READY, now, limit)
    chain = chain_of(kueue.workloads, job.uid)
    held = chain.holding
    if held is not None and held.evicted:
        return _held_up(job, _why_evicted(held), reasons.EVICTED_BY_KUEUE, now, limit)
    if shape is None:
        return _as_it_is(job, "its specification makes no sense", reasons.INVALID_SPEC, now, limit)
    if held is not None and held.shape != shape:
        why = "its pods ask for something else than Kueue has admitted, and are to be admitted anew"
        return _held_up(job, why, reasons.WAITS_FOR_KUEUE, now, limit)
    if chain.granting is None:
        return _held_up(job, _why_not_yet(job, kueue, chain), reasons.WAITS_FOR_KUEUE, now, limit)
    return _admit(job, chain.granting, kueue, now, limit)


def _admit(job: Job, workload: Workload, kueue: Kueue, now: float, limit: str) -> Admitted:
    """The job with as many of each worker group as were admitted, and what their pods must have."""
    spec = job.spec
    additions: dict[str, PodAdditions] = {}
    for name in workload.assignments:
        found = _find_additions(workload, name, kueue.flavors)
        if isinstance(found, str) and job.status.allocation is not None and job.status.allocation.workers:
            return _as_it_is(job, found, reasons.KUEUE_NOT_READY, now, limit)  # it could be told before
        if isinstance(found, str):
            return _held_up(job, found, reasons.WAITS_FOR_KUEUE, now, limit)
        additions[name] = found
    counts = admitted_counts(workload)
    groups = tuple(msgspec.structs.replace(g, max_replicas=counts.get(g.name, 0)) for g in spec.worker_groups)
    total = sum(group.max_replicas or 0 for group in groups)
    workers = min(spec.desired, total)
    if not workers:
        return _held_up(job, "Kueue has admitted no worker", reasons.WAITS_FOR_KUEUE, now, limit)
    admission = (workload.raw.get("status") or {}).get("admission") or {}
    why = f"Kueue has admitted {total} by the ClusterQueue {admission.get('clusterQueue')}"
    limit_reason = reasons.EFFICIENT
    if total < spec.desired:
        limit = f"It has {total} of the {spec.desired} workers that it asks for: {why}; {_how_to_grow(workload)}."
        limit_reason = reasons.LIMITED_BY_KUEUE
    limited = msgspec.structs.replace(
        spec, replicas=workers, min_replicas=min(spec.min_replicas, workers), worker_groups=groups
    )
    return Admitted(
        replace(job, spec=limited),
        KueuePlacement(additions),
        allocation=_allocated(job, workers, why, now),
        reason=reasons.ADMITTED_BY_KUEUE,
        limit=limit,
        limit_reason=limit_reason,
    )


def _how_to_grow(workload: Workload) -> str:
    if workload.elastic:
        return "more are asked for"
    return f"it grows with the annotation {ANNOTATION_KUEUE_ELASTIC}, or when it is suspended and resumed"


def _find_additions(workload: Workload, name: str, flavors: Mapping[str, PodAdditions | None]) -> PodAdditions | str:
    """What the pods of a set must have, or why that cannot be."""
    given = workload.assignments[name]
    if given.topology:
        return (
            "Kueue places its pods one by one (topology-aware scheduling), which is not supported; use another flavor"
        )
    parts: list[tuple[str, PodAdditions]] = []
    for flavor in given.flavors:
        placement = flavors.get(flavor)
        if placement is None:
            return f"there is no ResourceFlavor {flavor}, which Kueue has given it"
        parts.append((f"the ResourceFlavor {flavor}", placement))
    parts += [(f"the admission check {check}", update) for check, where, update in workload.updates if where == name]
    merged = PodAdditions()
    for source, part in parts:
        clash = _clash(merged, part)
        if clash:
            return f"{source} wants another value of {clash} than what it was given besides"
        merged = PodAdditions(
            {**merged.node_selector, **part.node_selector},
            (*merged.tolerations, *(one for one in part.tolerations if one not in merged.tolerations)),
            {**merged.labels, **part.labels},
            {**merged.annotations, **part.annotations},
        )
    return merged


def _clash(one: PodAdditions, other: PodAdditions) -> str:
    """A key that two placements want different values of; empty: there is none."""
    for mine, theirs in (
        (one.node_selector, other.node_selector),
        (one.labels, other.labels),
        (one.annotations, other.annotations),
    ):
        for key in mine.keys() & theirs.keys():
            if mine[key] != theirs[key]:
                return key
    return ""


def _why_evicted(workload: Workload) -> str:
    if not workload.active:
        return f"Kueue has evicted it: its Workload {workload.name} is switched off (spec.active)"
    evicted = workload.condition("Evicted")
    return f"Kueue has evicted it ({evicted.reason}): {evicted.message}"


def _why_not_yet(job: Job, kueue: Kueue, chain: WorkloadChain) -> str:
    """Why nothing is admitted, as far as Kueue tells."""
    name = kueue_priority(job)
    if name and kueue.priority is None:
        return f"there is no WorkloadPriorityClass {name}"
    if kueue.refused:
        return f"the API server refuses its Workload: {kueue.refused}"
    held, asking = chain.holding, chain.asking
    if held is not None:
        checks = f"; these admission checks are not ready: {', '.join(held.checks)}" if held.checks else ""
        return f"its quota is reserved, and it is not admitted yet{checks}"
    if asking is None:
        return "its Workload is not made yet"
    if not asking.active:
        return f"its Workload {asking.name} is switched off (spec.active)"
    told = asking.condition("QuotaReserved").message
    return told or f"its Workload {asking.name} is in the LocalQueue {asking.queue}"


def _as_it_is(job: Job, trouble: str, code: str, now: float, limit: str) -> Admitted:
    """What is wanted is not known: what runs goes on, and nothing is made."""
    given = job.status.allocation
    running = given.workers if given is not None else job.status.replicas
    if not running:
        return _held_up(job, trouble, code, now, limit)
    spec = msgspec.structs.replace(job.spec, replicas=running, min_replicas=min(job.spec.min_replicas, running))
    allocation = _allocated(job, running, trouble, now)
    return Admitted(replace(job, spec=spec), KueuePlacement({}), None, allocation, reason=code, limit=limit, still=True)


def _held_up(job: Job, why: str, code: str, now: float, limit: str) -> Admitted:
    """The job without workers: suspended, as by its user."""
    told = f"it waits for admission by Kueue: {why}" if code == reasons.WAITS_FOR_KUEUE else why
    wait = AdmissionWait(told, why, "to be admitted by Kueue", code)
    return Admitted(
        without_workers(job),
        KueuePlacement({}),
        wait,
        _allocated(job, 0, why, now),
        reason=code,
        message=f"{told[:1].upper()}{told[1:]}",
        limit=limit,
    )


def _allocated(job: Job, workers: int, reason: str, now: float) -> AllocationStatus:
    """The allocation as it is to be written."""
    before, moment = job.status.allocation, format_time(now)
    since = before.since if before is not None and bool(before.workers) == bool(workers) else moment
    resized = before.resized_time if before is not None and before.workers == workers else moment
    waited = before.waited_seconds if before is not None else 0
    if workers and (before is None or not before.workers):
        began = parse_time(before.since) if before is not None else None
        waited = max(int(now - began), 0) if began is not None else 0
    elif not workers and before is not None and before.workers:
        waited = 0
    queue = kueue_queue(job) or (before.queue if before is not None else "")
    return AllocationStatus(queue, workers, reason[:MAX_MESSAGE], since, resized, waited)

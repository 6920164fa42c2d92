"""What Kueue has admitted of a job, and what the job makes of it. Pure.

An admission acts as a queue's grant does: the reconciler sees the job with so many ``replicas``, so many of each worker
group, or suspended. The Workloads that ask for it are kept in ``jobs.kueue_workloads``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from virtualflow_operator import reasons
from virtualflow_operator.api import (
    Allocation,
    Job,
    JobStatus,
    Placement,
    Workload,
    format_time,
    kueue_priority,
    kueue_queue,
    parse_time,
)
from virtualflow_operator.constants import ANNOTATION_KUEUE_ELASTIC
from virtualflow_operator.queues.grants import MAX_MESSAGE, Granted


@dataclass(frozen=True)
class Kueue:
    """What is known of Kueue that concerns one job."""

    workloads: tuple[Workload, ...] = ()
    """All that bear the job's label."""
    flavors: Mapping[str, Placement | None] = field(default_factory=dict)
    """What the flavors demand that its Workloads were given; ``None``: there is no such flavor."""
    priority: int | None = None
    """The value of the WorkloadPriorityClass that the job names; ``None``: it names none, or there is none."""
    refused: str = ""
    """Why a Workload could not be made or changed, in the API server's words; empty: it could."""
    trouble: str = ""
    """Why none of this is known, in words; empty: it is."""


@dataclass(frozen=True)
class Chain:
    """A job's Workloads, by what they are for: in the end they replace one another."""

    holding: Workload | None = None
    """The newest that has quota."""
    asking: Workload | None = None
    """The one that waits for quota; beside one that holds some, it takes its place."""
    granting: Workload | None = None
    """The one whose pods may run: the one that holds, or while that is not admitted yet, its predecessor."""
    others: tuple[Workload, ...] = ()
    """Those that are of no use any more."""


def chain_of(workloads: Sequence[Workload], uid: str) -> Chain:
    """Tell the Workloads of the job with that uid apart; a namesake's do not count, nor those being deleted."""
    own = sorted((w for w in workloads if w.owner == uid and not w.deleting), key=lambda w: (w.created, w.name))
    reserved = [w for w in own if w.reserved and not w.finished]
    # Two of them may be of the same second: the one that nobody replaces is the newest.
    replaced = {w.replaces for w in reserved}
    holding = next((w for w in reversed(reserved) if w.key not in replaced), None)
    waiting = [w for w in own if not w.reserved and not w.finished]
    if holding is not None:
        waiting = [w for w in waiting if w.replaces == holding.key]
    asking = waiting[-1] if waiting else None
    granting = holding if holding is not None and holding.admitted else None
    if holding is not None and granting is None:
        before = next((w for w in own if w.key == holding.replaces), None)
        granting = before if before is not None and before.assignments and not before.evicted else None
    if holding is not None and holding.evicted:
        granting = None
    used = {w.name for w in (holding, asking, granting) if w is not None}
    return Chain(holding, asking, granting, tuple(w for w in own if w.name not in used))


def follows_kueue(job: Job, kueue: Kueue | None) -> bool:
    """Whether Kueue has a say in a job: it names a queue of Kueue's, or still holds quota.

    Kueue's own integrations refuse to take the label from a job that runs. Here it counts once the quota is given back.
    """
    if kueue is None or job.spec.queue:
        return False
    return bool(kueue_queue(job)) or chain_of(kueue.workloads, job.uid).holding is not None


def admitted_counts(workload: Workload) -> dict[str, int]:
    """How many pods of each set may run: as many as were admitted, less what was handed back."""
    return {
        name: max(min(given.count, asked.count - workload.reclaimable.get(name, 0)), 0)
        for name, asked in workload.pod_sets.items()
        if (given := workload.assignments.get(name)) is not None
    }


def settle_admission(granted: Granted, kueue: Kueue | None, shape: str | None, now: float) -> Granted:
    """Say what a job is to have.

    Args:
        granted: the job as it is without Kueue.
        kueue: what is known of it.
        shape: the hash of what the job's pods ask for now; ``None``: its specification makes no sense.
        now: Unix seconds.
    """
    job = granted.job
    if kueue is None or not follows_kueue(job, kueue):
        return granted
    granted = replace(granted, kueue=True)
    if job.status.finished:
        return replace(granted, code=reasons.FINISHED)
    if job.spec.suspend:
        status = _allocated(job, 0, "the job is suspended by its user", now)
        return replace(granted, status=status, code=reasons.SUSPENDED)
    if kueue.trouble:
        return _as_it_is(granted, kueue.trouble, reasons.KUEUE_NOT_READY, now)
    chain = chain_of(kueue.workloads, job.uid)
    held = chain.holding
    if held is not None and held.evicted:
        return _held_up(granted, _why_evicted(held), reasons.EVICTED_BY_KUEUE, now)
    if shape is None:
        return _as_it_is(granted, "its specification makes no sense", reasons.INVALID_SPEC, now)
    if held is not None and held.shape != shape:
        why = "its pods ask for something else than Kueue has admitted, and are to be admitted anew"
        return _held_up(granted, why, reasons.WAITS_FOR_KUEUE, now)
    if chain.granting is None:
        return _held_up(granted, _why_not_yet(job, kueue, chain), reasons.WAITS_FOR_KUEUE, now)
    return _admit(granted, chain.granting, kueue, now)


def _admit(granted: Granted, workload: Workload, kueue: Kueue, now: float) -> Granted:
    """The job with as many of each worker group as were admitted, and what their pods must have."""
    job, spec = granted.job, granted.job.spec
    placements: dict[str, Placement] = {}
    for name in workload.assignments:
        placement = _place(workload, name, kueue.flavors)
        if isinstance(placement, str) and job.status.allocation is not None and job.status.allocation.workers:
            return _as_it_is(granted, placement, reasons.KUEUE_NOT_READY, now)  # it could be told before
        if isinstance(placement, str):
            return _held_up(granted, placement, reasons.WAITS_FOR_KUEUE, now)
        placements[name] = placement
    counts = admitted_counts(workload)
    groups = tuple(msgspec.structs.replace(g, max_replicas=counts.get(g.name, 0)) for g in spec.worker_groups)
    total = sum(group.max_replicas or 0 for group in groups)
    workers = min(spec.desired, total)
    if not workers:
        return _held_up(granted, "Kueue has admitted no worker", reasons.WAITS_FOR_KUEUE, now)
    admission = (workload.raw.get("status") or {}).get("admission") or {}
    reason = f"Kueue has admitted {total} by the ClusterQueue {admission.get('clusterQueue')}"
    limited = msgspec.structs.replace(
        spec, replicas=workers, min_replicas=min(spec.min_replicas, workers), worker_groups=groups
    )
    if total < spec.desired:
        limit = f"It has {total} of the {spec.desired} workers that it asks for: {reason}; {_how_to_grow(workload)}."
        granted = replace(granted, limit=limit, limit_code=reasons.LIMITED_BY_KUEUE)
    status = _allocated(job, workers, reason, now)
    return replace(
        granted, job=replace(job, spec=limited), status=status, code=reasons.ADMITTED_BY_KUEUE, placements=placements
    )


def _how_to_grow(workload: Workload) -> str:
    if workload.elastic:
        return "more are asked for"
    return f"it grows with the annotation {ANNOTATION_KUEUE_ELASTIC}, or when it is suspended and resumed"


def _place(workload: Workload, name: str, flavors: Mapping[str, Placement | None]) -> Placement | str:
    """What the pods of a set must have, or why that cannot be."""
    given = workload.assignments[name]
    if given.topology:
        return (
            "Kueue places its pods one by one (topology-aware scheduling), which is not supported; use another flavor"
        )
    parts: list[tuple[str, Placement]] = []
    for flavor in given.flavors:
        placement = flavors.get(flavor)
        if placement is None:
            return f"there is no ResourceFlavor {flavor}, which Kueue has given it"
        parts.append((f"the ResourceFlavor {flavor}", placement))
    parts += [(f"the admission check {check}", update) for check, where, update in workload.updates if where == name]
    merged = Placement()
    for source, part in parts:
        clash = _clash(merged, part)
        if clash:
            return f"{source} wants another value of {clash} than what it was given besides"
        merged = Placement(
            {**merged.node_selector, **part.node_selector},
            (*merged.tolerations, *(one for one in part.tolerations if one not in merged.tolerations)),
            {**merged.labels, **part.labels},
            {**merged.annotations, **part.annotations},
        )
    return merged


def _clash(one: Placement, other: Placement) -> str:
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


def _why_not_yet(job: Job, kueue: Kueue, chain: Chain) -> str:
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


def _as_it_is(granted: Granted, trouble: str, code: str, now: float) -> Granted:
    """What is wanted is not known: what runs goes on, and nothing is made."""
    job = granted.job
    given = job.status.allocation
    running = given.workers if given is not None else job.status.replicas
    if not running:
        return _held_up(granted, trouble, code, now)
    spec = msgspec.structs.replace(job.spec, replicas=running, min_replicas=min(job.spec.min_replicas, running))
    status = _allocated(job, running, trouble, now)
    return replace(granted, job=replace(job, spec=spec), status=status, code=code, still=True)


def _held_up(granted: Granted, why: str, code: str, now: float) -> Granted:
    """The job without workers: suspended, as by its user."""
    job = granted.job
    spec = msgspec.structs.replace(job.spec, replicas=0, min_replicas=0, suspend=True)
    status = _allocated(job, 0, why, now)
    return replace(granted, job=replace(job, spec=spec), status=status, waits=why, code=code)


def _allocated(job: Job, workers: int, reason: str, now: float) -> JobStatus:
    """The status with the allocation as it is to be written."""
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
    allocation = Allocation(queue, workers, reason[:MAX_MESSAGE], since, resized, waited)
    return msgspec.structs.replace(job.status, allocation=allocation)

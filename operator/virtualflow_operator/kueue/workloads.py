"""The Workloads by which a job asks Kueue for quota, and gives it back. Pure.

What Kueue's own integrations do, with two differences. A job that its user suspends has no Workload, since here
suspension is the user's word and not Kueue's. And a job that runs never stops to ask for more: without the annotation
of elastic jobs it stays as large as it was admitted.

Quota goes back when the pods are gone that it was for, never before. While quota is reserved, Kueue lets a pod set's
count only fall, and the number of reclaimable pods only rise; so neither is ever taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from virtualflow_operator.api import (
    Job,
    JobStatus,
    Object,
    Pod,
    PodAdditions,
    PodSet,
    Workload,
    format_time,
    is_elastic,
    kueue_priority,
    kueue_queue,
)
from virtualflow_operator.constants import (
    ANNOTATION_KUEUE_ELASTIC,
    ANNOTATION_KUEUE_REPLACES,
    ANNOTATION_KUEUE_SLICE,
    ANNOTATION_POD_SETS,
    COORDINATOR,
    KUEUE_GROUP,
    KUEUE_VERSION,
    LABEL_GROUP,
    LABEL_KUEUE_JOB,
    WORKER,
)
from virtualflow_operator.jobs import manifests
from virtualflow_operator.jobs.actions import AdmissionAction, CreatePod, Draft
from virtualflow_operator.kueue.pod_sets import ask_for, pod_sets_hash, recount, spread, workload_name, write_pod_sets
from virtualflow_operator.settings import OperatorSettings

# What is known of Kueue that concerns a job, and which of the job's Workloads is for what. Pure.

_PATIENCE = 30.0
"""An elastic job asks for all the workers that it lacks, and after so many seconds without quota for half as many, then
half of those, down to one."""


@dataclass(frozen=True)
class Kueue:
    """What is known of Kueue that concerns one job."""

    workloads: tuple[Workload, ...] = ()
    """All that bear the job's label."""
    flavors: Mapping[str, PodAdditions | None] = field(default_factory=dict)
    """What the flavors demand that its Workloads were given; ``None``: there is no such flavor."""
    priority: int | None = None
    """The value of the WorkloadPriorityClass that the job names; ``None``: it names none, or there is none."""
    refused: str = ""
    """Why a Workload could not be made or changed, in the API server's words; empty: it could."""
    trouble: str = ""
    """Why none of this is known, in words; empty: it is."""


@dataclass(frozen=True)
class WorkloadChain:
    """A job's Workloads, by what they are for: in the end they replace one another."""

    holding: Workload | None = None
    """The newest that has quota."""
    asking: Workload | None = None
    """The one that waits for quota; beside one that holds some, it takes its place."""
    granting: Workload | None = None
    """The one whose pods may run: the one that holds, or while that is not admitted yet, its predecessor."""
    others: tuple[Workload, ...] = ()
    """Those that are of no use any more."""


def chain_of(workloads: Sequence[Workload], uid: str) -> WorkloadChain:
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
    return WorkloadChain(holding, asking, granting, tuple(w for w in own if w.name not in used))


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


_PATIENT = ("Preempted", "NodeFailures")
"""Reasons of an eviction after which Kueue queues the Workload again at once; after others it waits for a cause."""


@dataclass(frozen=True)
class CreateWorkload(AdmissionAction):
    manifest: Object


@dataclass(frozen=True)
class PatchWorkload(AdmissionAction):
    """Change a Workload as it was seen, or its status; not a newer version of it, nor another one of its name."""

    name: str
    body: Object
    subresource: Literal["status"] | None = None


@dataclass(frozen=True)
class DeleteWorkload(AdmissionAction):
    name: str
    uid: str


@dataclass(frozen=True)
class QuotaRequest:
    job: Job
    """As its user has it."""
    asked: Job
    """As it is without Kueue: what Kueue is asked for."""
    pods: tuple[Pod, ...]
    kueue: Kueue
    settings: OperatorSettings
    now: float
    sound: bool
    """Whether the specification makes sense."""
    waits: bool
    """Whether the job is to have no workers until it is admitted."""


def keep_workloads(request: QuotaRequest, draft: Draft, status: JobStatus) -> None:
    """Ask Kueue for what the job is to have, give back what it has left, and say how it does."""
    kueue, job = request.kueue, request.job
    if kueue.trouble:
        return
    chain = chain_of(kueue.workloads, job.uid)
    own = [w for w in kueue.workloads if w.owner == job.uid and not w.deleting]
    pods = [pod for pod in request.pods if pod.owner == job.uid and not pod.finished]
    if status.finished:
        for workload in own:
            if not pods and not workload.finished:
                _finish(draft, workload, status, request.now)
        return
    if job.spec.suspend or not follows_kueue(job, kueue):
        # Without quota it may go at once; one that has some goes with the last pod.
        for workload in own:
            if not pods or workload is not chain.holding:
                _delete(draft, workload)
        return
    for workload in chain.others:
        _delete(draft, workload)
    lacking = bool(kueue_priority(job)) and kueue.priority is None
    if lacking or kueue.refused or None in kueue.flavors.values():
        draft.wake(request.now + request.settings.kueue_reread)  # nothing tells when that is mended
    if chain.holding is not None and (chain.holding.evicted or request.waits):
        _leave(request, draft, chain, alone=not pods)
    elif not request.sound or lacking:
        return
    elif chain.holding is not None:
        _keep(request, draft, chain, status)
    elif chain.asking is not None:
        _renew(request, draft, chain.asking, kueue)
    elif not pods:
        _create(request, draft, _first_sets(request), None)


def _first_sets(request: QuotaRequest) -> dict[str, PodSet]:
    """What a job without quota asks for: all that it is to have, or fewer; an elastic one its minimum, to grow then."""
    job, spec = request.asked, request.asked.spec
    elastic = is_elastic(job.raw)
    workers = min(max(spec.min_replicas, 1), spec.desired) if elastic else spec.desired
    return ask_for(job, spread(workers, spec.worker_groups), elastic=elastic)


def _leave(request: QuotaRequest, draft: Draft, chain: WorkloadChain, *, alone: bool) -> None:
    """The workers leave; the quota goes back with the last pod."""
    held = chain.holding
    assert held is not None
    if chain.asking is not None:
        _delete(draft, chain.asking)
    if not alone:
        return
    if held.shape != pod_sets_hash(request.job) and request.sound:
        _delete(draft, held)  # and the next decision asks for what is wanted now
    elif held.condition("Evicted").true:
        _clear_admission(draft, held, request.now)


def _keep(request: QuotaRequest, draft: Draft, chain: WorkloadChain, status: JobStatus) -> None:
    """With quota: hand back what is left over, and ask for what is missing."""
    held = chain.holding
    assert held is not None
    if not held.admitted:
        return
    caps = {name: count for name, count in admitted_counts(held).items() if name != COORDINATOR}
    total, desired = sum(caps.values()), request.asked.spec.desired
    kept = _kept(request, draft, caps, total - desired)
    news: Object = {}
    conditions = _with_readiness(held, status, request.now)
    if conditions is not None:
        news["conditions"] = conditions
    if kept != caps and not held.elastic:
        news["reclaimablePods"] = _reclaimable(held, kept)
    if kept != caps and held.elastic:
        _patch(draft, held, {"spec": {"podSets": recount(held.raw["spec"]["podSets"], kept)}})
    elif news:
        _patch(draft, held, {"status": news}, "status")
    if held.elastic and desired > total:
        _grow(request, draft, chain, caps)
    elif chain.asking is not None:
        _delete(draft, chain.asking)


def _kept(request: QuotaRequest, draft: Draft, caps: Mapping[str, int], surplus: int) -> dict[str, int]:
    """How many of each group go on: quota is handed back of pods that are gone, of less preferred groups first."""
    kept = dict(caps)
    here = (pod for pod in request.pods if pod.owner == request.job.uid and pod.role == WORKER and not pod.finished)
    present = Counter(pod.group for pod in here)
    made = (action for action in draft.actions if isinstance(action, CreatePod) and action.role == WORKER)
    present.update(action.manifest["metadata"]["labels"][LABEL_GROUP] for action in made)
    for group in reversed(request.asked.spec.worker_groups):
        free = max(min(kept.get(group.name, 0) - present[group.name], surplus), 0)
        kept[group.name] = kept.get(group.name, 0) - free
        surplus -= free
    return kept


def _reclaimable(held: Workload, kept: Mapping[str, int]) -> list[Object]:
    """The pods that need no quota any more; of a set that was admitted in part, also those that never came."""
    counts = {
        name: max(asked.count - kept[name], held.reclaimable.get(name, 0))
        for name, asked in held.pod_sets.items()
        if name in kept and (kept[name] < held.assignments[name].count or name in held.reclaimable)
    }
    return [{"name": name, "count": count} for name, count in counts.items()]


def _grow(request: QuotaRequest, draft: Draft, chain: WorkloadChain, caps: Mapping[str, int]) -> None:
    """Ask for the missing workers by a Workload that is to take the place of the present one.

    First for all of them, and after each while without quota for half as many: what is free is used in the end, and a
    job that is to become large does not ask for one worker after the other.
    """
    held, asking, spec = chain.holding, chain.asking, request.asked.spec
    assert held is not None
    total = sum(caps.values())
    halvings = int(max(request.now - asking.created, 0.0) // _PATIENCE) if asking is not None else 0
    more = max((spec.desired - total) >> halvings, 1)
    sets = ask_for(request.asked, spread(total + more, spec.worker_groups, caps), elastic=True)
    if asking is None:
        _create(request, draft, sets, held)
        return
    if more > 1:
        draft.wake(asking.created + _PATIENCE * (halvings + 1))
    if {name: asked.count for name, asked in sets.items()} != {n: a.count for n, a in asking.pod_sets.items()}:
        counts = {name: asked.count for name, asked in sets.items()}
        _patch(draft, asking, {"spec": {"podSets": recount(asking.raw["spec"]["podSets"], counts)}})


def _renew(request: QuotaRequest, draft: Draft, asking: Workload, kueue: Kueue) -> None:
    """Without quota everything may change: keep what is asked for as it is wanted now."""
    job = request.asked
    if any(asking.reclaimable.values()):  # first: there must not be more of them than pods
        _patch(draft, asking, {"status": {"reclaimablePods": None}}, "status")
        return
    sets = _first_sets(request)
    wanted = _spec(request, sets, kueue)
    same = (
        dict(asking.pod_sets) == sets
        and asking.shape == pod_sets_hash(request.job)
        and asking.queue == kueue_queue(job)
        and asking.elastic == is_elastic(job.raw)
        and (asking.priority, asking.priority_class) == (wanted["priority"], kueue_priority(job))
        and not asking.replaces
    )
    if not same:
        first = asking.first or asking.name
        annotations = {**_annotations(request, first, elastic=is_elastic(job.raw)), ANNOTATION_KUEUE_REPLACES: None}
        spec = {"priorityClassRef": None, **wanted}
        _patch(draft, asking, {"metadata": {"annotations": annotations}, "spec": spec})


def _create(request: QuotaRequest, draft: Draft, sets: Mapping[str, PodSet], after: Workload | None) -> None:
    job, kueue = request.asked, request.kueue
    name = workload_name(job, after.name if after is not None else "")
    first = name if after is None else after.first or after.name
    annotations = _annotations(request, first, elastic=after is not None or is_elastic(job.raw))
    spec = _spec(request, sets, kueue)
    if after is not None:
        annotations[ANNOTATION_KUEUE_REPLACES] = after.key
        spec["queueName"] = after.queue
    metadata = manifests.workload_metadata(job, name)
    metadata["labels"][LABEL_KUEUE_JOB] = job.uid
    metadata["annotations"] = {key: value for key, value in annotations.items() if value is not None}
    draft.actions.append(
        CreateWorkload(
            {"apiVersion": f"{KUEUE_GROUP}/{KUEUE_VERSION}", "kind": "Workload", "metadata": metadata, "spec": spec}
        )
    )


def _annotations(request: QuotaRequest, first: str, *, elastic: bool) -> dict[str, str | None]:
    """What a Workload says of itself; ``None``: it has no such annotation."""
    return {
        ANNOTATION_POD_SETS: pod_sets_hash(request.job),
        ANNOTATION_KUEUE_ELASTIC: "true" if elastic else None,
        ANNOTATION_KUEUE_SLICE: first if elastic else None,
    }


def _spec(request: QuotaRequest, sets: Mapping[str, PodSet], kueue: Kueue) -> Object:
    job = request.asked
    spec: Object = {"queueName": kueue_queue(job), "podSets": write_pod_sets(job, sets, request.settings)}
    name = kueue_priority(job)
    spec["priority"] = job.spec.priority if kueue.priority is None else kueue.priority
    if name:
        spec["priorityClassRef"] = {"group": KUEUE_GROUP, "kind": "WorkloadPriorityClass", "name": name}
    return spec


# --- a Workload's status ----------------------------------------------------------------------------------------------


def _finish(draft: Draft, workload: Workload, status: JobStatus, now: float) -> None:
    """Say that the job is over, and how: Kueue takes its quota back."""
    complete = status.phase == "Complete"
    last = status.condition("Complete" if complete else "Failed")
    message = last.message if last is not None else "The job is over."
    conditions = _amended(workload, ("Finished", "True", "Succeeded" if complete else "Failed", message), now)
    _patch(draft, workload, {"status": {"conditions": conditions}}, "status")


def _clear_admission(draft: Draft, workload: Workload, now: float) -> None:
    """Give the quota back after an eviction: no pod is left. Kueue queues it again."""
    evicted = workload.condition("Evicted")
    message = evicted.message or "It was evicted."
    again = "True" if evicted.reason in _PATIENT else "False"
    conditions = _amended(
        workload,
        ("QuotaReserved", "False", "Pending", message),
        now,
        ("Admitted", "False", "NoReservation", "The workload has no reservation"),
        ("Requeued", again, evicted.reason or "Evicted", message),
    )
    cleared = {"admission": None, "reclaimablePods": None, "conditions": conditions}
    _patch(draft, workload, {"status": cleared}, "status")


def _with_readiness(held: Workload, status: JobStatus, now: float) -> list[Object] | None:
    """The conditions with the present ``PodsReady``; ``None``: they say it already.

    A job is ready when it trains with ``minReplicas`` workers: it does not wait for more, so neither must Kueue.
    """
    ready, before = status.condition("Ready"), held.condition("PodsReady")
    if ready is None or ready.status == "Unknown":
        return None
    if ready.status == "True":
        again = before.reason in ("WaitForRecovery", "Recovered")
        wanted = ("PodsReady", "True", "Recovered" if again else "Started", "The job trains")
    else:
        was = before.true or before.reason == "WaitForRecovery"
        wanted = ("PodsReady", "False", "WaitForRecovery" if was else "WaitForStart", "Fewer than minReplicas train")
    if (before.status, before.reason) == wanted[1:3]:
        return None
    return _amended(held, wanted, now)


def _amended(
    workload: Workload, first: tuple[str, str, str, str], now: float, *more: tuple[str, str, str, str]
) -> list[Object]:
    """All conditions of a Workload, with these as they are to be."""
    metadata, status = workload.raw["metadata"], workload.raw.get("status") or {}
    conditions = {entry["type"]: entry for entry in status.get("conditions") or []}
    for kind, truth, reason, message in (first, *more):
        known = conditions.get(kind)
        since = known["lastTransitionTime"] if known is not None and known["status"] == truth else format_time(now)
        conditions[kind] = {
            "type": kind,
            "status": truth,
            "reason": reason,
            "message": message[:1024],
            "lastTransitionTime": since,
            "observedGeneration": metadata.get("generation", 0),
        }
    return list(conditions.values())


def _patch(draft: Draft, workload: Workload, change: Mapping[str, Any], subresource: Any = None) -> None:
    version = workload.raw["metadata"].get("resourceVersion")
    metadata = {**change.get("metadata", {}), "uid": workload.uid, "resourceVersion": version}
    draft.actions.append(PatchWorkload(workload.name, {**change, "metadata": metadata}, subresource))


def _delete(draft: Draft, workload: Workload) -> None:
    draft.actions.append(DeleteWorkload(workload.name, workload.uid))

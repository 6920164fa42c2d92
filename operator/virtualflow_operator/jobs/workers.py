"""A running job has as many workers as it is to have, made from templates that the API server takes.

The coordinator hears of workers that will be lost, or are. Losses that are announced become drains; those that have
happened are told at once, so that the others need not wait for a heartbeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from virtualflow.protocol.http_api import DrainCall, GoneCall
from virtualflow.protocol.settings import MAX_REASON
from virtualflow.protocol.wording import counted
from virtualflow_operator.api import Node, Object, Standing, format_time, parse_time
from virtualflow_operator.constants import TERMINATION_TAINTS, WORKER
from virtualflow_operator.jobs import manifests
from virtualflow_operator.jobs.actions import (
    FAILED_GRACE,
    LINGER_GRACE,
    CheckTemplates,
    CreatePod,
    Draft,
    EventMessage,
    ReadEvents,
)
from virtualflow_operator.jobs.identities import name_identity, restore_identities
from virtualflow_operator.jobs.node_fit import could_take
from virtualflow_operator.jobs.pod_classification import LEFT, ClassifiedPod, has_left
from virtualflow_operator.jobs.scene import JobFacts
from virtualflow_operator.jobs.worker_plan import WorkerPlan, plan_workers

_RELIEVED: tuple[Standing, ...] = ("starting", "ready", "training")
"""Workers that may need to be told that they will be taken away."""
_PRESENT: tuple[Standing, ...] = ("starting", "ready", "training", "draining", "silent")
"""Workers that the coordinator counts on, or waits for."""
_POD_GONE = "its pod does not exist any more"
_PREFERENCE = 100
"""The weight of a preference for nodes: the most that Kubernetes knows."""
_OF_OBJECTS = frozenset(
    {
        *("creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers", "generateName"),
        *("generation", "managedFields", "resourceVersion", "selfLink", "uid"),
    }
)
"""Fields of metadata that each kind has, and that a template says in vain."""
_UNSCHEDULABLE = "node.kubernetes.io/unschedulable"


def delete_former_attempts(facts: JobFacts, draft: Draft) -> None:
    """Pods of earlier attempts go before there are new ones."""
    for pod in facts.pods.stale:
        if not pod.terminating:
            draft.delete(pod, "of an earlier attempt", "attempt", FAILED_GRACE if pod.holds_devices else None)


def templates_accepted(facts: JobFacts, draft: Draft) -> bool:
    """Whether the API server takes pods of these templates; without an answer, ask."""
    wanted, verdict = facts.hashes.all, facts.scene.verdict
    if draft.status.template_hash == wanted:
        return True
    if verdict is not None and verdict.template_hash == wanted:
        if not verdict.error:
            draft.amend(template_hash=wanted)
            return True
        retry = verdict.at + facts.settings.template_retry
        if facts.now < retry:
            draft.wake(retry)
            return False
    identity = name_identity(facts, "check")
    pods = [
        manifests.worker_pod(draft.job, group, 0, "127.0.0.1", facts.settings, identity)
        for group in facts.spec.worker_groups
    ]
    for pod in pods:
        facts.admitted.placement.complete_template(pod)
    pods.append(manifests.coordinator_pod(draft.job, 0, facts.settings, identity))
    templates = [*(group.template for group in facts.spec.worker_groups), facts.spec.coordinator.template]
    for pod, template in zip(pods, templates, strict=True):
        pod["metadata"]["name"] += "-check"  # no worker is called so: the dry run meets no existing pod
        _add_unknown(pod, template)
    draft.actions.append(CheckTemplates(tuple(pods), wanted))
    return False


def _add_unknown(pod: Object, template: Object) -> None:
    """Give a pod that is only checked what of its template goes into no pod: such as ``lables``, to be refused."""
    metadata = template.get("metadata") or {}
    pod["metadata"] |= {
        key: value for key, value in metadata.items() if key not in _OF_OBJECTS | pod["metadata"].keys()
    }
    pod |= {key: value for key, value in template.items() if key not in ("apiVersion", "kind", "metadata", "spec")}


def look_into_pods(facts: JobFacts, draft: Draft) -> None:
    """Read the events of a pod that should have started, one at a time: all wait for the same, most likely.

    What it waits for may be a Secret of the job that somebody has deleted, so these are made again.
    """
    pods = (*facts.pods.coordinators, *(worker.pod for worker in facts.pods.workers))
    for pod in pods:
        if facts.overdue(pod):
            known = facts.scene.events.get(pod.uid)
            if known is None or facts.now >= known.read_at + facts.settings.events_retry:
                draft.actions.append(ReadEvents(pod.name, pod.uid))
                # While images are pulled, all is well with the others.
                amiss = known is not None and (known.warning or not known.said)
                restore_identities(facts, draft, filter(facts.overdue, pods if amiss else (pod,)))
            else:
                draft.wake(known.read_at + facts.settings.events_retry)
            return
        if pod.live and not (pod.waiting or pod.unschedulable):
            draft.wake(pod.created + facts.settings.startup_patience)


def keep_workers(facts: JobFacts, draft: Draft, *, waiting: bool) -> WorkerPlan:
    """Make workers that are missing and relieve those that are not needed.

    Args:
        waiting: whether nothing is made yet, because of a crash.
    """
    placement = facts.admitted.placement
    lacking, apart = placement.find_lacking(facts.pods.workers, facts.spec.worker_groups, facts.scene.nodes)
    plan = plan_workers(
        facts.spec.desired,
        facts.pods.workers,
        facts.spec.worker_groups,
        facts.pods.names,
        facts.job.name,
        refused=bool(facts.scene.trouble),
        # The state of a lone worker would go with it, so its successor comes first in any case.
        surge=placement.surges or facts.spec.desired == 1,
        unfit=[unfit.group for unfit in draft.status.failures.unfit],
        kinds=lacking,
        unsuitable=apart,
        crowds=placement.crowds,
    )
    address = facts.scene.service.address if facts.scene.service is not None else ""
    # One with another token refuses new workers as well; one of another version need not.
    refused = facts.link is not None and facts.link.refused and not facts.link.incompatible
    # The training has ended for all when it has for one: whoever has not said so yet is about to.
    if address and not waiting and not refused and not facts.witnesses:
        _make(facts, draft, plan, address)
    for worker in plan.withdraw:
        reason = worker.reason if worker.fate == "planned" else "others have taken its place"
        draft.delete(worker.pod, reason, "withdrawn")
    _relieve(facts, draft, plan)
    return plan


def _make(facts: JobFacts, draft: Draft, plan: WorkerPlan, address: str) -> None:
    names = [manifests.worker_name(facts.job, new.group, new.ordinal) for new in plan.create]
    made = [
        (
            new,
            manifests.worker_pod(
                draft.job, new.group, new.ordinal, address, facts.settings, name_identity(facts, name)
            ),
        )
        for new, name in zip(plan.create, names, strict=True)
    ]
    facts.admitted.placement.place_workers(made, facts.job, facts.pods.workers)
    leaving = _leaving_nodes(facts)
    for _, manifest in made:
        keep_off(manifest, leaving)
        keep_off_doubted(manifest, draft.status.failures.nodes, facts.scene.nodes)
        draft.actions.append(CreatePod(WORKER, manifest))


def _leaving_nodes(facts: JobFacts) -> Mapping[str, Node]:
    taints = {*TERMINATION_TAINTS, *facts.settings.extra_taints}
    return {
        name: node
        for name, node in (facts.scene.nodes or {}).items()
        if not node.gone and (node.cordoned or taints.intersection(node.taints))
    }


def _relieve(facts: JobFacts, draft: Draft, plan: WorkerPlan) -> None:
    """Relieve workers: fewer are wanted, or a successor is ready. Both by a drain, so that no step is repeated."""
    fewer = any(worker.fate != "planned" for worker in plan.retire)
    delay = facts.spec.elasticity.scale_down_delay_seconds
    if fewer and delay:
        since = parse_time(draft.status.scale_down_since) or facts.now
        draft.amend(scale_down_since=format_time(since))
        draft.wake(since + delay)
        if facts.now < since + delay:
            return
    else:
        draft.amend(scale_down_since=None)
    leaving = [(worker, worker.reason or f"{counted(facts.spec.desired, 'worker')} wanted") for worker in plan.retire]
    drain(facts, draft, leaving)
    for worker, reason in leaving:
        draft.delete(worker.pod, reason, "drain" if worker.fate == "planned" else "scale", _grace(facts, worker))


def _grace(facts: JobFacts, worker: ClassifiedPod) -> float | None:
    """Seconds for a worker to leave in; ``None``: those of its pod."""
    if facts.connected and worker.standing == "absent":
        return 1.0  # one that the coordinator does not know has nothing to hand over
    # Sidecars that never end would use up all of the pod's: a kubelet neither tells how one container of a pod that is
    # being deleted has ended, nor lets a later deletion shorten the time that it waits for the others.
    return facts.spec.elasticity.drain_grace_seconds + LINGER_GRACE if worker.pod.accompanied else None


# --- nodes that new workers keep off ----------------------------------------------------------------------------------


def keep_off(pod: Object, nodes: Mapping[str, Node]) -> None:
    """Keep a new worker off nodes that workers are taken from, where its template tolerates what the taints say.

    Without that, it may be scheduled to the very node that its predecessor leaves, again and again.
    """
    spec = pod["spec"]
    tolerated = {toleration.get("key") for toleration in spec.get("tolerations") or []}
    names = [
        name
        for name, node in nodes.items()
        if None in tolerated or "" in tolerated or tolerated.intersection((*node.taints, _UNSCHEDULABLE))
    ]
    if not names:
        return
    _exclude(spec, names)


def keep_off_doubted(pod: Object, doubted: Sequence[str], nodes: Mapping[str, Node] | None) -> None:
    """Keep a new worker off nodes on which a worker was found to be wrong.

    It is a demand where another node could take the worker one day, full or not: to wait is better than to be wrong.
    Where none could, or none is known, it is a preference, so that a cluster of one node goes on.

    Args:
        nodes: by name; ``None``: the operator may not look at nodes.
    """
    if not doubted:
        return
    spec = pod["spec"]
    if any(name not in doubted and could_take(spec, node) for name, node in (nodes or {}).items()):
        _exclude(spec, doubted)
        return
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(
        {"weight": _PREFERENCE, "preference": {"matchFields": _other_than(doubted)}}
    )


def _exclude(spec: Object, names: Iterable[str]) -> None:
    affinity = spec.setdefault("affinity", {})
    required = affinity.setdefault("nodeAffinity", {}).setdefault(
        "requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": []}
    )
    terms = required.setdefault("nodeSelectorTerms", [])
    for term in terms or [{}]:  # the terms are alternatives: each must say it
        term.setdefault("matchFields", []).extend(_other_than(names))
        if not terms:
            terms.append(term)


def _other_than(names: Iterable[str]) -> list[dict[str, Any]]:
    # The API server takes one value in each.
    return [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in sorted(names)]


# --- workers that will be lost, or are --------------------------------------------------------------------------------


def tell_losses(facts: JobFacts, draft: Draft) -> None:
    """Tell the coordinator whom it has lost and whom it will lose."""
    if not facts.connected:
        return
    for worker in facts.pods.of("lost", "left", "crashed", "disrupted", "refused", "unfit"):
        if worker.standing in _PRESENT:
            draft.calls.append(GoneCall(worker.pod.name, worker.incarnation or None, worker.reason[:MAX_REASON]))
            if worker.fate != "left" and worker.standing in ("training", "draining"):
                draft.recoveries.add(worker.incarnation)
            if worker.fate != "left":
                draft.events.append(EventMessage.lost(worker.pod.name, worker.reason))
    _tell_deleted(facts, draft)
    _confirm_ends(facts, draft)
    drain(facts, draft, ((worker, worker.reason) for worker in facts.pods.of("leaving", "announced")))


def _tell_deleted(facts: JobFacts, draft: Draft) -> None:
    """Workers that the coordinator counts on, and whose pods do not exist any more."""
    names = {pod.name for pod in facts.scene.pods}
    # The coordinator's word that one has left may come later than the news that its pod is deleted.
    left = {(pod.name, pod.ip) for pod in facts.scene.former if has_left(pod)}
    for known in facts.remote.workers if facts.remote is not None else ():
        if known.worker in names or known.state not in _PRESENT:
            continue
        if (known.worker, known.address) in left:
            draft.calls.append(GoneCall(known.worker, known.incarnation, LEFT))
        else:  # it was deleted by force
            draft.calls.append(GoneCall(known.worker, known.incarnation, _POD_GONE))
            if known.state in ("training", "draining"):
                draft.recoveries.add(known.incarnation)
            draft.events.append(EventMessage.lost(known.worker, _POD_GONE))


def _confirm_ends(facts: JobFacts, draft: Draft) -> None:
    """Confirm the ends of workers that the coordinator has declared lost: survivors that are no majority wait for it.

    It is enough that the deletion of the pod is recorded: this operator is the only one who confirms, and it never
    confirms the end of those who are left.
    """
    declared = [lost for lost in facts.remote.lost if not lost.ended] if facts.remote is not None else []
    there = {(worker.pod.name, worker.pod.ip): worker for worker in facts.pods.workers}
    for lost in declared:
        worker = there.get((lost.worker, lost.address))
        if worker is None or worker.pod.finished or worker.pod.terminating or worker.fate == "lost":
            draft.calls.append(GoneCall(lost.worker, lost.incarnation, lost.reason))


def drain(facts: JobFacts, draft: Draft, leaving: Iterable[tuple[ClassifiedPod, str]]) -> None:
    """Tell the coordinator that it will lose these workers, each with the reason, unless it knows."""
    if not facts.connected:
        return
    told: dict[str, list[ClassifiedPod]] = {}
    for worker, reason in leaving:
        if worker.standing in _RELIEVED:
            told.setdefault(reason, []).append(worker)
    # One call for all that leave for one reason: they leave by one change.
    for reason, workers in told.items():
        graces = [worker.pod.deleting_at - facts.now for worker in workers if worker.pod.deleting_at is not None]
        deadline = min(graces, default=float(facts.spec.elasticity.drain_grace_seconds))
        names = tuple(worker.pod.name for worker in workers)
        draft.calls.append(DrainCall(names, max(deadline, 0.0), reason[:MAX_REASON]))
        draft.events.append(EventMessage.draining(names, reason))


def delete_ended(facts: JobFacts, draft: Draft) -> None:
    """Delete the pods of workers that have ended, or that the job goes on without.

    Those that saw the end of the training stay, for their logs; but not where sidecars would keep their devices.
    """
    for worker in facts.pods.of("announced"):
        draft.delete(worker.pod, worker.reason, "drain", _grace(facts, worker))
    for worker in facts.pods.of("lost", "declared-lost"):
        counted = not worker.counts or worker.pod.uid in draft.status.failures.counted
        if counted and not worker.pod.terminating:
            draft.delete(worker.pod, worker.reason, "lost", FAILED_GRACE)
    for worker in facts.pods.of("left", "disrupted", "crashed", "refused", "unfit"):
        counted = worker.fate not in ("crashed", "refused") or worker.pod.uid in draft.status.failures.counted
        if counted and worker.pod.lingers:
            draft.end_lingering(worker.pod)
        elif counted and not worker.pod.terminating and not worker.pod.saw_the_end:
            draft.delete(worker.pod, worker.reason, worker.fate)

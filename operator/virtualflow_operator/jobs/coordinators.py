"""A running job has exactly one coordinator, with a service that leads to it; and nothing begins beside a training.

The first coordinator process of an attempt may begin with whoever comes. That it may is written into the status before
it is told, by the number of the process; so what takes its place, in another pod or in the same one, is known to do so
whatever this operator has missed. It begins nothing before all pods that may train have reached it or have ended.
"""

from __future__ import annotations

from virtualflow.protocol.http_api import BeginCall, LivingWorker, ScaleCall
from virtualflow.protocol.settings import MAX_TEXT
from virtualflow_operator.api import Pod
from virtualflow_operator.constants import COORDINATOR
from virtualflow_operator.jobs import manifests
from virtualflow_operator.jobs.actions import FAILED_GRACE, CreatePod, CreateService, Draft, EventMessage, PointService
from virtualflow_operator.jobs.identities import name_identity
from virtualflow_operator.jobs.pod_classification import find_disruption
from virtualflow_operator.jobs.scene import JobFacts

_AGAIN = 10.0
"""Seconds between two coordinators of which the first ended by itself."""


def keep_coordinator(facts: JobFacts, draft: Draft, *, accepted: bool) -> None:
    """Keep one coordinator.

    Args:
        accepted: whether the API server takes the present templates: only then is one replaced for its template.
    """
    service, pods = facts.scene.service, facts.pods
    here = [pod for pod in pods.coordinators if pod.live and not _is_lost(pod, facts, draft, accepted)]
    leads_to = service.ordinal if service is not None else None
    chosen = next((pod for pod in here if pod.ordinal == leads_to), here[0] if here else None)
    for pod in pods.coordinators:
        if pod.finished and chosen is None and facts.now < pod.created + _AGAIN:
            draft.wake(pod.created + _AGAIN)
            return  # the kubelet has refused it, and would refuse the next one as quickly
        if pod is not chosen and not pod.terminating:
            draft.delete(pod, "it is lost or not needed", "coordinator", FAILED_GRACE if pod not in here else None)
    # Workers that train have found that its version fits: an upgrade of the operator does not change it under them.
    draft.amend(coordinator_image=draft.status.coordinator_image or facts.settings.image)
    prefix = manifests.coordinator_name(facts.job)
    if chosen is not None:
        ordinal = chosen.ordinal
    else:
        ordinal = next(n for n in range(len(pods.names) + 1) if f"{prefix}-{n}" not in pods.names)
        identity = name_identity(facts, f"{prefix}-{ordinal}")
        manifest = manifests.coordinator_pod(draft.job, ordinal, facts.settings, identity)
        facts.admitted.placement.place_coordinator(manifest)
        draft.actions.append(CreatePod(COORDINATOR, manifest))
        if pods.coordinators:
            draft.events.append(EventMessage.coordinator_replaced())
    if service is None:
        called = next((worker.pod.calls for worker in pods.workers if worker.pod.live and worker.pod.calls), "")
        draft.actions.append(CreateService(manifests.service(facts.job, ordinal, called)))
    elif leads_to != ordinal:
        draft.actions.append(PointService(prefix, manifests.service_selector(facts.job, ordinal)))
    draft.amend(coordinator=f"{prefix}-{ordinal}")


def _is_lost(pod: Pod, facts: JobFacts, draft: Draft, accepted: bool) -> bool:
    if accepted and pod.template != facts.hashes.coordinator:
        return True
    link = facts.link if facts.link is not None and facts.link.pod == pod.uid else None
    if link is not None and link.connected:
        return link.status is not None and link.status.phase == "stopped"
    node = (facts.scene.nodes or {}).get(pod.node) if pod.node else None
    if node is not None and node.gone:
        return True
    if node is not None and not node.ready and not node.shutting_down:
        # Right after an outage of the API server all nodes look lost: let it answer first.
        answer_by = link.since + facts.settings.coordinator_patience if link is not None else facts.now
        draft.wake(answer_by)
        return facts.now >= answer_by
    if link is None or link.status is None or pod.phase != "Running":
        return False  # one that has never answered may be starting, or out of the operator's reach
    answer_by = link.since + facts.settings.coordinator_patience
    draft.wake(answer_by)
    return facts.now >= answer_by


def tell_who_may_train(facts: JobFacts, draft: Draft) -> None:
    """Give a coordinator that waits for it the word who else may be in a generation."""
    remote = facts.remote
    if not facts.connected or remote is None or remote.start_ticket is None:
        return
    if draft.status.start_ticket is None:
        draft.amend(start_ticket=remote.start_ticket)
    pods = may_train(facts, of_this_attempt=draft.status.start_ticket != remote.start_ticket)
    for pod in pods:
        draft.wake(pod.deleting_at)
    others = tuple(LivingWorker(pod.name, pod.ip) for pod in pods)
    draft.written_calls.append(BeginCall(remote.start_ticket, others))


def tell_scale(facts: JobFacts, draft: Draft) -> None:
    remote = facts.remote
    if not facts.connected or remote is None or remote.phase in ("done", "stopped", "failed"):
        return
    desired, minimum = facts.spec.desired, facts.spec.least
    reason = facts.admitted.decision[:MAX_TEXT]
    told = remote.wanted_reason in (reason, None)  # a coordinator of an older version knows of no reasons
    if (remote.wanted, remote.minimum) != (desired, minimum) or not told:
        draft.calls.append(ScaleCall(desired, minimum, reason))


# --- who may still be in a training -----------------------------------------------------------------------------------


def unheard(facts: JobFacts) -> list[str]:
    """Names of pods that may train, and that a coordinator waits for which knows of no training."""
    remote, first = facts.remote, facts.job.status.start_ticket
    if not facts.connected or remote is None or remote.start_ticket is None or first is None:
        return []
    here = {(worker.worker, worker.address) for worker in remote.workers if worker.state != "silent"}
    pods = may_train(facts, of_this_attempt=first != remote.start_ticket)
    return [pod.name for pod in pods if (pod.name, pod.ip) not in here]


def may_train(facts: JobFacts, *, of_this_attempt: bool) -> list[Pod]:
    """Pods that may be in a generation, or whose coordinator may let others begin.

    Args:
        of_this_attempt: whether those of the attempt under way may, and not only those of former ones.
    """
    pods = list(facts.pods.stale)
    if of_this_attempt:
        present = facts.link.pod if facts.link is not None else ""
        pods += [worker.pod for worker in facts.pods.workers]
        pods += [pod for pod in facts.pods.coordinators if pod.uid != present]
    return [pod for pod in pods if _may_run(pod, facts)]


def _may_run(pod: Pod, facts: JobFacts) -> bool:
    """Whether a process of that pod may be alive, as far as it is not taken for lost (see ``losses``)."""
    if pod.finished or not pod.node or pod.waiting:
        return False
    if pod.deleting_at is not None and facts.now >= pod.deleting_at:
        return False
    disruption = find_disruption(pod, (facts.scene.nodes or {}).get(pod.node), "absent", ())
    return disruption is None or disruption.kind != "lost"

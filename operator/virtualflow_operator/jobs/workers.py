"""A running job has as many workers as it is to have, made from templates that the API server takes."""

from __future__ import annotations

from collections.abc import Mapping

from virtualflow.protocol.wording import counted
from virtualflow_operator.api import Node, format_time, parse_time
from virtualflow_operator.constants import TERMINATION_TAINTS, WORKER
from virtualflow_operator.jobs import event_messages, manifests, template_hashes
from virtualflow_operator.jobs.actions import CheckTemplates, CreatePod
from virtualflow_operator.jobs.device_kinds import lacking_kinds, unsuitable
from virtualflow_operator.jobs.draft import FAILED_GRACE, Draft
from virtualflow_operator.jobs.kueue_pod_sets import place
from virtualflow_operator.jobs.lodging import lodge, take_turns
from virtualflow_operator.jobs.losses import drain
from virtualflow_operator.jobs.node_affinity import choose_grounds, confine, keep_off, keep_off_doubted, tells_apart
from virtualflow_operator.jobs.scene import Facts
from virtualflow_operator.jobs.worker_plan import WorkerPlan, plan_workers


def delete_former_attempts(facts: Facts, draft: Draft) -> None:
    """Pods of earlier attempts go before there are new ones."""
    for pod in facts.pods.stale:
        if not pod.terminating:
            draft.delete(pod, "of an earlier attempt", "attempt", None if pod.finished else FAILED_GRACE)


def templates_accepted(facts: Facts, draft: Draft) -> bool:
    """Whether the API server takes pods of these templates; without an answer, ask."""
    wanted, verdict = template_hashes.templates_hash(facts.job), facts.scene.verdict
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
    pods = [
        manifests.worker_pod(draft.job, group, 0, "127.0.0.1", facts.settings) for group in facts.spec.worker_groups
    ]
    if facts.scene.queue is not None and facts.scene.queue.jobs_per_device > 1:
        for pod in pods:
            take_turns(pod, facts.settings.turns_directory)
    pods.append(manifests.coordinator_pod(draft.job, 0, facts.settings))
    for pod in pods:
        pod["metadata"]["name"] += "-check"  # no worker is called so: the dry run meets no existing pod
    draft.actions.append(CheckTemplates(tuple(pods), wanted))
    return False


def keep_workers(facts: Facts, draft: Draft, *, waiting: bool) -> WorkerPlan:
    """Make workers that are missing and relieve those that are not needed.

    Args:
        facts: what there is.
        draft: what is decided.
        waiting: whether nothing is made yet, because of a crash.
    """
    given, queue = facts.kinds, facts.scene.queue
    lacking = lacking_kinds(given, facts.pods.workers)
    apart = unsuitable([*given], facts.spec.worker_groups, queue, facts.scene.nodes) if queue and lacking else ()
    plan = plan_workers(
        facts.spec.desired,
        facts.pods.workers,
        facts.spec.worker_groups,
        facts.pods.names,
        facts.job.name,
        refused=bool(facts.scene.trouble),
        # Kueue has admitted so many and no more. The state of a lone worker would go with it, so its successor comes
        # first nevertheless.
        surge=not facts.granted.kueue or facts.spec.desired == 1,
        unfit=[unfit.group for unfit in draft.status.failures.unfit],
        kinds=lacking,
        unsuitable=apart,
        crowds=facts.scene.crowds,
    )
    address = facts.scene.service.address if facts.scene.service is not None else ""
    # One with another token refuses new workers as well; one of another version need not.
    refused = facts.link is not None and facts.link.refused and not facts.link.incompatible
    # The training has ended for all when it has for one: whoever has not said so yet is about to.
    over = any(worker.pod.finished and worker.saw_the_end for worker in facts.pods.workers)
    made = _make(facts, draft, plan, address) if address and not waiting and not refused and not over else []
    for worker in plan.withdraw:
        reason = worker.reason if worker.fate == "planned" else "others have taken its place"
        draft.delete(worker.pod, reason, "withdrawn")
    _relieve(facts, draft, plan)
    if made:
        draft.events.append(event_messages.creating(made))
    return plan


def _make(facts: Facts, draft: Draft, plan: WorkerPlan, address: str) -> list[str]:
    """Make new workers; their names."""
    queue, leaving = facts.scene.queue, _leaving_nodes(facts)
    grounds = [""] * len(plan.create)
    if tells_apart(facts.spec, queue):
        grounds = choose_grounds(len(plan.create), facts.spec, facts.pods.workers)
    made = []
    for (group, ordinal, kind), ground in zip(plan.create, grounds, strict=True):
        manifest = manifests.worker_pod(draft.job, group, ordinal, address, facts.settings)
        if queue is not None:
            confine(manifest, queue, ground, kind)
            if queue.jobs_per_device > 1:
                take_turns(manifest, facts.settings.turns_directory)
            if facts.host and queue.resource is not None:
                lodge(manifest, facts.job, facts.host, queue.resource)
        placement = facts.granted.placements.get(group.name)
        if placement is not None:
            place(manifest, placement)
        keep_off(manifest, leaving)
        keep_off_doubted(manifest, draft.status.failures.nodes, facts.scene.nodes)
        draft.actions.append(CreatePod(WORKER, manifest))
        made.append(manifest["metadata"]["name"])
    return made


def _leaving_nodes(facts: Facts) -> Mapping[str, Node]:
    """Nodes from which workers are taken away."""
    taints = {*TERMINATION_TAINTS, *facts.settings.extra_taints}
    return {
        name: node
        for name, node in (facts.scene.nodes or {}).items()
        if not node.gone and (node.cordoned or taints.intersection(node.taints))
    }


def _relieve(facts: Facts, draft: Draft, plan: WorkerPlan) -> None:
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
        # One that the coordinator does not know has nothing to hand over.
        grace = 1.0 if facts.connected and worker.standing == "absent" else None
        draft.delete(worker.pod, reason, "drain" if worker.fate == "planned" else "scale", grace)

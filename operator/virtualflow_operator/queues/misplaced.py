"""Which of a job's workers are where its queue does not have them, and who is lacking there. Pure.

A queue gives a job so many workers of each kind of device, on devices of its own or of another job. The others are
replaced: the successor comes first, and takes part before they leave.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from virtualflow_operator.api import Node, Pod, QueueSpec, WorkerGroup
from virtualflow_operator.constants import ON_DEMAND
from virtualflow_operator.jobs.node_fit import is_made_for
from virtualflow_operator.jobs.pod_classification import ClassifiedPod, PodClassification
from virtualflow_operator.queues.kinds import kind_of


def kind_of_pod(pod: Pod, queue: QueueSpec, nodes: Mapping[str, Node] | None) -> str:
    """The kind of the node that a pod is on, or what it was made for while it has none; empty: of none."""
    node = (nodes or {}).get(pod.node)
    return pod.kind if node is None or node.gone else kind_of(queue, node.labels) or ""


def sort_by_kind(
    pods: PodClassification, given: Mapping[str, int], queue: QueueSpec | None, nodes: Mapping[str, Node] | None
) -> PodClassification:
    """Note the kind of each worker, and that those are to be replaced of which the queue gives the job no more.

    Args:
        given: how many workers it is to have of each kind; empty: that is not decided, or it is to have none.
        nodes: by name; ``None``: the operator may not look at nodes.
    """
    if queue is None or not queue.kinds:
        return pods
    workers = tuple(replace(worker, kind=kind_of_pod(worker.pod, queue, nodes)) for worker in pods.workers)
    if not given:
        return replace(pods, workers=workers)
    left, misplaced = dict(given), set()
    for worker in sorted((w for w in workers if w.fate in ("healthy", "stuck")), key=_worth_keeping, reverse=True):
        if left.get(worker.kind, 0):
            left[worker.kind] -= 1
        else:
            misplaced.add(worker.pod.uid)
    lacks = sum(left.values())
    return replace(
        pods,
        workers=tuple(
            # Of a kind that the job is to have, those beyond are only too many if no other is lacking.
            _misplaced(w) if w.pod.uid in misplaced and (lacks or w.kind not in given) else w
            for w in workers
        ),
    )


def sort_by_host(pods: PodClassification, host: str, nodes: Collection[str]) -> PodClassification:
    """Note that those workers are to be replaced which are not on the devices that the queue gives the job.

    Args:
        host: namespace and name of the job on whose devices it is to compute; empty: on its own.
        nodes: where workers of the host are; empty: that is not known, and nobody goes because of it.
    """
    return replace(pods, workers=tuple(_placed(worker, host, nodes) for worker in pods.workers))


def _placed(worker: ClassifiedPod, host: str, nodes: Collection[str]) -> ClassifiedPod:
    pod = worker.pod
    away = bool(host and nodes and pod.node) and pod.node not in nodes
    if worker.fate not in ("healthy", "stuck") or (pod.host == host and not away):
        return worker
    reason = f"its queue has it compute on devices of {host}" if host else "its queue gives the job devices of its own"
    return replace(worker, fate="planned", reason=reason, misplaced=True)


def lacking_kinds(given: Mapping[str, int], workers: Sequence[ClassifiedPod]) -> list[str]:
    """The kind of each worker that the job lacks of what its queue gives it; its own kind first."""
    have = [worker.kind for worker in workers if worker.fate == "healthy"]
    return [kind for kind, count in given.items() for _ in range(count - have.count(kind))]


def unsuitable(
    kinds: Sequence[str], groups: Sequence[WorkerGroup], queue: QueueSpec, nodes: Mapping[str, Node] | None
) -> frozenset[tuple[str, str]]:
    """Worker groups, and kinds of device on which their templates may not be."""
    there: dict[str, list[Node]] = {kind: [] for kind in kinds}
    for node in (nodes or {}).values():
        covered = queue.node_selector is None or queue.node_selector.selects(node.labels)
        kind = kind_of(queue, node.labels) if covered and not node.gone else None
        if kind in there:
            there[kind].append(node)
    return frozenset(
        (group.name, kind)
        for kind, of in there.items()
        for group in groups
        if not is_made_for(group.template.get("spec") or {}, of)
    )


def _misplaced(worker: ClassifiedPod) -> ClassifiedPod:
    return replace(worker, fate="planned", reason="its queue gives the job another kind of device", misplaced=True)


def _worth_keeping(worker: ClassifiedPod) -> tuple[bool, bool, bool, bool, int]:
    """Sort key: who rather stays, last."""
    pod = worker.pod
    return worker.fate == "healthy", worker.ready, bool(pod.node), pod.ground == ON_DEMAND, -pod.ordinal

"""What a pod of a queue's worker has beside its template: where it may run, and on whose device. Pure.

The queue's nodes are required of every worker, because the queue counts on no others, and so is the kind of device of
which the queue has given it. Where a job keeps its minimum off spot nodes, each worker is made for one of the two
grounds: on-demand ones keep off spot nodes, the others prefer them.

All workers of a queue with packing know of their node's turn server, so that nobody is replaced when a lodger comes. A
lodger's worker requests no device, as the scheduler would find none free: it is put beside a worker of its host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from virtualflow.protocol.settings import ENV_TURNS
from virtualflow_operator.api import Job, JobSpec, Object, QueueSpec, Requirement
from virtualflow_operator.constants import (
    ANNOTATION_HOST,
    HOSTNAME,
    LABEL_CAPACITY,
    LABEL_JOB,
    LABEL_KIND,
    LABEL_LODGER,
    LABEL_ROLE,
    ON_DEMAND,
    SPOT,
    TURNS_MOUNT,
    TURNS_SOCKET,
    TURNS_VOLUME,
    WORKER,
)
from virtualflow_operator.jobs.pod_classification import ClassifiedPod
from virtualflow_operator.queues.kinds import opposite, terms_of

_PREFERENCE = 100
"""The weight of a preference: the most that Kubernetes knows."""
_VISIBLE = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}
"""What a device plugin would set to the device that it gives: a lodger is given none, and sees those of the node."""


def tells_apart(spec: JobSpec, queue: QueueSpec | None) -> bool:
    """Whether the job's workers are made for on-demand and for spot nodes."""
    return queue is not None and queue.spot_selector is not None and spec.elasticity.min_replicas_on == "OnDemand"


def choose_grounds(count: int, spec: JobSpec, workers: Iterable[ClassifiedPod]) -> list[str]:
    """As many on-demand ones as the minimum still lacks, then spot ones."""
    have = sum(1 for worker in workers if worker.fate == "healthy" and worker.pod.ground == ON_DEMAND)
    lacking = max(min(spec.min_replicas, spec.desired) - have, 0)
    return [ON_DEMAND if index < lacking else SPOT for index in range(count)]


def confine(pod: Object, queue: QueueSpec, ground: str = "", kind: str = "") -> None:
    """Let a worker's pod run on its queue's nodes only, on its ground, and on its kind of device.

    Args:
        ground: ``on-demand``, ``spot``, or empty where that makes no difference.
        kind: of device, or empty where the queue tells none apart.
    """
    terms: list[list[Requirement]] = (
        [list(queue.node_selector.requirements)] if queue.node_selector is not None else [[]]
    )
    spot = queue.spot_selector.requirements if queue.spot_selector is not None else ()
    if ground:
        pod["metadata"]["labels"][LABEL_CAPACITY] = ground
    if kind:
        pod["metadata"]["labels"][LABEL_KIND] = kind
        terms = [[*term, *of] for term in terms for of in terms_of(queue, kind)]
    if queue.placement == "BinPack":
        _join_workers(pod["spec"])
    if ground == ON_DEMAND and spot:
        # Off spot nodes means that one of what makes them so does not hold: terms are alternatives.
        terms = [[*term, opposite(one)] for term in terms for one in spot]
    _demand(pod["spec"], [term for term in terms if term])
    if ground == SPOT and spot:
        affinity = pod["spec"].setdefault("affinity", {}).setdefault("nodeAffinity", {})
        affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(
            {"weight": _PREFERENCE, "preference": {"matchExpressions": [_written(one) for one in spot]}}
        )


def _demand(spec: Object, terms: Sequence[Sequence[Requirement]]) -> None:
    """Demand that one of these terms holds, beside what the template demands."""
    if not terms:
        return
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    own: list[dict[str, Any]] = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), *(_written(one) for one in ours)]}
        for term in own
        for ours in terms
    ]


def _join_workers(spec: Object) -> None:
    """Prefer nodes with many workers, of whatever job: nodes that have none can then be taken away."""
    affinity = spec.setdefault("affinity", {}).setdefault("podAffinity", {})
    term = {
        "labelSelector": {"matchLabels": {LABEL_ROLE: WORKER}},
        "namespaceSelector": {},  # all of them
        "topologyKey": HOSTNAME,
    }
    affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(
        {"weight": _PREFERENCE, "podAffinityTerm": term}
    )


def _written(requirement: Requirement) -> dict[str, Any]:
    values = {"values": list(requirement.values)} if requirement.values else {}
    return {"key": requirement.key, "operator": requirement.operator, **values}


def take_turns(pod: Object, directory: str) -> None:
    """Tell a worker of its node's turn server.

    Args:
        directory: where that listens, on the node.
    """
    spec = pod["spec"]
    container = spec["containers"][0]
    # A template's own variable of that name comes later, and counts.
    container["env"].insert(0, {"name": ENV_TURNS, "value": f"{TURNS_MOUNT}/{TURNS_SOCKET}"})
    # To connect is no writing: nobody can put another socket there.
    mount = {"name": TURNS_VOLUME, "mountPath": TURNS_MOUNT, "readOnly": True}
    container.setdefault("volumeMounts", []).append(mount)
    path = {"path": directory, "type": "DirectoryOrCreate"}
    spec.setdefault("volumes", []).append({"name": TURNS_VOLUME, "hostPath": path})


def lodge(pod: Object, job: Job, host: str, resource: str) -> None:
    """Put a worker beside one of its host, on the device there.

    Args:
        host: namespace and name of the host.
        resource: the devices, as the queue counts them.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    metadata["labels"][LABEL_LODGER] = job.uid
    metadata["annotations"][ANNOTATION_HOST] = host
    for part in (spec, *spec["containers"], *(spec.get("initContainers") or [])):
        for amounts in (part.get("resources") or {}).values():
            if isinstance(amounts, dict):
                amounts.pop(resource, None)
    if resource.startswith("nvidia.com/"):
        spec["containers"][0]["env"].insert(0, _VISIBLE)
    # What admission adds for those who request the device.
    spec.setdefault("tolerations", []).append({"key": resource, "operator": "Exists"})
    namespace, _, name = host.partition("/")
    beside = {"matchLabels": {LABEL_JOB: name, LABEL_ROLE: WORKER}}
    others = [
        {"key": LABEL_LODGER, "operator": "Exists"},
        {"key": LABEL_LODGER, "operator": "NotIn", "values": [job.uid]},
    ]
    _require(spec, "podAffinity", {"labelSelector": beside, "namespaces": [namespace], "topologyKey": HOSTNAME})
    off = {"labelSelector": {"matchExpressions": others}, "namespaceSelector": {}, "topologyKey": HOSTNAME}
    _require(spec, "podAntiAffinity", off)
    apart = {"labelSelector": {"matchLabels": {LABEL_LODGER: job.uid}}, "topologyKey": HOSTNAME}
    spec["affinity"]["podAntiAffinity"].setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(
        {"weight": 100, "podAffinityTerm": apart}
    )


def _require(spec: Object, kind: str, term: dict[str, Any]) -> None:
    affinity = spec.setdefault("affinity", {}).setdefault(kind, {})
    affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", []).append(term)

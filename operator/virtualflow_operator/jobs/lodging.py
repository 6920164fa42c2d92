"""Workers on devices that jobs share in turns: what their pods have more, or less, and who is to be replaced. Pure.

All workers of a queue with packing know of their node's turn server, so that nobody is replaced when a lodger comes. A
lodger's worker requests no device, as the scheduler would find none free: it is put beside a worker of its host.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from virtualflow.protocol.settings import ENV_TURNS
from virtualflow_operator.api import Job, Object
from virtualflow_operator.constants import (
    ANNOTATION_HOST,
    HOSTNAME,
    LABEL_JOB,
    LABEL_LODGER,
    LABEL_ROLE,
    TURNS_MOUNT,
    TURNS_SOCKET,
    TURNS_VOLUME,
    WORKER,
)
from virtualflow_operator.jobs.pod_classification import ClassifiedPod, PodClassification

_VISIBLE = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}
"""What a device plugin would set to the device that it gives: a lodger is given none, and sees those of the node."""


def take_turns(pod: Object, directory: str) -> None:
    """Tell a worker of its node's turn server.

    Args:
        pod: its manifest, which is changed.
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
        pod: its manifest, which is changed.
        job: whose it is.
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


def sort_by_host(pods: PodClassification, host: str, nodes: Collection[str]) -> PodClassification:
    """Note that those workers are to be replaced which are not on the devices that the queue gives the job.

    Args:
        pods: of the job.
        host: namespace and name of the job on whose devices it is to compute; empty: on its own.
        nodes: where workers of the host are; empty: that is not known, and nobody goes because of it.
    """
    return replace(pods, workers=tuple(_sorted(worker, host, nodes) for worker in pods.workers))


def _sorted(worker: ClassifiedPod, host: str, nodes: Collection[str]) -> ClassifiedPod:
    pod = worker.pod
    away = bool(host and nodes and pod.node) and pod.node not in nodes
    if worker.fate not in ("healthy", "stuck") or (pod.host == host and not away):
        return worker
    reason = f"its queue has it compute on devices of {host}" if host else "its queue gives the job devices of its own"
    return replace(worker, fate="planned", reason=reason, misplaced=True)

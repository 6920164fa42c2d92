"""Which nodes a worker of a queue may run on, and on which it rather is: affinity in its pod. Pure.

The queue's nodes are demanded of every worker, because the queue counts on no others, and so is the kind of device of
which the queue has given it. Where a job keeps its minimum off
spot nodes, each worker is made for one of the two grounds: on-demand ones keep off spot nodes, the others prefer them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from virtualflow_operator.api import Demand, JobSpec, Node, Object, QueueSpec
from virtualflow_operator.constants import HOSTNAME, LABEL_CAPACITY, LABEL_KIND, LABEL_ROLE, ON_DEMAND, SPOT, WORKER
from virtualflow_operator.jobs.pod_classification import ClassifiedPod
from virtualflow_operator.queues import could_take, opposite, terms_of

_PREFERENCE = 100
"""The weight of a preference: the most that Kubernetes knows."""
_UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
"""The taint of a cordoned node."""


def tells_apart(spec: JobSpec, queue: QueueSpec | None) -> bool:
    """Whether the job's workers are made for on-demand and for spot nodes."""
    return queue is not None and queue.spot_selector is not None and spec.elasticity.min_replicas_on == "OnDemand"


def choose_grounds(count: int, spec: JobSpec, workers: Iterable[ClassifiedPod]) -> list[str]:
    """The ground of each of ``count`` new workers: as many on-demand ones as the minimum still lacks, then spot ones.

    Args:
        count: how many are made.
        spec: the job's.
        workers: those that it has.
    """
    have = sum(1 for worker in workers if worker.fate == "healthy" and worker.pod.ground == ON_DEMAND)
    lacking = max(min(spec.min_replicas, spec.desired) - have, 0)
    return [ON_DEMAND if index < lacking else SPOT for index in range(count)]


def confine(pod: Object, queue: QueueSpec, ground: str = "", kind: str = "") -> None:
    """Let a worker's pod run on its queue's nodes only, on its ground, and on its kind of device.

    Args:
        pod: its manifest, which is changed.
        queue: the queue's spec.
        ground: ``on-demand``, ``spot``, or empty where that makes no difference.
        kind: of device, or empty where the queue tells none apart.
    """
    terms: list[list[Demand]] = [list(queue.node_selector.demands)] if queue.node_selector is not None else [[]]
    spot = queue.spot_selector.demands if queue.spot_selector is not None else ()
    if ground:
        pod["metadata"]["labels"][LABEL_CAPACITY] = ground
    if kind:
        pod["metadata"]["labels"][LABEL_KIND] = kind
        terms = [[*term, *of] for term in terms for of in terms_of(queue, kind)]
    if queue.placement == "BinPack":
        _join_workers(pod["spec"])
    if ground == ON_DEMAND and spot:
        # Off spot nodes means that one of what makes them so does not hold: terms are alternatives.
        terms = [[*term, opposite(demand)] for term in terms for demand in spot]
    _demand(pod["spec"], [term for term in terms if term])
    if ground == SPOT and spot:
        affinity = pod["spec"].setdefault("affinity", {}).setdefault("nodeAffinity", {})
        affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(
            {"weight": _PREFERENCE, "preference": {"matchExpressions": [_written(demand) for demand in spot]}}
        )


def _demand(spec: Object, terms: Sequence[Sequence[Demand]]) -> None:
    """Demand that one of these terms holds, beside what the template demands."""
    if not terms:
        return
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    own: list[dict[str, Any]] = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), *(_written(demand) for demand in ours)]}
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


def _written(demand: Demand) -> dict[str, Any]:
    values = {"values": list(demand.values)} if demand.values else {}
    return {"key": demand.key, "operator": demand.operator, **values}


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
        pod: its manifest, which is changed.
        doubted: their names.
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
    """Demand a node of another name."""
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

"""Whether any node could ever take a pod, by what both name. Pure.

The scheduler says that a pod fits nowhere now; this says when it never will, because every node is too small, or
whether a certain one might, once it has room.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

import msgspec

from virtualflow_operator.api import Demand, Node, Object, Pod, parse_quantity, pod_requests, total
from virtualflow_operator.queues import unfitness


def never_fits(pod: Pod, nodes: Mapping[str, Node] | None) -> str:
    """Which of the pod's requests is larger than the largest node, in words; empty if none is."""
    here = [node for node in (nodes or {}).values() if not node.gone]
    if not here:
        return ""
    for resource in dict.fromkeys(name for requests in pod.requests for name in requests):
        texts = [requests[resource] for requests in pod.requests if resource in requests]
        wanted = total(pod.requests, resource)
        sizes = [(parse_quantity(node.allocatable.get(resource, "0")) or Decimal(0), node) for node in here]
        size, largest = max(sizes, key=lambda pair: pair[0])
        if wanted > size:
            offered = largest.allocatable.get(resource, "0")
            return (
                f"it requests {resource}={'+'.join(texts)} and the largest node has {offered}; lower "
                "resources.requests in its template or add a larger node"
            )
    return ""


def could_take(spec: Object, node: Node) -> bool:
    """Whether a node could take a pod if nothing else ran there; no, where that cannot be told.

    Args:
        spec: the pod's, as its manifest has it.
        node: any.
    """
    tolerated = frozenset(str(toleration.get("key") or "") for toleration in spec.get("tolerations") or [])
    selector = spec.get("nodeSelector") or {}
    if node.gone or unfitness(node, [tolerated]) or not selector.items() <= node.labels.items():
        return False
    requests = pod_requests(spec)
    for resource in {name for request in requests for name in request}:
        if total(requests, resource) > (parse_quantity(node.allocatable.get(resource, "0")) or Decimal(0)):
            return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or []
    return not terms or any(_selects(term, node) for term in terms)


def _selects(term: Object, node: Node) -> bool:
    for field in term.get("matchFields") or []:
        if (node.name in field.get("values", ())) != (field.get("operator") == "In"):
            return False
    try:
        demands = msgspec.convert(term.get("matchExpressions") or [], list[Demand])
    except msgspec.ValidationError:  # Gt and Lt
        return False
    return all(demand.met_by(node.labels) for demand in demands)

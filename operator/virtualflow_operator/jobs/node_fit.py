"""Whether no node could ever take a pod. Pure.

The scheduler says that a pod fits nowhere now; this says when it never will, because every node is too small.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from virtualflow_operator.api import Node, Pod, parse_quantity, total


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

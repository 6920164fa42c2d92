"""Whether any node could ever take a pod, by the sizes that both name. Pure.

The scheduler says that a pod fits nowhere now; this says when it never will, because every node is too small.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from virtualflow_operator.view import Node, Pod

_SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10) ** 3, "M": Decimal(10) ** 6, "G": Decimal(10) ** 9, "T": Decimal(10) ** 12, "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10, "Mi": Decimal(2) ** 20, "Gi": Decimal(2) ** 30, "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50, "Ei": Decimal(2) ** 60,
}  # fmt: skip


_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?)([numkMGTPE]?|[KMGTPE]i)")


def parse_quantity(text: str | float) -> Decimal | None:
    """The number that a Kubernetes quantity stands for; ``None`` for what is none."""
    found = _QUANTITY.fullmatch(str(text).strip())
    return None if found is None else Decimal(found[1]) * _SUFFIXES[found[2]]


def never_fits(pod: Pod, nodes: Mapping[str, Node] | None) -> str:
    """Which of the pod's requests is larger than the largest node, in words; empty if none is."""
    here = [node for node in (nodes or {}).values() if not node.gone]
    if not here:
        return ""
    for resource in dict.fromkeys(name for requests in pod.requests for name in requests):
        texts = [requests[resource] for requests in pod.requests if resource in requests]
        wanted = sum((parse_quantity(text) or Decimal(0) for text in texts), Decimal(0))
        sizes = [(parse_quantity(node.allocatable.get(resource, "0")) or Decimal(0), node) for node in here]
        size, largest = max(sizes, key=lambda pair: pair[0])
        if wanted > size:
            offered = largest.allocatable.get(resource, "0")
            return (
                f"it requests {resource}={'+'.join(texts)} and the largest node has {offered}; lower "
                "resources.requests in its template or add a larger node"
            )
    return ""

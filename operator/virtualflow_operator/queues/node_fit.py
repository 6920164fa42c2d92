"""Whether a node could ever take a pod, by what both name. Pure.

A template is its user's: whatever stands in it, the answer is yes or no.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import msgspec

from virtualflow_operator.api import Demand, Node, Object, parse_quantity, pod_requests, total
from virtualflow_operator.queues.capacity import KUBERNETES_TAINTS, tolerated_keys, unfitness


class _Term(msgspec.Struct, frozen=True, rename="camel"):
    match_expressions: tuple[Demand, ...] = ()
    match_fields: tuple[Demand, ...] = ()


class _Required(msgspec.Struct, frozen=True, rename="camel"):
    node_selector_terms: tuple[Any, ...] = ()


class _NodeAffinity(msgspec.Struct, frozen=True, rename="camel"):
    required: _Required | None = msgspec.field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)


class _Affinity(msgspec.Struct, frozen=True, rename="camel"):
    node_affinity: _NodeAffinity | None = None


class _Wishes(msgspec.Struct, frozen=True, rename="camel"):
    """What a pod says of its node."""

    node_selector: dict[str, str] | None = None
    affinity: _Affinity | None = None

    @property
    def terms(self) -> tuple[Any, ...]:
        """Alternatives of which its node is to meet one."""
        of = self.affinity.node_affinity if self.affinity is not None else None
        return of.required.node_selector_terms if of is not None and of.required is not None else ()


def could_take(spec: Object, node: Node) -> bool:
    """Whether a node could take a pod if nothing else ran there; no, where that cannot be told.

    Args:
        spec: the pod's, as its manifest has it.
        node: any.
    """
    fit = not node.gone and not unfitness(node, [tolerated_keys(spec)])
    return fit and _meets(spec, node, if_unknown=False)


def is_made_for(spec: Object, nodes: Iterable[Node]) -> bool:
    """Whether any of these nodes is one for a pod, whatever is the matter with it at present.

    Yes, where that cannot be told, and where there is none: what the next one will be like is not known.

    Args:
        spec: the pod's, as its manifest has it.
        nodes: of one kind.
    """
    there, keys = False, tolerated_keys(spec)
    for node in nodes:
        there = True
        taints = [taint for taint in node.taints if not taint.startswith(KUBERNETES_TAINTS)]
        if ("" in keys or keys.issuperset(taints)) and _meets(spec, node, if_unknown=True):
            return True
    return not there


def _meets(spec: Object, node: Node, *, if_unknown: bool) -> bool:
    """Whether the node is large enough and has the labels that the pod demands."""
    try:
        wishes = msgspec.convert(spec, _Wishes)
    except msgspec.ValidationError:
        return if_unknown
    if not (wishes.node_selector or {}).items() <= node.labels.items():
        return False
    requests = pod_requests(spec)
    for resource in {name for request in requests for name in request}:
        if total(requests, resource) > (parse_quantity(node.allocatable.get(resource, "0")) or Decimal(0)):
            return False
    return not wishes.terms or any(_selects(term, node, if_unknown=if_unknown) for term in wishes.terms)


def _selects(term: object, node: Node, *, if_unknown: bool) -> bool:
    try:
        read = msgspec.convert(term, _Term)
    except msgspec.ValidationError:  # Gt and Lt
        return if_unknown
    fields = {"metadata.name": node.name}
    return all(d.met_by(fields) for d in read.match_fields) and all(
        d.met_by(node.labels) for d in read.match_expressions
    )

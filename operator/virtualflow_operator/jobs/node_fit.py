"""Whether a node could ever take a pod, by what both name, and whether no node could. Pure.

The scheduler says what fits now; this says what never will. A template is its user's: whatever stands in it, the answer
is yes or no.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from decimal import Decimal
from typing import Any

import msgspec

from virtualflow_operator.api import Node, Object, Pod, Requirement, parse_quantity, pod_requests, total
from virtualflow_operator.constants import TERMINATION_TAINTS

KUBERNETES_TAINTS = "node.kubernetes.io/"
"""Taints of this prefix tell what is the matter with a node; workers tolerate them only by accident."""


class _Term(msgspec.Struct, frozen=True, rename="camel"):
    match_expressions: tuple[Requirement, ...] = ()
    match_fields: tuple[Requirement, ...] = ()


class _Required(msgspec.Struct, frozen=True, rename="camel"):
    node_selector_terms: tuple[Any, ...] = ()


class _NodeAffinity(msgspec.Struct, frozen=True, rename="camel"):
    required: _Required | None = msgspec.field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)


class _Affinity(msgspec.Struct, frozen=True, rename="camel"):
    node_affinity: _NodeAffinity | None = None


class _Wishes(msgspec.Struct, frozen=True, rename="camel"):
    node_selector: dict[str, str] | None = None
    affinity: _Affinity | None = None

    @property
    def terms(self) -> tuple[Any, ...]:
        """Alternatives of which its node is to meet one."""
        of = self.affinity.node_affinity if self.affinity is not None else None
        return of.required.node_selector_terms if of is not None and of.required is not None else ()


def could_take(spec: Object, node: Node) -> bool:
    """Whether a node could take a pod if nothing else ran there; no, where that cannot be told."""
    fit = not node.gone and not unfitness(node, [tolerated_keys(spec)])
    return fit and _meets(spec, node, if_unknown=False)


def is_made_for(spec: Object, nodes: Iterable[Node]) -> bool:
    """Whether any of these nodes is one for a pod, whatever is the matter with it at present.

    Yes, where that cannot be told, and where there is none: what the next one will be like is not known.
    """
    there, keys = False, tolerated_keys(spec)
    for node in nodes:
        there = True
        taints = [taint for taint in node.taints if not taint.startswith(KUBERNETES_TAINTS)]
        if ("" in keys or keys.issuperset(taints)) and _meets(spec, node, if_unknown=True):
            return True
    return not there


def _meets(spec: Object, node: Node, *, if_unknown: bool) -> bool:
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


def tolerated_keys(pod: object) -> frozenset[str]:
    """Keys of the taints that a pod with this ``spec`` tolerates; the empty key stands for all."""
    found = pod.get("tolerations") if isinstance(pod, Mapping) else None
    return frozenset(
        str(toleration.get("key") or "")
        for toleration in (found if isinstance(found, list) else [])
        if isinstance(toleration, Mapping) and toleration.get("effect") != "PreferNoSchedule"
    )


def unfitness(node: Node, tolerations: Collection[frozenset[str]], leaving: Collection[str] = ()) -> str:
    """Why no worker is to be put on a node; empty: one may be."""
    if not node.ready:
        return "it is not ready"
    if node.cordoned:
        return "it is cordoned"
    if node.shutting_down:
        return "it is shutting down"
    for taint in node.taints:
        if taint in TERMINATION_TAINTS or taint in leaving or taint.startswith(KUBERNETES_TAINTS):
            return f"it has the taint {taint}"
    # With no job to ask, the taints that keep other pods away from accelerators are taken to be tolerated.
    if node.taints and tolerations and not any("" in keys or keys.issuperset(node.taints) for keys in tolerations):
        return f"no job tolerates its taint {node.taints[0]}"
    return ""


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

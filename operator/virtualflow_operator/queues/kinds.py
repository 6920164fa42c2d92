"""Kinds of device in a queue: which nodes are of which, and which of them a job's workers are on. Pure.

A queue that tells no kinds apart has a single one without a name, to which all of its nodes belong: so there is one way
to share a queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from virtualflow_operator.api import ANY_KIND, KindSpec, QueueSpec, Requirement, Selector, SelectorOperator

MAX_TERMS = 64
"""Alternatives by which a worker may be told its kind: node affinity with more is nothing that people can read."""
_OPPOSITE: dict[SelectorOperator, SelectorOperator] = {
    "In": "NotIn",
    "NotIn": "In",
    "Exists": "DoesNotExist",
    "DoesNotExist": "Exists",
}


def kinds_of(spec: QueueSpec) -> Sequence[KindSpec]:
    return spec.kinds or (KindSpec(ANY_KIND, Selector()),)


def kind_of(spec: QueueSpec, labels: Mapping[str, str]) -> str | None:
    """The kind of a node with these labels: the first that selects it; ``None``: it is of none."""
    return next((kind.name for kind in kinds_of(spec) if kind.node_selector.selects(labels)), None)


def terms_of(spec: QueueSpec, name: str) -> list[list[Requirement]]:
    """Alternatives, of which a node meets one if it is of that kind, and only then.

    It is selected by the kind, and each kind before it demands something that does not hold of it.
    """
    terms: list[list[Requirement]] = [[]]
    for kind in kinds_of(spec):
        requirements = kind.node_selector.requirements
        if kind.name == name:
            return [[*requirements, *term] for term in terms]
        if not _excluded(requirements, _requirements(spec, name)):
            terms = [[*term, opposite(one)] for term in terms for one in requirements][: MAX_TERMS + 1]
    return []


def opposite(requirement: Requirement) -> Requirement:
    """What holds of a label where ``requirement`` does not."""
    return Requirement(requirement.key, _OPPOSITE[requirement.operator], requirement.values)


def _requirements(spec: QueueSpec, name: str) -> Sequence[Requirement]:
    return next((kind.node_selector.requirements for kind in spec.kinds if kind.name == name), ())


def _excluded(first: Iterable[Requirement], second: Sequence[Requirement]) -> bool:
    """Whether no node meets both, because they name different values of one label: so it is with most kinds."""
    return any(
        one.key == other.key and one.operator == other.operator == "In" and not set(one.values) & set(other.values)
        for one in first
        for other in second
    )


def find_fault(spec: QueueSpec) -> str:
    """What is wrong with the queue's kinds that its schema cannot say, in a sentence; empty: nothing is."""
    for kind in spec.kinds:
        terms = terms_of(spec, kind.name)
        if not terms:
            return f"No node can be of the kind {kind.name}, as one before it selects all; remove it, or put it first."
        if len(terms) > MAX_TERMS:
            return (
                f"The kind {kind.name} overlaps with those before it in more than {MAX_TERMS} ways; let its "
                "nodeSelector name another value of a label that theirs name, too."
            )
    return ""


def where_they_run(kinds: Iterable[str | None], most: int) -> tuple[str, dict[str, int]]:
    """Of which kind a job is that nobody has said it of, by its workers, and how many of these are of each kind."""
    found = Counter(kind for kind in kinds if kind is not None)
    order = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    there: dict[str, int] = {}
    for kind, count in order:
        there[kind] = min(count, most - sum(there.values()))
    return (order[0][0] if order else ANY_KIND), {kind: count for kind, count in there.items() if count > 0}

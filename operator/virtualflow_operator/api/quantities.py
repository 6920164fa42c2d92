"""What a pod takes of its node, as the scheduler counts it, and the quantities in which it is written. Pure.

A template is the user's word, which only the API server checks in full: nothing here raises, however wrong it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

_SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10) ** 3, "M": Decimal(10) ** 6, "G": Decimal(10) ** 9, "T": Decimal(10) ** 12, "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10, "Mi": Decimal(2) ** 20, "Gi": Decimal(2) ** 30, "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50, "Ei": Decimal(2) ** 60,
}  # fmt: skip

_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?)([numkMGTPE]?|[KMGTPE]i)")

Requests = tuple[Mapping[str, str], ...]
"""Quantities by resource, whose sum is what a pod takes."""


def parse_quantity(text: str | float) -> Decimal | None:
    """The number that a Kubernetes quantity stands for; ``None`` for what is none."""
    return _parse(str(text))


@lru_cache(4_096)  # thousands of pods request the same few amounts
def _parse(text: str) -> Decimal | None:
    found = _QUANTITY.fullmatch(text.strip())
    return None if found is None else Decimal(found[1]) * _SUFFIXES[found[2]]


def pod_requests(spec: object) -> Requests:
    """What a pod with this ``spec`` takes: its containers and sidecars together, or an init container if that is more.

    As Kubernetes counts ("Resource sharing within containers" in its page on init containers): those that have to end
    run one after the other, beside the sidecars that were begun before them; a limit stands for a request that is
    missing; the overhead of its runtime class comes on top.
    """
    pod = _mapping(spec)
    found = [_requests(container) for container in _mappings(pod.get("containers"))]
    sidecars: list[Mapping[str, str]] = []
    starts: list[Requests] = []
    for container in _mappings(pod.get("initContainers")):
        if container.get("restartPolicy") == "Always":
            sidecars.append(_requests(container))
        else:
            starts.append((*sidecars, _requests(container)))
    found += sidecars
    more: dict[str, str] = {}
    for start in starts:
        for resource in {name for requests in start for name in requests}:
            beyond = total(start, resource) - total((*found, more), resource)
            if beyond > 0:
                more[resource] = f"{total((more,), resource) + beyond:f}"
    overhead = {str(name): str(amount) for name, amount in _mapping(pod.get("overhead")).items()}
    return tuple(requests for requests in (*found, more, overhead) if requests)


def total(requests: Iterable[Mapping[str, str]], resource: str) -> Decimal:
    """The sum of what is requested of a resource; what is no quantity counts as nothing."""
    amounts = (parse_quantity(request[resource]) for request in requests if resource in request)
    return sum((amount for amount in amounts if amount is not None), Decimal(0))


def _requests(container: Mapping[str, Any]) -> Mapping[str, str]:
    resources = _mapping(container.get("resources"))
    amounts = {**_mapping(resources.get("limits")), **_mapping(resources.get("requests"))}
    return {str(name): str(amount) for name, amount in amounts.items()}


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []

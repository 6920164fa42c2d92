"""Fixed sizes, in a given order: what the baselines share.

A job gets the size that it asks for (or all that the empty queue has for it, if that is less), or waits. Nobody who runs is stopped for another. The first in order who does not
fit holds back all behind it: there is no backfill, so no small job can keep a large one waiting for ever. One
exception: a job that only its namespace's limit holds back holds back only its own namespace.

Where capacity has vanished under those that run, they shrink, the last in order first, and one whose minimum is gone
waits; they grow back to their size before any other starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from virtualflow_operator.scheduling.demand import Allocation, Capacity, Demand
from virtualflow_operator.scheduling.room import Room, allocation, sort_out


def place(
    demands: Sequence[Demand], capacity: Capacity, order: Callable[[Demand], Any], first: str
) -> dict[str, Allocation]:
    """Place those that run, then those that wait.

    Args:
        order: the key of the order; ties go by name.
        first: who goes first, for the reasons ("older jobs").
    """
    able, result = sort_out(list(demands), capacity)
    room = Room(capacity)
    sizes = {demand.name: min(demand.fixed, room.most(demand)) for demand in able}
    ranked = sorted(able, key=lambda demand: (order(demand), demand.name))
    for demand in (demand for demand in ranked if demand.allocated):
        workers = 0 if room.lacks(demand, demand.minimum) else min(sizes[demand.name], room.most(demand))
        if workers:
            room.start(demand, workers)
            reason = (
                "runs with its fixed size"
                if workers == sizes[demand.name]
                else (f"keeps {workers} of its {sizes[demand.name]} workers, because capacity was lost")
            )
        else:
            reason = f"waits: capacity was lost and {first} keep what is left"
        result[demand.name] = allocation(demand, workers, reason)

    blocked: str | None = None
    blocked_namespaces: dict[str, str] = {}
    for demand in (demand for demand in ranked if not demand.allocated):
        ahead = blocked or blocked_namespaces.get(demand.namespace)
        if ahead is not None:
            result[demand.name] = Allocation(0, f"waits behind {ahead}")
            continue
        size = sizes[demand.name]
        lack = room.lacks(demand, size)
        if not lack:
            room.start(demand, size)
            result[demand.name] = allocation(demand, size, "starts with its fixed size")
        elif lack == "namespace":
            blocked_namespaces[demand.namespace] = demand.name
            result[demand.name] = Allocation(
                0, f"waits: {size} workers exceed what is left of the limit of namespace {demand.namespace}"
            )
        else:
            blocked = demand.name
            result[demand.name] = Allocation(0, f"waits until {size} workers fit beside {first}")
    return result

"""What is still free while a policy hands out capacity, and in words what is in the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from virtualflow_operator.scheduling.demand import Allocation, Capacity, Demand, Shortage

Bottleneck = Literal["", "capacity", "on-demand", "namespace"]


class Room:
    """Free units: of all, of on-demand capacity, of each namespace's limit.

    Workers of a job's minimum that must be on on-demand capacity take from it; all others may be anywhere, so two sums
    are enough to say that everything has a place.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.total = capacity.total
        self.on_demand = capacity.on_demand
        self._limits = dict(capacity.limits)

    def _of(self, namespace: str) -> int:
        return min(self.total, self._limits.get(namespace, self.total))

    def most(self, demand: Demand) -> int:
        """Workers that the job could have beside what it was given here, whatever its maximum."""
        return max(0, self._of(demand.namespace)) // demand.units

    def limit(self, namespace: str) -> int:
        """Units that jobs of the namespace can still get."""
        return max(0, self._of(namespace))

    def lacks(self, demand: Demand, workers: int) -> Bottleneck:
        """What is in the way of starting the job with ``workers``; empty if they fit."""
        units = workers * demand.units
        if units > self._limits.get(demand.namespace, units):
            return "namespace"
        if units > self.total:
            return "capacity"
        if demand.minimum_on_demand and demand.minimum * demand.units > self.on_demand:
            return "on-demand"
        return ""

    def start(self, demand: Demand, workers: int) -> None:
        """Take what the job needs to run with ``workers``."""
        if demand.minimum_on_demand:
            self.on_demand -= demand.minimum * demand.units
        self.grow(demand, workers)

    def grow(self, demand: Demand, workers: int) -> None:
        """Take ``workers`` more for a job that was started here."""
        units = workers * demand.units
        self.total -= units
        if demand.namespace in self._limits:
            self._limits[demand.namespace] -= units


def sort_out(demands: Iterable[Demand], capacity: Capacity) -> tuple[list[Demand], dict[str, Allocation]]:
    """Tell the jobs that could run on the empty queue, by name, from those that never can, with the reason for these.

    Raises:
        ValueError: two jobs bear the same name.
    """
    able: list[Demand] = []
    never: dict[str, Allocation] = {}
    seen: set[str] = set()
    for demand in sorted(demands, key=lambda demand: demand.name):
        if demand.name in seen:
            raise ValueError(f"two jobs are called {demand.name}; give each a name of its own")
        seen.add(demand.name)
        lack = Room(capacity).lacks(demand, demand.minimum)
        if not lack:
            able.append(demand)
            continue
        offered, where = {
            "namespace": (capacity.limits.get(demand.namespace, 0), f"the limit of namespace {demand.namespace}"),
            "on-demand": (capacity.on_demand, "the on-demand capacity of the queue"),
        }.get(lack, (capacity.total, "the capacity of the queue"))
        shortage = Shortage(demand.minimum, demand.minimum * demand.units, offered, where)
        never[demand.name] = Allocation(0, shortage.told(), shortage=shortage)
    return able, never


def allocation(demand: Demand, workers: int, reason: str) -> Allocation:
    """An allocation with its minimum on on-demand capacity if the job asks for that."""
    return Allocation(workers, reason, min(workers, demand.minimum) if demand.minimum_on_demand else 0)

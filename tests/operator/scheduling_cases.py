"""Demands, curves and decisions in few words, for the tests of the policies."""

from __future__ import annotations

from typing import Any

from virtualflow_operator.scheduling import Allocation, Capacity, Demand, ScalingCurve, policy
from virtualflow_operator.settings import SchedulingSettings

NOW = 1_000.0
TOLD = SchedulingSettings(starvation_bound=600.0, turn=300.0)
LINEAR = ScalingCurve(((1, 1.0), (16, 16.0)))
BENT = ScalingCurve(((1, 1.0), (2, 1.9), (4, 2.9), (8, 3.1)))
"""The third and fourth worker bring half of what the first did, the others a twentieth."""


def job(name: str, maximum: int = 16, **more: Any) -> Demand:
    """A job of namespace ``red``, unless its name has another."""
    namespace, _, short = name.rpartition("/")
    given = {"namespace": namespace or "red", "submitted": NOW - 100.0 + ord(short[0]) / 100, **more}
    return Demand(f"{given['namespace']}/{short}", maximum=maximum, **given)


def running(name: str, allocated: int, maximum: int = 16, **more: Any) -> Demand:
    """One that has been running for long."""
    return job(name, maximum, **{"allocated": allocated, "since": NOW - 5_000.0, "submitted": NOW - 5_000.0, **more})


def decide(name: str, jobs: list[Demand], capacity: Capacity | int, now: float = NOW) -> dict[str, Allocation]:
    """What the policy says, by the names within the namespace."""
    capacity = Capacity(capacity) if isinstance(capacity, int) else capacity
    return {key.rpartition("/")[2]: given for key, given in policy(name)(now, jobs, capacity, TOLD).items()}


ELASTIC = ("WeightedFairShare", "ShortestFirst", "MaxThroughput")

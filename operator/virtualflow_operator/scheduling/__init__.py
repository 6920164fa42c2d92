"""Who gets how many workers of a queue: pure policies, by name.

The operator applies what they say to a cluster; the simulator runs the same functions over a trace. ``demand`` has the
types that they share.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from virtualflow.errors import ConfigurationError
from virtualflow_operator.scheduling.by_kind import decide_by_kind
from virtualflow_operator.scheduling.demand import Allocation, Capacity, Demand, Policy, RotatingPasses, ScalingCurve
from virtualflow_operator.scheduling.device_kinds import (
    DeviceKind,
    KindAllocation,
    KindDemand,
    Mobility,
    mixed_speed,
)
from virtualflow_operator.scheduling.gang import fifo, priority
from virtualflow_operator.scheduling.max_throughput import max_throughput
from virtualflow_operator.scheduling.minimums import next_change
from virtualflow_operator.scheduling.shortest_first import shortest_first
from virtualflow_operator.scheduling.weighted_fair_share import weighted_fair_share

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "FIFO": fifo,
        "Priority": priority,
        "WeightedFairShare": weighted_fair_share,
        "ShortestFirst": shortest_first,
        "MaxThroughput": max_throughput,
    }
)
"""Every policy by the name that a queue's spec gives."""

FIXED_SIZES = frozenset({"FIFO", "Priority"})
"""Those under which a job has its size or waits."""


def policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ConfigurationError: there is none; the sentence lists those that there are.
    """
    if name not in POLICIES:
        raise ConfigurationError(f"there is no policy {name!r}; give one of {', '.join(POLICIES)}")
    return POLICIES[name]

"""How a queue looks: its status, from what was decided. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from virtualflow.protocol.wording import counted
from virtualflow_operator import reasons
from virtualflow_operator.api import (
    MAX_ALLOCATIONS,
    MAX_UNSORTED,
    CapacityStatus,
    Condition,
    Given,
    JobCounts,
    KindStatus,
    PastKind,
    Queue,
    QueueStatus,
    format_time,
)
from virtualflow_operator.queues.capacity import QueueCapacity, shown
from virtualflow_operator.queues.hindrances import Obstacle

_CORRECTABLE = (reasons.INVALID_QUEUE, reasons.UNKNOWN_POLICY)
"""Reasons that go away only when somebody corrects the queue; nodes come and go by themselves."""


def build_queue_status(
    queue: Queue,
    capacity: QueueCapacity,
    *,
    given: Mapping[tuple[str, str], Mapping[str, int]],
    units: Mapping[tuple[str, str], int],
    waiting: int,
    past: tuple[PastKind, ...],
    past_until: str | None,
    obstacle: Obstacle | None,
    now: float,
) -> QueueStatus:
    """The status of a queue.

    Args:
        given: workers of each job by kind of device, by namespace and name.
        units: of a worker of each.
    """
    resource = queue.spec.resource
    running = {key: sum(kinds.values()) for key, kinds in given.items() if kinds}
    allocated: Counter[str] = Counter()
    for key, kinds in given.items():
        for kind, workers in kinds.items():
            allocated[kind] += units[key] * workers
    sharing = (
        f"{shown(capacity.total, resource)} {resource or 'workers'} are shared among the jobs of the queue by "
        f"{queue.spec.policy}."
    )
    if capacity.unsorted:
        sharing += f" {counted(len(capacity.unsorted), 'node')} of no kind: see nodesWithoutKind."
    largest = sorted(running.items(), key=lambda pair: (-pair[1], pair[0]))[:MAX_ALLOCATIONS]
    return QueueStatus(
        conditions=_conditions(queue, obstacle or Obstacle(reasons.SHARING, sharing), now),
        observed_generation=queue.generation,
        capacity=CapacityStatus(
            shown(capacity.total, resource),
            shown(capacity.on_demand, resource),
            shown(capacity.spot, resource),
            shown(capacity.used_by_others, resource),
            shown(allocated.total(), resource),
            len(capacity.nodes),
        ),
        kinds=tuple(
            KindStatus(
                name,
                shown(there.total, resource),
                shown(there.on_demand, resource),
                shown(there.spot, resource),
                shown(allocated[name], resource),
                len(there.nodes),
            )
            for name, there in capacity.kinds.items()
            if queue.spec.kinds
        ),
        nodes_without_kind=capacity.unsorted[:MAX_UNSORTED],
        jobs=JobCounts(len(running), waiting),
        allocations=tuple(Given(*key, workers) for key, workers in largest),
        past=past,
        past_until=past_until,
    )


def _conditions(queue: Queue, state: Obstacle, now: float) -> tuple[Condition, ...]:
    """``Ready``, and ``Stalled`` while kstatus is to take the queue for failed and not for one in progress."""
    truths = [("Ready", state.code == reasons.SHARING)]
    if state.code in _CORRECTABLE:
        truths.append(("Stalled", True))
    made = []
    for kind, holds in truths:
        before = next((condition for condition in queue.status.conditions if condition.type == kind), None)
        same = before is not None and (before.status == "True") == holds
        since = before.last_transition_time if before is not None and same else format_time(now)
        made.append(Condition(kind, "True" if holds else "False", state.code, state.sentence, since, queue.generation))
    return tuple(made)

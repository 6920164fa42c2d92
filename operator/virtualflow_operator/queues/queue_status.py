"""How a queue looks: its status, from what was decided. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from virtualflow_operator import reasons
from virtualflow_operator.api import (
    MAX_ALLOCATIONS,
    CapacityStatus,
    Condition,
    Given,
    JobCounts,
    PastKind,
    Queue,
    QueueStatus,
    format_time,
)
from virtualflow_operator.queues.capacity import QueueCapacity, shown
from virtualflow_operator.queues.hindrances import Obstacle


def build_queue_status(
    queue: Queue,
    capacity: QueueCapacity,
    *,
    given: Mapping[tuple[str, str], int],
    allocated: int,
    waiting: int,
    past: tuple[PastKind, ...],
    past_until: str | None,
    obstacle: Obstacle | None,
    now: float,
) -> QueueStatus:
    """The status of a queue.

    Args:
        queue: with its former status.
        capacity: what it has.
        given: workers of each job, by namespace and name.
        allocated: units that those take.
        waiting: how many jobs wait for workers.
        past: what is remembered of jobs that have completed.
        past_until: when the latest of these did.
        obstacle: why it gives out nothing, if so.
        now: Unix seconds.
    """
    resource, running = queue.spec.resource, {key: workers for key, workers in given.items() if workers}
    sharing = (
        f"{shown(capacity.total, resource)} {resource or 'workers'} are shared among the jobs of the queue by "
        f"{queue.spec.policy}."
    )
    largest = sorted(running.items(), key=lambda pair: (-pair[1], pair[0]))[:MAX_ALLOCATIONS]
    return QueueStatus(
        conditions=(_ready(queue, obstacle or Obstacle(reasons.SHARING, sharing), obstacle is None, now),),
        observed_generation=queue.generation,
        capacity=CapacityStatus(
            shown(capacity.total, resource),
            shown(capacity.on_demand, resource),
            shown(capacity.spot, resource),
            shown(capacity.used_by_others, resource),
            shown(allocated, resource),
            len(capacity.nodes),
        ),
        jobs=JobCounts(len(running), waiting),
        allocations=tuple(Given(*key, workers) for key, workers in largest),
        past=past,
        past_until=past_until,
    )


def _ready(queue: Queue, state: Obstacle, ready: bool, now: float) -> Condition:
    before = queue.status.ready
    same = before is not None and (before.status == "True") == ready
    since = before.last_transition_time if before is not None and same else format_time(now)
    return Condition("Ready", "True" if ready else "False", state.code, state.sentence, since, queue.generation)

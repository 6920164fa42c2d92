"""How a queue looks, from what was decided, and what is in the way of sharing it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.wording import counted
from virtualflow_operator import reasons
from virtualflow_operator.api import (
    MAX_ALLOCATIONS,
    MAX_UNSORTED,
    CapacityStatus,
    Condition,
    Given,
    Job,
    JobCounts,
    KindStatus,
    PastKind,
    Queue,
    QueueStatus,
    format_time,
)
from virtualflow_operator.queues.capacity import QueueCapacity, shown, worker_units
from virtualflow_operator.queues.kinds import find_fault
from virtualflow_operator.scheduling import policy

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


# --- what is in the way of sharing: with a single job, and of a queue as a whole --------------------------------------


@dataclass(frozen=True)
class Hindrance:
    """Why a job is not to be shared with."""

    code: str
    """The reason of its condition ``Allocated``."""
    sentence: str
    keeps_workers: bool = True
    """Whether it goes on with what it has."""


@dataclass(frozen=True)
class Obstacle:
    code: str
    """The reason of its condition ``Ready``."""
    sentence: str


def find_hindrance(job: Job, ceiling: int | None, resource: str | None) -> Hindrance | None:
    """Why a job is not to be shared with, if so.

    Args:
        ceiling: workers that found a node the last time, where others found none; ``None``: all did.
    """
    spec = job.spec
    if spec.suspend:
        return Hindrance(reasons.QUEUED, "the job is suspended by its user", keeps_workers=False)
    if job.faults:
        return Hindrance(reasons.INVALID_SPEC, f"its specification makes no sense: {job.faults[0]}")
    if resource is not None and not worker_units(spec, resource):
        missing = f"its workers request no {resource}, which the queue counts; add it to resources.requests"
        return Hindrance(reasons.NEVER_FITS, missing)
    least = max(spec.least, 1)
    if ceiling is not None and ceiling < least:
        homeless = (
            f"only {ceiling} of its minimum of {counted(least, 'worker')} found a node; it is tried again "
            "when nodes change, "
            "and now and then"
        )
        return Hindrance(reasons.QUEUED, homeless, keeps_workers=False)
    return None


def find_obstacle(queue: Queue, capacity: QueueCapacity, *, nodes_known: bool) -> Obstacle | None:
    resource = queue.spec.resource
    if queue.fault:
        return Obstacle(reasons.INVALID_QUEUE, queue.fault)
    try:
        policy(queue.spec.policy)
    except ConfigurationError as error:
        return Obstacle(reasons.UNKNOWN_POLICY, f"{error}.")
    if fault := find_fault(queue.spec):
        return Obstacle(reasons.INVALID_QUEUE, fault)
    if resource is None:
        return None if capacity.total else Obstacle(reasons.NO_CAPACITY, "Its capacity is 0; raise spec.capacity.")
    if not nodes_known:
        told = "The operator may not look at nodes; give it the right to list and watch them."
        return Obstacle(reasons.NODES_UNKNOWN, told)
    if not capacity.selected:
        told = "Its nodeSelector selects no node; correct it, or label the nodes that it is to cover."
        return Obstacle(reasons.NO_NODES, told)
    if len(capacity.unsorted) == capacity.selected:
        told = "None of its kinds selects any of its nodes; correct their nodeSelectors, or label the nodes."
        return Obstacle(reasons.NO_NODES, told)
    if capacity.total:
        return None
    unfit = "; ".join(f"{name}: {why}" for name, why in sorted(capacity.unfit.items())[:4])
    detail = unfit or f"they offer no {resource}, or other pods use all of it"
    return Obstacle(
        reasons.NO_CAPACITY, f"Of its {counted(capacity.selected, 'node')} none has room for a worker: {detail}."
    )

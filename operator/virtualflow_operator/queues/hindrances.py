"""What is in the way of sharing: with a single job, and of a queue as a whole. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.wording import counted
from virtualflow_operator import reasons
from virtualflow_operator.api import Job, Queue
from virtualflow_operator.queues.capacity import QueueCapacity, worker_units
from virtualflow_operator.queues.kinds import find_fault
from virtualflow_operator.scheduling import policy


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
    """Why a queue gives out nothing."""

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

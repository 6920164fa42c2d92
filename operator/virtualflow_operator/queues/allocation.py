"""One decision about one queue: what each of its jobs is given, and what the queue's status says. Pure.

The policy says how many workers each job is to have; here its arguments are made from the cluster, and its answer is
put into an order in which capacity is never exceeded: workers are taken away at once, and given once those that were
taken away have gone. What is in the way of a single job (it never fits, its specification makes no sense) is that job's
grant, and the others are shared among as if it were not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from virtualflow.protocol.wording import counted
from virtualflow_operator import reasons
from virtualflow_operator.api import Job, Node, Queue, QueueSpec, QueueStatus
from virtualflow_operator.queues.capacity import (
    QueueCapacity,
    in_words,
    measure_capacity,
    scale_of,
    tolerated,
    worker_units,
)
from virtualflow_operator.queues.grants import Grant
from virtualflow_operator.queues.hindrances import Hindrance, find_hindrance, find_obstacle
from virtualflow_operator.queues.past_jobs import count_ended, expected_left, least_workers, read_past, write_past
from virtualflow_operator.queues.queue_status import build_queue_status
from virtualflow_operator.queues.scaling_history import curve_of, efficient_limit, no_further
from virtualflow_operator.scheduling import Allocation, Capacity, Demand, next_change, policy
from virtualflow_operator.scheduling.service_time import Past
from virtualflow_operator.settings import SchedulingSettings

Key = tuple[str, str]


@dataclass(frozen=True)
class Member:
    """A job that names the queue."""

    job: Job
    grant: Grant
    """What it has at the moment."""
    submitted: float
    """When it was created, Unix seconds."""
    pods: Sequence[str] = ()
    """The node of each of its worker pods that has not ended; empty for one without a node."""
    ceiling: int | None = None
    """Workers that found a node the last time, where others found none; ``None``: all did."""

    @property
    def key(self) -> Key:
        """Namespace and name."""
        return self.job.namespace, self.job.name

    @property
    def name(self) -> str:
        """As the policy knows it."""
        return f"{self.job.namespace}/{self.job.name}"


@dataclass(frozen=True, kw_only=True)
class QueueScene:
    """All that a decision about a queue is made of."""

    queue: Queue | None
    """``None``: there is none of the name that the members give."""
    members: Sequence[Member]
    """The jobs that name it and are not over."""
    nodes: Mapping[str, Node] | None = None
    """By name; ``None``: the operator may not look at nodes."""
    others: Mapping[str, int] = field(default_factory=dict)
    """Units that pods which are not the queue's workers request on each node."""
    alive: Mapping[str, int] = field(default_factory=dict)
    """Units of the queue's workers that are known to train, by nodes that look lost."""
    leaving: Collection[str] = ()
    """Keys of taints that announce a node's loss."""
    completed: Sequence[Job] = ()
    """The jobs that name it and have completed, as long as they are there."""


@dataclass(frozen=True)
class QueueDecision:
    """What was decided."""

    grants: Mapping[Key, Grant]
    status: QueueStatus | None
    """``None``: there is no queue."""
    wake_at: float | None = None
    """When time alone may change the decision; Unix seconds."""


def allocate(scene: QueueScene, *, now: float, settings: SchedulingSettings) -> QueueDecision:
    """Decide about a queue at ``now`` (Unix seconds)."""
    queue, members = scene.queue, scene.members
    if queue is None:
        return QueueDecision({m.key: _keep(m, reasons.QUEUE_MISSING, _missing(m), now) for m in members}, None)
    resource = queue.spec.resource
    hindered = {m.key: found for m in members if (found := find_hindrance(m.job, m.ceiling, resource)) is not None}
    open_members = [m for m in members if m.key not in hindered]
    units = {m.key: worker_units(m.job.spec, resource) for m in members}
    capacity = _capacity(scene, queue.spec, open_members, units)
    scale = scale_of(resource)
    ended = [(job, worker_units(job.spec, resource)) for job in scene.completed]
    past, past_until = count_ended(read_past(queue.status, scale), queue.status.past_until or "", ended, settings)
    obstacle = find_obstacle(queue, capacity, nodes_known=scene.nodes is not None)
    if obstacle is not None and obstacle.code != reasons.NO_CAPACITY:
        told = f"the queue {queue.name} gives out nothing: {obstacle.sentence}"
        grants = {m.key: _keep(m, reasons.QUEUE_NOT_READY, told, now) for m in members}
        wake_at = None
    else:
        grants, reserved = _grant_hindered(members, hindered, units, capacity, resource, now)
        shared, wake_at = _share(queue.spec, open_members, units, capacity, reserved, past, now, settings)
        grants |= shared
    given = {m.key: grants[m.key].workers for m in members}
    status = build_queue_status(
        queue,
        capacity,
        given=given,
        allocated=sum(units[key] * workers for key, workers in given.items()),
        waiting=sum(1 for m in members if not (given[m.key] or m.job.spec.suspend)),
        past=write_past(past, scale),
        past_until=past_until or None,
        obstacle=obstacle,
        now=now,
    )
    return QueueDecision(grants, status, wake_at)


def _capacity(scene: QueueScene, spec: QueueSpec, members: Sequence[Member], units: Mapping[Key, int]) -> QueueCapacity:
    """What there is for these members."""
    if scene.nodes is None:
        return QueueCapacity()
    return measure_capacity(
        spec,
        scene.nodes,
        others=scene.others,
        alive=scene.alive,
        tolerations={tolerated(m.job.spec) for m in members},
        grain=gcd(*(units[m.key] for m in members)) or 1,
        leaving=scene.leaving,
    )


def _grant_hindered(
    members: Sequence[Member],
    hindered: Mapping[Key, Hindrance],
    units: Mapping[Key, int],
    capacity: QueueCapacity,
    resource: str | None,
    now: float,
) -> tuple[dict[Key, Grant], Counter[str]]:
    """What jobs have that are not shared with, and the units that are not there for the others, by namespace."""
    grants: dict[Key, Grant] = {}
    reserved: Counter[str] = Counter()
    for member in members:
        if (hindrance := hindered.get(member.key)) is not None:
            if hindrance.keeps_workers:
                grants[member.key] = _keep(member, hindrance.code, hindrance.sentence, now)
            else:
                grants[member.key] = member.grant.changed(0, hindrance.sentence, hindrance.code, now)
            # What it keeps, and what is still to leave.
            taken = max(grants[member.key].workers, _holding(member, capacity, resource))
            reserved[member.job.namespace] += units[member.key] * taken
    return grants, reserved


def _share(
    queue: QueueSpec,
    members: Sequence[Member],
    units: Mapping[Key, int],
    there: QueueCapacity,
    reserved: Counter[str],
    past: Past,
    now: float,
    settings: SchedulingSettings,
) -> tuple[dict[Key, Grant], float | None]:
    """Share what is there, less what is reserved; in the end, when time alone may change that."""
    taken, scale = reserved.total(), scale_of(queue.resource)
    capacity = Capacity(
        max(there.on_demand - max(taken - there.spot, 0), 0),
        max(there.spot - taken, 0),
        {at.namespace: max(at.capacity * scale - reserved[at.namespace], 0) for at in queue.limits},
    )
    demands = [_demand(m, units[m.key], queue, past) for m in members]
    wanted = policy(queue.policy)(now, demands, capacity, settings)
    held = {m.name: _holding(m, there, queue.resource) for m in members}
    given = release(wanted, demands, held, capacity.total)
    grants, after = {}, []
    for member, demand in zip(members, demands, strict=True):
        allocation = given[demand.name]
        code, reason = _explain(member, demand, allocation, queue.resource)
        partly = demand.allocated < allocation.workers < wanted[demand.name].workers
        grants[member.key] = member.grant.changed(allocation.workers, reason, code, now, partly=partly)
        after.append(demand.given(allocation.workers, now))
    return grants, next_change(now, after, settings)


def _explain(member: Member, demand: Demand, allocation: Allocation, resource: str | None) -> tuple[str, str]:
    """Why a job has so many workers: the reason of its condition, and a sentence."""
    if allocation.shortage is not None:
        return reasons.NEVER_FITS, allocation.shortage.told(lambda units: in_words(units, resource))
    code = reasons.ALLOCATED if allocation.workers else reasons.QUEUED
    return code, allocation.reason + _no_more(member, demand, allocation.workers)


def release(
    wanted: Mapping[str, Allocation], demands: Sequence[Demand], held: Mapping[str, int], total: int
) -> dict[str, Allocation]:
    """What is given at once of what a policy wants: less to those who are to have less, more only of what is free.

    Args:
        wanted: the policy's answer.
        demands: what it was asked for; ``allocated`` is what each job has been given.
        held: workers of each job that have not gone yet.
        total: units to share.
    """
    given = {d.name: min(wanted[d.name].workers, d.allocated) for d in demands}
    free = total - sum(d.units * max(given[d.name], held.get(d.name, 0)) for d in demands)
    growing = [d for d in demands if wanted[d.name].workers > d.allocated]
    for demand in sorted(growing, key=lambda d: (not d.allocated, d.began, d.name)):
        there = max(demand.allocated, held.get(demand.name, 0))  # its own that are leaving make room for it
        workers = min(wanted[demand.name].workers, there + max(free, 0) // demand.units)
        if workers >= demand.minimum:
            free -= demand.units * max(workers - there, 0)
            given[demand.name] = workers
    return {
        d.name: wanted[d.name] if given[d.name] == wanted[d.name].workers else _held_back(wanted[d.name], given[d.name])
        for d in demands
    }


def _held_back(wanted: Allocation, workers: int) -> Allocation:
    """The allocation of a job that has to wait for others' workers to leave."""
    count = counted(wanted.workers, "worker")
    reason = f"{count} as soon as those of others have left: {wanted.reason}"
    return Allocation(workers, reason, min(wanted.on_demand, workers))


def _demand(member: Member, units: int, queue: QueueSpec, past: Past) -> Demand:
    """A job as the policy sees it."""
    spec, status, grant = member.job.spec, member.job.status, member.grant
    least = least_workers(member.job)
    limit = spec.most if member.ceiling is None else min(spec.most, member.ceiling)
    most = max(least, efficient_limit(status.scaling, spec.elasticity.min_efficiency, limit))
    left = None
    if status.total_steps is not None:
        left = max(status.total_steps - (status.step or 0), 0)
    return Demand(
        name=member.name,
        namespace=member.job.namespace,
        submitted=member.submitted,
        maximum=most,
        minimum=least,
        requested=min(max(spec.replicas, least), most),
        units=units,
        priority=spec.priority,
        weight=float(spec.weight),
        allocated=grant.workers,
        since=grant.since,
        resized=grant.resized,
        waited=grant.waited,
        steps_left=left,
        expected_left=expected_left(past, member.job, units),
        curve=curve_of(status.scaling),
        minimum_on_demand=spec.elasticity.min_replicas_on == "OnDemand" and queue.spot_selector is not None,
    )


def _no_more(member: Member, demand: Demand, workers: int) -> str:
    """What the reason of a policy does not say, as it sees no more than the most that a job can have."""
    if not workers or workers < demand.maximum or demand.maximum >= member.job.spec.most:
        return ""
    if member.ceiling is not None and demand.maximum >= member.ceiling:
        return "; no more of its workers found a node, which is tried again when nodes change, and now and then"
    return f"; {no_further(member.job.spec.elasticity.min_efficiency)}"


def _holding(member: Member, capacity: QueueCapacity, resource: str | None) -> int:
    """Workers that take of what there is: those on nodes which do not count any more take nothing."""
    return sum(1 for node in member.pods if resource is None or not node or node in capacity.nodes)


def _missing(member: Member) -> str:
    return f"there is no VirtualFlowQueue {member.job.spec.queue}; create it, or correct spec.queue"


def _keep(member: Member, code: str, reason: str, now: float) -> Grant:
    """The job goes on with what it has."""
    workers = 0 if member.job.spec.suspend else member.grant.workers
    kept = f"; until then it keeps its {workers} workers" if workers else ""
    return member.grant.changed(workers, f"{reason}{kept}", code, now)

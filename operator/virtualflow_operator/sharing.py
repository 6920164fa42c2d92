"""One decision about one queue: what each of its jobs is given, and what the queue's status says. Pure.

The policy says how many workers each job is to have; here its arguments are made from the cluster, and its answer is
put into an order in which capacity is never exceeded: workers are taken away at once, and given once those that were
taken away have gone. What is in the way of a single job (it never fits, its specification makes no sense) is that job's
grant, and the others are shared among as if it were not there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from virtualflow.errors import ConfigurationError
from virtualflow_operator import reasons
from virtualflow_operator.granting import Grant
from virtualflow_operator.job_status import Condition
from virtualflow_operator.measuring import curve_of, efficient_limit, no_further
from virtualflow_operator.queue_view import (
    MAX_ALLOCATIONS,
    CapacityStatus,
    Given,
    JobCounts,
    Queue,
    QueueSpec,
    QueueStatus,
)
from virtualflow_operator.scheduling import Allocation, Capacity, Demand, next_change, policy
from virtualflow_operator.scheduling.room import Room
from virtualflow_operator.settings import SchedulingSettings
from virtualflow_operator.supply import Supply, in_words, scale_of, shown, take_stock, tolerated, worker_units
from virtualflow_operator.validation import validate, validate_queue
from virtualflow_operator.view import Job, Node, format_time

Key = tuple[str, str]
_UNITS = re.compile(r"\b(\d+) units\b")


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


@dataclass(frozen=True)
class Shares:
    """What was decided."""

    grants: Mapping[Key, Grant]
    status: QueueStatus | None
    """``None``: there is no queue."""
    wake_at: float | None = None
    """When time alone may change the decision; Unix seconds."""
    held_back: bool = False
    """Some are to have more once others have left."""


def share(
    queue: Queue | None,
    members: Sequence[Member],
    nodes: Mapping[str, Node] | None,
    others: Mapping[str, int],
    alive: Mapping[str, int],
    now: float,
    settings: SchedulingSettings,
    leaving: Collection[str] = (),
) -> Shares:
    """Decide about a queue.

    Args:
        queue: the queue; ``None``: there is none of the name that the members give.
        members: the jobs that name it and are not over.
        nodes: by name; ``None``: the operator may not look at nodes.
        others: units that pods which are not the queue's workers request on each node.
        alive: units of the queue's workers that are known to train, by nodes that look lost.
        now: Unix seconds.
        settings: of the policies.
        leaving: keys of taints that announce a node's loss.
    """
    if queue is None:
        return Shares({m.key: _keep(m, reasons.QUEUE_MISSING, _missing(m), now) for m in members}, None)
    resource = queue.spec.resource
    faults = {m.key: _fault(m, resource) for m in members}
    faults |= {m.key: _homeless(m) for m in members if not faults[m.key]}
    open_members = [m for m in members if not faults[m.key]]
    units = {m.name: worker_units(m.job.spec, resource) for m in members}
    grain = gcd(*(units[m.name] for m in open_members)) or 1
    supply = Supply()
    if nodes is not None:
        tolerations = {tolerated(m.job.spec) for m in open_members}
        supply = take_stock(queue.spec, nodes, others, alive, tolerations, grain, leaving)
    obstacle = _obstacle(queue, supply, nodes)
    if obstacle is not None and obstacle[0] != reasons.NO_CAPACITY:
        code, sentence = obstacle
        told = f"the queue {queue.name} gives out nothing: {sentence}"
        grants = {m.key: _keep(m, reasons.QUEUE_NOT_READY, told, now) for m in members}
        return Shares(grants, _portray(queue, supply, members, grants, units, (code, sentence), now))
    grants, reserved = {}, 0
    reserved_in: Counter[str] = Counter()
    for member in members:
        if faults[member.key]:
            # What it keeps, and what is still to leave, is not there for the others.
            kept = grants[member.key] = _faulty(member, faults[member.key], now)
            taken = units[member.name] * max(kept.workers, _holding(member, supply, resource))
            reserved += taken
            reserved_in[member.job.namespace] += taken
    scale = scale_of(resource)
    spot = max(supply.spot - reserved, 0)
    capacity = Capacity(
        max(supply.on_demand - max(reserved - supply.spot, 0), 0),
        spot,
        {at.namespace: max(at.capacity * scale - reserved_in[at.namespace], 0) for at in queue.spec.limits},
    )
    demands = [_demand(m, units[m.name], queue.spec) for m in open_members]
    wanted = policy(queue.spec.policy)(now, demands, capacity, settings)
    held = {m.name: _holding(m, supply, resource) for m in open_members}
    given = release(wanted, demands, held, capacity.total)
    after = []
    for member, demand in zip(open_members, demands, strict=True):
        allocation = given[demand.name]
        lacks = Room(capacity).lacks(demand, demand.minimum) if not allocation.workers else ""
        code = reasons.ALLOCATED if allocation.workers else reasons.NEVER_FITS if lacks else reasons.QUEUED
        reason = _in_quantities(allocation.reason, resource) + _no_more(member, demand, allocation.workers)
        partly = demand.allocated < allocation.workers < wanted[demand.name].workers
        grants[member.key] = member.grant.changed(allocation.workers, reason, code, now, partly=partly)
        after.append(demand.given(allocation.workers, now))
    return Shares(
        grants,
        _portray(queue, supply, members, grants, units, obstacle, now),
        next_change(now, after, settings),
        any(given[name].workers != allocation.workers for name, allocation in wanted.items()),
    )


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
    count = "1 worker" if wanted.workers == 1 else f"{wanted.workers} workers"
    reason = f"{count} as soon as those of others have left: {wanted.reason}"
    return Allocation(workers, reason, min(wanted.on_demand, workers))


def _demand(member: Member, units: int, queue: QueueSpec) -> Demand:
    """A job as the policy sees it."""
    spec, status, grant = member.job.spec, member.job.status, member.grant
    least = min(spec.min_replicas, spec.most)
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


def _holding(member: Member, supply: Supply, resource: str | None) -> int:
    """Workers that take of what there is: those on nodes which do not count any more take nothing."""
    return sum(1 for node in member.pods if resource is None or not node or node in supply.nodes)


# --- what is in the way -----------------------------------------------------------------------------------------------


def _missing(member: Member) -> str:
    return f"there is no VirtualFlowQueue {member.job.spec.queue}; create it, or correct spec.queue"


def _fault(member: Member, resource: str | None) -> str:
    """Why a job is not to be shared with; empty: it is."""
    spec = member.job.spec
    if spec.suspend:
        return "the job is suspended by its user"
    problems = validate(member.job.raw.get("spec"), member.job.name)
    if member.job.fault or problems:
        return f"its specification makes no sense: {member.job.fault or problems[0]}"
    if resource is not None and not worker_units(spec, resource):
        return f"its workers request no {resource}, which the queue counts; add it to resources.requests"
    return ""


def _homeless(member: Member) -> str:
    """Why a job is to wait although there are units for it: no node has enough of them for a worker."""
    least = min(member.job.spec.min_replicas, member.job.spec.most)
    if member.ceiling is None or member.ceiling >= least:
        return ""
    return (
        f"only {member.ceiling} of its minimum of {least} workers found a node; it is tried again when nodes change, "
        "and now and then"
    )


def _faulty(member: Member, fault: str, now: float) -> Grant:
    if member.job.spec.suspend or fault == _homeless(member):
        return member.grant.changed(0, fault, reasons.QUEUED, now)
    return _keep(member, reasons.NEVER_FITS if "request no" in fault else reasons.INVALID_SPEC, fault, now)


def _keep(member: Member, code: str, reason: str, now: float) -> Grant:
    """The job goes on with what it has."""
    workers = 0 if member.job.spec.suspend else member.grant.workers
    kept = f"; until then it keeps its {workers} workers" if workers else ""
    return member.grant.changed(workers, f"{reason}{kept}", code, now)


def _obstacle(queue: Queue, supply: Supply, nodes: Mapping[str, Node] | None) -> tuple[str, str] | None:
    """Why the queue gives out nothing: a reason and a sentence."""
    problems = [queue.fault] if queue.fault else validate_queue(queue.raw.get("spec"))
    if problems:
        return reasons.INVALID_QUEUE, "; ".join(problems)
    try:
        policy(queue.spec.policy)
    except ConfigurationError as error:
        return reasons.UNKNOWN_POLICY, f"{error}."
    if queue.spec.resource is None:
        return None if supply.total else (reasons.NO_CAPACITY, "Its capacity is 0; raise spec.capacity.")
    if nodes is None:
        return reasons.NODES_UNKNOWN, "The operator may not look at nodes; give it the right to list and watch them."
    if not supply.selected:
        return reasons.NO_NODES, "Its nodeSelector selects no node; correct it, or label the nodes that it is to cover."
    if supply.total:
        return None
    unfit = "; ".join(f"{name}: {why}" for name, why in sorted(supply.unfit.items())[:4])
    detail = unfit or f"they offer no {queue.spec.resource}, or other pods use all of it"
    return reasons.NO_CAPACITY, f"None of its {supply.selected} nodes has room for a worker: {detail}."


# --- how it looks -----------------------------------------------------------------------------------------------------


def _in_quantities(reason: str, resource: str | None) -> str:
    """A policy counts in units; people are told amounts of the resource."""
    return _UNITS.sub(lambda found: in_words(int(found[1]), resource), reason)


def _portray(
    queue: Queue,
    supply: Supply,
    members: Sequence[Member],
    grants: Mapping[Key, Grant],
    units: Mapping[str, int],
    obstacle: tuple[str, str] | None,
    now: float,
) -> QueueStatus:
    resource = queue.spec.resource
    running = [(m, grants[m.key].workers) for m in members if grants[m.key].workers]
    waiting = sum(1 for member in members if not (grants[member.key].workers or member.job.spec.suspend))
    allocated = sum(units[member.name] * workers for member, workers in running)
    code, message = obstacle or (
        reasons.SHARING,
        f"{shown(supply.total, resource)} {resource or 'workers'} are shared among the jobs of the queue by "
        f"{queue.spec.policy}.",
    )
    ranked = sorted(running, key=lambda pair: (-pair[1], pair[0].key))[:MAX_ALLOCATIONS]
    return QueueStatus(
        conditions=(_condition(queue, obstacle is None, code, message, now),),
        observed_generation=queue.generation,
        capacity=CapacityStatus(
            shown(supply.total, resource),
            shown(supply.on_demand, resource),
            shown(supply.spot, resource),
            shown(supply.used_by_others, resource),
            shown(allocated, resource),
            len(supply.nodes),
        ),
        jobs=JobCounts(len(running), waiting),
        allocations=tuple(Given(*member.key, workers) for member, workers in ranked),
    )


def _condition(queue: Queue, ready: bool, code: str, message: str, now: float) -> Condition:
    truth = "True" if ready else "False"
    before = queue.status.ready
    since = before.last_transition_time if before is not None and before.status == truth else format_time(now)
    return Condition("Ready", "True" if ready else "False", code, message, since, queue.generation)

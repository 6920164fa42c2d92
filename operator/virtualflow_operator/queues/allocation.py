"""One decision about one queue: what each of its jobs is given, and what the queue's status says. Pure.

The policy says how many workers each job is to have, and of which kind of device; here its arguments are made from the
cluster, and its answer is put into an order in which capacity is never exceeded (``releases``). What is in the way of a
single job (it never fits, its specification makes no sense) is that job's grant, and the others are shared among as if
it were not there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

from virtualflow.protocol.wording import counted
from virtualflow_operator import reasons
from virtualflow_operator.api import Job, KindSpec, Node, Queue, QueueSpec, QueueStatus
from virtualflow_operator.jobs.node_fit import is_made_for
from virtualflow_operator.jobs.scaling_history import no_further
from virtualflow_operator.queues.capacity import (
    QueueCapacity,
    in_units,
    in_words,
    measure_capacity,
    scale_of,
    tolerated,
    worker_units,
)
from virtualflow_operator.queues.kinds import kind_of, kinds_of
from virtualflow_operator.queues.members import Grant, JobHolding, Key, QueueMember, build_demand, find_holding
from virtualflow_operator.queues.past_jobs import count_ended, foresee, phases_of, read_past, write_past
from virtualflow_operator.queues.queue_status import Hindrance, build_queue_status, find_hindrance, find_obstacle
from virtualflow_operator.queues.releases import find_stuck, release, stand_still
from virtualflow_operator.scheduling import (
    FIXED_SIZES,
    Allocation,
    Capacity,
    Demand,
    DeviceKind,
    KindAllocation,
    KindDemand,
    ScalingCurve,
    decide_by_kind,
    next_change,
    policy,
)
from virtualflow_operator.scheduling.packing import Seat, pack
from virtualflow_operator.scheduling.service_time import pattern
from virtualflow_operator.settings import PackingSettings, SchedulingSettings


@dataclass(frozen=True, kw_only=True)
class QueueScene:
    queue: Queue | None
    """``None``: there is none of the name that the members give."""
    members: Sequence[QueueMember]
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
    fit = {name: kind for kind, there in capacity.kinds.items() for name in there.nodes}
    holdings = {m.key: find_holding(m, queue.spec, scene.nodes or {}, fit) for m in members}
    scale = scale_of(resource)
    ended = [(job, worker_units(job.spec, resource)) for job in scene.completed]
    past, past_until = count_ended(read_past(queue.status, scale), queue.status.past_until or "", ended, settings)
    obstacle = find_obstacle(queue, capacity, nodes_known=scene.nodes is not None)
    if obstacle is not None and obstacle.code != reasons.NO_CAPACITY:
        told = f"the queue {queue.name} gives out nothing: {obstacle.sentence}"
        grants = {m.key: _keep(m, reasons.QUEUE_NOT_READY, told, now) for m in members}
        wake_at = None
    else:
        grants, reserved = _grant_hindered(members, hindered, units, holdings, now)
        forecast = foresee(past, ((m.job, units[m.key]) for m in members), settings)
        usable = _usable_kinds(open_members, queue.spec, scene.nodes or {})
        demands = {
            m.key: build_demand(m, holdings[m.key], units[m.key], queue.spec, forecast, usable[m.key])
            for m in open_members
        }
        shared, wake_at = _share(
            queue.spec, open_members, demands, holdings, capacity, reserved, scene.nodes or {}, now, settings
        )
        grants |= shared
    given: dict[Key, Mapping[str, int]] = {}
    for m in members:
        grant = grants[m.key]
        given[m.key] = dict(grant.kinds) or ({holdings[m.key].kind: grant.workers} if grant.workers else {})
    status = build_queue_status(
        queue,
        capacity,
        given=given,
        units={m.key: 0 if grants[m.key].host else units[m.key] for m in members},
        waiting=sum(1 for m in members if not (given[m.key] or m.job.spec.suspend)),
        past=write_past(past, scale),
        past_until=past_until or None,
        obstacle=obstacle,
        now=now,
    )
    return QueueDecision(grants, status, wake_at)


def _capacity(
    scene: QueueScene, spec: QueueSpec, members: Sequence[QueueMember], units: Mapping[Key, int]
) -> QueueCapacity:
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


def _usable_kinds(
    members: Sequence[QueueMember], spec: QueueSpec, nodes: Mapping[str, Node]
) -> dict[Key, frozenset[str]]:
    """Names of the kinds that each job's templates may be on; jobs with the same templates are asked about once."""
    kinds = frozenset(kind.name for kind in kinds_of(spec))
    if not spec.kinds:
        return {member.key: kinds for member in members}
    selected = [n for n in nodes.values() if spec.node_selector is None or spec.node_selector.selects(n.labels)]
    there: dict[str, list[Node]] = {kind: [] for kind in kinds}
    for node in selected:
        kind = kind_of(spec, node.labels)
        if kind is not None and not node.gone:
            there[kind].append(node)
    known: dict[str, frozenset[str]] = {}
    found = {}
    for member in members:
        templates = [group.template.get("spec") or {} for group in member.job.spec.worker_groups]
        text = json.dumps(templates, sort_keys=True)
        if text not in known:
            known[text] = frozenset(k for k in kinds if any(is_made_for(pod, there[k]) for pod in templates))
        found[member.key] = known[text]
    return found


def _grant_hindered(
    members: Sequence[QueueMember],
    hindered: Mapping[Key, Hindrance],
    units: Mapping[Key, int],
    holdings: Mapping[Key, JobHolding],
    now: float,
) -> tuple[dict[Key, Grant], dict[str, Counter[str]]]:
    """What jobs have that are not shared with, and what is not there for the others: units by kind and namespace."""
    grants: dict[Key, Grant] = {}
    reserved: dict[str, Counter[str]] = {}
    for member in members:
        if (hindrance := hindered.get(member.key)) is not None:
            holding = holdings[member.key]
            if hindrance.keeps_workers and not member.grant.host:
                grants[member.key] = _keep(member, hindrance.code, hindrance.sentence, now)
            else:
                grants[member.key] = member.grant.changed(0, hindrance.sentence, hindrance.code, now)
            # What it keeps, and what is still to leave.
            keeps = holding.given if grants[member.key].workers else {}
            for kind in {*keeps, *holding.held}:
                taken = max(keeps.get(kind, 0), holding.held.get(kind, 0))
                reserved.setdefault(kind, Counter())[member.job.namespace] += units[member.key] * taken
    return grants, reserved


def _share(
    queue: QueueSpec,
    members: Sequence[QueueMember],
    demands: Mapping[Key, KindDemand],
    holdings: Mapping[Key, JobHolding],
    there: QueueCapacity,
    reserved: Mapping[str, Counter[str]],
    nodes: Mapping[str, Node],
    now: float,
    settings: SchedulingSettings,
) -> tuple[dict[Key, Grant], float | None]:
    """Share what is there, less what is reserved; in the end, when time alone may change that."""
    namespaces = {member.job.namespace for member in members}
    kinds = {
        kind.name: _kind(queue, kind, there, reserved.get(kind.name, Counter()), namespaces) for kind in kinds_of(queue)
    }
    told = replace(settings, thrift=queue.thrift) if queue.thrift else settings
    elastic, decide = queue.policy not in FIXED_SIZES, policy(queue.policy)
    asked = list(demands.values())
    held = {m.name: holdings[m.key].held for m in members}
    totals = {name: kind.capacity.total for name, kind in kinds.items()}

    wanted = decide_by_kind(decide, now, asked, kinds, told, elastic=elastic)
    while stuck := find_stuck(wanted, asked, totals):
        asked = [stand_still(demand) if demand.job.name in stuck else demand for demand in asked]
        wanted = decide_by_kind(decide, now, asked, kinds, told, elastic=elastic)
    given = release(wanted, asked, held, totals)
    seats = find_seats(queue, members, asked, wanted, given, nodes, settings.packing)

    lodgers: dict[str, list[str]] = {}
    for name, seat in sorted(seats.items()):
        lodgers.setdefault(seat.host, []).append(name)
    grants, after = {}, []
    for member, demand in zip(members, asked, strict=True):
        allocation = given[demand.job.name]
        workers = sum(allocation.workers.values())
        code, reason = _explain(member, demand, allocation, queue)
        partly = demand.total < workers < sum(wanted[demand.job.name].workers.values())
        split = allocation.workers if queue.kinds else {}
        home = allocation.home if queue.kinds else None
        host, guests = "", tuple(lodgers.get(member.name, ()))
        if member.name in seats:
            seat = seats[member.name]
            host, workers, code, reason = seat.host, seat.workers, reasons.IN_TURNS, f"{seat.reason}; {reason}"
            split = {allocation.home: workers} if queue.kinds else {}
        elif guests:
            reason += f"; in turns with {' and '.join(guests)}"
        grants[member.key] = member.grant.changed(
            workers, reason, code, now, kind=home, kinds=split, partly=partly, host=host, lodgers=guests
        )
        after.append(demand.given(allocation, now).job)
    return grants, next_change(now, after, settings)


def _kind(
    queue: QueueSpec, kind: KindSpec, there: QueueCapacity, reserved: Counter[str], namespaces: Collection[str]
) -> DeviceKind:
    """What the policy has to share of a kind among jobs of these namespaces."""
    of, taken, scale = there.kinds.get(kind.name), reserved.total(), scale_of(queue.resource)
    on_demand, spot = (of.on_demand, of.spot) if of is not None else (0, 0)
    usual = {} if queue.namespace_limit is None else dict.fromkeys(namespaces, queue.namespace_limit * scale)
    limits = usual | {at.namespace: at.capacity * scale for at in queue.limits if at.kind == kind.name}
    limits = {name: max(limit - reserved[name], 0) for name, limit in limits.items()}
    capacity = Capacity(max(on_demand - max(taken - spot, 0), 0), max(spot - taken, 0), limits)
    price = kind.price or 1.0
    return DeviceKind(capacity, kind.rating, price, kind.spot_price if kind.price is not None else None)


def _explain(member: QueueMember, demand: KindDemand, allocation: KindAllocation, queue: QueueSpec) -> tuple[str, str]:
    """Why a job has so many workers: the reason of its condition, and a sentence."""
    if allocation.shortage is not None:
        return reasons.NEVER_FITS, allocation.shortage.told(lambda units: in_words(units, queue.resource))
    workers = sum(allocation.workers.values())
    code = reasons.ALLOCATED if workers else reasons.QUEUED
    if not workers and allocation.home not in {kind.name for kind in kinds_of(queue)}:
        code = reasons.NEVER_FITS
    return code, allocation.reason + _no_more(member, demand, workers)


def _no_more(member: QueueMember, demand: KindDemand, workers: int) -> str:
    """What the reason of a policy does not say, as it sees no more than the most that a job can have."""
    if not workers or workers < demand.job.maximum or demand.job.maximum >= member.job.spec.most:
        return ""
    if member.ceiling is not None and demand.job.maximum >= member.ceiling:
        return "; no more of its workers found a node, which is tried again when nodes change, and now and then"
    return f"; {no_further(member.job.spec.elasticity.min_efficiency)}"


def _missing(member: QueueMember) -> str:
    return f"there is no VirtualFlowQueue {member.job.spec.queue}; create it, or correct spec.queue"


def _keep(member: QueueMember, code: str, reason: str, now: float) -> Grant:
    """The job goes on with what it has."""
    workers = 0 if member.job.spec.suspend else member.grant.workers
    kept = f"; until then it keeps its {counted(workers, 'worker')}" if workers else ""
    before = member.grant if workers else replace(member.grant, host="", lodgers=())
    return before.changed(workers, f"{reason}{kept}", code, now, host=before.host, lodgers=before.lodgers)


# --- who of those that a queue gives nothing computes in turns on the devices of another of its jobs ------------------
#
# The policy has decided, and what it wants is carried out as if nobody shared a device; then ``scheduling.packing``
# seats those who wait. It knows no nodes: what those allow is found out here.
#
# - A lodger's pods request no device, and see that of the node where they are. So a host is a job of which each worker
#   has all devices of its node, and whose pods know of the turn server there.
# - How long a job computes in a step is measured by its workers' paces. One that has not run yet goes by one like it:
#   of the same namespace, and the same name but for its numbers.
# - Whoever takes a seat has no pod any more, neither on devices that it had nor on those of a former host: so devices
#   are free for others as soon as they would be without seats, and no device has more jobs than it may on the way.
# - Whoever has a seat keeps it until the policy gives it devices, or the seat is gone. Then it waits as before.


def find_seats(
    queue: QueueSpec,
    members: Sequence[QueueMember],
    demands: Sequence[KindDemand],
    wanted: Mapping[str, KindAllocation],
    given: Mapping[str, KindAllocation],
    nodes: Mapping[str, Node],
    settings: PackingSettings,
) -> dict[str, Seat]:
    """Seat those who wait; the lodgers' names and places.

    Args:
        demands: of each, in the same order.
        wanted: what the policy wants each to have.
        given: what each is given at once of that.
    """
    if queue.jobs_per_device < 2 or queue.resource is None:
        return {}
    seated = {member.name: member.grant.host for member in members if member.grant.host}
    hosts = frozenset(seated.values())
    found: dict[str, Seat] = {}
    for kind in kinds_of(queue):
        curves = _find_curves(members, kind.name)
        asked: list[Demand] = []
        decided: dict[str, Allocation] = {}
        for member, demand in zip(members, demands, strict=True):
            answer = given[member.name]
            if answer.home != kind.name or kind.name not in demand.curves:
                continue
            if answer.workers:
                able = _can_host(member, demand, answer, queue.resource, nodes, established=member.name in hosts)
            else:
                able = not member.seatless and (member.name in seated or _is_free(member, wanted[member.name]))
            if able:
                workers = answer.workers.get(kind.name, 0)
                job = replace(demand.job, curve=curves[member.name])
                asked.append(job.of_fixed_size if queue.policy in FIXED_SIZES else job)
                decided[member.name] = Allocation(workers, answer.reason, shortage=answer.shortage)
        seats = pack(asked, decided, queue.jobs_per_device, settings, seated).seats
        # Whoever would have to go elsewhere leaves first.
        found |= {name: seat for name, seat in seats.items() if seated.get(name, seat.host) == seat.host}
    return found


def _find_curves(members: Sequence[QueueMember], kind: str) -> dict[str, ScalingCurve]:
    """By which each job's phases on a kind of device are told; one that has not run goes by the eldest like it."""
    own = {member.name: phases_of(member.job.status.scaling, kind) for member in members}
    like: dict[tuple[str, str], ScalingCurve] = {}
    for member in sorted(members, key=lambda member: (member.submitted, member.name)):
        if len(own[member.name].points) > 1:
            like.setdefault((member.job.namespace, pattern(member.job.name)), own[member.name])
    return {
        member.name: own[member.name]
        if own[member.name].measured
        else like.get((member.job.namespace, pattern(member.job.name)), own[member.name])
        for member in members
    }


def _is_free(member: QueueMember, wanted: KindAllocation) -> bool:
    """Whether a job without a seat may take one: nothing of it is left anywhere, and no devices are on their way."""
    return not (wanted.workers or member.pods or member.lodging)


def _can_host(
    member: QueueMember,
    demand: KindDemand,
    answer: KindAllocation,
    resource: str,
    nodes: Mapping[str, Node],
    *,
    established: bool,
) -> bool:
    """Whether a job's workers are where others can compute, too.

    Args:
        established: whether others compute there already: they stay while its pods are replaced.
    """
    placed = [node for node in member.pods if node]
    alone = all(
        node in nodes and in_units(nodes[node].allocatable.get(resource, "0"), resource, up=False) == demand.job.units
        for node in placed
    )
    complete = established or len(placed) >= sum(answer.workers.values())
    return alone and complete and member.takes_turns and answer.workers.keys() == {answer.home}

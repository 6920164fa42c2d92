"""Who of those that a queue gives nothing computes in turns on the devices of another of its jobs. Pure.

The policy has decided, and what it wants is carried out as if nobody shared a device; then ``scheduling.packing`` seats
those who wait. It knows no nodes: what those allow is found out here.

- A lodger's pods request no device, and see that of the node where they are. So a host is a job of which each worker
  has all devices of its node, and whose pods know of the turn server there.
- How long a job computes in a step is measured by its workers' paces. One that has not run yet goes by one like it: of
  the same namespace, and the same name but for its numbers.
- Whoever takes a seat has no pod any more, neither on devices that it had nor on those of a former host: so devices are
  free for others as soon as they would be without seats, and no device has more jobs than it may on the way.
- Whoever has a seat keeps it until the policy gives it devices, or the seat is gone. Then it waits as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from virtualflow_operator.api import Node, QueueSpec
from virtualflow_operator.queues.capacity import in_units
from virtualflow_operator.queues.curves import phases_of
from virtualflow_operator.queues.kinds import kinds_of
from virtualflow_operator.queues.members import QueueMember
from virtualflow_operator.scheduling import FIXED_SIZES, Allocation, Demand, KindAllocation, KindDemand, ScalingCurve
from virtualflow_operator.scheduling.packing import Seat, pack
from virtualflow_operator.scheduling.service_time import pattern
from virtualflow_operator.settings import PackingSettings


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
                asked.append(_as_asked(queue, replace(demand.job, curve=curves[member.name])))
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


def _as_asked(queue: QueueSpec, job: Demand) -> Demand:
    """The job with as many workers as its queue's policy may give it."""
    return replace(job, minimum=job.fixed, maximum=job.fixed) if queue.policy in FIXED_SIZES else job

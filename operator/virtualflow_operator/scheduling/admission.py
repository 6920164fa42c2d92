"""Who runs at all under an elastic policy, so that nobody starves.

Elastic jobs share by shrinking, so each of them runs as long as the minimums of all fit. Where they do not, some must
wait, in the policy's order of entitlement. But whoever has waited for ``starvation_bound`` seconds goes before all who
have not, the longest wait first, and then keeps its minimum for a ``turn``. The one at the head of those cannot be
overtaken: while its minimum does not fit beside the turns that others have, no other turn begins. So with n jobs in
the queue, a job that could run waits at most ``starvation_bound + 2 n turn`` seconds, whatever the others do. (The
factor 2: a namespace's limit may hold it up for one turn and the capacity for another.)

A job loses its minimum only here: when a more entitled one's does not fit otherwise. All that is above the minimums is
shared anew by each policy; that is how a preemption is a shrink first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from virtualflow_operator.scheduling.demand import Allocation, Capacity, Demand
from virtualflow_operator.scheduling.room import Bottleneck, Room, allocation, sort_out
from virtualflow_operator.settings import SchedulingSettings

Rank = tuple[float, ...]


@dataclass
class Admission:
    """Those that can all have their minimum at once, and why the others cannot."""

    room: Room
    """Free once every admitted job has its minimum."""
    admitted: list[Demand] = field(default_factory=list)
    """The most entitled first."""
    due: set[str] = field(default_factory=set)
    """Admitted for their long wait: they have a turn, or begin one."""
    waiting: dict[str, Allocation] = field(default_factory=dict)
    """The others, with the reason."""
    suspends: bool = False
    """Whether one that runs was left out."""

    def _try(self, demand: Demand) -> Bottleneck:
        lack = self.room.lacks(demand, demand.minimum)
        if lack:
            self.suspends |= demand.allocated > 0
            self.waiting[demand.name] = Allocation(0, _why(demand, lack))
        else:
            self.room.start(demand, demand.minimum)
            self.admitted.append(demand)
        return lack


def admit(
    now: float,
    demands: Sequence[Demand],
    capacity: Capacity,
    settings: SchedulingSettings,
    rank: Callable[[Demand], Rank],
) -> Admission:
    """Find out who gets a minimum.

    Args:
        rank: the policy's order of entitlement, the lowest first; ties go by submission and name. A job's rank must not
            become worse by being admitted, nor better by being left out.

    Raises:
        ValueError: two jobs bear the same name.
    """
    able, never = sort_out(demands, capacity)
    found = Admission(Room(capacity), waiting=never)
    turns = [demand for demand in able if _has_turn(demand, now, settings)]
    overdue = [demand for demand in able if demand.waiting(now) >= settings.starvation_bound]
    for demand in sorted(turns, key=_by_time):
        if not found._try(demand):
            found.due.add(demand.name)

    blocker: str | None = None
    blockers: dict[str, str] = {}
    for demand in sorted(overdue, key=_by_time):
        ahead = blocker or blockers.get(demand.namespace)
        if ahead is not None:
            found.waiting[demand.name] = Allocation(0, f"waits behind {ahead}, which has waited for longer")
            continue
        lack = found._try(demand)
        if not lack:
            found.due.add(demand.name)
        elif lack == "namespace":
            blockers[demand.namespace] = demand.name
        else:
            blocker = demand.name

    done = {demand.name for demand in (*turns, *overdue)}
    others = [demand for demand in able if demand.name not in done]
    for demand in sorted(others, key=lambda demand: (rank(demand), demand.submitted, demand.name)):
        found._try(demand)
    return found


def settle(now: float, admission: Admission, wanted: dict[str, Allocation], settings: SchedulingSettings) -> None:
    """Hold back growth that comes too soon after the last change: the pods may have to go again at once.

    What is held back stays free for those seconds; nobody else gets it, or it would have to be taken back.
    """
    for demand in admission.admitted:
        found = wanted.get(demand.name)
        if found is None or demand.allocated < demand.minimum:
            continue
        if found.workers > demand.allocated and now - demand.changed < settings.hold:
            wanted[demand.name] = allocation(
                demand, demand.allocated, f"grows {settings.hold:g} s after its last change at the earliest"
            )


def next_change(now: float, demands: Iterable[Demand], settings: SchedulingSettings) -> float | None:
    """When a decision may become another one only because time passes; ``None``: not at all.

    Args:
        demands: as they are after the decision was applied (:meth:`Demand.given`).
    """
    times = [
        time
        for demand in demands
        for time in (
            (demand.changed + settings.hold, demand.began + settings.turn)
            if demand.allocated
            else (demand.began + settings.starvation_bound,)
        )
        if time > now
    ]
    return min(times, default=None)


def _has_turn(demand: Demand, now: float, settings: SchedulingSettings) -> bool:
    return bool(demand.allocated and demand.waited >= settings.starvation_bound and now - demand.began < settings.turn)


def _by_time(demand: Demand) -> tuple[float, str]:
    return demand.began, demand.name


def _why(demand: Demand, lack: Bottleneck) -> str:
    what = {
        "namespace": f"in the limit of namespace {demand.namespace}",
        "on-demand": "on on-demand capacity",
    }.get(lack, "in the queue")
    return f"waits: its minimum of {demand.minimum} does not fit {what} beside the minimums of jobs that go first"

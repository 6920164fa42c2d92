"""Who runs at all under an elastic policy, so that nobody starves.

Elastic jobs share by shrinking, so each of them runs as long as the minimums of all fit. Where they do not, some must
wait, in the policy's order of entitlement. But whoever has waited for ``starvation_bound`` seconds goes before all who
have not, the longest wait first, and then keeps its minimum for a ``turn``. Turns take at most ``turn_share`` of the
capacity (one of them is always possible), or an overfull queue would have no order but theirs; beyond that they take
what all others leave.

The one at the head of those who wait for a turn cannot be overtaken: while its minimum does not fit beside the turns
that others have, no other turn begins. So with n jobs in the queue, one that could run waits at most
``starvation_bound + 2 n turn`` seconds, whatever the others do. (The factor 2: a namespace's limit may hold it up for
one turn and the capacity for another.)

A job loses its minimum only here: when a more entitled one's does not fit otherwise. All that is above the minimums is
shared anew by each policy; that is how a preemption is a shrink first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from virtualflow_operator.scheduling.demand import Allocation, Bottleneck, Capacity, Demand, Room, allocation, sort_out
from virtualflow_operator.settings import SchedulingSettings

Rank = tuple[float, ...]


@dataclass
class Minimums:
    """Those that can all have their minimum at once, and why the others cannot."""

    room: Room
    """Free once every admitted job has its minimum."""
    admitted: list[Demand] = field(default_factory=list)
    """The most entitled first."""
    due: set[str] = field(default_factory=set)
    """Admitted for their long wait: they have a turn, or begin one."""
    waiting: dict[str, Allocation] = field(default_factory=dict)
    """The others, with the reason."""
    left_out: list[Demand] = field(default_factory=list)
    """Those whose minimum had no room."""
    suspends: bool = False
    """Whether one that runs was left out."""

    def try_(self, demand: Demand) -> Bottleneck:
        """Admit the job if its minimum has room; else what is in the way."""
        lack = self.room.lacks(demand, demand.minimum)
        if lack:
            self.suspends |= demand.allocated > 0
            self.left_out.append(demand)
        else:
            self.room.start(demand, demand.minimum)
            self.admitted.append(demand)
        return lack


def grant_minimums(
    now: float,
    demands: Sequence[Demand],
    capacity: Capacity,
    settings: SchedulingSettings,
    rank: Callable[[Demand], Rank],
) -> Minimums:
    """Find out who gets a minimum.

    Args:
        rank: the policy's order of entitlement, the lowest first; ties go by submission and name. A job's rank must not
            become worse by being admitted, nor better by being left out.
    """
    able, never = sort_out(demands, capacity)
    found = Minimums(Room(capacity), waiting=never)
    turns = [demand for demand in able if _has_turn(demand, now, settings)]
    overdue = [demand for demand in able if not demand.allocated and is_overdue(now, demand, settings)]
    for demand in sorted(turns, key=_by_time):
        if not found.try_(demand):
            found.due.add(demand.name)

    ahead = _Ahead()
    rest = _begin_turns(found, sorted(overdue, key=_by_time), ahead, capacity.total * settings.turn_share)
    done = {demand.name for demand in (*turns, *overdue)}
    others = [demand for demand in able if demand.name not in done]
    for demand in sorted(others, key=lambda demand: (rank(demand), demand.submitted, demand.name)):
        found.try_(demand)
    _begin_turns(found, rest, ahead, inf)
    # Only now, when it no longer matters who was before whom.
    found.waiting |= {
        demand.name: Allocation(0, _why(demand, found.room.lacks(demand, demand.minimum))) for demand in found.left_out
    }
    return found


@dataclass
class _Ahead:
    """Who must have a turn before others may: in its namespace, or in the whole queue."""

    everywhere: str | None = None
    within: dict[str, str] = field(default_factory=dict)


def _begin_turns(found: Minimums, overdue: Sequence[Demand], ahead: _Ahead, most: float) -> Sequence[Demand]:
    """Give turns in this order until they have ``most`` units together; those who are left when that is reached."""
    taken = sum(demand.minimum * demand.units for demand in found.admitted if demand.name in found.due)
    for at, demand in enumerate(overdue):
        first = ahead.everywhere or ahead.within.get(demand.namespace)
        if first is not None:
            found.waiting[demand.name] = Allocation(0, f"waits behind {first}, which has waited for longer")
            continue
        units = demand.minimum * demand.units
        lack = found.room.lacks(demand, demand.minimum)
        if lack != "namespace" and taken and taken + units > most:
            return overdue[at:]
        found.try_(demand)
        if not lack:
            found.due.add(demand.name)
            taken += units
        elif lack == "namespace":
            ahead.within[demand.namespace] = demand.name
        else:
            ahead.everywhere = demand.name
    return ()


def hold_back(now: float, admission: Minimums, wanted: dict[str, Allocation], settings: SchedulingSettings) -> None:
    """Hold back growth that comes too soon after the last change: the pods may have to go again at once.

    What is held back stays free for those seconds; nobody else gets it, or it would have to be taken back.
    """
    for demand in admission.admitted:
        found = wanted.get(demand.name)
        if found is None or demand.allocated < demand.minimum:
            continue
        if found.workers > demand.allocated and now < demand.changed + settings.hold:
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
            (demand.changed + settings.hold, demand.began + settings.turn * _was_overdue(demand, settings))
            if demand.allocated
            else (demand.began + settings.starvation_bound,)
        )
        if time > now
    ]
    return min(times, default=None)


def is_overdue(now: float, demand: Demand, settings: SchedulingSettings) -> bool:
    """Whether it has waited for so long that it is to have a turn, or has one."""
    if demand.allocated:
        return _has_turn(demand, now, settings)
    return now >= demand.began + settings.starvation_bound


def _has_turn(demand: Demand, now: float, settings: SchedulingSettings) -> bool:
    return demand.allocated > 0 and _was_overdue(demand, settings) and now < demand.began + settings.turn


def _was_overdue(demand: Demand, settings: SchedulingSettings) -> bool:
    return demand.waited >= settings.starvation_bound


def _by_time(demand: Demand) -> tuple[float, str]:
    return demand.began, demand.name


def _why(demand: Demand, lack: Bottleneck) -> str:
    what = {
        "namespace": f"in the limit of namespace {demand.namespace}",
        "on-demand": "on on-demand capacity",
    }.get(lack, "in the queue")
    return f"waits: its minimum of {demand.minimum} does not fit {what} beside the minimums of jobs that go first"

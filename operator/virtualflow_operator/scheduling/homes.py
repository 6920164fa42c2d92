"""Which kind of device each job of a queue is to have: the one on which it is expected to cost all of them least time.

Jobs choose one after the other, the shortest first. The aim is AlloX's (Le et al., EuroSys 2020), the least average
completion time; the way is to go where all are delayed least (Chadha et al., STOC 2009). For each kind a job looks at

- its own end there: not before it could make its steps alone, and not before the kind has done the work of all who
  chose it earlier;
- what it takes from those who come after it: the unit-seconds of its work there, valued by how much faster the kind
  is than others for all the jobs. So a job that a fast device hardly helps leaves it to those whom it helps a lot.

With a weight on prices (``SchedulingSettings.thrift``) that time is multiplied by what a step costs there beside the
cheapest kind.

A job that has a kind changes it only for what is better by ``margin``, only where its minimum has room beside those
who chose before it, and not when it has waited for so long that it is to have a turn. What a job chooses depends on
nothing but those before it and on the kind that it has, whether it runs or waits there, so asking again changes
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple

from virtualflow_operator.scheduling.device_kinds import DeviceKind, KindDemand
from virtualflow_operator.scheduling.kind_estimates import KnownCurves
from virtualflow_operator.scheduling.minimums import is_overdue
from virtualflow_operator.scheduling.room import Room
from virtualflow_operator.settings import SchedulingSettings


class _Option(NamedTuple):
    """A job on one kind."""

    kind: str
    units: int
    """Of its minimum."""
    alone: float
    """Seconds to its end with all the workers that it may have there."""
    work: float
    """Unit-seconds to its end at its minimum."""
    money: float
    """What all its steps cost at that."""


@dataclass(frozen=True)
class HomeChoice:
    """A job, in the order in which they chose."""

    demand: KindDemand
    kind: str
    """Empty: the queue has none of the kinds that it may use."""


def choose_homes(
    now: float,
    demands: Sequence[KindDemand],
    kinds: Mapping[str, DeviceKind],
    known: Mapping[str, KnownCurves],
    settings: SchedulingSettings,
    *,
    turns: bool,
) -> list[HomeChoice]:
    """Choose a kind for each job; the shortest first.

    Args:
        turns: whether the policy gives any to those who have waited for long.
    """
    usual = _usual_length(demands, known)
    rooms = {name: Room(kind.capacity) for name, kind in kinds.items()}
    options = {d.job.name: _options(d, kinds, known[d.job.name], usual, rooms) for d in demands}
    ordered = sorted(demands, key=lambda d: (_shortest(options[d.job.name]), d.job.submitted, d.job.name))
    value = _value(kinds, [known[d.job.name].weights for d in demands])
    units = {name: kind.capacity.total for name, kind in kinds.items()}
    whole = sum(units[name] * value[name] for name in kinds)

    settled = _settled(now, demands, kinds, settings) if turns else set()
    load = dict.fromkeys(kinds, 0.0)
    taken = dict.fromkeys(kinds, 0)
    chosen = []
    for place, demand in enumerate(ordered):
        offered = options[demand.job.name]
        if not offered:
            chosen.append(HomeChoice(demand, _unable(demand, kinds)))
            continue
        after = (len(ordered) - place - 1) / whole
        times = {}
        for option in offered:
            kind = option.kind
            end = max(option.alone, (load[kind] + option.work) / units[kind])
            times[kind] = (end + after * option.work * value[kind]) * option.money**settings.thrift
        best = min(
            offered, key=lambda option: (times[option.kind], load[option.kind] / units[option.kind], option.kind)
        )
        had = next((option for option in offered if option.kind == demand.home), None)
        if had is not None:
            fits = taken[best.kind] + best.units <= units[best.kind]
            better = fits and times[best.kind] < times[had.kind] * (1 - settings.margin)
            if not better or demand.job.name in settled:
                best = had
        load[best.kind] += best.work
        taken[best.kind] += best.units
        chosen.append(HomeChoice(demand, best.kind))
    return chosen


def _settled(
    now: float, demands: Sequence[KindDemand], kinds: Mapping[str, DeviceKind], settings: SchedulingSettings
) -> set[str]:
    """Who stays where it is because of its long wait: it is next there, or it has its turn."""
    rooms = {kind: Room(of.capacity) for kind, of in kinds.items()}
    settled = set()
    overdue = [demand for demand in demands if demand.home in kinds and is_overdue(now, demand.job, settings)]
    for demand in sorted(overdue, key=lambda demand: (demand.job.began, demand.job.name)):
        job = demand.job
        if job.allocated:
            if rooms[demand.home].lacks(job, job.minimum):
                continue
            rooms[demand.home].start(job, job.minimum)
        settled.add(job.name)
    return settled


def _unable(demand: KindDemand, kinds: Mapping[str, DeviceKind]) -> str:
    """Where a job is said that it can never run: on the one kind that it may use, or on the largest of them."""
    if demand.mobility == "stays" and demand.bound:
        return demand.home if demand.home in kinds else ""
    return min(
        (kind for kind in demand.curves if kind in kinds),
        key=lambda kind: (-kinds[kind].capacity.total, kind),
        default="",
    )


def _options(
    demand: KindDemand, kinds: Mapping[str, DeviceKind], known: KnownCurves, usual: float, rooms: Mapping[str, Room]
) -> list[_Option]:
    """Where the job could run on the empty queue."""
    job = demand.job
    steps = job.steps_left if known.measured else None
    units = job.minimum * job.units
    found = []
    for kind, weight in known.weights.items():
        if demand.mobility == "stays" and demand.bound and kind != demand.home:
            continue
        room = rooms[kind]
        if room.lacks(job, job.minimum):
            continue
        slow = known.speed(kind, job.minimum)
        length = usual / weight if steps is None else steps / slow
        alone = length
        if job.maximum > job.minimum:
            alone *= slow / known.speed(kind, min(job.maximum, room.most(job)))
        work = length * units
        money = work * kinds[kind].unit_price(on_demand=job.minimum_on_demand)
        found.append(_Option(kind, units, alone, work, money))
    return found


def _usual_length(demands: Sequence[KindDemand], known: Mapping[str, KnownCurves]) -> float:
    """Seconds that a job takes at its minimum on its fastest kind, for those of which that is not known."""
    lengths = []
    for demand in demands:
        of, job = known[demand.job.name], demand.job
        if job.steps_left and of.measured:
            lengths.append(job.steps_left / of.speed(max(of.weights, key=of.weights.__getitem__), job.minimum))
    return median(lengths) if lengths else 1.0


def _shortest(options: Sequence[_Option]) -> float:
    return min((option.work for option in options), default=inf)


def _value(kinds: Mapping[str, DeviceKind], weights: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """How fast a unit of each kind is for a job on average, the fastest kind of each being 1."""
    found = {}
    for kind in kinds:
        rates = [of[kind] for of in weights if kind in of]
        found[kind] = sum(rates) / len(rates) if rates else 1.0
    return found

"""A queue with kinds of device: which kind a job is to have, then a policy for each kind, then what those leave.

1. Every job has a home, the kind on which it is expected to cost all of them least time.
2. Within each kind the policy of the queue decides as it does for any queue: the same function, asked about the jobs at
   home there, with their curves on that kind. So minimums, maximums, turns, limits and on-demand capacity hold there as
   they do everywhere, and with one kind nothing is different at all.
3. What a kind has left when its own jobs have what they can use is lent: to jobs that wait for their home and may run
   elsewhere meanwhile, then to those that may be on several kinds at once, the shortest first. It is taken back as soon
   as the jobs at home there can use it. A job that waits while it runs on what was lent keeps its place in the queue of
   its home, so being lent to can make nobody wait longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import NamedTuple

from virtualflow_operator.scheduling.demand import Allocation, Demand, Policy, Room, ScalingCurve
from virtualflow_operator.scheduling.device_kinds import (
    NONE,
    DeviceKind,
    KindAllocation,
    KindDemand,
    joined,
    mixed_speed,
)
from virtualflow_operator.scheduling.minimums import is_overdue
from virtualflow_operator.settings import SchedulingSettings

# How fast a job would be on a kind of device that it has not run on: assumed, from what is known, and said so.
#
# What is known comes first: other jobs that were measured on both kinds, the median of how much faster the one was.
# Where there are none, the ratings that the kinds were given. A job that may move takes them for a little more: so it
# tries the kind, and then it is known.

_OPTIMISM = 1.25
"""More than a job has to gain before it moves (``SchedulingSettings.margin``)."""


@dataclass(frozen=True)
class KnownCurves:
    """How fast a job is on each kind of the queue that it may use."""

    bases: Mapping[str, tuple[ScalingCurve, float, str]]
    """A measured curve, by what it is to be multiplied, and of which kind it is; without points where the job was
    measured nowhere."""
    weights: Mapping[str, float]
    """How fast a worker is on each kind, the fastest 1."""
    measured: bool
    """Whether its speeds are steps per second; otherwise only ``weights`` says something."""

    def speed(self, kind: str, workers: int) -> float:
        """Steps per second; relative ones where nothing was measured."""
        curve, factor, _ = self.bases[kind]
        return curve.speed(workers) * (factor if curve.points else self.weights[kind])

    def curve(self, kind: str) -> ScalingCurve:
        """The whole of it, for the policy of that kind."""
        curve, factor, basis = self.bases[kind]
        if basis == kind:
            return curve
        return ScalingCurve.of((workers, speed * factor) for workers, speed in curve.points)

    def told(self, kind: str) -> str:
        """What is assumed of a kind, for a reason; empty if it is measured."""
        curve, factor, basis = self.bases[kind]
        if basis != kind:
            return f"; its speed on {kind} is assumed, {factor:.2g} times that on {basis}"
        return "" if curve.points else "; its speed is not measured yet"


def know(demands: Iterable[KindDemand], kinds: Mapping[str, DeviceKind]) -> dict[str, KnownCurves]:
    demands = list(demands)
    sober, guessed = _ratings(demands, kinds)
    hopeful = {kind: rating * (_OPTIMISM if kind in guessed else 1.0) for kind, rating in sober.items()}
    return {d.job.name: _curves(d, kinds, sober if d.mobility == "stays" else hopeful) for d in demands}


def _ratings(demands: Iterable[KindDemand], kinds: Mapping[str, DeviceKind]) -> tuple[dict[str, float], set[str]]:
    """How fast each kind is, beside the one on which most jobs were measured, and for which of them that is a guess."""
    measured = [
        {kind: curve.speed(1) for kind, curve in demand.curves.items() if kind in kinds and curve.points}
        for demand in demands
    ]
    count = {kind: sum(kind in speeds for speeds in measured) for kind in kinds}
    common = min(kinds, key=lambda kind: (-count[kind], kind))
    found: dict[str, float] = {}
    guessed: set[str] = set()
    for kind in sorted(kinds):
        ratios = [speeds[kind] / speeds[common] for speeds in measured if kind in speeds and common in speeds]
        found[kind] = median(ratios) if ratios else kinds[kind].rating / kinds[common].rating
        if not ratios and kind != common:
            guessed.add(kind)
    return found, guessed


def _curves(demand: KindDemand, kinds: Mapping[str, DeviceKind], ratings: Mapping[str, float]) -> KnownCurves:
    allowed = sorted(kind for kind in demand.curves if kind in kinds)
    known = [kind for kind in allowed if demand.curves[kind].points]
    like = min(known, key=lambda kind: (-len(demand.curves[kind].points), kind), default="")
    bases: dict[str, tuple[ScalingCurve, float, str]] = {}
    speeds: dict[str, float] = {}
    for kind in allowed:
        curve = demand.curves[kind]
        if curve.points or not known:
            bases[kind] = curve, 1.0, kind
            speeds[kind] = curve.speed(1) if known else ratings[kind]
        else:
            factor = ratings[kind] / ratings[like]
            bases[kind] = demand.curves[like], factor, like
            speeds[kind] = demand.curves[like].speed(1) * factor
    fastest = max(speeds.values(), default=1.0)
    return KnownCurves(bases, {kind: speed / fastest for kind, speed in speeds.items()}, bool(known))


# Which kind of device each job of a queue is to have: the one on which it is expected to cost all of them least time.
#
# Jobs choose one after the other, the shortest first. The aim is AlloX's (Le et al., EuroSys 2020), the least average
# completion time; the way is to go where all are delayed least (Chadha et al., STOC 2009). For each kind a job looks
# at
#
# - its own end there: not before it could make its steps alone, and not before the kind has done the work of all who
# chose it earlier; - what it takes from those who come after it: the unit-seconds of its work there, valued by how
# much faster the kind is than others for all the jobs. So a job that a fast device hardly helps leaves it to those
# whom it helps a lot.
#
# With a weight on prices (``SchedulingSettings.thrift``) that time is multiplied by what a step costs there beside the
# cheapest kind.
#
# A job that has a kind changes it only for what is better by ``margin``, only where its minimum has room beside those
# who chose before it, and not when it has waited for so long that it is to have a turn. What a job chooses depends on
# nothing but those before it and on the kind that it has, whether it runs or waits there, so asking again changes
# nothing.


class _Option(NamedTuple):
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


_FASTER = 1 + 1e-6
"""By less, one more worker is not worth its place."""


def decide_by_kind(
    policy: Policy,
    now: float,
    demands: Sequence[KindDemand],
    kinds: Mapping[str, DeviceKind],
    settings: SchedulingSettings,
    *,
    elastic: bool = True,
) -> dict[str, KindAllocation]:
    """Say what each job gets of each kind.

    As with a :data:`.demand.Policy`, the order of the jobs does not matter, and when every job is ``given`` what it was
    allocated, the same moment's decision is the same.

    Args:
        policy: of the queue.
        kinds: by name; there is at least one.
        elastic: whether the policy gives turns to those who have waited for long, who then keep their home, and lets
            jobs have what those of another kind leave. Not with fixed sizes: there a job has its size or waits.

    Raises:
        ValueError: two jobs bear the same name, or there is no kind.
    """
    if not kinds:
        raise ValueError("a queue that is shared by kind has at least one kind")
    _check_names(demands)
    if len(kinds) == 1:
        return _decide_for_all(policy, now, demands, *next(iter(kinds.items())), settings)
    kinds = dict(sorted(kinds.items()))  # sums of floats are the same in the same order
    demands = sorted(demands, key=lambda demand: demand.job.name)
    known = know(demands, kinds)
    choices = choose_homes(now, demands, kinds, known, settings, turns=elastic)
    found: dict[str, Allocation] = {}
    rooms: dict[str, Room] = {}
    for kind in kinds:
        members = [_at_home(choice.demand, kind, known) for choice in choices if choice.kind == kind]
        decided = policy(now, members, kinds[kind].capacity, settings)
        rooms[kind] = Room(kinds[kind].capacity)
        for member in members:
            if decided[member.name].workers:
                rooms[kind].start(member, decided[member.name].workers)
        found |= decided
    lent = _lend(now, choices, found, rooms, known, settings) if elastic else {}
    return {
        choice.demand.job.name: _allocation(
            choice,
            found.get(choice.demand.job.name),
            lent.get(choice.demand.job.name, {}),
            known,
        )
        for choice in choices
    }


def _decide_for_all(
    policy: Policy, now: float, demands: Sequence[KindDemand], kind: str, of: DeviceKind, settings: SchedulingSettings
) -> dict[str, KindAllocation]:
    """The policy's own answer, where all devices are of one kind."""
    able = [d for d in demands if kind in d.curves and not (d.mobility == "stays" and d.bound and d.home != kind)]
    decided = policy(now, [replace(d.at(kind), curve=d.curves[kind]) for d in able], of.capacity, settings)
    found = {
        name: KindAllocation(joined(kind, a.workers, NONE), kind, a.reason, a.on_demand, a.shortage)
        for name, a in decided.items()
    }
    return {d.job.name: found.get(d.job.name) or _unusable(d) for d in demands}


def _check_names(demands: Sequence[KindDemand]) -> None:
    seen: set[str] = set()
    for demand in demands:
        if demand.job.name in seen:
            raise ValueError(f"two jobs are called {demand.job.name}; give each a name of its own")
        seen.add(demand.job.name)


def _at_home(demand: KindDemand, kind: str, known: Mapping[str, KnownCurves]) -> Demand:
    job = demand.at(kind)
    return replace(job, curve=known[job.name].curve(kind))


def _lend(
    now: float,
    choices: Sequence[HomeChoice],
    found: Mapping[str, Allocation],
    rooms: Mapping[str, Room],
    known: Mapping[str, KnownCurves],
    settings: SchedulingSettings,
) -> dict[str, dict[str, int]]:
    """What jobs get of kinds where they are not at home, by job and kind."""
    lent: dict[str, dict[str, int]] = {}
    able = [choice for choice in choices if choice.kind and choice.demand.mobility != "stays"]
    for choice in able:
        job = choice.demand.job
        answer = found[job.name]
        if answer.workers or answer.shortage is not None:
            continue
        guest = _guest(choice, rooms, known[job.name], settings)
        if guest:
            lent[job.name] = guest
    for choice in able:
        job = choice.demand.job
        if choice.demand.mobility != "mixes":
            continue
        at_home, elsewhere = found[job.name].workers, lent.get(job.name, {})
        if not (at_home or elsewhere):
            continue
        more = _mix(choice, at_home, elsewhere, rooms, known[job.name])
        if at_home and job.allocated and now < job.changed + settings.hold:
            more = {kind: count for kind, held in choice.demand.lent.items() if (count := min(held, more.get(kind, 0)))}
        if more:
            lent[job.name] = more
    return lent


def _guest(
    choice: HomeChoice, rooms: Mapping[str, Room], known: KnownCurves, settings: SchedulingSettings
) -> dict[str, int]:
    """A place to run meanwhile for a job that waits for its home: where it is fastest."""
    job = choice.demand.job
    best: tuple[float, str, int] | None = None
    for kind in known.weights:
        room = rooms[kind]
        if kind == choice.kind or room.lacks(job, job.minimum):
            continue
        most = known.curve(kind).worthwhile(job.minimum, min(job.maximum, room.most(job)), settings.efficiency)
        speed = known.speed(kind, most)
        if best is None or (speed, kind) > best[:2]:
            best = speed, kind, most
    if best is None:
        return {}
    _, kind, workers = best
    rooms[kind].start(job, workers)
    return {kind: workers}


def _mix(
    choice: HomeChoice, at_home: int, elsewhere: Mapping[str, int], rooms: Mapping[str, Room], known: KnownCurves
) -> dict[str, int]:
    """What the job has elsewhere once it has all the workers that make it faster; the fastest kinds first."""
    job = choice.demand.job
    workers = joined(choice.kind, at_home, elsewhere)
    fastest = mixed_speed(known.speed, workers)
    for kind in sorted(known.weights, key=lambda kind: (-known.weights[kind], kind)):
        if kind == choice.kind:
            continue
        room = rooms[kind]
        while sum(workers.values()) < job.maximum and room.most(job):
            tried = workers | {kind: workers.get(kind, 0) + 1}
            reached = mixed_speed(known.speed, tried)
            if reached <= fastest * _FASTER:
                break
            room.grow(job, 1)
            workers, fastest = tried, reached
    return {kind: count for kind, count in workers.items() if kind != choice.kind}


def _allocation(
    choice: HomeChoice,
    answer: Allocation | None,
    lent: Mapping[str, int],
    known: Mapping[str, KnownCurves],
) -> KindAllocation:
    job, home = choice.demand.job, choice.kind
    if answer is None:
        return _unusable(choice.demand)
    reason = f"{answer.reason} (on {home}{known[job.name].told(home)})"
    on_demand = answer.on_demand
    if lent:
        places = " and ".join(f"{count} on {kind}" for kind, count in sorted(lent.items()))
        reason += f"; {'beside that' if answer.workers else 'meanwhile'} {places}, as long as nobody there needs them"
    if lent and not answer.workers and job.minimum_on_demand:
        on_demand = job.minimum
    return KindAllocation(joined(home, answer.workers, lent), home, reason, on_demand, answer.shortage)


def _unusable(demand: KindDemand) -> KindAllocation:
    """For a job that may use nothing of what there is."""
    named = demand.home if demand.bound and demand.mobility == "stays" else ""
    named = named or ", ".join(sorted(demand.curves)) or "none"
    reason = f"cannot run: the queue has no device of a kind that it may use ({named}); add nodes of one"
    return KindAllocation({}, demand.home, reason)

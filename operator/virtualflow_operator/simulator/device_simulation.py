"""A trace with kinds of device, in simulated time: as ``simulation``, with workers counted by kind.

A job on several kinds is as fast as :func:`.device_kinds.mixed_speed` says, from its speeds in the trace. One that
changes its kind altogether stands still until its workers there are ready, as one does that was suspended; one that
keeps some goes on.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from virtualflow_operator.scheduling import (
    Capacity,
    Demand,
    DeviceKind,
    KindAllocation,
    KindDemand,
    Policy,
    ScalingCurve,
    decide_by_kind,
    mixed_speed,
    next_change,
)
from virtualflow_operator.settings import SchedulingSettings
from virtualflow_operator.simulator.clock import Clock, JobBooks, Occasion
from virtualflow_operator.simulator.outcome import Result
from virtualflow_operator.simulator.simulation import Knowledge, PolicyError, ResizeCost
from virtualflow_operator.simulator.trace import GoneEvent, JobEvent, JobTrace, NodeEvent

# Who decides in a simulation with kinds of device: the operator's policy that knows them, or one that does not.
#
# The one that does not sees a single pool of units and a job's speed on the average device of it. Where the workers
# that it gives come to run is left to chance, as it is with a cluster's own scheduler: it is what the other is
# compared with.


class Decider(Protocol):
    def decide(
        self, now: float, demands: Sequence[KindDemand], kinds: Mapping[str, DeviceKind], settings: SchedulingSettings
    ) -> dict[str, KindAllocation]:
        """What each job gets."""

    def again(self, now: float, demands: Sequence[KindDemand], settings: SchedulingSettings) -> float | None:
        """When time alone may change that."""


class Aware:
    """The policy of a queue with kinds, as the operator runs it."""

    def __init__(self, policy: Policy, *, elastic: bool = True) -> None:
        self._policy, self._elastic = policy, elastic

    def decide(
        self, now: float, demands: Sequence[KindDemand], kinds: Mapping[str, DeviceKind], settings: SchedulingSettings
    ) -> dict[str, KindAllocation]:
        return decide_by_kind(self._policy, now, demands, kinds, settings, elastic=self._elastic)

    def again(self, now: float, demands: Sequence[KindDemand], settings: SchedulingSettings) -> float | None:
        return next_change(now, (demand.job for demand in demands), settings)


class Unaware:
    """The same policy over all units as if they were of one kind, its workers placed by chance."""

    def __init__(self, policy: Policy, *, seed: int = 0, gathers: bool = False) -> None:
        """Decide by ``policy``.

        Args:
            policy: sees one pool.
            seed: of the chance.
            gathers: whether all workers of a job are put on one kind; one that ``stays`` or ``moves`` always is.
        """
        self._policy, self._gathers, self._chance = policy, gathers, random.Random(seed)
        self._seen: dict[str, Demand] = {}

    def decide(
        self, now: float, demands: Sequence[KindDemand], kinds: Mapping[str, DeviceKind], settings: SchedulingSettings
    ) -> dict[str, KindAllocation]:
        pool = Capacity(
            sum(kind.capacity.on_demand for kind in kinds.values()), sum(kind.capacity.spot for kind in kinds.values())
        )
        asked = [self._pooled(demand, kinds) for demand in demands]
        decided = self._policy(now, asked, pool, settings)
        free = {name: kind.capacity.total for name, kind in kinds.items()}
        placed: dict[str, dict[str, int]] = {}
        for demand in demands:  # nobody moves who need not
            most = decided[demand.job.name].workers
            placed[demand.job.name] = kept = {}
            for kind, count in demand.workers.items():
                stay = min(count, most, free.get(kind, 0) // demand.job.units)
                if stay > 0:
                    kept[kind] = stay
                    free[kind] -= stay * demand.job.units
                    most -= stay
        order = sorted(asked, key=lambda job: (not job.allocated, job.submitted, job.name))
        by_name = {demand.job.name: demand for demand in demands}
        for job in order:
            self._grow(by_name[job.name], placed[job.name], decided[job.name].workers, free)
        self._seen = {job.name: job.given(sum(placed[job.name].values()), now) for job in asked}
        return {
            demand.job.name: KindAllocation(
                workers := placed[demand.job.name], next(iter(workers), demand.home), decided[demand.job.name].reason
            )
            for demand in demands
        }

    def again(self, now: float, demands: Sequence[KindDemand], settings: SchedulingSettings) -> float | None:
        names = {demand.job.name for demand in demands}
        return next_change(now, (job for name, job in self._seen.items() if name in names), settings)

    def _pooled(self, demand: KindDemand, kinds: Mapping[str, DeviceKind]) -> Demand:
        """The job as one who knows no kinds sees it."""
        seen = self._seen.get(demand.job.name, demand.job)
        known = {kind: curve for kind, curve in demand.curves.items() if curve.measured and kind in kinds}
        whole = sum(kinds[kind].capacity.total for kind in known)
        points = sorted({workers for curve in known.values() for workers, _ in curve.points})
        average = (
            (n, sum(curve.speed(n) * kinds[kind].capacity.total for kind, curve in known.items()) / max(whole, 1))
            for n in points
        )
        return replace(seen, steps_left=demand.job.steps_left, curve=ScalingCurve.of(average))

    def _grow(self, demand: KindDemand, has: dict[str, int], wanted: int, free: dict[str, int]) -> None:
        """Place what the job lacks of ``wanted``; none at all if its minimum finds no place."""
        job = demand.job
        gathered = self._gathers or demand.mobility != "mixes"
        settled = demand.home if demand.mobility == "stays" and demand.bound else ""
        while (lacks := wanted - sum(has.values())) > 0:
            places = {kind: units // job.units for kind, units in free.items() if kind in demand.curves}
            if gathered:
                least = 1 if has else job.minimum
                only = next(iter(has), settled)
                places = {kind: n for kind, n in places.items() if n >= least and only in ("", kind)}
            places = {kind: n for kind, n in places.items() if n > 0}
            if not places:
                break
            kind = self._chance.choices(sorted(places), [places[kind] for kind in sorted(places)])[0]
            count = min(lacks, places[kind]) if gathered else 1
            has[kind] = has.get(kind, 0) + count
            free[kind] -= count * job.units
            if gathered:
                break
        if sum(has.values()) < job.minimum:
            for kind, count in has.items():
                free[kind] += count * job.units
            has.clear()


@dataclass(frozen=True)
class DeviceResult:
    result: Result
    spent: float
    """Price times units times seconds that jobs had, in the money of the trace."""
    unit_seconds: Mapping[str, float]
    """That jobs had, by kind."""


@dataclass(kw_only=True)
class _Job(JobBooks):
    demand: KindDemand
    running: Counter[str] = field(default_factory=Counter)
    """Workers that count, by kind."""
    joining: list[tuple[float, str, int]] = field(default_factory=list)
    """Those that are on their way: when they will be ready, where, and how many."""
    seen: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def given(self) -> int:
        return self.demand.total

    @property
    def works(self) -> bool:
        return self.running.total() > 0

    def speed(self) -> float:
        return mixed_speed(lambda kind, workers: self.job.speed(workers, kind), +self.running)


def simulate_devices(
    trace: JobTrace,
    decider: Decider,
    cost: ResizeCost,
    settings: SchedulingSettings,
    *,
    knowledge: Knowledge = "all",
) -> DeviceResult:
    """Play a trace whose devices have kinds.

    Args:
        decider: says what each job gets; it is of this simulation alone.
        cost: of each change; a restart is not modelled here.
        knowledge: about the jobs' speeds.

    Raises:
        PolicyError: more was given out than there was, or a job's limits were broken.
    """
    return _Simulation(trace, decider, cost, settings, knowledge).run()


class _Simulation:
    def __init__(
        self, trace: JobTrace, decider: Decider, cost: ResizeCost, settings: SchedulingSettings, knowledge: Knowledge
    ) -> None:
        self._decider, self._cost, self._settings, self._knowledge = decider, cost, settings, knowledge
        self._events = trace.events
        self._clock = Clock(trace)
        self._charged = self._clock.now
        self._all: list[_Job] = []
        self._active: dict[str, _Job] = {}
        self._nodes: dict[str, NodeEvent] = {}
        self._kinds: dict[str, DeviceKind] = {}
        self._names = sorted({event.kind for event in trace.events if isinstance(event, NodeEvent)})
        self._capacity: list[tuple[float, int]] = []
        self._decisions = 0
        self._spent = 0.0
        self._unit_seconds = dict.fromkeys(self._names, 0.0)

    def run(self) -> DeviceResult:
        self._clock.run(self._happen, self._decide, self._charge)
        outcomes = tuple(job.outcome() for job in self._all)
        result = Result(outcomes, tuple(self._capacity), self._decisions)
        return DeviceResult(result, self._spent, self._unit_seconds)

    def _charge(self) -> None:
        """Count what the jobs had since the last event."""
        elapsed, self._charged = self._clock.now - self._charged, self._clock.now
        for job in self._active.values():
            for kind, count in job.demand.workers.items():
                units = count * job.job.units * elapsed
                self._unit_seconds[kind] += units
                self._spent += units * self._kinds[kind].unit_price(on_demand=False)

    def _happen(self, kind: Occasion, subject: int | str, plan: int) -> bool:
        if kind == "trace":
            self._arrive(int(subject))
        if kind in ("trace", "wake"):
            return True
        job = self._active.get(str(subject))
        if job is None or (kind == "end" and job.plan != plan):
            return False
        job.catch_up(self._clock.now)
        if kind == "joined":
            return self._join(job)
        job.end(self._clock.now)
        del self._active[job.job.name]
        return True

    def _join(self, job: _Job) -> bool:
        ready = [(kind, count) for due, kind, count in job.joining if due <= self._clock.now]
        if not ready:
            return False  # they were called off
        job.joining = [joiner for joiner in job.joining if joiner[0] > self._clock.now]
        if job.running.total():
            job.resumes = max(job.resumes, self._clock.now + self._cost.pause)
        for kind, count in ready:
            job.running[kind] += count
        self._learn(job)
        job.schedule_end(self._clock)
        return self._knowledge == "seen"

    def _arrive(self, index: int) -> None:
        event = self._events[index]
        if isinstance(event, JobEvent):
            self._submit(event)
            return
        if isinstance(event, GoneEvent):
            del self._nodes[event.name]
        else:
            self._nodes[event.name] = event
        self._kinds = {name: self._kind(name) for name in self._names}
        self._capacity.append((self._clock.now, sum(node.units for node in self._nodes.values())))

    def _kind(self, name: str) -> DeviceKind:
        nodes = [node for node in self._nodes.values() if node.kind == name]
        spot = [node for node in nodes if node.spot]
        steady = [node for node in nodes if not node.spot]

        def price(of: list[NodeEvent]) -> float | None:
            units = sum(node.units for node in of)
            return sum(node.units * node.price for node in of) / units if units else None

        there = Capacity(sum(node.units for node in steady), sum(node.units for node in spot))
        rating = max((node.rating for node in nodes), default=1.0)
        return DeviceKind(there, rating, price(steady) or price(spot) or 1.0, price(spot))

    def _submit(self, event: JobEvent) -> None:
        curves = {kind: ScalingCurve() for kind in event.kinds}
        if self._knowledge == "all":
            last = event.maximum  # where a kind was not measured with as many, more of it bring nothing
            curves = {k: ScalingCurve.of([*of.items(), (last, event.speed(last, k))]) for k, of in event.kinds.items()}
        job = event.demand(ScalingCurve(), event.steps)
        found = _Job(job=event, demand=KindDemand(job, curves, event.mobility), synced=self._clock.now)
        self._all.append(found)
        self._active[event.name] = found

    def _learn(self, job: _Job) -> None:
        """Show the policy how fast the job is on each kind of its mix: every worker's pace is measured."""
        there = +job.running
        workers = there.total()
        new = {kind for kind in there if workers not in job.seen.get(kind, {})} if self._knowledge == "seen" else ()
        for kind in new:
            job.seen.setdefault(kind, {})[workers] = job.job.speed(workers, kind)
        if new:
            seen = {kind: ScalingCurve.of(known.items()) for kind, known in job.seen.items()}
            job.demand = replace(job.demand, curves={**job.demand.curves, **seen})

    def _decide(self) -> None:
        for job in self._active.values():
            if job.running.total():
                job.catch_up(self._clock.now)
                left = max(1, math.ceil(job.job.steps - job.done))
                job.demand = replace(job.demand, job=replace(job.demand.job, steps_left=left))
        demands = [job.demand for job in self._active.values()]
        decision = self._decider.decide(self._clock.now, demands, self._kinds, self._settings)
        self._decisions += 1
        _check(decision, demands, self._kinds)
        for name, job in self._active.items():
            job.reason = decision[name].reason
            self._give(job, decision[name])
        due = self._decider.again(self._clock.now, [job.demand for job in self._active.values()], self._settings)
        self._clock.wake(math.inf if due is None else due)

    def _give(self, job: _Job, allocation: KindAllocation) -> None:
        now, before = self._clock.now, job.demand.workers
        if allocation.workers != before:
            job.catch_up(now)
        job.demand = job.demand.given(allocation, now)
        wanted = job.demand.workers
        if wanted == before:
            return
        job.change(now, job.demand.total)
        had = Counter(job.running)
        for kind in sorted({*wanted, *before}):
            change = wanted.get(kind, 0) - before.get(kind, 0)
            if change > 0:
                ready = now + (self._cost.join if job.job.join is None else job.job.join)
                job.joining.append((ready, kind, change))
                self._clock.push(ready, "joined", job.job.name)
            elif change < 0:
                self._take(job, kind, -change)
        if job.running != had:
            job.resumes = max(job.resumes, now + self._cost.pause)
            self._learn(job)
            job.schedule_end(self._clock)

    def _take(self, job: _Job, kind: str, count: int) -> None:
        """Take workers of one kind away; the last to come are called off first, which costs nobody anything."""
        for at in range(len(job.joining) - 1, -1, -1):
            due, where, joiners = job.joining[at]
            off = min(joiners, count) if where == kind else 0
            job.joining[at] = due, where, joiners - off
            count -= off
        job.joining = [joiner for joiner in job.joining if joiner[2]]
        job.running[kind] -= count
        job.running = +job.running


def _check(decision: Mapping[str, KindAllocation], demands: list[KindDemand], kinds: Mapping[str, DeviceKind]) -> None:
    used: Counter[str] = Counter()
    for demand in demands:
        job, given = demand.job, decision[demand.job.name].workers
        total = sum(given.values())
        if given and not job.minimum <= total <= job.maximum:
            raise PolicyError(f"{job.name} was given {total} workers, not {job.minimum} to {job.maximum}")
        if len(given) > 1 and demand.mobility != "mixes":
            raise PolicyError(f"{job.name} was given workers of {len(given)} kinds, and may only have one")
        if demand.bound and demand.mobility == "stays" and given and set(given) != {demand.home}:
            raise PolicyError(f"{job.name} was moved from {demand.home}, where it has to stay")
        for kind, count in given.items():
            used[kind] += count * job.units
    for kind, units in used.items():
        if units > kinds[kind].capacity.total:
            raise PolicyError(f"{units} units of {kind} were given out of {kinds[kind].capacity}")

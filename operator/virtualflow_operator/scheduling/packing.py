"""Which waiting jobs compute on devices of others meanwhile, in turns with them (JigSaw's packing by iteration). Pure.

A policy decides first, as if there was no packing: who has devices of its own, and who waits. Then those who wait may
become *lodgers* on the devices of one *host*, where their turns fit between its own: nobody is predicted to be slower
by more than ``max_slowdown`` than with these devices to itself, and together they must make more progress than before.
So packing takes nothing from anybody's share, and nobody waits longer for devices of its own because of it.

(Kumar, Akella, Subramanian and Venkataraman, "Doing More by Doing Less", DistributedML 2021, arXiv 2111.10672, pack by
iterations so. How they choose who goes with whom is not copied from there.)

A lodger's workers are all on devices of one host, so that they wait for the same turns; the slowest of its devices is
what a job waits for. Lodgers count nothing towards the limit of their namespace. A job whose speeds were not measured,
or not on two numbers of workers, is not packed: nothing says how much of its step it computes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite
from statistics import fmean

from virtualflow_operator.scheduling.demand import Allocation, Demand, RotatingPasses, ScalingCurve
from virtualflow_operator.settings import PackingSettings

# A job's step in phases, and how fast jobs are that share one device in turns. Pure.
#
# A step *computes* on the device; then it is *away*: gradients are exchanged, the update is applied, samples are
# loaded. Jobs that share a device compute one after the other and are away whenever they like (the turn server's rule,
# first come, first served), so each begins to compute when it is back and everybody who asked before it has computed
# once. A job asks for all of its devices at once, and is away when the last of them has computed.
#
# Where backward passes end early, a job's devices compute for unequal times, and long and short turns of several jobs
# meet. So these are followed on all devices together, and other jobs on one.
#
# What is left out: phases always take equally long, a device computes for one job as fast as it did for that job
# alone, and the away phases of several jobs do not slow each other down.

_SETTLING, _COUNTED = 8, 24
"""Steps of the slowest job that a prediction leaves out, and that it is the mean of: by then turns have fallen into
their rhythm, or wander evenly."""
_TURNS = 20_000
"""So many turns are looked at in the end: of jobs that differ by more, the slowest is taken at its bound."""


@dataclass(frozen=True)
class Phases:
    """Seconds of one step of a job that has its devices to itself, on each of them."""

    compute: float
    """On average."""
    away: float = 0.0
    """Exchange and update, and loading where that is not hidden behind something."""
    uneven: tuple[tuple[float, ...], ...] = ()
    """By worker, and in each step of a cycle: how many times as long as on average it computes; empty: once."""

    def __post_init__(self) -> None:
        if not (isfinite(self.compute) and isfinite(self.away) and self.compute > 0 and self.away >= 0):
            raise ValueError(f"a step computes for more than 0 s and is away for 0 or more, not {self}")

    @property
    def step(self) -> float:
        """With each step as long as its slowest worker computes, and away."""
        return self.compute * _slowest(self.uneven) + self.away

    @property
    def longest(self) -> float:
        """That any worker computes in any step."""
        return self.compute * max((max(of) for of in self.uneven), default=1.0)

    def computes(self, worker: int, step: int) -> float:
        """Seconds for which a worker computes in a step."""
        if not self.uneven:
            return self.compute
        of = self.uneven[worker]
        return self.compute * of[step % len(of)]

    @staticmethod
    def at(curve: ScalingCurve, workers: int, passes: RotatingPasses | None = None) -> Phases:
        """What a measured curve says of a step on that many workers.

        They divide what one worker computes among them, so what a step takes beyond its part of that is no computing.
        One worker alone is taken to compute all the time. Those with ``passes`` wait for the slowest of them.
        """
        uneven = passes.work(workers) if passes is not None else ()
        step = 1 / curve.speed(workers)
        slowest = _slowest(uneven)
        compute = min(step / slowest, 1 / (curve.speed(1) * workers))
        return Phases(compute, max(0.0, step - compute * slowest), uneven)


def slowdown_bound(jobs: Sequence[Phases], job: int) -> float:
    """How many times as long a step takes at the most: everybody else computes once before each of its turns."""
    return (jobs[job].away + sum(other.longest for other in jobs)) / jobs[job].step


def _slowest(uneven: Sequence[Sequence[float]]) -> float:
    """The mean over the steps of a cycle of what its slowest worker computes."""
    return fmean(map(max, zip(*uneven, strict=True))) if uneven else 1.0


def share(jobs: Sequence[Phases], places: Sequence[Sequence[int]] = ()) -> tuple[float, ...]:
    """Seconds of a step of each job when they share devices in turns, after they have fallen into their rhythm.

    Args:
        places: the device of each worker of each job; empty: one device, and a worker of each job.
    """
    if len(jobs) == 1:
        return (jobs[0].step,)
    if not places and all(job == jobs[0] for job in jobs):
        return (max(jobs[0].step, sum(job.compute for job in jobs)),) * len(jobs)
    bounds = [slowdown_bound(jobs, n) * job.step for n, job in enumerate(jobs)]
    begin, end = _SETTLING * max(bounds), (_SETTLING + _COUNTED) * max(bounds)
    queue = [(0.0, n) for n in range(len(jobs))]  # when each is back, by time: first come, first served
    devices = places or [(0,)] * len(jobs)
    free: dict[int, float] = {}
    first, last, steps, made = [0.0] * len(jobs), [0.0] * len(jobs), [-1] * len(jobs), [0] * len(jobs)
    for _ in range(_TURNS):
        back, n = heapq.heappop(queue)
        computed = back
        for worker, device in enumerate(devices[n]):
            free[device] = max(free.get(device, 0.0), back) + jobs[n].computes(worker, made[n])
            computed = max(computed, free[device])
        made[n] += 1
        heapq.heappush(queue, (computed + jobs[n].away, n))
        if computed >= begin:
            steps[n] += 1
            last[n] = computed
            if not steps[n]:
                first[n] = computed
        if back >= end:
            break
    return tuple(
        min((last[n] - first[n]) / steps[n], bound) if steps[n] > 0 else bound for n, bound in enumerate(bounds)
    )


@dataclass(frozen=True)
class Seat:
    host: str
    workers: int
    reason: str
    """In one sentence for the job's status."""


@dataclass(frozen=True)
class Packing:
    seats: Mapping[str, Seat]
    """Of lodgers."""
    slowdowns: Mapping[str, float]
    """Of those and of all that could be hosts: how many times as long as alone a step is predicted to take."""


@dataclass(frozen=True)
class _Host:
    """A job with devices of its own, and who is on them."""

    demand: Demand
    devices: tuple[tuple[str, ...], ...]
    phases: Mapping[str, Phases]
    """Of it and its lodgers."""
    slowdowns: Mapping[str, float]

    def load(self, most: int) -> float:
        """Which part of the time its emptiest device would compute if nobody waited; infinite without room for a job.

        Somebody on a device is slowed down by at least that.
        """
        free = (there for there in self.devices if len(there) < most)
        return min(
            (sum(self.phases[name].compute / self.phases[name].step for name in there) for there in free), default=inf
        )

    @property
    def progress(self) -> float:
        """Of all on these devices: steps of one device, in steps of each job alone."""
        return sum(1 / self.slowdowns[name] for there in self.devices for name in there)

    def with_lodger(self, lodger: Demand, workers: int, most: int) -> _Host | None:
        """The same with one more lodger, on the devices with the fewest jobs; ``None``: there is no room."""
        order = sorted(range(len(self.devices)), key=lambda n: (len(self.devices[n]), n))
        chosen = {n for n in order[:workers] if len(self.devices[n]) < most}
        if len(chosen) < workers:
            return None
        devices = tuple((*there, lodger.name) if n in chosen else there for n, there in enumerate(self.devices))
        phases = {**self.phases, lodger.name: Phases.at(lodger.curve, workers, lodger.passes)}
        return _Host(self.demand, devices, phases, _slowdowns(devices, phases))


@dataclass(frozen=True)
class _Place:
    host: _Host
    """With the lodger."""
    workers: int
    gain: float


def pack(
    demands: Sequence[Demand],
    allocations: Mapping[str, Allocation],
    most: int,
    settings: PackingSettings,
    seated: Mapping[str, str] | None = None,
) -> Packing:
    """Find lodgers places, the oldest first.

    Args:
        most: jobs of a device, at most.
        seated: the host of each that is a lodger already: it stays there if it can.
    """
    before = seated or {}
    able = {demand.name: demand for demand in demands if _has_phases(demand)}
    given = {name: allocations[name].workers for name in able}
    hosts = {name: _host(demand, given[name]) for name, demand in able.items() if given[name]}
    by_load = sorted((host.load(most), name) for name, host in hosts.items())
    lodgers = [
        demand
        for name, demand in able.items()
        if not given[name] and allocations[name].shortage is None and not demand.minimum_on_demand
    ]
    seats: dict[str, Seat] = {}
    for lodger in sorted(lodgers, key=lambda lodger: (lodger.name not in before, lodger.submitted, lodger.name)):
        stays = hosts.get(before.get(lodger.name, ""))
        place = None if stays is None else _try(lodger, stays, most, settings)
        if place is None:
            found = (_try(lodger, hosts[name], most, settings) for name in _likely(lodger, by_load, settings))
            place = max((one for one in found if one), key=lambda one: one.gain, default=None)
        if place is None:
            continue
        name = place.host.demand.name
        by_load.remove((hosts[name].load(most), name))
        hosts[name] = place.host
        insort(by_load, (place.host.load(most), name))
        seats[lodger.name] = Seat(name, place.workers, f"computes in turns with {name} until devices are free")
    return Packing(seats, {name: slow for host in hosts.values() for name, slow in host.slowdowns.items()})


def _has_phases(demand: Demand) -> bool:
    return len(demand.curve.points) > 1


def _host(demand: Demand, workers: int) -> _Host:
    phases = {demand.name: Phases.at(demand.curve, workers, demand.passes)}
    return _Host(demand, ((demand.name,),) * workers, phases, {demand.name: 1.0})


def _likely(lodger: Demand, by_load: Sequence[tuple[float, str]], settings: PackingSettings) -> Iterator[str]:
    """Some hosts into whose free time the lodger may fit, the fullest of them first."""
    # With more workers, a larger part of each step is no computing.
    phases = Phases.at(lodger.curve, lodger.maximum, lodger.passes)
    room = settings.max_slowdown - phases.compute / phases.step
    end = bisect_right(by_load, (room, ""))
    for _, name in reversed(by_load[max(0, end - settings.tries) : end]):
        yield name


def _try(lodger: Demand, host: _Host, most: int, settings: PackingSettings) -> _Place | None:
    """The most workers with which a lodger has a place there that is worth it."""
    if lodger.units != host.demand.units:
        return None
    largest = min(lodger.maximum, len(host.devices))
    for workers in dict.fromkeys((largest, lodger.minimum)):
        if workers < lodger.minimum:
            continue
        found = host.with_lodger(lodger, workers, most)
        if found is None or max(found.slowdowns.values()) > settings.max_slowdown:
            continue
        gain = found.progress - host.progress
        if gain >= settings.least_gain * workers:
            return _Place(found, workers, gain)
    return None


def _slowdowns(devices: Sequence[Sequence[str]], phases: Mapping[str, Phases]) -> dict[str, float]:
    """Of each job: by the slowest of its devices."""
    slowest = dict.fromkeys(phases, 1.0)
    if any(of.uneven for of in phases.values()):
        places = tuple(tuple(n for n, there in enumerate(devices) if name in there) for name in phases)
        steps = _share(tuple(phases.values()), places)
        return {name: max(1.0, step / phases[name].step) for name, step in zip(phases, steps, strict=True)}
    for there in {tuple(sorted(there)) for there in devices}:
        steps = _share(tuple(phases[name] for name in there))
        for name, step in zip(there, steps, strict=True):
            slowest[name] = max(slowest[name], step / phases[name].step)
    return slowest


_share = lru_cache(maxsize=16_384)(share)

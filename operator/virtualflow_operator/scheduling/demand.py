"""What a policy sees and says: the jobs of a queue, the capacity they share, and what each of them gets.

All of it are values. A policy has no clock and no memory: what it must know of the past (who runs, since when) comes
with each job, so the operator and the simulator can run the very same functions. Times are seconds on one clock, which
may begin anywhere. Capacity is counted in whole *units* of one resource: GPUs, or thousandths of a CPU. Nodes are not
modelled: units may be free on several nodes where a worker of several units fits on none. Such a worker stays pending,
and whoever applies the allocation sees it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import fsum, isfinite
from typing import Literal

from virtualflow.protocol.wording import counted
from virtualflow_operator.settings import SchedulingSettings

# How a job's speed grows with its workers, as far as it was measured.
#
# A policy compares what another worker would bring to each job, and its choice is only stable and exact when no worker
# brings more than the one before it. So the measured points are never used as they are: the curve is their least
# concave majorant through the origin, which never falls. A job tells its own speeds, so no figure makes it scale better
# than linearly from its smallest measured size, and what it has not told it gains no more by than by telling.

_EXACT = 1e-9
"""Differences below this part of a speed are rounding."""
_MOST_SPEED = 1e9
"""Steps per second; no job makes as many."""
DOUBLING = 0.9
"""The default curve: with each doubling beyond the largest measured size, a worker brings this part of what it did."""
_DOUBLINGS = 4
"""So many; beyond them a worker brings no less. Each costs a decision about a thousand jobs some ms."""


@dataclass(frozen=True)
class ScalingCurve:
    """Steps per second by number of workers.

    Nothing measured: the default curve from one worker on. One number of workers: a line up to it. Beyond the largest:
    the default curve from what a worker brings between the last two; the measurement that follows a growth puts it
    right.
    """

    points: tuple[tuple[int, float], ...] = ()
    """(workers, steps per second), in any order; of several for one number the largest counts."""

    def __post_init__(self) -> None:
        for workers, speed in self.points:
            if workers < 1 or not isfinite(speed) or speed <= 0:
                raise ValueError(
                    f"a measured point is (workers from 1, steps per second above 0), not {workers, speed}"
                )

    @staticmethod
    def of(points: Iterable[tuple[int, float]]) -> ScalingCurve:
        """The curve of these points, with those left out that are no measurement (a speed of 0, or not a number).

        A speed counts as :data:`_MOST_SPEED` at most: it is the job's own word, and sums of it stay finite.
        """
        return ScalingCurve(
            tuple(sorted((w, min(s, _MOST_SPEED)) for w, s in points if w >= 1 and isfinite(s) and s > 0))
        )

    @property
    def measured(self) -> bool:
        """Whether its speeds are steps per second; otherwise they are relative to one worker."""
        return bool(self.points)

    @cached_property
    def _corners(self) -> tuple[tuple[int, float], ...]:
        best: dict[int, float] = {}
        for workers, speed in self.points:
            best[workers] = max(speed, best.get(workers, 0.0))
        measured = sorted(best.items()) or [(1, 1.0)]
        most = measured[0][1] / measured[0][0]
        corners = [(0, 0.0)]
        highest = 0.0
        for workers, speed in measured:
            highest = max(highest, min(speed, most * workers))  # more are never slower: they need not be used
            while len(corners) > 1:  # slopes stand here in full: a decision about many jobs does little else
                (first, low), (second, high) = corners[-2:]
                if (high - low) / (second - first) > (highest - high) / (workers - second):
                    break
                corners.pop()
            corners.append((workers, highest))
        slope = _slope(*corners[-2:])
        for _ in range(_DOUBLINGS if slope > 0 else 0):
            workers, speed = corners[-1]
            slope *= DOUBLING
            corners.append((2 * workers, speed + slope * workers))
        return tuple(corners)

    def speed(self, workers: int) -> float:
        """Steps per second with ``workers``; relative to one worker if nothing was measured."""
        if workers <= 0:
            return 0.0
        corners = self._corners
        for left, right in pairwise(corners):
            if workers <= right[0]:
                return left[1] + _slope(left, right) * (workers - left[0])
        return corners[-1][1] + _slope(corners[-2], corners[-1]) * (workers - corners[-1][0])

    def speedup(self, workers: int) -> float:
        """The speed relative to one worker: at most ``workers``."""
        return self.speed(workers) / self.speed(1)

    @cached_property
    def gains(self) -> tuple[tuple[int, float], ...]:
        """What a worker more brings, in steps per second: (up to which number of workers, each of them so much).

        It falls from one to the next; the last holds beyond its number, too.
        """
        return tuple((right[0], _slope(left, right)) for left, right in pairwise(self._corners))

    def gain(self, workers: int) -> float:
        """Steps per second that the last of so many workers brings."""
        return next((gain for upto, gain in self.gains if workers <= upto), self.gains[-1][1])

    def worthwhile(self, minimum: int, maximum: int, efficiency: float) -> int:
        """Up to how many workers each further one brings more than ``efficiency`` of what one brings at the minimum.

        Args:
            efficiency: from 0 (whatever makes the job faster) to 1 (nothing but linear scaling).
        """
        least = efficiency * self.speed(minimum) / minimum * (1 - _EXACT)
        low, high = minimum, maximum
        while low < high:  # gains only fall, so the last good one can be found by halving
            middle = (low + high + 1) // 2
            if self.gain(middle) > least:
                low = middle
            else:
                high = middle - 1
        return low


def _slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


@dataclass(frozen=True)
class RotatingPasses:
    """Backward passes that end early, each virtual node's elsewhere in every step: structured partial backpropagation.

    (Kumar, Akella, Subramanian and Venkataraman, "Doing More by Doing Less", DistributedML 2021, arXiv 2111.10672.)
    """

    costs: tuple[float, ...]
    """By class: the computing of a virtual node, as a share of one with a whole pass."""
    virtual_nodes: int

    @lru_cache(maxsize=1_024)  # noqa: B019  (a value)
    def work(self, workers: int) -> tuple[tuple[float, ...], ...]:
        """What each worker computes in each step of a cycle, in multiples of what one computes on average.

        Empty where all compute alike: every worker has as many virtual nodes of each class. They have even ranges.
        """
        classes = len(self.costs)
        bounds = [worker * self.virtual_nodes // workers for worker in range(workers + 1)]
        found = [
            [fsum(self.costs[(node + step) % classes] for node in range(*ends)) for step in range(classes)]
            for ends in pairwise(bounds)
        ]
        mean = fsum(map(fsum, found)) / (workers * classes)
        if all(abs(work - mean) <= _EXACT * mean for of in found for work in of):
            return ()
        return tuple(tuple(work / mean for work in of) for of in found)


@dataclass(frozen=True)
class Demand:
    name: str
    """Unique: ``namespace/name``."""
    namespace: str
    submitted: float
    """When the job came."""
    maximum: int
    """Workers, at most; where the job's efficiency limits it, the caller gives the lower number."""
    minimum: int = 1
    """Workers, at least, whenever it runs."""
    requested: int = 0
    """Workers that policies with fixed sizes give; 0: the maximum."""
    units: int = 1
    """Of the counted resource, for one worker."""
    priority: int = 0
    """Higher goes first."""
    weight: float = 1.0
    """Of its share, above 0."""
    allocated: int = 0
    """Workers that it has been given; 0: it waits, or is suspended."""
    since: float | None = None
    """When it began to run, or to wait, as it does now; ``None``: when it was submitted."""
    resized: float | None = None
    """When ``allocated`` last changed; ``None``: when it was submitted."""
    waited: float = 0.0
    """Seconds of the wait that ended when it began to run; counts only while it runs."""
    steps_left: int | None = None
    """Steps to its end, if that is known."""
    expected_left: float | None = None
    """Unit-seconds at its minimum that jobs like it would still need (``service_time``), for when its steps or its
    speed are not known; ``None``: nothing is known of such jobs."""
    curve: ScalingCurve = field(default_factory=ScalingCurve)
    minimum_on_demand: bool = False
    """Whether its minimum must be on on-demand capacity."""
    passes: RotatingPasses | None = None
    """``None``: all backward passes are whole, or its virtual nodes are assigned by what they compute."""

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ValueError(f"{self.name}: give 1 <= minimum <= maximum, not {self.minimum} and {self.maximum}")
        if self.requested and not self.minimum <= self.requested <= self.maximum:
            raise ValueError(f"{self.name}: ask for {self.minimum} to {self.maximum} workers, not {self.requested}")
        if self.units < 1 or self.allocated < 0:
            raise ValueError(f"{self.name}: units are 1 or more and allocated is 0 or more")
        if not (isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"{self.name}: give a weight above 0, not {self.weight}")

    @property
    def fixed(self) -> int:
        """Workers under a policy with fixed sizes."""
        return self.requested or self.maximum

    @property
    def began(self) -> float:
        return self.submitted if self.since is None else self.since

    @property
    def changed(self) -> float:
        return self.began if self.resized is None else self.resized

    @property
    def of_fixed_size(self) -> Demand:
        """The job with no more and no fewer workers than policies with fixed sizes give."""
        return replace(self, minimum=self.fixed, maximum=self.fixed)

    def waiting(self, now: float) -> float:
        """Seconds that it has waited; 0 while it runs."""
        return 0.0 if self.allocated else max(0.0, now - self.began)

    def given(self, workers: int, now: float) -> Demand:
        """The job after an allocation was applied: what the next decision is to see."""
        if workers == self.allocated:
            return self
        if bool(workers) == bool(self.allocated):
            return replace(self, allocated=workers, resized=now)
        waited = self.waiting(now) if workers else 0.0
        return replace(self, allocated=workers, since=now, resized=now, waited=waited)


@dataclass(frozen=True)
class Capacity:
    on_demand: int
    spot: int = 0
    """Units that may be withdrawn at any time."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Units that the jobs of a namespace may have together; a namespace without an entry has no limit."""

    @property
    def total(self) -> int:
        return self.on_demand + self.spot


@dataclass(frozen=True)
class Shortage:
    """Why a job can never run: what its minimum needs, and the most that it could have."""

    minimum: int
    needed: int
    offered: int
    where: str
    """Of what those are the most."""

    def told(self, amount: Callable[[int], str] = "{} units".format) -> str:
        """In words, with ``amount`` for a number of units."""
        return (
            f"cannot run: its minimum of {counted(self.minimum, 'worker')} needs {amount(self.needed)} and "
            f"{self.where} is "
            f"{amount(self.offered)}; lower the minimum or raise that"
        )


@dataclass(frozen=True)
class Allocation:
    workers: int
    """0: it waits, or is to be suspended."""
    reason: str
    """Why this number, in one sentence for the job's status."""
    on_demand: int = 0
    """How many of the workers must be on on-demand nodes; the others go on spot nodes first."""
    shortage: Shortage | None = None
    """Why it can never run, if so."""


Policy = Callable[[float, Sequence[Demand], Capacity, SchedulingSettings], dict[str, Allocation]]
"""``(now, jobs, capacity, settings) -> {name: allocation}``, with an entry for every job.

The order of the jobs does not matter. When every job is ``given`` what it was allocated, the same moment's decision is
the same.

Raises:
    ValueError: two jobs bear the same name.
"""


# What is still free while a policy hands out capacity, and in words what is in the way.

Bottleneck = Literal["", "capacity", "on-demand", "namespace"]


class Room:
    """Free units: of all, of on-demand capacity, of each namespace's limit.

    Workers of a job's minimum that must be on on-demand capacity take from it; all others may be anywhere, so two sums
    are enough to say that everything has a place.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.total = capacity.total
        self.on_demand = capacity.on_demand
        self._limits = dict(capacity.limits)

    def _of(self, namespace: str) -> int:
        return min(self.total, self._limits.get(namespace, self.total))

    def most(self, demand: Demand) -> int:
        """Workers that the job could have beside what it was given here, whatever its maximum."""
        return max(0, self._of(demand.namespace)) // demand.units

    def limit(self, namespace: str) -> int:
        """Units that jobs of the namespace can still get."""
        return max(0, self._of(namespace))

    def lacks(self, demand: Demand, workers: int) -> Bottleneck:
        """What is in the way of starting the job with ``workers``; empty if they fit."""
        units = workers * demand.units
        if units > self._limits.get(demand.namespace, units):
            return "namespace"
        if units > self.total:
            return "capacity"
        if demand.minimum_on_demand and demand.minimum * demand.units > self.on_demand:
            return "on-demand"
        return ""

    def start(self, demand: Demand, workers: int) -> None:
        """Take what the job needs to run with ``workers``."""
        if demand.minimum_on_demand:
            self.on_demand -= demand.minimum * demand.units
        self.grow(demand, workers)

    def grow(self, demand: Demand, workers: int) -> None:
        """Take ``workers`` more for a job that was started here."""
        units = workers * demand.units
        self.total -= units
        if demand.namespace in self._limits:
            self._limits[demand.namespace] -= units


def sort_out(demands: Iterable[Demand], capacity: Capacity) -> tuple[list[Demand], dict[str, Allocation]]:
    """Tell the jobs that could run on the empty queue, by name, from those that never can, each with its reason."""
    able: list[Demand] = []
    never: dict[str, Allocation] = {}
    seen: set[str] = set()
    for demand in sorted(demands, key=lambda demand: demand.name):
        if demand.name in seen:
            raise ValueError(f"two jobs are called {demand.name}; give each a name of its own")
        seen.add(demand.name)
        lack = Room(capacity).lacks(demand, demand.minimum)
        if not lack:
            able.append(demand)
            continue
        offered, where = {
            "namespace": (capacity.limits.get(demand.namespace, 0), f"the limit of namespace {demand.namespace}"),
            "on-demand": (capacity.on_demand, "the on-demand capacity of the queue"),
        }.get(lack, (capacity.total, "the capacity of the queue"))
        shortage = Shortage(demand.minimum, demand.minimum * demand.units, offered, where)
        never[demand.name] = Allocation(0, shortage.told(), shortage=shortage)
    return able, never


def allocation(demand: Demand, workers: int, reason: str) -> Allocation:
    """An allocation with its minimum on on-demand capacity if the job asks for that."""
    return Allocation(workers, reason, min(workers, demand.minimum) if demand.minimum_on_demand else 0)

"""Who decides in a simulation with kinds of device: the operator's policy that knows them, or one that does not.

The one that does not sees a single pool of units and a job's speed on the average device of it. Where the workers that
it gives come to run is left to chance, as it is with a cluster's own scheduler: it is what the other is compared with.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    next_change,
)
from virtualflow_operator.settings import SchedulingSettings


class Decider(Protocol):
    """What a simulation asks."""

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
        """What each job gets."""
        return decide_by_kind(self._policy, now, demands, kinds, settings, elastic=self._elastic)

    def again(self, now: float, demands: Sequence[KindDemand], settings: SchedulingSettings) -> float | None:
        """When time alone may change that."""
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
        """What each job gets."""
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
        """When time alone may change that."""
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

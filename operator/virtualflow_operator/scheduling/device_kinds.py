"""Kinds of device in one queue: what there is of each, how fast a job is on each, and what it gets of each.

A step is synchronous: it takes as long as its slowest worker. How a job may use several kinds is therefore a property
of the job (:data:`Mobility`). One that must give the same bits stays on the kind on which it made its first step, for
other devices round differently. One that need not may move between steps, and may train on several kinds at once:
its virtual nodes are split by speed, so every device of the mix adds its part (:func:`mixed_speed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from types import MappingProxyType
from typing import Literal

from virtualflow_operator.scheduling.demand import Capacity, Demand, ScalingCurve, Shortage

Mobility = Literal["stays", "moves", "mixes"]
"""What a job may do that has begun: stay on its kind for life; change it between steps; be on several at once."""

NONE: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class DeviceKind:
    """What a queue has of one kind of device."""

    capacity: Capacity
    """Its units; limits of namespaces are of this kind."""
    rating: float = 1.0
    """How fast it is beside the other kinds, as a first guess: it counts until jobs have been measured on both."""
    price: float = 1.0
    """Of an on-demand unit for a second, in any currency."""
    spot_price: float | None = None
    """Of a spot unit; ``None``: as on demand."""

    def __post_init__(self) -> None:
        prices = (self.price, self.price if self.spot_price is None else self.spot_price)
        if not all(isfinite(number) and number > 0 for number in (self.rating, *prices)):
            raise ValueError("ratings and prices of a kind of device are above 0")

    def unit_price(self, *, on_demand: bool) -> float:
        """Of a unit for a second: of all that there is on average, or of on-demand capacity alone."""
        if on_demand or self.spot_price is None or not self.capacity.total:
            return self.price
        there = self.capacity
        return (self.price * there.on_demand + self.spot_price * there.spot) / there.total


@dataclass(frozen=True)
class KindDemand:
    job: Demand
    """What every policy sees of it. ``allocated`` counts the workers at home; its curve is replaced by that of the
    kind."""
    curves: Mapping[str, ScalingCurve]
    """The kinds that it may use. One without points is not measured there."""
    mobility: Mobility = "mixes"
    home: str = ""
    """The kind in whose share it is, or for which it waits; empty: not decided yet."""
    lent: Mapping[str, int] = field(default_factory=lambda: NONE)
    """Workers that it has elsewhere, as long as nobody there needs their place."""
    bound: bool = False
    """Whether it has begun, so that a job that ``stays`` has no choice any more."""

    @property
    def workers(self) -> dict[str, int]:
        return joined(self.home, self.job.allocated, self.lent)

    @property
    def total(self) -> int:
        return self.job.allocated + sum(self.lent.values())

    def given(self, allocation: KindAllocation, now: float) -> KindDemand:
        at_home = allocation.workers.get(allocation.home, 0)
        job = self.at(allocation.home).given(at_home, now)
        lent = {kind: count for kind, count in allocation.workers.items() if kind != allocation.home}
        moved = allocation.workers != self.workers
        if moved and at_home and self.job.allocated:
            job = replace(job, resized=now)
        bound = self.bound or bool(allocation.workers)
        return replace(self, job=job, home=allocation.home, lent=lent, bound=bound)

    def at(self, kind: str) -> Demand:
        """The job as the policy of that kind sees it.

        One that moves there runs there already, as far as the policy is to know. A turn that it had for its long wait
        is left behind.
        """
        if kind == self.home or not self.total:
            return self.job
        return replace(self.job, allocated=self.lent.get(kind, 0) or self.job.allocated, waited=0.0)


@dataclass(frozen=True)
class KindAllocation:
    """What a job gets, as :class:`.demand.Allocation` by kind."""

    workers: Mapping[str, int]
    """By kind, none of them 0; empty: it waits, or is to be suspended."""
    home: str
    """The kind in whose share it is, or for which it waits."""
    reason: str
    on_demand: int = 0
    shortage: Shortage | None = None


def joined(home: str, at_home: int, lent: Mapping[str, int]) -> dict[str, int]:
    """Workers by kind, those at home and those elsewhere."""
    return ({home: at_home} if at_home else {}) | {kind: count for kind, count in lent.items() if count}


def mixed_speed(speed: Callable[[str, int], float], workers: Mapping[str, int]) -> float:
    """Steps per second of a job on several kinds, with its virtual nodes split by speed.

    Every worker is worth what one of its kind brings among as many of its own: the mean over the workers of what the
    whole would make on their kind alone. Exact on one kind, and where the gradients' exchange takes no time; where it
    takes as long on all kinds, a little too low. What is left over where virtual nodes do not divide is not counted.

    Args:
        speed: of so many workers of one kind.
    """
    total = sum(workers.values())
    return sum(count * speed(kind, total) for kind, count in workers.items()) / total if total else 0.0

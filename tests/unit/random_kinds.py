"""Random queues with kinds of device, and what holds of every allocation there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import strategies as st
from random_queues import NAMESPACES, curves, demands

from virtualflow_operator.scheduling import Capacity, DeviceKind, KindAllocation, KindDemand

NAMES = ("V100", "P100", "K80")
Queue = tuple[list[KindDemand], dict[str, DeviceKind]]


@st.composite
def _jobs(draw: st.DrawFn, index: int, kinds: Sequence[str]) -> KindDemand:
    """A job in any state: at home, waiting for it, running elsewhere meanwhile, or new."""
    job = draw(demands(index))
    allowed = draw(st.sets(st.sampled_from(NAMES), min_size=1))
    mobility = draw(st.sampled_from(["stays", "moves", "mixes"]))
    bound = job.allocated > 0 or draw(st.booleans())
    places = sorted(allowed & set(kinds))
    home = draw(st.sampled_from(places)) if places and bound else ""
    if not home:
        job = replace(job, allocated=0)
    lent = {}
    elsewhere = [kind for kind in places if kind != home]
    if elsewhere and home and mobility != "stays" and (mobility == "mixes" or not job.allocated):
        lent = {draw(st.sampled_from(elsewhere)): draw(st.integers(1, 6))} if draw(st.booleans()) else {}
    known = {kind: draw(curves) for kind in sorted(allowed)}
    return KindDemand(job, known, mobility, home, lent, bound=bool(home))


@st.composite
def queues_with_kinds(draw: st.DrawFn, most: int = 8) -> Queue:
    """A queue of one to three kinds."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    kinds = {}
    for name in names:
        limits = draw(st.dictionaries(st.sampled_from(NAMESPACES), st.integers(0, 12), max_size=1))
        there = Capacity(draw(st.integers(0, 12)), draw(st.sampled_from([0, 0, 4])), limits)
        rating, price = draw(st.sampled_from([0.2, 1.0, 3.0])), draw(st.sampled_from([0.5, 1.0, 4.0]))
        kinds[name] = DeviceKind(there, rating, price, draw(st.none() | st.just(0.25)))
    return [draw(_jobs(index, names)) for index in range(draw(st.integers(0, most)))], kinds


def complaint_of_kinds(
    jobs: Sequence[KindDemand], found: Mapping[str, KindAllocation], kinds: Mapping[str, DeviceKind]
) -> str:
    """What is wrong with these allocations; empty if they can all be had at once and hold every job's limits."""
    if set(found) != {demand.job.name for demand in jobs}:
        return "not every job has an answer"
    for demand in jobs:
        job, given = demand.job, found[demand.job.name]
        total = sum(given.workers.values())
        if given.workers and not job.minimum <= total <= job.maximum:
            return f"{job.name} has {total} workers"
        if any(count < 1 or kind not in demand.curves for kind, count in given.workers.items()):
            return f"{job.name} has {given.workers}"
        if len(given.workers) > 1 and demand.mobility != "mixes":
            return f"{job.name} has several kinds"
        if demand.mobility == "stays" and demand.bound and set(given.workers) - {demand.home}:
            return f"{job.name} left {demand.home}"
        if given.on_demand != (job.minimum if job.minimum_on_demand and given.workers else 0):
            return f"{job.name} has {given.on_demand} workers on on-demand capacity"
        if not given.reason or given.reason.endswith("."):
            return f"{job.name} has no sentence"
    return _overfull(jobs, found, kinds)


def _overfull(jobs: Sequence[KindDemand], found: Mapping[str, KindAllocation], kinds: Mapping[str, DeviceKind]) -> str:
    for kind, there in kinds.items():
        used = [(d.job.namespace, found[d.job.name].workers.get(kind, 0) * d.job.units) for d in jobs]
        if sum(units for _, units in used) > there.capacity.total:
            return f"more than there is of {kind}"
        steady = sum(
            found[demand.job.name].on_demand * demand.job.units
            for demand in jobs
            if _minimum_on(found[demand.job.name]) == kind
        )
        if steady > there.capacity.on_demand:
            return f"more than there is of {kind} on demand"
        for namespace, limit in there.capacity.limits.items():
            if sum(units for of, units in used if of == namespace) > limit:
                return f"more of {kind} than the limit of {namespace}"
    return ""


def _minimum_on(given: KindAllocation) -> str:
    """The kind on which the job has its minimum: its home, or where it runs meanwhile."""
    return given.home if given.home in given.workers else next(iter(given.workers), "")


def apply_kinds(jobs: Sequence[KindDemand], found: Mapping[str, KindAllocation], now: float) -> list[KindDemand]:
    """The jobs with what they were allocated."""
    return [demand.given(found[demand.job.name], now) for demand in jobs]

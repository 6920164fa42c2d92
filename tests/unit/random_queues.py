"""Random clusters and jobs for the properties of the scheduling policies, and what holds of every allocation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from virtualflow_operator.scheduling import Allocation, Capacity, Demand, ScalingCurve
from virtualflow_operator.settings import SchedulingSettings

NOW = 10_000.0
NAMESPACES = ("red", "green", "blue")

curves = st.lists(
    st.tuples(st.integers(1, 12), st.floats(0.01, 100.0)), max_size=4, unique_by=lambda point: point[0]
).map(ScalingCurve.of)

settings = st.builds(
    SchedulingSettings,
    starvation_bound=st.sampled_from([60.0, 600.0]),
    turn=st.sampled_from([30.0, 300.0]),
    turn_share=st.sampled_from([0.0, 0.5, 1.0]),
    hold=st.sampled_from([0.0, 5.0]),
    margin=st.sampled_from([0.0, 0.1, 0.5]),
    efficiency=st.sampled_from([0.0, 0.5, 1.0]),
    exact_work=st.sampled_from([0, 400_000]),
)


@st.composite
def demands(draw: st.DrawFn, index: int, units: int | None = None) -> Demand:
    """A job in any state: waiting, running, with more or less than it may have."""
    minimum = draw(st.integers(1, 4))
    maximum = minimum + draw(st.integers(0, 12))
    submitted = NOW - draw(st.sampled_from([0.0, 1.0, 100.0, 5_000.0]))
    since = draw(st.none() | st.floats(submitted, NOW))
    namespace = draw(st.sampled_from(NAMESPACES))
    return Demand(
        name=f"{namespace}/job-{index}",
        namespace=namespace,
        submitted=submitted,
        maximum=maximum,
        minimum=minimum,
        requested=draw(st.sampled_from([0, minimum, maximum])),
        units=units or draw(st.sampled_from([1, 1, 1, 2, 3, 4])),
        priority=draw(st.integers(0, 2)),
        weight=draw(st.sampled_from([0.1, 0.5, 1.0, 1.0, 2.0, 3.0, 10.0])),
        allocated=draw(st.sampled_from([0, 0, 1, minimum, maximum, maximum + 2])),
        since=since,
        resized=draw(st.none() | st.floats(submitted if since is None else since, NOW)),
        waited=draw(st.sampled_from([0.0, 60.0, 700.0])),
        steps_left=draw(st.none() | st.integers(0, 10_000)),
        curve=draw(curves),
        minimum_on_demand=draw(st.booleans()),
        expected_left=draw(st.none() | st.floats(1.0, 1e6)),
    )


@st.composite
def queues(draw: st.DrawFn, units: int | None = None, most: int = 8) -> tuple[list[Demand], Capacity]:
    """A cluster with limits and the jobs of its queue."""
    jobs = [draw(demands(index, units)) for index in range(draw(st.integers(0, most)))]
    limits = draw(st.dictionaries(st.sampled_from(NAMESPACES), st.integers(0, 20), max_size=2))
    return jobs, Capacity(draw(st.integers(0, 30)), draw(st.sampled_from([0, 0, 5, 20])), limits)


def used(jobs: Sequence[Demand], found: Mapping[str, Allocation]) -> int:
    """Units of all allocations."""
    return sum(found[job.name].workers * job.units for job in jobs)


def complaint(jobs: Sequence[Demand], found: Mapping[str, Allocation], capacity: Capacity) -> str:
    """What is wrong with these allocations; empty if they can all be had at once and hold every job's range."""
    if set(found) != {job.name for job in jobs}:
        return "not every job has an answer"
    for job in jobs:
        given = found[job.name]
        if given.workers and not job.minimum <= given.workers <= job.maximum:
            return f"{job.name} has {given.workers} workers"
        if given.on_demand != (job.minimum if job.minimum_on_demand and given.workers else 0):
            return f"{job.name} has {given.on_demand} workers on on-demand capacity"
        if not given.reason or given.reason.endswith("."):
            return f"{job.name} has no sentence"
    if used(jobs, found) > capacity.total:
        return "more than the capacity"
    if sum(found[job.name].on_demand * job.units for job in jobs) > capacity.on_demand:
        return "more than the on-demand capacity"
    for namespace, limit in capacity.limits.items():
        if used([job for job in jobs if job.namespace == namespace], found) > limit:
            return f"more than the limit of {namespace}"
    return ""


def apply(jobs: Sequence[Demand], found: Mapping[str, Allocation], now: float) -> list[Demand]:
    """The jobs with what they were allocated."""
    return [job.given(found[job.name].workers, now) for job in jobs]


def could_run(job: Demand, capacity: Capacity) -> bool:
    """Whether the empty queue has its minimum."""
    need = job.minimum * job.units
    return need <= min(capacity.total, capacity.limits.get(job.namespace, need)) and (
        not job.minimum_on_demand or need <= capacity.on_demand
    )

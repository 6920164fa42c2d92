"""What holds of every policy, whatever the cluster and the jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from random_queues import NOW, apply, complaint, could_run, queues, settings, used

from tiers import examples
from virtualflow_operator.scheduling import FIXED_SIZES, POLICIES, Capacity, Demand, next_change
from virtualflow_operator.settings import SchedulingSettings

EVERY = pytest.mark.parametrize("name", list(POLICIES))
FEWER = hypothesis_settings(max_examples=examples(50))
"""Of each policy: they are held to the same rules."""
ELASTIC = pytest.mark.parametrize("name", [name for name in POLICIES if name not in FIXED_SIZES])

Queue = tuple[list[Demand], Capacity]


@EVERY
@FEWER
@given(queue=queues(), told=settings)
def test_capacity_limits_minimums_and_maximums_hold(name: str, queue: Queue, told: SchedulingSettings) -> None:
    jobs, capacity = queue
    assert complaint(jobs, POLICIES[name](NOW, jobs, capacity, told), capacity) == ""


@pytest.mark.slow
@EVERY
@FEWER
@given(queue=queues(), told=settings, random=st.randoms())
def test_the_order_of_the_jobs_does_not_matter(name: str, queue: Queue, told: SchedulingSettings, random) -> None:
    jobs, capacity = queue
    shuffled = list(jobs)
    random.shuffle(shuffled)
    assert POLICIES[name](NOW, jobs, capacity, told) == POLICIES[name](NOW, shuffled, capacity, told)


@pytest.mark.slow
@EVERY
@FEWER
@given(queue=queues(), told=settings)
def test_nothing_changes_when_nothing_changed(name: str, queue: Queue, told: SchedulingSettings) -> None:
    jobs, capacity = queue
    first = POLICIES[name](NOW, jobs, capacity, told)
    again = POLICIES[name](NOW, apply(jobs, first, NOW), capacity, told)
    assert again == first


@ELASTIC
@FEWER
@given(queue=queues(), told=settings, times=st.lists(st.floats(0.1, 1_000.0), min_size=1, max_size=5))
def test_nothing_changes_between_the_moments_that_are_announced(
    name: str, queue: Queue, told: SchedulingSettings, times: list[float]
) -> None:
    jobs, capacity = queue
    now = NOW
    jobs = apply(jobs, POLICIES[name](now, jobs, capacity, told), now)
    for later in times:
        announced = next_change(now, jobs, told)
        now = now + later if announced is None else min(now + later, announced)
        before = {job.name: job.allocated for job in jobs}
        found = POLICIES[name](now, jobs, capacity, told)
        if announced is None or now < announced:
            assert {job: given.workers for job, given in found.items()} == before
        jobs = apply(jobs, found, now)


@ELASTIC
@FEWER
@given(queue=queues(), told=settings)
def test_a_job_that_runs_is_stopped_only_if_its_minimum_has_no_room_beside_the_others(
    name: str, queue: Queue, told: SchedulingSettings
) -> None:
    jobs, capacity = queue
    found = POLICIES[name](NOW, jobs, capacity, told)
    kept = [replace(job, allocated=job.minimum) for job in jobs if found[job.name].workers]
    for job in jobs:
        if job.allocated and not found[job.name].workers:
            assert not _fit([*kept, replace(job, allocated=job.minimum)], capacity)


@ELASTIC
@FEWER
@given(queue=queues(), told=settings)
def test_nobody_waits_beside_room_for_its_minimum(name: str, queue: Queue, told: SchedulingSettings) -> None:
    jobs, capacity = queue
    told = replace(told, hold=0.0)
    found = POLICIES[name](NOW, jobs, capacity, told)
    assume(not any(given.reason.startswith("waits behind") for given in found.values()))
    held = [replace(job, allocated=found[job.name].workers) for job in jobs]
    for at, job in enumerate(held):
        if not job.allocated:
            assert not _fit([*held[:at], replace(job, allocated=job.minimum), *held[at + 1 :]], capacity)


def _fit(jobs: list[Demand], capacity: Capacity) -> bool:
    return (
        sum(job.allocated * job.units for job in jobs) <= capacity.total
        and sum(job.minimum * job.units for job in jobs if job.allocated and job.minimum_on_demand)
        <= capacity.on_demand
        and all(
            sum(job.allocated * job.units for job in jobs if job.namespace == namespace) <= limit
            for namespace, limit in capacity.limits.items()
        )
    )


@ELASTIC
@hypothesis_settings(max_examples=examples(40))
@given(queue=queues(most=6), told=settings)
def test_nobody_who_could_run_waits_longer_than_the_bound_though_no_job_ever_ends(
    name: str, queue: Queue, told: SchedulingSettings
) -> None:
    jobs, capacity = queue
    jobs = [replace(job, submitted=NOW, since=None, resized=None, allocated=0, waited=0.0) for job in jobs]
    bound = told.starvation_bound + 2 * len(jobs) * told.turn
    now = NOW
    for _ in range(60):
        jobs = apply(jobs, POLICIES[name](now, jobs, capacity, told), now)
        assert all(job.waiting(now) <= bound for job in jobs if could_run(job, capacity))
        later = next_change(now, jobs, told)
        if later is None:
            break
        now = later


@pytest.mark.parametrize("name", sorted(FIXED_SIZES))
@hypothesis_settings(max_examples=examples(40))
@given(queue=queues(most=6), told=settings)
def test_fixed_sizes_let_everybody_run_who_can_as_jobs_end(name: str, queue: Queue, told: SchedulingSettings) -> None:
    jobs, capacity = queue
    jobs = [replace(job, allocated=0, since=None) for job in jobs]
    now, ran = NOW, set()
    for _ in range(len(jobs) + 1):
        jobs = apply(jobs, POLICIES[name](now, jobs, capacity, told), now)
        running = [job for job in jobs if job.allocated]
        ran |= {job.name for job in running}
        if running:
            jobs.remove(running[0])
        now += 1.0
    assert all(not could_run(job, capacity) for job in jobs)
    assert all(job.name in ran or not could_run(job, capacity) for job in queue[0])


@EVERY
@FEWER
@given(queue=queues(), told=settings, lost=st.integers(1, 20))
def test_lost_capacity_is_given_up_at_once(name: str, queue: Queue, told: SchedulingSettings, lost: int) -> None:
    jobs, capacity = queue
    jobs = apply(jobs, POLICIES[name](NOW, jobs, capacity, told), NOW)
    less = replace(capacity, on_demand=max(0, capacity.on_demand - lost))
    found = POLICIES[name](NOW + 1.0, jobs, less, told)
    assert complaint(jobs, found, less) == ""
    assert used(jobs, found) <= less.total


@EVERY
def test_two_jobs_of_one_name_are_an_error(name: str) -> None:
    job = Demand("red/a", "red", 0.0, 1)
    with pytest.raises(ValueError, match="two jobs are called red/a"):
        POLICIES[name](0.0, [job, job], Capacity(4), SchedulingSettings())

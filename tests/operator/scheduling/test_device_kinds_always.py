"""What holds of every policy in a queue with kinds of device, whatever there is and whoever asks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from random_kinds import Queue, apply_kinds, complaint_of_kinds, queues_with_kinds
from random_queues import NOW, settings

from tiers import examples, nightly
from virtualflow_operator.scheduling import (
    FIXED_SIZES,
    POLICIES,
    DeviceKind,
    KindAllocation,
    KindDemand,
    decide_by_kind,
    mixed_speed,
    next_change,
)
from virtualflow_operator.settings import SchedulingSettings

EVERY = pytest.mark.parametrize(
    "name", ["ShortestFirst", *(nightly(name) for name in POLICIES if name != "ShortestFirst")]
)


def decide(
    name: str, jobs: list[KindDemand], kinds: dict[str, DeviceKind], told: SchedulingSettings, now: float = NOW
) -> dict[str, KindAllocation]:
    return decide_by_kind(POLICIES[name], now, jobs, kinds, told, elastic=name not in FIXED_SIZES)


@EVERY
@given(queue=queues_with_kinds(), told=settings)
def test_capacity_of_each_kind_limits_minimums_and_maximums_hold(
    name: str, queue: Queue, told: SchedulingSettings
) -> None:
    jobs, kinds = queue
    assert complaint_of_kinds(jobs, decide(name, jobs, kinds, told), kinds) == ""


@pytest.mark.slow
@EVERY
@given(queue=queues_with_kinds(), told=settings, random=st.randoms())
def test_the_order_of_the_jobs_and_kinds_does_not_matter(
    name: str, queue: Queue, told: SchedulingSettings, random
) -> None:
    jobs, kinds = queue
    shuffled, names = list(jobs), list(kinds)
    random.shuffle(shuffled)
    random.shuffle(names)
    assert decide(name, jobs, kinds, told) == decide(name, shuffled, {kind: kinds[kind] for kind in names}, told)


@EVERY
@given(queue=queues_with_kinds(), told=settings)
def test_nothing_changes_when_nothing_changed(name: str, queue: Queue, told: SchedulingSettings) -> None:
    jobs, kinds = queue
    first = decide(name, jobs, kinds, told)
    again = decide(name, apply_kinds(jobs, first, NOW), kinds, told)
    assert again == first


@pytest.mark.slow
@EVERY
@given(queue=queues_with_kinds(), told=settings, times=st.lists(st.floats(0.1, 1_000.0), min_size=1, max_size=5))
def test_nothing_changes_between_the_moments_that_are_announced(
    name: str, queue: Queue, told: SchedulingSettings, times: list[float]
) -> None:
    jobs, kinds = queue
    now = NOW
    jobs = apply_kinds(jobs, decide(name, jobs, kinds, told), now)
    for later in times:
        announced = next_change(now, (demand.job for demand in jobs), told)
        now = now + later if announced is None else min(now + later, announced)
        before = {demand.job.name: demand.workers for demand in jobs}
        found = decide(name, jobs, kinds, told, now)
        if announced is None or now < announced:
            assert {job: dict(given.workers) for job, given in found.items()} == before
        jobs = apply_kinds(jobs, found, now)


@pytest.mark.parametrize("name", ["ShortestFirst", nightly("WeightedFairShare"), nightly("MaxThroughput")])
@hypothesis_settings(max_examples=examples(40))
@given(queue=queues_with_kinds(most=6), told=settings)
def test_nobody_who_could_run_waits_longer_than_the_bound_though_no_job_ever_ends(
    name: str, queue: Queue, told: SchedulingSettings
) -> None:
    jobs, kinds = queue
    fresh = {"submitted": NOW, "since": None, "resized": None, "allocated": 0, "waited": 0.0}
    jobs = [replace(d, job=replace(d.job, **fresh), home="", lent={}, bound=False) for d in jobs]
    bound = told.starvation_bound + 2 * len(jobs) * told.turn
    now = NOW
    for _ in range(60):
        found = decide(name, jobs, kinds, told, now)
        never = {job for job, given in found.items() if given.shortage or given.reason.startswith("cannot run")}
        jobs = apply_kinds(jobs, found, now)
        assert all(d.job.waiting(now) <= bound for d in jobs if d.job.name not in never)
        later = next_change(now, (demand.job for demand in jobs), told)
        if later is None:
            break
        now = later


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(POLICIES))
@given(queue=queues_with_kinds(), told=settings, lost=st.integers(1, 12))
def test_lost_capacity_is_given_up_at_once(name: str, queue: Queue, told: SchedulingSettings, lost: int) -> None:
    jobs, kinds = queue
    jobs = apply_kinds(jobs, decide(name, jobs, kinds, told), NOW)
    first = min(kinds)
    there = kinds[first].capacity
    less = replace(kinds[first], capacity=replace(there, on_demand=max(0, there.on_demand - lost)))
    kinds = kinds | {first: less}
    found = decide(name, jobs, kinds, told, NOW + 1.0)
    assert complaint_of_kinds(jobs, found, kinds) == ""


@EVERY
@given(queue=queues_with_kinds(most=6), told=settings)
def test_one_kind_is_decided_as_by_the_policy_alone(name: str, queue: Queue, told: SchedulingSettings) -> None:
    jobs, kinds = queue
    kind = min(kinds)
    curves = [d.curves[kind] if kind in d.curves else next(iter(d.curves.values())) for d in jobs]
    plain = [replace(d.job, curve=curve) for d, curve in zip(jobs, curves, strict=True)]
    same = [KindDemand(job, {kind: job.curve}, home=kind) for job in plain]
    expected = POLICIES[name](NOW, plain, kinds[kind].capacity, told)
    found = decide(name, same, {kind: kinds[kind]}, told)
    assert {job: (sum(given.workers.values()), given.on_demand) for job, given in found.items()} == {
        job: (given.workers, given.on_demand) for job, given in expected.items()
    }


@given(
    speeds=st.lists(st.tuples(st.floats(0.1, 100.0), st.floats(0.0, 0.5)), min_size=1, max_size=3),
    counts=st.lists(st.integers(1, 8), min_size=3, max_size=3),
)
def test_a_mix_is_never_said_to_be_faster_than_it_is(speeds: list[tuple[float, float]], counts: list[int]) -> None:
    """With steps of (work / sum of rates) + exchange, which is how a split by speed goes."""
    exchange = speeds[0][1]
    rates = {f"kind-{index}": rate for index, (rate, _) in enumerate(speeds)}
    workers = dict(zip(rates, counts, strict=False))

    def speed(kind: str, count: int) -> float:
        return 1 / (1 / (rates[kind] * count) + exchange)

    truth = 1 / (1 / sum(rates[kind] * count for kind, count in workers.items()) + exchange)
    assert mixed_speed(speed, workers) <= truth * (1 + 1e-9)
    if len(workers) == 1 or not exchange:
        assert mixed_speed(speed, workers) == pytest.approx(truth)

"""Weighted fair shares, and the plan that gains most: compared with slow and simple ways to find them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import ceil, floor

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from random_queues import NOW, queues, settings
from scheduling_cases import BENT, decide
from scheduling_cases import job as asking

from virtualflow_operator.scheduling import Capacity, Demand, ScalingCurve, policy
from virtualflow_operator.scheduling.weighted_fair_share import fair_shares
from virtualflow_operator.settings import SchedulingSettings

CALM = SchedulingSettings(hold=0.0, margin=0.0)

Queue = tuple[list[Demand], Capacity]


def shares_by_halving(jobs: list[Demand], capacity: Capacity) -> dict[str, float]:
    """Max-min fair shares in workers, by halving the level until it is exact enough."""

    def filled(members: list[Demand], most: dict[str, float], units: float) -> dict[str, float]:
        low, high = 0.0, 1e6
        for _ in range(100):
            level = (low + high) / 2
            got = {job.name: min(max(level * job.weight, job.minimum * job.units), most[job.name]) for job in members}
            low, high = (low, level) if sum(got.values()) > units else (level, high)
        return got

    most = {job.name: float(job.maximum * job.units) for job in jobs}
    size = jobs[0].units if jobs else 1
    for namespace, limit in capacity.limits.items():
        members = [job for job in jobs if job.namespace == namespace]
        most |= filled(members, most, limit - limit % size) if members else {}
    whole = filled(jobs, most, capacity.total - capacity.total % size)
    return {job.name: whole[job.name] / job.units for job in jobs}


@given(queue=queues(units=1), told=settings, size=st.integers(1, 3))
def test_every_share_is_within_one_worker_of_the_weights(queue: Queue, told: SchedulingSettings, size: int) -> None:
    jobs, capacity = queue
    jobs = [replace(job, units=size) for job in jobs]
    found = policy("WeightedFairShare")(NOW, jobs, capacity, replace(told, hold=0.0))
    running = [job for job in jobs if found[job.name].workers]
    shares = shares_by_halving(running, capacity)
    assert all(abs(found[job.name].workers - shares[job.name]) < 1 + 1e-6 for job in running)


def test_units_that_are_too_few_for_a_worker_are_nobodys_share() -> None:
    jobs = [Demand("red/a", "red", 0.0, 9, units=2), Demand("blue/b", "blue", 0.0, 9, units=2)]
    assert fair_shares(jobs, Capacity(9, limits={"red": 3})) == {"red/a": 1.0, "blue/b": 3.0}


@given(queue=queues(), told=settings)
def test_with_workers_of_unequal_units_nobody_is_a_whole_worker_short(queue: Queue, told: SchedulingSettings) -> None:
    jobs, capacity = queue
    found = policy("WeightedFairShare")(NOW, jobs, capacity, replace(told, hold=0.0))
    running = [job for job in jobs if found[job.name].workers]
    shares = fair_shares(running, capacity)
    assert all(found[job.name].workers > shares[job.name] - 1 - 1e-6 for job in running)


@given(queue=queues(units=1), spare=st.integers(0, 40))
def test_a_share_that_moves_by_less_than_a_worker_resizes_nobody(queue: Queue, spare: int) -> None:
    jobs = queue[0]
    assume(jobs)
    capacity = Capacity(sum(job.minimum for job in jobs) + spare)
    fair = policy("WeightedFairShare")
    found = fair(NOW, jobs, capacity, CALM)
    heavier = [replace(job, weight=job.weight * (1.001 if job is jobs[0] else 1)) for job in jobs]
    before, after = fair_shares(jobs, capacity), fair_shares(heavier, capacity)
    assume(
        all(ceil(before[name]) == ceil(after[name]) and floor(before[name]) == floor(after[name]) for name in before)
    )
    now = [job.given(found[job.name].workers, NOW) for job in heavier]
    assert {name: given.workers for name, given in fair(NOW, now, capacity, CALM).items()} == {
        name: given.workers for name, given in found.items()
    }


def gained(jobs: list[Demand], workers: tuple[int, ...]) -> float:
    """What :mod:`max_throughput` makes large."""
    return sum(
        job.weight * job.units * job.curve.speedup(number) for job, number in zip(jobs, workers, strict=True) if number
    )


@given(queue=queues(most=4))
def test_no_plan_gains_more_than_the_one_of_most_throughput(queue: Queue) -> None:
    jobs, capacity = queue
    jobs = [
        replace(job, maximum=min(job.maximum, job.minimum + 4), requested=0, allocated=0, since=None) for job in jobs
    ]
    found = policy("MaxThroughput")(NOW, jobs, capacity, replace(CALM, starvation_bound=1e9))
    running = [job for job in jobs if found[job.name].workers]
    best = 0.0
    for plan in itertools.product(*(range(job.minimum, job.maximum + 1) for job in running)):
        units = [number * job.units for number, job in zip(plan, running, strict=True)]
        if sum(units) > capacity.total or any(
            sum(u for u, job in zip(units, running, strict=True) if job.namespace == namespace) > limit
            for namespace, limit in capacity.limits.items()
        ):
            continue
        best = max(best, gained(running, plan))
    mine = gained(running, tuple(found[job.name].workers for job in running))
    assert mine == pytest.approx(best, rel=1e-4, abs=1e-4)


@given(points=st.lists(st.tuples(st.integers(1, 64), st.floats(1e-3, 1e4)), max_size=8))
def test_a_curve_never_falls_and_never_bends_upward(points: list[tuple[int, float]]) -> None:
    curve = ScalingCurve.of(points)
    speeds = [curve.speed(workers) for workers in range(100)]
    gains = [after - before for before, after in itertools.pairwise(speeds)]
    tiny = 1e-9 * speeds[-1]
    assert all(gain >= -tiny for gain in gains)
    assert all(after <= before + tiny for before, after in itertools.pairwise(gains))
    assert all(curve.speed(workers) <= workers * curve.speed(1) * (1 + 1e-9) for workers in range(1, 100))
    smallest = min(points, default=(1, 1.0))[0]
    most = max((speed for workers, speed in points if workers == smallest), default=1.0) / smallest
    assert all(curve.speed(workers) >= min(speed, most * workers) - tiny for workers, speed in points)
    assert curve == ScalingCurve.of(reversed(points))


@pytest.mark.parametrize(
    ("points", "workers", "speed"),
    [
        pytest.param((), 2, 1.9, id="nothing measured: a second worker brings 10 % less"),
        pytest.param((), 8, 1 + 0.9 + 2 * 0.81 + 4 * 0.729, id="and so on with each doubling"),
        pytest.param(((4, 8.0),), 3, 6.0, id="one number: a line up to it"),
        pytest.param(((4, 8.0),), 6, 8.0 + 2 * 1.8, id="and beyond it 10 % less"),
        pytest.param(((1, 3.0), (2, 5.0)), 3, 6.8, id="beyond the largest: 10 % less than before it"),
        pytest.param(((1, 3.0), (2, 3.0)), 3, 3.0, id="a worker that brought nothing: as many"),
        pytest.param(((1, 4.0), (5, 12.0)), 3, 8.0, id="between two: a line"),
        pytest.param(((1, 4.0), (2, 6.0), (4, 5.0)), 4, 6.0, id="slower with more: as fast as the fewer"),
        pytest.param(((1, 1.0), (2, 4.0)), 2, 2.0, id="faster than linear: linear"),
        pytest.param(((2, 3.0), (2, 4.0)), 2, 4.0, id="one number measured twice: the faster"),
    ],
)
def test_speeds_between_and_beyond_what_was_measured(
    points: tuple[tuple[int, float], ...], workers: int, speed: float
) -> None:
    assert ScalingCurve(points).speed(workers) == pytest.approx(speed)


@given(
    points=st.lists(st.tuples(st.integers(1, 32), st.floats(1e-3, 1e4)), max_size=6),
    capacity=st.integers(2, 32),
    weight=st.sampled_from([1.0, 3.0]),
)
def test_no_figures_give_a_job_more_than_linear_scaling_does(
    points: list[tuple[int, float]], capacity: int, weight: float
) -> None:
    honest = [asking("b", 32, curve=BENT), asking("c", 32)]
    shares = [
        decide("MaxThroughput", [asking("a", 32, curve=curve, weight=weight), *honest], capacity)["a"].workers
        for curve in (ScalingCurve.of(points), ScalingCurve(((1, 1.0), (32, 32.0))))
    ]
    assert shares[0] <= shares[1]


def test_a_point_that_is_no_measurement_is_left_out_or_refused() -> None:
    assert ScalingCurve.of([(1, 0.0), (0, 3.0), (2, float("nan"))]) == ScalingCurve()
    with pytest.raises(ValueError, match="a measured point is"):
        ScalingCurve(((1, 0.0),))

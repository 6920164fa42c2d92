"""How fast a worker is, measured as it trains, and when it tells of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.worker.pace import FEWEST, SKIPPED, WINDOW, Estimate, PaceMeter, PaceReportPolicy, quartiles


class Training:
    """A worker's steps, by a clock of their own."""

    def __init__(self, virtual_nodes: int = 4) -> None:
        self.pace = PaceMeter()
        self.now = 1_000.0
        self.nodes = virtual_nodes

    def attempt(self, computing: float) -> None:
        self.pace.begin(self.now, self.nodes)
        self.now += computing
        self.pace.end(self.now)

    def step(self, computing: float, rest: float = 0.01) -> None:
        self.attempt(computing)
        self.now += rest
        self.pace.commit(self.now)

    def steps(self, count: int, computing: float, rest: float = 0.01) -> None:
        for _ in range(count):
            self.step(computing, rest)

    @property
    def median(self) -> float:
        assert self.pace.estimate is not None
        return self.pace.estimate.median


def test_waiting_for_a_device_that_others_have_is_nobodys_time() -> None:
    training = Training(virtual_nodes=4)
    for _ in range(SKIPPED + WINDOW):
        training.pace.begin(training.now, training.nodes)
        training.now += 0.3
        training.pace.exclude(0.3)
        training.now += 0.2
        training.pace.end(training.now)
        training.now += 0.07
        training.pace.commit(training.now)
    estimate = training.pace.estimate
    assert estimate is not None
    assert (estimate.median, estimate.rest) == (pytest.approx(0.05), pytest.approx(0.07))


def test_a_pace_is_the_computing_time_of_a_virtual_node() -> None:
    training = Training(virtual_nodes=4)
    training.steps(SKIPPED + WINDOW, computing=0.2, rest=0.07)
    estimate = training.pace.estimate
    assert estimate is not None
    assert (estimate.low, estimate.median, estimate.high) == pytest.approx((0.05, 0.05, 0.05))
    assert estimate.rest == pytest.approx(0.07)
    assert estimate.samples == WINDOW


def test_a_few_steps_say_nothing() -> None:
    training = Training()
    training.steps(SKIPPED + FEWEST - 1, computing=0.1)
    assert training.pace.estimate is None
    training.step(0.1)
    assert training.pace.estimate is not None


def test_the_first_steps_of_a_generation_do_not_count() -> None:
    training = Training()
    training.steps(20, computing=0.1)
    training.pace.enter()
    assert training.pace.estimate is None
    training.steps(SKIPPED, computing=9.0)
    training.steps(WINDOW, computing=0.2)
    estimate = training.pace.estimate
    assert estimate is not None
    assert (estimate.low, estimate.high) == pytest.approx((0.05, 0.05))


def test_some_slow_steps_move_the_quartile_and_not_the_median() -> None:
    training = Training()
    for number in range(SKIPPED + WINDOW):
        training.step(4.0 if number % 3 == 0 else 0.1)
    estimate = training.pace.estimate
    assert estimate is not None
    assert estimate.low == estimate.median == pytest.approx(0.025)
    assert estimate.high > 0.5


def test_void_attempts_held_steps_and_short_micro_batches_do_not_count() -> None:
    training = Training()
    training.steps(SKIPPED + WINDOW, computing=0.1)
    before = training.pace.estimate
    for _ in range(WINDOW):
        training.attempt(7.0)  # void: the next attempt is of the same step
        training.pace.interrupt()
        training.now += 60.0
        training.step(5.0)
        training.attempt(3.0)
        training.pace.disregard()
        training.pace.commit(training.now)
    assert training.pace.estimate == before


def test_an_attempt_that_broke_in_the_middle_is_measured_from_its_repetition() -> None:
    training = Training()
    for _ in range(SKIPPED + WINDOW):
        training.pace.begin(training.now, training.nodes)
        training.now += 2.0
        training.step(0.1)
    assert training.median == pytest.approx(0.025)


@pytest.mark.parametrize("step", [0.001, 0.004, 0.02], ids=lambda seconds: f"{1_000 * seconds:g} ms")
def test_a_duty_cycle_of_a_third_is_seen_as_a_third_of_the_speed_however_short_the_steps_are(step: float) -> None:
    """The process runs 10 ms and stops 20 ms; short steps are hit or spared as a whole."""
    pace, now, computed, nodes = PaceMeter(), 0.0, 0.0, 2
    while now < 1.5:
        pace.begin(now, nodes)
        computed += step
        # So much computing is done at that time: each 10 ms of it take 30.
        now = 0.03 * (computed // 0.01) + computed % 0.01
        pace.end(now)
        pace.commit(now)
    estimate = pace.estimate
    assert estimate is not None
    for seconds in (estimate.low, estimate.median, estimate.high):
        assert 2.2 <= seconds / (step / nodes) <= 3.8


def test_a_change_of_speed_is_in_the_quartiles_within_few_steps() -> None:
    training = Training()
    training.steps(30, computing=0.06)
    steps = 0
    while training.pace.estimate is not None and training.pace.estimate.low < 0.9 * 0.045:
        training.step(0.18)
        steps += 1
    assert steps <= 0.8 * WINDOW


@given(st.lists(st.tuples(st.floats(1e-4, 10.0), st.floats(0.0, 1.0)), max_size=40), st.integers(1, 64))
def test_an_estimate_lies_within_what_was_measured(steps: list[tuple[float, float]], nodes: int) -> None:
    training = Training(nodes)
    for computing, rest in steps:
        training.step(computing, rest)
    estimate = training.pace.estimate
    if estimate is None:
        return
    counted = [computing / nodes for computing, _ in steps[SKIPPED:]]
    assert min(counted) * (1 - 1e-6) <= estimate.low <= estimate.median <= estimate.high <= max(counted) * (1 + 1e-6)
    assert estimate.rest >= 0.0


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=30))
def test_quartiles_are_in_order(values: list[float]) -> None:
    low, median, high = quartiles(values)
    assert min(values) <= low <= median <= high <= max(values)


# --- when it is told -------------------------------------------------------------------------------------------------


def estimate(median: float, spread: float = 0.1) -> Estimate:
    return Estimate(median, median * (1 - spread), median * (1 + spread), 0.001, 10)


def test_what_is_told_is_news() -> None:
    policy = PaceReportPolicy()
    assert policy.is_due(0.0, estimate(1.0), 2)
    assert not policy.is_due(10.0, estimate(1.0), 2)
    assert not policy.is_due(20.0, estimate(1.04), 2)
    assert policy.is_due(30.0, estimate(1.06), 2)
    assert policy.is_due(40.0, estimate(1.06, spread=0.2), 2)
    policy.enter()
    assert policy.is_due(50.0, estimate(1.06, spread=0.2), 2)


def test_slow_drift_is_told_when_it_adds_up() -> None:
    policy = PaceReportPolicy()
    told = sum(policy.is_due(float(second), estimate(1.0 + 0.01 * second), 2) for second in range(100))
    assert 10 <= told <= 20


@pytest.mark.parametrize(("members", "most"), [(2, 41), (1_000, 3)])
def test_all_members_together_tell_at_a_bounded_rate(members: int, most: int) -> None:
    policy, noise = PaceReportPolicy(), random.Random(1)
    told = sum(policy.is_due(tick / 100, estimate(noise.uniform(1, 3)), members) for tick in range(1_000))
    assert 2 <= told <= most

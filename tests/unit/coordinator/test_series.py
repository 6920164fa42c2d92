"""Figures over the steps take constant memory, and are what was told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.coordinator.series import Series
from virtualflow.coordinator.settings import SERIES_BREAKS
from virtualflow.protocol.job_record import Break
from virtualflow.protocol.messages import encode


def feed(series: Series, steps: list[int]) -> None:
    for step in steps:
        series.add(step, 10.0, 4, {"loss": 1 / step}, step / 10)


def test_what_was_told_is_there_up_to_the_point_that_is_still_open() -> None:
    series = Series()
    feed(series, [1, 2, 4])
    told = series.columns()
    assert (told.steps, told.speed, told.workers) == ((1, 2), (10.0, 10.0), (4.0, 4.0))
    assert told.metrics == {"loss": (1.0, 0.5)}


def test_several_reports_of_a_step_are_one_point_and_gaps_are_gaps() -> None:
    series = Series()
    series.add(1, 0.0, 2, {"loss": "NaN"}, 0.1)
    series.add(1, 0.0, 2, {"loss": "Infinity"}, 0.2)
    series.add(2, 8.0, 2, {"loss": 1.0}, 0.3)
    series.add(2, 12.0, 3, {"loss": 3.0}, 0.4)
    series.add(3, 1.0, 2, {}, 0.5)
    told = series.columns()
    assert (told.steps, told.speed, told.times) == ((1, 2), (None, 10.0), (0.1, 0.3))
    assert told.workers == (2.0, 2.0), "who made the step, not who enters a generation after it"
    assert told.metrics == {"loss": (None, 2.0)}
    assert (told.breaks, series.columns(whole=True).steps) == ((), (1, 2, 3))


def walk(*told: tuple[int, float], speed: float = 10.0) -> Series:
    series = Series()
    for step, time in told:
        series.add(step, speed, 2, {}, time)
    return series


@pytest.mark.parametrize(
    ("series", "breaks"),
    [
        pytest.param(walk((1, 0.1), (4, 0.4), (9, 0.9)), (), id="steps at their pace are no break"),
        pytest.param(walk((1, 0.1), (2, 0.9)), (), id="nor is one slow step"),
        pytest.param(walk((1, 10.0), (2, 20.0), (3, 30.0), speed=0.1), (), id="nor are steps that are always slow"),
        pytest.param(
            walk((9, 0.9), (11, 5.1), (12, 5.2)), (Break(9, 11, 0.9, 5.1, False),), id="nobody completes a step"
        ),
        pytest.param(
            walk((9, 0.9), (9, 3.0), (10, 5.0)), (Break(9, 10, 0.9, 5.0, False),), id="to enter is to complete none"
        ),
        pytest.param(
            walk((9, 0.9), (69, 6.9)), (Break(9, 69, 0.9, 6.9, True),), id="steps that nobody told of are no pause"
        ),
        pytest.param(
            walk((9, 0.9), (40, 4.0), (20, 9.0), (21, 9.1)),
            (Break(9, 20, 0.9, 9.0, False),),
            id="what is repeated has not counted",
        ),
    ],
)
def test_a_break_is_a_time_without_a_step_or_without_news(series: Series, breaks: tuple[Break, ...]) -> None:
    assert series.columns().breaks == breaks


def test_what_a_coordinator_that_was_away_has_missed_is_no_pause_of_the_workers() -> None:
    frozen = walk((9, 0.9))
    frozen.miss()
    frozen.add(10, 10.0, 2, {}, 3.9)
    frozen.add(39, 10.0, 2, {}, 3.9)
    assert frozen.columns().breaks == (Break(9, 10, 0.9, 3.9, True),)
    for first in (True, False):
        successor = Series()
        if first:
            successor.resume(walk((9, 0.9)).record())
        successor.add(40, 10.0, 2, {}, 4.0)
        if not first:
            successor.resume(walk((9, 0.9)).record())
        assert successor.columns().breaks == (Break(9, 40, 0.9, 4.0, True),)
        assert successor.columns().began == 0.9


def test_of_many_breaks_the_longest_are_kept() -> None:
    series = Series()
    for number in range(1, 1_000):
        series.add(2 * number, 10.0, 2, {}, 100.0 * number)
        series.add(2 * number + 1, 10.0, 2, {}, 100.0 * number + 2 + number % 90)
    kept = series.columns().breaks
    assert len(kept) == SERIES_BREAKS
    assert min(one.until - one.since for one in kept) > 60
    assert list(kept) == sorted(kept, key=lambda one: one.step)


def test_a_day_of_reports_keeps_its_shape_in_as_many_points() -> None:
    series = Series(most=400)
    largest = 0
    for second in range(1, 86_401):
        series.add(9 * second, 9.0 if second < 43_200 else 18.0, 4, {"loss": 1.0 / second}, float(second))
        largest = max(largest, len(series))
    assert largest <= 400
    told = series.columns()
    assert 200 <= len(told.steps) + 1 <= 400
    assert told.steps[0] < 9 * 86_400 / 200
    assert told.steps[-1] > 9 * 86_400 * 0.99
    slow = [speed for step, speed in zip(told.steps, told.speed, strict=True) if step < 9 * 43_200]
    fast = [speed for step, speed in zip(told.steps, told.speed, strict=True) if step > 9 * 43_200 + series.width]
    assert set(slow) == {9.0}
    assert set(fast) == {18.0}
    losses = [loss for loss in told.metrics["loss"] if loss is not None]
    assert losses == sorted(losses, reverse=True), "each point is the mean of its steps"
    assert len(encode(told)) < 32_768


def test_steps_that_are_repeated_are_told_anew() -> None:
    series = Series()
    feed(series, [1, 2, 3, 4, 5, 6])
    series.add(3, 99.0, 1, {"loss": 7.0}, 1.0)
    series.add(4, 99.0, 1, {"loss": 7.0}, 1.0)
    told = series.columns()
    assert told.steps == (1, 2, 3)
    assert told.speed[:2] == (10.0, 10.0)


def test_of_many_metrics_the_first_few_are_kept_and_the_loss_among_them() -> None:
    series = Series(metrics=3)
    for step in (1, 2, 3):
        series.add(step, 1.0, 1, {**{f"metric {number}": 0.0 for number in range(50)}, "loss": 2.0}, 1.0)
    assert list(series.columns().metrics) == ["loss", "metric 0", "metric 1"]


@given(st.lists(st.integers(0, 500), max_size=300), st.integers(2, 20))
def test_whatever_steps_come_the_points_go_forward_and_are_few(steps: list[int], most: int) -> None:
    series = Series(most)
    for step in steps:
        series.add(step, 1.0, 1, {"loss": float(step)}, 1.0)
        assert len(series) <= most
    told = series.columns()
    assert list(told.steps) == sorted(set(told.steps))
    assert all(step in steps for step in told.steps)
    assert len(told.speed) == len(told.workers) == len(told.steps)
    assert all(len(column) == len(told.steps) for column in told.metrics.values())

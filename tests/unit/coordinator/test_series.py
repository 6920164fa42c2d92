"""Figures over the steps take constant memory, and are what was told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from virtualflow.coordinator.series import Series
from virtualflow.protocol.messages import encode


def feed(series: Series, steps: list[int]) -> None:
    for step in steps:
        series.add(step, 10.0, 4, {"loss": 1 / step})


def test_what_was_told_is_there_up_to_the_point_that_is_still_open() -> None:
    series = Series()
    feed(series, [1, 2, 4])
    told = series.columns()
    assert (told.steps, told.speed, told.workers) == ((1, 2), (10.0, 10.0), (4.0, 4.0))
    assert told.metrics == {"loss": (1.0, 0.5)}


def test_several_reports_of_a_step_are_one_point_and_gaps_are_gaps() -> None:
    series = Series()
    series.add(1, 0.0, 2, {"loss": "NaN"})
    series.add(1, 0.0, 2, {"loss": "Infinity"})
    series.add(2, 8.0, 2, {"loss": 1.0})
    series.add(2, 12.0, 3, {"loss": 3.0})
    series.add(3, 1.0, 2, {})
    told = series.columns()
    assert (told.steps, told.speed, told.workers) == ((1, 2), (None, 10.0), (2.0, 2.5))
    assert told.metrics == {"loss": (None, 2.0)}


def test_a_day_of_reports_keeps_its_shape_in_as_many_points() -> None:
    series = Series(most=400)
    largest = 0
    for second in range(1, 86_401):
        series.add(9 * second, 9.0 if second < 43_200 else 18.0, 4, {"loss": 1.0 / second})
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
    series.add(3, 99.0, 1, {"loss": 7.0})
    series.add(4, 99.0, 1, {"loss": 7.0})
    told = series.columns()
    assert told.steps == (1, 2, 3)
    assert told.speed[:2] == (10.0, 10.0)


def test_of_many_metrics_the_first_few_are_kept_and_the_loss_among_them() -> None:
    series = Series(metrics=3)
    for step in (1, 2, 3):
        series.add(step, 1.0, 1, {**{f"metric {number}": 0.0 for number in range(50)}, "loss": 2.0})
    assert list(series.columns().metrics) == ["loss", "metric 0", "metric 1"]


@given(st.lists(st.integers(0, 500), max_size=300), st.integers(2, 20))
def test_whatever_steps_come_the_points_go_forward_and_are_few(steps: list[int], most: int) -> None:
    series = Series(most)
    for step in steps:
        series.add(step, 1.0, 1, {"loss": float(step)})
        assert len(series) <= most
    told = series.columns()
    assert list(told.steps) == sorted(set(told.steps))
    assert all(step in steps for step in told.steps)
    assert len(told.speed) == len(told.workers) == len(told.steps)
    assert all(len(column) == len(told.steps) for column in told.metrics.values())

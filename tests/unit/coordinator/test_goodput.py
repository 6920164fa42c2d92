"""Goodput: of the workers' time, what went into steps that count."""

from __future__ import annotations

import pytest

from virtualflow.coordinator.history import Goodput


def look(goodput: Goodput, begin: int, end: int, **facts: object) -> None:
    """A look every quarter of a second, two workers that train; facts may be functions of the time."""
    for quarter in range(4 * begin, 4 * end + 1):
        now = quarter / 4
        usual: dict[str, object] = {"present": 2, "members": 2, "step": None, "step_seconds": 0.5}
        said = {key: value(now) if callable(value) else value for key, value in (usual | facts).items()}
        goodput.look(now, **said)  # type: ignore[arg-type]


def test_without_workers_there_is_none() -> None:
    goodput = Goodput()
    look(goodput, 0, 10, present=0, members=0)
    assert goodput.total.share is None


def test_a_job_that_does_nothing_else_than_steps_has_all_of_it() -> None:
    goodput = Goodput()
    look(goodput, 0, 100, step=lambda now: int(2 * now))
    assert goodput.total.share == pytest.approx(1.0, abs=0.01)
    assert goodput.paid == pytest.approx(200.0)


def test_steps_longer_than_the_time_between_two_looks_count_as_a_whole() -> None:
    goodput = Goodput()
    look(goodput, 0, 100, step=lambda now: int(now / 10), step_seconds=10.0)
    assert goodput.total.share == pytest.approx(1.0, abs=0.01)


def test_starting_pauses_repeated_steps_and_who_waits_are_missing() -> None:
    goodput = Goodput()
    look(goodput, 0, 10)
    assert goodput.total.share == 0.0, "they start"
    look(goodput, 10, 20, step=lambda now: int(2 * (now - 10)))
    assert goodput.total.share == pytest.approx(0.5, abs=0.01)
    look(goodput, 20, 30, step=20)
    assert goodput.total.share == pytest.approx(1 / 3, abs=0.01), "a pause, or steps that were made before"
    look(goodput, 30, 40, present=4, step=lambda now: 20 + int(2 * (now - 30)))
    assert goodput.total.share == pytest.approx(40 / 100, abs=0.01), "two joiners warm up"


def test_it_is_never_more_than_all() -> None:
    goodput = Goodput()
    look(goodput, 0, 1, step=5)
    look(goodput, 1, 2, step=lambda now: int(1_000_000 * now), step_seconds=None)
    assert goodput.total.share is not None
    assert goodput.total.share <= 1.0

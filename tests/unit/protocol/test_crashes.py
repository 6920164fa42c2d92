"""Crashes on one machine and in a cluster: counted by rounds, waited after, and begun anew by progress."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.protocol.crashes import Crashes, CrashWaits, wait_after

WAITS = CrashWaits(10.0, 300.0, 600.0)


@pytest.mark.parametrize(
    ("streak", "at_once", "seconds"),
    [(1, 1, 0.0), (2, 1, 10.0), (3, 1, 20.0), (1, 0, 10.0), (7, 1, 300.0), (100_000, 1, 300.0)],
)
def test_the_wait_doubles_after_those_that_are_replaced_at_once(streak: int, at_once: int, seconds: float) -> None:
    assert wait_after(streak, WAITS, at_once=at_once) == seconds


def test_a_step_begins_a_new_count_and_time_a_new_streak() -> None:
    books = Crashes().after(5, 100.0, WAITS, at_once=1).after(5, 110.0, WAITS, at_once=1)
    assert (books.count, books.streak, books.retry) == (2, 2, 120.0)
    further = books.after(6, 120.0, WAITS, at_once=1)
    assert (further.count, further.streak) == (1, 3)
    later = books.after(5, 110.0 + WAITS.reset, WAITS, at_once=1)
    assert (later.count, later.streak, later.retry) == (3, 1, 110.0 + WAITS.reset)


def test_a_job_that_starts_again_waits_from_the_first_crash_on() -> None:
    books = Crashes().after(0, 100.0, WAITS, at_once=1)
    assert (books.retry, books.waiting(101.0, WAITS).retry) == (100.0, 111.0)
    assert books.waiting(101.0, WAITS).count == books.count


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 5)), min_size=1, max_size=20))
def test_a_round_is_counted_once_however_many_of_it_crash(rounds: list[tuple[float, int]]) -> None:
    books, now = Crashes(), 0.0
    for pause, workers in rounds:
        begun, now = now, now + pause
        for _ in range(workers):
            now += 1.0
            if books.begins_round([begun]):
                books = books.after(0, now, WAITS, at_once=1)
    assert books.count == len(rounds)

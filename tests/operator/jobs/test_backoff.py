"""Crashes: each is counted once, whatever the order in which the news come, and waited after longer and longer."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import NOW, ended, training

from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator.api.job import Failures
from virtualflow_operator.api.objects import Pod, format_time, parse_time
from virtualflow_operator.jobs.endings import count_crash, count_failed_attempt, count_refusal
from virtualflow_operator.settings import CrashSettings

WAITS = CrashSettings()
RUNNING = training(1).pods[1]


def crashed(uid: str, created: float = NOW - 90) -> Pod:
    word = TerminationMessage("failed", step=40, error="ValueError: odd batch")
    return dataclasses.replace(ended(RUNNING, word=word), uid=uid, created=created)


def count(failures: Failures, *pods: Pod, step: int = 40, now: float = NOW) -> Failures:
    return count_crash(failures, pods, step, "it crashed", now, WAITS)


def wait_of(failures: Failures, now: float = NOW) -> float:
    return (parse_time(failures.retry_time) or now) - now


def test_a_crash_is_counted_once_as_long_as_its_pod_is_there() -> None:
    first = count(Failures(), crashed("a"))
    assert (first.count, first.streak, first.counted) == (1, 1, ("a",))
    assert (first.step, first.last_time, first.message) == (40, format_time(NOW), "it crashed")
    assert count(first, crashed("a"), now=NOW + 60) == first


@given(st.permutations(["a", "b", "c", "d"]), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_workers_of_one_round_are_one_failure_in_whatever_order_they_are_seen(
    order: list[str], portions: list[int]
) -> None:
    books, present = Failures(), 0
    for portion in [*portions, 4]:
        present = min(present + portion, 4)
        books = count(books, *(crashed(uid) for uid in order[:present]), now=NOW + present)
    assert (books.count, books.streak) == (1, 1)
    assert set(books.counted) == set("abcd")


@given(st.lists(st.sampled_from(["crash", "again", "look"]), max_size=12))
def test_the_count_is_that_of_the_crashes_of_different_rounds(events: list[str]) -> None:
    books, pods, now = Failures(), [], NOW
    for number, event in enumerate(events):
        now += 10
        if event == "crash":
            pods.append(crashed(f"pod-{number}", created=now - 1))
        for _ in range(2 if event == "again" else 1):
            books = count(books, *pods, now=now)
    assert books.count == books.streak == events.count("crash")


def test_a_step_in_between_begins_a_new_count_but_not_a_new_wait() -> None:
    books = Failures(count=2, streak=2, step=40, last_time=format_time(NOW - 10))
    same = count(books, crashed("a", NOW - 5))
    further = count(books, crashed("a", NOW - 5), step=41)
    assert (same.count, same.streak) == (3, 3)
    assert (further.count, further.streak) == (1, 3)


@pytest.mark.parametrize(
    ("streak", "wait"),
    [(0, 0.0), (1, 10.0), (2, 20.0), (3, 40.0), (6, 300.0), (60, 300.0), (100_000, 300.0)],
    ids=str,
)
def test_the_first_is_replaced_at_once_and_then_the_wait_doubles(streak: int, wait: float) -> None:
    books = Failures(count=streak, streak=streak, step=40, last_time=format_time(NOW - 10) if streak else None)
    assert wait_of(count(books, crashed("a", NOW - 5))) == wait


def test_crashes_far_apart_begin_again_with_the_first_wait() -> None:
    books = Failures(count=7, streak=7, step=40, last_time=format_time(NOW - WAITS.reset))
    counted = count(books, crashed("a", NOW - 5))
    assert (counted.count, counted.streak, wait_of(counted)) == (8, 1, 0.0)


# --- the job as a whole -----------------------------------------------------------------------------------------------


def attempt(failures: Failures, *pods: Pod, now: float = NOW) -> Failures:
    return count_failed_attempt(failures, pods, 40, "the job failed", now, WAITS)


def test_a_failed_attempt_always_waits() -> None:
    books = attempt(Failures())
    assert (books.count, books.streak, books.counted, wait_of(books)) == (1, 1, (), 10.0)


@pytest.mark.parametrize("order", ["the pod first", "the coordinator first", "both at once"])
def test_a_crash_is_counted_once_whoever_tells_of_it_first(order: str) -> None:
    pod = crashed("a")
    if order == "the pod first":
        books = attempt(count(Failures(), pod), pod, now=NOW + 1)
    elif order == "the coordinator first":
        books = count(attempt(Failures()), now=NOW + 1)  # its pod is one of an earlier attempt then
    else:
        books = attempt(Failures(), pod)
    assert books.count == 1
    assert wait_of(books) >= 10.0


def test_two_workers_that_raise_at_once_are_one_failure() -> None:
    """The one was counted as a pod, the other comes with the news that the job has failed."""
    books = attempt(count(Failures(), crashed("a")), crashed("a"), crashed("b"), now=NOW + 1)
    assert (books.count, wait_of(books, NOW + 1) > 0) == (1, True)


def test_a_failure_after_an_earlier_crash_is_another_one() -> None:
    books = attempt(count(Failures(), crashed("a")), crashed("b", created=NOW + 1), now=NOW + 60)
    assert books.count == 2


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_refused_worker_is_no_crash_but_waited_after() -> None:
    books, now = Failures(), NOW
    waits = []
    for number in range(4):
        now += 1
        refused = dataclasses.replace(ended(RUNNING, 75), uid=f"r-{number}", created=now - 0.5)
        books = count_refusal(books, [], [refused], "refused", now, WAITS)
        assert books == count_refusal(books, [], [refused], "refused", now + 0.1, WAITS), "each is counted once"
        waits.append(wait_of(books, now))
    assert books.count == 0
    assert waits == [0.0, 10.0, 20.0, 40.0]


def test_pods_that_are_gone_leave_the_books() -> None:
    books = count(Failures(), crashed("a"))
    books = count_refusal(count(books), [], [], "", NOW, WAITS)
    assert (books.counted, books.count) == ((), 1)

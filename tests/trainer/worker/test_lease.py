"""For how long a leader takes its place for granted."""

from __future__ import annotations

import time

from virtualflow.worker.member_state import HeldLease, awake_and_asleep


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_holds_before_something_was_shown() -> None:
    assert not HeldLease(Clock()).holds(5.0)


def test_what_shows_it_counts_from_before_it_began() -> None:
    lease = HeldLease(clock := Clock())
    lease.begin()
    clock.now += 4.0  # stopped in the middle of an exchange: the others may have gone on since they had contributed
    lease.renew()
    assert lease.holds(5.0)
    clock.now += 1.0
    assert not lease.holds(5.0)


def test_what_was_begun_and_failed_shows_nothing() -> None:
    lease = HeldLease(clock := Clock())
    lease.begin()
    lease.renew()
    clock.now += 6.0
    lease.begin()
    assert not lease.holds(5.0)


def test_after_the_end_of_the_training_it_is_for_ever() -> None:
    lease = HeldLease(clock := Clock())
    lease.keep()
    clock.now += 1e6
    assert lease.holds(5.0)


def test_its_clock_goes_on_while_the_machine_sleeps() -> None:
    assert awake_and_asleep() >= time.monotonic() - 1.0

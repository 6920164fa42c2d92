"""Whoever has waited for very long gets a turn, whatever the policy."""

from __future__ import annotations

import pytest
from scheduling_cases import ELASTIC, LINEAR, NOW, TOLD, decide, job, running

from virtualflow_operator.scheduling import next_change


@pytest.mark.parametrize("name", ELASTIC)
def test_who_has_waited_for_long_gets_a_turn_and_keeps_it_for_its_time(name: str) -> None:
    favoured = running("a", 4, minimum=3, weight=9.0, priority=9, curve=LINEAR, steps_left=1)
    jobs = [favoured, job("b", minimum=3, submitted=NOW)]
    late = NOW + TOLD.starvation_bound
    assert decide(name, jobs, 4, late - 1)["b"].workers == 0
    found = decide(name, jobs, 4, late)
    assert (found["a"].workers, found["b"].workers) == (0, 4)
    jobs = [each.given(found[each.name.rpartition("/")[2]].workers, late) for each in jobs]
    assert next_change(late, jobs, TOLD) == late + TOLD.hold
    assert decide(name, jobs, 4, late + TOLD.turn - 1)["b"].workers == 4
    if name != "MaxThroughput":  # which knows no priority, and prefers whom it need not stop
        assert decide(name, jobs, 4, late + TOLD.turn)["a"].workers == 4


@pytest.mark.parametrize("name", ELASTIC)
def test_turns_take_half_of_a_full_queue(name: str) -> None:
    favoured = [running(letter, 1, 1, weight=9.0, priority=9, curve=LINEAR, steps_left=1) for letter in "abcd"]
    waiting = [job(letter, 1, submitted=NOW - TOLD.starvation_bound) for letter in "wxyz"]
    found = decide(name, [*favoured, *waiting], 4)
    assert [found[letter].workers for letter in "wxyz"] == [1, 1, 0, 0]
    assert sum(found[letter].workers for letter in "abcd") == 2
    assert found["y"].reason.startswith("waits: its minimum of 1 does not fit in the queue")
    assert found["z"].reason == "waits behind red/y, which has waited for longer"


def test_a_large_job_that_waits_for_its_turn_is_not_overtaken_by_small_ones() -> None:
    turning = running("a", 2, minimum=2, waited=TOLD.starvation_bound, since=NOW - 10.0, resized=NOW - 10.0)
    large = job("l", minimum=4, submitted=NOW - 900.0)
    small = job("s", minimum=1, submitted=NOW - 800.0)
    found = decide("WeightedFairShare", [turning, large, small], 5)
    assert (found["l"].workers, found["s"].workers) == (0, 0)
    assert found["s"].reason == "waits behind red/l, which has waited for longer"
    after = NOW + TOLD.turn
    assert decide("WeightedFairShare", [turning, large, small], 5, after)["l"].workers == 4

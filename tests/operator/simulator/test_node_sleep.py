"""Nodes that sleep: what a forecast goes by, what each plan keeps awake, and who waits."""

from __future__ import annotations

import pytest
from benchmarks.node_sleep import (
    AHEAD,
    BOOT,
    DAY,
    SLOT,
    UNITS,
    PaperRule,
    Plan,
    Score,
    forecast,
    idle,
    need_of,
    reserve,
    score,
    up_nodes,
)
from hypothesis import given
from hypothesis import strategies as st

from virtualflow_operator.simulator.outcome import Outcome, Result
from virtualflow_operator.simulator.trace import GoneEvent, JobEvent, NodeEvent

NIGHT, MORNING = 60, 70
"""Slots of a day."""
DAYS = [5 if at % DAY >= MORNING else 2 for at in range(4 * DAY)]
"""Every morning three more nodes are needed; every midnight they are not."""


@pytest.mark.parametrize(
    ("slot", "confidence", "found"),
    [
        pytest.param(3 * DAY + NIGHT, 0.9, 3, id="before the morning: what came on each of the days before"),
        pytest.param(3 * DAY + MORNING + AHEAD, 0.9, 0, id="by day: no more than there is"),
        pytest.param(NIGHT, 0.9, 0, id="on the first day: as many as were ever needed, which is now"),
    ],
)
def test_a_reserve_is_what_came_at_this_time_of_earlier_days(slot: int, confidence: float, found: int) -> None:
    assert reserve(DAYS[: slot + 1], confidence) == found


@pytest.mark.parametrize(
    ("plan", "needed", "kept"),
    [
        pytest.param(idle(2), [4, 3, 1], 3, id="asleep after two slots"),
        pytest.param(idle(2, 1), [4, 3, 1], 4, id="and one in reserve"),
        pytest.param(forecast(0.9), DAYS[: 3 * DAY + NIGHT + 1], 5, id="awake before the morning"),
    ],
)
def test_what_a_plan_keeps_awake(plan: Plan, needed: list[int], kept: int) -> None:
    assert plan(needed, 9) == kept


def test_the_papers_rule_wakes_a_reserve_and_lets_it_sleep_once_the_need_has_fallen() -> None:
    rule, history = PaperRule(buffer=2, past=2, ahead=3, rest=2), [3] * 2 * DAY
    assert rule([*history, 6], 4) == 8, "two too few: they wake, with the reserve"
    assert rule([*history, 6, 4], 8) == 8, "it has just woken some"
    assert rule([*history, 6, 4, 3], 8) == 5, "fallen, and no rise is foreseen"
    assert rule([*history, 6, 4, 3, 3, 3], 5) == 5, "nothing falls"


def test_waits_are_counted() -> None:
    """Two of the three nodes that come into use after the first slot are asleep then."""
    assert score([1, 1, 3, 4], idle(1, 1), total=9) == Score(
        awake=(2 + 2 + 4 + 5) / 4, used=(1 / 2 + 1 / 2 + 3 / 4 + 4 / 5) / 4, wakings=DAY / 4, waited=1 / 3
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 4), st.integers(0, 3))
def test_more_in_reserve_never_makes_anybody_wait_more(needed: list[int], slots: int, buffer: int) -> None:
    less, more = (score(needed, idle(slots, spare), 20) for spare in (buffer, buffer + 1))
    assert more.waited <= less.waited
    assert more.awake >= less.awake
    assert 0 <= less.waited <= 1


def test_nodes_are_up_some_time_after_they_are_needed() -> None:
    job = JobEvent(100.0, "j", 1, {1: 1.0})
    changes = ((100.0, UNITS + 1), (2 * SLOT + 50.0, 1), (4 * SLOT, 0))
    need = need_of(Result((Outcome(job, 100.0, changes[-1][0], 0.0, 0.0, 0, 0, changes, ""),), (), 0))
    assert need == [(0.0, 0), (100.0, 2), (2 * SLOT + 50.0, 1), (4 * SLOT, 0)]
    assert up_nodes(need, idle(1), total=5) == [
        NodeEvent(100.0 + BOOT, "node-1", UNITS),
        NodeEvent(100.0 + BOOT, "node-2", UNITS),
        GoneEvent(4 * SLOT, "node-2"),
    ]

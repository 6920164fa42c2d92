"""Generations are numbered above all that anybody knows of, whatever the coordinator's clock says."""

from __future__ import annotations

import pytest
from coordinator_server import hello
from driven import Driven

from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.protocol import http_api, lineage
from virtualflow.protocol import messages as m
from virtualflow.protocol.lineage import number_above


@pytest.mark.parametrize(
    ("floor", "above"),
    [
        pytest.param(m.Generation(5_000, 9), True, id="the clock is an hour slow"),
        pytest.param(m.Generation(1_000, 9), True, id="of this very coordinator"),
        pytest.param(m.Generation(3, 900), True, id="of one before it"),
        pytest.param(m.Generation(lineage.LAST_INCARNATION, 9), True, id="of the last millisecond"),
        pytest.param(m.Generation(lineage.LAST_INCARNATION + 1, 9), False, id="of a time that no clock shows"),
        pytest.param(m.Generation(999_999_999_999_999, 1), False, id="of fifteen nines"),
        pytest.param(m.Generation(5_000, lineage.LAST_COUNTER + 1), False, id="of more than a training makes"),
        pytest.param(m.Generation(2**53, 2**53), False, id="such a one is never made"),
    ],
)
def test_a_first_generation_is_numbered_above_all_that_workers_know_of(floor: m.Generation, above: bool) -> None:
    job = Driven(1_000, 1, MembershipSettings(restart_grace=0.0))
    assert job.admit(hello("worker-0", ready=True, floor=floor)) is None
    job.now += 1.0
    job.decide()
    (plan,) = (message for _, message in job.take_outbox() if isinstance(message, m.Plan))
    assert (plan.generation > floor) == above
    assert plan.generation.counter == (floor.counter if above else 0) + 1
    assert lineage.is_possible(plan.generation)


@pytest.mark.parametrize("incarnation", [5_000, lineage.LAST_INCARNATION - 1])
@pytest.mark.parametrize("counter", [1, lineage.LAST_COUNTER - 1, lineage.LAST_COUNTER])
def test_above_each_number_that_is_possible_there_is_another_one(incarnation: int, counter: int) -> None:
    floor = m.Generation(incarnation, counter)
    above = number_above(floor, 1.0)
    assert above > floor
    assert lineage.is_possible(above)
    assert lineage.is_possible(number_above(above, 1.0))


@pytest.mark.parametrize("incarnation", [999_999_999_999_999, lineage.LAST_INCARNATION + 1])
def test_news_of_a_time_that_no_clock_shows_moves_no_number(incarnation: int) -> None:
    job = Driven(1_000, 1, MembershipSettings(restart_grace=0.0))
    assert job.admit(hello("worker-0", ready=True, heard=m.Generation(incarnation, 9))) is None
    assert (job.state.incarnation, job.state.counter) == (1_000, 0)


def test_a_running_generation_is_not_made_to_overtake_another_lineage() -> None:
    job = Driven(1_000, 2, MembershipSettings(restart_grace=0.0, admission_window=0.0))
    running = m.Plan(m.Generation(900, 3), "planned", (m.Member("worker-0", "worker-0.0", "a", 0, 8),), (), "start", "")
    assert job.admit(hello("worker-0", ready=True, plan=running)) is None
    assert job.admit(hello("worker-1", ready=True, floor=m.Generation(5_000, 9))) is None
    assert job.state.incarnation == 1_000


@pytest.mark.parametrize(
    "floor", [m.NO_GENERATION, m.Generation(1_764_000_000_000, 7), m.Generation(2**42, 7)], ids=str
)
def test_a_process_without_a_coordinator_numbers_its_own_above_them_too(floor: m.Generation) -> None:
    assert number_above(floor, 1_764_000_000.0) > floor


def test_whoever_asks_for_its_lease_gets_it_or_is_refused() -> None:
    job = Driven(1_000, 1, MembershipSettings())
    assert job.admit(hello("worker-0")) is None
    job.take_outbox()
    job.hear("worker-0.0", m.RenewLease(3))
    assert job.take_outbox() == [("worker-0.0", m.Lease(3))]
    job.call(http_api.GoneCall("worker-0"))
    job.take_outbox()
    job.hear("worker-0.0", m.RenewLease(4))
    assert job.take_outbox() == []

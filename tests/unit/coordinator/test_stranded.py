"""A survivor that could not complete the step after which the others entered the next generation."""

from __future__ import annotations

import pytest
from driven import first_job

from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m


@pytest.mark.parametrize("entered_first", [True, False], ids=["the others' news first", "its own news first"])
def test_a_survivor_left_behind_in_the_former_generation_is_recovered(entered_first: bool) -> None:
    job, first = first_job()
    job.call(http_api.DrainCall(("b",)))
    job.decide()
    planned = job.state.proposed
    assert planned is not None
    assert [member.worker for member in planned.members] == ["a", "c"]

    # b dies in the step in which all agreed on the change: c has it complete and enters, a has not.
    news = [("ic", m.Entered(planned, 10, False)), ("ia", m.Broken(first.generation, 9, "peer closed"))]
    for incarnation, message in news if entered_first else reversed(news):
        job.hear(incarnation, message)
        job.decide()
    job.lose_connection("ib")
    job.decide()
    for moment in (4.0, 5.0, 6.0):
        job.now = moment
        for incarnation in ("ia", "ic"):
            job.hear(incarnation, m.Heartbeat())
        job.decide()

    recovery = job.state.proposed
    assert recovery is not None
    assert recovery.mode == "recovery"
    assert [member.worker for member in recovery.members] == ["a", "c"]


@pytest.mark.parametrize("entered_first", [True, False], ids=["the others' news first", "its own news first"])
def test_who_was_to_leave_and_is_left_behind_is_told_so(entered_first: bool) -> None:
    job, first = first_job()
    job.call(http_api.DrainCall(("b",)))
    job.decide()
    planned = job.state.proposed
    assert planned is not None

    # b has not got all of the step in which all agreed on the change.
    news = [("ic", m.Entered(planned, 10, False)), ("ib", m.Broken(first.generation, 9, "peer closed"))]
    for incarnation, message in news if entered_first else reversed(news):
        job.hear(incarnation, message)
        job.decide()
    told = [message.reason for i, message in job.take_outbox() if i == "ib" and isinstance(message, m.Refuse)]
    assert told == [f"declared lost: the job went on in generation {planned.generation} without this process"]
    assert job.state.running == planned


def test_a_recovery_is_not_broken_because_not_all_have_entered_it_yet() -> None:
    job, first = first_job()
    for incarnation in ("ia", "ic"):
        job.hear(incarnation, m.Broken(first.generation, 9, "peer closed"))
    job.lose_connection("ib")
    job.decide()
    recovery = job.state.proposed
    assert recovery is not None
    for moment, incarnation in ((4.0, "ic"), (4.1, "ia")):
        job.now = moment
        job.hear(incarnation, m.Entered(recovery, 9, False))
        job.decide()
    for moment in (5.0, 6.0):
        job.now = moment
        for incarnation in ("ia", "ic"):
            job.hear(incarnation, m.Heartbeat())
        job.decide()
    assert job.state.proposed is None
    assert job.state.running == recovery


def test_who_enters_a_recovery_that_does_not_count_makes_the_job_wait_for_the_former_generation() -> None:
    """a is cut off, and b hangs while c enters the recovery of both: of the former generation, c has no majority."""
    job, first = first_job()
    progress = m.Progress(first.generation, 5, 0, 100, {}, 1.0, "training")
    job.hear("ia", progress)
    for moment in (5.0, 7.0, 8.5):
        job.now = moment
        for incarnation in ("ib", "ic"):
            job.hear(incarnation, m.Heartbeat())
        job.decide()
    recovery = job.state.proposed
    assert recovery is not None
    assert [member.worker for member in recovery.members] == ["b", "c"]
    job.hear("ic", m.Entered(recovery, 5, False))
    job.call(http_api.GoneCall("b", "ib", "it hung, and was ended"))
    job.decide()
    alone = job.state.proposed
    assert alone is not None
    assert [member.worker for member in alone.members] == ["c"]

    job.hear("ic", m.Broken(alone.generation, 5, "no majority", contested=first))
    for _ in range(20):
        job.now += 0.5
        job.hear("ic", m.Heartbeat())
        job.decide()
    assert job.state.phase == "training"
    assert "waiting for the word of whoever runs a that it has ended" in job.state.reason

    job.call(http_api.GoneCall("a", "ia", "its node is gone"))
    job.now += 0.5
    job.decide()
    again = job.state.proposed
    assert again is not None
    assert again.generation > alone.generation
    assert [member.worker for member in again.members] == ["c"]
    assert set(again.ended) == {"ia", "ib"}

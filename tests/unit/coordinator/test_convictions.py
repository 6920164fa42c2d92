"""A worker that came to wrong gradients, as the members of its generation have found: the others go on without it."""

from __future__ import annotations

import pytest
from driven import Driven, first_job

from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m

WHY = "it came to other gradients of virtual node 5 in step 10 than a and c"


def events(job: Driven) -> list[str]:
    return [event.text for event in job.status().events]


@pytest.mark.parametrize("teller", ["ia", "ib"], ids=["another one tells", "it tells itself"])
@pytest.mark.parametrize("broken", [False, True], ids=["at once", "behind the news that a collective broke"])
def test_the_convicted_is_lost_for_that_reason_and_the_others_recover(teller: str, broken: bool) -> None:
    job, first = first_job()
    if broken:
        job.hear("ic", m.Broken(first.generation, 9, "peer closed"))
    job.hear(teller, m.Broken(first.generation, 9, WHY, convicted="ib"))
    job.decide()
    recovery = job.state.proposed
    assert recovery is not None
    assert recovery.mode == "recovery"
    assert recovery.reason == f"b lost: {WHY}"
    assert [member.worker for member in recovery.members] == ["a", "c"]
    assert f"b lost: {WHY}" in events(job)
    refused = [message for incarnation, message in job.take_outbox() if incarnation == "ib"]
    assert m.Refuse(f"declared lost: {WHY}") in refused
    # The others say the same, and whatever the convicted one says is heard no more.
    for incarnation in ("ia", "ib", "ic"):
        job.hear(incarnation, m.Broken(first.generation, 9, WHY, convicted="ia" if incarnation == "ib" else "ib"))
    job.decide()
    assert job.state.proposed == recovery
    assert [(lost.worker, lost.convicted) for lost in job.status().lost] == [("b", True)]


@pytest.mark.parametrize(
    ("generation", "convicted"),
    [(m.Generation(1, 99), "ib"), (m.NO_GENERATION, "ib"), (None, "nobody")],
    ids=["a generation to come", "one that is over", "a process that is no member"],
)
def test_a_conviction_that_cannot_be_changes_nothing(generation: m.Generation | None, convicted: str) -> None:
    job, first = first_job()
    job.hear("ia", m.Broken(generation or first.generation, 9, WHY, convicted=convicted))
    job.decide()
    assert job.status().lost == ()


def test_a_conviction_and_a_death_at_once_leave_the_third() -> None:
    job, first = first_job()
    job.call(http_api.GoneCall("c", "ic", "killed"))
    job.decide()
    recovery = job.state.proposed
    assert recovery is not None
    assert [member.worker for member in recovery.members] == ["a", "b"]
    job.hear("ia", m.Broken(first.generation, 9, WHY, convicted="ib"))
    job.decide()
    assert [lost.worker for lost in job.status().lost] == ["c", "b"]
    job.call(http_api.GoneCall("b", "ib", "ended"))  # two of three: the word of whoever runs them is needed
    job.decide()
    assert job.state.proposed is not None
    assert [member.worker for member in job.state.proposed.members] == ["a"]


def test_a_conviction_holds_when_the_convicted_has_gone_on_already() -> None:
    job, first = first_job()
    job.call(http_api.GoneCall("c", "ic", "killed"))
    job.decide()
    recovery = job.state.proposed
    assert recovery is not None
    job.hear("ib", m.Entered(recovery, 9, False))
    job.hear("ia", m.Broken(first.generation, 9, WHY, convicted="ib"))
    job.decide()
    assert f"b lost: {WHY}" in events(job)


def test_who_holds_another_state_than_most_is_told_of_when_the_job_ends() -> None:
    job, _ = first_job()
    job.hear("ic", m.Failed(0, "the workers' states differ", "", odd=("ib", "nobody")))
    job.hear("ib", m.Failed(0, "the workers' states differ", "", odd=("ib",)))
    job.decide()
    status = job.status()
    assert (status.phase, status.error) == ("failed", "the workers' states differ")
    assert [(lost.worker, lost.convicted) for lost in status.lost] == [("b", True)]

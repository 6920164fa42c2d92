"""A survivor that could not complete the step after which the others entered the next generation."""

from __future__ import annotations

import pytest
from driven import Driven

from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.versions import PROTOCOL


def hello(worker: str) -> m.Hello:
    return m.Hello(
        protocol=PROTOCOL, worker=worker, incarnation=f"i{worker}", address="127.0.0.1", pid=1, virtual_nodes=8,
        fingerprint="f", ready=True, draining=False, drain_deadline=None, plan=None, step=0, total_steps=100,
        done=False, changes=(),
    )  # fmt: skip


def first_job() -> tuple[Driven, m.Plan]:
    """A job in whose first generation a, b and c train."""
    job = Driven(incarnation=1, wanted=3, settings=MembershipSettings())
    for worker in "abc":
        assert job.admit(hello(worker)) is None
    job.now = 3.0
    job.decide()
    first = job.state.proposed
    assert first is not None
    for worker in "abc":
        job.hear(f"i{worker}", m.Entered(first, 0, False))
    return job, first


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

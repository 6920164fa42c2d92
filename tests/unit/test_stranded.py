"""A survivor that could not complete the step after which the others entered the next generation."""

from __future__ import annotations

import pytest

from virtualflow import calls
from virtualflow import messages as m
from virtualflow.job import Job
from virtualflow.settings import MembershipSettings


def hello(worker: str) -> m.Hello:
    return m.Hello(
        protocol=m.PROTOCOL, worker=worker, incarnation=f"i{worker}", address="127.0.0.1", pid=1, virtual_nodes=8,
        fingerprint="f", ready=True, draining=False, drain_deadline=None, plan=None, step=0, total_steps=100,
        done=False, changes=(),
    )  # fmt: skip


def founded_job() -> tuple[Job, m.Plan]:
    """A job in whose first generation a, b and c train."""
    job = Job(incarnation=1, wanted=3, settings=MembershipSettings(), now=0.0, wall=0.0)
    for worker in "abc":
        assert job.hello(hello(worker)) is None
    job.set_time(3.0, 3.0)
    job.decide()
    founded = job.proposed
    assert founded is not None
    for worker in "abc":
        job.receive(f"i{worker}", m.Entered(founded, 0, False))
    return job, founded


@pytest.mark.parametrize("entered_first", [True, False], ids=["the others' news first", "its own news first"])
def test_a_survivor_left_behind_in_the_former_generation_is_recovered(entered_first: bool) -> None:
    job, founded = founded_job()
    job.drain(calls.DrainCall(("b",)))
    job.decide()
    planned = job.proposed
    assert planned is not None
    assert [member.worker for member in planned.members] == ["a", "c"]

    # b dies in the exchange in which all agreed on the change: c has it complete and enters, a has not.
    news = [("ic", m.Entered(planned, 10, False)), ("ia", m.Broken(founded.generation, 9, "peer closed"))]
    for incarnation, message in news if entered_first else reversed(news):
        job.receive(incarnation, message)
        job.decide()
    job.disconnected("ib")
    job.decide()
    for moment in (4.0, 5.0, 6.0):
        job.set_time(moment, moment)
        for incarnation in ("ia", "ic"):
            job.receive(incarnation, m.Heartbeat())
        job.decide()

    recovery = job.proposed
    assert recovery is not None
    assert recovery.mode == "recovery"
    assert [member.worker for member in recovery.members] == ["a", "c"]


def test_a_recovery_is_not_broken_because_not_all_have_entered_it_yet() -> None:
    job, founded = founded_job()
    for incarnation in ("ia", "ic"):
        job.receive(incarnation, m.Broken(founded.generation, 9, "peer closed"))
    job.disconnected("ib")
    job.decide()
    recovery = job.proposed
    assert recovery is not None
    for moment, incarnation in ((4.0, "ic"), (4.1, "ia")):
        job.set_time(moment, moment)
        job.receive(incarnation, m.Entered(recovery, 9, False))
        job.decide()
    for moment in (5.0, 6.0):
        job.set_time(moment, moment)
        for incarnation in ("ia", "ic"):
            job.receive(incarnation, m.Heartbeat())
        job.decide()
    assert job.proposed is None
    assert job.running == recovery

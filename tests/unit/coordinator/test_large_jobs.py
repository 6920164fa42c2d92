"""What a message and a decision cost grows with the number of workers, and not with its square.

Counted are calls of Python functions: four times as many workers may cost four times as many, and a bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType

import pytest
from coordinator_server import hello
from driven import Driven, large_job

from virtualflow.coordinator.settings import HEARTBEATS, MembershipSettings
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import HEARTBEAT_LIMIT

FEW, MANY = 50, 200
STEP = 5


def count_calls(work: Callable[[], object]) -> int:
    """How many Python functions it calls; each step of a generator counts as one."""
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def generation_of(job: Driven) -> m.Generation:
    assert job.state.running is not None
    return job.state.running.generation


def come_one_after_the_other(job: Driven, plan: m.Plan, members: Sequence[m.Member]) -> None:
    """To a coordinator that may be new, each well within the heartbeat limit, and all in a time that is longer."""
    nodes = len(plan.members)
    for number, member in enumerate(members, 1):
        assert job.admit(hello(member.worker, member.incarnation, plan=plan, virtual_nodes=nodes)) is None
        beat(job, members[:number], 4)


def beat(job: Driven, members: Iterable[m.Member], times: int) -> None:
    """Let some time pass, in which these give signs of life: five of them are a heartbeat limit."""
    for _ in range(times):
        job.now += HEARTBEAT_LIMIT / HEARTBEATS
        for member in members:
            job.hear(member.incarnation, m.Heartbeat())
        job.decide()


def test_a_new_coordinator_loses_nobody_while_workers_come_to_it() -> None:
    """A thousand with certificates take longer than the heartbeat limit to connect."""
    known = large_job(8)[0].state.running
    assert known is not None
    job = Driven(2, 8, MembershipSettings())
    come_one_after_the_other(job, known, known.members)
    assert [worker.connected for worker in job.state.roster.workers.values()] == [True] * 8
    assert job.state.running == known


def test_a_new_coordinator_loses_whoever_does_not_come() -> None:
    known = large_job(8)[0].state.running
    assert known is not None
    job = Driven(2, 8, MembershipSettings())
    *here, missing = known.members
    come_one_after_the_other(job, known, here)
    beat(job, here, 1)
    assert job.state.roster.is_lost(missing.incarnation)
    assert not any(job.state.roster.is_lost(member.incarnation) for member in here)


def report_broken(job: Driven) -> None:
    """When one is lost, all the others do; the first of their messages counts."""
    job.hear("iw2", m.Broken(generation_of(job), STEP, "connection closed by peer"))


def report_broken_again(job: Driven) -> None:
    report_broken(job)
    job.hear("iw3", m.Broken(generation_of(job), STEP, "connection closed by peer"))


def make_next_generation(job: Driven) -> None:
    job.lose_connection("iw1")
    report_broken(job)
    job.decide()
    assert job.state.proposed is not None


def enter(job: Driven) -> None:
    make_next_generation(job)
    plan = job.state.proposed
    assert plan is not None
    job.hear("iw2", m.EnteredTold(plan.generation, STEP, False))


def come_back(job: Driven) -> None:
    """To a coordinator that knows the job, after a moment without a connection."""
    assert job.state.running is not None
    job.lose_connection("iw3")
    plan = job.state.running
    assert job.admit(hello("w3", "iw3", plan=plan, virtual_nodes=len(plan.members), fingerprint="f")) is None


@pytest.mark.parametrize(
    "event",
    [
        report_broken,
        report_broken_again,
        make_next_generation,
        enter,
        come_back,
        lambda job: job.hear("iw2", m.Heartbeat()),
        lambda job: job.hear("iw2", m.Publish(generation_of(job), "member-2", b"address")),
        lambda job: job.decide(),
    ],
    ids=["broken", "broken again", "loss", "enter", "come back", "heartbeat", "publish", "decide"],
)
def test_what_happens_costs_as_much_more_as_there_are_workers(event: Callable[[Driven], object]) -> None:
    few, many = (count_calls(partial(event, large_job(size)[0])) for size in (FEW, MANY))
    assert many <= 1.5 * MANY / FEW * few, f"{few} calls with {FEW} workers, {many} with {MANY}"

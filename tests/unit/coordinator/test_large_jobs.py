"""What a message and a decision cost grows with the number of workers, and not with its square.

Counted are calls of Python functions: four times as many workers may cost four times as many, and a bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest
from driven import Driven

from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.protocol import messages as m
from virtualflow.protocol.versions import PROTOCOL

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


def training_job(size: int) -> Driven:
    """So many workers train, each by one virtual node."""
    job = Driven(1, size, MembershipSettings())
    names = [f"w{number}" for number in range(size)]
    members = tuple(m.Member(name, f"i{name}", "127.0.0.1", n, n + 1) for n, name in enumerate(names))
    plan = m.Plan(m.Generation(1, 1), "recovery", members, tuple(names), "start", "")
    for name in names:
        assert job.admit(hello_of(name, plan)) is None
    job.hear("iw0", m.Progress(plan.generation, STEP, 0, 100, {}, 1.0, "training"))
    job.decide()
    job.take_outbox()
    return job


def hello_of(name: str, plan: m.Plan) -> m.Hello:
    return m.Hello(
        protocol=PROTOCOL, worker=name, incarnation=f"i{name}", address="127.0.0.1", pid=1,
        virtual_nodes=len(plan.members), fingerprint="f", ready=True, draining=False, drain_deadline=None, plan=plan,
        step=STEP, total_steps=100, done=False, changes=(),
    )  # fmt: skip


def generation_of(job: Driven) -> m.Generation:
    assert job.state.running is not None
    return job.state.running.generation


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
    assert job.admit(hello_of("w3", job.state.running)) is None


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
    few, many = (count_calls(partial(event, training_job(size))) for size in (FEW, MANY))
    assert many <= 1.5 * MANY / FEW * few, f"{few} calls with {FEW} workers, {many} with {MANY}"

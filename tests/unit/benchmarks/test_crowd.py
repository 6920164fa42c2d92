"""What a job of many workers costs its coordinator, counted in messages, bytes and decisions, not in time."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections import Counter

import msgspec
import pytest
from coordinator_server import SETTINGS, hello, serving, told, until
from driven import Driven

from virtualflow.coordinator import server as server_module
from virtualflow.coordinator.decisions import decide
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.coordinator.state import JobState
from virtualflow.protocol import framing, http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_MESSAGE, MAX_UNPACKED

WORKERS = 200
SECRET = 16
"""Bytes of what a member publishes before its address; nothing makes them shorter."""


def address(rank: int) -> bytes:
    """As workers publish it: a secret, and where the member listens."""
    return random.Random(rank).randbytes(SECRET) + f"10.1.{rank // 256}.{rank % 256} {40_000 + rank}".encode()


class Crowd(Driven):
    """Many workers of one job, without sockets; what the coordinator says is taken at once."""

    def __init__(self, workers: int = WORKERS) -> None:
        super().__init__(1, workers, MembershipSettings(restart_grace=0.0))
        for number in range(workers):
            self.start(f"worker-{number}")
        self.decide()
        self.said: list[tuple[str, m.ToWorker]] = []
        self.take()

    def start(self, name: str) -> str:
        facts = {"virtual_nodes": 4 * WORKERS, "ready": True}
        assert self.admit(hello(name, **facts)) is None
        return f"{name}.0"

    def take(self) -> Counter[type]:
        """How many messages of each kind the coordinator has for its workers."""
        self.said = self.take_outbox()
        return Counter(type(message) for _, message in self.said)

    def bytes(self) -> int:
        """How much the last messages make on the wire."""
        return sum(len(framing.pack(message)) for _, message in self.said)

    def each(self, plan: m.Plan, message: m.FromWorker | None = None) -> None:
        """All members say something: ``message``, or the key by which the others reach them."""
        for rank, member in enumerate(plan.members):
            said = message or m.Publish(plan.generation, f"member-{rank}", address(rank))
            self.hear(member.incarnation, framing.unpack_from_worker(framing.pack(said)))

    def enter(self) -> Counter[type]:
        """The proposed generation is built and entered; what was said over it."""
        plan = self.state.proposed
        assert plan is not None
        self.each(plan)
        self.decide()
        said = self.take()
        self.each(plan, m.Prepared(plan.generation))
        self.each(plan, m.EnteredTold(plan.generation, 3, restored=False))
        self.decide()
        assert self.state.running == plan
        return said + self.take()


def test_a_generation_costs_a_few_messages_a_worker() -> None:
    crowd = Crowd()
    assert Counter(type(message) for _, message in crowd.said) == {m.Welcome: WORKERS, m.Plan: WORKERS}
    assert crowd.enter() == {m.Keys: WORKERS}

    crowd.lose_connection("worker-7.0")
    assert crowd.state.running is not None
    crowd.each(crowd.state.running, m.Broken(crowd.state.running.generation, 3, "connection closed"))
    crowd.decide()
    assert crowd.take() == {m.Plan: WORKERS - 1}
    assert crowd.enter() == {m.Keys: WORKERS - 1}

    crowd.start("worker-7b")
    crowd.decide()
    assert crowd.take() == {m.Welcome: 1, m.Plan: WORKERS}


def test_a_message_to_all_is_one_message_that_is_packed_once() -> None:
    crowd = Crowd()
    plan = crowd.state.proposed
    assert plan is not None
    crowd.each(plan)
    crowd.decide()
    assert len({id(message) for _, message in crowd.said if isinstance(message, m.Plan)}) == 1
    crowd.take()
    assert len({id(message) for _, message in crowd.said}) == 1


def test_what_all_are_told_of_each_other_is_small_on_the_wire() -> None:
    crowd = Crowd()
    assert crowd.bytes() < WORKERS * WORKERS * 100
    plan = crowd.state.proposed
    assert plan is not None
    crowd.each(plan)
    crowd.decide()
    crowd.take()
    assert crowd.bytes() < WORKERS * WORKERS * 2 * SECRET


def test_a_step_and_a_sign_of_life_are_answered_by_nobody_and_decide_nothing() -> None:
    crowd = Crowd()
    crowd.enter()
    plan, news = crowd.state.running, crowd.state.news
    assert plan is not None
    for step in range(4, 24):
        leader = plan.members[0].incarnation
        crowd.hear(leader, m.Progress(plan.generation, step, 0, None, {"loss": 1.0}, 9.0, "training"))
        crowd.each(plan, m.Heartbeat())
    assert crowd.state.history.step == 23
    assert crowd.take() == {}
    assert crowd.state.news == news


def test_who_has_entered_does_not_tell_a_plan_back_that_is_known() -> None:
    crowd = Crowd()
    plan = crowd.state.proposed
    assert plan is not None
    told_back = [m.Entered(plan, 3, restored=False), m.EnteredTold(plan.generation, 3, restored=False)]
    long, short = (len(framing.pack(message)) for message in told_back)
    assert short < 200 < long
    for incarnation, message in zip(("worker-0.0", "worker-1.0"), told_back, strict=True):
        crowd.hear(incarnation, message)
        assert crowd.state.roster.workers[incarnation].entered == plan.generation
    crowd.hear("worker-2.0", m.EnteredTold(m.Generation(9, 9), 3, restored=False))
    assert crowd.state.roster.workers["worker-2.0"].entered is None
    assert crowd.state.running == plan


@pytest.mark.slow
def test_what_many_say_at_once_is_decided_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = 0.5 / WORKERS

    async def story() -> None:
        async with serving(dataclasses.replace(SETTINGS, rest=rest, first_message=30.0)) as server:
            server.coordinator.call(http_api.ScaleCall(WORKERS))
            streams = await asyncio.gather(
                *(server.worker(f"worker-{number}", virtual_nodes=WORKERS) for number in range(WORKERS))
            )
            decisions = 0

            def counted(state: JobState, now: float) -> float | None:
                nonlocal decisions
                decisions += 1
                return decide(state, now)

            monkeypatch.setattr(server_module, "decide", counted)
            began = time.monotonic()
            for stream in streams:
                await stream.send_bytes(m.encode(m.Ready()))
            await until(lambda: all(worker.ready_at is not None for worker in server.state.roster.workers.values()))
            await until(lambda: server.state.proposed is not None)
            # At most one in each interval; a job's own limits (an initial start has none) would come on top.
            assert decisions <= 2 + (time.monotonic() - began) / (rest * WORKERS)
            for stream in streams:
                assert isinstance(await told(stream), m.Plan)

    asyncio.run(story())


def test_the_largest_job_fits_into_a_message() -> None:
    name = "a-job-with-a-rather-long-name-in-a-namespace-worker"
    members = tuple(
        m.Member(f"{name}-{number}", f"{number:032x}", f"10.1.{number // 256}.{number % 256}", number, number + 1)
        for number in range(4_096)
    )
    plan = m.Plan(m.Generation(2**41, 7), "planned", members, (), "join", "all join")
    for message in (plan, hello("worker-0", plan=plan), m.Entered(plan, 3, restored=False)):
        assert len(framing.pack(message)) < MAX_MESSAGE
        assert len(m.encode(message)) < MAX_UNPACKED
    assert framing.unpack_to_worker(framing.pack(plan)) == plan
    told = msgspec.structs.replace(hello("worker-0"), plan=plan)
    assert isinstance(framing.unpack_from_worker(framing.pack(told)), m.Hello)

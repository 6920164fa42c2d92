"""What a job of many workers costs its coordinator, counted in messages, bytes and decisions, not in time."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter

import msgspec
from coordinator_server import SETTINGS, hello, serving, told, until

from virtualflow import messages as m
from virtualflow.job import Job
from virtualflow.settings import MAX_BUNDLE, MAX_MESSAGE, MAX_UNPACKED, MembershipSettings

WORKERS = 200
ADDRESS = bytes(154) + b"".join(pair.to_bytes(8, "little") for pair in range(WORKERS))
"""As long as what gloo publishes: an address, and a number for each member."""


class Crowd:
    """Many workers of one job, without sockets; what the coordinator says is taken at once."""

    def __init__(self, workers: int = WORKERS) -> None:
        self.job = Job(1, workers, MembershipSettings(restart_grace=0.0), 0.0, 0.0)
        for number in range(workers):
            self.start(f"worker-{number}")
        self.job.decide()
        self.said: list[tuple[str, m.ToWorker]] = []
        self.take()

    def start(self, name: str) -> str:
        facts = {"virtual_nodes": 4 * WORKERS, "ready": True}
        assert self.job.hello(hello(name, **facts)) is None
        return f"{name}.0"

    def take(self) -> Counter[type]:
        """How many messages of each kind the coordinator has for its workers."""
        self.said, self.job.outbox = self.job.outbox, []
        return Counter(type(message) for _, message in self.said)

    def bytes(self) -> int:
        """How much the last messages make on the wire."""
        return sum(len(m.pack(message)) for _, message in self.said)

    def each(self, plan: m.Plan, message: m.FromWorker | None = None) -> None:
        """All members say something: ``message``, or the key by which the others reach them."""
        for rank, member in enumerate(plan.members):
            said = message or m.Publish(plan.generation, f"0/{rank}", ADDRESS)
            self.job.receive(member.incarnation, m.unpack_from_worker(m.pack(said)))

    def enter(self) -> Counter[type]:
        """The proposed generation is built and entered; what was said over it."""
        plan = self.job.proposed
        assert plan is not None
        self.each(plan)
        self.job.decide()
        said = self.take()
        self.each(plan, m.Prepared(plan.generation))
        self.each(plan, m.EnteredTold(plan.generation, 3, restored=False))
        self.job.decide()
        assert self.job.running == plan
        return said + self.take()


def test_a_generation_costs_a_few_messages_a_worker() -> None:
    crowd = Crowd()
    assert Counter(type(message) for _, message in crowd.said) == {m.Welcome: WORKERS, m.Plan: WORKERS}
    bundles = -(-WORKERS * len(ADDRESS) // MAX_BUNDLE)
    assert crowd.enter() == {m.Keys: WORKERS * bundles}

    crowd.job.disconnected("worker-7.0")
    assert crowd.job.running is not None
    crowd.each(crowd.job.running, m.Broken(crowd.job.running.generation, 3, "connection closed"))
    crowd.job.decide()
    assert crowd.take() == {m.Plan: WORKERS - 1}
    assert crowd.enter() == {m.Keys: (WORKERS - 1) * bundles}

    crowd.start("worker-7b")
    crowd.job.decide()
    assert crowd.take() == {m.Welcome: 1, m.Plan: WORKERS}


def test_a_message_to_all_is_one_message_that_is_packed_once() -> None:
    crowd = Crowd()
    plan = crowd.job.proposed
    assert plan is not None
    crowd.each(plan)
    crowd.job.decide()
    assert len({id(message) for _, message in crowd.said if isinstance(message, m.Plan)}) == 1
    crowd.take()
    assert len({id(message) for _, message in crowd.said}) <= -(-WORKERS * len(ADDRESS) // MAX_BUNDLE)


def test_what_all_are_told_of_each_other_is_small_on_the_wire() -> None:
    crowd = Crowd()
    assert crowd.bytes() < WORKERS * WORKERS * 100
    plan = crowd.job.proposed
    assert plan is not None
    crowd.each(plan)
    crowd.job.decide()
    crowd.take()
    assert crowd.bytes() < WORKERS * WORKERS * len(ADDRESS) / 10


def test_a_step_and_a_sign_of_life_are_answered_by_nobody_and_decide_nothing() -> None:
    crowd = Crowd()
    crowd.enter()
    plan, news = crowd.job.running, crowd.job.news
    assert plan is not None
    for step in range(4, 104):
        leader = plan.members[0].incarnation
        crowd.job.receive(leader, m.Progress(plan.generation, step, 0, None, {"loss": 1.0}, 9.0, "training"))
        crowd.each(plan, m.Heartbeat())
    assert crowd.job.history.step == 103
    assert crowd.take() == {}
    assert crowd.job.news == news


def test_who_has_entered_does_not_tell_a_plan_back_that_is_known() -> None:
    crowd = Crowd()
    plan = crowd.job.proposed
    assert plan is not None
    told_back = [m.Entered(plan, 3, restored=False), m.EnteredTold(plan.generation, 3, restored=False)]
    long, short = (len(m.pack(message)) for message in told_back)
    assert short < 200 < long
    for incarnation, message in zip(("worker-0.0", "worker-1.0"), told_back, strict=True):
        crowd.job.receive(incarnation, message)
        assert crowd.job.roster.workers[incarnation].entered == plan.generation
    crowd.job.receive("worker-2.0", m.EnteredTold(m.Generation(9, 9), 3, restored=False))
    assert crowd.job.roster.workers["worker-2.0"].entered is None
    assert crowd.job.running == plan


def test_what_many_say_at_once_is_decided_on_together() -> None:
    rest = 0.5 / WORKERS

    async def story() -> None:
        async with serving(dataclasses.replace(SETTINGS, rest=rest, first_message=30.0)) as server:
            server.job.scale(WORKERS)
            streams = await asyncio.gather(
                *(server.worker(f"worker-{number}", virtual_nodes=WORKERS) for number in range(WORKERS))
            )
            decisions, decide = 0, server.job.decide

            def counted() -> float | None:
                nonlocal decisions
                decisions += 1
                return decide()

            server.job.decide = counted  # type: ignore[method-assign]
            began = time.monotonic()
            for stream in streams:
                await stream.send_bytes(m.encode(m.Ready()))
            await until(lambda: all(worker.ready_at is not None for worker in server.job.roster.workers.values()))
            await until(lambda: server.job.proposed is not None)
            # At most one in each interval; a job's own limits (a founding has none) would come on top.
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
        assert len(m.pack(message)) < MAX_MESSAGE
        assert len(m.encode(message)) < MAX_UNPACKED
    assert m.unpack_to_worker(m.pack(plan)) == plan
    assert isinstance(m.unpack_from_worker(m.pack(msgspec.structs.replace(hello("worker-0"), plan=plan))), m.Hello)

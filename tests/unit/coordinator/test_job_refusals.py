"""What a job does not believe or take: workers that do not fit, messages that cannot be true, and too much of any."""

from __future__ import annotations

import msgspec
import pytest
from simulated import Worker, generation, running_world

from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        pytest.param({"protocol": 99}, "protocol 99", id="another protocol"),
        pytest.param({"virtual_nodes": 8}, "8 virtual nodes", id="another number of virtual nodes"),
        pytest.param({"fingerprint": "other"}, "results would differ", id="another torch"),
        pytest.param({"device": "a P100", "self_test": "some"}, "not both could run the self-test", id="unlike tests"),
        pytest.param({"device": "a P100"}, "runs on [a P100] and the job on []", id="a device that tells no bits"),
        pytest.param({"self_test": "other"}, "both run on []", id="other bits on the same type of machine"),
        pytest.param({"reproducibility": "statistical"}, "statistical and the job bitwise", id="another kind"),
        pytest.param({"incarnation": "worker-0.0"}, "was called worker-0", id="another's incarnation"),
    ],
)
def test_who_does_not_fit_is_refused_and_changes_nothing(facts: dict[str, object], sentence: str) -> None:
    world = running_world(2)
    before = world.status()
    hello = msgspec.structs.replace(Worker("stranger", "stranger.9").hello(world.now), **facts)
    refusal = world.admit(hello)
    assert refusal is not None
    assert sentence in refusal
    world.turn()
    after = world.status()
    assert after.events[-1].refusal == http_api.Refusal("stranger", refusal)
    assert msgspec.structs.replace(after, events=()) == msgspec.structs.replace(before, events=())


def member(worker: str, first: int, last: int) -> m.Member:
    return m.Member(worker, f"{worker}.0", "127.0.0.1", first, last)


def plan(counter: int, *members: m.Member, incarnation: int = 1_001) -> m.Plan:
    return m.Plan(generation(counter, incarnation), "planned", members, (), "join", "")


LIES = [
    pytest.param(m.Prepared(generation(99)), id="prepared for a generation that is not"),
    pytest.param(m.Broken(generation(0, 0), 1, ""), id="a broken generation of old"),
    pytest.param(m.Entered(plan(0, member("worker-0", 0, 4)), 3, False), id="in a generation numbered 0"),
    pytest.param(m.Entered(plan(9), 3, False), id="in a generation without members"),
    pytest.param(m.Entered(plan(9, member("worker-9", 0, 4)), 3, False), id="in a generation of others"),
    pytest.param(m.Entered(plan(9, member("worker-0", 0, 3)), 3, False), id="in one that leaves out a virtual node"),
    pytest.param(m.Entered(plan(9, member("worker-0", 1, 4)), 3, False), id="in one that leaves out the first"),
    pytest.param(m.Entered(plan(9, member("worker-0", 0, 4), member("worker-1", 4, 4)), 3, False), id="with idle ones"),
    pytest.param(m.Entered(plan(2**53, member("worker-0", 0, 4)), 3, False), id="with a number too large to go on"),
    pytest.param(m.Publish(generation(99), "k", b"v"), id="a key of no generation"),
    pytest.param(m.Progress(generation(0, 0), 2**53, 0, 1, {}, 1.0, "training"), id="the progress of long ago"),
    pytest.param(m.Pace(generation(99), 1.0, 1.0, 1.0, 0.0, 9), id="a pace in a generation that is not"),
    pytest.param(m.Pace(generation(1), 1.0, 2.0, 0.5, 0.0, 9), id="a pace that is in none of its own quartiles"),
    pytest.param(m.Heartbeat(), id="a sign of life"),
]


@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_true_changes_nothing(lie: m.FromWorker) -> None:
    world = running_world(2)
    before = msgspec.structs.replace(world.status(), events=())
    world.hear("worker-0.0", lie)
    world.turn()
    assert msgspec.structs.replace(world.status(), events=()) == before
    assert not any(worker.inbox for worker in world.workers.values())
    world.settle(1.0)
    assert all(worker.synced for worker in world.workers.values())


def test_keys_of_a_rendezvous_are_bounded() -> None:
    world = running_world(2)
    assert world.state.running is not None
    for number in range(500):
        world.hear("worker-0.0", m.Publish(world.state.running.generation, str(number), b"v"))
    world.decide()
    relayed = {key for _, message in world.state.outbox if isinstance(message, m.Keys) for key in message.values}
    assert 1 <= len(relayed) <= 64


def test_sentences_of_any_length_reach_the_workers() -> None:
    world = running_world(4)
    for incarnation in ("worker-1.1", "worker-2.2", "worker-3.3"):
        worker = world.workers[incarnation]
        world.kill(worker)
        world.call(http_api.GoneCall(worker.name, incarnation, "x" * 4_096))
    world.turn()  # decodes what is sent
    world.settle(2.0)
    assert world.workers["worker-0.0"].synced
    world.call(http_api.FailCall("y" * 4_096))
    world.turn()
    assert world.state.phase == "failed"

"""Many workers that a job has lost: forgotten in the end, refused still, and confirmed as gone all the same."""

from __future__ import annotations

from driven import large_job
from simulated import running_world

from virtualflow.coordinator.settings import MAX_LOST
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_WORKERS


def test_the_dead_are_forgotten_and_still_refused() -> None:
    world = running_world(1)
    for number in range(50):
        worker = world.start_worker(f"spot-{number}")
        worker.ready = True
        world.settle(2.0)
        assert worker.synced
        world.kill(worker)
        world.settle(2.0)
    assert len(world.state.roster.workers) == 1
    assert world.admit(world.workers["spot-0.1"].hello(world.now)) is not None


def test_the_status_names_the_latest_of_many_who_were_declared_lost() -> None:
    world = running_world(1)
    for number in range(MAX_LOST + 3):
        worker = world.start_worker(f"spot-{number}")
        world.settle(0.5)
        world.kill(worker)
        world.call(http_api.GoneCall(worker.name, worker.incarnation))
    lost = world.status().lost
    assert [worker.worker for worker in lost] == [f"spot-{number}" for number in range(3, MAX_LOST + 3)]


def test_more_losses_at_once_than_the_status_names_are_confirmed_one_after_the_other() -> None:
    job, workers = large_job(150)
    for worker in workers[40:]:
        job.lose_connection(f"i{worker}")
    assert job.state.running is not None
    job.hear("iw0", m.Broken(job.state.running.generation, 5, "connection closed by peer"))
    for _ in range(3):
        job.decide()
        lost = job.status().lost
        assert len(lost) == MAX_LOST
        assert job.state.proposed is None or not any(one for one in lost if not one.ended)
        for one in lost:
            if not one.ended:
                job.call(http_api.GoneCall(one.worker, one.incarnation, one.reason))
    assert job.state.proposed is not None
    assert len(job.state.proposed.members) == 40


def test_no_confirmed_end_is_forgotten_while_others_wait_for_it() -> None:
    job, workers = large_job(MAX_WORKERS)
    for worker in workers[1:]:
        job.call(http_api.GoneCall(worker, f"i{worker}", "killed"))
    job.decide()
    assert job.state.proposed is not None
    assert [member.worker for member in job.state.proposed.members] == ["w0"]


def test_who_trains_alone_and_falls_silent_is_told_to_be_silent_though_its_connection_stands() -> None:
    """Of a machine without power nothing closes connections, and its node's state tells what its silence is."""
    world = running_world(1)
    (worker,) = world.workers.values()
    worker.hung = True
    news = world.state.news
    world.settle(2 * world.state.settings.heartbeat_limit)
    assert [one.state for one in world.status().workers] == ["training"], "it may be a pause"
    world.settle(6 * world.state.settings.heartbeat_limit)
    assert [(one.state, one.first, one.last) for one in world.status().workers] == [("silent", 0, 4)]
    assert world.state.news > news, "whoever watches is told at once"
    assert world.status().lost == ()
    worker.hung = False
    world.settle(1.0)
    assert [one.state for one in world.status().workers] == ["training"]

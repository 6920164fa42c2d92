"""Workers that a job has lost: reported or declared lost, refused when they come back, and forgotten in the end."""

from __future__ import annotations

import msgspec
import pytest
from coordinator_server import hello
from driven import first_job, large_job
from simulated import SETTINGS, Worker, World, assert_together, running_world

from virtualflow.coordinator.absence import excuse
from virtualflow.coordinator.roster import UnknownWorker
from virtualflow.coordinator.settings import MAX_LOST
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_WORKERS


def declared_lost(new_coordinator: bool = False) -> tuple[World, Worker]:
    """A job that has declared lost one of its three workers, which hangs, and goes on without it."""
    world = running_world(3)
    lost = world.workers["worker-1.1"]
    lost.hung = True
    world.settle(10.0)
    if new_coordinator:
        world.start_coordinator()
        world.settle(5.0)
    return world, lost


def test_a_worker_that_was_declared_lost_is_refused_when_it_comes_back() -> None:
    world, lost = declared_lost()
    lost.hung = False
    world.settle(1.0)
    assert lost.over is not None
    assert "no sign of life" in lost.over


def test_also_by_a_coordinator_that_has_never_known_it() -> None:
    world, lost = declared_lost(new_coordinator=True)
    replacement = world.start_worker("worker-1")
    replacement.ready = True
    world.settle(5.0)
    lost.hung = False
    world.settle(2.0)
    assert lost.over is not None
    assert "went on" in lost.over
    assert replacement.synced


@pytest.mark.parametrize("first", [True, False], ids=["before the others", "after them"])
def test_who_was_declared_lost_and_wakes_up_under_a_new_coordinator_never_meets_another_training(first: bool) -> None:
    world = running_world(2)
    asleep, other = world.workers.values()
    asleep.hung = True
    world.settle(SETTINGS.heartbeat_limit + 2.0)
    world.kill(other)  # nobody is left, so others begin anew
    world.call(http_api.GoneCall(other.name, other.incarnation))
    others = [world.start_worker(f"new-{number}") for number in range(2)]
    for worker in others:
        worker.ready = True
    world.settle(8.0)
    assert [worker.lineage for worker in others] == [2, 2]
    world.start_coordinator()  # the word that it was declared lost is lost with its connection
    asleep.hung = False
    for worker in [asleep, *others] if first else [*others, asleep]:
        worker.reconnect_at = world.now
        world.connect(worker)
    world.settle(5.0)
    assert asleep.over is not None
    assert "went on in generation" in asleep.over
    assert_together(world, others)


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


def test_the_status_names_whom_the_job_has_declared_lost_also_when_they_are_forgotten() -> None:
    world = running_world(4)
    hung, gone, leaver = (world.workers[f"worker-{number}.{number}"] for number in (1, 2, 3))
    hung.hung = True
    world.drain(leaver)
    world.settle(10.0)
    world.kill(gone)
    world.call(http_api.GoneCall("worker-2", gone.incarnation, "its node is lost"))
    world.settle(10.0)
    assert leaver.over == "left"
    assert list(world.state.roster.workers) == ["worker-0.0"]
    assert world.status().lost == (
        http_api.LostWorker("worker-1", "worker-1.1", "127.0.0.1", "no sign of life for 5 s", True),
        http_api.LostWorker("worker-2", "worker-2.2", "127.0.0.1", "its node is lost", True),
    )


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


def test_a_worker_that_a_new_coordinator_leaves_behind_is_among_them() -> None:
    world, hung = declared_lost(new_coordinator=True)
    assert world.status().lost == ()
    hung.hung = False
    world.settle(2.0)
    assert [worker.incarnation for worker in world.status().lost] == ["worker-1.1"]


def test_a_process_that_was_never_in_the_job_is_not_among_them() -> None:
    world = running_world(2)
    stranger = msgspec.structs.replace(Worker("stranger", "stranger.9").hello(world.now), virtual_nodes=8)
    assert world.admit(stranger) is not None
    assert world.status().lost == ()


@pytest.mark.parametrize("incarnation", [None, "nobody.7"], ids=["by name", "by incarnation"])
def test_the_loss_of_a_worker_that_never_was_is_no_news(incarnation: str | None) -> None:
    world = running_world(2)
    with pytest.raises(UnknownWorker):
        world.call(http_api.GoneCall("nobody", incarnation))
    with pytest.raises(UnknownWorker):
        world.call(http_api.GoneCall("nobody", "worker-0.0"))


def test_a_loss_may_be_reported_twice() -> None:
    world = running_world(2)
    call = http_api.GoneCall("worker-1", "worker-1.1", "killed")
    world.kill(world.workers["worker-1.1"])
    world.call(call)
    world.settle(2.0)
    assert "already" in world.call(call)
    assert world.workers["worker-0.0"].synced


def test_a_loss_that_is_reported_without_a_reason_is_one_all_the_same() -> None:
    world = running_world(2)
    gone = world.workers["worker-1.1"]
    world.kill(gone)
    world.call(http_api.GoneCall("worker-1", reason=""))
    assert [worker.worker for worker in world.status().workers] == ["worker-0"]
    assert "already" in world.call(http_api.GoneCall("worker-1", reason=""))
    assert world.admit(gone.hello(world.now)) is not None


def test_a_loss_that_a_new_coordinator_hears_of_too_early_is_kept_in_mind() -> None:
    world = running_world(2)
    world.kill(world.workers["worker-1.1"])
    world.start_coordinator()
    with pytest.raises(UnknownWorker):
        world.call(http_api.GoneCall("worker-1", "worker-1.1", "killed"))
    world.settle(2.0)
    assert world.workers["worker-0.0"].synced
    assert world.state.running is not None
    assert len(world.state.running.members) == 1


def test_a_coordinator_that_is_cut_off_from_all_who_train_declares_nobody_lost() -> None:
    """They train on without it. Who comes back first is no witness against the others."""
    world = running_world(3)
    first, *others = world.workers.values()
    for worker in world.workers.values():
        worker.hung = True
    world.settle(3 * SETTINGS.heartbeat_limit)
    assert world.status().lost == ()
    first.hung = False
    world.settle(SETTINGS.heartbeat_limit - 1.0)
    assert world.status().lost == ()
    others[0].hung = False
    world.settle(2.0)
    assert [lost.worker for lost in world.status().lost] == [others[1].name]


def test_where_nobody_runs_the_workers_all_who_have_died_are_lost_in_the_end() -> None:
    world = running_world(2)
    world.authority = False
    for worker in world.workers.values():
        world.kill(worker)
    world.settle(5.0)
    assert world.status().lost == ()
    world.settle(SETTINGS.silence_patience * SETTINGS.heartbeat_limit)
    assert len(world.status().lost) == 2
    for worker in list(world.workers.values()):
        world.start_worker(worker.name).ready = True
    world.settle(5.0)
    assert world.state.running is not None
    assert len(world.state.running.members) == 2


def test_who_comes_back_to_a_coordinator_that_did_not_run_is_not_taken_for_the_one_that_died() -> None:
    """All connections have closed, and it reads that before anybody can come again."""
    job, first = first_job()
    job.now = 20.0
    excuse(job.state, 17.0, job.now)
    for worker in "ab":
        job.hear(f"i{worker}", m.Broken(first.generation, 3, "connection closed by peer"))
    for worker in "abc":
        job.lose_connection(f"i{worker}")
    job.decide()
    assert job.status().lost == ()
    job.now += 0.9
    assert job.admit(_member("a", first)) is None
    job.decide()
    job.now += 0.9
    assert job.admit(_member("b", first)) is None
    job.decide()
    assert job.status().lost == ()
    job.now += 0.3
    job.decide()
    assert [lost.worker for lost in job.status().lost] == ["c"]


@pytest.mark.parametrize("joins", [False, True], ids=["a recovery", "a joiner"])
def test_a_proposal_of_which_nothing_is_ever_heard_is_made_again(joins: bool) -> None:
    """Also where an older worker does not tell the next connection that it could not build a communicator."""
    job, first = first_job()
    if joins:
        assert job.admit(hello("d", "id", ready=True, fingerprint="f")) is None
        job.state.wanted = 4
    else:
        job.hear("ia", m.Broken(first.generation, 3, "connection closed by peer"))
    numbers = set()
    began, ends = job.now, 2 * SETTINGS.build_limit
    while job.now < began + ends:
        for worker in job.state.roster.workers:
            job.hear(worker, m.Heartbeat())
        job.now = min(job.now + 1.0, job.decide() or float("inf"))
        numbers |= {job.state.proposed.generation} if job.state.proposed is not None else set()
    assert len(numbers) == 2


def _member(worker: str, plan: m.Plan) -> m.Hello:
    return hello(worker, f"i{worker}", plan=plan, fingerprint="f", ready=True)


def test_a_silent_coordinator_is_not_the_workers_silence() -> None:
    world = running_world(2)
    world.now += 30.0
    excuse(world.state, 30.0, world.now)
    world.turn()
    assert not any(worker.gone for worker in world.state.roster.workers.values())

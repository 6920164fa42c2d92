"""How a job's members change: who is waited for, who joins, who leaves, and who holds up nobody."""

from __future__ import annotations

from simulated import SETTINGS, World, running_world

from virtualflow.protocol import http_api


def test_a_lone_worker_that_drains_hands_its_state_to_its_replacement() -> None:
    world = running_world(1)
    [old] = world.workers.values()
    world.drain(old)
    new = world.start_worker("worker-1")
    new.ready = True
    world.settle(5.0)
    assert old.over == "left"
    assert new.lineage == old.lineage
    assert new.step >= old.step > 0


def test_a_lone_worker_without_a_replacement_leaves_in_time_and_the_job_waits() -> None:
    world = running_world(1)
    [old] = world.workers.values()
    world.drain(old)
    world.settle(SETTINGS.drain_grace)
    assert old.over == "left"
    assert world.state.phase == "waiting"


def test_a_joiner_that_never_builds_holds_up_nobody() -> None:
    world = running_world(2)
    hung = world.start_worker("hung")
    hung.ready, hung.builds = True, False
    world.settle(1.0)
    assert world.state.proposed is not None
    other = world.start_worker("other")
    other.ready = True
    world.settle(25.0)
    assert other.synced
    world.settle(40.0)
    assert hung.over is not None
    assert "could not be connected" in hung.over


def test_a_drain_takes_effect_before_its_deadline_though_a_joiner_hangs() -> None:
    world = running_world(2)
    hung = world.start_worker("hung")
    hung.ready, hung.builds = True, False
    world.settle(1.0)
    world.call(http_api.DrainCall(("worker-1",), 8.0))
    world.turn()
    world.settle(8.0 - SETTINGS.drain_margin + 0.5)
    assert world.workers["worker-1.1"].over == "left"
    assert world.workers["worker-0.0"].synced


def test_nothing_begins_with_fewer_workers_than_the_minimum() -> None:
    world = World(wanted=3, minimum=2)
    first = world.start_worker("worker-0")
    first.ready = True
    world.settle(SETTINGS.startup_grace + 10.0)
    assert world.state.phase == "waiting"
    second = world.start_worker("worker-1")
    second.ready = True
    world.settle(SETTINGS.startup_grace - 5.0)
    assert world.state.phase == "waiting"
    world.settle(10.0)
    assert first.synced
    assert second.synced


def test_the_minimum_may_be_lowered_while_the_job_waits() -> None:
    world = World(wanted=2, minimum=2)
    worker = world.start_worker("worker-0")
    worker.ready = True
    world.settle(5.0)
    assert (world.status().minimum, world.state.phase) == (2, "waiting")
    world.call(http_api.ScaleCall(1, 1))
    world.turn()
    world.settle(1.0)
    assert (world.status().minimum, world.state.phase) == (1, "training")
    world.call(http_api.ScaleCall(4))
    assert world.status().minimum == 1


def test_an_initial_start_that_loses_a_worker_it_needs_begins_anew_with_the_others() -> None:
    world = World(wanted=2, minimum=2)
    first, second = world.start_worker("worker-0"), world.start_worker("worker-1")
    first.ready = second.ready = True
    second.builds = False
    world.settle(3.0)
    assert world.state.proposed is not None
    world.kill(second)
    world.settle(3.0)
    assert world.state.proposed is None
    assert world.state.phase == "waiting"
    third = world.start_worker("worker-2")
    third.ready = True
    world.settle(5.0)
    assert first.over is None
    assert first.synced
    assert third.synced


def test_a_worker_that_hangs_during_the_initial_start_is_declared_lost() -> None:
    world = World(wanted=3)
    for number in range(3):
        worker = world.start_worker(f"worker-{number}")
        worker.ready, worker.builds = True, number != 1
    world.settle(60.0)
    assert world.workers["worker-1.1"].over is not None
    assert world.workers["worker-0.0"].synced
    assert world.workers["worker-2.2"].synced

"""How a job ends: stopped, done, or failed because its workers' weights differ."""

from __future__ import annotations

from simulated import SETTINGS, World, done, running_world

from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m


def test_a_stop_before_the_first_step_ends_all_at_once() -> None:
    world = World(wanted=2)
    for number in range(2):
        worker = world.start_worker(f"worker-{number}")
        worker.ready, worker.builds = True, False
    world.settle(3.0)
    assert world.state.proposed is not None
    world.call(http_api.StopCall("enough"))
    world.turn()
    world.settle(1.0)
    assert world.state.phase == "stopped"
    assert all(worker.over is not None and "ended: False" in worker.over for worker in world.workers.values())


def test_a_stop_lets_all_leave_at_one_step_and_ends_those_who_wait() -> None:
    world = running_world(2)
    waiting = world.start_worker("worker-2")
    world.settle(1.0)
    world.call(http_api.StopCall("enough"))
    world.turn()
    world.settle(2.0)
    first, second = world.workers["worker-0.0"], world.workers["worker-1.1"]
    assert first.over == second.over == "left"
    assert first.step == second.step
    assert waiting.over is not None
    assert world.state.phase == "stopped"


def test_the_end_is_told_to_those_who_wait_to_join() -> None:
    world = running_world(2)
    waiting = world.start_worker("worker-2")
    world.settle(1.0)
    for incarnation in ("worker-0.0", "worker-1.1"):
        world.hear(incarnation, done(7))
        world.turn()
    assert world.state.phase == "done"
    assert m.End(False, "the job is complete") in waiting.inbox
    assert [event.kind for event in world.status().events].count("done") == 1


def test_a_coordinator_that_restarts_at_the_end_does_not_wait_for_those_who_are_through() -> None:
    world = running_world(2)
    first, second = world.workers.values()
    first.kept[m.Done] = done(7)
    world.kill(second)
    world.start_coordinator()
    world.settle(SETTINGS.heartbeat_limit + 3.0)
    assert world.state.phase == "done"


def test_different_weights_at_the_end_fail_the_job() -> None:
    world = running_world(2)
    world.hear("worker-0.0", done(7, "aaaa"))
    world.hear("worker-1.1", done(7, "bbbb"))
    world.turn()
    assert world.state.phase == "failed"
    assert "not deterministic" in (world.status().error or "")


def test_different_weights_at_the_end_are_no_fault_of_a_statistical_job() -> None:
    world = running_world(2)
    world.state.reproducibility = "statistical"
    world.hear("worker-0.0", done(7, "aaaa"))
    world.hear("worker-1.1", done(7, "bbbb"))
    world.turn()
    assert world.state.phase == "done"
    assert world.status().digest == "aaaa"

"""What workers measure of their pace, and what the job makes of it: who carries how much."""

from __future__ import annotations

import pytest
from simulated import SETTINGS, World, running_world


def counts(world: World) -> list[int]:
    assert world.state.running is not None
    return [len(member.virtual_nodes) for member in world.state.running.members]


def measure(world: World, *seconds: float) -> None:
    """Each worker measures its pace in the generation that it is in."""
    for worker, pace in zip(world.workers.values(), seconds, strict=True):
        world.measure(worker, pace)
    world.settle(SETTINGS.rebalance_interval + 1.0)


def test_a_straggler_loses_load_and_gets_it_back_when_it_recovers() -> None:
    world = running_world(2)
    before = world.state.running_generation
    measure(world, 0.01, 0.01)
    assert (counts(world), world.state.running_generation) == ([2, 2], before)
    measure(world, 0.01, 0.03)
    assert counts(world) == [3, 1]
    assert world.state.running is not None
    assert world.state.running.cause == "rebalance"
    status = world.status()
    assert [worker.pace_ms for worker in status.workers] == pytest.approx([10.0, 30.0])
    assert status.predicted_step_ms == pytest.approx(31.0)
    assert status.computing_ms == pytest.approx(30.0), "of which they compute all but what they wait"
    # Those paces were measured in the generation before: nothing is done until there are new ones.
    world.settle(10.0)
    assert counts(world) == [3, 1]
    measure(world, 0.01, 0.01)
    assert counts(world) == [2, 2]


def test_a_new_coordinator_is_told_the_paces_and_goes_on_from_the_present_split() -> None:
    world = running_world(2)
    measure(world, 0.01, 0.03)
    measure(world, 0.01, 0.03)
    world.start_coordinator()
    world.settle(5.0)
    assert counts(world) == [3, 1]
    assert [worker.pace_ms for worker in world.status().workers] == pytest.approx([10.0, 30.0])


def test_a_new_coordinator_carries_on_with_what_was_to_be_moved() -> None:
    world = running_world(2)
    for worker, seconds in zip(world.workers.values(), (0.01, 0.03), strict=True):
        world.measure(worker, seconds)
    world.start_coordinator()
    world.settle(SETTINGS.rebalance_interval + 3.0)
    assert counts(world) == [3, 1]


def test_joins_and_losses_use_what_was_measured() -> None:
    world = running_world(2)
    measure(world, 0.01, 0.03)
    world.start_worker("worker-2").ready = True
    world.settle(3.0)
    assert counts(world) == [2, 1, 1]
    world.kill(world.workers["worker-2.2"])
    world.settle(3.0)
    assert counts(world) == [3, 1]


def test_a_profile_makes_the_first_assignment_right() -> None:
    world = World(wanted=2)
    for number, guess in enumerate((0.01, 0.03)):
        worker = world.start_worker(f"worker-{number}")
        worker.ready, worker.guess = True, guess
    world.settle(5.0)
    assert counts(world) == [3, 1]


def test_a_joiner_is_not_kept_waiting_by_a_rebalance_that_nobody_can_enter() -> None:
    world = running_world(2)
    for worker, seconds in zip(world.workers.values(), (0.01, 0.03), strict=True):
        world.measure(worker, seconds)
    world.pass_time(SETTINGS.rebalance_interval + 1.0)  # no step is made: the job is held
    assert world.state.proposed is not None
    assert world.state.proposed.cause == "rebalance"
    world.start_worker("worker-2").ready = True
    world.pass_time(SETTINGS.admission_window + 1.0)
    assert world.state.proposed is not None
    assert (world.state.proposed.cause, len(world.state.proposed.members)) == ("join", 3)
    world.settle(2.0)
    assert len(counts(world)) == 3

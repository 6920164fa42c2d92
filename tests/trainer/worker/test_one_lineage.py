"""One lineage, whatever happens: two coordinators, lost and late messages, parted networks, wrong words of an end.

The decisions are the real ones on both sides: :mod:`model_network` has the coordinators, :mod:`model_worker` the
workers, and :mod:`model_histories` what may happen to them. ``make test-all`` tries 100,000 histories; those that have
failed once are here by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from model_histories import HOUR, Lineages

from tiers import examples


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """A history has a hundred lines of log, and there are many histories."""
    logger = logging.getLogger("virtualflow")
    former = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(former)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 21))])
def test_there_is_one_lineage_whatever_happens(number: int) -> None:
    """By night 20 times 5,000 histories, and a few more; by day fifty."""
    machine = seed(number)(type("Lineages", (Lineages,), {}))
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=5_000 if number else examples(200),
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def model() -> Iterator[Lineages]:
    found = Lineages()
    yield found
    found.model.__exit__(None, None, None)


def test_a_new_coordinator_whose_clock_is_behind_is_listened_to(model: Lineages) -> None:
    """The workers know the number of a first generation that a dead worker has made impossible."""
    model.begin(workers=4, second=False, steps=9)
    model.a_worker_dies(which=1, lose=True, silent=False)
    model.a_worker_starts(where=1)
    model.a_coordinator_starts(which=0, ahead=-HOUR)
    model.settle()


def test_a_coordinator_that_was_cut_off_takes_back_those_who_went_on_without_it(model: Lineages) -> None:
    """It had declared them lost, and refused them: the only ones that had the newest steps."""
    model.begin(workers=3, second=True, steps=11)
    model.the_network_parts(side=5, one_way="in", lose=True, where=True)
    model.the_network_heals()
    model.all_go_on(rounds=8)
    model.settle()


def test_who_was_called_away_by_a_coordinator_that_died_says_so_to_the_next_one(model: Lineages) -> None:
    """The others waited for it in the generation that it had let go of; the next coordinator saw all of them train."""
    model.begin(workers=3, second=True, steps=10)
    model.the_network_parts(side=30, one_way="", lose=False, where=True)
    model.all_go_on(rounds=12)
    model.the_address_leads_elsewhere(which=5, where=None)
    model.all_go_on(rounds=7)
    model.a_worker_starts(where=1)
    model.a_coordinator_starts(which=0, ahead=-HOUR)
    model.settle()


def test_a_survivor_that_tells_late_that_it_has_begun_is_not_refused(model: Lineages) -> None:
    """It entered the first generation, slowly; by then the coordinator had told it to begin without the others."""
    model.begin(workers=3, second=False, steps=8)
    model.a_worker_is_cut_off_from_its_coordinator_for_a_moment(which=1)
    model.a_worker_is_cut_off_from_its_coordinator_for_a_moment(which=3)
    model.all_go_on(rounds=1)
    model.time_passes(seconds=6.0)
    model.settle()


def test_fresh_workers_begin_nothing_beside_a_training_that_is_cut_off(model: Lineages) -> None:
    """A new coordinator never hears of those who train on without one."""
    model.begin(workers=2, second=True, steps=11)
    model.the_address_leads_elsewhere(which=0, where=None)
    model.the_address_leads_elsewhere(which=1, where=None)
    model.a_coordinator_dies(which=0)
    model.a_worker_starts(where=1)
    model.a_worker_starts(where=1)
    model.the_authority_turns_to_the_other_coordinator()
    model.time_passes(seconds=6.0)
    model.all_go_on(rounds=8)
    (coordinator,) = (one for one in model.network.coordinators if one is not None)
    assert "worker-0, worker-1 may train elsewhere" in coordinator.state.reason
    model.settle()


def test_who_has_missed_that_others_took_over_does_not_go_on_when_those_before_have_ended(model: Lineages) -> None:
    """Alone of three, cut off; the other two have handed the training on to a fourth, and ended."""
    model.begin(workers=3, second=True, steps=11)
    model.the_network_parts(side=1, one_way="", lose=False, where=True)
    model.all_go_on(rounds=8)
    model.time_passes(seconds=6.0)
    model.all_go_on(rounds=8)
    model.a_worker_starts(where=0)
    model.all_go_on(rounds=8)
    model.a_drain_is_announced(which=1, coordinator=0)
    model.a_drain_is_announced(which=2, coordinator=0)
    model.all_go_on(rounds=8)
    assert [worker.name for worker in model.living] == ["worker-0", "worker-3"]
    model.the_authority_turns_to_the_other_coordinator()
    model.ends_are_confirmed()
    model.all_go_on(rounds=8)
    other = model.network.coordinators[1]
    assert other is not None
    assert "worker-3 may train elsewhere" in other.state.reason
    model.settle()


def test_nobody_begins_beside_a_coordinator_that_begins_anew_since_its_workers_are_gone(model: Lineages) -> None:
    """What it trained is lost, and whoever comes to it may begin: neither does before it is known who lives."""
    model.begin(workers=1, second=True, steps=8)
    model.a_worker_dies(which=0, lose=False, silent=False)
    model.the_authority_turns_to_the_other_coordinator()
    model.a_worker_starts(where=0)
    model.a_worker_starts(where=1)
    model.all_go_on(rounds=3)
    assert [worker.plan for worker in model.living] == [None, None]
    model.settle()


def test_a_survivor_left_behind_does_not_wait_for_one_that_is_here_and_has_left(model: Lineages) -> None:
    """Nobody but the drained worker knows what became of the others; it waits itself for the survivor to go on."""
    model.begin(workers=4, second=True, steps=11)
    model.a_worker_is_cut_off_from_its_coordinator_for_a_moment(which=1)
    model.the_authority_turns_to_the_other_coordinator()
    model.a_drain_is_announced(which=3, coordinator=0)
    model.all_go_on(rounds=4)
    model.a_worker_dies(which=0, lose=False, silent=False)
    model.a_worker_dies(which=1, lose=False, silent=False)
    model.the_network_parts(side=1, one_way="", lose=True, where=False)
    model.settle()


def test_who_was_to_leave_and_lacks_the_last_step_is_told_that_nobody_calls_it_any_more(model: Lineages) -> None:
    """It could not complete the step after which the others went on, and waited until it was killed."""
    model.begin(workers=3, second=False, steps=9)
    model.a_connection_breaks(one=0, other=1, lose=False)
    model.a_drain_is_announced(which=0, coordinator=0)
    model.settle()


def test_who_was_to_leave_does_not_keep_a_state_that_others_have_passed(model: Lineages) -> None:
    """All who had passed it end; what begins anew then begins beside nobody."""
    model.begin(workers=4, second=False, steps=8)
    model.a_drain_is_announced(which=0, coordinator=0)
    model.an_end_is_confirmed_beforehand(which=1, within=1.0)
    model.all_go_on(rounds=5)
    model.an_end_is_confirmed_beforehand(which=1, within=1.0)
    model.an_end_is_confirmed_beforehand(which=2, within=1.0)
    model.a_connection_breaks(one=0, other=1, lose=True)
    model.settle()


def test_a_generation_that_waits_for_an_evaluation_to_end_is_not_held_for_one_that_counts(model: Lineages) -> None:
    """All had agreed on it, and evaluated before they entered it. One died; the other asked for a majority of it."""
    model.begin(workers=2, second=False, steps=8)
    model.a_worker_starts(where=0)
    model.all_go_on(rounds=4)
    model.a_worker_dies(which=1, lose=False, silent=False)
    model.ends_are_confirmed()
    model.all_go_on(rounds=20)
    first = model.network.coordinators[0]
    assert first is not None
    assert not first.state.failed, first.state.reason
    model.settle()


def test_who_has_lost_all_its_workers_asks_who_lives_before_it_begins_anew(model: Lineages) -> None:
    """Its only worker has handed the training on, by way of the other coordinator, and ended."""
    model.begin(workers=1, second=True, steps=8)
    model.the_address_leads_elsewhere(which=0, where=1)
    model.a_worker_starts(where=0)
    model.a_worker_starts(where=0)
    model.all_go_on(rounds=2)
    model.a_drain_is_announced(which=0, coordinator=1)
    model.the_address_leads_elsewhere(which=1, where=1)
    model.all_go_on(rounds=9)
    model.ends_are_confirmed()
    model.all_go_on(rounds=8)
    first = model.network.coordinators[0]
    assert first is not None
    assert "worker-1" in first.state.reason
    assert "may train elsewhere" in first.state.reason
    model.settle()


def test_a_recovery_proposed_before_a_newer_generation_was_known_takes_all_of_that_in(model: Lineages) -> None:
    """A new coordinator hears first of one that is two generations behind."""
    model.begin(workers=4, second=True, steps=8)
    model.a_worker_dies(which=0, lose=False, silent=False)
    model.ends_are_confirmed()
    model.a_worker_starts(where=0)
    model.the_address_leads_elsewhere(which=0, where=1)
    model.all_go_on(rounds=8)
    model.a_coordinator_dies(which=0)
    model.an_end_is_confirmed_beforehand(which=1, within=1.0)
    model.settle()


@pytest.mark.parametrize("workers", [1, 2])
def test_nobody_begins_beside_a_first_generation_whose_coordinator_has_not_heard_of_it(
    model: Lineages, workers: int
) -> None:
    """The plan, and the keys, have reached them; what they said then was lost."""
    model.begin(workers=workers, second=False, steps=0)
    coordinator = model.network.coordinators[0]
    assert coordinator is not None
    while coordinator.state.proposed is None:
        model.go_on(1)
    first = model.living
    for number in range(workers):
        model.what_a_worker_tells_its_coordinator_is_held_up(which=number)
    model.go_on(8)
    assert all(worker.history.completed_steps > 0 for worker in first)
    for number in range(workers):
        model.the_address_leads_elsewhere(which=number, where=None)
        model.a_worker_starts(where=0)
    model.go_on(20)
    late = [worker for worker in model.living if worker not in first]
    assert [worker.plan for worker in late] == [None] * workers
    model.the_network_heals()
    for number in range(workers):
        model.the_address_leads_elsewhere(which=number, where=0)
    model.settle()
    assert set(first) < set(model.living)


def test_a_beginning_takes_in_who_was_called_to_another_one_that_may_have_begun(model: Lineages) -> None:
    """There are more workers than virtual nodes; the next coordinator has called half of them and two others."""
    model.begin(workers=4, second=False, steps=3)
    model.a_worker_starts(where=1)
    model.a_worker_starts(where=0)
    model.a_coordinator_dies(which=0)
    model.the_address_leads_elsewhere(which=5, where=1)
    model.all_go_on(rounds=1)
    model.the_network_parts(side=1, one_way="", lose=True, where=False)
    model.settle()


def test_who_is_silent_is_lost_while_another_is_heard_whose_deletion_nobody_has_told_of(model: Lineages) -> None:
    """The coordinator to which the authority speaks does not exist: the other one goes by what it hears."""
    model.begin(workers=2, second=False, steps=4)
    model.the_authority_turns_to_the_other_coordinator()
    model.a_worker_is_cut_off_from_its_coordinator_for_a_moment(which=0)
    model.an_end_is_confirmed_beforehand(which=1, within=20.0)
    model.time_passes(seconds=6.0)
    model.settle()


def test_who_alone_has_the_state_is_not_given_up_because_those_are_heard_who_have_none(model: Lineages) -> None:
    """It has entered, its connection to the coordinator is lost, and the others have yet to enter."""
    model.begin(workers=3, second=False, steps=4)
    model.the_address_leads_elsewhere(which=5, where=1)
    model.time_passes(seconds=12.0)
    model.settle()


def test_nor_if_they_have_died_unnoticed(model: Lineages) -> None:
    model.begin(workers=3, second=False, steps=4)
    model.a_worker_dies(lose=False, silent=True, which=1)
    model.a_coordinator_stands_still_or_runs_again(which=0)
    model.a_coordinator_stands_still_or_runs_again(which=0)
    model.a_worker_dies(lose=False, silent=False, which=0)
    model.a_worker_starts(where=0)
    model.the_address_leads_elsewhere(which=0, where=1)
    model.time_passes(seconds=6.0)
    model.settle()


@pytest.mark.parametrize("silent", [False, True])
def test_nor_is_who_got_it_unnoticed_just_before_the_others_died(model: Lineages, silent: bool) -> None:
    """To the coordinator nobody with a state survives, or one that is dead; the authority says that this one lives."""
    model.begin(workers=3, second=False, steps=4)
    model.a_worker_dies(lose=False, silent=silent, which=2)
    model.a_coordinator_stands_still_or_runs_again(which=0)
    model.a_worker_dies(lose=False, silent=False, which=0)
    for _ in range(5):
        model.a_worker_starts(where=0)
    model.a_coordinator_stands_still_or_runs_again(which=0)
    model.the_address_leads_elsewhere(which=0, where=1)
    model.time_passes(seconds=6.0)
    model.settle()


def test_those_who_train_on_cut_off_from_their_coordinator_are_not_given_up(model: Lineages) -> None:
    """All of them were silent for longer than the heartbeat limit."""
    model.begin(workers=3, second=False, steps=12)
    for number in range(3):
        model.the_address_leads_elsewhere(which=number, where=None)
    model.go_on(20)
    for number in range(3):
        model.the_address_leads_elsewhere(which=number, where=0)
    model.go_on(8)
    assert len(model.living) == 3
    model.settle()


def test_the_survivors_of_a_death_while_the_coordinator_stood_still_go_on(model: Lineages) -> None:
    """Their own pings have closed their connections; it finds all of them closed, and a collective broken."""
    model.begin(workers=3, second=False, steps=12)
    model.a_coordinator_stands_still_or_runs_again(which=0)
    model.go_on(1)
    model.a_worker_dies(which=0, lose=False, silent=False)
    model.go_on(44)
    model.a_coordinator_stands_still_or_runs_again(which=0)
    model.go_on(8)
    assert len(model.living) == 2
    model.settle()


@pytest.mark.parametrize("what", ["a beginning", "a recovery", "a joiner"])
def test_what_could_not_be_built_while_the_coordinator_stood_still_is_built_anew(model: Lineages, what: str) -> None:
    """Nobody could tell it: the connections were closed when it turned out."""
    model.begin(workers=3, second=False, steps=0 if what == "a beginning" else 12)
    coordinator = model.network.coordinators[0]
    assert coordinator is not None
    if what == "a recovery":
        model.a_worker_dies(which=0, lose=False, silent=True)
    elif what == "a joiner":
        model.a_worker_starts(where=0)
    while coordinator.state.proposed is None:
        model.go_on(1, 0.1)
    for worker in model.living:
        model.network.deliver(worker)
    model.a_coordinator_stands_still_or_runs_again(which=0)
    model.go_on(44)
    assert not any(worker.builders.building for worker in model.living)
    model.a_coordinator_stands_still_or_runs_again(which=0)
    model.ends_are_confirmed()
    model.go_on(30)
    assert model.all_are_inside(coordinator)
    model.settle()

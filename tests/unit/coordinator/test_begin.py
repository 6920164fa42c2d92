"""A coordinator that replaces another begins nothing before it has heard of all who may train, or of their ends."""

from __future__ import annotations

from coordinator_server import hello
from driven import Driven

from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.protocol import messages as m
from virtualflow.protocol.http_api import BeginCall, GoneCall, LivingWorker

TICKET = 77


def replaced(wanted: int = 1) -> Driven:
    """A coordinator that needs the word of whoever runs the workers; a fresh one is connected to it."""
    job = Driven(1_000, wanted, MembershipSettings(restart_grace=0.0))
    job.state.ticket = TICKET
    assert job.admit(hello("fresh", ready=True)) is None
    job.now += 200.0
    job.hear("fresh.0", m.Heartbeat())
    return job


def begins(job: Driven) -> bool:
    job.decide()
    return any(isinstance(message, m.Plan) for _, message in job.take_outbox())


def say(job: Driven, *others: LivingWorker, ticket: int = TICKET) -> None:
    job.call(BeginCall(ticket, others))


def test_without_a_word_nothing_begins_and_with_it_everything_does() -> None:
    job = replaced()
    assert not begins(job)
    assert job.status().start_ticket == TICKET
    say(job)
    assert begins(job)
    assert job.status().start_ticket is None


def test_a_coordinator_that_nobody_looks_after_begins_by_itself() -> None:
    job = replaced()
    job.state.ticket = None
    assert begins(job)


def test_the_word_to_one_process_is_not_one_to_the_next_in_its_place() -> None:
    job = replaced()
    say(job, ticket=TICKET - 1)
    assert not begins(job)


def test_who_may_train_elsewhere_is_waited_for_by_name() -> None:
    job = replaced()
    say(job, LivingWorker("old-0", "10.0.0.1"), LivingWorker("fresh"))
    assert not begins(job)
    assert "old-0 may train elsewhere" in job.status().reason
    say(job, LivingWorker("fresh"))
    assert begins(job)


def test_the_end_of_one_says_nothing_of_those_who_have_joined_it() -> None:
    """Who has joined the generation since is in the next list."""
    job = replaced()
    say(job, LivingWorker("old-0"))
    assert not begins(job)
    assert job.admit(hello("old-0", ready=True)) is None
    job.call(GoneCall("old-0", "old-0.0"))
    assert not begins(job)


def test_a_successor_of_that_name_is_not_the_one_that_is_waited_for() -> None:
    job = replaced()
    say(job, LivingWorker("old-0", "10.0.0.1"))
    assert job.admit(hello("old-0", ready=True, address="10.0.0.2")) is None
    assert not begins(job)
    assert job.admit(hello("old-0", ready=True, address="10.0.0.1")) is None
    assert begins(job)


def test_who_is_gone_again_is_not_here() -> None:
    """All must be here at one moment: who has come and gone may have joined others."""
    job = replaced()
    say(job, LivingWorker("old-0"), LivingWorker("old-1"))
    assert job.admit(hello("old-0")) is None
    job.lose_connection("old-0.0")
    assert job.admit(hello("old-1")) is None
    assert not begins(job)
    assert "old-0 may train" in job.status().reason
    assert job.admit(hello("old-0")) is None
    assert begins(job)


def test_once_all_were_here_it_may_begin_whatever_happens_to_them() -> None:
    job = replaced(wanted=2)
    say(job, LivingWorker("old-0"))
    assert job.admit(hello("old-0")) is None
    job.decide()
    assert job.status().start_ticket is None
    job.lose_connection("old-0.0")
    say(job, LivingWorker("old-1"))
    assert begins(job)


def test_who_comes_with_a_training_is_gone_on_with() -> None:
    job = replaced()
    say(job, LivingWorker("old-0"))
    plan = m.Plan(m.Generation(900, 3), "planned", (m.Member("old-0", "old-0.0", "a", 0, 8),), (), "start", "")
    assert job.admit(hello("old-0", ready=True, plan=plan)) is None
    job.decide()
    assert job.state.running == plan
    assert job.status().start_ticket is None


def test_after_an_initial_start_that_came_to_nothing_it_is_asked_again_who_may_train() -> None:
    """Those who were to begin may have begun, and handed the training on: the news of it was lost."""
    job = replaced(wanted=2)
    job.state.minimum, job.state.next_ticket = 2, TICKET + 1
    assert job.admit(hello("other", ready=True)) is None
    say(job)
    assert begins(job)
    job.call(GoneCall("other", "other.0"))
    assert job.admit(hello("third", ready=True)) is None
    assert not begins(job)
    assert job.status().start_ticket == TICKET + 1
    say(job, ticket=TICKET + 1)
    assert begins(job)

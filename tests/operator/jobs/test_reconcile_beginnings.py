"""Decisions of the reconciler about who may train beside a new coordinator, which begins nothing while somebody may."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from msgspec import structs
from scenes import (
    NOW,
    Stage,
    coordinator,
    deleted,
    ended,
    link,
    message_of,
    nodes,
    pending,
    reason_of,
    remote,
    seen,
    swap,
    training,
    worker,
)

from virtualflow.protocol.http_api import BeginCall, LivingWorker, WorkerStatus
from virtualflow_operator import reasons
from virtualflow_operator.api.objects import Node, Pod
from virtualflow_operator.jobs.actions import JobPlan

FIRST, SECOND = 71, 72
OLD = [LivingWorker("digits-workers-0", "10.1.0.10"), LivingWorker("digits-workers-1", "10.1.0.11")]


def waiting(ticket: int | None, *known: WorkerStatus) -> Stage:
    """A job of two workers whose coordinator waits for a word and knows of no training."""
    stage = training()
    stage.link = link(remote("waiting", *known, wanted=2, minimum=1, start_ticket=ticket))
    return stage


def replaced(*known: WorkerStatus) -> Stage:
    """The same where that is not the first one."""
    stage = waiting(SECOND, *known)
    stage.raw["status"]["startTicket"] = FIRST
    return stage


def said(plan: JobPlan) -> list[BeginCall]:
    assert not any(isinstance(call, BeginCall) for call in plan.calls), "before what it is based on is written"
    return [call for call in plan.written_calls if isinstance(call, BeginCall)]


def test_the_first_coordinator_may_begin_and_that_is_written_down_before_it_is_told() -> None:
    stage = waiting(FIRST)
    plan = stage.decide()
    assert said(plan) == [BeginCall(FIRST)]
    assert plan.status.start_ticket == FIRST
    stage.write(plan)
    assert said(stage.decide()) == [BeginCall(FIRST)], "until it says that it has heard"


def test_a_specification_that_makes_no_sense_withholds_no_word() -> None:
    """What runs goes on as it is, also where its coordinator has been replaced meanwhile."""
    stage = replaced()
    stage.raw["spec"]["minReplicas"] = 0
    plan = stage.decide()
    assert reason_of(plan, "Progressing") == ("False", reasons.INVALID_SPEC)
    assert [call.ticket for call in said(plan)] == [SECOND]


@pytest.mark.parametrize("what", ["no word is needed", "not connected"])
def test_nothing_is_said_to_who_needs_no_word(what: str) -> None:
    """An older coordinator does not know the call."""
    stage = waiting(FIRST if what == "not connected" else None)
    assert stage.link is not None
    stage.link = dataclasses.replace(stage.link, connected=what != "not connected")
    assert said(stage.decide()) == []
    assert stage.decide().status.start_ticket is None


def test_another_process_hears_of_all_pods_that_may_train() -> None:
    """Whether it is in another pod or in the same one, and whatever it has heard of them already."""
    stage = replaced()
    stage.link = link(remote("waiting", seen(stage.pods[1], "ready", 0, 0), wanted=2, minimum=1, start_ticket=SECOND))
    plan = stage.decide()
    assert said(plan) == [BeginCall(SECOND, tuple(OLD))]
    assert plan.status.start_ticket == FIRST
    assert "may still train, until they reach it or have ended: digits-workers-1." in message_of(plan, "Ready")


def test_one_that_knows_of_the_training_is_told_the_same_and_nobody_is_alarmed() -> None:
    stage = replaced()
    assert stage.link is not None
    stage.link = link(structs.replace(training().link.status, start_ticket=SECOND))  # type: ignore[union-attr]
    plan = stage.decide()
    assert said(plan) == [BeginCall(SECOND, tuple(OLD))]
    assert message_of(plan, "Ready") == "Workers are training."


def _ready_node(stage: Stage, **node: object) -> Stage:
    stage.nodes = nodes(*stage.pods, node_1=Node("", **node))  # type: ignore[arg-type]
    return stage


OUT = [
    pytest.param(lambda s: swap(s, ended(s.pods[2], 137)), True, id="its process has ended"),
    pytest.param(lambda s: s.pods.pop(2), True, id="its pod does not exist"),
    pytest.param(lambda s: swap(s, pending(s.pods[2])), True, id="it has no node yet"),
    pytest.param(
        lambda s: swap(s, pending(s.pods[2], node="node-1", waiting="ErrImagePull: no")), True, id="it cannot start"
    ),
    pytest.param(
        lambda s: swap(s, pending(s.pods[2], node="node-1", ip="10.1.0.11")), False, id="it may start at this moment"
    ),
    pytest.param(lambda s: _ready_node(s, ready=False), True, id="its node is lost"),
    pytest.param(lambda s: _ready_node(s, cordoned=True), False, id="its node is cordoned"),
    pytest.param(
        lambda s: swap(s, dataclasses.replace(s.pods[2], deleting_at=NOW - 1)), True, id="it was to end before now"
    ),
    pytest.param(
        lambda s: swap(s, dataclasses.replace(s.pods[2], deleting_at=NOW + 20)), False, id="it has time to leave"
    ),
]


@pytest.mark.parametrize(("happens", "is_out"), OUT)
def test_whoever_has_ended_or_never_began_is_not_waited_for(happens: Callable[[Stage], object], is_out: bool) -> None:
    stage = replaced()
    happens(stage)
    assert said(stage.decide()) == [BeginCall(SECOND, tuple(OLD[:1] if is_out else OLD))]


def test_a_deletion_is_looked_at_again_when_its_time_is_over() -> None:
    stage = replaced()
    swap(stage, dataclasses.replace(stage.pods[2], deleting_at=NOW + 0.4))
    assert stage.decide().wake_at == NOW + 0.4


def test_another_coordinator_that_may_run_is_waited_for() -> None:
    """It may have been allowed to begin, and not have done so yet."""
    stage = replaced()
    stage.pods.append(coordinator(stage.job, 1, deleting_at=NOW + 5, ip="10.1.0.2"))
    (call,) = said(stage.decide())
    assert call.others == (*OLD, LivingWorker("digits-coordinator-1", "10.1.0.2"))


def _former(stage: Stage, **facts: object) -> Pod:
    pod = worker(stage.job, 7, attempt=0, **facts)
    stage.raw["status"]["attempt"] = 1
    stage.pods = [dataclasses.replace(known, attempt=1) for known in stage.pods]
    stage.pods.append(pod)
    return pod


def test_the_first_of_a_new_attempt_waits_for_those_of_the_attempt_before() -> None:
    stage = waiting(FIRST)
    pod = _former(stage, deleting_at=NOW + 2)
    (call,) = said(stage.decide())
    assert call.others == (LivingWorker(pod.name, pod.ip),)
    swap(stage, dataclasses.replace(pod, deleting_at=NOW))
    assert said(stage.decide()) == [BeginCall(FIRST)]


def test_a_failed_attempt_and_a_suspension_leave_nobody_to_wait_for() -> None:
    stage = replaced()
    stage.link = link(remote("failed", wanted=2, minimum=1, start_ticket=SECOND, error="boom"))
    assert stage.decide().status.start_ticket is None
    stage = replaced()
    stage.raw["spec"]["suspend"] = True
    stage.pods = [ended(pod, 0) for pod in stage.pods[1:]]
    stage.link = None
    plan = stage.decide()
    assert (plan.status.phase, plan.status.start_ticket) == ("Suspended", None)


def test_a_suspension_waits_for_workers_that_have_not_reached_a_replaced_coordinator() -> None:
    """It would lose the steps since their last checkpoint: what knows of no training cannot stop it behind a step."""
    stage = replaced()
    stage.raw["spec"]["suspend"] = True
    plan = stage.decide()
    assert (plan.status.phase, plan.actions) == ("Suspending", ())
    assert [call.ticket for call in said(plan)] == [SECOND], "it hears for whom to wait"
    stage.write(plan)
    assert deleted(stage.decide(NOW + 29)) == []
    assert sorted(deleted(stage.decide(NOW + 30))) == ["digits-workers-0", "digits-workers-1"], "it had a drain's time"

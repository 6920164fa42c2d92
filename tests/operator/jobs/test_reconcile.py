"""Decisions of the reconciler about a job's beginning, its size, nonsense in its specification, and what is not ours.

As tables: what is there, what happens, and what is done about it. Beside it, one file a subject.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec import structs
from scenes import (
    NOW,
    RAISED,
    Stage,
    accepted,
    body,
    coordinator,
    created,
    deleted,
    drained,
    edit,
    ended,
    gone,
    group,
    kinds,
    link,
    message_of,
    nodes,
    noticed,
    pending,
    reason_of,
    remote,
    seen,
    swap,
    training,
    verdict_of,
)

from virtualflow.protocol.http_api import GoneCall, ScaleCall
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator import reasons
from virtualflow_operator.api.job import write_status
from virtualflow_operator.api.objects import Node, Service, format_time
from virtualflow_operator.jobs.actions import CheckTemplates, DeletePod
from virtualflow_operator.jobs.reconcile import reconcile
from virtualflow_operator.queues import Grant, QueueAdmission

# --- the beginning ----------------------------------------------------------------------------------------------------


def test_a_fresh_job_is_checked_then_gets_its_coordinator_and_then_its_workers() -> None:
    stage = Stage(body(), [], None, {}, None)

    plan = stage.decide()
    assert kinds(plan.actions) == ["CheckTemplates"]
    (check,) = plan.actions
    assert isinstance(check, CheckTemplates)
    assert [pod["metadata"]["name"] for pod in check.manifests] == [
        "digits-workers-0-check",
        "digits-coordinator-0-check",
    ]
    assert plan.status.phase == "Pending"
    assert plan.status.observed_generation == 1
    assert plan.status.selector == "virtualflow.dev/job=digits,virtualflow.dev/role=worker"
    stage.write(plan)

    stage.verdict = verdict_of(stage.raw)
    plan = stage.decide()
    assert kinds(plan.actions) == ["CreatePod", "CreateService"]
    assert created(plan) == ["digits-coordinator-0"]
    assert plan.status.coordinator == "digits-coordinator-0"
    assert plan.status.template_hash == stage.verdict.template_hash
    stage.write(plan)

    stage.verdict, stage.pods = None, [pending(coordinator(stage.job))]
    stage.service = Service("10.0.0.1", 0)
    plan = stage.decide()
    assert created(plan) == ["digits-workers-0", "digits-workers-1"]
    assert reason_of(plan, "Progressing") == ("True", reasons.STARTING)
    assert plan.status.workers == "0/2"


def test_a_job_that_trains_as_wanted_is_left_alone_for_ever() -> None:
    stage = training()
    before = write_status(stage.job.status)
    for later in (0, 60, 86_400):
        plan = stage.decide(NOW + later)
        assert (plan.actions, plan.calls, plan.events, plan.wake_at) == ((), (), (), None)
        assert write_status(plan.status) == before
    assert before["workers"] == "2/2"
    assert reason_of(stage.decide(), "Ready") == ("True", reasons.TRAINING)


def test_workers_wait_for_the_address_of_their_coordinator() -> None:
    stage = training()
    stage.pods, stage.service = [stage.pods[0]], Service("", 0)
    assert created(stage.decide()) == []


def test_a_job_of_another_controller_is_not_touched() -> None:
    stage = training()
    edit(stage, managedBy="someone.else/controller", replicas=7)
    swap(stage, ended(stage.pods[1]))
    plan = stage.decide()
    assert (plan.actions, plan.calls, plan.events) == ((), (), ())
    assert plan.status == stage.job.status


def test_a_job_of_another_controller_that_cannot_be_read_is_not_touched_either() -> None:
    stage = Stage(body(managedBy="someone.else/controller", replicas="many"), [], None, {}, None)
    plan = stage.decide()
    assert plan.actions == ()
    assert plan.status == stage.job.status


# --- scaling ----------------------------------------------------------------------------------------------------------


def test_scaling_up_makes_workers_and_tells_the_coordinator_how_many() -> None:
    plan = edit(training(), replicas=4).decide()
    assert created(plan) == ["digits-workers-2", "digits-workers-3"]
    assert plan.calls == (ScaleCall(4, 1),)
    assert plan.status.workers == "2/4"
    assert reason_of(plan, "Degraded") == ("True", reasons.FEWER_WORKERS)


def test_what_a_queue_decides_and_why_is_told_to_the_coordinator() -> None:
    stage = training(queue="research")
    given = Grant(stage.job.uid, "research", 2, "its share of 4 accelerators")
    said = "2 workers of the queue research: its share of 4 accelerators"

    def calls(told: str | None) -> tuple[object, ...]:
        assert stage.link is not None
        assert stage.link.status is not None
        status = structs.replace(stage.link.status, wanted_reason=told)
        scene = dataclasses.replace(
            stage.scene, admission=QueueAdmission(given), link=dataclasses.replace(stage.link, status=status)
        )
        return reconcile(scene, NOW, stage.settings).calls

    assert calls("") == (ScaleCall(2, 1, said),)
    assert calls(said) == (), "once is enough"
    assert calls(None) == (), "a coordinator of an older version would never know"


def test_scaling_down_drains_whom_it_can_do_without_by_one_call() -> None:
    plan = edit(training(4), replicas=2).decide()
    assert drained(plan) == ["digits-workers-3", "digits-workers-2"]
    assert deleted(plan) == drained(plan)
    assert kinds(plan.calls) == ["ScaleCall", "DrainCall"]
    assert [action.cause for action in plan.actions if isinstance(action, DeletePod)] == ["scale", "scale"]
    assert noticed(plan) == [reasons.DRAINING]


def test_scaling_down_waits_as_long_as_it_was_told_to_and_not_again_from_the_start() -> None:
    stage = edit(training(3, elasticity={"scaleDownDelaySeconds": 60}), replicas=2)
    plan = stage.decide()
    assert (drained(plan), deleted(plan), plan.wake_at) == ([], [], NOW + 60)
    assert plan.status.scale_down_since == format_time(NOW)
    stage.write(plan)
    assert deleted(stage.decide(NOW + 59)) == []
    assert deleted(stage.decide(NOW + 60)) == ["digits-workers-2"]
    assert drained(stage.decide(NOW + 60)) == ["digits-workers-2"]


def test_a_scale_down_that_was_taken_back_is_forgotten() -> None:
    stage = edit(training(3, elasticity={"scaleDownDelaySeconds": 60}), replicas=2)
    stage.write(stage.decide())
    assert edit(stage, replicas=3).decide(NOW + 30).status.scale_down_since is None


def test_a_worker_that_the_coordinator_does_not_know_needs_no_time_to_leave() -> None:
    stage = edit(training(3), replicas=2)
    assert stage.link is not None
    assert stage.link.status is not None
    stage.link = link(remote("training", *stage.link.status.workers[:2], wanted=3))
    (deletion,) = [action for action in stage.decide().actions if isinstance(action, DeletePod)]
    assert (deletion.name, deletion.grace) == ("digits-workers-2", 1.0)


# --- what makes no sense ----------------------------------------------------------------------------------------------

NONSENSE: Mapping[str, tuple[dict[str, Any], str]] = {
    "no virtual nodes": ({"virtualNodes": 0}, "virtualNodes"),
    "no worker groups": ({"workerGroups": []}, "workerGroups"),
    "a number that is a word": ({"replicas": "many"}, "replicas"),
    "worker groups that cannot be read": ({"workerGroups": [{"name": 7}]}, "workerGroups"),
    "a renamed group beside nonsense": ({"workerGroups": [group("other")], "minReplicas": 0}, "minReplicas"),
    "a changed template beside nonsense": ({"workerGroups": [group(image="x")], "minReplicas": 0}, "minReplicas"),
}


@pytest.mark.parametrize(("spec", "why"), NONSENSE.values(), ids=NONSENSE)
def test_a_specification_that_makes_no_sense_changes_nothing_that_runs(spec: dict[str, Any], why: str) -> None:
    stage = edit(training(), **spec)
    plan = stage.decide()
    assert (plan.actions, plan.calls) == ((), ())
    assert reason_of(plan, "Progressing") == ("False", reasons.INVALID_SPEC)
    assert why in message_of(plan, "Progressing")
    assert plan.status.phase == "Running"
    assert plan.status.observed_generation == 2
    stage.write(plan)
    plan = stage.decide(NOW + 60)
    assert (plan.events, stage.write(plan)) == ((), {})


@pytest.mark.parametrize(("spec", "why"), NONSENSE.values(), ids=NONSENSE)
def test_whoever_will_be_lost_is_drained_also_when_the_specification_makes_no_sense(
    spec: dict[str, Any], why: str
) -> None:
    del why
    stage = edit(training(), **spec)
    swap(stage, dataclasses.replace(stage.pods[1], deleting_at=NOW + 9))
    swap(stage, ended(stage.pods[2]))
    plan = stage.decide()
    assert drained(plan) == ["digits-workers-0"]
    assert gone(plan) == ["digits-workers-1"]
    assert created(plan) == []


@pytest.mark.parametrize("spec", [{"replicas": "many"}, {"workerGroups": None}, {}], ids=str)
def test_a_new_job_that_makes_no_sense_is_told_why(spec: dict[str, Any]) -> None:
    raw = body()
    raw["spec"] = spec
    plan = Stage(raw, [], None, {}, None).decide()
    assert plan.actions == ()
    assert plan.status.phase == "Pending"
    assert reason_of(plan, "Progressing") == ("False", reasons.INVALID_SPEC)


# --- names, and what is not ours --------------------------------------------------------------------------------------


def test_names_that_another_jobs_pods_hold_are_left_to_them() -> None:
    stage = training()
    foreign = dataclasses.replace(stage.pods[1], uid="foreign", owner="another-uid")
    orphan = dataclasses.replace(stage.pods[2], uid="orphan", owner="")
    stage.pods = [dataclasses.replace(stage.pods[0], uid="foreign-c", owner="another-uid"), foreign, orphan]
    stage.link = None
    plan = stage.decide()
    assert created(plan) == ["digits-coordinator-1", "digits-workers-2", "digits-workers-3"]
    assert deleted(plan) == []


@pytest.mark.parametrize("which", ["trouble", "failure"])
def test_what_was_refused_or_fails_is_said_in_a_condition(which: str) -> None:
    stage = dataclasses.replace(training(), **{which: "exceeded quota: pods=5"})
    stage.pods = stage.pods[:2]
    stage.link = link(remote("training", seen(stage.pods[1])))
    assert "exceeded quota" in message_of(stage.decide(), "Degraded")
    fresh = Stage(accepted(body(), phase="Pending"), [], None, {}, None, **{which: "exceeded quota: pods=5"})
    plan = fresh.decide()
    assert reason_of(plan, "Progressing") == ("False", reasons.CREATION_REFUSED)
    assert "exceeded quota" in message_of(plan, "Progressing")


def test_without_a_look_at_nodes_the_facts_of_pods_still_count() -> None:
    stage = training()
    stage.nodes = None
    assert stage.decide().actions == ()
    swap(stage, dataclasses.replace(stage.pods[1], deleting_at=NOW + 9))
    assert drained(stage.decide()) == ["digits-workers-0"]


def test_notices_of_a_drain_are_not_swallowed_by_another_of_the_same_reason() -> None:
    """One call for all that leave for one reason, and one event: none of the others may be lost by it."""
    stage = training(4)
    stage.nodes = nodes(*stage.pods, node_0=Node("", taints=("karpenter.sh/disrupted",)))
    swap(stage, dataclasses.replace(stage.pods[2], node="node-0"))
    swap(stage, ended(stage.pods[3], word=RAISED))
    plan = stage.decide()
    assert kinds(plan.calls) == ["GoneCall", "DrainCall"]
    assert drained(plan) == ["digits-workers-0", "digits-workers-1"]
    assert noticed(plan) == [reasons.LOST, reasons.DRAINING, reasons.CRASHED]


def test_a_worker_whose_pod_was_deleted_by_force_is_told_gone_at_once() -> None:
    stage = training()
    lost = stage.pods.pop()
    plan = stage.decide()
    gone = [call for call in plan.calls if isinstance(call, GoneCall)]
    assert [(call.worker, call.incarnation in plan.recoveries) for call in gone] == [(lost.name, True)]
    assert created(plan) == [lost.name]
    assert reasons.LOST in noticed(plan)


@pytest.mark.parametrize(
    ("code", "word", "at_home", "left"),
    [
        (0, TerminationMessage("left", step=40), True, True),
        (0, TerminationMessage("left", step=40), False, False),
        (137, None, True, False),
    ],
    ids=["it has left", "a former pod of that name has", "it was killed"],
)
def test_a_worker_that_left_before_its_pod_was_deleted_is_not_lost(
    code: int, word: TerminationMessage | None, at_home: bool, left: bool
) -> None:
    """The coordinator says that it is draining until it has told that it is not."""
    stage = training(states={1: "draining"})
    was = ended(stage.pods.pop(), code, word=word)
    stage.former = [was if at_home else dataclasses.replace(was, ip="10.1.9.9")]
    plan = stage.decide()
    (told,) = plan.calls
    assert isinstance(told, GoneCall)
    assert (told.worker, told.incarnation in plan.recoveries) == (was.name, not left)
    assert (reasons.LOST in noticed(plan)) == (not left)


def test_a_living_namesake_of_a_worker_that_left_is_left_alone() -> None:
    stage = training()
    stage.former = [ended(stage.pods[2], 0, word=TerminationMessage("left", step=40))]
    assert stage.decide().calls == ()

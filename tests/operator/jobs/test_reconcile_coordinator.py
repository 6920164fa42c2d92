"""Decisions of the reconciler about the coordinator of a job and the service that leads to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pytest
from scenes import (
    NOW,
    SETTINGS,
    Stage,
    coordinator,
    created,
    deleted,
    edit,
    nodes,
    noticed,
    reason_of,
    swap,
    training,
    verdict_of,
)

from virtualflow_operator import reasons
from virtualflow_operator.api.objects import Node, Service
from virtualflow_operator.constants import WORKER
from virtualflow_operator.jobs import manifests
from virtualflow_operator.jobs.actions import CreatePod, CreateService, PointService

# --- the coordinator --------------------------------------------------------------------------------------------------


def _ended(stage: Stage) -> None:
    swap(stage, dataclasses.replace(stage.pods[0], phase="Failed", reason="Evicted"))


def _terminating(stage: Stage) -> None:
    swap(stage, dataclasses.replace(stage.pods[0], deleting_at=NOW + 5))


def _node_gone(stage: Stage) -> None:
    assert stage.link is not None
    stage.link = dataclasses.replace(stage.link, connected=False, since=NOW)
    stage.nodes = nodes(*stage.pods, node_c=None)


def _node_unready(stage: Stage) -> None:
    _quiet(stage)
    stage.nodes = nodes(*stage.pods, node_c=Node("", ready=False))


def _quiet(stage: Stage) -> None:
    assert stage.link is not None
    stage.link = dataclasses.replace(stage.link, connected=False, since=NOW - SETTINGS.coordinator_patience)


def _template(stage: Stage) -> None:
    edit(stage, coordinator={"template": {"spec": {"priorityClassName": "high"}}})
    stage.verdict = verdict_of(stage.raw)


def _template_unreachable(stage: Stage) -> None:
    _template(stage)
    stage.link = None
    swap(stage, dataclasses.replace(stage.pods[0], phase="Pending", ip="", waiting="ImagePullBackOff"))


COORDINATOR_LOSSES: Mapping[str, tuple[Callable[[Stage], None], bool]] = {
    "it was evicted": (_ended, True),
    "it is being deleted": (_terminating, False),
    "its node does not exist any more": (_node_gone, True),
    "its node is not ready": (_node_unready, True),
    "it does not answer any more": (_quiet, True),
    "its template has changed": (_template, True),
    "its template has changed and it never ran": (_template_unreachable, True),
}


def test_a_new_leader_asks_the_coordinator_before_it_believes_that_all_nodes_are_lost() -> None:
    stage = training()
    assert stage.link is not None
    stage.link = dataclasses.replace(stage.link, connected=False, since=NOW, status=None)
    unready = Node("", ready=False)
    stage.nodes = nodes(*stage.pods, node_a=unready, node_b=unready, node_c=unready)
    plan = stage.decide()
    assert (created(plan), deleted(plan)) == ([], [])
    assert plan.wake_at == NOW + SETTINGS.coordinator_patience


@pytest.mark.parametrize(("happens", "is_deleted"), COORDINATOR_LOSSES.values(), ids=COORDINATOR_LOSSES)
def test_a_coordinator_is_replaced_and_the_service_leads_to_the_new_one(
    happens: Callable[[Stage], None], is_deleted: bool
) -> None:
    stage = training()
    happens(stage)
    plan = stage.decide()
    assert created(plan) == ["digits-coordinator-1"]
    assert deleted(plan) == (["digits-coordinator-0"] if is_deleted else [])
    assert PointService("digits-coordinator", manifests.service_selector(stage.job, 1)) in plan.actions
    assert plan.status.coordinator == "digits-coordinator-1"
    assert plan.status.phase == "Running"
    assert noticed(plan) == [reasons.COORDINATOR_LOST]


def test_a_coordinator_keeps_its_image_whatever_the_operators_is() -> None:
    stage = training()
    stage.settings = dataclasses.replace(stage.settings, image="virtualflow-operator:newer")
    assert stage.decide().actions == ()
    _node_gone(stage)
    plan = stage.decide()
    (pod,) = [action.manifest for action in plan.actions if isinstance(action, CreatePod)]
    assert pod["spec"]["containers"][0]["image"] == plan.status.coordinator_image == SETTINGS.image


def test_a_coordinator_that_was_just_lost_sight_of_gets_time() -> None:
    stage = training()
    assert stage.link is not None
    stage.link = dataclasses.replace(stage.link, connected=False, since=NOW)
    plan = stage.decide()
    assert (plan.actions, plan.wake_at) == ((), NOW + SETTINGS.coordinator_patience)
    assert reason_of(plan, "Ready") == ("Unknown", reasons.COORDINATOR_UNREACHABLE)
    assert (plan.status.ready_replicas, plan.status.phase) == (2, "Running")


def test_a_coordinator_on_a_node_that_is_not_ready_stays_while_it_answers() -> None:
    stage = training()
    stage.nodes = nodes(*stage.pods, node_c=Node("", ready=False))
    assert stage.decide().actions == ()


def test_of_two_coordinators_the_one_that_the_service_leads_to_stays() -> None:
    stage = training()
    stage.pods.append(coordinator(stage.job, 1))
    assert deleted(stage.decide()) == ["digits-coordinator-1"]
    stage.service = Service("10.0.0.1", 1)
    plan = stage.decide()
    assert deleted(plan) == ["digits-coordinator-0"]
    assert plan.status.coordinator == "digits-coordinator-1"


def test_a_service_that_is_missing_or_misled_is_put_right() -> None:
    stage = training()
    stage.service = None
    stage.pods = [dataclasses.replace(pod, calls="10.0.0.1" if pod.role == WORKER else "") for pod in stage.pods]
    (made,) = stage.decide().actions
    assert isinstance(made, CreateService)
    assert made.manifest["spec"]["clusterIP"] == "10.0.0.1", "where its workers call"
    stage.service = Service("10.0.0.1", 5)
    selector = manifests.service_selector(stage.job, 0)
    assert stage.decide().actions == (PointService("digits-coordinator", selector),)

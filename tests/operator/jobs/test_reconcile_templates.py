"""Decisions of the reconciler about templates that change or are refused, and about groups of workers."""

from __future__ import annotations

import dataclasses

import pytest
from scenes import (
    NOW,
    SETTINGS,
    Stage,
    accepted,
    body,
    coordinator,
    created,
    deleted,
    drained,
    edit,
    group,
    homeless,
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
    worker,
)

from virtualflow_operator import reasons
from virtualflow_operator.api.objects import Node, Service
from virtualflow_operator.jobs.actions import CheckTemplates

# --- templates --------------------------------------------------------------------------------------------------------


def test_a_changed_template_is_checked_and_rolls_one_by_one() -> None:
    stage = edit(training(), workerGroups=[group(image="trainer:2")])
    plan = stage.decide()
    assert kinds(plan.actions) == ["CheckTemplates"]
    stage.verdict = verdict_of(stage.raw)
    plan = stage.decide()
    assert (created(plan), deleted(plan)) == (["digits-workers-2"], [])
    stage.write(plan)

    new = worker(stage.job, 2)
    stage.pods.append(new)
    assert stage.nodes is not None
    assert stage.link is not None
    assert stage.link.status is not None
    stage.nodes["node-2"] = Node("node-2")
    known = stage.link.status.workers
    stage.link = link(remote("training", *known, seen(new)))
    plan = stage.decide()
    assert (created(plan), drained(plan), deleted(plan)) == ([], ["digits-workers-1"], ["digits-workers-1"])
    stage.write(plan)

    stage.pods = [pod for pod in stage.pods if pod.name != "digits-workers-1"]
    stage.link = link(remote("training", known[0], seen(new)))
    plan = stage.decide()
    assert (created(plan), deleted(plan)) == (["digits-workers-1"], [])


def test_what_goes_into_no_pod_is_checked_too() -> None:
    wrong = group() | {"template": group()["template"] | {"metadata": {"lables": {}, "uid": "1"}}}
    wrong["template"] |= {"resources": {}}
    odd = {"template": {"metadata": {"labels": {"a": "b"}, "annotation": {}}, "specs": {}}}
    (action,) = Stage(body(workerGroups=[wrong], coordinator=odd), [], None, {}, None).decide().actions
    assert isinstance(action, CheckTemplates)
    of_workers, of_coordinator = action.manifests
    assert of_workers["metadata"].keys() - {"name", "namespace", "labels", "annotations", "ownerReferences"} == {
        "lables"
    }
    assert of_workers.keys() - {"apiVersion", "kind", "metadata", "spec"} == {"resources"}
    assert (of_coordinator["metadata"]["annotation"], of_coordinator["specs"]) == ({}, {})
    assert of_coordinator["metadata"]["labels"]["a"] == "b"


def test_on_a_full_cluster_an_outdated_worker_makes_room_for_its_successor() -> None:
    stage = edit(training(), workerGroups=[group(image="trainer:2")])
    stage.verdict = verdict_of(stage.raw)
    stage.write(stage.decide())
    stage.pods.append(homeless(worker(stage.job, 2), since=NOW - 10))
    plan = stage.decide()
    assert (plan.actions, plan.wake_at) == ((), NOW + 20), "perhaps a node is on its way"
    plan = stage.decide(NOW + 20)
    assert (drained(plan), deleted(plan)) == (["digits-workers-0"], ["digits-workers-0"])


def test_a_full_cluster_that_never_had_room_for_all_rolls_as_well() -> None:
    stage = edit(training(2, replicas=3), workerGroups=[group(image="trainer:2")])
    stage.verdict = verdict_of(stage.raw)
    stage.pods.append(homeless(worker(stage.job, 2)))
    plan = stage.decide()
    assert (drained(plan), deleted(plan)) == (["digits-workers-0"], ["digits-workers-0"])


def test_the_only_worker_of_a_full_cluster_is_kept() -> None:
    stage = edit(training(1), workerGroups=[group(image="trainer:2")])
    stage.verdict = verdict_of(stage.raw)
    stage.pods.append(homeless(worker(stage.job, 1)))
    assert deleted(stage.decide()) == []


@pytest.mark.parametrize("how", ["no node takes it", "its image cannot be pulled"])
def test_a_worker_that_never_ran_is_replaced_at_once_when_its_template_is_mended(how: str) -> None:
    stage = training(1)
    old = worker(stage.job, 0)
    old = homeless(old) if how == "no node takes it" else pending(old, node="node-0", waiting="ImagePullBackOff")
    swap(stage, old)
    stage.link = link(remote("waiting", wanted=1))
    edit(stage, workerGroups=[group(image="trainer:2")])
    stage.verdict = verdict_of(stage.raw)
    plan = stage.decide()
    assert (created(plan), deleted(plan)) == (["digits-workers-1"], ["digits-workers-0"])


def test_a_rejected_template_is_said_so_and_tried_again_later() -> None:
    stage = Stage(body(), [], None, {}, None)
    stage.verdict = verdict_of(stage.raw, "spec.containers[0].image: Required value", at=NOW)
    plan = stage.decide()
    assert (plan.actions, plan.wake_at) == ((), NOW + SETTINGS.template_retry)
    assert reason_of(plan, "Progressing") == ("False", reasons.TEMPLATE_REJECTED)
    assert "Required value" in message_of(plan, "Progressing")
    assert noticed(plan) == [reasons.TEMPLATE_REJECTED]
    stage.write(plan)
    assert stage.decide(NOW + 5).events == ()

    assert kinds(stage.decide(NOW + SETTINGS.template_retry).actions) == ["CheckTemplates"]
    stage.verdict = verdict_of(stage.raw, at=NOW + 61)
    plan = stage.decide(NOW + 61)
    assert created(plan) == ["digits-coordinator-0"]
    assert reason_of(plan, "Progressing") == ("True", reasons.STARTING)


def test_a_suspended_job_is_told_of_its_template_before_it_begins() -> None:
    stage = Stage(body(suspend=True), [], None, {}, None)
    assert kinds(stage.decide().actions) == ["CheckTemplates"]
    stage.verdict = verdict_of(stage.raw, 'unknown field "spec.nodeSelectr"', at=NOW)
    plan = stage.decide()
    assert (kinds(plan.actions), plan.wake_at) == ([], NOW + SETTINGS.template_retry)
    assert plan.status.phase == "Suspended"
    assert [reason_of(plan, kind) for kind in ("Progressing", "Degraded", "Stalled")] == [
        ("False", reasons.TEMPLATE_REJECTED), ("True", reasons.TEMPLATE_REJECTED), ("True", reasons.TEMPLATE_REJECTED)
    ]  # fmt: skip
    assert "nodeSelectr" in message_of(plan, "Progressing")
    assert noticed(plan) == [reasons.SUSPENDED, reasons.TEMPLATE_REJECTED]
    stage.write(plan)

    stage.verdict = verdict_of(stage.raw, at=NOW)
    plan = stage.decide()
    assert plan.actions == ()
    assert plan.status.condition("Stalled") is None
    assert reason_of(plan, "Progressing") == ("False", reasons.SUSPENDED)
    stage.write(plan)
    stage.verdict = None  # another operator, which knows what is written
    assert stage.decide().actions == ()
    assert "CheckTemplates" not in kinds(edit(stage, suspend=False).decide().actions)


def test_a_rejected_template_that_was_changed_is_checked_at_once() -> None:
    stage = Stage(body(), [], None, {}, None)
    stage.verdict = verdict_of(stage.raw, "no")
    stage.write(stage.decide())
    assert kinds(edit(stage, workerGroups=[group(image="trainer:2")]).decide().actions) == ["CheckTemplates"]


# --- groups -----------------------------------------------------------------------------------------------------------


def test_workers_are_made_in_the_first_group_that_has_room() -> None:
    raw = accepted(body(replicas=3, workerGroups=[group("spot", maxReplicas=1), group("ondemand")]))
    stage = Stage(raw, [], Service("10.0.0.1", 0), {}, None)
    names = created(stage.decide())
    assert names == ["digits-coordinator-0", "digits-spot-0", "digits-ondemand-0", "digits-ondemand-1"]


def test_a_group_whose_worker_no_node_takes_is_passed_over_until_the_others_have_started() -> None:
    raw = accepted(body(replicas=2, workerGroups=[group("spot"), group("ondemand")]))
    stage = Stage(raw, [], Service("10.0.0.1", 0), {}, None)
    first, stuck = worker(stage.job, 0, group="spot"), homeless(worker(stage.job, 1, group="spot"))
    stage.pods = [coordinator(stage.job), first, stuck]
    stage.nodes = nodes(*stage.pods)
    plan = stage.decide()
    assert (created(plan), deleted(plan)) == (["digits-ondemand-0"], [])

    substitute = worker(stage.job, 0, group="ondemand")
    stage.pods.append(pending(substitute))
    assert stage.decide().actions == (), "the request for capacity stays until others have taken its place"
    swap(stage, substitute)
    stage.nodes = nodes(*stage.pods)
    assert deleted(stage.decide()) == ["digits-spot-1"]


def test_without_another_group_a_request_for_capacity_stays() -> None:
    stage = training()
    stage.pods[2] = homeless(stage.pods[2])
    stage.link = link(remote("training", seen(stage.pods[1])))
    plan = stage.decide()
    assert plan.actions == ()
    assert "no node takes digits-workers-1" in message_of(plan, "Degraded")
    assert message_of(plan, "Degraded").endswith("Insufficient cpu.")


def test_requests_for_capacity_that_nobody_wants_any_more_are_withdrawn() -> None:
    stage = training(3)
    stage.pods = [*stage.pods[:2], *(homeless(pod) for pod in stage.pods[2:])]
    stage.link = link(remote("training", seen(stage.pods[1])))
    assert deleted(edit(stage, replicas=2).decide()) == ["digits-workers-2"]
    assert deleted(edit(stage, replicas=1).decide()) == ["digits-workers-2", "digits-workers-1"]


def test_the_workers_of_a_group_that_was_removed_are_drained() -> None:
    raw = accepted(body(workerGroups=[group("spot", maxReplicas=1), group("ondemand")]))
    stage = Stage(raw, [], Service("10.0.0.1", 0), {}, None)
    spot, other = worker(stage.job, 0, group="spot"), worker(stage.job, 0, group="ondemand")
    stage.pods = [coordinator(stage.job), spot, dataclasses.replace(other, ip="10.1.0.99")]
    stage.link = link(remote("training", *(seen(pod) for pod in stage.pods[1:])))
    stage.nodes = nodes(*stage.pods)
    edit(stage, workerGroups=[group("ondemand")])
    stage.verdict = verdict_of(stage.raw)
    assert (deleted(stage.decide()), created(stage.decide())) == ([], ["digits-ondemand-1"]), "a successor comes first"
    successor = worker(stage.job, 1, group="ondemand", ip="10.1.0.98")
    stage.pods.append(successor)
    stage.link = link(remote("training", *(seen(pod) for pod in stage.pods[1:])))
    plan = stage.decide()
    assert (drained(plan), deleted(plan), created(plan)) == (["digits-spot-0"], ["digits-spot-0"], [])

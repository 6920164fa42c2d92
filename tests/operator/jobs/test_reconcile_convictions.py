"""Decisions about workers that were found to be wrong: each is counted, and its successors keep off its node."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec import structs
from scenes import (
    NOW,
    RAISED,
    Stage,
    created,
    deleted,
    ended,
    given_up,
    group,
    link,
    message_of,
    nodes,
    noticed,
    reason_of,
    remote,
    seen,
    swap,
    training,
    worker,
)

from virtualflow.protocol.http_api import LostWorker
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator import reasons
from virtualflow_operator.api import Node, Pod
from virtualflow_operator.jobs.actions import CreatePod, JobPlan

WRONG = "it came to other gradients of virtual node 5 in step 9 than a and c: look at its device and its memory"
SAID = f"digits-workers-1 on node node-1: {WRONG}"


def found_wrong(pod: Pod, reason: str = WRONG) -> LostWorker:
    return structs.replace(given_up(pod, reason), convicted=True)


def convict(stage: Stage, pod: Pod, *others: Pod, step: int = 40) -> None:
    """The coordinator has declared the worker of that pod lost because it was wrong, and these train."""
    known = [seen(other) for other in others]
    phase = "training" if others else "waiting"
    stage.link = link(remote(phase, *known, wanted=2, minimum=1, step=step, lost=(found_wrong(pod),)))


def rules(plan: JobPlan) -> dict[str, Any]:
    """The node affinity of the worker that is made."""
    (made,) = [action for action in plan.actions if isinstance(action, CreatePod)]
    found: dict[str, Any] = made.manifest["spec"].get("affinity", {}).get("nodeAffinity", {})
    return found


def other_than(*names: str) -> list[dict[str, Any]]:
    return [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in names]


def demanded(*names: str) -> dict[str, Any]:
    terms = {"nodeSelectorTerms": [{"matchFields": other_than(*names)}]}
    return {"requiredDuringSchedulingIgnoredDuringExecution": terms}


def preferred(*names: str) -> dict[str, Any]:
    preference = {"weight": 100, "preference": {"matchFields": other_than(*names)}}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}


def test_the_next_worker_keeps_off_its_node_and_the_books_the_event_and_the_condition_name_both() -> None:
    stage = training()
    survivor, wrong = stage.pods[1:]
    stage.nodes = nodes(survivor, wrong)
    convict(stage, wrong, survivor)
    plan = stage.decide()
    assert (deleted(plan), created(plan)) == ([], ["digits-workers-2"])
    assert rules(plan) == demanded("node-1")
    assert plan.status.failures.nodes == ("node-1",)
    assert (plan.status.failures.count, plan.status.failures.message) == (1, SAID)
    (event,) = [event for event in plan.events if event.reason == reasons.CONVICTED]
    assert (event.message, event.warning) == (f"{SAID}; the job keeps off that node where it can", True)
    assert message_of(plan, "Degraded").endswith(f"The latest that ended too soon: {SAID}.")
    stage.write(plan)
    plan = stage.decide()
    assert (deleted(plan), plan.status.failures.count) == (["digits-workers-1"], 1)
    assert reasons.CONVICTED not in noticed(plan)


@pytest.mark.parametrize("known", [True, False], ids=["by the coordinator", "by itself only"])
def test_one_that_has_ended_already_counts_once_as_well(known: bool) -> None:
    stage = training()
    survivor, wrong = stage.pods[1:]
    stage.nodes = nodes(survivor, wrong)
    if known:
        convict(stage, wrong, survivor)
        stage.write(stage.decide())
    else:
        stage.link = link(remote("training", seen(survivor), wanted=2, minimum=1, step=40))
    word = TerminationMessage("refused", step=40, reason=f"declared lost: {WRONG}", convicted=True)
    swap(stage, ended(wrong, 75, word=word))
    plan = stage.decide()
    assert (plan.status.failures.count, plan.status.failures.nodes) == (1, ("node-1",))
    assert noticed(plan).count(reasons.CONVICTED) == (0 if known else 1)


def test_one_that_fell_silent_says_nothing_about_its_node() -> None:
    stage = training()
    survivor, silent = stage.pods[1:]
    stage.nodes = nodes(survivor, silent)
    lost = given_up(silent, "no sign of life for 5 s")
    stage.link = link(remote("training", seen(survivor), wanted=2, minimum=1, step=40, lost=(lost,)))
    plan = stage.decide()
    assert (plan.status.failures.nodes, rules(plan)) == ((), {})


@pytest.mark.parametrize(
    ("others", "template"),
    [
        pytest.param({}, {}, id="there is no other"),
        pytest.param({"node_9": Node("", cordoned=True)}, {}, id="it is cordoned"),
        pytest.param({"node_9": Node("", ready=False)}, {}, id="it is not ready"),
        pytest.param({"node_9": None}, {}, id="it is gone"),
        pytest.param({"node_9": Node("", taints=("gpu",))}, {}, id="its taint is not tolerated"),
        pytest.param({"node_9": Node("")}, {"nodeSelector": {"pool": "gpu"}}, id="it is not of the pool"),
    ],
)
def test_where_no_other_node_could_take_it_a_job_goes_on(others: dict[str, Node | None], template: Any) -> None:
    stage = training(workerGroups=[group(pod=template)])
    survivor, wrong = stage.pods[1:]
    stage.nodes = nodes(wrong, **others)
    survivor = dataclasses.replace(survivor, node="node-1")
    swap(stage, survivor)
    convict(stage, wrong, survivor)
    assert rules(stage.decide()) == preferred("node-1")


def test_an_operator_that_may_not_look_at_nodes_only_prefers_others() -> None:
    stage = training()
    survivor, wrong = stage.pods[1:]
    stage.nodes = None
    convict(stage, wrong, survivor)
    assert rules(stage.decide()) == preferred("node-1")


def test_only_the_latest_nodes_are_remembered() -> None:
    stage, now = training(), NOW
    survivor = stage.pods[1]
    for number in range(1, 12):
        pod = worker(stage.job, number, created=now, uid=f"joiner-{number}")
        stage.pods = [*stage.pods[:2], pod]
        stage.nodes = nodes(survivor, pod)
        now += 700.0
        convict(stage, pod, survivor, step=40 + 100 * number)
        plan = stage.decide(now)
        stage.write(plan)
    assert plan.status.failures.nodes == tuple(f"node-{number}" for number in range(4, 12))
    assert (plan.status.phase, plan.status.failures.count) == ("Running", 1)


def test_on_one_node_alone_they_use_up_the_backoff_limit_at_last() -> None:
    stage, now = training(1, backoffLimit=2), NOW
    for number in range(1, 4):
        pod = worker(stage.job, number, created=now, uid=f"again-{number}", node="node-1")
        stage.pods = [stage.pods[0], pod]
        stage.nodes = nodes(pod)
        now += 700.0
        convict(stage, pod)
        plan = stage.decide(now)
        stage.write(plan)
    assert reason_of(plan, "Failed") == ("True", reasons.BACK_OFF_LIMIT)


def test_a_job_whose_states_differ_keeps_off_the_node_of_the_odd_one() -> None:
    stage = training()
    survivor, odd = stage.pods[1:]
    stage.nodes = nodes(survivor, odd)
    error = "the workers' states differ before step 41, first in weight: digits-workers-1 against 2 of 3"
    told = structs.replace(
        remote("failed", seen(survivor), seen(odd), wanted=2, minimum=1, step=40),
        error=error,
        lost=(found_wrong(odd, "its state is not that of most others"),),
    )
    stage.link = link(told)
    swap(stage, ended(odd, 1, word=structs.replace(RAISED, convicted=True)))
    plan = stage.decide()
    assert plan.status.attempt == 1
    assert plan.status.failures.nodes == ("node-1",)
    where = f"{error}; digits-workers-1 ran on node node-1, and the job keeps off that node where it can"
    assert plan.status.failures.message == where
    assert any(event.message == f"attempt 1 failed: {where}" for event in plan.events)
    assert where in message_of(plan, "Progressing")

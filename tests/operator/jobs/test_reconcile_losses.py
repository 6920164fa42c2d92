"""Decisions of the reconciler about workers that will be lost, and that are: whom it tells, replaces and counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec import structs
from scenes import (
    NOW,
    RAISED,
    SETTINGS,
    Stage,
    created,
    deleted,
    drained,
    edit,
    ended,
    given_up,
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

from virtualflow.protocol.http_api import DrainCall, GoneCall
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator import reasons
from virtualflow_operator.api.objects import Node
from virtualflow_operator.jobs.actions import DeletePod
from virtualflow_operator.jobs.pod_classification import OUT_OF_SERVICE, TERMINATION_TAINTS

# --- what is announced ------------------------------------------------------------------------------------------------


def test_deleting_a_pod_is_a_drain_with_the_deadline_of_the_pod() -> None:
    stage = training()
    swap(stage, dataclasses.replace(stage.pods[2], deleting_at=NOW + 12))
    plan = stage.decide()
    assert plan.calls == (DrainCall(("digits-workers-1",), 12.0, "its pod is being deleted"),)
    assert (created(plan), deleted(plan)) == (["digits-workers-2"], [])


def test_a_deadline_that_has_passed_is_no_negative_number() -> None:
    stage = training()
    swap(stage, dataclasses.replace(stage.pods[2], deleting_at=NOW - 3))
    assert stage.decide().calls == (DrainCall(("digits-workers-1",), 0.0, "its pod is being deleted"),)


def test_an_eviction_is_a_drain_with_its_reason() -> None:
    stage = training()
    why = "EvictionByEvictionAPI: Eviction API: evicting"
    swap(stage, dataclasses.replace(stage.pods[1], deleting_at=NOW + 30, disrupted=why))
    assert stage.decide().calls == (DrainCall(("digits-workers-0",), 30.0, why),)


@pytest.mark.parametrize("taint", [*TERMINATION_TAINTS, "example.com/going"])
def test_a_taint_that_announces_the_end_of_a_node_drains_its_worker_at_once(taint: str) -> None:
    stage = training()
    stage.settings = dataclasses.replace(SETTINGS, extra_taints=("example.com/going",))
    stage.nodes = nodes(*stage.pods, node_1=Node("", taints=("other", taint)))
    plan = stage.decide()
    assert plan.calls == (DrainCall(("digits-workers-1",), 30.0, f"its node node-1 has the taint {taint}"),)
    assert (created(plan), deleted(plan)) == (["digits-workers-2"], ["digits-workers-1"])


def test_a_node_that_shuts_down_gracefully_drains_its_worker() -> None:
    stage = training()
    stage.nodes = nodes(*stage.pods, node_0=Node("", ready=False, shutting_down=True))
    plan = stage.decide()
    assert (drained(plan), deleted(plan)) == (["digits-workers-0"], ["digits-workers-0"])


def test_a_worker_on_a_cordoned_node_gets_a_successor_before_it_leaves() -> None:
    stage = training()
    stage.nodes = nodes(*stage.pods, node_1=Node("", cordoned=True))
    plan = stage.decide()
    assert (created(plan), deleted(plan), plan.calls) == (["digits-workers-2"], [], ())
    assert reason_of(plan, "Progressing") == ("True", reasons.ROLLING)

    successor = worker(stage.job, 2)
    stage.pods.append(successor)
    stage.nodes["node-2"] = Node("node-2")
    assert stage.link is not None
    assert stage.link.status is not None
    known = stage.link.status.workers
    stage.link = link(remote("training", *known, seen(successor, "starting")))
    assert stage.decide().actions == ()

    stage.link = link(remote("training", *known, seen(successor, "ready")))
    plan = stage.decide()
    assert (drained(plan), deleted(plan)) == (["digits-workers-1"], ["digits-workers-1"])


def test_a_worker_that_cannot_start_on_a_cordoned_node_is_replaced_by_one_that_trains() -> None:
    stage = training(3)
    edit(stage, replicas=2)
    stage.link = link(remote("training", *(seen(p) for p in (stage.pods[1], stage.pods[3]))))
    swap(stage, dataclasses.replace(stage.pods[2], phase="Pending", ip="", waiting="ImagePullBackOff"))
    stage.nodes = nodes(*stage.pods, node_1=Node("", cordoned=True))
    assert deleted(stage.decide()) == ["digits-workers-1"]


# --- what is lost -----------------------------------------------------------------------------------------------------


def test_a_node_that_is_not_ready_is_no_news_while_the_coordinator_hears_its_worker() -> None:
    stage = training()
    stage.nodes = nodes(*stage.pods, node_1=Node("", ready=False))
    plan = stage.decide()
    assert (plan.calls, plan.actions) == ((), ())


def _silent(stage: Stage) -> None:
    stage.link = link(remote("training", seen(stage.pods[1]), seen(stage.pods[2], "silent")))
    stage.nodes = nodes(*stage.pods, node_1=Node("", ready=False))


def _vanished(stage: Stage) -> None:
    _silent(stage)
    stage.nodes = nodes(*stage.pods, node_1=None)


def _out_of_service(stage: Stage) -> None:
    stage.nodes = nodes(*stage.pods, node_1=Node("", taints=(OUT_OF_SERVICE,)))


def _failed(**facts: Any) -> Callable[[Stage], None]:
    return lambda stage: (swap(stage, ended(stage.pods[2], **facts)), None)[1]


LOSSES: Mapping[str, tuple[Callable[[Stage], None], str]] = {
    "a node that is not ready and whose worker is silent": (_silent, "its node node-1 is not ready"),
    "a node that does not exist any more": (_vanished, "its node node-1 does not exist any more"),
    "a node that is out of service": (_out_of_service, "its node node-1 is out of service"),
    "a pod that was killed for its memory": (_failed(code=137, reason="OOMKilled"), "more memory"),
    "a pod that the kubelet evicted": (_failed(code=137, reason="Error", disrupted="Evicted"), "Evicted"),
    "a pod that exits with 75": (_failed(code=75), "the coordinator refused it"),
    "a pod whose script raised": (_failed(word=RAISED), "ValueError: odd batch"),
    "a pod that ended before the training did": (
        _failed(code=0, reason="Completed"),
        "exit code 0 before the training was complete, after 40 steps; a wrapper (sh -c, | tee) may have hidden how",
    ),
}


@pytest.mark.parametrize(("happens", "why"), LOSSES.values(), ids=LOSSES)
def test_a_loss_is_told_at_once_with_the_process_that_is_meant(happens: Callable[[Stage], None], why: str) -> None:
    stage = training()
    happens(stage)
    plan = stage.decide()
    (told,) = plan.calls
    assert isinstance(told, GoneCall)
    assert (told.worker, told.incarnation) == ("digits-workers-1", "process-of-workers-1")
    assert why in told.reason
    assert "digits-workers-2" in created(plan)
    assert reasons.LOST in noticed(plan)


def test_an_end_before_any_step_was_told_names_both_causes() -> None:
    stage = training()
    assert stage.link is not None
    assert stage.link.status is not None
    stage.link = dataclasses.replace(stage.link, status=structs.replace(stage.link.status, step=0))
    swap(stage, ended(stage.pods[2], code=0, reason="Completed"))
    (told,) = stage.decide().calls
    assert isinstance(told, GoneCall)
    assert "its script must train with vf.elastic, or a wrapper (sh -c, | tee) may have hidden how" in told.reason


@pytest.mark.parametrize(
    ("code", "facts", "counted"),
    [
        pytest.param(1, {}, 1, id="an exception is a crash"),
        pytest.param(137, {"reason": "OOMKilled"}, 1, id="too much memory is a crash"),
        pytest.param(0, {}, 1, id="an end before the end is a crash"),
        pytest.param(75, {}, 1, id="a refused worker counts as one"),
        pytest.param(143, {"disrupted": "PreemptionByScheduler: preempted"}, 0, id="a preempted one is none"),
        pytest.param(143, {"deleting_at": NOW + 5}, 0, id="a deleted one is none"),
        pytest.param(
            1,
            {"word": TerminationMessage("ended", reason="the job has failed")},
            0,
            id="one that was sent home is none",
        ),
        pytest.param(0, {"word": TerminationMessage("left", step=40)}, 0, id="one that handed over is none"),
    ],
)
def test_only_crashes_are_counted(code: int, facts: dict[str, Any], counted: int) -> None:
    stage = training()
    pod_facts = {key: facts.pop(key) for key in ("disrupted", "deleting_at") if key in facts}
    swap(stage, dataclasses.replace(ended(stage.pods[2], code, **facts), **pod_facts))
    plan = stage.decide()
    assert plan.status.failures.count == counted
    assert plan.status.phase == "Running"
    # A crashed or refused pod stays until it is in the books.
    assert ("digits-workers-1" in deleted(plan)) == (
        not plan.status.failures.counted and "deleting_at" not in pod_facts
    )
    stage.write(plan)
    assert ("digits-workers-1" in deleted(stage.decide())) == ("deleting_at" not in pod_facts)
    assert stage.decide().status.failures.count == counted


def test_workers_that_always_exit_with_75_use_up_the_backoff_limit() -> None:
    stage, now, counts = training(backoffLimit=2), NOW, []
    word = TerminationMessage("refused", step=40, reason="it runs another image")
    while stage.job.status.phase == "Running":
        assert len(counts) < 4
        swap(stage, dataclasses.replace(ended(stage.pods[2], 75, word=word), uid=f"evicted-{len(counts)}", created=now))
        plan = stage.decide(now)
        stage.write(plan)
        counts.append(plan.status.failures.count)
        now += 400
    assert counts == [1, 2, 3]
    assert reason_of(plan, "Failed") == ("True", reasons.BACK_OFF_LIMIT)
    assert "the coordinator refused it: it runs another image" in message_of(plan, "Failed")


def test_workers_that_are_declared_lost_together_are_one_failure() -> None:
    stage = training(4, backoffLimit=2)
    for index in (1, 2, 3):
        swap(stage, ended(stage.pods[index], 75))
        stage.write(stage.decide(NOW + index))
    assert (stage.job.status.phase, stage.job.status.failures.count) == ("Running", 1)


def test_a_single_worker_that_is_declared_lost_never_ends_a_job() -> None:
    stage = training(backoffLimit=0)
    swap(stage, ended(stage.pods[2], 75))
    plan = stage.decide()
    assert (plan.status.phase, plan.status.failures.count) == ("Running", 1)


def test_evictions_by_the_kubelet_never_use_up_the_backoff_limit() -> None:
    stage = training(backoffLimit=0)
    swap(stage, dataclasses.replace(ended(stage.pods[2], 137), reason="Evicted"))
    plan = stage.decide()
    assert (plan.status.phase, plan.status.failures.count) == ("Running", 0)
    assert created(plan) == ["digits-workers-2"]
    assert deleted(plan) == ["digits-workers-1"]


def test_pods_that_the_kubelet_will_not_have_are_made_again_after_a_longer_and_longer_wait() -> None:
    stage, waits = training(backoffLimit=0), []
    for number in range(4):
        pod = worker(stage.job, number + 1, created=NOW + 60 * number, phase="Failed", reason="OutOfcpu")
        stage.pods = [*stage.pods[:2], pod]
        plan = stage.decide(NOW + 60 * number)
        waits.append((plan.wake_at or NOW + 60 * number) - NOW - 60 * number)
        stage.write(plan)
    assert waits == [0.0, 10.0, 20.0, 40.0]
    assert (stage.job.status.phase, stage.job.status.failures.count) == ("Running", 0)


def test_a_worker_that_was_given_up_is_deleted_and_replaced() -> None:
    stage = training()
    stage.link = link(remote("training", seen(stage.pods[1]), lost=(given_up(stage.pods[2]),)))
    plan = stage.decide()
    assert (created(plan), deleted(plan), plan.calls) == (["digits-workers-2"], ["digits-workers-1"], ())
    (deletion,) = [action for action in plan.actions if isinstance(action, DeletePod)]
    assert deletion.grace == 2.0
    assert deletion.reason == "silent for 5 s"


@pytest.mark.parametrize("how", ["deleted", "ended", "gone"])
def test_the_end_of_one_that_was_given_up_is_confirmed_when_it_is_recorded(how: str) -> None:
    stage = training()
    lost = stage.pods[2]
    stage.link = link(remote("training", seen(stage.pods[1]), lost=(given_up(lost),)))
    if how == "gone":
        stage.pods.remove(lost)
    elif how == "ended":
        swap(stage, ended(lost, 137))
    else:
        swap(stage, dataclasses.replace(lost, deleting_at=NOW + 2))
    confirmed = GoneCall("digits-workers-1", f"process-of-{lost.uid}", "silent for 5 s")
    assert confirmed in stage.decide().calls
    told = dataclasses.replace(
        stage, link=link(remote("training", lost=(structs.replace(given_up(lost), ended=True),)))
    )
    assert confirmed not in told.decide().calls


def test_a_pod_that_is_stuck_on_a_dead_node_does_not_keep_its_successor_away() -> None:
    stage = training()
    _silent(stage)
    swap(stage, dataclasses.replace(stage.pods[2], deleting_at=NOW - 600))
    plan = stage.decide()
    assert (created(plan), deleted(plan)) == (["digits-workers-2"], [])

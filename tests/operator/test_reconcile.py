"""Decisions of the reconciler, as tables: what is there, what happens, and what is done about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

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
    ended,
    given_up,
    gone,
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
    worker,
)

from virtualflow.messages import LastWord
from virtualflow_operator import reasons, resources
from virtualflow_operator.decision import Verdict
from virtualflow_operator.disruptions import OUT_OF_SERVICE, TERMINATION_TAINTS
from virtualflow_operator.job_status import write_status
from virtualflow_operator.plan import (
    CheckTemplates,
    CreateService,
    DeleteJob,
    DeletePod,
    PointService,
    TellDrain,
    TellGone,
    TellScale,
    TellStop,
)
from virtualflow_operator.view import Node, Service, format_time, read_job

RAISED = LastWord("failed", step=40, error="ValueError: odd batch", traceback="Traceback\n  train.py\nValueError: odd")


def verdict_of(raw: dict[str, Any], error: str = "", at: float = NOW - 1) -> Verdict:
    return Verdict(resources.templates_hash(read_job(raw)), at, error)


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
        assert (plan.actions, plan.calls, plan.notices, plan.wake_at) == ((), (), (), None)
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
    assert (plan.actions, plan.calls, plan.notices) == ((), (), ())
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
    assert plan.calls == (TellScale(4, 1),)
    assert plan.status.workers == "2/4"
    assert reason_of(plan, "Degraded") == ("True", reasons.FEWER_WORKERS)


def test_scaling_down_drains_whom_it_can_do_without_by_one_call() -> None:
    plan = edit(training(4), replicas=2).decide()
    assert drained(plan) == ["digits-workers-3", "digits-workers-2"]
    assert deleted(plan) == drained(plan)
    assert kinds(plan.calls) == ["TellScale", "TellDrain"]
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


# --- what is announced ------------------------------------------------------------------------------------------------


def test_deleting_a_pod_is_a_drain_with_the_deadline_of_the_pod() -> None:
    stage = training()
    swap(stage, dataclasses.replace(stage.pods[2], deleting_at=NOW + 12))
    plan = stage.decide()
    assert plan.calls == (TellDrain(("digits-workers-1",), 12.0, "its pod is being deleted"),)
    assert (created(plan), deleted(plan)) == (["digits-workers-2"], [])


def test_a_deadline_that_has_passed_is_no_negative_number() -> None:
    stage = training()
    swap(stage, dataclasses.replace(stage.pods[2], deleting_at=NOW - 3))
    assert stage.decide().calls == (TellDrain(("digits-workers-1",), 0.0, "its pod is being deleted"),)


def test_an_eviction_is_a_drain_with_its_reason() -> None:
    stage = training()
    why = "EvictionByEvictionAPI: Eviction API: evicting"
    swap(stage, dataclasses.replace(stage.pods[1], deleting_at=NOW + 30, disrupted=why))
    assert stage.decide().calls == (TellDrain(("digits-workers-0",), 30.0, why),)


@pytest.mark.parametrize("taint", [*TERMINATION_TAINTS, "example.com/going"])
def test_a_taint_that_announces_the_end_of_a_node_drains_its_worker_at_once(taint: str) -> None:
    stage = training()
    stage.settings = dataclasses.replace(SETTINGS, extra_taints=("example.com/going",))
    stage.nodes = nodes(*stage.pods, node_1=Node("", taints=("other", taint)))
    plan = stage.decide()
    assert plan.calls == (TellDrain(("digits-workers-1",), 30.0, f"its node node-1 has the taint {taint}"),)
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
    "a pod that ended before the training did": (_failed(code=0, reason="Completed"), "exit code 0 before"),
}


@pytest.mark.parametrize(("happens", "why"), LOSSES.values(), ids=LOSSES)
def test_a_loss_is_told_at_once_with_the_process_that_is_meant(happens: Callable[[Stage], None], why: str) -> None:
    stage = training()
    happens(stage)
    plan = stage.decide()
    (told,) = plan.calls
    assert isinstance(told, TellGone)
    assert (told.worker, told.incarnation) == ("digits-workers-1", "process-of-workers-1")
    assert why in told.reason
    assert "digits-workers-2" in created(plan)
    assert reasons.LOST in noticed(plan)


@pytest.mark.parametrize(
    ("code", "facts", "counted"),
    [
        pytest.param(1, {}, 1, id="an exception is a crash"),
        pytest.param(137, {"reason": "OOMKilled"}, 1, id="too much memory is a crash"),
        pytest.param(0, {}, 1, id="an end before the end is a crash"),
        pytest.param(75, {}, 0, id="a refused worker is none"),
        pytest.param(143, {"disrupted": "PreemptionByScheduler: preempted"}, 0, id="a preempted one is none"),
        pytest.param(143, {"deleting_at": NOW + 5}, 0, id="a deleted one is none"),
        pytest.param(
            1, {"word": LastWord("ended", reason="the job has failed")}, 0, id="one that was sent home is none"
        ),
        pytest.param(0, {"word": LastWord("left", step=40)}, 0, id="one that handed over is none"),
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


def test_a_pod_that_is_stuck_on_a_dead_node_does_not_keep_its_successor_away() -> None:
    stage = training()
    _silent(stage)
    swap(stage, dataclasses.replace(stage.pods[2], deleting_at=NOW - 600))
    plan = stage.decide()
    assert (created(plan), deleted(plan)) == (["digits-workers-2"], [])


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_the_coordinators_word_completes_the_job() -> None:
    stage = training()
    known = [seen(pod, "done") for pod in stage.pods[1:]]
    stage.link = link(remote("done", *known, step=100, digest="abc", optimizer_digest="def", metrics={"loss": 0.25}))
    plan = stage.decide()
    assert (plan.status.phase, plan.status.step, plan.status.digest) == ("Complete", 100, "abc")
    assert (plan.status.loss, plan.status.optimizer_digest) == ("0.25", "def")
    assert plan.status.completion_time == format_time(NOW)
    assert reason_of(plan, "Complete") == ("True", reasons.COMPLETE)
    assert noticed(plan)[-1] == reasons.COMPLETE
    stage.write(plan)

    plan = stage.decide(NOW + 1)
    assert (plan.actions, plan.wake_at) == ((), NOW + SETTINGS.finish_grace), "the workers may end by themselves"
    plan = stage.decide(NOW + SETTINGS.finish_grace)
    assert sorted(deleted(plan)) == ["digits-coordinator-0", "digits-workers-0", "digits-workers-1"]

    word = LastWord("done", step=100, digest="abc")
    stage.pods = [stage.pods[0], *(ended(pod, 0, word=word) for pod in stage.pods[1:])]
    plan = stage.decide(NOW + 1)
    assert deleted(plan) == ["digits-coordinator-0"], "finished workers keep their logs"
    stage.pods = stage.pods[1:]
    assert stage.decide(NOW + 2).actions == ()


def test_the_last_words_of_its_workers_complete_a_job_without_a_coordinator() -> None:
    stage = training()
    word = LastWord("done", step=100, digest="abc", optimizer_digest="def", metrics={"loss": 0.5})
    stage.pods = [ended(pod, 0, word=word) for pod in stage.pods[1:]]
    stage.link = None
    status = stage.decide().status
    assert (status.phase, status.step, status.digest, status.loss) == ("Complete", 100, "abc", "0.5")


def test_one_finished_worker_is_not_the_end_while_the_others_train() -> None:
    stage = training()
    swap(stage, ended(stage.pods[2], 0, word=LastWord("done", step=100, digest="abc")))
    assert stage.decide().status.phase == "Running"


def _has_failed(stage: Stage) -> None:
    stage.link = link(remote("failed", error="ValueError: odd batch", traceback="Traceback\n  train.py\nValueError"))


def test_a_failed_attempt_is_followed_by_the_next_one_after_a_wait() -> None:
    stage = training()
    _has_failed(stage)
    plan = stage.decide()
    assert (plan.status.phase, plan.status.attempt, plan.status.failures.count) == ("BackOff", 1, 1)
    assert plan.status.failures.retry_time == format_time(NOW + 10)
    assert "ValueError: odd batch" in message_of(plan, "Progressing")
    assert noticed(plan) == [reasons.CRASHED]
    stage.write(plan)

    plan = stage.decide(NOW + 1)
    assert (plan.status.attempt, plan.status.failures.count) == (1, 1), "what the former coordinator says is old news"
    assert sorted(deleted(plan)) == ["digits-coordinator-0", "digits-workers-0", "digits-workers-1"]
    assert (created(plan), plan.status.phase, plan.wake_at) == ([], "BackOff", NOW + 10)
    stage.write(plan)

    stage.pods, stage.link = [], None
    plan = stage.decide(NOW + 10)
    assert created(plan) == ["digits-coordinator-0", "digits-workers-0", "digits-workers-1"]
    assert plan.status.phase == "Pending"


def test_the_pods_of_a_failed_attempt_never_block_the_next_one() -> None:
    stage = training()
    _has_failed(stage)
    stage.write(stage.decide())
    stage.pods = [dataclasses.replace(pod, deleting_at=NOW - 600) for pod in stage.pods]
    plan = stage.decide(NOW + 10)
    assert created(plan) == ["digits-coordinator-1", "digits-workers-2", "digits-workers-3"]
    assert PointService("digits-coordinator", resources.service_selector(stage.job, 1)) in plan.actions


def test_too_many_failed_attempts_are_the_end() -> None:
    stage = training(backoffLimit=1)
    _has_failed(stage)
    stage.write(stage.decide())
    stage.pods = [coordinator(stage.job)]
    _has_failed(stage)
    plan = stage.decide(NOW + 20)
    assert (plan.status.phase, plan.status.failures.count) == ("Failed", 2)
    assert reason_of(plan, "Failed") == ("True", reasons.BACK_OFF_LIMIT)
    assert "ValueError: odd batch" in message_of(plan, "Failed")
    stage.write(plan)
    assert deleted(stage.decide(NOW + 21)) == ["digits-coordinator-0"]


@pytest.mark.parametrize(
    ("limit", "step", "phase", "count"),
    [
        pytest.param(0, 40, "Failed", 1, id="the first crash is one too many with a limit of 0"),
        pytest.param(2, 40, "Failed", 3, id="a third crash without a step is too many with a limit of 2"),
        pytest.param(2, 41, "Running", 1, id="a crash after a step begins to count again"),
        pytest.param(3, 40, "Running", 3, id="a third crash without a step is not too many with a limit of 3"),
    ],
)
def test_crashes_without_progress_count_against_the_limit(limit: int, step: int, phase: str, count: int) -> None:
    stage = training(backoffLimit=limit)
    if limit:
        books = {"count": 2, "streak": 2, "step": 40, "lastTime": format_time(NOW - 95)}
        stage.raw = stage.raw | {"status": stage.raw["status"] | {"failures": books}}
    stage.link = link(remote("training", *(seen(pod) for pod in stage.pods[1:]), step=step))
    swap(stage, ended(stage.pods[2], word=RAISED))
    plan = stage.decide()
    assert (plan.status.phase, plan.status.failures.count) == (phase, count)
    if phase == "Failed":
        assert reason_of(plan, "Failed") == ("True", reasons.BACK_OFF_LIMIT)
        assert "ValueError: odd" in message_of(plan, "Failed")
        assert "Traceback" in message_of(plan, "Failed")


def test_a_second_crash_in_a_row_waits_and_a_first_one_does_not() -> None:
    stage = training()
    swap(stage, ended(stage.pods[2]))
    plan = stage.decide()
    assert created(plan) == ["digits-workers-2"]
    stage.write(plan)
    stage.pods = [*stage.pods[:2], ended(worker(stage.job, 2, created=NOW + 1))]
    plan = stage.decide(NOW + 5)
    assert (created(plan), plan.wake_at) == ([], NOW + 15)
    assert plan.status.phase == "Running"
    stage.write(plan)
    stage.pods = stage.pods[:2]
    assert created(stage.decide(NOW + 14)) == []
    assert created(stage.decide(NOW + 15)) == ["digits-workers-1"]


def test_a_job_that_takes_too_long_fails_and_takes_its_pods_away() -> None:
    stage = training(activeDeadlineSeconds=150)
    assert stage.decide(NOW + 49).wake_at == NOW + 50
    plan = stage.decide(NOW + 50)
    assert (plan.status.phase, reason_of(plan, "Failed")) == ("Failed", ("True", reasons.DEADLINE))
    stage.write(plan)
    assert len(deleted(stage.decide(NOW + 51))) == 3


def test_a_finished_job_goes_when_its_time_has_come() -> None:
    raw = accepted(body(ttlSecondsAfterFinished=60), phase="Complete", completionTime=format_time(NOW))
    stage = Stage(raw, [], Service("10.0.0.1", 0), {}, None)
    assert (stage.decide(NOW + 59).actions, stage.decide(NOW + 59).wake_at) == ((), NOW + 60)
    assert stage.decide(NOW + 60).actions == (DeleteJob(),)


def test_nothing_wakes_a_finished_job() -> None:
    stage = training()
    raw = stage.raw | {"status": stage.raw["status"] | {"phase": "Failed", "completionTime": format_time(NOW)}}
    stage = Stage(raw, [], None, {}, None)
    edit(stage, replicas=5, suspend=True)
    plan = stage.decide()
    assert (plan.actions, plan.calls, plan.status.phase) == ((), (), "Failed")


# --- suspend and resume -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [True, False], ids=["with a checkpoint", "without a checkpoint"])
def test_a_suspended_job_stops_behind_one_step_and_then_loses_all_its_pods(keeps: bool) -> None:
    extra: dict[str, Any] = {"checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "c"}}}} if keeps else {}
    stage = edit(training(**extra), suspend=True)
    plan = stage.decide()
    assert (plan.calls, plan.actions) == ((TellStop("the job is suspended"),), ())
    assert (plan.status.phase, plan.wake_at) == ("Suspending", NOW + 30)
    stage.write(plan)

    stage.link = link(remote("stopped", seen(stage.pods[1], "draining"), seen(stage.pods[2], "training")))
    assert deleted(stage.decide(NOW + 1)) == [], "they hand over and end by themselves"

    stage.pods = [stage.pods[0], *(ended(pod, 0, word=LastWord("left", step=41)) for pod in stage.pods[1:])]
    stage.link = link(remote("stopped"))
    plan = stage.decide(NOW + 2)
    assert sorted(deleted(plan)) == ["digits-coordinator-0", "digits-workers-0", "digits-workers-1"]
    assert (plan.status.phase, plan.status.replicas, plan.status.workers) == ("Suspended", 0, "0/2")
    assert reason_of(plan, "Suspended") == ("True", reasons.SUSPENDED)
    assert ("newest checkpoint" in message_of(plan, "Suspended")) == keeps
    assert noticed(plan) == [reasons.SUSPENDED]
    stage.write(plan)

    stage.pods, stage.link = [], None
    plan = stage.decide(NOW + 3)
    assert (plan.actions, plan.calls, stage.write(plan)) == ((), (), {})

    edit(stage, suspend=False)
    plan = stage.decide(NOW + 100)
    assert created(plan) == ["digits-coordinator-0", "digits-workers-0", "digits-workers-1"]
    assert (plan.status.phase, plan.status.start_time) == ("Pending", format_time(NOW + 100))
    assert reasons.RESUMED in noticed(plan)


def test_workers_that_do_not_stop_in_time_are_taken_away() -> None:
    stage = edit(training(), suspend=True)
    stage.write(stage.decide())
    plan = stage.decide(NOW + 30)
    assert sorted(deleted(plan)) == ["digits-workers-0", "digits-workers-1"]
    assert plan.status.phase == "Suspending"


def test_a_pod_is_deleted_once_for_the_first_of_its_reasons() -> None:
    stage = edit(training(), suspend=True)
    stage.link = None
    stage.nodes = nodes(*stage.pods, node_0=Node("", taints=("karpenter.sh/disrupted",)))
    assert sorted(deleted(stage.decide())) == ["digits-workers-0", "digits-workers-1"]


def test_a_suspended_job_is_left_alone_for_ever() -> None:
    stage = Stage(body(suspend=True), [], None, {}, None).settle()
    for later in (1, 60, 86_400):
        plan = stage.decide(NOW + later)
        assert (plan.actions, plan.calls, plan.notices, stage.write(plan)) == ((), (), (), {})


def test_a_job_that_never_began_is_suspended_at_once() -> None:
    stage = Stage(body(suspend=True), [], None, {}, None)
    plan = stage.decide()
    assert (plan.actions, plan.status.phase, plan.status.start_time) == ((), "Suspended", None)


def test_resuming_while_the_coordinator_has_stopped_takes_a_new_one() -> None:
    stage = training()
    stage.link = link(remote("stopped"))
    stage.pods = stage.pods[:1]
    plan = stage.decide()
    assert "digits-coordinator-0" in deleted(plan)
    assert "digits-coordinator-1" in created(plan)


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
    assert stage.decide(NOW + 5).notices == ()

    assert kinds(stage.decide(NOW + SETTINGS.template_retry).actions) == ["CheckTemplates"]
    stage.verdict = verdict_of(stage.raw, at=NOW + 61)
    plan = stage.decide(NOW + 61)
    assert created(plan) == ["digits-coordinator-0"]
    assert reason_of(plan, "Progressing") == ("True", reasons.STARTING)


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
    assert PointService("digits-coordinator", resources.service_selector(stage.job, 1)) in plan.actions
    assert plan.status.coordinator == "digits-coordinator-1"
    assert plan.status.phase == "Running"
    assert noticed(plan) == [reasons.COORDINATOR_LOST]


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
    assert stage.decide().actions == (CreateService(resources.service(stage.job, 0)),)
    stage.service = Service("10.0.0.1", 5)
    selector = resources.service_selector(stage.job, 0)
    assert stage.decide().actions == (PointService("digits-coordinator", selector),)


# --- what makes no sense ----------------------------------------------------------------------------------------------

PRIVILEGED = {"containers": [{"name": "a", "image": "b", "securityContext": {"privileged": True}}]}
NONSENSE: Mapping[str, tuple[dict[str, Any], str]] = {
    "fewer workers than the least": ({"minReplicas": 5}, "minReplicas"),
    "another number of virtual nodes": ({"virtualNodes": 16}, "virtualNodes cannot be changed"),
    "another reproducibility": ({"reproducibility": "Statistical"}, "reproducibility cannot be changed"),
    "no worker groups": ({"workerGroups": []}, "workerGroups"),
    "a number that is a word": ({"replicas": "many"}, "replicas"),
    "worker groups that cannot be read": ({"workerGroups": [{"name": 7}]}, "workerGroups"),
    "a renamed group beside nonsense": ({"workerGroups": [group("other")], "minReplicas": 5}, "minReplicas"),
    "a changed template beside nonsense": ({"workerGroups": [group(image="x")], "minReplicas": 5}, "minReplicas"),
    "a host's network": ({"workerGroups": [group(pod={"hostNetwork": True})]}, "hostNetwork"),
    "a privileged container": ({"workerGroups": [group(pod=PRIVILEGED)]}, "privileged"),
    "a privileged coordinator": ({"coordinator": {"template": {"spec": {"hostPID": True}}}}, "hostPID"),
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
    assert (plan.notices, stage.write(plan)) == ((), {})


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


def test_what_was_refused_is_said_in_a_condition() -> None:
    stage = training()
    stage.pods, stage.trouble = stage.pods[:2], "exceeded quota: pods=5"
    stage.link = link(remote("training", seen(stage.pods[1])))
    assert "exceeded quota" in message_of(stage.decide(), "Degraded")
    fresh = Stage(accepted(body(), phase="Pending"), [], None, {}, None, trouble="exceeded quota: pods=5")
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
    assert kinds(plan.calls) == ["TellGone", "TellDrain"]
    assert drained(plan) == ["digits-workers-0", "digits-workers-1"]
    assert noticed(plan) == [reasons.LOST, reasons.DRAINING, reasons.CRASHED, reasons.CREATED]


def test_a_worker_whose_pod_was_deleted_by_force_is_told_gone_at_once() -> None:
    stage = training()
    lost = stage.pods.pop()
    plan = stage.decide()
    gone = [call for call in plan.calls if isinstance(call, TellGone)]
    assert [(call.worker, call.trained) for call in gone] == [(lost.name, True)]
    assert created(plan) == [lost.name]

"""Decisions of the reconciler about how a job ends, begins again, is suspended and resumed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from scenes import (
    NOW,
    RAISED,
    SETTINGS,
    Stage,
    accepted,
    body,
    coordinator,
    created,
    deleted,
    edit,
    ended,
    kinds,
    link,
    message_of,
    nodes,
    noticed,
    reason_of,
    remote,
    seen,
    swap,
    training,
    verdict_of,
    worker,
)

from virtualflow.protocol import messages as m
from virtualflow.protocol.http_api import StopCall
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator import reasons
from virtualflow_operator.api.objects import Node, Service, format_time
from virtualflow_operator.jobs import manifests
from virtualflow_operator.jobs.actions import LINGER_GRACE, DeleteJob, DeletePod, PointService

# --- how it ends ------------------------------------------------------------------------------------------------------


DONE = TerminationMessage("done", step=100, digest="abc")


def _has_trained(stage: Stage, **facts: Any) -> None:
    known = [seen(pod, "done") for pod in stage.pods[1:]]
    stage.link = link(remote("done", *known, step=100, digest="abc", **facts))


def test_the_coordinators_word_completes_the_job_when_its_script_has_ended() -> None:
    stage = training()
    _has_trained(stage, optimizer_digest="def", metrics={"loss": 0.25})
    plan = stage.decide(NOW - 1)
    assert (plan.status.phase, plan.status.digest, plan.actions) == ("Running", None, ())
    assert reason_of(plan, "Progressing") == ("True", reasons.FINISHING)
    assert message_of(plan, "Ready").startswith("The training is complete after 100 steps; the job is when")
    stage.write(plan)
    assert stage.write(stage.decide(NOW - 1)) == {}

    swap(stage, ended(stage.pods[1], 0, word=DONE))
    assert stage.decide(NOW - 1).status.phase == "Running", "another one may still save what has come of it"
    swap(stage, ended(stage.pods[2], 0, word=DONE))
    plan = stage.decide()
    assert (plan.status.phase, plan.status.step, plan.status.digest) == ("Complete", 100, "abc")
    assert (plan.status.loss, plan.status.optimizer_digest) == ("0.25", "def")
    assert plan.status.completion_time == format_time(NOW)
    assert reason_of(plan, "Complete") == ("True", reasons.COMPLETE)
    assert noticed(plan)[-1] == reasons.COMPLETE
    stage.write(plan)
    plan = stage.decide(NOW + 1)
    assert deleted(plan) == ["digits-coordinator-0"], "finished workers keep their logs"
    stage.pods = stage.pods[1:]
    assert stage.decide(NOW + 2).actions == ()


def test_a_suspended_job_whose_training_is_complete_does_not_wait_for_its_script() -> None:
    stage = training()
    _has_trained(stage)
    edit(stage, suspend=True)
    plan = stage.decide()
    assert plan.status.phase == "Complete"
    stage.write(plan)
    plan = stage.decide(NOW + 1)
    assert (plan.actions, plan.wake_at) == ((), NOW + SETTINGS.finish_grace), "the workers may end by themselves"
    plan = stage.decide(NOW + SETTINGS.finish_grace)
    assert sorted(deleted(plan)) == ["digits-coordinator-0", "digits-workers-0", "digits-workers-1"]


def test_a_script_goes_on_to_another_run_and_one_that_was_lost_in_between_is_replaced() -> None:
    stage = training()
    _has_trained(stage)
    stage.write(stage.decide())
    swap(stage, ended(stage.pods[2], 137, word=DONE))
    plan = stage.decide()
    assert (created(plan), plan.status.phase) == ([], "Running"), "nobody knows yet whether it trains once more"
    stage.write(plan)
    stage.pods = stage.pods[:2]
    before = m.RunResult(1, 100, 100, "abc", {})
    facts: dict[str, Any] = {"run": 2, "runs": (before,), "earlier_steps": 100, "step": 3, "total_steps": 10}
    stage.link = link(remote("training", seen(stage.pods[1]), **facts))
    plan = stage.decide(NOW + 30)
    assert len(created(plan)) == 1
    status = plan.status
    assert (status.run, status.step, status.earlier_steps) == (2, 3, 100)
    assert [(run.run, run.steps, run.digest) for run in status.ended_runs] == [(1, 100, "abc")]


def test_scripts_that_all_end_in_an_error_after_the_training_begin_again() -> None:
    stage = training()
    _has_trained(stage)
    stage.pods = [stage.pods[0], *(ended(pod, 137, word=DONE) for pod in stage.pods[1:])]
    plan = stage.decide()
    assert (plan.status.phase, plan.status.attempt) == ("BackOff", 1)
    assert "ended with exit code 137 after the training was complete" in message_of(plan, "Progressing")


def test_the_last_words_of_its_workers_complete_a_job_without_a_coordinator() -> None:
    stage = training()
    word = TerminationMessage("done", step=100, digest="abc", optimizer_digest="def", metrics={"loss": 0.5})
    stage.pods = [ended(pod, 0, word=word) for pod in stage.pods[1:]]
    stage.link = None
    status = stage.decide().status
    assert (status.phase, status.step, status.digest, status.loss) == ("Complete", 100, "abc", "0.5")


def test_a_sidecar_that_never_ends_holds_no_device_behind_a_worker_that_saw_the_end() -> None:
    stage = training()
    _has_trained(stage)
    first, second = stage.pods[1:]
    lingers = ended(first, 0, word=DONE, accompanied=True)
    swap(stage, lingers)
    plan = stage.decide()
    assert (deleted(plan), plan.status.phase) == ([first.name], "Running")
    assert plan.actions[0].grace == LINGER_GRACE  # type: ignore[union-attr]
    for deleting_at in (NOW + 9, NOW + 600):
        swap(stage, dataclasses.replace(lingers, deleting_at=deleting_at))
        assert stage.decide().actions == (), "a kubelet would not end it sooner"

    # Another script's error afterwards does not undo what the first one has saved, whose pod is gone.
    stage.pods = [stage.pods[0], ended(second, 1, word=DONE)]
    stage.former = [lingers]
    assert stage.decide().status.phase == "Complete"
    stage.former = [dataclasses.replace(lingers, attempt=7)]
    assert stage.decide().status.phase == "BackOff"


def test_a_worker_with_sidecars_has_the_time_of_a_drain_and_not_all_of_its_pod_s() -> None:
    stage = edit(training(), replicas=1)
    alone, beside = stage.pods[2], dataclasses.replace(stage.pods[2], accompanied=True)
    for pod, grace in ((alone, None), (beside, 40.0)):
        swap(stage, pod)
        (deletion,) = [action for action in stage.decide().actions if isinstance(action, DeletePod)]
        assert (deletion.name, deletion.grace) == (alone.name, grace)


def test_nothing_lingers_of_a_job_that_is_over_or_suspended() -> None:
    stage = training()
    _has_trained(stage)
    for pod in stage.pods[1:]:
        swap(stage, ended(pod, 0, word=DONE, accompanied=True))
    names = ["digits-workers-0", "digits-workers-1"]
    plan = stage.decide()
    assert (plan.status.phase, deleted(plan)) == ("Complete", names)
    stage.write(plan)
    assert deleted(stage.decide()) == [*names, "digits-coordinator-0"]

    stage = edit(training(), suspend=True)
    stage.link = link(remote("stopped", step=8))
    for pod in stage.pods[1:]:
        swap(stage, ended(pod, 0, word=TerminationMessage("left", step=8), accompanied=True))
    plan = stage.decide()
    assert (plan.status.phase, deleted(plan)) == ("Suspending", names), "the devices are not free yet"


def test_a_job_that_its_script_has_stopped_early_is_complete_and_says_so() -> None:
    stage = training()
    word = TerminationMessage("done", step=5, total_steps=80, digest="abc", stopped_early=True)
    stage.pods = [ended(pod, 0, word=word) for pod in stage.pods[1:]]
    stage.link = None
    plan = stage.decide()
    condition = plan.status.condition("Complete")
    assert condition is not None
    assert condition.message == "Training stopped early by the script, 5 of 80 steps."
    assert plan.events[-1].message == "training stopped early by the script, 5 of 80 steps; digest abc"


@pytest.mark.parametrize(
    ("spec", "reason", "says"),
    [
        ({"elasticity": {"startupDeadlineSeconds": 90}}, reasons.STARTUP_DEADLINE, "had not begun to train 90 s after"),
        ({"activeDeadlineSeconds": 90}, reasons.DEADLINE, "was not done 90 s after"),
    ],
)
def test_a_job_that_could_not_start_in_time_fails_and_names_what_was_in_the_way(
    spec: dict[str, Any], reason: str, says: str
) -> None:
    stage = training(1)
    raw = accepted(body(replicas=1, **spec), phase="Pending", startTime=format_time(NOW - 80))
    stage = Stage(raw, stage.pods, stage.service, stage.nodes, link(remote("waiting", wanted=1)))
    swap(stage, dataclasses.replace(stage.pods[1], phase="Pending", ip="", waiting="ImagePullBackOff: no such image"))
    plan = stage.decide()
    assert (plan.status.phase, plan.wake_at) == ("Pending", NOW + 10)
    plan = stage.decide(NOW + 10)
    assert reason_of(plan, "Failed") == ("True", reason)
    message = message_of(plan, "Failed")
    assert message.startswith(f"The job {says} its start")
    assert message.endswith(": digits-workers-0 cannot start: ImagePullBackOff: no such image")
    assert reason_of(plan, "Stalled") == ("True", reason)


def test_the_startup_deadline_is_over_once_the_job_trains_and_counts_anew_after_a_suspension() -> None:
    stage = training(elasticity={"startupDeadlineSeconds": 90})
    assert stage.job.status.training_time is not None
    assert stage.decide(NOW + 999).status.phase == "Running"
    edit(stage, suspend=True)
    stage.pods, stage.link = [], None
    assert stage.decide().status.training_time is None


def test_one_finished_worker_is_not_the_end_while_the_others_train_and_gets_no_successor() -> None:
    stage = training()
    swap(stage, ended(stage.pods[2], 0, word=TerminationMessage("done", step=100, digest="abc")))
    plan = stage.decide()
    assert plan.status.phase == "Running"
    assert created(plan) == []


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
    assert PointService("digits-coordinator", manifests.service_selector(stage.job, 1)) in plan.actions


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
    stage = training(**extra)
    assert ("would lose all steps" in message_of(stage.decide(), "Suspended")) is not keeps
    plan = edit(stage, suspend=True).decide()
    assert (plan.calls, plan.actions) == ((StopCall("the job is suspended"),), ())
    assert (plan.status.phase, plan.wake_at) == ("Suspending", NOW + (330 if keeps else 30))
    assert ("the training is lost, 40 steps" in message_of(plan, "Progressing")) is not keeps
    stage.write(plan)

    stage.link = link(remote("stopped", seen(stage.pods[1], "draining"), seen(stage.pods[2], "training")))
    assert deleted(stage.decide(NOW + 1)) == [], "they hand over and end by themselves"

    stage.pods = [stage.pods[0], *(ended(pod, 0, word=TerminationMessage("left", step=41)) for pod in stage.pods[1:])]
    stage.link = link(remote("stopped", step=41))
    plan = stage.decide(NOW + 2)
    assert sorted(deleted(plan)) == ["digits-coordinator-0", "digits-workers-0", "digits-workers-1"]
    assert (plan.status.phase, plan.status.replicas, plan.status.workers) == ("Suspended", 0, "0/2")
    assert plan.status.step == 41, "the step behind which they left, not the last one that was written down before"
    assert reason_of(plan, "Suspended") == ("True", reasons.SUSPENDED)
    told = "No checkpoint of step 41 was confirmed" if keeps else "It has no spec.checkpoint"
    assert told in message_of(plan, "Suspended")
    assert (
        "the training is lost, 41 steps, and it begins from the first" in message_of(plan, "Suspended")
    ) is not keeps
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
    stage = Stage(body(suspend=True), [], None, {}, None)
    stage.verdict = verdict_of(stage.raw)
    stage.settle()
    for later in (1, 60, 86_400):
        plan = stage.decide(NOW + later)
        assert (plan.actions, plan.calls, plan.events, stage.write(plan)) == ((), (), (), {})


def test_a_job_that_never_began_is_suspended_at_once() -> None:
    stage = Stage(body(suspend=True), [], None, {}, None)
    plan = stage.decide()
    assert kinds(plan.actions) == ["CheckTemplates"]
    assert (plan.status.phase, plan.status.start_time) == ("Suspended", None)


def test_resuming_while_the_coordinator_has_stopped_takes_a_new_one() -> None:
    stage = training()
    stage.link = link(remote("stopped"))
    stage.pods = stage.pods[:1]
    plan = stage.decide()
    assert "digits-coordinator-0" in deleted(plan)
    assert "digits-coordinator-1" in created(plan)

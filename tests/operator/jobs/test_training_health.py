"""What is amiss in a training that goes on: conditions that come when there is something to say, and stay."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from scenes import (
    NOW,
    Stage,
    created,
    deleted,
    edit,
    ended,
    given_up,
    group,
    link,
    message_of,
    noticed,
    reason_of,
    remote,
    seen,
    swap,
    training,
    verdict_of,
    worker,
)

from virtualflow.protocol.http_api import MemoryCopyState, MemoryReport, WorkerSeconds
from virtualflow.protocol.messages import CheckpointState, NonFinite
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow.protocol.wording import Metric
from virtualflow_operator import reasons
from virtualflow_operator.api.objects import Pod, format_time
from virtualflow_operator.jobs.actions import JobPlan
from virtualflow_operator.observability import sample

FOUND = NonFinite("loss", "NaN", 41)


def tells(stage: Stage, **facts: Any) -> Stage:
    assert stage.link is not None
    assert stage.link.status is not None
    stage.link = dataclasses.replace(stage.link, status=msgspec.structs.replace(stage.link.status, **facts))
    return stage


def conditions(stage: Stage) -> set[str]:
    return {condition.type for condition in stage.job.status.conditions}


def test_a_job_whose_metrics_are_finite_has_no_condition_of_it() -> None:
    stage = tells(training(), metrics={"loss": 0.5}).settle()
    assert "NonFinite" not in conditions(stage)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_loss_that_is_not_finite_is_in_status_condition_event_and_metric(value: Any) -> None:
    metrics: dict[str, Metric] = {"loss": value}
    stage = tells(training(), step=45, metrics=metrics, non_finite=NonFinite("loss", value, 41))
    plan = stage.decide()
    assert (plan.status.phase, plan.status.loss) == ("Running", value)
    assert reason_of(plan, "NonFinite") == ("True", reasons.METRIC_NOT_FINITE)
    assert message_of(plan, "NonFinite").startswith(f"loss became {value} in step 41. ")
    assert noticed(plan) == [reasons.METRIC_NOT_FINITE]
    assert plan.events[0].warning
    told = sample(stage.job.spec, plan.status, 2)
    assert (told.non_finite, str(told.loss)) == (1, {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}[value])
    stage.write(plan)
    assert stage.decide().events == ()


def test_metrics_that_are_finite_again_do_not_hide_what_was() -> None:
    stage = tells(training(), metrics={"loss": "NaN"}, non_finite=FOUND).settle()
    plan = tells(stage, step=50, metrics={"loss": 0.5}).decide(NOW + 60)
    assert (plan.status.loss, reason_of(plan, "NonFinite")) == ("0.5", ("False", reasons.METRICS_FINITE))
    assert message_of(plan, "NonFinite") == "loss became NaN in step 41, and all metrics are finite again."
    assert sample(stage.job.spec, plan.status, 2).non_finite == 0


@pytest.mark.parametrize("coordinator", ["away", "new"])
def test_what_is_known_stays_while_nobody_can_tell(coordinator: str) -> None:
    stage = tells(training(), metrics={"loss": "NaN"}, non_finite=FOUND).settle()
    stage.link = None if coordinator == "away" else link(remote("waiting"))
    plan = stage.decide()
    assert (plan.status.loss, reason_of(plan, "NonFinite")) == ("NaN", ("True", reasons.METRIC_NOT_FINITE))


@pytest.mark.parametrize("teller", ["the coordinator", "a worker"])
def test_a_job_that_ends_with_nan_is_complete_and_says_so(teller: str) -> None:
    stage = training()
    if teller == "the coordinator":
        stage.pods = stage.pods[:1]
        stage.link = link(remote("done", step=100, digest="abc", metrics={"loss": "NaN"}, non_finite=FOUND))
    else:
        word = TerminationMessage("done", step=100, digest="abc", metrics={"loss": "NaN"}, non_finite=FOUND)
        stage.pods, stage.link = [ended(pod, 0, word=word) for pod in stage.pods[1:]], None
    plan = stage.decide()
    assert (plan.status.phase, plan.status.loss) == ("Complete", "NaN")
    assert reason_of(plan, "NonFinite") == ("True", reasons.METRIC_NOT_FINITE)
    assert reason_of(plan, "Complete") == ("True", reasons.COMPLETE)
    assert reasons.METRIC_NOT_FINITE in noticed(plan)


@pytest.mark.parametrize("teller", ["the coordinator", "a worker"])
def test_a_job_that_is_to_stop_at_nan_has_failed_for_good(teller: str) -> None:
    stage = training(onNonFinite="Stop", backoffLimit=5)
    if teller == "the coordinator":
        stage.link = link(remote("failed", error="loss became NaN in step 41", non_finite=FOUND))
    else:
        word = TerminationMessage("failed", step=41, error="loss became NaN", non_finite=FOUND)
        swap(stage, ended(stage.pods[1], word=word))
    plan = stage.decide()
    assert plan.status.phase == "Failed"
    assert reason_of(plan, "Failed") == ("True", reasons.METRIC_NOT_FINITE)
    assert message_of(plan, "Failed") == "Loss became NaN in step 41, and the job is to stop then (onNonFinite)"


def test_a_job_that_goes_on_after_nan_and_crashes_is_tried_again() -> None:
    stage = training(backoffLimit=5)
    stage.link = link(remote("failed", error="ValueError: odd batch", non_finite=FOUND))
    assert stage.decide().status.phase == "BackOff"


# --- checkpoints ------------------------------------------------------------------------------------------------------

CLAIM = {"volume": {"persistentVolumeClaim": {"claimName": "c"}}}
WHY = "the checkpoint of step 40 was not written to /virtualflow/checkpoints (No space left on device): free some space"


def test_the_copy_in_the_coordinators_memory_is_told_as_long_as_there_is_one() -> None:
    stage = tells(
        training(checkpoint={**CLAIM, "memory": True}), memory_copy=MemoryCopyState(30, NOW - 2, 9_000)
    ).settle()
    status = stage.job.status
    assert (status.memory_copy_step, status.memory_copy_time) == (30, format_time(NOW - 2))
    assert status.memory_copy_bytes == 9_000
    told = sample(stage.job.spec, status, 2)
    assert (told.memory_copy_step, told.memory_copy_timestamp_seconds) == (30, NOW - 2)
    assert told.memory_copy_bytes == 9_000
    stage.link = link(remote("training"))  # a new coordinator
    status = stage.decide().status
    assert (status.memory_copy_step, status.memory_copy_time, status.memory_copy_bytes) == (None, None, None)
    told = sample(stage.job.spec, status, 2)
    assert (told.memory_copy_step, told.memory_copy_timestamp_seconds, told.memory_copy_bytes) == (None, None, None)


def test_what_the_coordinator_has_counted_is_measured() -> None:
    stage = training()
    told = sample(stage.job.spec, stage.job.status, 2, WorkerSeconds(40.0, 30.0))
    assert (told.paid_worker_seconds, told.committed_worker_seconds) == (40.0, 30.0)
    told = sample(stage.job.spec, stage.job.status, 2)
    assert (told.paid_worker_seconds, told.committed_worker_seconds) == (None, None), "no series, rather than zeros"


def test_a_checkpoint_that_cannot_be_written_is_a_condition_until_one_is_complete() -> None:
    stage = tells(training(checkpoint=CLAIM), checkpoint=CheckpointState(NOW - 100, 20, NOW - 100)).settle()
    assert "CheckpointFailed" not in conditions(stage)
    assert (stage.job.status.checkpoint_step, stage.job.status.checkpoint_time) == (20, format_time(NOW - 100))

    plan = tells(stage, checkpoint=CheckpointState(NOW - 1, 20, NOW - 100, WHY)).decide()
    assert reason_of(plan, "CheckpointFailed") == ("True", reasons.CHECKPOINT_NOT_WRITTEN)
    assert message_of(plan, "CheckpointFailed") == f"T{WHY[1:]}."
    assert [(event.reason, event.warning) for event in plan.events] == [(reasons.CHECKPOINT_NOT_WRITTEN, True)]
    told = sample(stage.job.spec, plan.status, 2)
    assert (told.checkpoint_failed, told.last_checkpoint_timestamp_seconds) == (1, NOW - 100)
    stage.write(plan)
    stage.link = link(remote("waiting"))
    assert reason_of(stage.decide(), "CheckpointFailed")[0] == "True", "a new coordinator has not heard of it yet"

    stage.link = link(remote("training", checkpoint=CheckpointState(NOW + 60, 60, NOW + 60)))
    plan = stage.decide(NOW + 61)
    assert reason_of(plan, "CheckpointFailed") == ("False", reasons.CHECKPOINT_WRITTEN)
    assert message_of(plan, "CheckpointFailed") == "The checkpoint of step 60 is complete."
    told = sample(stage.job.spec, plan.status, 2)
    assert (told.checkpoint_failed, told.last_checkpoint_timestamp_seconds) == (0, NOW + 60)


def test_the_age_of_a_checkpoint_counts_from_the_start_of_a_job_that_has_none_yet() -> None:
    stage = training(checkpoint=CLAIM)
    told = sample(stage.job.spec, stage.job.status, 2)
    assert told.last_checkpoint_timestamp_seconds == NOW - 100
    without = training()
    told = sample(without.job.spec, without.job.status, 2)
    assert (told.checkpoint_failed, told.last_checkpoint_timestamp_seconds) == (None, None)


def suspended(**checkpoint: Any) -> Stage:
    """A job whose workers have been told to stop: one has left, the other one writes the checkpoint."""
    stage = edit(training(checkpoint=CLAIM | checkpoint), suspend=True)
    plan = stage.decide()
    assert plan.wake_at == NOW + 30 + (checkpoint or {"timeoutSeconds": 300})["timeoutSeconds"]
    stage.write(plan)
    swap(stage, ended(stage.pods[2], 0, word=TerminationMessage("left", step=41)))
    writes = seen(stage.pods[1], "ready", 0, 0)
    stage.link = link(remote("stopped", writes, step=41, checkpoint=CheckpointState(NOW - 9, 20, NOW - 9)))
    return stage


def left(stage: Stage, **word: Any) -> Stage:
    return swap(stage, ended(stage.pods[1], 0, word=TerminationMessage("left", step=41, **word)))


@pytest.mark.parametrize("teller", ["the coordinator", "the worker"])
def test_a_suspension_waits_for_its_checkpoint_and_names_the_step(teller: str) -> None:
    stage = suspended()
    for later in (1, 200, 329):
        plan = stage.decide(NOW + later)
        assert (deleted(plan), plan.status.phase) == (["digits-workers-1"], "Suspending")
    if teller == "the coordinator":
        tells(stage, checkpoint=CheckpointState(NOW + 5, 41, NOW + 5))
        left(stage)
    else:
        left(stage, checkpoint=41)
    plan = stage.decide(NOW + 6)
    assert plan.status.phase == "Suspended"
    assert message_of(plan, "Suspended") == "The workers have left. It resumes from its checkpoint of step 41."
    stage.write(plan)
    edit(stage, suspend=False)
    events = [event.message for event in stage.decide(NOW + 60).events]
    assert "resuming from the checkpoint of step 41" in events


def test_a_suspension_does_not_wait_for_its_checkpoint_for_ever() -> None:
    stage = suspended(timeoutSeconds=60)
    assert deleted(stage.decide(NOW + 89)) == ["digits-workers-1"]
    stage.write(stage.decide(NOW + 89))
    assert sorted(deleted(stage.decide(NOW + 90))) == ["digits-workers-0", "digits-workers-1"]
    left(stage)
    told = message_of(stage.decide(NOW + 95), "Suspended")
    assert told.endswith("No checkpoint of step 41 was confirmed: it resumes from that of step 20, to the same bits.")


def test_a_suspension_whose_checkpoint_fails_is_not_held_up_and_says_so() -> None:
    stage = tells(suspended(), checkpoint=CheckpointState(NOW, 20, NOW - 9, WHY))
    assert sorted(deleted(stage.decide(NOW + 1))) == ["digits-workers-0", "digits-workers-1"]
    plan = left(stage).decide(NOW + 2)
    assert reason_of(plan, "CheckpointFailed")[0] == "True"
    assert "it resumes from that of step 20" in message_of(plan, "Suspended")


# --- memory -----------------------------------------------------------------------------------------------------------

PLAN = "of 14 blocks 9 stay, 0 are swapped and 5 recomputed"
TOO_SMALL = "the model does not fit into 10.0 KiB of the device's memory: the smallest budget that works is 38.6 KiB"
SWAPS = MemoryReport(2, 2, 2, "digits-workers-0", PLAN)
MEASURES = MemoryReport(1, 0, 0)
KEEPS = MemoryReport(1, 1, 0)


def memory_of(plan: JobPlan) -> dict[str, tuple[str, str]]:
    """What a plan says of memory: status and reason of the two conditions that there are."""
    return {
        condition.type: (condition.status, condition.reason)
        for condition in plan.status.conditions
        if condition.type in ("DoesNotFit", "FitsWithOffload")
    }


OFFLOADS = {"FitsWithOffload": ("True", reasons.ACTIVATIONS_OFFLOADED)}


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        pytest.param(None, None, {}, id="nobody says anything"),
        pytest.param(None, MemoryReport(0, 0, 0), {}, id="nobody has a budget"),
        pytest.param(None, MEASURES, {}, id="blocks are measured"),
        pytest.param(None, KEEPS, {}, id="all is kept"),
        pytest.param(None, SWAPS, OFFLOADS, id="activations are swapped"),
        pytest.param(None, MemoryReport(3, 1, 1, "digits-workers-0", PLAN), OFFLOADS, id="one of three has a plan"),
        pytest.param(SWAPS, None, OFFLOADS, id="a new coordinator does not know yet"),
        pytest.param(SWAPS, MEASURES, OFFLOADS, id="its successor measures"),
        pytest.param(SWAPS, KEEPS, {"FitsWithOffload": ("False", reasons.ACTIVATIONS_KEPT)}, id="its successor keeps"),
        pytest.param(
            SWAPS,
            MemoryReport(0, 0, 0),
            {"FitsWithOffload": ("False", reasons.ACTIVATIONS_KEPT)},
            id="the budget is taken away",
        ),
    ],
)
def test_a_job_says_whether_it_fits_with_offload(
    before: MemoryReport | None, now: MemoryReport | None, found: dict[str, tuple[str, str]]
) -> None:
    stage = tells(training(), memory=before).settle()
    assert memory_of(tells(stage, memory=now).decide()) == found


@pytest.mark.parametrize(
    ("offloading", "who"),
    [(1, "digits-workers-0"), (2, "digits-workers-0 and 1 other"), (4, "digits-workers-0 and 3 others")],
)
def test_the_plan_that_offloads_is_told_in_words(offloading: int, who: str) -> None:
    report = MemoryReport(4, 4, offloading, "digits-workers-0", PLAN)
    told = message_of(tells(training(), memory=report).decide(), "FitsWithOffload")
    assert told == f"Activations are swapped or recomputed by {who}: {PLAN}."


def test_a_job_that_does_not_fit_says_what_would_until_it_does() -> None:
    stage = tells(training(backoffLimit=5), memory=SWAPS).settle()
    stage.link = link(remote("failed", error=TOO_SMALL, does_not_fit=True, memory=SWAPS))
    plan = stage.decide()
    assert plan.status.phase == "BackOff"
    no_plan = {kind: (status, reasons.NO_PLAN_FITS) for kind, status in
               (("DoesNotFit", "True"), ("FitsWithOffload", "False"))}  # fmt: skip
    assert memory_of(plan) == no_plan
    assert message_of(plan, "DoesNotFit") == f"T{TOO_SMALL[1:]}."
    assert (reasons.NO_PLAN_FITS, True) in [(event.reason, event.warning) for event in plan.events]
    stage.write(plan)

    fresh = training(attempt=1, backoffLimit=5)
    for report, found in (
        (None, no_plan),
        (MEASURES, no_plan),
        (KEEPS, {"DoesNotFit": ("False", reasons.PLANS_FIT), "FitsWithOffload": ("False", reasons.ACTIVATIONS_KEPT)}),
    ):
        fresh.raw["status"]["conditions"] = stage.raw["status"]["conditions"]
        assert memory_of(tells(fresh, memory=report).decide()) == found


def test_a_job_that_never_fits_has_failed_and_says_what_would() -> None:
    stage = training(backoffLimit=0)
    stage.link = link(remote("failed", error=TOO_SMALL, does_not_fit=True))
    plan = stage.decide()
    assert plan.status.phase == "Failed"
    assert memory_of(plan) == {"DoesNotFit": ("True", reasons.NO_PLAN_FITS)}
    assert TOO_SMALL in message_of(plan, "Failed")


def test_a_failure_of_another_kind_says_nothing_of_memory() -> None:
    stage = training(backoffLimit=0)
    stage.link = link(remote("failed", error="ValueError: odd batch"))
    assert memory_of(stage.decide()) == {}


# --- a group that does not fit ----------------------------------------------------------------------------------------

SMALL = {"memory": {"device": "10Ki"}}
NAMED = f"Worker group small: {TOO_SMALL}."


def mixed() -> Stage:
    """A job that trains on two large devices and a small one."""
    stage = training(workerGroups=[group("workers"), group("small", **SMALL)], replicas=3)
    small = worker(stage.job, 0, group="small", ip="10.1.0.40", node="node-4")
    stage.pods.append(small)
    known = [seen(pod) for pod in stage.pods[1:]]
    return tells(stage, workers=tuple(known), wanted=3).settle()


def refuse(stage: Stage, pod: Pod, *, ends: bool) -> Pod:
    """Nothing fits into its memory: the coordinator goes on without it, and knows why; or it says so itself."""
    others = [seen(other) for other in stage.pods[1:] if other is not pod]
    lost = msgspec.structs.replace(given_up(pod, TOO_SMALL), ended=True, does_not_fit=True)
    if not ends:
        tells(stage, workers=tuple(others), lost=(lost,))
        return pod
    tells(stage, workers=tuple(others))
    word = TerminationMessage("failed", step=3, error=TOO_SMALL, does_not_fit=True)
    gone = ended(pod, 1, word=word)
    swap(stage, gone)
    return gone


@pytest.mark.parametrize("ends", [False, True], ids=["by the coordinator's word", "by its own"])
def test_only_the_group_that_does_not_fit_is_done_without(ends: bool) -> None:
    stage = mixed()
    refuse(stage, stage.pods[3], ends=ends)
    plan = stage.decide()
    assert plan.status.phase == "Running"
    assert memory_of(plan) == {"DoesNotFit": ("True", reasons.NO_PLAN_FITS)}
    assert message_of(plan, "DoesNotFit") == NAMED
    assert (reasons.NO_PLAN_FITS, True) in [(event.reason, event.warning) for event in plan.events]
    assert plan.status.failures.count == 0, "nobody's crash"
    assert deleted(plan) == ["digits-small-0"]
    assert created(plan) == ["digits-workers-2"], "no worker of the group that would be refused again"


def test_a_group_with_other_memory_is_tried_again() -> None:
    stage = mixed()
    only = [group("workers", maxReplicas=2), group("small", **SMALL)]
    edit(stage, workerGroups=only)
    stage.verdict = verdict_of(stage.raw)
    stage.settle()
    refuse(stage, stage.pods[3], ends=False)
    plan = stage.decide()
    assert created(plan) == [], "the other group is full"
    assert "nothing fits into the memory of worker group small" in message_of(plan, "Degraded")
    stage.write(plan)
    stage.pods.pop()
    edit(stage, workerGroups=[only[0], group("small", memory={"device": "40Ki"})])
    stage.verdict = verdict_of(stage.raw)
    plan = stage.decide()
    assert created(plan) == ["digits-small-0"]
    assert plan.status.failures.unfit == ()
    stage.write(plan)
    assert memory_of(tells(stage, memory=SWAPS).decide())["DoesNotFit"] == ("False", reasons.PLANS_FIT)


def test_a_job_of_which_nobody_is_left_names_the_groups_and_tries_all_again() -> None:
    stage = training(workerGroups=[group(**SMALL)], backoffLimit=5)
    lost = tuple(
        msgspec.structs.replace(given_up(pod, TOO_SMALL), ended=True, does_not_fit=True) for pod in stage.pods[1:]
    )
    stage.link = link(remote("failed", error=TOO_SMALL, does_not_fit=True, lost=lost))
    plan = stage.decide()
    assert (plan.status.phase, plan.status.attempt, plan.status.failures.count) == ("BackOff", 1, 1)
    assert message_of(plan, "DoesNotFit") == f"Worker group workers: {TOO_SMALL}."
    assert plan.status.failures.unfit == ()


def test_a_group_is_tried_again_when_no_worker_is_left_and_no_other_group_may_have_one() -> None:
    """Another one was there when it was refused, and has died since: whether that is once too often, others decide."""
    stage = training(workerGroups=[group(**SMALL)])
    refuse(stage, stage.pods[1], ends=False)
    plan = stage.decide()
    assert created(plan) == []
    stage.write(plan)
    stage.pods = stage.pods[:1]
    tells(stage, phase="waiting", workers=())
    assert len(created(stage.decide())) == 2

"""What is amiss in a training that goes on: conditions that come when there is something to say, and stay."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from scenes import NOW, Stage, ended, link, message_of, noticed, reason_of, remote, seen, swap, training

from virtualflow.protocol.messages import NonFinite
from virtualflow.protocol.metrics import Metric
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator import reasons
from virtualflow_operator.controllers.job_controller import sample

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
    told = sample(plan.status, 2)
    assert (told.non_finite, str(told.loss)) == (1, {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}[value])
    stage.write(plan)
    assert stage.decide().events == ()


def test_metrics_that_are_finite_again_do_not_hide_what_was() -> None:
    stage = tells(training(), metrics={"loss": "NaN"}, non_finite=FOUND).settle()
    plan = tells(stage, step=50, metrics={"loss": 0.5}).decide(NOW + 60)
    assert (plan.status.loss, reason_of(plan, "NonFinite")) == ("0.5", ("False", reasons.METRICS_FINITE))
    assert message_of(plan, "NonFinite") == "loss became NaN in step 41, and all metrics are finite again."
    assert sample(plan.status, 2).non_finite == 0


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
        known = [seen(pod, "done") for pod in stage.pods[1:]]
        stage.link = link(remote("done", *known, step=100, digest="abc", metrics={"loss": "NaN"}, non_finite=FOUND))
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

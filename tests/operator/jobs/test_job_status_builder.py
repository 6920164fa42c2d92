"""How a job looks from outside: conditions that keep still, progress, and the events that a change is worth."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from scenes import (
    NOW,
    SETTINGS,
    Stage,
    accepted,
    body,
    change,
    edit,
    homeless,
    kinds,
    link,
    message_of,
    noticed,
    pending,
    reason_of,
    remote,
    seen,
    swap,
    training,
    verdict_of,
)

from virtualflow.protocol.http_api import ProcessStatus
from virtualflow.protocol.job_view import describe_change
from virtualflow.protocol.messages import CheckpointState, Generation
from virtualflow_operator import reasons
from virtualflow_operator.api.job import JobStatus
from virtualflow_operator.api.objects import Node, format_time
from virtualflow_operator.jobs.actions import ReadEvents
from virtualflow_operator.jobs.reconcile import events_of_change
from virtualflow_operator.jobs.scene import PodEvent


def progress(stage: Stage, **facts: Any) -> Stage:
    assert stage.link is not None
    assert stage.link.status is not None
    stage.link = dataclasses.replace(stage.link, status=msgspec.structs.replace(stage.link.status, **facts))
    return stage


def test_what_the_coordinator_says_is_in_the_status() -> None:
    stage = progress(training(), step=41, epoch=2, metrics={"loss": 0.123456789}, steps_per_second=12.345, generation=3)
    status = stage.decide().status
    assert (status.step, status.total_steps, status.epoch, status.loss) == (41, 100, 2, "0.123457")
    assert (status.steps_per_second, status.generation) == ("12.35", 3)
    shares = [(share.worker, share.virtual_nodes, share.node) for share in status.assignment]
    assert shares == [("digits-workers-0", "0-3", "node-0"), ("digits-workers-1", "4-7", "node-1")]


def test_a_worker_of_two_processes_counts_once_and_has_the_virtual_nodes_of_both() -> None:
    stage = training()
    assert stage.link is not None
    assert stage.link.status is not None
    parts = [((0, 2), (4, 6)), ((2, 4), (6, 8))]
    workers = tuple(
        msgspec.structs.replace(
            worker,
            first=of_it[0][0],
            last=of_it[1][1],
            processes=tuple(ProcessStatus(rank, 7 + rank, *part) for rank, part in enumerate(of_it)),
        )
        for worker, of_it in zip(stage.link.status.workers, parts, strict=True)
    )
    status = progress(stage, workers=workers).decide().status
    assert (status.workers, status.ready_replicas) == ("2/2", 2)
    assert [share.virtual_nodes for share in status.assignment] == ["0-1, 4-5", "2-3, 6-7"]


def test_the_measured_and_the_predicted_duration_of_a_step_are_in_the_status() -> None:
    stage = progress(training(), step_ms=12.3456, predicted_step_ms=12.0)
    status = stage.decide().status
    assert (status.step_milliseconds, status.predicted_step_milliseconds) == ("12.35", "12")
    stage.write(stage.decide())
    status = progress(stage, step_ms=None, predicted_step_ms=None).decide().status
    assert (status.step_milliseconds, status.predicted_step_milliseconds) == ("12.35", None)


def test_goodput_is_in_the_status_and_stays_while_a_new_coordinator_knows_none() -> None:
    stage = progress(training(), goodput=0.96449)
    assert stage.decide().status.goodput == "0.964"
    stage.write(stage.decide())
    assert progress(stage, goodput=None).decide().status.goodput == "0.964"


def test_moved_virtual_nodes_are_told_as_what_they_are() -> None:
    stage = training()
    before = stage.job.status
    moved = change(7, "rebalance", from_=2, to=2, reason="digits-workers-1 is slow")
    stage = progress(stage, changes=(moved,), last_change=moved, changes_total=1)
    after = stage.decide().status
    [notice] = events_of_change(before, after, [moved])
    assert (notice.reason, notice.warning) == (reasons.REBALANCED, False)
    assert notice.message == describe_change(moved)


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"phase": "waiting"}, id="one that waits"),
        pytest.param({"phase": "stopped", "step": 0, "total_steps": None}, id="one that was stopped while it waited"),
    ],
)
def test_a_coordinator_without_workers_does_not_take_back_what_is_known(facts: dict[str, Any]) -> None:
    stage = training()
    before = stage.job.status
    stage.link = link(remote(**facts))
    status = stage.decide().status
    assert (status.step, status.total_steps, status.generation) == (before.step, before.total_steps, before.generation)


LOST: dict[str, Any] = {"pause_ms": 1500.0, "from_": 2, "to": 1, "reason": "w lost"}


def test_changes_are_counted_once_and_told() -> None:
    stage = training()
    changes = (change(2), change(3, "lost", repeated_steps=1, repeated_virtual_nodes=2, **LOST))
    progress(stage, generation=3, changes=changes, last_change=changes[-1], changes_total=2, repeated_steps=1)
    plan = stage.decide()
    assert (plan.status.changes, plan.status.repeated_steps, plan.changes) == (2, 1, changes)
    last = plan.status.last_change
    assert last is not None
    assert (last.before, last.to, last.cause, last.pause_milliseconds) == (2, 1, "lost", 1500)
    assert (last.repeated_steps, last.repeated_virtual_nodes) == (1, 2)
    assert noticed(plan) == [reasons.RESIZED, reasons.RECOVERED]
    assert [event.message for event in plan.events] == [describe_change(each) for each in changes]
    stage.write(plan)
    plan = stage.decide()
    assert (plan.changes, plan.events, plan.status.changes, plan.status.repeated_steps) == ((), (), 2, 1)


@pytest.mark.parametrize(
    ("checkpoint", "told"),
    [
        pytest.param(
            None,
            "began anew from the first step: no worker and no coordinator is left that had step 40, and there is no "
            "checkpoint; 40 steps repeated",
            id="without a checkpoint",
        ),
        pytest.param(
            CheckpointState(NOW, 2, NOW - 60),
            "started again from step 2: no worker and no coordinator is left that had step 40; 38 steps repeated",
            id="from a checkpoint",
        ),
        pytest.param(
            CheckpointState(NOW, 30, NOW - 60),
            "started again from a checkpoint before that of step 30, which cannot be used: no worker and no "
            "coordinator is left that had step 40",
            id="from an older checkpoint",
        ),
    ],
)
def test_a_job_of_which_nothing_was_left_says_from_where_it_began_again(
    checkpoint: CheckpointState | None, told: str
) -> None:
    """A new coordinator knows nothing of the training that was lost: to it this is the first generation."""
    stage = training()
    assert stage.job.status.step == 40
    stage.link = link(remote("waiting", incarnation=2))
    stage.write(stage.decide())
    known = [seen(pod) for pod in stage.pods[1:]]
    stage.link = link(remote("training", *known, incarnation=2, step=3, checkpoint=checkpoint))
    plan = stage.decide()
    assert [(e.reason, e.message) for e in plan.events if e.warning] == [(reasons.RESTARTED, told)]
    stage.write(plan)
    assert stage.decide().events == ()


def test_a_coordinator_that_remembers_the_training_tells_of_a_restart_itself() -> None:
    """It begins the next generation before it hears of the change."""
    plan = progress(training(), generation=2, step=0).decide()
    assert plan.events == ()


@pytest.mark.parametrize(
    ("step", "repeated", "told"),
    [
        (1, 746, "0 workers → 3 workers at step 1 (no worker survived): 746 steps repeated"),
        (101, 0, "0 workers → 3 workers at step 101 (no worker survived): 0 steps repeated"),
    ],
)
def test_that_no_worker_survived_is_a_warning_which_says_from_where_it_goes_on(
    step: int, repeated: int, told: str
) -> None:
    stage = training()
    facts: dict[str, Any] = {"step": step, "repeated_steps": repeated, "pause_ms": None, "from_": 0, "to": 3}
    again = change(3, "restart", reason="no worker survived", **facts)
    plan = progress(stage, generation=3, changes=(again,), last_change=again, changes_total=1).decide()
    assert [(n.reason, n.message, n.warning) for n in plan.events] == [(reasons.RESTARTED, told, True)]
    last = plan.status.last_change
    assert last is not None
    assert (last.before, last.to, last.cause, last.repeated_steps) == (0, 3, "restart", repeated)


def test_changes_of_a_new_coordinator_are_new_also_when_its_numbers_are_lower() -> None:
    stage = training()
    stage.write(progress(stage, generation=9, changes=(change(9),), last_change=change(9)).decide())
    later = msgspec.structs.replace(change(2), generation=Generation(2, 2))
    progress(stage, incarnation=2, generation=2, changes=(change(9), later), last_change=later)
    assert stage.decide().changes == (later,)


def test_a_coordinator_that_has_not_heard_of_the_last_change_does_not_take_it_back() -> None:
    stage = training()
    changes = (change(4), change(5, "restart", pause_ms=None))
    stage.write(progress(stage, generation=5, changes=changes, last_change=changes[-1]).decide())
    known = stage.job.status.last_change
    plan = progress(stage, generation=5, changes=changes[:1], last_change=changes[0]).decide()
    assert (plan.status.last_change, plan.changes) == (known, ())
    stage.write(plan)
    assert progress(stage, generation=5, changes=changes, last_change=changes[-1]).decide().changes == ()


def test_a_coordinator_that_remembers_fewer_changes_takes_none_back() -> None:
    stage = training()
    stage.write(progress(stage, changes_total=5, repeated_steps=2).decide())
    status = progress(stage, changes_total=0, repeated_steps=0).decide().status
    assert (status.changes, status.repeated_steps) == (5, 2)


def test_the_time_of_a_condition_changes_only_with_its_status() -> None:
    stage = training()
    began = {c.type: c.last_transition_time for c in stage.job.status.conditions}
    stage.pods = stage.pods[:2]
    stage.link = link(remote("training", seen(stage.pods[1])))
    plan = stage.decide(NOW + 60)
    times = {c.type: c.last_transition_time for c in plan.status.conditions}
    assert times.pop("Degraded") == format_time(NOW + 60)
    began.pop("Degraded")
    assert times == began, "another reason is no other status"
    stage.write(plan)
    assert stage.write(stage.decide(NOW + 120)) == {}


def test_every_condition_is_there_from_the_beginning_and_says_which_generation_it_has_seen() -> None:
    conditions = Stage(body(), [], None, {}, None).decide().status.conditions
    always = {"Ready", "Progressing", "Degraded", "Suspended", "Complete", "Failed"}
    assert {c.type for c in conditions} == always | {"Reconciling"}
    assert {c.observed_generation for c in conditions} == {1}
    assert all(c.reason and c.message and c.last_transition_time for c in conditions)


def waiting(**facts: Any) -> Stage:
    stage = training(1)
    raw = accepted(body(replicas=1), phase="Pending")
    stage = Stage(raw, stage.pods, stage.service, stage.nodes, link(remote("waiting", wanted=1)))
    return swap(stage, pending(stage.pods[1], **facts))


@pytest.mark.parametrize(
    ("stage", "reason", "said"),
    [
        pytest.param(
            waiting(node="node-0", waiting="ImagePullBackOff: no such image"),
            reasons.CANNOT_START,
            "digits-workers-0 cannot start: ImagePullBackOff: no such image",
            id="an image that is not there",
        ),
        pytest.param(
            swap(waiting(), homeless(waiting().pods[1])),
            reasons.UNSCHEDULABLE,
            "No node takes digits-workers-0: 0/3 nodes are available: 3 Insufficient cpu.",
            id="no room now",
        ),
        pytest.param(
            swap(waiting(), dataclasses.replace(homeless(waiting().pods[1]), requests=({"cpu": "64"},))),
            reasons.UNSCHEDULABLE,
            "No node takes digits-workers-0: it requests cpu=64 and the largest node has 8; lower",
            id="no room ever",
        ),
    ],
)
def test_why_a_job_does_not_begin_is_said_in_a_condition_and_once_in_an_event(
    stage: Stage, reason: str, said: str
) -> None:
    stage.nodes = {name: Node(name, allocatable={"cpu": "8"}) for name in ("node-0", "node-c")}
    plan = stage.decide()
    assert reason_of(plan, "Progressing") == ("False", reason)
    assert message_of(plan, "Progressing").startswith(said)
    assert noticed(plan) == [reason]
    stage.write(plan)
    assert stage.decide().events == ()


MOUNT = 'FailedMount: MountVolume.SetUp failed for volume "data": configmap "data" not found'


def test_a_pod_that_does_not_start_is_explained_by_its_latest_event() -> None:
    stage = waiting(node="node-0")
    plan = stage.decide()
    (pod,) = (pod for pod in stage.pods if pod.phase == "Pending")
    assert [action for action in plan.actions if isinstance(action, ReadEvents)] == [ReadEvents(pod.name, pod.uid)]
    assert reason_of(plan, "Degraded") == ("Unknown", reasons.STARTING)
    assert message_of(plan, "Progressing").startswith("digits-workers-0 on node-0 has not started yet: no event")

    stage.events = {pod.uid: PodEvent(NOW, "Pulling: Pulling image large:1")}
    assert message_of(stage.decide(), "Progressing").endswith("has not started yet: Pulling: Pulling image large:1")
    stage.events = {pod.uid: PodEvent(NOW, MOUNT, warning=True)}
    plan = stage.decide()
    assert (kinds(plan.actions), plan.wake_at) == ([], NOW + SETTINGS.events_retry)
    assert reason_of(plan, "Progressing") == ("False", reasons.CANNOT_START)
    assert reason_of(plan, "Degraded") == ("True", reasons.CANNOT_START)
    assert message_of(plan, "Degraded") == f"digits-workers-0 cannot start: {MOUNT}"
    assert noticed(plan) == [reasons.CANNOT_START]
    assert kinds(stage.decide(NOW + SETTINGS.events_retry).actions) == ["ReadEvents"]


@pytest.mark.parametrize("facts", [{"created": NOW - 5}, {"preparing": True}], ids=["young", "with an init container"])
def test_a_pod_that_may_take_its_time_is_not_looked_into(facts: dict[str, Any]) -> None:
    plan = waiting(node="node-0", **facts).decide()
    assert (kinds(plan.actions), reason_of(plan, "Degraded")) == ([], ("False", reasons.AS_WANTED))
    assert message_of(plan, "Progressing") == "Workers are starting."


def test_a_joiner_that_cannot_start_is_explained_while_the_others_train() -> None:
    stage = training()
    swap(stage, pending(stage.pods[2], node="node-1"))
    stage.link = link(remote("training", seen(stage.pods[1])))
    assert "ReadEvents" in kinds(stage.decide().actions)
    stage.events = {stage.pods[2].uid: PodEvent(NOW, MOUNT, warning=True)}
    assert f"digits-workers-1 cannot start: {MOUNT}" in message_of(stage.decide(), "Degraded")


def test_a_worker_that_runs_and_never_calls_is_named() -> None:
    stage = waiting(node="node-0", phase="Running", ip="10.1.0.10")
    plan = stage.decide()
    assert reason_of(plan, "Degraded") == ("Unknown", reasons.STARTING)
    said = "digits-workers-0 on node-0 runs and has not called its coordinator at 10.0.0.1, port 7700"
    assert message_of(plan, "Progressing").startswith(said)
    called = link(remote("waiting", seen(stage.pods[1], "starting"), wanted=1))
    stage.link = called
    assert message_of(stage.decide(), "Progressing") == "Workers are starting."


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        pytest.param(swap(waiting(), homeless(waiting().pods[1])), reasons.UNSCHEDULABLE, id="no node"),
        pytest.param(edit(waiting(), minReplicas=0), reasons.INVALID_SPEC, id="no sense"),
        pytest.param(
            Stage(body(), [], None, {}, None, verdict_of(body(), "no")), reasons.TEMPLATE_REJECTED, id="no pod"
        ),
    ],
)
def test_a_job_that_cannot_start_is_not_as_wanted(stage: Stage, reason: str) -> None:
    assert reason_of(stage.decide(), "Degraded") == ("True", reason)


@pytest.mark.parametrize(
    ("plaintext", "way_out"), [(True, "its former key back, or suspend"), (False, "the pods get certificates by it")]
)
def test_a_coordinator_that_refuses_the_operator_is_said_so_and_what_ends_that(plaintext: bool, way_out: str) -> None:
    stage = training()
    assert stage.link is not None
    stage.raw["status"]["plaintext"] = plaintext
    stage.link = dataclasses.replace(stage.link, connected=False, refused="the token is another job's")
    plan = stage.decide(NOW - 45)
    assert reason_of(plan, "Ready") == ("Unknown", reasons.TOKEN_REFUSED)
    assert "another job's" in message_of(plan, "Ready")
    assert way_out in message_of(plan, "Ready")


def test_a_coordinator_of_a_version_too_far_away_is_said_so() -> None:
    stage = training()
    assert stage.link is not None
    stage.link = dataclasses.replace(stage.link, connected=False, refused="it speaks protocol 9", incompatible=True)
    plan = stage.decide(NOW - 45)
    assert plan.actions == ()
    assert reason_of(plan, "Ready") == ("Unknown", reasons.PROTOCOL_MISMATCH)
    assert "(it speaks protocol 9); workers that train go on" in message_of(plan, "Ready")


def test_a_coordinator_that_misbehaves_is_said_so() -> None:
    stage = training()
    assert stage.link is not None
    stage.link = dataclasses.replace(stage.link, connected=False, misbehaves="it sends its callers elsewhere")
    plan = stage.decide(NOW - 45)
    assert reason_of(plan, "Ready") == ("Unknown", reasons.COORDINATOR_MISBEHAVES)
    assert "elsewhere" in message_of(plan, "Ready")


def test_a_coordinator_that_is_left_alone_for_its_neighbours_is_said_so_and_stays() -> None:
    stage = training()
    assert stage.link is not None
    busy = "those of the namespace ml say most"
    stage.link = dataclasses.replace(stage.link, connected=False, since=NOW - 3_600, status=None, busy=busy)
    plan = stage.decide(NOW)
    assert plan.actions == ()
    assert reason_of(plan, "Ready") == ("Unknown", reasons.TOO_BUSY)
    assert busy in message_of(plan, "Ready")


def test_a_message_is_never_longer_than_people_read() -> None:
    stage = training(backoffLimit=0)
    stage.link = link(remote("failed", error="E" * 9_000))
    assert len(message_of(stage.decide(), "Failed")) <= 4_096


def test_the_beginning_of_the_training_is_an_event_of_its_own() -> None:
    fresh, begun = JobStatus(), msgspec.structs.replace(JobStatus(), phase="Running", ready_replicas=2, step=40)
    assert [n.message for n in events_of_change(fresh, begun, [])] == ["training with 2 workers"]
    again = msgspec.structs.replace(fresh, attempt=1)
    assert [n.message for n in events_of_change(again, begun, [])] == ["training with 2 workers, from step 40"]
    assert events_of_change(begun, begun, []) == []

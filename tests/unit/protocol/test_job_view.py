"""What people are shown of a job: one view, from which everything that shows it takes its words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from statuses import coordinator_status
from virtualflow.protocol.http_api import ENDED, Event, LostWorker, Status, WorkerSeconds, WorkerStatus
from virtualflow.protocol.job_view import describe_change, describe_status, view_change, view_job
from virtualflow.protocol.messages import Change, CheckpointState, Generation, NonFinite, RunResult

NOW = 10_000.0
MOVED = Change(Generation(1, 4), 71, 2, 2, "rebalance", "worker-0 is slow", 12.4, 0)
LOST = msgspec.structs.replace(
    MOVED, from_=3, cause="lost", reason="worker-2 is lost", repeated_steps=1, repeated_virtual_nodes=2
)
FIRST = WorkerStatus("worker-0", "a", "h", 11, "training", 0, 2, 30.0)
SECOND = WorkerStatus("worker-1", "b", "h", 12, "training", 2, 8, 10.04)
STEPS: dict[str, Any] = {"steps_per_second": 15.0, "step_ms": 66.6, "predicted_step_ms": 62.0}


@pytest.mark.parametrize(
    ("status", "progress"),
    [
        pytest.param(coordinator_status("waiting"), "step 0, epoch 0", id="waiting"),
        pytest.param(
            coordinator_status(began=NOW - 600, steps_per_second=0.5),
            "step 40 of 100, epoch 0, 10 min so far, about 2 min left",
            id="training",
        ),
        pytest.param(
            coordinator_status("evaluating", steps_per_second=0.5, run=2),
            "run 2, step 40 of 100, epoch 0",
            id="evaluating, in the second run of the script",
        ),
        pytest.param(
            coordinator_status(
                "done",
                step=100,
                began=NOW - 600,
                events=(Event(1, NOW - 540, "done", "complete"),),
                steps_per_second=3.0,
            ),
            "training complete after 100 steps, epoch 0, after 60 s",
            id="done, a while ago",
        ),
        pytest.param(
            coordinator_status("done", step=5, total_steps=80, stopped_early=True),
            "training stopped early by the script, 5 of 80 steps, epoch 0",
            id="stopped early by the script",
        ),
        pytest.param(coordinator_status("failed", steps_per_second=3.0), "step 40 of 100, epoch 0", id="failed"),
    ],
)
def test_a_view_says_where_the_training_is_and_how_long_it_takes(status: Status, progress: str) -> None:
    assert view_job(status, NOW).now.progress == progress


@pytest.mark.parametrize(
    ("phase", "worker", "state"),
    [
        ("training", FIRST, "training"),
        ("training", msgspec.structs.replace(FIRST, state="silent"), "silent"),
        ("failed", FIRST, "ended"),
        ("failed", msgspec.structs.replace(FIRST, state="silent"), "ended"),
        ("failed", msgspec.structs.replace(FIRST, state="silent", crashed=True), "crashed"),
        ("stopped", msgspec.structs.replace(FIRST, state="starting"), "ended"),
        ("done", msgspec.structs.replace(FIRST, state="ready"), "ended"),
        ("done", msgspec.structs.replace(FIRST, state="done"), "done"),
    ],
)
def test_a_job_that_is_over_has_no_worker_at_work(phase: str, worker: WorkerStatus, state: str) -> None:
    view = view_job(coordinator_status(phase, worker, **STEPS), NOW)
    assert [shown.state for shown in view.job.workers] == [state]
    over = phase in ENDED
    assert (view.now.over, view.now.training, view.now.steps_per_second) == (
        over,
        0 if over else 1,
        0 if over else 15.0,
    )
    assert {"Workers", "Speed"}.isdisjoint(fact.name for fact in (*view.now.facts, *view.job.facts)) == over


def test_a_lost_worker_is_missed_only_while_nobody_has_taken_its_place() -> None:
    lost = tuple(LostWorker(name, f"{name}-before", "h", "killed") for name in ("worker-0", "worker-7"))
    assert view_job(coordinator_status("training", FIRST, lost=lost), NOW).job.notes == ("Lost: worker-7 (killed).",)
    assert view_job(coordinator_status("waiting"), NOW).job.notes == ("No worker is there yet.",)


def test_a_slow_worker_is_named_while_the_job_is_not_over() -> None:
    slow = msgspec.structs.replace(FIRST, slowness=2.417)
    view = view_job(coordinator_status("training", slow, SECOND), NOW)
    assert view.job.notes == ("Slow, by what is usual for a virtual node: worker-0 (2.42 times as long).",)
    assert [(worker.state, worker.slow) for worker in view.job.workers] == [
        ("training, slow", True),
        ("training", False),
    ]
    crashed = msgspec.structs.replace(slow, crashed=True)
    (first, _) = view_job(coordinator_status("training", crashed, SECOND), NOW).job.workers
    assert (first.state, first.slow) == ("crashed", False)
    assert view_job(coordinator_status("done", slow, SECOND), NOW).job.notes == ()


def say(fact: str, status: Status) -> str:
    """What the view says of it; empty: nothing."""
    view = view_job(status, NOW)
    return next((str(one) for one in (*view.now.facts, *view.job.facts) if one.name == fact), "")


@pytest.mark.parametrize(
    ("phase", "saved", "said"),
    [
        ("training", None, ""),
        ("training", CheckpointState(NOW), "checkpoint: none"),
        ("training", CheckpointState(NOW, 30, NOW - 12), "checkpoint: step 30 (12 s ago)"),
        ("failed", None, "checkpoint: none (a restart repeats 40 steps)"),
        ("failed", CheckpointState(NOW, 39, NOW - 12), "checkpoint: step 39 (12 s ago; a restart repeats 1 step)"),
        (
            "failed",
            CheckpointState(NOW, 30, NOW - 12, "the disk is full"),
            "checkpoint: step 30 (the disk is full; a restart repeats 10 steps)",
        ),
        ("done", CheckpointState(NOW, 40, NOW), "checkpoint: step 40 (0 s ago)"),
    ],
)
def test_of_a_failed_job_it_is_said_which_checkpoint_is_left_and_what_a_restart_costs(
    phase: str, saved: CheckpointState | None, said: str
) -> None:
    assert say("Checkpoint", coordinator_status(phase, checkpoint=saved)) == said


COMES = WorkerStatus("worker-2", "c", "h", 13, "starting", 0, 0)
JOINED = msgspec.structs.replace(LOST, from_=2, to=3, cause="join", reason="worker-2 joins")


@pytest.mark.parametrize(
    ("workers", "facts", "note"),
    [
        pytest.param((FIRST, SECOND), {}, "", id="all are there"),
        pytest.param(
            (FIRST, SECOND),
            {"last_change": LOST},
            " (1 fewer since step 71: worker-2 is lost)",
            id="one fewer is wanted",
        ),
        pytest.param(
            (FIRST, SECOND, COMES),
            {"last_change": LOST, "wanted": 3},
            " (1 fewer since step 71: worker-2 is lost; worker-2 starting)",
            id="it is being replaced",
        ),
        pytest.param(
            (FIRST, SECOND, COMES, msgspec.structs.replace(COMES, worker="worker-3")),
            {"wanted": 4, "proposed": 5},
            " (worker-2 and 1 more starting; generation 5 is being prepared)",
            id="two more are wanted",
        ),
        pytest.param((FIRST, SECOND), {"last_change": JOINED, "wanted": 3}, "", id="another change came since"),
        pytest.param(
            (msgspec.structs.replace(FIRST, slowness=2.417), SECOND),
            {},
            " (worker-0 slow: 2.42 times as long)",
            id="one is slow",
        ),
    ],
)
def test_beside_the_number_of_workers_stands_who_is_missed_comes_or_is_slow(
    workers: tuple[WorkerStatus, ...], facts: dict[str, Any], note: str
) -> None:
    status = coordinator_status("training", *workers, **facts)
    assert say("Workers", status) == f"workers: 2 of {status.wanted} wanted{note}"


def test_everything_that_is_known_is_a_fact_and_what_is_not_is_none() -> None:
    facts = {
        "non_finite": NonFinite("loss", "NaN", 33),
        "worker_seconds": WorkerSeconds(200.0, 150.0),
        "checkpoint": CheckpointState(NOW, 20, NOW - 30),
        "proposed": 5,
        "hold": 60,
        "runs": (RunResult(1, 5, 80, "abc", {}, stopped_early=True),),
        "reproducibility": "bitwise",
    }
    view = view_job(coordinator_status("training", FIRST, **STEPS, **facts), NOW)
    assert [str(fact) for fact in (*view.now.facts, *view.job.facts)] == [
        "not finite: loss (NaN in step 33)",
        "speed: 15 steps/s",
        "median step: 66.6 ms a step (62 ms predicted)",
        "goodput: 75.0 % (of 3 min of workers' time)",
        "membership changes: 0 (0 steps repeated, generation 1)",
        "checkpoint: step 20 (30 s ago)",
        "workers: 1 of 2 wanted (generation 5 is being prepared)",
        "virtual nodes: 8 (bitwise)",
        "held: after step 60",
        "run 1: stopped early by the script, 5 of 80 steps, digest abc",
    ]
    bare = view_job(coordinator_status("training", FIRST, virtual_nodes=None), NOW)
    assert [fact.name for fact in (*bare.now.facts, *bare.job.facts)] == ["Membership changes", "Workers"]


def test_workers_stand_in_the_order_of_their_virtual_nodes_and_of_very_many_the_first_are_listed() -> None:
    idle = WorkerStatus("worker-2", "c", "h", 13, "ready", 0, 0)
    status = coordinator_status("training", idle, SECOND, FIRST)
    shown = [(worker.worker, worker.nodes, worker.pace) for worker in view_job(status, NOW).job.workers]
    assert shown == [("worker-0", "0-1", "30"), ("worker-1", "2-7", "10"), ("worker-2", "-", "-")]
    view = view_job(status, NOW, most=1)
    assert [worker.worker for worker in view.job.workers] == ["worker-0"]
    assert (view.job.notes, view.now.training) == (("Not listed: 2 more workers.",), 2)


@pytest.mark.parametrize(
    ("change", "said", "kind"),
    [
        (MOVED, "virtual nodes moved at step 71 (worker-0 is slow): pause 12 ms, 0 steps repeated", "moved"),
        (
            LOST,
            "3 workers → 2 workers at step 71 (worker-2 is lost): pause 12 ms, 1 step repeated, 2 virtual nodes "
            "computed again",
            "loss",
        ),
        (
            msgspec.structs.replace(LOST, pause_ms=None, run=2, cause="of a newer version"),
            "3 workers → 2 workers at step 71 of run 2 (worker-2 is lost): no survivor, 1 step repeated, 2 virtual "
            "nodes computed again",
            "other",
        ),
    ],
)
def test_a_membership_change_is_one_line_and_one_row(change: Change, said: str, kind: str) -> None:
    assert describe_change(change) == said
    row = view_change(change)
    assert (row.kind, row.row[3], row.row[4] in said) == (kind, change.reason, True)


def test_the_status_of_an_older_coordinator_is_shown() -> None:
    """It has none of the fields with a default."""
    fields = {field.encode_name for field in msgspec.structs.fields(Status) if field.required}
    told = msgspec.to_builtins(coordinator_status("training", FIRST))
    older = msgspec.json.decode(msgspec.json.encode({name: told[name] for name in fields}), type=Status)
    text = describe_status("digits", view_job(older, NOW))
    assert text.splitlines()[0] == "digits: training, step 40 of 100, epoch 0"
    assert ["worker-0", "0-1", "30", "training", "11"] in [line.split() for line in text.splitlines()]

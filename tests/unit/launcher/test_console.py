"""What a person reads of a running job: how fast its workers are, and what a step takes."""

from __future__ import annotations

import msgspec

from statuses import coordinator_status
from virtualflow.launcher.report import JobHistory, build_report
from virtualflow.launcher.status_text import describe_change, describe_progress, describe_status
from virtualflow.protocol.http_api import Event, WorkerStatus
from virtualflow.protocol.messages import Change, Generation

MOVED = Change(Generation(1, 4), 71, 2, 2, "rebalance", "worker-0 is slow", 12.4, 0)
WORKERS = (
    WorkerStatus("worker-0", "a", "h", 11, "training", 0, 2, 30.0),
    WorkerStatus("worker-1", "b", "h", 12, "training", 2, 8, 10.04),
)
STATUS = coordinator_status(
    "training", *WORKERS, step_ms=66.6, predicted_step_ms=62.0, changes=(MOVED,), last_change=MOVED
)


def test_the_status_shows_paces_and_both_step_times() -> None:
    text = describe_status("digits", STATUS)
    assert "step 66.6 ms (predicted 62)" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["worker-0", "0-1", "30", "training", "11"] in rows
    assert ["worker-1", "2-7", "10", "training", "12"] in rows


def test_what_is_not_measured_yet_is_not_shown() -> None:
    begun = coordinator_status("training", WorkerStatus("worker-0", "a", "h", 11, "training", 0, 8))
    assert "ms" not in describe_progress(begun)
    assert ["worker-0", "0-7", "-", "training", "11"] in [
        line.split() for line in describe_status("digits", begun).splitlines()
    ]


def test_a_move_of_virtual_nodes_is_told_as_one() -> None:
    assert describe_change(MOVED) == "virtual nodes moved at step 71 (worker-0 is slow): pause 12 ms, 0 steps repeated"


def test_a_loss_is_told_with_what_was_computed_again() -> None:
    lost = msgspec.structs.replace(MOVED, cause="lost", repeated_steps=1, repeated_virtual_nodes=2)
    assert describe_change(lost).endswith("pause 12 ms, 1 step repeated, 2 virtual nodes computed again")


def test_the_report_has_each_warning_once() -> None:
    history = JobHistory()
    events = [Event(0, 1.0, "warning", "odd"), Event(1, 1.0, "info", "well"), Event(2, 2.0, "warning", "odd")]
    for last in (1, 3):
        history.take(coordinator_status("training", events=tuple(events[:last])))
    assert build_report(history, None, "digits", 1.0)["warnings"] == ["odd"]


def test_the_report_keeps_the_paces_of_those_who_trained_and_the_prediction() -> None:
    history = JobHistory()
    history.take(STATUS)
    over = coordinator_status("done", step_ms=64.0)
    history.take(over)
    report = build_report(history, over, "digits", 1.0)
    assert report["pace_ms"] == {"worker-0": 30.0, "worker-1": 10.04}
    assert (report["step_ms"], report["predicted_step_ms"]) == (64.0, 62.0)
    assert [change["cause"] for change in report["changes"]] == ["rebalance"]  # type: ignore[attr-defined]

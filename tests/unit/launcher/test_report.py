"""What is kept of a running job for its report."""

from __future__ import annotations

from statuses import coordinator_status
from virtualflow.launcher.report import JobHistory, build_report
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


def test_the_report_has_the_figures_over_the_steps_once_each() -> None:
    history = JobHistory()
    for now, step, speed in ((100.0, 1, 0.0), (100.5, 2, 2.0), (101.0, 2, 2.0), (101.5, 3, 4.0)):
        status = coordinator_status(
            "training", *WORKERS, step=step, generation=1, steps_per_second=speed, metrics={"loss": 1 / step}
        )
        history.take(status, now)
    series = build_report(history, None, "digits", 1.0)["series"]
    assert isinstance(series, dict)
    assert (series["steps"], series["times"]) == ((1, 2, 3), (100.0, 100.5, 101.5))
    assert (series["speed"], series["workers"]) == ((None, 2.0, 4.0), (2.0, 2.0, 2.0))

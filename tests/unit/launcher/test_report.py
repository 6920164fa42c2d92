"""What is kept of a running job for its report."""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from statuses import coordinator_status
from virtualflow.launcher.console import LiveConsole, Snapshot
from virtualflow.launcher.report import JobHistory, build_report, origin_of
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


def test_the_report_says_what_the_run_was_made_of(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    command = ("python", "-u", str(script), "--lr", "1 e-3")
    origin = origin_of(command)
    assert (origin["command"], origin["script"]) == (f"python -u {script} --lr '1 e-3'", str(script))
    assert origin["script_sha256"] == hashlib.sha256(b"print(1)\n").hexdigest()
    assert "git_commit" not in origin, "it is in no repository"
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "train.py"), ("commit", "-q", "-m", "first")):
        subprocess.run((*git, *words), check=True)
    assert re.fullmatch("[0-9a-f]{40}", commit := origin_of(command)["git_commit"])
    script.write_text("print(2)\n")
    assert origin_of(command)["git_commit"] == f"{commit}-dirty"
    history = JobHistory()
    for device in ("cpu, CPU capability AVX2", "NVIDIA H100, CUDA 13.0"):
        history.take(coordinator_status("training", fingerprint="torch 2.13.0, 2 threads", devices=(device,)))
    report = build_report(history, None, "digits", 1.0, origin)
    assert report["origin"] == {
        **origin,
        "workers": "torch 2.13.0, 2 threads",
        "devices": "NVIDIA H100, CUDA 13.0; cpu, CPU capability AVX2",
    }


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("metrics", [0, 3, 12])
def test_bar_step_time_and_time_left_stay_however_many_metrics_there_are(
    monkeypatch: pytest.MonkeyPatch, width: int, metrics: int
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("COLUMNS", str(width))
    reason = "worker-2 lost: killed by signal 9 (SIGKILL) while it computed virtual node 5 of 8"
    lost = msgspec.structs.replace(MOVED, cause="lost", from_=3, to=2, reason=reason, pause_ms=4_321.0)
    figures = {f"metric_number_{number}": 0.5 for number in range(metrics)}
    status = coordinator_status(
        "training",
        *WORKERS,
        step=12_345,
        total_steps=100_000,
        steps_per_second=4.0,
        step_ms=244.4,
        predicted_step_ms=251.3,
        metrics=figures,
        last_change=lost,
    )
    console = LiveConsole()
    console.update(Snapshot("digits", status, {}, ""))
    console.close()
    lines = sys.stderr.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in lines)
    (bar,) = [line for line in lines if "step 12345 of 100000, epoch 0" in line]
    assert "left" in bar
    assert "━" in bar
    assert bar.index("step") > 10, "there is room for the bar"
    assert any("244 ms a step (251 ms predicted)" in line for line in lines)
    text = " ".join(" ".join(line.strip("│ ") for line in lines).split())
    assert f"workers: 2 of 2 wanted (1 fewer since step {lost.step}: {reason})" in text
    assert "pause 4.32 s" in text

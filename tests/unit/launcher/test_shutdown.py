"""How a job ends: who is signalled meanwhile, what is said, and the exit code."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, cast

import pytest

from statuses import coordinator_status
from virtualflow.launcher.shutdown import Conclusion, JobOutcome, Shutdown, conclude, end_signals, next_shutdown
from virtualflow.launcher.worker_table import WorkerProcess
from virtualflow.protocol.http_api import Event, Phase
from virtualflow.protocol.settings import STOP_GRACE

GRACE = 5.0
STOPPED = Shutdown("stopped", 0.0, "SIGINT received", signal.SIGINT)
SAVED = Event(1, 0.0, "checkpoint", "checkpoint of step 7 written")
UNSAVED = Event(2, 0.0, "checkpoint-failed", "the checkpoint of step 9 cannot be written: no space left")


def facts(shutdown: Shutdown, **more: Any) -> JobOutcome:
    usual: dict[str, Any] = {
        "status": coordinator_status("done", step=12, digest="abc"),
        "seconds": 3.25,
        "changes": (),
        "last_checkpoint": None,
        "checkpoint_dir": None,
        "newest_checkpoint": None,
        "unreached": (),
        "unwritten": None,
        "logs": None,
    }
    return JobOutcome(shutdown=shutdown, **{**usual, **more})


DONE = "done: 12 steps in 3.2 s, digest abc, 0 membership changes, 0 repeated steps"


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        pytest.param(facts(Shutdown("done", 0.0)), 0, [DONE], id="done"),
        pytest.param(
            facts(Shutdown("done", 0.0), training_seconds=1.04, resumed="resumed from the checkpoint of step 8"),
            0,
            [
                "done: 12 steps (resumed from the checkpoint of step 8) in 3.2 s, 1.0 s of it training, digest abc, "
                "0 membership changes, 0 repeated steps"
            ],
            id="done, with its times",
        ),
        pytest.param(
            facts(
                Shutdown("done", 0.0),
                status=coordinator_status("done", step=5, total_steps=80, digest="abc", stopped_early=True),
            ),
            0,
            [
                "done: stopped early by the script, 5 of 80 steps in 3.2 s, digest abc, 0 membership changes, "
                "0 repeated steps"
            ],
            id="stopped early",
        ),
        pytest.param(
            facts(Shutdown("done", 0.0), unreached=[90]),
            0,
            ["the schedule's step 90 was never reached: the job has 12 steps", DONE],
            id="a schedule beyond the end",
        ),
        pytest.param(facts(Shutdown("done", 0.0), unwritten="no report"), 1, [DONE, "no report"], id="no report"),
        pytest.param(
            facts(Shutdown("done", 0.0), last_checkpoint=UNSAVED), 1, [DONE, UNSAVED.text], id="no last checkpoint"
        ),
        pytest.param(
            facts(Shutdown("failed", 0.0, "ValueError: sour"), logs=Path("/l")),
            1,
            [
                "the job failed: ValueError: sour (the output of every process is in /l)",
                "without --checkpoint-dir no checkpoint was written: the next run starts from step 1",
            ],
            id="failed",
        ),
        pytest.param(
            facts(Shutdown("failed", 0.0, "ValueError: sour"), checkpoint_dir=Path("/c"), newest_checkpoint=7),
            1,
            [
                "the job failed: ValueError: sour",
                "the same command resumes from the checkpoint of step 7 in /c",
            ],
            id="failed, with a checkpoint",
        ),
        pytest.param(
            facts(Shutdown("failed", 0.0, "no such module"), status=coordinator_status("failed", step=0)),
            1,
            ["the job failed: no such module"],
            id="failed before the first step",
        ),
        pytest.param(
            facts(Shutdown("failed", 0.0, "port 1 is taken", started=False), status=None),
            1,
            ["port 1 is taken"],
            id="not started",
        ),
        pytest.param(
            facts(STOPPED),
            130,
            ["stopped after step 12 (SIGINT received); without --checkpoint-dir no checkpoint was written: the next "
             "run starts from step 1"],
            id="stopped without a checkpoint",
        ),
        pytest.param(
            facts(STOPPED, checkpoint_dir=Path("/c"), newest_checkpoint=7, last_checkpoint=SAVED),
            130,
            ["stopped after step 12 (SIGINT received); the same command resumes from the checkpoint of step 7 in /c"],
            id="stopped with one",
        ),
        pytest.param(
            facts(Shutdown("stopped", 0.0, "no step after 12 was wanted", planned=True), checkpoint_dir=Path("/c")),
            0,
            [
                "stopped after step 12 (no step after 12 was wanted); there is no checkpoint in /c: the next run "
                "starts from step 1"
            ],
            id="as planned",
        ),
        pytest.param(
            facts(Shutdown("stopped", 0.0, "asked to stop"), status=None, checkpoint_dir=Path("/c")),
            1,
            ["stopped after step 0 (asked to stop); there is no checkpoint in /c: the next run starts from step 1"],
            id="stopped by a call before the first",
        ),
    ],
)  # fmt: skip
def test_what_is_said_follows_from_the_facts(end: JobOutcome, code: int, said: list[str]) -> None:
    assert conclude(end) == Conclusion(code, said)


@pytest.mark.parametrize(
    ("current", "phase", "kind"),
    [
        pytest.param(None, "training", None, id="it goes on"),
        pytest.param(None, "done", "done", id="done"),
        pytest.param(None, "stopped", "stopped", id="stopped by somebody else"),
        pytest.param("stopped", "done", "done", id="complete before the signal arrived"),
        pytest.param("done", "failed", "failed", id="an error after the training"),
        pytest.param("stopped", "failed", "stopped", id="an error while it is being stopped"),
        pytest.param("failed", "done", "failed", id="failed for good"),
    ],
)
def test_the_status_says_how_a_job_ends(current: Any, phase: Phase, kind: str | None) -> None:
    before = None if current is None else Shutdown(current, 1.0)
    after = next_shutdown(before, coordinator_status(phase), 2.0)
    assert (after.kind if after is not None else None) == kind
    if after is not None and kind == current:
        assert after is before


def worker(**facts: Any) -> WorkerProcess:
    made = WorkerProcess("worker-0", 0, 0, cast("Any", None), 1, incarnation="a", served=True, state="training")
    for name, value in facts.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("kind", "one", "elapsed", "sent"),
    [
        pytest.param("done", worker(), 1e6, "", id="a script may go on after the training"),
        pytest.param("done", worker(incarnation=None), 0.0, "kill", id="who boots comes too late"),
        pytest.param("done", worker(served=False, state="ready"), GRACE + 1, "kill", id="so does who never served"),
        pytest.param("done", worker(served=False, state="ready"), GRACE - 1, "", id="but it may go by itself"),
        pytest.param("done", worker(stopped=True), 0.0, "kill", id="who hangs cannot end"),
        pytest.param("stopped", worker(), STOP_GRACE - 1, "", id="a drain takes its time"),
        pytest.param("stopped", worker(), STOP_GRACE + 1, "kill", id="but not for ever"),
        pytest.param("stopped", worker(incarnation=None), 0.0, "terminate", id="who boots hears of no drain"),
        pytest.param("stopped", worker(incarnation=None, terminated=True), 0.0, "", id="and is told once"),
        pytest.param("failed", worker(), GRACE - 1, "", id="workers of a failed job end by themselves"),
        pytest.param("failed", worker(), GRACE + 1, "kill", id="or are killed"),
        pytest.param("failed", worker(incarnation=None), 0.0, "kill", id="at once if they boot"),
    ],
)
def test_everyone_is_moved_towards_the_end(kind: Any, one: WorkerProcess, elapsed: float, sent: str) -> None:
    signals = end_signals(Shutdown(kind, 100.0), [one], 100.0 + elapsed, GRACE)
    assert (signals.kill, signals.terminate) == ([one] * (sent == "kill"), [one] * (sent == "terminate"))


def test_a_signal_ends_scripts_that_go_on_after_the_training() -> None:
    shutdown = Shutdown("done", 0.0, impatient_since=10.0)
    assert not end_signals(shutdown, [worker()], 10.0 + GRACE, GRACE).kill
    assert end_signals(shutdown, [worker()], 11.0 + GRACE, GRACE).kill

"""``virtualflow check`` and ``bisect`` through the command line: sound scripts are equal, and each habit is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import habits
import pytest
from jobs import LIMIT, ROOT

import programs
from tiers import nightly
from virtualflow.launcher.check import Finding, TrialFailed, _reason, _traceback, conclude
from virtualflow.launcher.cli import main
from virtualflow.verify import Difference, plan_trials

HABITS = str(Path(habits.__file__))
HASHES, _, SPLIT, *_ = plan_trials(2, 4, 2)
FAILED = TrialFailed(SPLIT, "no memory is left")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Run the command line; but for the trial with another hash seed, all processes are forks."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "trainer"), "TMPDIR": str(tmp_path)}
        whole = [sys.executable, "-m", "virtualflow", *arguments]
        return programs.run(whole, cwd=tmp_path, env=environment, timeout=LIMIT)

    yield run
    assert not list(tmp_path.glob("virtualflow-*/*/*")), "a check has left something"


@pytest.mark.parametrize(
    ("arguments", "steps", "rows"),
    [
        nightly(["--steps", "3", HABITS, "none"], 3, 7, id="small"),
        nightly([str(ROOT / "examples" / "digits.py"), "--steps", "60"], 6, 8, id="digits"),
    ],
)
def test_a_sound_script_is_equal_however_it_is_run(  # type: ignore[no-untyped-def]
    command, arguments: list[str], steps: int, rows: int
) -> None:
    done = command("check", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    *table, _, verdict = done.stdout.splitlines()
    assert len(table) == rows
    assert all(row.endswith("equal") for row in table[1:]), done.stdout
    assert verdict == f"equal: {steps} steps were the same in all {rows} runs: samples, gradients, state and metrics"


@pytest.mark.parametrize(
    ("habit", "where", "remedy"),
    [
        nightly("set", "step 1, virtual node 0: the data of its samples", "sort it", id="set"),
        nightly("running metric", "step 1, virtual node 1: metric loss", "present micro-batch", id="metric"),
        nightly("unseeded", "before the first step: parameter first.weight", "torch.manual_seed", id="unseeded"),
        nightly("draws", "step 1, virtual node 1: the random numbers drawn", "draw the same", id="draws"),
        nightly("cache", "step 3, virtual node 0: gradient of first.weight", "in a buffer of the model", id="cache"),
        nightly("average", "beside the model: Plain", "part of the model", id="average"),
        nightly("leader", "step 1, after the code behind it: parameter second.bias", "all workers alike", id="leader"),
        nightly("steps made", "after the code behind it: parameter second.bias", "step.number", id="count of its own"),
    ],
)
def test_a_habit_that_breaks_bits_is_found_and_its_cause_named(command, habit: str, where: str, remedy: str) -> None:  # type: ignore[no-untyped-def]
    done = command("check", "--steps", "4", HABITS, habit)
    assert done.returncode == 1, done.stdout + done.stderr
    *_, found, cause, todo = done.stdout.splitlines()
    assert found.startswith("first difference: ")
    assert where in found
    assert cause.startswith("usual cause: ")
    assert remedy in todo


@pytest.mark.parametrize(
    ("habit", "sentence"),
    [
        nightly("counter", "when a virtual node was computed again: the script keeps something", id="counter"),
        nightly("generator", "when a virtual node was computed again: the script keeps something", id="generator"),
        nightly("recurrent", "when a virtual node was computed again: the script keeps something", id="hidden state"),
        nightly("time", "when a virtual node was computed again: the script keeps something", id="time"),
        nightly("criterion", "when a virtual node was computed again: the script keeps something", id="criterion"),
        nightly("look ahead", "asks for the next micro-batch of a step before it has run backward", id="look ahead"),
        nightly("scheduler", "pass it to vf.elastic as scheduler=", id="scheduler"),
        nightly("counting dataset", "other data in [0] when it was loaded again: the dataset (Counted)", id="dataset"),
    ],
)
def test_a_habit_that_a_run_refuses_is_shown_in_its_words(command, habit: str, sentence: str) -> None:  # type: ignore[no-untyped-def]
    done = command("check", "--steps", "4", HABITS, habit)
    assert done.returncode == 2, done.stdout + done.stderr
    assert sentence in done.stderr


@pytest.mark.nightly
def test_what_a_run_warns_of_is_shown_above_the_verdict(command) -> None:  # type: ignore[no-untyped-def]
    done = command("check", "--steps", "3", HABITS, "seeing")
    assert done.returncode == 0, done.stdout + done.stderr
    *_, warning, _, verdict = done.stdout.splitlines()
    assert warning.startswith("warning: the forward pass changes the buffer seen, which has no mean")
    assert verdict.startswith("equal: 3 steps were the same")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "arguments", "sentence"),
    [
        pytest.param("print('hello')", (), "the script must iterate over vf.elastic(...)", id="trains nothing"),
        pytest.param("raise OSError('no such disk')", (), "OSError: no such disk", id="fails at once"),
    ],
)
def test_a_script_that_cannot_be_run_is_shown_with_its_own_error(  # type: ignore[no-untyped-def]
    command, tmp_path: Path, text: str, arguments: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "train.py").write_text(text)
    done = command("check", *arguments, "train.py")
    assert done.returncode == 2
    assert sentence in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == text.count("raise")


@pytest.mark.nightly
def test_the_first_difference_of_two_recorded_runs_is_found(command) -> None:  # type: ignore[no-untyped-def]
    for name, workers in (("one", "1"), ("two", "2"), ("again", "2")):
        run = command(
            "run", "--plain", "--workers", workers, "--stop-after", "3", "--trace", name, HABITS, "running metric"
        )
        assert run.returncode == 0, run.stderr
        assert "stopped after step 3 (no step after 3 was wanted)" in run.stderr
    found = command("bisect", "one", "two")
    assert found.returncode == 1
    assert "first difference: step 1, virtual node 1: metric loss" in found.stdout
    assert command("bisect", "two", "again").stdout == "equal: steps 1 to 3\n"
    again = command("run", "--plain", "--trace", "one", HABITS, "running metric")
    assert (again.returncode, "name a new directory" in again.stderr) == (2, True)


def test_bisect_names_the_difference_its_cause_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for name, repeat in (("one", ""), ("two", "3")):
        monkeypatch.setenv("VIRTUALFLOW_TRACE_DIR", str(tmp_path / name))
        monkeypatch.setenv("VIRTUALFLOW_TRACE_REPEAT", repeat)
        habits.main("running metric")
    assert main(["bisect", str(tmp_path / "one"), str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out == f"equal: steps 1 to {habits.STEPS}\n"
    assert main(["bisect", str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    found, cause, todo = capsys.readouterr().out.splitlines()
    assert found.startswith("first difference: step 3, virtual node 0: metric loss: ")
    assert cause.startswith("usual cause: only what is logged differs")
    assert todo.startswith("what to do: log the value of the present micro-batch")


def difference(step: int) -> Difference:
    return Difference(step, "data", "the data of its samples", ("a", "b"), ("worker-0", "worker-0"), virtual_node=1)


@pytest.mark.parametrize(
    ("findings", "code", "said"),
    [
        pytest.param([Finding(HASHES), Finding(SPLIT)], 0, "equal: 4 steps were the same in all 3 runs", id="equal"),
        pytest.param([Finding(HASHES, difference(2)), Finding(SPLIT)], 1, "sort it", id="the hash seed"),
        pytest.param(
            [Finding(HASHES, difference(2)), Finding(SPLIT, difference(1))], 1, "its index", id="the earliest"
        ),
        pytest.param([Finding(HASHES, difference(1)), Finding(SPLIT, difference(1))], 1, "sort it", id="the first"),
        pytest.param([Finding(HASHES, failed=FAILED), Finding(SPLIT, difference(1))], 1, "its index", id="one failed"),
    ],
)
def test_the_verdict_is_the_earliest_difference(
    findings: list[Finding], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conclude(findings, 4) == code
    assert said in capsys.readouterr().out


def test_without_a_difference_a_trial_that_failed_is_the_verdict() -> None:
    with pytest.raises(TrialFailed, match="no memory"):
        conclude([Finding(HASHES), Finding(SPLIT, failed=FAILED)], 4)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["check", "missing.py"], "there is no script missing.py", id="no script"),
        pytest.param(["check", "--virtual-nodes", "1", HABITS], "between 2 and", id="one virtual node"),
        pytest.param(["check", "--steps", "0", HABITS], "--steps 0: it must be at least 1", id="no steps"),
        pytest.param(["bisect", "here", "there"], "here is not there; name the DIR", id="no traces"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(command, arguments: list[str], sentence: str) -> None:  # type: ignore[no-untyped-def]
    done = command(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert sentence in done.stderr


def test_of_a_failed_run_its_error_is_told_and_its_traceback_shown(tmp_path: Path) -> None:
    said = "\n".join(
        [
            "[virtualflow 1.0 s] worker-0 connected",
            "Traceback (most recent call last):",
            '  File "train.py", line 1, in <module>',
            "ValueError: no",
            "virtualflow: the job failed: ValueError: no",
        ]
    )
    assert _traceback(said).splitlines()[1:] == ['  File "train.py", line 1, in <module>', "ValueError: no"]
    assert _traceback("virtualflow: it failed") == ""
    report = tmp_path / "report.json"
    assert _reason(report, said, 1) == "ValueError: no"
    assert _reason(report, "virtualflow: it failed", 1) == "it failed"
    report.write_text('{"error": "ValueError: no"}')
    assert _reason(report, said, 1) == "ValueError: no"
    report.write_text('{"error": "worker-0 ended"}')
    assert _reason(report, said, 1) == "worker-0 ended (ValueError: no)"
    assert _reason(tmp_path / "none", "", -9) == "virtualflow run ended with killed by SIGKILL"

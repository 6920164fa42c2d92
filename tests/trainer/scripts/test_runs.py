"""A script that trains several times: one job, whose runs follow one another."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from jobs import run_job

import virtualflow as vf
from virtualflow.errors import VirtualFlowError
from virtualflow.protocol import messages as m
from virtualflow.state import CheckpointPolicy, policy_of_run
from virtualflow.worker import run as worker_run
from virtualflow.worker.request import FormerRun

CASES = Path(__file__).parents[1] / "cases"


def plainly(script: Path) -> str:
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=120).stdout


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


@pytest.mark.slow
def test_folds_choose_alike_whoever_is_killed_in_which_of_them(tmp_path: Path) -> None:
    """The second replacement has to make up for two runs that it has not seen, by which the script decides."""
    script = CASES / "folds.py"
    job = run_job(tmp_path, "--workers", 2, "--schedule", "13:kill,20:kill", script)
    assert last_line(job.output) == last_line(plainly(script))
    assert [run["run"] for run in job.report["runs"]] == [1, 2]
    assert (job.report["run"], job.report["steps"]) == (3, 8)
    rows = {(row["run"], row["step"], row["virtual_node"]) for row in job.audit}
    assert len(job.audit) == len(rows) == 3 * 8 * 8, "each virtual node of each step of each run counts once"


@pytest.mark.nightly
@pytest.mark.parametrize("kept", [False, True], ids=["without checkpoints", "with checkpoints"])
@pytest.mark.parametrize(
    "schedule", ["3:kill", "10:kill", "14:kill", "8:=3,15:kill,17:=1", "13:all", "5:coordinator,14:coordinator"]
)
def test_two_trainings_in_one_script_come_to_the_same_bits(tmp_path: Path, schedule: str, kept: bool) -> None:
    script = CASES / "two_trainings.py"
    undisturbed = run_job(tmp_path, "--workers", 1, script)
    (tmp_path / "faulty").mkdir()
    saves = ("--checkpoint-dir", tmp_path / "saved", "--checkpoint-steps", 2) if kept else ()
    faulty = run_job(tmp_path / "faulty", "--workers", 2, *saves, "--schedule", schedule, script)
    assert faulty.report["digest"] == undisturbed.report["digest"]
    assert faulty.report["runs"] == undisturbed.report["runs"]
    if kept:
        again = run_job(tmp_path / "faulty", "--workers", 2, *saves, script)
        assert again.report["digest"] == undisturbed.report["digest"]
        assert "resumed from the checkpoint of step 10" in again.errors


# --- in one process ---------------------------------------------------------------------------------------------------


def train(directory: Path | None = None, steps: int = 4) -> str:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with vf.elastic(model, optimizer, data, batch_size=16, steps=steps, checkpoint=directory) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
    return run.id


@pytest.mark.usefixtures("one_script")
def test_each_run_of_a_script_keeps_checkpoints_of_its_own(tmp_path: Path) -> None:
    first, second, third = train(tmp_path), train(tmp_path), train(tmp_path / "other")
    assert len({first, second, third}) == 3, "trackers tell them apart"
    assert {path.name.partition(".")[0] for path in tmp_path.glob("*")} == {"step-00000004", "run-2", "other"}
    assert [path.name.partition(".")[0] for path in (tmp_path / "run-2").glob("step-*")] == ["step-00000004"]
    assert [path.name.partition(".")[0] for path in (tmp_path / "other").glob("*")] == ["step-00000004"]


def test_a_directory_is_shared_by_no_two_runs() -> None:
    result = m.RunResult(1, 4, 4, "", {})
    policy = CheckpointPolicy("saved", every_steps=3, keep=2)
    assert policy_of_run(policy, 1, []) is policy
    inside = policy_of_run(policy, 3, [FormerRun(result, None).checkpoints, Path("saved").absolute()])
    assert (inside.directory, inside.every_steps, inside.keep) == (Path("saved/run-3").absolute(), 3, 2)
    assert policy_of_run(policy, 2, [Path("elsewhere").absolute()]) is policy


def take_up(monkeypatch: pytest.MonkeyPatch, over: m.RunOver) -> None:
    """Let the first connection of this process tell that its run is over."""

    def connect(context: worker_run.Context) -> None:
        if context.request.over is None:
            raise worker_run.RunIsOver(over)

    monkeypatch.setattr(worker_run, "connect", connect)


def test_who_comes_late_computes_a_run_again_that_left_no_checkpoint_and_leads_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    take_up(monkeypatch, m.RunOver(2, m.RunResult(1, 3, 4, "", {})))
    led = []
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    caplog.set_level(logging.WARNING)
    with vf.elastic(model, optimizer, data, batch_size=16, steps=4, checkpoint=tmp_path) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            led.append(run.leader)
    assert led == [False] * 3, "it stops where that run was left"
    assert list(tmp_path.iterdir()) == [], "it writes nothing"
    assert "run 1 of the script is over; this worker, which came later, computes it again" in caplog.text


def test_who_comes_late_reads_the_checkpoint_that_a_run_has_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    train(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    take_up(monkeypatch, m.RunOver(2, m.RunResult(1, 4, 4, "", {})))
    with caplog.at_level(logging.WARNING):
        train(tmp_path)
    assert "this worker, which came later, reads its checkpoint of step 4" in caplog.text
    assert sorted(tmp_path.rglob("*")) == before


def test_who_comes_late_and_arrives_elsewhere_does_not_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    take_up(monkeypatch, m.RunOver(2, m.RunResult(1, 4, 4, "0123456789abcdef", {})))
    with pytest.raises(VirtualFlowError, match="run 1 of the script ended with weights 0123456789ab, and this worker"):
        train()

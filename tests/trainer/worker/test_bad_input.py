"""What cannot be done is said in one line, with nothing started or lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import programs

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """\
import os, sys
import torch
import torch.nn.functional as F
import virtualflow as vf

batch_size, steps, width = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(96, 4))
model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
with vf.elastic(model, optimizer, dataset, batch_size=batch_size, steps=steps) as run:
    for step in run:
        for (x,) in step:
            loss = model(x).square().mean()
            loss.backward()
            step.log(loss=loss)
        if os.environ.get("FAIL_AT") == str(step.number):
            raise RuntimeError("the data ran sour")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of a job that has failed is kept; here it goes with the test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


LESS_PATIENT = """
import runpy, sys
from virtualflow.worker import entry
from virtualflow.worker.settings import WorkerSettings
entry.WorkerSettings = lambda: WorkerSettings(report_limit=3.0)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VIRTUALFLOW_")}
    return {**inherited, "PYTHONPATH": str(ROOT / "trainer"), **more}


def python(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    return programs.run([sys.executable, *map(str, arguments)], env=environment(**more), timeout=120)


def virtualflow_run(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "virtualflow", "run", "--plain", *arguments, **more)


def said(finished: subprocess.CompletedProcess[str]) -> list[str]:
    """What it said itself on standard error, without the story of the run."""
    return [line for line in finished.stderr.splitlines() if not line.startswith("[virtualflow ")]


def one_line(finished: subprocess.CompletedProcess[str]) -> str:
    """What it said, which is one line."""
    lines = said(finished)
    assert len(lines) == 1, "\n".join(lines)
    return lines[0]


def test_a_batch_that_does_not_divide_is_one_line_alone(script: Path) -> None:
    finished = python(script, 30, 5, 8)
    assert finished.returncode == 1
    assert finished.stderr == (
        "virtualflow: batch_size 30 does not divide evenly over 8 virtual nodes; use 24 or 32 (train.py:11)\n"
    )


def test_a_batch_that_does_not_divide_is_one_line_in_a_job(script: Path) -> None:
    finished = virtualflow_run("--workers", "2", script, "30", "5", "8")
    assert finished.returncode == 1
    line = one_line(finished)
    assert "batch_size 30 does not divide evenly over 8 virtual nodes; use 24 or 32" in line


def test_what_is_wrong_before_a_worker_joins_is_one_line_in_a_job(script: Path) -> None:
    script.write_text(SCRIPT.replace("elastic(model,", "elastic(torch.nn.DataParallel(model),"))
    finished = virtualflow_run("--workers", "2", script, "32", "5", "8")
    assert finished.returncode == 1
    line = one_line(finished)
    assert "ended before it could join: the model is wrapped by DataParallel" in line
    assert "give vf.elastic the plain model" in line


def test_virtual_nodes_below_one_are_one_line_alone(script: Path) -> None:
    finished = python(script, 32, 5, 8, VIRTUALFLOW_VIRTUAL_NODES="0")
    assert finished.returncode == 1
    assert finished.stderr == (
        "virtualflow: VIRTUALFLOW_VIRTUAL_NODES='0' must be a whole number of at least 1; correct or unset it\n"
    )


def test_an_error_of_the_scripts_own_is_shown_as_without_the_library() -> None:
    plain, ours = python("-c", "raise ValueError(1)"), python("-c", "import virtualflow; raise ValueError(1)")
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)


def test_a_process_group_of_the_script_is_advised_against_alone_and_in_a_job(tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    script.write_text("import virtualflow\nimport torch\n\ntorch.distributed.init_process_group('gloo')\n")
    for finished in (python(script), virtualflow_run("--workers", "2", script)):
        assert finished.returncode == 1
        assert finished.stderr.count("what to do: a script needs no process group here") == 1
        assert "environment variable RANK expected" in finished.stderr  # torch's own stands before it


@pytest.mark.slow
def test_what_is_wrong_is_said_before_an_absent_coordinator_is_waited_for(script: Path) -> None:
    absent = {"VIRTUALFLOW_COORDINATOR": "http://127.0.0.1:9", "VIRTUALFLOW_TOKEN": "any"}
    command = [sys.executable, "-c", LESS_PATIENT, str(script), "30", "5", "8"]
    with programs.Program(command, env=environment(**absent), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said_first = process.stderr.readline()
        assert process.poll() is None  # it still tries to tell its coordinator
        rest = process.communicate(timeout=120)[1]
    assert said_first == (
        "virtualflow: batch_size 30 does not divide evenly over 8 virtual nodes; use 24 or 32 (train.py:11)\n"
    )
    assert (process.returncode, rest) == (1, "")


def test_an_exception_in_a_step_is_shown_once_and_not_retried(script: Path) -> None:
    finished = virtualflow_run("--workers", "3", script, "32", "20", "8", FAIL_AT="4")
    assert finished.returncode == 1
    assert finished.stderr.count("Traceback (most recent call last)") == 1
    assert finished.stderr.count("RuntimeError: the data ran sour\n") == 1


def test_a_wrong_token_is_one_line(script: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "virtualflow", "coordinator", "--host", "127.0.0.1", "--port", "0"]
    coordinator = programs.Program(
        [*command, "--ready-file", str(ready)], env=environment(VIRTUALFLOW_TOKEN="right"), stderr=subprocess.PIPE
    )
    try:
        while not ready.exists():
            assert coordinator.poll() is None
            time.sleep(0.01)
        url = ready.read_text().strip()
        finished = python(script, 32, 5, 8, VIRTUALFLOW_COORDINATOR=url, VIRTUALFLOW_TOKEN="wrong")
        assert finished.returncode == 1
        assert finished.stderr == (
            f"virtualflow: the coordinator at {url} refuses the token; check VIRTUALFLOW_TOKEN\n"
        )
    finally:
        coordinator.terminate()
        coordinator.communicate(timeout=30)


@pytest.mark.slow
def test_the_checkpoints_of_another_job_are_refused_and_kept(script: Path, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"

    def start(virtual_nodes: str, width: str) -> subprocess.CompletedProcess[str]:
        options = ["--workers", "2", "--checkpoint-dir", directory, "--virtual-nodes", virtual_nodes]
        return virtualflow_run(*options, script, "32", "6", width)

    assert start("8", "8").returncode == 0
    for virtual_nodes, width, differs in [
        ("4", "8", "the number of virtual nodes is 4 here and 8 there"),
        ("8", "16", "parameter 0.weight is [16, 4] here and [8, 4] there"),
    ]:
        finished = start(virtual_nodes, width)
        assert finished.returncode == 1
        line = one_line(finished)
        assert differs in line
        assert [path.name.split(".")[0] for path in directory.iterdir()] == ["step-00000006"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs root: it mounts a small file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.slow
def test_a_full_disk_costs_the_checkpoint_and_not_the_training(script: Path, small_disk: Path, tmp_path: Path) -> None:
    report, directory = tmp_path / "report.json", small_disk / "checkpoints"
    finished = virtualflow_run(
        "--workers", "2", "--checkpoint-dir", directory, "--checkpoint-steps", "5", "--report", report,
        script, "32", "12", "100000",
    )  # fmt: skip
    assert finished.returncode == 1
    done, line = said(finished)
    assert done.startswith("virtualflow: done: 12 steps")
    assert "No space left on device" in line
    assert "free some space there" in line
    trained = json.loads(report.read_text())
    assert trained["steps"] == 12
    assert trained["digest"]
    assert list(directory.iterdir()) == []

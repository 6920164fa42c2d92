"""A worker's name is one process's: children that inherit its environment do not take it."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_jobs import ElasticJob
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.protocol.settings import ENV_COORDINATOR, ENV_TERMINATION_LOG, ENV_TOKEN, ENV_WORKER
from virtualflow.worker.process import NameTaken, claim_name

CASES = Path(__file__).resolve().parents[1] / "cases"
ROOT = Path(__file__).resolve().parents[3]


def elastic() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    dataset = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    return model, vf.elastic(model, torch.optim.SGD(model.parameters(), 0.1), dataset, batch_size=16, steps=8)


def in_a_fork(action: Callable[[], str]) -> str:
    """What ``action`` returns in a child of this process."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        said = "it raised something else"
        try:
            said = action()
        finally:
            os.write(theirs, said.encode() + b"\n")
            os._exit(0)
    os.close(theirs)
    with open(ours, encoding="utf-8") as pipe:
        said = pipe.readline().rstrip()  # not to the end: what the child has forked holds the pipe as well
    os.waitpid(child, 0)
    return said


def refusal() -> str:
    """Why this process may not train under the name in its environment."""
    try:
        elastic()
    except vf.ConfigurationError as error:
        return str(error)
    return "it was let in"


def train_with_a_child() -> tuple[int, str]:
    model, made = elastic()
    said = ""
    with made as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            if step.number == 3:
                said = in_a_fork(refusal)
    return os.getpid(), said


def test_a_child_that_trains_as_well_is_refused_and_its_parent_trains_on(
    start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    log = tmp_path / "termination-log"
    job = start_job(train_with_a_child, workers=1, environment={ENV_TERMINATION_LOG: str(log)})
    ((pid, said),) = job.results()
    assert re.match(
        rf"this process \(pid \d+\) has inherited the name worker-0, which process {pid} trains under: ", said
    )
    assert "env -u VIRTUALFLOW_COORDINATOR" in said
    status = job.status()
    assert (status.phase, status.lost, status.repeated_steps) == ("done", (), 0)
    assert b'"done"' in log.read_bytes(), "the child speaks for nobody"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> WorkerEnvironment:
    monkeypatch.setenv(ENV_COORDINATOR, "http://127.0.0.1:1")
    monkeypatch.setenv(ENV_TOKEN, str(tmp_path))  # of nobody else
    monkeypatch.setenv(ENV_WORKER, "worker-5")
    return WorkerEnvironment.read()


def claimed(environment: WorkerEnvironment) -> str:
    try:
        claim_name(environment)
    except NameTaken as taken:
        return str(taken)
    return "claimed"


def test_of_two_processes_beside_each_other_the_first_has_the_name_until_it_ends(
    environment: WorkerEnvironment,
) -> None:
    ours, theirs = multiprocessing.Pipe()
    first = os.fork()
    if first == 0:
        theirs.send(claimed(environment))
        signal.pause()
    assert ours.recv() == "claimed"
    assert f"which process {first} trains under" in in_a_fork(lambda: claimed(environment))
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    assert in_a_fork(lambda: claimed(environment)) == "claimed"
    assert in_a_fork(lambda: f"{claimed(environment)}, {claimed(environment)}") == "claimed, claimed"


def test_a_forked_child_does_not_keep_the_name_from_the_next_worker(environment: WorkerEnvironment) -> None:
    def leave_a_child() -> str:
        claim_name(environment)
        child = os.fork()
        if child == 0:
            signal.pause()
        return str(child)

    child = int(in_a_fork(leave_a_child))
    try:
        assert in_a_fork(lambda: claimed(environment)) == "claimed"
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_process_that_runs_the_script_again_to_begin_is_told_of_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(vf.ConfigurationError, match=r'put its training under if __name__ == "__main__":'):
        elastic()


@pytest.mark.nightly
def test_a_script_without_the_guard_fails_with_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "virtualflow", "run", "--plain", "--workers", "1", str(CASES / "no_main_spawn.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "trainer"), "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1
    assert 'if __name__ == "__main__":' in ended.stderr
    assert "another process has taken its name" not in ended.stderr

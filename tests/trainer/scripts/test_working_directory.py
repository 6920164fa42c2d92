"""Scripts change their working directory, and relative paths mean what they meant when they were given."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.integrations.trackers import TensorBoard
from virtualflow.protocol.settings import (
    ENV_AUDIT_DIR,
    ENV_CHECKPOINT_DIR,
    ENV_EXPLAIN_OUT,
    ENV_PROFILE,
    ENV_PROFILE_OUT,
    ENV_SIGN,
    ENV_TRACE_DIR,
    ENV_TRUST,
    ENV_TURNS,
)
from virtualflow.state import checkpoint_order

TRAINER = str(Path(__file__).resolve().parents[3] / "trainer")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path) -> Iterator[None]:
    """Each test begins in a directory of its own."""
    former = os.getcwd()
    (tmp_path / "start").mkdir()
    (tmp_path / "run").mkdir()
    os.chdir(tmp_path / "start")
    yield
    os.chdir(former)


@pytest.mark.parametrize("policy", [False, True], ids=["a directory", "a policy"])
def test_checkpoints_stay_in_the_directory_that_was_given(policy: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    checkpoint = vf.CheckpointPolicy("ck", every_steps=2) if policy else "ck"
    made = vf.elastic(model, optimizer, dataset, batch_size=16, steps=6, checkpoint=checkpoint)
    os.chdir(tmp_path / "run")
    with made as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            if step.number == 3:
                os.chdir(tmp_path)
    assert max(mark.step for mark, _ in checkpoint_order.complete(tmp_path / "start" / "ck")) == 6
    assert not list((tmp_path / "run").iterdir())


def read_in_another_process(code: str, here: str = "", **environment: str) -> str:
    """What ``code`` prints in a process that has begun in this directory."""
    begun = ["sh", "-c", f'{here} exec "$0" -P -c "$1"', sys.executable, code]
    variables = os.environ | {"PYTHONPATH": TRAINER, **environment}
    return subprocess.run(begun, env=variables, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_paths_in_the_environment_are_meant_from_where_the_process_began(tmp_path: Path) -> None:
    fields = {
        "checkpoint_dir": ENV_CHECKPOINT_DIR,
        "audit_dir": ENV_AUDIT_DIR,
        "profile": ENV_PROFILE,
        "profile_out": ENV_PROFILE_OUT,
        "trace_dir": ENV_TRACE_DIR,
        "explain_out": ENV_EXPLAIN_OUT,
        "turns": ENV_TURNS,
        "sign": ENV_SIGN,
        "trust": ENV_TRUST,
    }
    code = (
        "import os, virtualflow; os.chdir('/')\n"
        "from virtualflow.protocol.environment import WorkerEnvironment\n"
        "found = WorkerEnvironment.read()\n"
        f"print(*(getattr(found, name) for name in {list(fields)}))"
    )
    said = read_in_another_process(code, **{variable: f"to/{name}" for name, variable in fields.items()})
    assert said.split() == [str(tmp_path / "start" / "to" / name) for name in fields]


def test_in_a_directory_that_is_gone_relative_paths_stay_as_they_are() -> None:
    code = "from virtualflow._start import from_start; print(from_start('ck'))"
    assert read_in_another_process(code, here="mkdir gone && cd gone && rmdir ../gone &&") == "ck"


def test_trackers_stay_where_they_were_put(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = TensorBoard("runs")
    os.chdir(tmp_path / "run")
    assert tracker._directory == tmp_path / "start" / "runs"

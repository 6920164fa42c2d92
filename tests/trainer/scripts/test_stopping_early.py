"""A script that leaves its loop before the last step: that is no failure, and no complete training either."""

from __future__ import annotations

import logging
from pathlib import Path

import jobs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.protocol.settings import ENV_TERMINATION_LOG
from virtualflow.protocol.termination_message import decode_termination_message

CASES = Path(__file__).parents[1] / "cases"


def test_a_loop_that_is_left_early_is_told_by_the_console_and_the_report(tmp_path: Path) -> None:
    finished = jobs.run_job(tmp_path, "--workers", 2, CASES / "stops_early.py")
    assert "training stopped early by the script, 5 of 80 steps" in finished.errors
    assert "done: stopped early by the script, 5 of 80 steps in" in finished.errors
    assert "training complete" not in finished.errors
    told = {name: finished.report[name] for name in ("phase", "steps", "total_steps", "stopped_early")}
    assert told == {"phase": "done", "steps": 5, "total_steps": 80, "stopped_early": True}
    assert finished.report["training_seconds"] < finished.report["seconds"]


@pytest.mark.parametrize("last", [3, 4], ids=["before the last step", "behind the last step"])
def test_only_a_loop_with_steps_to_come_is_left_early(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "virtualflow.worker")
    monkeypatch.setenv(ENV_TERMINATION_LOG, str(tmp_path / "log"))
    model = nn.Linear(4, 1)
    rows = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with vf.elastic(model, optimizer, rows, batch_size=16, epochs=1) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            if step.number == last:
                break
    message = decode_termination_message((tmp_path / "log").read_bytes())
    assert message is not None
    assert (message.kind, message.step, message.stopped_early) == ("done", last, last == 3)
    assert ("training stopped early by the script, 3 of 4 steps" in caplog.text) == (last == 3)


def test_a_run_without_a_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 1)
    rows = TensorDataset(torch.randn(64, 4))
    with vf.elastic(model, torch.optim.SGD(model.parameters(), 0.1), rows, batch_size=16, epochs=1):
        pass
    assert "the script has not iterated over the run, so nothing was trained" in caplog.text

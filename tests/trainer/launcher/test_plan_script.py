"""``virtualflow plan train.py``: from what does not fit to a job that runs, in two commands."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from jobs import LIMIT, ROOT

import programs
from virtualflow.launcher import cli

SCRIPT = """
import sys
import torch, virtualflow as vf
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
                              for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.randn(2048, 8))
print("a script's own line")
with vf.elastic(model, optimizer, data, batch_size=2048, steps=int(sys.argv[1]), virtual_nodes=1) as run:
    for step in run:
        for (x,) in step:
            model(x).square().mean().backward()
"""


@pytest.mark.slow
def test_from_what_does_not_fit_to_a_job_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "trainer"), "TMPDIR": str(tmp_path)}
    start = [sys.executable, "-m", "virtualflow"]
    words = [*start, "plan", "--virtual-nodes", "2", "train.py", "9", "--device", "1000KiB"]
    planned = programs.run(words, cwd=tmp_path, env=environment, timeout=LIMIT)
    assert planned.returncode == 0, planned.stderr
    # What the script prints is not mixed with the answer.
    assert "a script's own line" in planned.stderr
    assert "a script's own line" not in planned.stdout
    command = shlex.split(planned.stdout.splitlines()[-1].removeprefix("to run it so: "))
    options = ["--workers", "1", "--virtual-nodes", "2", "--device-memory", "1000KiB"]
    assert command == ["virtualflow", "run", *options, "train.py", "9"]
    ran = programs.run([*start, *command[1:]], cwd=tmp_path, env=environment, timeout=LIMIT)
    assert ran.returncode == 0, ran.stderr
    assert "memory: the blocks are the 4 modules in the model itself; to keep everything takes" in ran.stderr
    # The profile is left behind; with one virtual node nothing would have fitted.
    again = ["plan", str(tmp_path / "train.profile.json"), "--device", "1000KiB", "--virtual-nodes", "1"]
    assert cli.main(again) == 2
    assert "the model does not fit into 1000 KiB" in capsys.readouterr().err

"""``virtualflow plan train.py``: from what does not fit to a job that runs, in two commands."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import LIMIT, ROOT

import programs
from virtualflow.launcher import cli
from virtualflow.protocol.settings import ENV_ACTIVATIONS

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


DIVIDED = """
import os, sys
from pathlib import Path
import torch, virtualflow as vf
from torch import nn
WIDTH = int(sys.argv[1])
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
                                      for _ in range(8)])
    def forward(self, x):
        return self.blocks(x)
def status(key):
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith(key))
with torch.device("meta"):
    model = Net()
SAMPLES = int(sys.argv[3])
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
data = torch.utils.data.TensorDataset(torch.randn(8 * SAMPLES, WIDTH))
with vf.elastic(model, optimizer, data, batch_size=8 * SAMPLES, steps=5, shard="parameters", redundancy="none") as run:
    for step in run:
        if step.number == 3:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            rest = status("VmRSS")
        for (x,) in step:
            model(x).square().mean().backward()
    Path(sys.argv[2], os.environ["VIRTUALFLOW_WORKER"]).write_text(f"{status('VmHWM')} {status('VmHWM') - rest}")
"""


needs_peaks = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux: peaks are read from its /proc"
)


Command = Callable[..., str]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Calls the command line beside the script ``DIVIDED``; what is freed is given back at once, whatever its size."""
    (tmp_path / "train.py").write_text(DIVIDED)

    def run(*words: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "trainer"), "MALLOC_MMAP_THRESHOLD_": "65536"}
        whole = [sys.executable, "-m", "virtualflow", *words]
        done = subprocess.run(
            whole, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def peak_of(command: Command, folder: Path, width: int, samples: int, *options: str) -> tuple[int, int]:
    """The most that one of three workers takes from the third step on, and beyond what it has when that begins."""
    folder.mkdir()
    words = ["--plain", "--workers", "3", "--rebalance-gain", "1", *options, "train.py"]
    command("run", *words, str(width), str(folder), str(samples))
    (whole, beyond) = zip(*(map(int, file.read_text().split()) for file in folder.iterdir()), strict=True)
    return max(whole), max(beyond)


def planned_for_three(command: Command, folder: Path, width: int, samples: int) -> dict[str, Any]:
    asked = ["--shard", "parameters", "--redundancy", "none", "--device", "1GiB", "--json"]
    plan = json.loads(command("plan", *asked, "train.py", str(width), str(folder), str(samples)))
    return next(each for each in plan["sharded"][0]["fits"] if each["workers"] == 3)


@pytest.mark.slow
@needs_peaks
def test_workers_that_divide_parameters_have_no_more_than_was_planned(command: Command, tmp_path: Path) -> None:
    """Peaks are those of processes beside one whose model is next to nothing: all that is allocated counts."""
    few, many = (peak_of(command, tmp_path / str(width), width, 2)[0] for width in (16, 1024))
    planned = planned_for_three(command, tmp_path, 1024, 2)["device_bytes"]
    assert planned / 2 < many - few < planned


@pytest.mark.slow
@needs_peaks
def test_a_plan_of_activations_spares_divided_workers_what_it_says(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, samples = 128, 4096
    planned = planned_for_three(command, tmp_path, width, samples)
    spares = planned["device_bytes"] - planned["planned_bytes"]
    _, kept = peak_of(command, tmp_path / "kept", width, samples)
    monkeypatch.setenv(ENV_ACTIVATIONS, "Recompute")
    _, recomputed = peak_of(command, tmp_path / "planned", width, samples, "--device-memory", "1GiB")
    assert spares > planned["device_bytes"] / 3
    assert 0.7 * spares < kept - recomputed < 1.3 * spares, (planned, kept, recomputed)

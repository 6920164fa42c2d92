"""A played device that runs one kernel at a time: the one that came first goes first, and each to its end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.jobs import ROOT, environment
from benchmarks.played_kernels import OneKernelAtATime, only_views

PATIENCE = 60.0

COMPUTING = """
import sys
from pathlib import Path
import torch
from benchmarks.played_kernels import OneKernelAtATime

digits = torch.from_file(sys.argv[2], shared=True, size=1, dtype=torch.long)
digit = torch.tensor([int(sys.argv[3])])
with OneKernelAtATime(Path(sys.argv[1])):
    torch.add(digit, digits, alpha=10, out=digits)
"""


def start(device: Path, digits: Path, digit: int) -> subprocess.Popen[bytes]:
    """A process whose only kernel adds a digit behind the others; it waits for the kernel before it."""
    command = [sys.executable, "-c", COMPUTING, str(device), str(digits), str(digit)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment())
    limit = time.monotonic() + PATIENCE
    while not waits(process.pid):
        assert process.poll() is None, "it did not wait"
        assert time.monotonic() < limit
        time.sleep(0.01)
    return process


def waits(pid: int) -> bool:
    """Whether a process is blocked by the lock of another one, as the kernel says."""
    return any(line.split()[1] == "->" and line.split()[5] == str(pid) for line in Path("/proc/locks").open())


@pytest.mark.slow
def test_kernels_run_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    device, file = tmp_path / "device", tmp_path / "digits"
    digits = torch.from_file(str(file), shared=True, size=1, dtype=torch.long)
    with OneKernelAtATime(device)._kernel():
        processes = [start(device, file, digit) for digit in (1, 2, 3)]
        assert digits.item() == 0
    assert [process.wait(PATIENCE) for process in processes] == [0, 0, 0]
    assert digits.item() == 123


@pytest.mark.parametrize(
    ("operator", "views"),
    [
        (torch.ops.aten.view.default, True),
        (torch.ops.aten.t.default, True),
        (torch.ops.aten.mm.default, False),
        (torch.ops.aten.add_.Tensor, False),
    ],
    ids=str,
)
def test_what_makes_a_view_is_no_kernel(operator: torch._ops.OpOverload, views: bool) -> None:
    assert only_views(operator) == views

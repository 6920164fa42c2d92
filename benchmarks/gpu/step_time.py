"""A step of one worker beside plain PyTorch with fused AdamW: both live, and take turns on the device."""

from __future__ import annotations

import statistics
import sys

from benchmarks.gpu.parts import Note, Setting
from benchmarks.gpu.tasks import tasks
from benchmarks.jobs import job_command
from benchmarks.tasks import VIRTUAL_NODES
from benchmarks.turns import Side, compare

SCRIPT = "benchmarks/gpu/trainee.py"
OWN_WORKSPACE: dict[str, str | int] = {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": 0, "CUBLASLT_WORKSPACE_SIZE": 32 << 10}
"""In KiB. Where ``CUBLAS_WORKSPACE_CONFIG`` is set, as deterministic kernels need, torch 2.11 seems to parse it anew
for each matrix product with a bias, unless cuBLASLt has a workspace of its own."""


def side(name: str, task: str, setting: Setting) -> Side:
    """A contender: one process, with its coordinator where it is a job."""
    arguments = [name, task, "--device", setting.device, *(["--small"] if setting.small else [])]
    variables: dict[str, str | int] = {}
    if name == "own workspace":
        arguments[0], variables = "deterministic", OWN_WORKSPACE
    if name == "bitwise":
        command = job_command("--workers", 1, "--virtual-nodes", VIRTUAL_NODES, SCRIPT, *arguments)
    else:
        command = [sys.executable, SCRIPT, *arguments]
    return Side(name, [command], 1, [variables])


def measure(setting: Setting, note: Note) -> None:
    """Compare on each task; the ratio of two sides is taken in each round, and their median counts."""
    known = tasks(setting.small)
    rounds, seconds = (1, 0.05) if setting.small else (10, 0.6)
    for name in ("digits",) if setting.small else known:
        contenders = [side(kind, name, setting) for kind in ("plain", "deterministic", "own workspace", "bitwise")]
        _, times = compare(contenders, rounds, seconds)
        plain, pinned, ours = times["plain"], times["deterministic"], times["bitwise"]
        ratios = sorted(our / their for our, their in zip(ours, plain, strict=True))
        note(
            {
                "model": known[name].title,
                "batch": known[name].batch,
                "plain, ms": statistics.median(plain),
                "plain with deterministic kernels, ms": statistics.median(pinned),
                "the same with cuBLASLt's own workspace, ms": statistics.median(times["own workspace"]),
                "VirtualFlow, ms": statistics.median(ours),
                "over plain": statistics.median(ratios),
                "over deterministic": statistics.median(a / b for a, b in zip(ours, pinned, strict=True)),
                "lowest to highest over plain": f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
            }
        )

"""Pinning what changes bits on one machine, and describing what differs between machines; how many processors it has.

See docs/explanation/determinism.md.
"""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.utils.deterministic

from virtualflow.protocol.settings import CUBLAS_WORKSPACE, ENV_CUBLAS_WORKSPACE, Reproducibility
from virtualflow.protocol.versions import NUMERICS, PROTOCOL
from virtualflow.protocol.wording import counted

_CPU_SWITCHES = ("ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that make CPU libraries choose other kernels."""


_CUDA_SWITCHES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLASLT_WORKSPACE_SIZE")
"""The same for CUDA's: the first two turn TF32 on or off over the head of the script, the third limits the choice of
kernels. The rest of what a script sets (TF32, reduced sums of halves) is the same in all workers."""


@dataclass(frozen=True)
class Pinned:
    """What was in force before :func:`pin`, to be put back when the run is over."""

    threads: int
    deterministic: bool
    warn_only: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    fill_memory: bool

    def undo(self) -> None:
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.utils.deterministic.fill_uninitialized_memory = self.fill_memory  # type: ignore[attr-defined]


def pin(threads: int, reproducibility: Reproducibility) -> Pinned:
    """Pin the number of threads and, where bits count, refuse kernels whose results vary from call to call."""
    before = Pinned(
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )
    torch.set_num_threads(threads)
    if reproducibility == "bitwise":
        os.environ.setdefault(ENV_CUBLAS_WORKSPACE, CUBLAS_WORKSPACE)
        torch.use_deterministic_algorithms(True)
        # Else every kernel's output is filled with NaN before it is computed, which takes 4 % of a small model's step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    return before


def fingerprint(threads: int, reproducibility: Reproducibility) -> str:
    """What must be equal on all workers whatever their devices are, for people to read."""
    # What workers exchange among themselves has a fixed layout, which is not negotiated.
    version = f"torch {torch.__version__.split('+')[0]}, protocol {PROTOCOL}"
    if reproducibility == "statistical":
        return version
    # Of PYTHONHASHSEED, which cannot be changed any more: an enumerated set of strings is another one in each process.
    strings = hash("virtualflow") & 0xFFFF
    return f"{version}, numerics {NUMERICS}, {counted(threads, 'thread')}, hashes {strings:04x}"


def device_of(model: torch.nn.Module) -> torch.device:
    """Where a model is; one without parameters counts as on the CPU."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def device_name(device: torch.device) -> str:
    """What the device calls itself: a GPU's name, or the model of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine() or "cpu"
    return device.type


def describe_device(device: torch.device) -> str:
    """The device and what is known to make its kernels differ, for people to read; equal bits may still differ."""
    if device.type == "cuda":
        parts = [device_name(device), f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]  # type: ignore[no-untyped-call]
        parts += [f"{name}={os.environ[name]}" for name in _CUDA_SWITCHES if os.environ.get(name)]
    else:
        parts = [device.type, f"CPU capability {torch.backends.cpu.get_cpu_capability()}"]
        parts += [f"{name}={os.environ[name]}" for name in _CPU_SWITCHES if os.environ.get(name)]
    return ", ".join(parts)


# How many processors there are for a process.

_CGROUPS = Path("/sys/fs/cgroup")


def count_processors(cgroups: Path = _CGROUPS) -> int:
    """Those that this process may run on, and no more than its container is granted; at least 1.

    Args:
        cgroups: where the container's own control group is mounted (version 1 or 2); a process outside of containers
            finds no limit there.
    """
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(there, int(_granted(cgroups))))


def has_spare_processor(device: torch.device, workers: int) -> bool:
    """Whether a thread that exchanges takes nothing from those that compute.

    Args:
        device: that computes; an accelerator leaves the processors to others.
        workers: that may be on this machine, each with as many threads as this one; nobody knows, so it is all of them.
    """
    return device.type != "cpu" or count_processors() > workers * torch.get_num_threads()


def _granted(cgroups: Path) -> float:
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((cgroups / file).read_text() for file in files).split()
            if quota not in ("max", "-1"):
                return int(quota) / int(period)
    return float(1 << 20)

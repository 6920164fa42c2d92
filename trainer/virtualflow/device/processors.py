"""How many processors there are for a process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

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

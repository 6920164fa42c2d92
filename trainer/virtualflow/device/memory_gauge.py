"""How much memory a stretch of code has used at most, and how much it could have: of a device, or of this machine.

Memory of a process is told by Linux alone (``/proc``); elsewhere, and on devices other than CUDA's, nothing is known.
What it has freed and keeps (see ``MALLOC_TRIM_THRESHOLD_``) is resident all the same, so that a stretch of code that
finds enough of it seems to use nothing: on the CPU it is given back before the beginning.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from virtualflow.device.freed_memory import give_back_freed_memory, kilobytes, status_bytes
from virtualflow.device.settings import MemorySettings

_PROCESS = Path("/proc/self")
_MACHINE = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_RESET_PEAK = "5"
"""What resets the peak of a process's resident memory when written to its ``clear_refs``."""


@dataclass(frozen=True)
class Usage:
    """Memory of one attempt, in bytes."""

    used: int
    """The most that was used beyond what was in use when it began."""
    room: int
    """The most that it could have used."""


class MemoryGauge:
    """Measures between :meth:`begin` and :meth:`end`, in this process and on ``device``.

    It resets the peaks that ``torch.cuda.max_memory_allocated`` and the process's ``VmHWM`` tell. On the CPU the
    stretch between is slower for it, since the kernel makes its pages anew.
    """

    def __init__(self, device: torch.device, settings: MemorySettings) -> None:
        self._device = device
        self._settings = settings
        self._base: int | None = None

    @property
    def slows(self) -> bool:
        """Whether measuring costs time. Where it does not, a first use (kernels are chosen then) is better left out."""
        return self._device.type == "cpu"

    def begin(self) -> None:
        """What is used from now on is measured."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._base = torch.cuda.memory_allocated(self._device)
        elif self._device.type == "cpu":
            give_back_freed_memory()
            self._base = _reset_resident()

    def wait(self) -> None:
        """Wait for the end of the work that the device has been given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def end(self) -> Usage | None:
        """What was used since :meth:`begin`; ``None``: it cannot be told."""
        base, self._base = self._base, None
        if base is None:
            return None
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            whole = free + torch.cuda.memory_reserved(self._device)
            used = torch.cuda.max_memory_allocated(self._device) - base
            return Usage(used, int(self._settings.device_share * whole) - base)
        used = max(0, status_bytes()["VmHWM"] - base)
        available = _available()
        if available is None:
            return None
        # What this process has grown by meanwhile is part of what it could use.
        grown = max(0, status_bytes()["VmRSS"] - base)
        return Usage(used, int(self._settings.machine_share * (available + grown)))


def _reset_resident() -> int | None:
    """Reset the peak of this process's resident memory; its present size, ``None`` where that cannot be done."""
    try:
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
        return status_bytes()["VmRSS"]
    except (OSError, KeyError):
        return None


def _available() -> int | None:
    """What processes here can still take: of the machine, or of the container's control group if that is less."""
    try:
        machine = kilobytes(_MACHINE.read_text()).get("MemAvailable")
    except OSError:
        return None
    limits = [left for left in (machine, group_room(_GROUP)) if left is not None]
    return min(limits, default=None)


def group_room(root: Path) -> int | None:
    """What the control group mounted at ``root`` (version 2 or 1) may still take; ``None``: it has no limit.

    Files' pages that are not in use are given back on demand, so they count as free.
    """
    for limit, usage, statistics, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            most = (root / limit).read_text().strip()
            used = int((root / usage).read_text())
            lines = dict(line.split() for line in (root / statistics).read_text().splitlines())
        except OSError:
            continue
        if not most.isdigit() or int(most) >= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            return None
        return max(0, int(most) - used + int(lines.get(cache, 0)))
    return None

"""How much memory a stretch of code has used at most, and how much it could have: of a device, or of this machine.

Memory of a process is told by Linux alone (``/proc``); elsewhere, and on devices other than CUDA's, nothing is known.
What it has freed and keeps (see ``MALLOC_TRIM_THRESHOLD_``) is resident all the same, so that a stretch of code that
finds enough of it seems to use nothing: on the CPU it is given back before the beginning.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch

# Memory that this process has freed and its allocator keeps, and how it goes back to the kernel.
#
# A worker's allocator is told to keep what is freed (see ``MALLOC_TRIM_THRESHOLD_``), since the next step wants it
# again. But it only ever gives back what lies at the end of the heap. With each change of the members message buffers
# of other sizes take their places between what stays, and holes are left: by some 0.3 MB a change, where a message has
# a megabyte. Only the GNU C library tells of this and gives back what lies in between; with another one nothing is
# done.

_STATUS = Path("/proc/self/status")


_NAMES = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Statistics(ctypes.Structure):
    """``struct mallinfo2`` (glibc 2.33)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _NAMES)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _Statistics
    return library


def give_back_freed_memory() -> None:
    """Give what is kept just now back to the kernel; the next to allocate takes pages from it again."""
    library = _library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


class FreedMemory:
    """Keeps what this process has freed, and what is resident of it, below a limit, where it is looked at now and then.

    What is free in the heap includes what was given back. So it is told by what is resident beyond what is in use, less
    what that came to when nothing was kept (code, and memory of others than the allocator).
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._others: int | None = None

    def limit(self) -> bool:
        """Give all of it back if there is more than that; whether it was."""
        library = _library()
        resident = status_bytes().get("RssAnon")
        if resident is None or not hasattr(library, "mallinfo2"):
            return False
        told = library.mallinfo2()
        beyond = resident - told.uordblks - told.hblkhd
        if self._others is None:
            self._others = beyond - told.fordblks
        if beyond - self._others <= self._most:
            return False
        give_back_freed_memory()
        self._others = status_bytes()["RssAnon"] - told.uordblks - told.hblkhd
        return True


def status_bytes() -> dict[str, int]:
    """What Linux tells of this process's memory (``/proc/self/status``), by name; nothing elsewhere."""
    try:
        return kilobytes(_STATUS.read_text())
    except OSError:
        return {}


def kilobytes(text: str) -> dict[str, int]:
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            found[name] = 1024 * int(value.removesuffix("kB"))
    return found


_PROCESS = Path("/proc/self")
_MACHINE = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_DEVICE_SHARE = 0.85
"""The share of an accelerator's memory that may be used; optimizer and fragmentation need the rest."""
_MACHINE_SHARE = 0.5
"""The share of the memory left on a machine that a worker may grow into: other workers grow, too."""
_RESET_PEAK = "5"
"""What resets the peak of a process's resident memory when written to its ``clear_refs``."""


@dataclass(frozen=True)
class MemoryUse:
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

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base: int | None = None

    @property
    def slows(self) -> bool:
        """Whether measuring costs time. Where it does not, a first use (kernels are chosen then) is better left out."""
        return self._device.type == "cpu"

    def begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._base = torch.cuda.memory_allocated(self._device)
        elif self._device.type == "cpu":
            give_back_freed_memory()
            self._base = _reset_resident()

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def end(self) -> MemoryUse | None:
        """What was used since :meth:`begin`; ``None``: it cannot be told."""
        base, self._base = self._base, None
        if base is None:
            return None
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            whole = free + torch.cuda.memory_reserved(self._device)
            used = torch.cuda.max_memory_allocated(self._device) - base
            return MemoryUse(used, int(_DEVICE_SHARE * whole) - base)
        used = max(0, status_bytes()["VmHWM"] - base)
        available = free_bytes(self._device)
        if available is None:
            return None
        # What this process has grown by meanwhile is part of what it could use.
        grown = max(0, status_bytes()["VmRSS"] - base)
        return MemoryUse(used, int(_MACHINE_SHARE * (available + grown)))


def _reset_resident() -> int | None:
    """Reset the peak of this process's resident memory; its present size, ``None`` where that cannot be done."""
    try:
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
        return status_bytes()["VmRSS"]
    except (OSError, KeyError):
        return None


def free_bytes(device: torch.device) -> int | None:
    """Memory that this process could still take on ``device``; ``None`` where it cannot be told.

    On the CPU: of the machine, or of the container's control group if that is less.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
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

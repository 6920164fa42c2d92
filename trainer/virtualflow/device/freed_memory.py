"""Memory that this process has freed and its allocator keeps, and how it goes back to the kernel.

A worker's allocator is told to keep what is freed (see ``MALLOC_TRIM_THRESHOLD_``), since the next step wants it again.
But it only ever gives back what lies at the end of the heap. With each change of the members message buffers of other
sizes take their places between what stays, and holes are left: by some 0.3 MB a change, where a message has a megabyte.
Only the GNU C library tells of this and gives back what lies in between; with another one nothing is done.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

_STATUS = Path("/proc/self/status")


_NAMES = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Statistics(ctypes.Structure):
    """``struct mallinfo2`` (glibc 2.33)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _NAMES)


@cache
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

    Args:
        most: bytes that may be kept.
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
    """The lines ``name: number kB`` of a file of ``/proc``, in bytes."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            found[name] = 1024 * int(value.removesuffix("kB"))
    return found

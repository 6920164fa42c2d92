"""Memory that a step frees is kept for the next one, instead of being given back to the kernel in between.

The C library gives the top of its heap back as soon as 64 MB of it are free, at the latest, and takes large blocks
from the kernel one by one. Gradients are just such memory: every virtual node makes and frees a set of them, so a model
of 6 M parameters cost 27,000 page faults a step, a quarter of its time. The GNU C library can be told to wait
(``mallopt``); elsewhere, with another allocator in its place, or where the user has set its options, nothing is done.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial

from virtualflow.settings import AllocationSettings

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD`` of ``malloc.h``."""
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Environment variables by which a user has said how memory is to be kept."""


def keep_freed_memory(settings: AllocationSettings) -> Callable[[], None]:
    """Keep up to ``settings.kept`` bytes of freed memory in this process; what is returned ends it.

    Afterwards thresholds stand where the C library's own adjustment ends, since that is off once they have been set.
    """
    library = ctypes.CDLL(None)
    if not all(hasattr(library, name) for name in ("gnu_get_libc_version", "mallopt", "malloc_trim")) or any(
        name in os.environ for name in _USERS_OWN
    ):
        return lambda: None
    library.mallopt(_MMAP_THRESHOLD, settings.largest)
    library.mallopt(_TRIM_THRESHOLD, settings.kept)
    return partial(_let_go, library, settings.largest)


def give_back_freed_memory() -> None:
    """Give what is kept just now back to the kernel; the next to allocate takes pages from it again."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _let_go(library: ctypes.CDLL, largest: int) -> None:
    library.mallopt(_TRIM_THRESHOLD, 2 * largest)
    library.malloc_trim(0)

"""What several modules of the launcher wait for, in seconds, and what their workers start with."""

from __future__ import annotations

ALLOCATOR_ENVIRONMENT = {
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_ARENA_MAX": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Environment of workers, unless a user sets these; the trainer's image has the same. Without it the GNU C library
gives the memory of gradients back to the kernel after each virtual node: 27,000 page faults a step, a quarter of its
time, for a model of 6 M parameters. One arena, as each thread that exchanges would keep another one's worth: with 25 MB
of gradients a worker grew by 400 MB in 17 changes. Huge pages where the kernel has them on request (``madvise``): on a
CPU a step is 4 to 11 % shorter, as addresses are looked up less often."""
BACKOFF_FIRST = 0.1
"""The delay of the second restart in a row of something that keeps dying; it doubles."""
BACKOFF_MOST = 5.0
"""The longest such delay."""
VERDICT_GRACE = 2.0
"""A worker ended and the status does not say why: how long to wait for it before the exit itself is the reason."""
FAILURE_GRACE = 5.0
"""The job failed: how long workers may take to end by themselves."""

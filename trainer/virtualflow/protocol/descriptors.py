"""How many files and connections this process may have open."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> int:
    """Let this process have as many descriptors as it may; that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20

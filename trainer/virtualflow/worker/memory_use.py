"""How much memory a stretch of the user's code took, and how much there still is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch


def peak_of_cpu(profiler: Any) -> int | None:
    """The most bytes that torch's allocator had handed out at a time since the profiler began.

    Blocks are told apart by their addresses: now and then torch reports the end of a block that was handed out before
    it was asked to report, with the size of another one that had that address in an earlier measurement.
    """
    changes = sorted(
        _allocations(profiler.kineto_results.experimental_event_tree()), key=lambda event: int(event.start_time_ns)
    )
    held: dict[int, int] = {}
    total = most = 0
    for change in changes:
        address, size = change.extra_fields.ptr, change.extra_fields.alloc_size
        total -= held.pop(address, 0)
        if size > 0:
            held[address] = size
            total += size
            most = max(most, total)
    return most if changes else None


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    """Those of blocks on the CPU, handed out or given back, in a profiler's tree."""
    for event in events:
        fields = event.extra_fields
        if isinstance(fields, torch._C._profiler._ExtraFields_Allocation) and fields.device.type == "cpu":
            yield event
        yield from _allocations(event.children)


def free_bytes(device: torch.device) -> int | None:
    """Memory that this process could still take on ``device``; ``None`` where it cannot be told."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    limits: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")  # a container sees its own group there
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(limits)) if limits else None

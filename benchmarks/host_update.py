"""The optimizer on the host beside the optimizer on the device: how much longer is a step of eight virtual nodes?"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.played_device import BANDWIDTH
from benchmarks.steps import elastic
from benchmarks.tasks import TASKS, VIRTUAL_NODES
from benchmarks.turns import compare

MODELS = ("digits", "mlp", "charlm")
WORKERS = (1, 2)


def measure_task(task: str, workers: int, starts: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Compare on one task; what a row of the figure holds."""
    times: dict[str, list[float]] = {"bitwise": [], "hosted": []}
    for _ in range(starts):
        _, found = compare([elastic(task, workers, side) for side in times], rounds, seconds)
        for side, milliseconds in found.items():
            times[side] += milliseconds
    ratios = sorted(host / device for host, device in zip(times["hosted"], times["bitwise"], strict=True))
    row = {
        "model": TASKS[task].title,
        "workers": workers,
        "device_ms": statistics.median(times["bitwise"]),
        "host_ms": statistics.median(times["hosted"]),
        "ratio": statistics.median(ratios),
        "range": [ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]],
        "rounds_ms": times,
    }
    print(
        f"  {task:8} {workers} workers: device {row['device_ms']:8.2f} ms, host {row['host_ms']:8.2f} ms, "
        f"x {row['ratio']:.3f}",
        flush=True,
    )
    return row


def measure(quick: bool) -> dict[str, Any]:
    """All tasks, with one worker and two."""
    starts, rounds, seconds = (1, 6, 0.4) if quick else (3, 12, 0.8)
    rows = [measure_task(task, workers, starts, rounds, seconds) for task in MODELS for workers in WORKERS]
    settings = {"starts": starts, "rounds": rounds, "seconds_a_turn": seconds, "virtual_nodes": VIRTUAL_NODES}
    return {"settings": settings | {"bytes_per_second": BANDWIDTH}, "rows": rows}

"""What hashing costs: a step with checksums and compared states, over one without, with two workers."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.steps import elastic
from benchmarks.tasks import TASKS, VIRTUAL_NODES
from benchmarks.turns import compare

MODELS = ("digits", "mlp", "charlm")


def measure_task(task: str, starts: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Compare on one task; what a row of the figure holds."""
    times: dict[str, list[float]] = {"bitwise": [], "unguarded": []}
    for _ in range(starts):
        _, found = compare([elastic(task, 2, side) for side in times], rounds, seconds)
        for side, milliseconds in found.items():
            times[side] += milliseconds
    ratios = sorted(guarded / bare for guarded, bare in zip(times["bitwise"], times["unguarded"], strict=True))
    row = {
        "model": TASKS[task].title,
        "unguarded_ms": statistics.median(times["unguarded"]),
        "guarded_ms": statistics.median(times["bitwise"]),
        "ratio": statistics.median(ratios),
        "range": [ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]],
        "rounds_ms": times,
    }
    print(f"  {task:8} {row['unguarded_ms']:8.2f} ms, guarded {row['guarded_ms']:8.2f} ms, x {row['ratio']:.3f}")
    return row


def measure(quick: bool) -> dict[str, Any]:
    """All tasks."""
    starts, rounds, seconds = (1, 6, 0.4) if quick else (3, 12, 0.8)
    rows = [measure_task(task, starts, rounds, seconds) for task in MODELS]
    settings = {"starts": starts, "rounds": rounds, "seconds_a_turn": seconds, "virtual_nodes": VIRTUAL_NODES}
    return {"settings": settings, "rows": rows}

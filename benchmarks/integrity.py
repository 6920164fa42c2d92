"""What hashing costs: a step with checksums and compared states, over one without, with two workers; and what it costs
that a second worker computes a virtual node now and then.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.jobs import job_command
from benchmarks.steps import elastic
from benchmarks.tasks import TASKS, VIRTUAL_NODES
from benchmarks.turns import Side, compare

MODELS = ("digits", "mlp", "charlm")
SAMPLE = 0.01
"""The share of steps with a spot check."""


def verified(task: str) -> Side:
    """The side with spot checks."""
    options = ("--workers", 2, "--virtual-nodes", VIRTUAL_NODES, "--verify", str(SAMPLE))
    return Side("verified", [job_command(*options, "benchmarks/trainee.py", "bitwise", task)], 2)


def measure_task(task: str, starts: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Compare on one task; what a row of the figure holds."""
    times: dict[str, list[float]] = {"bitwise": [], "unguarded": [], "verified": []}
    for _ in range(starts):
        sides = [elastic(task, 2, "bitwise"), elastic(task, 2, "unguarded"), verified(task)]
        _, found = compare(sides, rounds, seconds)
        for side, milliseconds in found.items():
            times[side] += milliseconds
    ratios = sorted(guarded / bare for guarded, bare in zip(times["bitwise"], times["unguarded"], strict=True))
    row = {
        "model": TASKS[task].title,
        "unguarded_ms": statistics.median(times["unguarded"]),
        "guarded_ms": statistics.median(times["bitwise"]),
        "ratio": statistics.median(ratios),
        "range": [ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]],
        # A mean: not every turn has a step with a check.
        "verified_ratio": statistics.fmean(times["verified"]) / statistics.fmean(times["bitwise"]),
        "rounds_ms": times,
    }
    print(
        f"  {task:8} {row['unguarded_ms']:8.2f} ms, guarded {row['guarded_ms']:8.2f} ms, x {row['ratio']:.3f}, "
        f"with spot checks x {row['verified_ratio']:.3f}"
    )
    return row


def measure(quick: bool) -> dict[str, Any]:
    """All tasks."""
    starts, rounds, seconds = (1, 6, 0.4) if quick else (3, 12, 0.8)
    rows = [measure_task(task, starts, rounds, seconds) for task in MODELS]
    settings = {"starts": starts, "rounds": rounds, "seconds_a_turn": seconds, "virtual_nodes": VIRTUAL_NODES}
    return {"settings": settings | {"sample": SAMPLE}, "rows": rows}

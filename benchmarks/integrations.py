"""What an integration costs: steps of a library by itself, over those of the same script made elastic."""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from typing import Any

from benchmarks.jobs import job_command
from benchmarks.tasks import TASKS, VIRTUAL_NODES
from benchmarks.turns import Side, compare

LIBRARIES = {
    "transformers": ("transformers", "Transformers, `Trainer`"),
    "accelerate": ("accelerate", "Accelerate, a loop of one's own"),
    "fabric": ("lightning", "Lightning Fabric, a loop of one's own"),
    "lightning": ("lightning", "Lightning, `Trainer`"),
}
"""What each is imported as, and what the table calls it."""
MODELS = ("charlm", "charlm-3m")
"""The step of the first is short, so the loop around it counts; that of the second is a short one of real training."""
WARM_UP = (3, 10)
"""Steps of the turns before those that count."""


def sides(library: str, task: str) -> list[Side]:
    """The library by itself, and a job of the command line with one worker and its coordinator."""
    words = (library, "own", task)
    own = [sys.executable, "-m", "benchmarks.integration_trainee", *words]
    script = ("benchmarks/integration_trainee.py", library, "elastic", task)
    job = job_command("--workers", 1, "--virtual-nodes", VIRTUAL_NODES, *script)
    return [Side("own", [own], 1), Side("elastic", [job], 1)]


def measure_library(library: str, task: str, starts: int, rounds: int, seconds: float) -> dict[str, Any]:
    """One row of the figure."""
    times: dict[str, list[float]] = {"own": [], "elastic": []}
    for _ in range(starts):
        _, found = compare(sides(library, task), rounds, seconds, WARM_UP)
        for side, milliseconds in found.items():
            times[side] += milliseconds
    ratios = sorted(elastic / own for own, elastic in zip(times["own"], times["elastic"], strict=True))
    row: dict[str, Any] = {
        "library": LIBRARIES[library][1],
        "task": task,
        "model": TASKS[task].title,
        "own_ms": statistics.median(times["own"]),
        "elastic_ms": statistics.median(times["elastic"]),
        "ratio": statistics.median(ratios),
        "range": [ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]],
        "rounds_ms": times,
    }
    print(
        f"  {library:12} {task:9}: {row['own_ms']:8.2f} ms by itself, {row['elastic_ms']:8.2f} ms elastic, "
        f"x {row['ratio']:.3f}",
        flush=True,
    )
    return row


def measure(quick: bool) -> dict[str, Any]:
    """All libraries."""
    missing = sorted({module for module, _ in LIBRARIES.values() if importlib.util.find_spec(module) is None})
    if missing:
        return {"skipped": f"needs {', '.join(missing)}: pip install -e '.[trainer,bench,integrations]'"}
    starts, rounds, seconds = (1, 4, 0.4) if quick else (2, 8, 0.4)
    load = os.getloadavg()[1]
    rows = [measure_library(library, task, starts, rounds, seconds) for task in MODELS for library in LIBRARIES]
    settings = {"starts": starts, "rounds": rounds, "seconds_a_turn": seconds, "virtual_nodes": VIRTUAL_NODES}
    loads = [load, os.getloadavg()[1]]
    return {"settings": settings, "rows": [{**row, "load": loads} for row in rows]}

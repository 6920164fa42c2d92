"""Steps per second over plain PyTorch (one worker) and DistributedDataParallel (two), at equal batches and threads."""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks.jobs import free_port, job_command
from benchmarks.tasks import TASKS, VIRTUAL_NODES, elastic_mode
from benchmarks.turns import WARM_UP, Side, compare

MODELS = ("digits", "mlp", "charlm", "transformer")
LONG = frozenset({"transformer"})
"""Whose steps take seconds: what varies from start to start is lost in them, and a statistical worker would need
minutes to try its micro-batches."""


def modes() -> list[str]:
    """The kinds of reproducibility that this library has."""
    known = ["bitwise"]
    try:
        elastic_mode("statistical")
    except ValueError as error:
        print(f"  left out: {error}", flush=True)
        return known
    return [*known, "statistical"]


def plain(task: str, workers: int) -> Side:
    """The side without VirtualFlow."""
    command = [sys.executable, "-m", "benchmarks.trainee", "plain", task]
    port = free_port()
    place: dict[str, str | int] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": workers}
    return Side("plain", [command] * workers, workers, [{**place, "RANK": rank} for rank in range(workers)])


def elastic(task: str, workers: int, mode: str) -> Side:
    """The side with VirtualFlow: a job of the command line, with its coordinator."""
    script = ("benchmarks/trainee.py", mode, task)
    command = job_command("--workers", workers, "--virtual-nodes", VIRTUAL_NODES, *script)
    return Side(mode, [command], workers)


def measure_task(task: str, workers: int, sides: list[str], starts: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Compare on one task; what a row of the figure holds."""
    times: dict[str, list[float]] = {side: [] for side in ("plain", *sides)}
    # The same program is up to 5 % faster or slower from one start to the next, by where its memory comes to lie.
    for _ in range(starts):
        contenders = [plain(task, workers), *(elastic(task, workers, mode) for mode in sides)]
        steps, found = compare(contenders, rounds, seconds, (1, 3) if task in LONG else WARM_UP)
        for side, milliseconds in found.items():
            times[side] += milliseconds
    row: dict[str, Any] = {
        "task": task,
        "model": TASKS[task].title,
        "workers": workers,
        "batch": TASKS[task].batch,
        "steps_in_a_turn": steps,
        "plain_ms": statistics.median(times["plain"]),
        "rounds_ms": times,
    }
    for mode in sides:
        ratios = sorted(theirs / ours for theirs, ours in zip(times["plain"], times[mode], strict=True))
        row[f"{mode}_ms"] = statistics.median(times[mode])
        row[f"{mode}_ratio"] = statistics.median(ratios)
        row[f"{mode}_range"] = [ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]]
        print(
            f"  {task:8} {workers} workers: plain {row['plain_ms']:8.2f} ms, {mode} {row[f'{mode}_ms']:8.2f} ms, "
            f"throughput x {row[f'{mode}_ratio']:.2f}",
            flush=True,
        )
    return row


def measure(quick: bool) -> dict[str, Any]:
    """All tasks, with one worker and two."""
    starts, rounds, seconds = (1, 4, 0.4) if quick else (3, 8, 0.8)
    sides = modes()
    rows = [
        measure_task(task, workers, *((["bitwise"], 1) if task in LONG else (sides, starts)), rounds, seconds)
        for task in MODELS
        for workers in (1, 2)
    ]
    settings = {"starts": starts, "rounds": rounds, "seconds_a_turn": seconds, "virtual_nodes": VIRTUAL_NODES}
    return {"settings": settings, "rows": rows}

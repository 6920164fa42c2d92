"""The chosen exchange beside every other one: how far from the best is what the cost model chooses?

All schedules that an expert can ask for live at once and take turns, so the best is found by exhaustion in one run.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.jobs import job_command
from benchmarks.tasks import VIRTUAL_NODES
from benchmarks.turns import Side, compare

CHOSEN = "auto"
OTHERS = ("gather late", "gather early", "reduce-scatter late", "reduce-scatter early")
CASES = ((1 << 14, 8), (1 << 17, 8), (1 << 19, 8), (1 << 21, 8), (1 << 23, 16), (3 << 23, 16))
"""Bytes of a gradient, and the tensors that make it."""
WORKERS = (2, 3)


def side(name: str, workers: int, size: int, tensors: int) -> Side:
    """The job that exchanges in this way."""
    options = ("--workers", workers, "--virtual-nodes", VIRTUAL_NODES)
    return Side(name, [job_command(*options, "benchmarks/exchange_worker.py", name, size, tensors)], workers)


def measure_case(workers: int, size: int, tensors: int, rounds: int, seconds: float) -> dict[str, Any]:
    """One size; what a row of the figure holds."""
    names = (CHOSEN, *OTHERS)
    _, times = compare([side(name, workers, size, tensors) for name in names], rounds, seconds)
    medians = {name: statistics.median(times[name]) for name in names}
    best = min(OTHERS, key=lambda name: medians[name])
    # In each round beside the best one: the machine's speed changes from minute to minute.
    ratios = [chosen / other for chosen, other in zip(times[CHOSEN], times[best], strict=True)]
    row = {
        "workers": workers,
        "kib": size // 1024,
        "best": best,
        "best_ms": medians[best],
        "auto_ms": medians[CHOSEN],
        "ratio": statistics.median(ratios),
        "worst_ms": max(medians[name] for name in OTHERS),
        "rounds_ms": times,
    }
    print(
        f"  {workers} workers, {row['kib']:6} KiB: chosen {row['auto_ms']:.2f} ms, best {row['best_ms']:.2f} ms "
        f"({best}), worst {row['worst_ms']:.2f} ms, chosen / best {row['ratio']:.3f}",
        flush=True,
    )
    return row


def measure(quick: bool) -> dict[str, Any]:
    """All sizes."""
    rounds, seconds = (3, 0.3) if quick else (9, 0.8)
    cases = CASES[1::2] if quick else CASES
    rows = [measure_case(workers, *case, rounds, seconds) for workers in WORKERS for case in cases]
    return {"settings": {"rounds": rounds, "seconds_a_turn": seconds, "virtual_nodes": VIRTUAL_NODES}, "rows": rows}

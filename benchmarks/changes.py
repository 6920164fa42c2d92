"""How long a change of the workers stops the training: VirtualFlow's survivors beside a restart under torchrun."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import torchrun
from benchmarks.jobs import run_job

SCHEDULES = ("15:=3,30:=2,45:=3,60:=2,75:=3,90:=2", "15:kill,30:=2,45:kill,60:=2,75:kill,90:=2")
"""Between two and three workers, as under torchrun; then SIGKILLs, each only after the last one's replacement is in."""
STEPS = 120


def ours(found: dict[str, list[float]], *options: str) -> list[float]:
    """Run the schedules; add each pause to its kind, and return the medians of undisturbed steps, in milliseconds.

    Args:
        found: pauses by kind.
        options: of ``virtualflow run``.
    """
    steps = []
    for schedule in SCHEDULES:
        report, _ = run_job("--workers", 2, *options, "--schedule", schedule, "examples/digits.py", "--steps", STEPS)
        steps.append(float(report["step_ms"]))
        for change in report["changes"]:
            if change["pause_ms"] is not None:
                found.setdefault(kind_of(change), []).append(change["pause_ms"])
    return steps


def kind_of(change: dict[str, Any]) -> str:
    """What sort of a change it is: grow, shrink or kill; the replacement of a killed worker is a grow."""
    if change["cause"] in ("lost", "broken", "restart"):
        return "kill"
    return "grow" if change["to"] > change["from"] else "shrink"


def measure(quick: bool) -> dict[str, Any]:
    """Runs of both, in turn."""
    runs = 1 if quick else 3
    found: dict[str, list[float]] = {}
    restarts: dict[str, list[float]] = {}
    repeated: dict[str, list[float]] = {}
    steps: list[float] = []
    units: list[float] = []
    for _ in range(runs):
        steps += ours(found)
        theirs = torchrun.measure(30)
        units.append(theirs["step_ms"])
        for kind, change in theirs["changes"].items():
            restarts.setdefault(kind, []).append(change["pause_ms"])
            repeated.setdefault(kind, []).append(change["repeated_steps"])
    unit = statistics.median(units)
    rows = []
    for kind in ("grow", "shrink", "kill"):
        pauses = sorted(found[kind])
        row = {
            "change": kind,
            "pause_ms": statistics.median(pauses),
            "range_ms": [pauses[len(pauses) // 10], pauses[-1 - len(pauses) // 10]],
            "changes": len(pauses),
            "plain_steps": statistics.median(pauses) / unit,
            "torchrun_ms": statistics.median(restarts[kind]),
            "torchrun_repeated": statistics.median(repeated[kind]),
            "ratio": statistics.median(restarts[kind]) / statistics.median(pauses),
        }
        rows.append(row)
        print(
            f"  {kind:6} {row['pause_ms']:8.1f} ms = {row['plain_steps']:.1f} plain steps; "
            f"torchrun {row['torchrun_ms']:8.0f} ms, {row['ratio']:.0f} times as long",
            flush=True,
        )
    settings = {"runs": runs, "rendezvous": torchrun.RENDEZVOUS, "steps_from_snapshot_to_snapshot": 10}
    return {
        "settings": settings,
        "rows": rows,
        "plain_step_ms": unit,
        "step_ms": statistics.median(steps),
        "pauses_ms": found,
        "torchrun_ms": restarts,
    }

"""How long survivors pause when a joiner needs 600 MB of state: 50 million parameters with Adam, on loopback.

Without ``--workload`` it runs this very file as a job that grows from two workers to three and shrinks back several
times. The pause is from the last step before a change to the first after it; what it costs is that minus an undisturbed
step with as many workers, which shares the machine's cores in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.jobs import run_job

WIDTH, LAYERS = 2_048, 12
"""A perceptron of 50.4 million parameters: 201 MB, and 604 MB with Adam's two moments."""
SAMPLES, BATCH, VIRTUAL_NODES = 64, 12, 6


def train(steps: int) -> None:
    """The workload: few samples, so that a step is short beside its state."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import TensorDataset

    import virtualflow as vf

    torch.manual_seed(0)
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    data = TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH))
    began = time.perf_counter()
    with vf.elastic(model, optimizer, data, batch_size=BATCH, steps=steps, virtual_nodes=VIRTUAL_NODES) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            now = time.perf_counter()
            if run.leader:
                print(json.dumps({"pid": os.getpid(), "step": step.number, "ms": 1_000 * (now - began)}), flush=True)
            began = now


def measure(changes: int, gap: int, *options: str) -> dict[str, Any]:
    """One run with ``changes`` pairs of a grow and a shrink, ``gap`` steps apart, and these options of the command."""
    points = [gap * (n + 1) for n in range(2 * changes)]
    schedule = ",".join(f"{point}:={3 - n % 2}" for n, point in enumerate(points))
    steps = points[-1] + 2 * gap
    script = str(Path(__file__).resolve())
    report, printed = run_job("--workers", 2, *options, "--schedule", schedule, script, "--workload", "--steps", steps)
    lines = [json.loads(line[line.index("{") :]) for line in printed.splitlines() if '"ms"' in line]
    times = {line["step"]: line["ms"] for line in lines}
    found = sorted((change for change in report["changes"] if change["pause_ms"]), key=lambda change: change["step"])
    undisturbed: dict[int, list[float]] = {}
    for before, after in zip(found, [*found[1:], {"step": steps}], strict=True):
        quiet = range(before["step"] + 2, after["step"] - 1)
        undisturbed.setdefault(before["to"], []).extend(times[step] for step in quiet if step in times)
    medians = {workers: statistics.median(values) for workers, values in undisturbed.items() if values}
    rows = []
    for change in found:
        base = medians.get(change["to"])
        over = None if base is None else change["pause_ms"] - base
        rows.append({**change, "step_ms": base, "over_ms": over})
    return {"changes": rows, "step_ms": medians, "steps": steps}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over grows and shrinks."""

    def median(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    summary: dict[str, Any] = {}
    for name, wanted in (
        ("grow", lambda row: row["to"] > row["from"]),
        ("shrink", lambda row: row["to"] < row["from"]),
    ):
        chosen = [row for row in rows if wanted(row)]
        moved = [row for row in chosen if row.get("state_bytes") and row.get("state_ms")]
        summary[name] = {
            "count": len(chosen),
            "pause_ms": median([row["pause_ms"] for row in chosen]),
            "over_ms": median([row["over_ms"] for row in chosen if row["over_ms"] is not None]),
            "state_ms": median([row["state_ms"] for row in moved]),
            "state_mb": median([row["state_bytes"] / 1e6 for row in moved]),
            "state_mb_per_s": median([row["state_bytes"] / 1e3 / row["state_ms"] for row in moved]),
            "donors": median([row["state_donors"] for row in moved]),
        }
    return summary


def main() -> None:
    """Measure and print; ``--json`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--changes", type=int, default=4, help="grows (and shrinks) in a run")
    parser.add_argument("--gap", type=int, default=20, help="steps between two changes")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--workload", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=20, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.workload:
        train(args.steps)
        return
    rows = []
    for _ in range(args.runs):
        rows.extend(measure(args.changes, args.gap)["changes"])
    summary = summarize(rows)
    for row in rows:
        facts = {
            name: row.get(name) for name in ("from", "to", "pause_ms", "step_ms", "over_ms", "state_ms", "state_donors")
        }
        print("  " + "  ".join(f"{k} {v:.0f}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items()))
    for name, facts in summary.items():
        print(f"{name}: " + ", ".join(f"{k} {v:.1f}" for k, v in facts.items() if v is not None))
    if args.json:
        args.json.write_text(json.dumps({"summary": summary, "changes": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

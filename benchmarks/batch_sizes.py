"""Which global batch would be best? Tried on one worker that never holds more than a small micro-batch."""

from __future__ import annotations

from typing import Any

from benchmarks.jobs import run_job

EPOCHS = 20
MICRO_BATCH = 16
"""Samples that the device holds at a time."""
BATCHES = (32, 64, 128, 256, 512, 1024)

TEXT = """\
`examples/digits.py` on one worker for 20 epochs with one learning rate, [never more than 16 samples on the
device](../how-to/workloads.md#choice-of-the-global-batch). More workers give the same digest."""


def measure(quick: bool) -> dict[str, Any]:
    """One job a size."""
    epochs = 2 if quick else EPOCHS
    rows = []
    for batch in BATCHES:
        nodes = batch // MICRO_BATCH
        script = ("examples/digits.py", "--epochs", epochs, "--batch-size", batch)
        report, _ = run_job("--workers", 1, "--virtual-nodes", nodes, *script)
        row = {
            "batch": batch,
            "virtual_nodes": nodes,
            "steps": report["steps"],
            "accuracy": report["metrics"]["test_accuracy"],
            "seconds": report["seconds"],
            "digest": report["digest"],
        }
        print(f"  {batch:5} samples, {nodes:3} virtual nodes: test accuracy {row['accuracy']:.4f}", flush=True)
        rows.append(row)
    return {"settings": {"epochs": epochs, "micro_batch": MICRO_BATCH}, "rows": rows}

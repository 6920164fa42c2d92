"""One digest, however many processes share the device, and whatever happens to them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.gpu.parts import Note, Setting, Wrong
from benchmarks.jobs import run_job

RUNS: tuple[tuple[str, int, str], ...] = (
    ("one process", 1, ""),
    ("a resize and a kill", 2, "8:=4,16:kill,24:=2"),
    ("two processes", 2, ""),
    ("four processes", 4, ""),
)
"""What is told, how many workers begin, and what happens to them."""
STEPS = 32


def measure(setting: Setting, note: Note) -> None:
    """Run them for a CNN with batch norm and dropout and for two transformers, of which the larger one's sums wait in
    host memory; compare the digests. The runs of a model share the device, too: only bits count here.
    """
    runs = RUNS if not setting.small else (RUNS[0], ("a kill and a new worker", 2, "3:kill,6:=2"))
    differ = []
    for name in ("digits",) if setting.small else ("digits", "charlm", "large"):
        with ThreadPoolExecutor(len(runs)) as pool:
            rows = list(pool.map(partial(_run, name, setting), runs))
        repeated = sum(row["repeated steps"] for row in rows)
        note({"model": name, **{row["run"]: row["digest"] for row in rows}, "repeated steps": repeated})
        if len({row["whole"] for row in rows}) > 1:
            differ.append(name)
    if differ:
        raise Wrong(f"the digests of {' and '.join(differ)} differ between numbers of processes")


def _run(name: str, setting: Setting, run: tuple[str, int, str]) -> dict[str, Any]:
    title, workers, schedule = run
    script = ["benchmarks/gpu/training.py", name, "--device", setting.device]
    more = ["--schedule", schedule] if schedule else []
    steps = ["--steps", 8, "--small"] if setting.small else ["--steps", STEPS]
    report, _ = run_job("--workers", workers, *more, *script, *steps)
    return {
        "run": f"{title}: `{schedule}`" if schedule else title,
        "digest": f"`{report['digest'][:12]}`",
        "repeated steps": report["repeated_steps"],
        "whole": (report["digest"], report["optimizer_digest"]),
    }

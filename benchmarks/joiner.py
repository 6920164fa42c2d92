"""What a joiner's start costs the worker that trains meanwhile, where a core is free for it.

One worker trains on one core; then a second boots (imports, model, connection, rehearsal) on the other. Step times of
the first, before and meanwhile; the same with nobody, for the noise of the machine; and with a process that boots the
same script but has nothing to do with the job, for what cores share (caches, memory, a physical core's threads).
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.jobs import run_job

CASES: dict[str, tuple[list[str], str]] = {
    "nothing": ([], ""),
    "a stranger boots": ([], "1"),
    "a joiner boots": (["--schedule", "300:=2"], ""),
}
"""What happens on the other core: options of the job, and whether the script starts a stranger."""


def measure(quick: bool) -> dict[str, Any]:
    """Runs of each case, in turn."""
    runs = 1 if quick else 4
    ratios: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(runs):
        for name, (options, stranger) in CASES.items():
            _, output = run_job("--workers", 1, *options, "benchmarks/pinned.py", STRANGER=stranger)
            line = next(json.loads(line) for line in output.splitlines() if line.startswith('{"before"'))
            ratios[name].append(line["during"] / line["before"])
            print(f"  {name:16} {line['before']:.2f} ms  {line['during']:.2f} ms  {ratios[name][-1]:.3f}", flush=True)
    rows = [
        {"other_core": name, "ratio": statistics.median(values), "range": [min(values), max(values)]}
        for name, values in ratios.items()
    ]
    return {"settings": {"runs": runs}, "rows": rows, "ratios": ratios}

"""What hashing costs: steps with checksums and compared states beside steps without, and what it costs that a second
worker computes a virtual node now and then.

Both are measured within one job of two workers, step beside step (``benchmarks/unguarded.py``): whole processes differ
by up to 5 % from start to start, which is many times what is to be measured here.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import run_job
from benchmarks.tasks import TASKS, VIRTUAL_NODES

STEPS = {"digits": 3_200, "mlp": 384, "charlm": 960}
"""Of a job; whole sweeps of the state, with and without hashes in equal parts."""
WARM_UP = 64
"""Steps that do not count."""
SAMPLE = 0.01
"""The share of steps with a spot check that the figure is for."""
MEASURED_SAMPLE = 0.25
"""That of the measured job, so that there are many."""


Times = Mapping[int, tuple[float, float]]
"""Of each step, by its number: seconds of the clock, and of the CPU in the leader's process."""


def times_of(task: str, steps: int, *options: str, verify: float | None = None, workers: int = 2) -> Times:
    """Run a job; what its steps took."""
    checks = () if verify is None else ("--verify", str(verify))
    if "--seal" not in options:
        checks = (*checks, "--insecure-plaintext")  # where frames are sealed, their seals take the checksums' place
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "seconds.json"
        script = ("benchmarks/unguarded.py", task, steps, out.as_posix(), *options)
        run_job("--workers", workers, "--virtual-nodes", VIRTUAL_NODES, *checks, *script)
        found: dict[str, tuple[float, float]] = json.loads(out.read_text())
    return {int(number): taken for number, taken in found.items() if int(number) >= WARM_UP}


def ratios(times: Times, marked: Sequence[int]) -> tuple[float, float]:
    """The median of each marked step over the mean of its two neighbours, of the clock and of the CPU.

    Only steps whose neighbours are not marked themselves count.
    """
    among = set(marked)
    alone = [step for step in marked if {step - 1, step + 1} <= times.keys() - among]
    clock, cpu = (
        statistics.median(
            times[step][kind] / statistics.fmean((times[step - 1][kind], times[step + 1][kind])) for step in alone
        )
        for kind in (0, 1)
    )
    return clock, cpu


def measure_task(task: str, starts: int, steps: int) -> dict[str, Any]:
    """One task; what a row of the figure holds."""
    from benchmarks.unguarded import guarded
    from virtualflow.step.spot_checks import choose_virtual_node

    hashed, checked, bare_ms, guarded_ms = [], [], [], []
    for _ in range(starts):
        times = times_of(task, steps)
        marked = [step for step in times if guarded(step)]
        hashed.append(ratios(times, marked))
        guarded_ms += [1_000 * times[step][0] for step in marked]
        bare_ms += [1_000 * times[step][0] for step in times.keys() - set(marked)]
        times = times_of(task, steps // 2, "--always", verify=MEASURED_SAMPLE)
        due = [step for step in times if choose_virtual_node(0, step, VIRTUAL_NODES, MEASURED_SAMPLE) is not None]
        checked.append(ratios(times, due)[0])
    clock, cpu = zip(*hashed, strict=True)
    row = {
        "model": TASKS[task].title,
        "unguarded_ms": statistics.median(bare_ms),
        "guarded_ms": statistics.median(guarded_ms),
        "ratio": statistics.median(clock),
        "range": [min(clock), max(clock)],
        "cpu_ratio": statistics.median(cpu),
        "cpu_range": [min(cpu), max(cpu)],
        "checked_step": statistics.median(checked),
        "verified_ratio": 1 + SAMPLE * (statistics.median(checked) - 1),
        "pairs": len(guarded_ms),
    }
    print(
        f"  {task:8} {row['unguarded_ms']:8.2f} ms, guarded {row['guarded_ms']:8.2f} ms, x {row['ratio']:.4f}, "
        f"CPU x {row['cpu_ratio']:.4f}, with spot checks x {row['verified_ratio']:.4f}",
        flush=True,
    )
    return row


def measure(quick: bool) -> dict[str, Any]:
    """All tasks."""
    starts = 1 if quick else 2
    rows = [measure_task(task, starts, steps // 4 if quick else steps) for task, steps in STEPS.items()]
    return {"settings": {"starts": starts, "virtual_nodes": VIRTUAL_NODES, "sample": SAMPLE}, "rows": rows}

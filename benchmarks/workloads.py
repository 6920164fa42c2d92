"""Trainings as people run them, each on several numbers of workers and through changes: one digest, or no figure.

What a training prints (``examples/workloads``) is read with the time at which it comes, so that how good the model is
can be drawn over the clock.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.jobs import LIMIT, ROOT, environment, job_command, running

WORKERS = (1, 2, 4)
CHANGING = 2
"""Workers with which the run begins that is disturbed."""
PACKAGES = ("transformers", "peft", "sklearn")

TEXT = """\
The small sizes of [the workloads](../how-to/workloads.md) on 1, 2 and 4 workers, and once through changes: 2 workers,
SIGKILL of the leader after 1/4 of the steps, 3 workers after 1/2, 1 after 3/4. **All four runs of a row end with the
same digests** of weights and optimizer, and the same metric. *Pauses*, on busy cores: the kill, its replacement, the
join, the drain."""


@dataclass(frozen=True)
class Workload:
    """One of them, in its small size."""

    name: str
    script: str
    model: str
    steps: int
    place: str
    """The option that says where it writes, if any."""

    def command(self, steps: int, directory: Path) -> list[str]:
        """The script with its arguments."""
        where = [self.place, str(directory / "written")] if self.place else []
        return [self.script, "--steps", str(steps), *where]


WORKLOADS = (
    Workload("resnet", "examples/workloads/resnet.py", "ResNet-18, a quarter as wide; digits", 96, ""),
    Workload("bert", "examples/workloads/bert.py", "BERT, 2 layers of 64; pairs of sentences", 160, "--out"),
    Workload("diffusion", "examples/workloads/diffusion.py", "U-Net that denoises; digits", 160, ""),
    Workload("pretraining", "examples/workloads/pretraining.py", "transformer on bytes; text shards", 200, "--data"),
    Workload("lora", "examples/lora.py", "Llama, 2 layers of 128, LoRA; text", 120, "--out"),
)

_POINT = re.compile(r"step \d+: (?:test accuracy|held-out loss) ([\d.]+)")
_LOSS = re.compile(r"\{'loss': '?([\d.]+)")
"""As a Trainer prints it."""
_END = re.compile(r"(test accuracy|held-out loss) ([\d.]+)")
_PARAMETERS = re.compile(r"([\d,]+) parameters")
_CHANGE = re.compile(r"(\d+) workers? → (\d+) workers? at step \d+ \(.*\): pause")


@dataclass(frozen=True)
class Told:
    """What a job has printed, read with the seconds since its start."""

    metric: str
    value: str
    """At the end, with the digits that were printed."""
    parameters: int
    drawn: str
    """What the points are: the metric, or the training loss where that is judged at the end only."""
    points: list[tuple[float, float]]
    """(seconds, value) as it trained."""
    changes: list[tuple[float, str]]
    """(seconds, ``2 → 1``)."""


def read(lines: Sequence[tuple[float, str]]) -> Told:
    """Find in the lines of a job what the figure is made of.

    Raises:
        ValueError: it does not say how good the model is, or how large.
    """
    text = "\n".join(line for _, line in lines)
    ends, sizes = _END.findall(text), _PARAMETERS.findall(text)
    if not ends or not sizes:
        raise ValueError(f"the job has not told its metric and its parameters:\n{text}")
    metric, value = ends[-1]
    judged, trained = (
        [(at, float(found[1])) for at, line in lines if (found := kind.match(line))] for kind in (_POINT, _LOSS)
    )
    changes = [(at, f"{found[1]} → {found[2]}") for at, line in lines if (found := _CHANGE.search(line))]
    drawn = metric if judged else "training loss"
    return Told(metric, value, int(sizes[-1].replace(",", "")), drawn, judged or trained, changes)


def leader_at(audit: Sequence[dict[str, Any]], step: int) -> str:
    """The worker to which virtual node 0 was assigned in that step."""
    (worker,) = (line["worker"] for line in audit if line["step"] == step and line["virtual_node"] == 0)
    return str(worker)


def schedule_of(steps: int) -> str:
    """A kill, a join and a drain, evenly over the steps: a little behind those at which the model is judged."""
    return f"{steps // 4 + 2}:kill,{steps // 2 + 2}:=3,{3 * steps // 4 + 2}:=1"


def run(workload: Workload, steps: int, workers: int, schedule: str | None = None) -> dict[str, Any]:
    """Run one job to its end; its report, and what it told."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        report, audit = directory / "report.json", directory / "audit.jsonl"
        disturbed = ["--schedule", schedule] if schedule else []
        options = ["--workers", workers, *disturbed, "--report", str(report), "--audit", str(audit)]
        command = job_command(*options, *workload.command(steps, directory))
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        limit = threading.Timer(LIMIT, process.terminate)
        limit.start()
        with running(process):
            assert process.stdout is not None
            lines = [(round(time.monotonic() - began, 2), line.rstrip("\n")) for line in process.stdout]
        limit.cancel()
        if process.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n" + "\n".join(line for _, line in lines))
        found = {"report": json.loads(report.read_text()), "told": read(lines)}
        if schedule:
            kill = found["report"]["changes"][0]
            leader = leader_at([json.loads(line) for line in audit.read_text().splitlines()], kill["step"] - 1)
            if not kill["reason"].startswith(f"{leader} lost"):
                sys.exit(f"{workload.name}: the leader was {leader}, but {kill['reason']}")
        return found


def compare(name: str, runs: dict[str, dict[str, Any]]) -> None:
    """End the measurement unless all runs have come to the same."""
    ends = {
        side: (found["report"]["digest"], found["report"]["optimizer_digest"], found["told"].value)
        for side, found in runs.items()
    }
    if len(set(ends.values())) != 1:
        sys.exit(f"{name}: the runs have not come to the same: {ends}")


def measure_workload(workload: Workload, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row of the table, and a panel of the plot."""
    runs: dict[str, dict[str, Any]] = {}
    sides = [(str(workers), workers, None) for workers in WORKERS] + [("changing", CHANGING, schedule_of(steps))]
    for side, workers, schedule in sides:
        runs[side] = run(workload, steps, workers, schedule)
        report, told = runs[side]["report"], runs[side]["told"]
        print(
            f"  {workload.name:10} {side:>8}: {report['seconds']:6.1f} s, {told.metric} {told.value}, "
            f"digest {report['digest'][:12]}",
            flush=True,
        )
    compare(workload.name, runs)
    report, told = runs["changing"]["report"], runs["changing"]["told"]
    row = {
        "workload": workload.name,
        "script": workload.script,
        "model": workload.model,
        "parameters": told.parameters,
        "steps": steps,
        "metric": told.metric,
        "value": told.value,
        "seconds": {side: found["report"]["seconds"] for side, found in runs.items()},
        "changes": report["changes"],
        "repeated_steps": report["repeated_steps"],
        "digest": report["digest"],
        "optimizer_digest": report["optimizer_digest"],
    }
    panel = {"name": workload.name, "undisturbed": asdict(runs[str(CHANGING)]["told"]), "disturbed": asdict(told)}
    return row, panel


def measure(quick: bool) -> dict[str, Any]:
    """All of them."""
    absent = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if absent:
        return {"skipped": f"it takes {', '.join(absent)}: install the extras trainer, peft and bench"}
    rows, panels = [], []
    for workload in WORKLOADS:
        row, panel = measure_workload(workload, workload.steps // 4 if quick else workload.steps)
        rows.append(row)
        panels.append(panel)
    return {"settings": {"workers": WORKERS, "begins_with": CHANGING}, "rows": rows, "panels": panels}

"""Whether a long job grows: memory, descriptors and threads of its processes over many steps and changes.

A job of ``virtualflow run`` with an exchange of a given size in each step. By ``virtualflow scale`` and SIGKILL it
changes between two and three workers all the time, evenly over its steps; the worker that has served longest is left
alone, and sees all changes. Every so many steps each process is looked at. Through what is measured after the first
tenth of the steps goes a line, whose slope says whether it grows.

Memory is what is resident (``/proc/PID/statm``): unlike a proportional share it does not change when another process
that maps the same library comes or goes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT, environment, job_command, running
from benchmarks.slopes import fit, judge

STEPS, CHANGES, BYTES = 100_000, 1_000, 25_000_000
QUICK = {"steps": 600, "changes": 12, "bytes": 1_000_000}
FEWEST, MOST = 2, 3
"""Workers."""
SLACK = 20
"""Steps at the end in which no change is begun."""
LOOK = 0.1
"""Seconds between two looks at the job, in which it makes one step at least."""
SAMPLES = 1_000
"""Of each process in a run, about."""
WARM_UP = 0.1
"""The share of the steps that does not count: allocators and caches fill."""
TOLERANCE = {"memory_mb": (0.02, 0.0), "descriptors": (0.0, 5.0), "threads": (0.0, 5.0)}
"""Growth over the whole run that does not matter: a share of the mean, and a number. Memory has the noise of
allocators; a change opens some descriptors and threads for a while."""
STUCK = 300.0
"""Seconds without a step after which the job is taken to hang."""
KEPT = 500
"""Samples of each line of the plot that stay in the figure's file."""

Sample = dict[str, float]


def train(steps: int, exchanged: int, pace: Path) -> None:
    """The workload: a matrix whose gradient has so many bytes, and next to no computing.

    It makes no step beyond the number in the file ``pace``, so that there are steps left for the changes to come.
    """
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import TensorDataset

    import virtualflow as vf

    torch.manual_seed(0)
    width = max(8, round((exchanged / 4) ** 0.5))
    model = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    data = TensorDataset(torch.randn(64, width), torch.randn(64, width))
    with vf.elastic(model, optimizer, data, batch_size=4, steps=steps, virtual_nodes=4) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            while run.completed_steps < steps and run.completed_steps >= int(pace.read_text()):
                time.sleep(0.01)


@dataclass
class Watched:
    """What has been seen of one process."""

    kind: str
    samples: list[tuple[int, Sample]] = field(default_factory=list)
    """Steps of the job, and what there was of it."""


def look_at(pid: int) -> Sample | None:
    """What a process has now; ``None``: there is none."""
    process = Path(f"/proc/{pid}")
    try:
        resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {
            "memory_mb": resident / 1e6,
            "descriptors": len(os.listdir(process / "fd")),
            "threads": len(os.listdir(process / "task")),
        }
    except (FileNotFoundError, ProcessLookupError):
        return None


class Soak:
    """A job that runs, and what is seen of it."""

    def __init__(self, name: str, runner: int, steps: int, changes: int, pace: Path) -> None:
        self._name, self._runner, self._steps, self._changes, self._pace = name, runner, steps, changes, pace
        self.watched: dict[int, Watched] = {}
        """By process."""
        self.status: dict[str, Any] = {}
        self._actions = self._cycle()
        self._allowed = self._seen = 0

    def _cycle(self) -> Iterator[None]:
        """One change after the other; a kill makes two, as the killed worker is replaced."""
        for wanted in itertools.cycle((MOST, FEWEST)):
            self._scale(wanted)
            yield
            self._kill()
            yield

    def _scale(self, workers: int) -> None:
        words = [sys.executable, "-m", "virtualflow", "scale", str(workers), "--job", self._name]
        subprocess.run(words, env=environment(), check=True, capture_output=True, timeout=60)
        self._wanted = workers

    def _kill(self) -> None:
        """The worker that came last, so that the oldest one sees the whole run."""
        workers = [one["pid"] for one in self.status["workers"]]
        latest = max(workers, key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]))
        os.kill(latest, signal.SIGKILL)

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        """Until the job has ended: sample, and change what is due.

        Raises:
            RuntimeError: it makes no steps any more.
        """
        self._wanted = FEWEST
        every = max(1, self._steps // SAMPLES)
        next_sample, changed_at, latest, moved = every, 0, 0, time.monotonic()
        settled_at: int | None = None
        shown = 0
        while process.poll() is None:
            time.sleep(LOOK)
            fresh = _ask(self._name)
            if fresh is None:
                continue
            self.status, step = fresh, fresh["step"]
            if step > latest:
                latest, moved = step, time.monotonic()
            elif time.monotonic() > moved + STUCK:
                raise RuntimeError(f"no step after {latest} in {STUCK:.0f} s: {fresh['reason']}")
            if step >= next_sample:
                self._sample(step)
                next_sample = (step // every + 1) * every
            self._let_go_on()
            settled_at = (settled_at or step) if self._settled() else None
            # Whoever has come last takes part in a step before it is killed: else it counts as one that cannot.
            if settled_at is not None and step > max(settled_at + 1, changed_at) and self._is_due(step):
                next(self._actions)
                changed_at, settled_at = step, None
            if step >= shown + self._steps / 20:
                shown = step
                print(f"  step {step}, {fresh['changesTotal']} changes", flush=True)

    def _is_due(self, step: int) -> bool:
        """Whether fewer changes were made than should have been by now, and steps are left to make one."""
        return bool(self.status["changesTotal"] < step / self._steps * self._changes and step < self._steps - SLACK)

    def _let_go_on(self) -> None:
        """As far as the changes have come: one is worth so many steps. A change itself needs one now and then."""
        due = round((self.status["changesTotal"] + 1) / self._changes * self._steps)
        idle, self._seen = self.status["step"] == self._seen, self.status["step"]
        self._allowed = max(due, self._allowed + idle)  # the latest step may not have been told of
        write_pace(self._pace, self._allowed)

    def _settled(self) -> bool:
        training = [one for one in self.status["workers"] if one["state"] == "training"]
        return len(training) == len(self.status["workers"]) == self._wanted and self.status["proposed"] is None

    def _sample(self, step: int) -> None:
        kinds = {self._runner: "runner"}
        kinds |= {child: "coordinator" for child in _children(self._runner) if "coordinator" in _command(child)}
        kinds |= {one["pid"]: "worker" for one in self.status["workers"]}
        for pid, kind in kinds.items():
            found = look_at(pid)
            if found is not None and found["memory_mb"]:  # else it has just ended
                self.watched.setdefault(pid, Watched(kind)).samples.append((step, found))


def write_pace(path: Path, step: int) -> None:
    """Let the workload come to this step."""
    fresh = path.with_suffix(".new")
    fresh.write_text(str(step))
    fresh.replace(path)


def _ask(name: str) -> dict[str, Any] | None:
    """The status of the job's coordinator; ``None``: there is none yet, or none any more."""
    from virtualflow.errors import ConfigurationError
    from virtualflow.launcher import registry
    from virtualflow.protocol.identity import Identity

    try:
        job = registry.find(name)
        context = Identity(Path(job.identity)).client_context()
        request = urllib.request.Request(f"{job.url}/v1/status?brief=1")
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found
    except (ConfigurationError, OSError):
        return None


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def rows_of(watched: list[Watched], steps: int) -> list[dict[str, Any]]:
    """A row for each kind of process and each of its measures, of those that lived from the warm-up to the end."""
    rows = []
    for kind in ("worker", "coordinator", "runner"):
        lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for process in watched:
            late = [(step, sample) for step, sample in process.samples if step >= WARM_UP * steps]
            if process.kind == kind and late and late[-1][0] - late[0][0] >= 0.8 * steps:
                for measure in TOLERANCE:
                    lines[measure] = [(step, sample[measure]) for step, sample in late]
        for measure, (share, number) in TOLERANCE.items():
            slope = fit(lines[measure])
            row: dict[str, Any] = {"process": kind, "measure": measure, "verdict": "unclear"}
            if slope is not None:
                row |= {"mean": slope.mean, "per_thousand": slope.per_thousand, "interval": [slope.low, slope.high]}
                row |= {"growth": list(slope.growth), "verdict": judge(slope, share * slope.mean + number)}
            rows.append(row)
    return rows


def thinned(watched: list[Watched], steps: int) -> dict[str, list[list[float]]]:
    """Steps and memory of the processes that lived longest, one of each kind: for the plot."""
    found = {}
    for kind in ("worker", "coordinator", "runner"):
        processes = [process for process in watched if process.kind == kind]
        if processes:
            longest = max(processes, key=lambda process: process.samples[-1][0] - process.samples[0][0]).samples
            some = longest[:: max(1, len(longest) // KEPT)]
            found[kind] = [[float(step), round(sample["memory_mb"], 2)] for step, sample in some]
    return found


def measure(quick: bool, **asked: int | None) -> dict[str, Any]:
    """One job of so many ``steps``, ``changes`` and ``bytes``; what it had at each sample, and whether that grows."""
    defaults = QUICK if quick else {"steps": STEPS, "changes": CHANGES, "bytes": BYTES}
    chosen = {**defaults, **{name: value for name, value in asked.items() if value is not None}}
    name = f"soak-{os.getpid()}"
    with tempfile.TemporaryDirectory() as directory:
        report, output, pace = (Path(directory) / name for name in ("report.json", "output", "pace"))
        write_pace(pace, SLACK)
        script: list[str | int] = [str(Path(__file__).resolve()), "--workload", "--pace", str(pace)]
        script += ["--steps", chosen["steps"], "--bytes", chosen["bytes"]]
        command = job_command("--workers", FEWEST, "--name", name, "--report", report.as_posix(), *script)
        with output.open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT)
        soak = Soak(name, process.pid, chosen["steps"], chosen["changes"], pace)
        with running(process):
            soak.watch(process)
        if process.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n{output.read_text()[-4_000:]}")
        told = json.loads(report.read_text())
    watched = list(soak.watched.values())
    rows = rows_of(watched, chosen["steps"])
    for row in rows:
        low, high = row.get("growth", (0.0, 0.0))
        print(
            f"  {row['process']:12} {row['measure']:12} {row.get('mean', 0.0):8.1f}  "
            f"over the run {low:+.2f} to {high:+.2f}: {row['verdict']}",
            flush=True,
        )
    return {
        "settings": {**chosen, "workers": [FEWEST, MOST], "warm_up": WARM_UP, "processes": len(watched)},
        "changes": len(told["changes"]),
        "repeated_steps": sum(change.get("repeated_steps", 0) for change in told["changes"]),
        "step_ms": told["step_ms"],
        "rows": rows,
        "memory_mb": thinned(watched, chosen["steps"]),
    }


def main() -> None:
    """The job's workload; ``python -m benchmarks soak`` measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", action="store_true", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--pace", type=Path, required=True)
    args = parser.parse_args()
    train(args.steps, args.bytes, args.pace)


if __name__ == "__main__":
    main()

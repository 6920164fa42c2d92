"""The digits job under ``torchft``: replicas that come, go and are killed, and how long each change stops the others.

``python -m benchmarks replica_groups`` needs the package torchft beside this one's. Its lighthouse and three replicas
of one process each are on this machine. Each replica has a quorum as a step begins, averages its gradients by
``Manager.allreduce`` over gloo, and votes on whether the step counts. (With torchft 0.2.0 and torch 2.13 survivors of
a kill end with an AssertionError in torchft's DistributedDataParallel.)

``python -m benchmarks.replica_groups --lighthouse URL --name NAME --journal FILE`` is one replica.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import changes
from benchmarks.jobs import ROOT, environment, running
from benchmarks.tasks import TASKS, VIRTUAL_NODES, loss_of
from benchmarks.trainee import micro_batches

TASK = TASKS["digits"]
WAIT_MS = 1_000
"""For those who are late, and until a replica without a heartbeat counts as gone: by default 60 s and 5 s."""
LIMIT = 180
"""Seconds for anything to happen."""
LOOK = 0.05
"""Seconds between two looks at the journal."""
STEPS = 60
"""Of the replicas together between two changes."""


@dataclass(frozen=True)
class Step:
    """A step of one replica, as it was through with it."""

    name: str
    replicas: int
    step: int
    counts: bool
    """Whether it was not given up."""
    time: float


def train(lighthouse: str, name: str, journal: Path) -> None:
    """Train until the process is ended."""
    from torch.distributed import TCPStore
    from torchft import Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    model, optimizer, data = TASK.make()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=name,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=30),
    )
    guarded = Optimizer(manager, optimizer)
    stream = micro_batches(data, TASK.batch // VIRTUAL_NODES, 1, 0)
    with journal.open("a", buffering=1, encoding="utf-8") as log:
        while True:
            guarded.zero_grad()
            replicas, rank = manager.num_participants(), manager.participating_rank() or 0
            share = VIRTUAL_NODES // replicas + (rank < VIRTUAL_NODES % replicas)
            for _ in range(share):
                (loss_of(model, next(stream)) * replicas / VIRTUAL_NODES).backward()
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            manager.allreduce(flat).wait()
            for gradient, averaged in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
                gradient.copy_(averaged.view_as(gradient))
            before = manager.current_step()
            guarded.step()
            counts = manager.current_step() > before
            told = {"name": name, "replicas": replicas, "step": before + counts, "counts": counts, "time": time.time()}
            log.write(json.dumps(told) + "\n")


class Job:
    """A lighthouse, its replicas, and what they have written."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        from torchft.coordination import LighthouseServer

        self._directory, self._stack = directory, stack
        self._lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=WAIT_MS, heartbeat_timeout_ms=WAIT_MS
        )
        stack.callback(self._lighthouse.shutdown)
        self._replicas: dict[str, subprocess.Popen[str]] = {}

    def start(self) -> str:
        name = f"replica-{len(self._replicas)}"
        command = [sys.executable, "-m", "benchmarks.replica_groups", "--lighthouse", self._lighthouse.address()]
        command += ["--name", name, "--journal", str(self._directory / "journal")]
        with (self._directory / name).open("w") as errors:
            replica = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=errors, text=True
            )
        self._stack.enter_context(running(replica))
        self._replicas[name] = replica
        return name

    def end(self, name: str, how: signal.Signals) -> float:
        self._replicas[name].send_signal(how)
        return time.time()

    def steps(self) -> list[Step]:
        path = self._directory / "journal"
        whole = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [Step(**json.loads(line)) for line in whole if line.endswith("\n")]

    def settle(self, replicas: int, after: float) -> list[Step]:
        """Wait for so many steps of so many replicas behind a moment.

        Raises:
            TimeoutError: they do not come.
        """
        deadline = time.monotonic() + LIMIT
        while True:
            steps = self.steps()
            found = [step for step in steps if step.time > after and step.replicas == replicas and step.counts]
            if len(found) >= STEPS:
                return steps
            if time.monotonic() > deadline:
                said = "\n".join(path.read_text()[-2_000:] for path in sorted(self._directory.glob("replica-*")))
                raise TimeoutError(f"torchft: no {STEPS} steps of {replicas} replicas within {LIMIT} s\n{said}")
            time.sleep(LOOK)


def pause(steps: list[Step], survivors: set[str], replicas: int, after: float) -> dict[str, float]:
    """From a survivor's last step with the former number of replicas to its first with the new one; both count."""
    found = [step for step in steps if step.name in survivors and step.counts]
    first = min((step for step in found if step.time > after and step.replicas == replicas), key=lambda step: step.time)
    own = [step for step in found if step.name == first.name and step.time < first.time]
    meanwhile = [step for step in steps if step.name in survivors and after < step.time <= first.time]
    given_up = {step.step for step in meanwhile if not step.counts}
    return {"pause_ms": 1_000 * (first.time - own[-1].time), "given_up": len(given_up)}


def run_once() -> dict[str, Any]:
    """One job with a grow, a shrink and a kill."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        job = Job(Path(directory), stack)
        staying = {job.start(), job.start()}
        steps = job.settle(2, 0.0)
        first = [step for step in steps if step.name == min(staying) and step.replicas == 2]
        step_ms = statistics.median(1_000 * (b.time - a.time) for a, b in pairwise(first))
        moment = time.time()
        found: dict[str, dict[str, float]] = {}
        for kind, how in (("shrink", signal.SIGTERM), ("kill", signal.SIGKILL)):
            third = job.start()
            found.setdefault("grow", pause(job.settle(3, moment), staying, 3, moment))
            moment = job.end(third, how)
            found[kind] = pause(job.settle(2, moment), staying, 2, moment)
            moment = time.time()
        return {"changes": found, "step_ms": step_ms}


def measure(quick: bool) -> dict[str, Any]:
    """Jobs of both, in turn."""
    if importlib.util.find_spec("torchft") is None:
        return {"skipped": "the package torchft is not here: pip install torchft"}
    os.environ.setdefault("RUST_LOG", "error")
    own: dict[str, list[float]] = {}
    runs = []
    for _ in range(1 if quick else 3):
        changes.ours(own)
        runs.append(run_once())
    rows = []
    for kind in ("grow", "shrink", "kill"):
        of_kind = [run["changes"][kind] for run in runs]
        theirs = statistics.median(one["pause_ms"] for one in of_kind)
        row = {
            "change": kind,
            "pause_ms": statistics.median(own[kind]),
            "torchft_ms": theirs,
            "ratio": theirs / statistics.median(own[kind]),
            "given_up": statistics.median(one["given_up"] for one in of_kind),
        }
        rows.append(row)
        print(f"  {kind:6} {row['pause_ms']:8.1f} ms, torchft {theirs:8.1f} ms", flush=True)
    return {
        "rows": rows,
        "torchft_step_ms": statistics.median(run["step_ms"] for run in runs),
        "settings": {"torchft": version("torchft"), "wait_ms": WAIT_MS, "runs": len(runs)},
        "pauses_ms": own,
        "torchft_runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    args = parser.parse_args()
    train(args.lighthouse, args.name, args.journal)


if __name__ == "__main__":
    main()

"""One job under ``torchrun`` whose workers come and go, and how long each change stops it.

Three agents on this machine stand for three nodes. The job begins with two; the third comes, is ended with SIGTERM, and
later a worker process is killed. A pause is the time from the last step before a change to the first after it, in the
log of the training itself.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT, environment, free_port, running

RENDEZVOUS = "last_call_timeout=1,join_timeout=120"
"""A second instead of the default thirty for latecomers: without it, each change with fewer than the most workers would
take half a minute."""
SWITCHES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""As it is, torch 2.13 cannot grow a job: agents that were there before do not tell the rendezvous' new round where the
shared store is, and an agent that comes waits for that until it fails."""
LIMIT = 180
"""Seconds for anything to happen."""
LOOK = 0.05
"""Seconds between two looks at the log."""


@dataclass(frozen=True)
class Line:
    """A step of one worker."""

    pid: int
    rank: int
    workers: int
    step: int
    time: float


@dataclass
class Job:
    """The agents of one job, and the log of its training."""

    directory: Path
    port: int
    agents: list[subprocess.Popen[str]]

    def start_agent(self) -> subprocess.Popen[str]:
        """Start what would be one node."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:3", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "benchmark"]
        command += ["--rdzv-conf", RENDEZVOUS, "--max-restarts", "100", "--monitor-interval", "0.1"]
        command += ["benchmarks/restarting.py", "--snapshot", str(self.directory / "snapshot.pt")]
        command += ["--journal", str(self.directory / "log")]
        errors = (self.directory / f"agent-{len(self.agents)}").open("w")
        with errors:
            agent = subprocess.Popen(
                command, cwd=ROOT, env=environment(**SWITCHES), stdout=subprocess.DEVNULL, stderr=errors, text=True
            )
        self.agents.append(agent)
        return agent

    def lines(self) -> list[Line]:
        """The log so far."""
        path = self.directory / "log"
        whole = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [Line(**json.loads(line)) for line in whole if line.endswith("\n")]

    def wait(self, condition: Callable[[list[Line]], bool], what: str) -> list[Line]:
        """Wait until the log says so; it is a file, so it is looked at again and again.

        Raises:
            TimeoutError: it does not.
        """
        deadline = time.monotonic() + LIMIT
        while not condition(lines := self.lines()):
            if time.monotonic() > deadline or all(agent.poll() is not None for agent in self.agents):
                said = "\n".join(path.read_text()[-2_000:] for path in sorted(self.directory.glob("agent-*")))
                raise TimeoutError(f"torchrun: {what} did not happen within {LIMIT} s, or all agents ended\n{said}")
            time.sleep(LOOK)
        return lines

    def settle(self, workers: int, after: float, steps: int) -> list[Line]:
        """Wait for ``steps`` steps of ``workers`` processes that began to make steps after that moment."""

        def settled(lines: list[Line]) -> bool:
            old = {line.pid for line in lines if line.time <= after}
            fresh = [line for line in lines if line.pid not in old and line.workers == workers]
            return sum(line.rank == 0 for line in fresh) >= steps

        return self.wait(settled, f"{steps} steps with {workers} workers")


def pause(lines: list[Line], moment: float) -> dict[str, float]:
    """From the last step before the restart after ``moment`` to the first step after it; and how many are repeated."""
    old = {line.pid for line in lines if line.time <= moment}
    fresh = [line for line in lines if line.pid not in old]
    first = min(fresh, key=lambda line: line.time)
    last = max((line for line in lines if line.pid in old and line.time < first.time), key=lambda line: line.time)
    return {"pause_ms": 1_000 * (first.time - last.time), "repeated_steps": last.step - first.step + 1}


def undisturbed(lines: list[Line]) -> list[float]:
    """Milliseconds of steps of the first worker while there are two."""
    pairs = [(a, b) for a, b in pairwise(lines) if a.pid == b.pid]
    return [1_000 * (b.time - a.time) for a, b in pairs if b.workers == 2 and b.step == a.step + 1]


def measure(steps: int) -> dict[str, Any]:
    """One job with a grow, a shrink and a kill, ``steps`` steps apart."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        job = Job(Path(directory), free_port(), [])
        for _ in range(2):
            stack.enter_context(running(job.start_agent()))
        job.settle(2, 0.0, 3 * steps)
        changes = {}

        moment = time.time()
        third = job.start_agent()
        stack.enter_context(running(third))
        lines = job.settle(3, moment, steps)
        # The others train on while the third boots, so what counts begins when its processes do.
        changes["grow"] = pause(lines, _last_of_two(lines))

        moment = time.time()
        third.send_signal(signal.SIGTERM)
        changes["shrink"] = pause(job.settle(2, moment, steps), moment)

        moment = time.time()
        victim = max((line for line in job.lines() if line.rank == 1), key=lambda line: line.time)
        os.kill(victim.pid, signal.SIGKILL)
        lines = job.settle(2, moment, steps)
        changes["kill"] = pause(lines, moment)
        first = [line for line in lines if line.rank == 0]
        return {"changes": changes, "step_ms": statistics.median(undisturbed(first))}


def _last_of_two(lines: list[Line]) -> float:
    """The moment of the last step before there were three workers."""
    first = min(line.time for line in lines if line.workers == 3)
    return max(line.time for line in lines if line.workers == 2 and line.time < first)

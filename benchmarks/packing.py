"""Two jobs on one core whose exchanges are slow: in turns, sharing it as the kernel has it, and one after the other.

Each job has two workers, its coordinator and a network namespace of its own, whose loopback is limited; all of them,
and the turn server, are pinned to one core. While a job's gradients are on their way its workers leave the core, and
the question is how much of that the other job gets.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.jobs import LIMIT, ROOT, environment, running
from benchmarks.overlap import in_namespace
from benchmarks.tasks import TASKS

TEXT = """\
One core runs both jobs: each has two workers, a coordinator and a network namespace with a limited loopback.
*Throughput* sums the jobs' speeds, each relative to its speed alone, while both are warm; median and range of three
rounds. *Without turns* the kernel shares the core and leaves no idle time, unlike a GPU. In each step, the job with
short steps waits for a turn of the other. *Digests* counts different digests: 1 is right."""
BUSY = """

Other programs ran (load {load:.0f}): turns began later, and without turns four processes got more of the core than two
do."""
OWN_LOAD = 6
"""Processes of a measurement that may be ready at a time."""

WORKERS = 2
WARM_UP = 20
"""First steps that do not count."""


@dataclass(frozen=True)
class Job:
    """One of two."""

    task: str
    steps: int
    """So many that both take about as long."""
    megabits: int
    """A second, that its loopback carries."""


CHARACTERS, DIGITS = Job("charlm", 160, 250), Job("digits", 240, 40)
PAIRS = {"two alike": (CHARACTERS, CHARACTERS), "two unlike": (CHARACTERS, DIGITS)}


@dataclass(frozen=True)
class Ran:
    """A job that has ended."""

    digest: str
    times: tuple[float, ...]
    """When each of its steps was done, on a clock that jobs share."""


def shaping(megabits: int) -> str:
    """What limits the loopback of the namespace that it is run in."""
    return f"tc qdisc add dev lo root tbf rate {megabits}mbit burst 128kb limit 64mb"


def pinned(*command: str) -> list[str]:
    """A command on the first core that this process may use."""
    return ["taskset", "-c", str(min(os.sched_getaffinity(0))), *command]


@contextlib.contextmanager
def turn_server(directory: Path) -> Iterator[Path]:
    """One that serves as long as the block lasts: its socket."""
    path = directory / "turns"
    server = subprocess.Popen(
        pinned(sys.executable, "-m", "virtualflow", "turns", str(path)),
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.DEVNULL,
    )
    with running(server):
        limit = time.monotonic() + LIMIT
        while not path.is_socket():
            if server.poll() is not None or time.monotonic() > limit:
                sys.exit("the turn server did not start")
            time.sleep(0.05)
        yield path


def run_jobs(wanted: Sequence[Job], *, turns: bool) -> list[Ran]:
    """Run jobs at the same time to their ends."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = ["--turns", str(stack.enter_context(turn_server(directory)))] if turns else []
        processes = []
        for n, job in enumerate(wanted):
            script = ("benchmarks/packed_job.py", job.task, str(job.steps), str(directory / f"{n}.times"))
            report = ("--report", str(directory / f"{n}.report"), "--rebalance-gain", "1", "--name", f"packed-{n}")
            command = [sys.executable, "-m", "virtualflow", "run", "--plain", "--workers", str(WORKERS), *report]
            log = stack.enter_context((directory / f"{n}.log").open("w"))
            processes.append(
                subprocess.Popen(
                    in_namespace(shaping(job.megabits), *pinned(*command, *options, *script)),
                    cwd=ROOT,
                    env=environment(),
                    stdout=log,
                    stderr=log,
                )
            )
        with running(*processes):
            codes = [process.wait(LIMIT) for process in processes]
        if any(codes):
            sys.exit("\n".join((directory / f"{n}.log").read_text()[-4_000:] for n in range(len(wanted))))
        return [
            Ran(
                json.loads((directory / f"{n}.report").read_text())["digest"],
                tuple(json.loads((directory / f"{n}.times").read_text())),
            )
            for n in range(len(wanted))
        ]


def rates(jobs: Sequence[Ran]) -> list[float]:
    """Steps per second of each, from when all are warm until the first of them ends."""
    begin = max(job.times[WARM_UP - 1] for job in jobs)
    end = min(job.times[-1] for job in jobs)
    found = []
    for job in jobs:
        there = [at for at in job.times if begin <= at <= end]
        if len(there) < WARM_UP:
            sys.exit(f"two jobs were warm together for {len(there)} steps only; let the one that ended first make more")
        found.append((len(there) - 1) / (there[-1] - there[0]))
    return found


def measure_pair(title: str, pair: Sequence[Job], rounds: int) -> dict[str, Any]:
    """The row of a pair of jobs."""
    alone: list[list[float]] = []
    together: dict[str, list[list[float]]] = {"shared": [], "turns": []}
    digests: list[set[str]] = [set(), set()]
    for number in range(rounds):
        singles = [run_jobs([job], turns=False)[0] for job in pair]
        alone.append([rates([job])[0] for job in singles])
        sides = list(together) if number % 2 == 0 else list(together)[::-1]
        ran = {side: run_jobs(pair, turns=side == "turns") for side in sides}
        for side, jobs in ran.items():
            together[side].append(rates(jobs))
        for jobs in (singles, *ran.values()):
            for found, job in zip(digests, jobs, strict=True):
                found.add(job.digest)
    row: dict[str, Any] = {
        "jobs": f"{title}: " + " and ".join(TASKS[job.task].title for job in pair),
        "megabits": [job.megabits for job in pair],
        "alone_ms": [1_000 / statistics.median(rate) for rate in zip(*alone, strict=True)],
        "rounds": {"alone": alone, **together},
        "digests": [len(found) for found in digests],
    }
    for side, found in together.items():
        sums = [
            sum(rate / single for rate, single in zip(both, own, strict=True))
            for both, own in zip(found, alone, strict=True)
        ]
        row[f"{side}_ratio"], row[f"{side}_range"] = statistics.median(sums), [min(sums), max(sums)]
        row[f"{side}_ms"] = [1_000 / statistics.median(rate) for rate in zip(*found, strict=True)]
    print(
        f"  {row['jobs']}: shared x {row['shared_ratio']:.2f}, turns x {row['turns_ratio']:.2f}, "
        f"digests {row['digests']}",
        flush=True,
    )
    return row


def measure(quick: bool) -> dict[str, Any]:
    """Both pairs; nothing but the reason where the machine cannot do it."""
    try:
        done = subprocess.run(
            in_namespace(shaping(500), "true"), capture_output=True, text=True, check=False, timeout=30
        )
    except FileNotFoundError as error:
        return {"skipped": f"{error.filename} is missing; install util-linux, iproute2", "rows": []}
    if done.returncode != 0:
        return {
            "skipped": f"no network namespace with a limited loopback can be made here ({done.stderr.strip()})",
            "rows": [],
        }
    rounds = 1 if quick else 3
    rows = [measure_pair(title, pair, rounds) for title, pair in PAIRS.items()]
    load = os.getloadavg()[2]
    text = TEXT + (BUSY.format(load=load) if load > OWN_LOAD else "")
    return {"settings": {"rounds": rounds, "workers": WORKERS}, "text": text, "rows": rows}

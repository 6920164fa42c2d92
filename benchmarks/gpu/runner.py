"""Runs the parts one after the other within a time budget, each in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.parts import ENVIRONMENT, LIBRARY, TESTS, Outcome, Part, Row, Setting
from benchmarks.jobs import GRACE, ROOT, environment

DEVICES = "CUDA devices"
"""The first row of the environment's table."""
TAIL = 1_500
"""Characters of a failed part's output that are reported."""

Execute = Callable[[Part, Setting, float], Outcome]
"""Runs a part for so many seconds at most."""

WHEELS = {"yaml": "pyyaml", "pytest_timeout": "pytest-timeout"}
"""Packages whose name in an index is another one."""


def missing(needs: Sequence[str]) -> list[str]:
    """Which packages cannot be imported, by the names that an index knows them by."""
    return [WHEELS.get(name, name) for name in needs if importlib.util.find_spec(name) is None]


def advice(packages: Sequence[str]) -> str:
    """What to do about missing packages, in a sentence."""
    return (
        f"missing here: {', '.join(packages)}; run 'python -m pip install {' '.join(packages)}', or without an index "
        "copy their wheels here, install them with 'pip install --no-index --target DIRECTORY *.whl' and add that "
        "directory to PYTHONPATH"
    )


def run_parts(
    parts: Sequence[Part],
    asked: Collection[str],
    *,
    small: bool,
    budget: float,
    execute: Execute,
    clock: Callable[[], float] = time.monotonic,
    told: Callable[[Outcome], None] = lambda _: None,
) -> tuple[int, list[Outcome]]:
    """Run what was asked for, as far as the time goes.

    Args:
        parts: all of them, the environment first.
        asked: names of those to run; the environment always runs.
        small: use small sizes on a GPU, too.
        budget: seconds for all.
        execute: runs one.
        clock: seconds.
        told: of each outcome, as soon as it is there.

    Returns:
        How many CUDA devices there are, and what became of each part that was asked for.
    """
    began, devices = clock(), 0
    outcomes: list[Outcome] = []
    for part in parts:
        if part.name not in asked and part.name != ENVIRONMENT:
            continue
        left = budget - (clock() - began)
        lacking = missing(part.needs)
        setting = Setting("cuda", small) if devices else Setting("cpu", small=True)
        if lacking:
            outcome = Outcome(part.name, "skipped", f"missing here: {', '.join(lacking)}")
        elif left < part.least:
            outcome = Outcome(part.name, "not run", "no time left")
        else:
            outcome = execute(part, setting, min(part.most, left))
            if part.name == ENVIRONMENT:
                devices = next((int(row["value"]) for row in outcome.rows if row["what"] == DEVICES), 0)
            elif not devices:
                outcome = rehearsed(outcome)
        told(outcome)
        outcomes.append(outcome)
    return devices, outcomes


def rehearsed(outcome: Outcome) -> Outcome:
    """What is said of a part that ran on the CPU: it was skipped, unless its code does not even work there."""
    if outcome.status != "passed":
        return replace(outcome, why=f"on the CPU, for want of a CUDA device: {outcome.why}")
    return Outcome(
        outcome.name,
        "skipped",
        f"there is no CUDA device here; its code ran on the CPU with small sizes in {outcome.seconds:.0f} s",
    )


def execute(part: Part, setting: Setting, seconds: float) -> Outcome:
    """Run a part in a process of its own, and end that, with all that it has started, when its time is up."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        rows, log = Path(directory) / "rows", Path(directory) / "log"
        command = [sys.executable, "-m", "benchmarks.gpu", "--measure", part.name, "--rows", str(rows)]
        command += ["--device", setting.device, *(["--small"] if setting.small else [])]
        with log.open("w") as output:
            # A session of its own: its signals reach nobody else. What it starts ends with it (jobs.running).
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdout=output, stderr=output, start_new_session=True
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        found: list[Row] = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
        took, said = time.monotonic() - began, log.read_text(errors="replace").strip()
    if code == 0:
        return Outcome(part.name, "passed", "", found, took)
    if code is None:
        return Outcome(part.name, "cut off", f"ended after {seconds:.0f} s, its time", found, took)
    return Outcome(part.name, "failed", said[-TAIL:] or f"exit code {code}", found, took)


def _end(process: subprocess.Popen[bytes]) -> None:
    """See that it is over, and whatever it has left in its session."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check_packages() -> str | None:
    """A sentence if not all can be run, for want of packages."""
    lacking = missing((*LIBRARY, *TESTS))
    return advice(lacking) if lacking else None

"""The simulator with up to ten thousand jobs and devices: how long it thinks, and how much memory it takes.

Jobs are made up from a seed: their widest number of workers is a power of two up to 64, their lengths spread over three
orders of magnitude, and they come so that the devices would be nine tenths busy. With four kinds of device a job has a
speed on each, and the policy is run by kind. Each case has a process of its own, so that the memory is its own too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from virtualflow_operator.scheduling import policy
from virtualflow_operator.settings import SchedulingSettings, SimulationSettings
from virtualflow_operator.simulator.device_simulation import Aware, simulate_devices
from virtualflow_operator.simulator.simulation import ResizeCost, simulate
from virtualflow_operator.simulator.trace import Event, JobEvent, JobTrace, NodeEvent

JOBS = DEVICES = 10_000
A_NODE = 8
"""Devices of a node."""
BUSY = 0.9
WIDEST = (1, 2, 4, 8, 16, 32, 64)
KINDS = {"a": 1.0, "b": 1.5, "c": 3.0, "d": 6.0}
"""And how fast each is, on average."""
COST = ResizeCost(SimulationSettings().join, SimulationSettings().pause)


@dataclass(frozen=True)
class Case:
    """What is simulated."""

    policy: str
    kinds: bool = False
    part: int = 1
    """What the jobs and the devices are divided by: CPU time grows with the square of their number."""


CASES = (
    Case("FIFO", part=10),
    Case("ShortestFirst", part=10),
    Case("ShortestFirst", kinds=True, part=10),
    Case("WeightedFairShare", part=10),
    Case("WeightedFairShare"),
)


def make(jobs: int, devices: int, seed: int, *, kinds: bool) -> JobTrace:
    """Such a trace."""
    chance = random.Random(seed)
    events: list[Event] = [
        NodeEvent(0.0, f"node-{i}", A_NODE, kind=list(KINDS)[i % len(KINDS)] if kinds else "")
        for i in range(devices // A_NODE)
    ]
    mean = sum(KINDS.values()) / len(KINDS) if kinds else 1.0
    now = 0.0
    for index in range(jobs):
        most, length = chance.choice(WIDEST), 10 ** chance.uniform(2.0, 5.0)
        loss = chance.uniform(0.0, 0.02)
        speeds = {n: round(n / (1 + loss * (n - 1)), 4) for n in WIDEST if n <= most}
        by_kind: dict[str, Any] = {"throughput": speeds}
        if kinds:
            faster = {kind: factor ** chance.uniform(0.2, 1.5) for kind, factor in KINDS.items()}
            by_kind = {"kinds": {k: {n: s * f for n, s in speeds.items()} for k, f in faster.items()}}
        events.append(JobEvent(round(now, 3), f"job-{index}", max(round(length * mean), 1), **by_kind))
        # A device of the mean speed is busy for its length with a job of one worker; wider ones lose a little.
        now += chance.expovariate(1.0) * 21_650 * 1.1 / (devices * BUSY)
    return JobTrace(tuple(events))


def play(case: Case, jobs: int, devices: int) -> dict[str, Any]:
    """The row of a case; in a process of its own."""
    trace, settings = make(jobs, devices, 0, kinds=case.kinds), SchedulingSettings()
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    chosen = policy(case.policy)
    if case.kinds:
        result = simulate_devices(trace, Aware(chosen), COST, settings).result
    else:
        result = simulate(trace, chosen, COST, settings)
    seconds, after = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ended = sum(outcome.finished is not None for outcome in result.outcomes)
    return {
        "policy": case.policy + (", four kinds" if case.kinds else ""),
        "jobs": jobs,
        "devices": devices,
        "ended": ended,
        "decisions": result.decisions,
        "CPU s": round(seconds, 1),
        "memory MB": round(after / 1024),
        "of it for the simulation": round((after - before) / 1024),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="benchmarks.simulator_scale"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of all, only to see that it works")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there")
    given = parser.parse_args(arguments)
    smaller = 10 if given.quick else 1
    rows = []
    for case in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            part = case.part * smaller
            rows.append(pool.apply(play, (case, JOBS // part, DEVICES // part)))
        print(rows[-1], flush=True)
    if given.json is not None:
        text = (
            f"Made-up jobs of up to {max(WIDEST)} workers keep nine tenths of the devices busy; each simulation has a\n"
            "process. CPU time grows with the square of the number of jobs, as each decision looks at all of them."
        )
        given.json.write_text(json.dumps({"text": text, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

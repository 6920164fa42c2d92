"""How long a scheduling policy thinks about a queue of a thousand jobs.

Each queue is made up from a seed: half of the jobs are measured, weights and priorities differ, minimums are small. A
decision is timed twice: when all jobs have just come, and a while later, when those that run have been running and a
new job comes. The times are the process's own (CPU time), so that other programs on the machine count little.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from virtualflow_operator.scheduling import POLICIES, Capacity, Demand, ScalingCurve
from virtualflow_operator.settings import SchedulingSettings

LIMIT_MS = 100.0
"""What a decision may take."""


@dataclass(frozen=True)
class Case:
    """A kind of queue."""

    title: str
    jobs: int
    units: int
    sizes: tuple[int, ...]
    """Units of a worker, each as likely as the others."""
    namespaces: int
    """Each with a limit of twice its even part, if there are several."""
    most: int
    """Workers of a job."""


CASES = (
    Case("contended: half of the jobs wait", 1_000, 512, (1,), 1, 16),
    Case("roomy: all run and grow", 1_000, 8_192, (1,), 1, 64),
    Case("8 namespaces with limits", 1_000, 1_024, (1,), 8, 16),
    Case("workers of 1, 2, 4 or 8 units, limits", 1_000, 2_048, (1, 2, 4, 8), 8, 16),
    Case("workers of 1, 2, 4 or 8 units", 100, 800, (1, 2, 4, 8), 1, 8),
)


def queue(case: Case, seed: int) -> tuple[list[Demand], Capacity]:
    """The jobs and the capacity of such a queue."""
    chance = random.Random(seed)
    jobs = []
    for index in range(case.jobs):
        namespace = f"team-{chance.randrange(case.namespaces)}"
        loss = chance.uniform(0.0, 0.1)
        speed = chance.uniform(1.0, 20.0)
        points = [(workers, speed * workers / (1 + loss * (workers - 1))) for workers in (1, 2, 4, 8)]
        jobs.append(
            Demand(
                name=f"{namespace}/job-{index}",
                namespace=namespace,
                submitted=float(index),
                maximum=chance.randint(2, case.most),
                units=chance.choice(case.sizes),
                priority=chance.randrange(3),
                weight=chance.choice((1.0, 5.0, 10.0)),
                steps_left=round(chance.paretovariate(1.2) * 1_000),
                curve=ScalingCurve.of(points if chance.random() < 0.5 else []),
            )
        )
    limit = 2 * case.units // case.namespaces
    limits = {f"team-{at}": limit for at in range(case.namespaces)} if case.namespaces > 1 else {}
    return jobs, Capacity(case.units // 2, case.units - case.units // 2, limits)


def measure(name: str, case: Case, seeds: int) -> dict[str, object]:
    """The row of one policy and kind of queue."""
    decide, told = POLICIES[name], SchedulingSettings()
    first: list[float] = []
    later: list[float] = []
    running = 0
    for seed in range(seeds):
        jobs, capacity = queue(case, seed)
        *jobs, last = jobs
        now = float(case.jobs)
        began = time.process_time()
        found = decide(now, jobs, capacity, told)
        first.append((time.process_time() - began) * 1e3)
        running = sum(given.workers > 0 for given in found.values())
        jobs = [*(job.given(found[job.name].workers, now) for job in jobs), last]
        began = time.process_time()
        decide(now + 2 * told.starvation_bound, jobs, capacity, told)
        later.append((time.process_time() - began) * 1e3)
    return {
        "queue": case.title,
        "policy": name,
        "jobs": case.jobs,
        "units": case.units,
        "running": running,
        "first ms": round(statistics.median(first), 1),
        "later ms": round(statistics.median(later), 1),
        "longest ms": round(max(first + later), 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="benchmarks.scheduling"
    )
    parser.add_argument("--quick", action="store_true", help="fewer queues, only to see that it works")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there")
    given = parser.parse_args(arguments)
    rows = [measure(name, case, 3 if given.quick else 11) for case in CASES for name in POLICIES]
    print(f"{'queue':42} {'policy':18} {'running':>7} {'first':>10} {'later':>10} {'longest':>10}")
    for row in rows:
        print(
            f"{row['queue']:42} {row['policy']:18} {row['running']:7} {row['first ms']:7} ms {row['later ms']:7} ms "
            f"{row['longest ms']:7} ms"
        )
    if given.json is not None:
        text = (
            f"CPU milliseconds of the longest measured decision; the limit is {LIMIT_MS:g}. Half of the decisions\n"
            "concern jobs that have just come, half jobs that run or have waited too long."
        )
        given.json.write_text(json.dumps({"text": text, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

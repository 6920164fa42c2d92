"""Jobs on kinds of device whose throughputs were published, with random arrivals and lengths.

``traces/throughputs`` has the throughputs, and ``traces/README.md`` says where they are from and what is assumed.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from benchmarks.traces.workloads import FAMILIES
from virtualflow_operator.scheduling import Mobility
from virtualflow_operator.simulator.trace import Event, JobEvent, JobTrace, NodeEvent, check

TABLES = Path(__file__).parent / "traces" / "throughputs"
Table = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Model, kind, workers: steps per second."""

GAVEL_DEVICES = {"V100": 6, "P100": 6, "K80": 6}
"""A sixth of the cluster that Gavel's authors simulate."""
AUTHORS_DEVICES = {"V100": 2, "2080 Ti": 4, "P100": 4, "K80": 4}
RATINGS = {"V100": 15.7, "2080 Ti": 13.4, "P100": 9.3, "K80": 4.4}
"""TFLOPS in single precision, at most, from NVIDIA's data sheets (of half a K80, which is one device)."""
AUTHORS_SIZES = (1, 2, 4, 8)
_BATCHES = {"cifar10": 128, "glue": 32, "wmt": 3_072}
"""Samples (tokens) for a worker and step, as large as every kind was profiled with."""


@cache
def gavel() -> Table:
    """Gavel's table (Narayanan et al., OSDI 2020)."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    with (TABLES / "gavel.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            pairs = (pair.split(":") for pair in row["throughput"].split())
            found.setdefault(row["model"], {})[row["kind"]] = {int(workers): float(speed) for workers, speed in pairs}
    return found


@cache
def authors() -> Table:
    """The VirtualFlow authors' profiles of single devices, with the exchange fitted to their logs (``workloads``).

    A step's computation takes as much longer on a device than on a V100 as its profile says, and the exchange as long.
    """
    with (TABLES / "virtualflow.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    fastest = {row["model"]: float(row["samples"]) for row in rows if row["kind"] == "V100"}
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        family, slower = FAMILIES[row["family"]], fastest[row["model"]] / float(row["samples"])
        batch = _BATCHES[row["family"]] * max(AUTHORS_SIZES)
        found.setdefault(row["model"], {})[row["kind"]] = {
            n: 1 / (slower * family.compute * batch / n + family.step_seconds(0, n)) for n in AUTHORS_SIZES
        }
    return found


def make(
    table: Table,
    devices: Mapping[str, int],
    *,
    seed: int,
    jobs: int,
    load: float,
    mobility: Mobility = "mixes",
    rated: bool = False,
) -> JobTrace:
    """A trace of jobs with Poisson arrivals.

    Lengths and sizes are drawn as Gavel's authors draw theirs: 10 to the 1.5 to 3 minutes on V100s (of a fifth of the
    jobs 3 to 4), and 1, 2, 4 or 8 devices at most (70, 10, 15 and 5 %), as far as the model was measured with these.

    Args:
        table: throughputs.
        devices: of each kind.
        seed: of the chance.
        jobs: how many.
        load: work that comes, over what all devices do, both as V100s would count them.
        mobility: of every job.
        rated: whether policies are told the devices' peak performance.
    """
    chance = random.Random(seed)
    models = sorted(table)
    events: list[Event] = [
        NodeEvent(0.0, kind, units, kind=kind, rating=RATINGS[kind] if rated else 1.0)
        for kind, units in devices.items()
    ]
    drawn = [_draw(chance, table, models) for _ in range(jobs)]
    worth = {
        kind: sum(table[model][kind][1] / max(speeds[1] for speeds in table[model].values()) for model in models)
        / len(models)
        for kind in devices
    }
    gap = sum(steps / max(speeds[1] for speeds in table[model].values()) for model, _, steps in drawn) / jobs
    gap /= load * sum(worth[kind] * units for kind, units in devices.items())
    now = 0.0
    for index, (model, size, steps) in enumerate(drawn):
        now += chance.expovariate(1 / gap)
        kinds = {
            kind: {n: speed for n, speed in speeds.items() if n <= size}
            for kind, speeds in table[model].items()
            if kind in devices
        }
        events.append(JobEvent(now, f"job-{index}", steps, kinds=kinds, max=size, mobility=mobility))
    return check(((event.name, event) for event in events), "a trace of published throughputs")


def _draw(chance: random.Random, table: Table, models: list[str]) -> tuple[str, int, int]:
    """Model, devices at most, and steps."""
    model = chance.choice(models)
    speeds = table[model]["V100"]
    size = min(chance.choices((1, 2, 4, 8), (70, 10, 15, 5))[0], max(speeds))
    minutes = 10 ** (chance.uniform(1.5, 3) if chance.random() < 0.8 else chance.uniform(3, 4))
    return model, size, max(1, round(60 * minutes * speeds[size]))

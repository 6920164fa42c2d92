"""What it brings to know the devices: the same policy over kinds of device, and over one pool of them, by simulation.

The jobs and devices are of published throughputs (``device_traces``), 20 seeds each. The policy that does not know
the devices sees the average speed of a job and one pool; where its workers come to run is left to chance, either a
worker at a time (*scattered*) or a job on one kind (*gathered*). Jobs either may be on several kinds at once and change
them (``mixes``), or stay for life on the kind on which they began, as those do that must give the same bits
(``stays``). Speeds are known, or only those at which a job has run, with each kind's peak performance as its rating.

Last, how long a decision about 1,000 jobs on four kinds takes, in the process's own time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from benchmarks.device_traces import AUTHORS_DEVICES, GAVEL_DEVICES, Table, authors, gavel, make
from virtualflow_operator.scheduling import (
    FIXED_SIZES,
    POLICIES,
    Capacity,
    Demand,
    DeviceKind,
    KindDemand,
    Mobility,
    ScalingCurve,
    decide_by_kind,
)
from virtualflow_operator.settings import SchedulingSettings, SimulationSettings
from virtualflow_operator.simulator.device_simulation import Aware, Decider, Unaware, simulate_devices
from virtualflow_operator.simulator.outcome import Measures, measure
from virtualflow_operator.simulator.simulation import Knowledge, ResizeCost
from virtualflow_operator.simulator.trace import Event, JobTrace, NodeEvent, check

SEEDS = 20
JOBS = 60
LOADS = (0.6, 1.2)
POLICY = "ShortestFirst"
THRIFT = (0.0, 0.5, 1.0, 2.0)
DOLLARS = {"V100": 2.48, "P100": 1.46, "K80": 0.45}
"""An hour on demand. Assumed, as is that spot costs SPOT of it: prices change, and only their proportions count."""
SPOT = 0.3
LIMIT_MS = 100.0
"""What a decision may take."""
_DEFAULTS = SimulationSettings()
COST = ResizeCost(_DEFAULTS.join, _DEFAULTS.pause)
CLUSTERS: Mapping[str, tuple[Table, Mapping[str, int]]] = {
    "Gavel's table": (gavel(), GAVEL_DEVICES),
    "the VirtualFlow authors' profiles": (authors(), AUTHORS_DEVICES),
}


@dataclass(frozen=True)
class Row:
    """A cluster under a load, over all seeds."""

    cluster: str
    load: float
    mobility: str
    placed: str
    """How the policy that does not know the devices places workers."""
    policy: str
    knowledge: str
    completion: float
    """Mean of the seeds' mean completions with the devices known, in seconds."""
    shorter: tuple[float, float, float]
    """By which part the mean completion is shorter than without: the least, the mean, the most of the seeds."""
    by_seed: tuple[float, ...]


def play(trace: JobTrace, decider: Decider, knowledge: Knowledge = "all") -> Measures:
    """One decider on one trace.

    Raises:
        AssertionError: a job never ended.
    """
    found = measure(simulate_devices(trace, decider, COST, _DEFAULTS.scheduling, knowledge=knowledge).result)
    assert not found.unfinished, f"{found.unfinished} jobs never ended"
    return found


def compare(
    cluster: str, load: float, mobility: Mobility, seeds: int, *, policy: str = POLICY, knowledge: Knowledge = "all"
) -> list[Row]:
    """A policy that knows the devices beside the same that does not."""
    table, devices = CLUSTERS[cluster]
    ways = {"scattered": False, "gathered": True} if mobility == "mixes" else {"gathered": True}
    completions: list[float] = []
    shorter: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(seeds):
        trace = make(table, devices, seed=seed, jobs=JOBS, load=load, mobility=mobility, rated=knowledge == "seen")
        decide = POLICIES[policy]
        aware = play(trace, Aware(decide, elastic=policy not in FIXED_SIZES), knowledge).mean_completion
        completions.append(aware)
        for way, gathers in ways.items():
            unaware = play(trace, Unaware(decide, seed=seed, gathers=gathers), knowledge).mean_completion
            shorter[way].append(1 - aware / unaware)
    return [
        Row(
            cluster,
            load,
            mobility,
            way,
            policy,
            knowledge,
            statistics.mean(completions),
            (min(found), statistics.mean(found), max(found)),
            tuple(found),
        )
        for way, found in shorter.items()
    ]


def prices(seeds: int) -> list[dict[str, float]]:
    """What prices as a weight save, and what that takes: completion and money beside no weight, over all seeds."""
    rows = []
    found: dict[float, list[tuple[float, float]]] = {}
    for thrift in THRIFT:
        told = SchedulingSettings(thrift=thrift)
        for seed in range(seeds):
            plain = make(gavel(), GAVEL_DEVICES, seed=seed, jobs=JOBS, load=LOADS[0])
            trace = priced(plain)
            result = simulate_devices(trace, Aware(POLICIES[POLICY]), COST, told)
            found.setdefault(thrift, []).append((measure(result.result).mean_completion, result.spent / 3_600))
    free = found[THRIFT[0]]
    for thrift, each in found.items():
        rows.append(
            {
                "weight": thrift,
                "completion": statistics.mean(time for time, _ in each),
                "dollars": statistics.mean(money for _, money in each),
                "longer": statistics.mean(a[0] / b[0] - 1 for a, b in zip(each, free, strict=True)),
                "cheaper": statistics.mean(1 - a[1] / b[1] for a, b in zip(each, free, strict=True)),
            }
        )
    return rows


def priced(trace: JobTrace) -> JobTrace:
    """The trace with half of each kind on spot nodes, and prices."""
    events: list[Event] = [event for event in trace.events if not isinstance(event, NodeEvent)]
    for kind, units in GAVEL_DEVICES.items():
        for name, spot in (("steady", False), ("spot", True)):
            price = DOLLARS[kind] * (SPOT if spot else 1.0)
            events.append(NodeEvent(0.0, f"{kind}-{name}", units // 2, spot=spot, kind=kind, price=price))
    return check(((event.name, event) for event in events), "a trace with prices")


def queue(seed: int, jobs: int = 1_000) -> tuple[list[KindDemand], dict[str, DeviceKind]]:
    """A queue of many jobs on four kinds, half of the speeds measured."""
    chance = random.Random(seed)
    speeds = {"H100": 8.0, "A100": 4.0, "V100": 2.0, "T4": 1.0}
    kinds = {kind: DeviceKind(Capacity(64, 64), rating=speed, price=speed) for kind, speed in speeds.items()}
    found = []
    for index in range(jobs):
        curves = {}
        for kind, speed in speeds.items():
            loss, first = chance.uniform(0.0, 0.1), speed * chance.uniform(0.3, 3.0)
            points = [(n, first * n / (1 + loss * (n - 1))) for n in (1, 2, 4, 8)]
            curves[kind] = ScalingCurve.of(points if chance.random() < 0.5 else [])
        job = Demand(
            f"red/job-{index}",
            "red",
            submitted=float(index),
            maximum=chance.randint(2, 16),
            weight=chance.choice((1.0, 5.0, 10.0)),
            steps_left=round(chance.paretovariate(1.2) * 1_000),
        )
        found.append(KindDemand(job, curves, chance.choice(get_args(Mobility))))
    return found, kinds


def decisions(policy: str, seeds: int) -> dict[str, object]:
    """Milliseconds of CPU for a decision about 1,000 jobs on four kinds, and for the next one."""
    told = SchedulingSettings()
    first, later = [], []
    for seed in range(seeds):
        jobs, kinds = queue(seed)
        *jobs, last = jobs
        began = time.process_time()
        found = decide_by_kind(POLICIES[policy], 1_000.0, jobs, kinds, told)
        first.append((time.process_time() - began) * 1e3)
        jobs = [*(demand.given(found[demand.job.name], 1_000.0) for demand in jobs), last]
        began = time.process_time()
        decide_by_kind(POLICIES[policy], 1_000.0 + 2 * told.starvation_bound, jobs, kinds, told)
        later.append((time.process_time() - began) * 1e3)
    return {
        "policy": policy,
        "first ms": round(statistics.median(first), 1),
        "later ms": round(statistics.median(later), 1),
        "longest ms": round(max(first + later), 1),
    }


TEXT = """\
How much shorter the mean completion is, in percent, when `{policy}` knows the kinds: mean of {seeds} seeds, least and
most. Otherwise it sees one pool and average speeds, and places workers by chance: one by one (scattered) or a job on
one kind (gathered). Jobs that have begun mix kinds or stay. *Seen* speeds are known once a job has run on a kind. The
slowest policy decides about 1,000 jobs in {milliseconds:.0f} ms of CPU time.
[Assumptions](simulator.md#kinds-of-device)."""


def _cells(row: Row) -> dict[str, str]:
    least, mean, most = (f"{value:.0%}" for value in row.shorter)
    return {
        "throughputs": row.cluster,
        "load": f"{row.load:g}",
        "jobs that have begun": row.mobility,
        "speeds": "known" if row.knowledge == "all" else "those seen",
        "mean completion": f"{row.completion:,.0f} s",
        "beside": row.placed,
        "shorter": f"{mean} ({least} to {most})",
    }


def _printed(rows: list[Row]) -> list[Row]:
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in _cells(row).items()), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures, and write them where ``--json`` says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="benchmarks.scheduling_devices"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    parser.add_argument("--quick", action="store_true", help="two seeds, only to see that it works")
    given = parser.parse_args(arguments)
    seeds = 2 if given.quick else SEEDS
    rows = []
    for cluster in CLUSTERS:
        for load in LOADS:
            for mobility in ("mixes", "stays"):
                rows += _printed(compare(cluster, load, mobility, seeds))
    for cluster in CLUSTERS:
        for mobility in ("mixes", "stays"):
            rows += _printed(compare(cluster, LOADS[-1], mobility, seeds, knowledge="seen"))
    cost = prices(seeds)
    for figures in cost:
        print(", ".join(f"{key} {value:,.2f}" for key, value in figures.items()), flush=True)
    thinking = [decisions(policy, 3 if given.quick else 11) for policy in POLICIES]
    for figures in thinking:
        print(", ".join(f"{key} {value}" for key, value in figures.items()))
    if given.json is not None:
        slowest = max(float(str(figures["first ms"])) for figures in thinking)
        content = {
            "simulated": True,
            "text": TEXT.format(seeds=seeds, policy=POLICY, milliseconds=slowest),
            "rows": [_cells(row) for row in rows],
            "figures": [asdict(row) for row in rows],
            "prices": cost,
            "decisions": thinking,
        }
        given.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

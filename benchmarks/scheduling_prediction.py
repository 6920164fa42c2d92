"""What it is worth to predict jobs' service from past jobs, by how much jobs that are alike differ, in the simulator.

Made-up traces: 300 jobs of 30 models on 32 GPUs (``benchmarks.traces.generate.recurring``), once elastic from one GPU
on, and once with the size that they ask for or none. ``ShortestFirst`` knows their steps and speeds (``all``), what
jobs like them needed (``past``), or neither (``none``); the other two ask for neither. ``--quick`` plays
two seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import msgspec

from benchmarks.traces.generate import recurring
from virtualflow_operator.scheduling import POLICIES
from virtualflow_operator.settings import SchedulingSettings, SimulationSettings
from virtualflow_operator.simulator.outcome import Measures, measure
from virtualflow_operator.simulator.simulation import Knowledge, ResizeCost, simulate
from virtualflow_operator.simulator.trace import JobEvent, JobTrace

SPREADS = (0.1, 0.5, 1.0, 2.0)
"""Of the logarithm of the lengths of jobs that are alike: they differ by a tenth, by 1.6, by 2.7 and by 7.4 times."""
SEEDS = 10
PLAYED: tuple[tuple[str, Knowledge], ...] = (
    ("ShortestFirst", "all"),
    ("ShortestFirst", "past"),
    ("ShortestFirst", "none"),
    ("WeightedFairShare", "none"),
    ("FIFO", "none"),
)


@dataclass(frozen=True)
class Row:
    """One policy with one knowledge; means over the seeds."""

    elastic: bool
    spread: float
    policy: str
    knowledge: str
    median_completion: float
    mean_completion: float
    expected: float
    """The part of the jobs of which something was expected."""
    factor: float
    """The median factor by which that was wrong."""


def fixed(trace: JobTrace) -> JobTrace:
    """The same jobs, none of which can shrink."""
    return JobTrace(
        tuple(
            msgspec.structs.replace(event, min=event.maximum) if isinstance(event, JobEvent) else event
            for event in trace.events
        )
    )


def rows(seeds: int) -> list[Row]:
    """Everything."""
    defaults = SimulationSettings()
    cost = ResizeCost(defaults.join, defaults.pause)
    found = []
    for elastic in (True, False):
        for spread in SPREADS:
            traces = [recurring(seed, spread) for seed in range(seeds)]
            traces = traces if elastic else [fixed(trace) for trace in traces]
            for policy, knowledge in PLAYED:
                measured = [
                    measure(simulate(trace, POLICIES[policy], cost, SchedulingSettings(), knowledge=knowledge))
                    for trace in traces
                ]
                found.append(_row(elastic, spread, policy, knowledge, measured))
    return found


def _row(elastic: bool, spread: float, policy: str, knowledge: str, measured: Sequence[Measures]) -> Row:
    return Row(
        elastic,
        spread,
        policy,
        knowledge,
        mean(of.median_completion for of in measured),
        mean(of.mean_completion for of in measured),
        mean(of.expected / of.jobs for of in measured),
        mean(of.expected_factor for of in measured),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write the figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    parser.add_argument("--quick", action="store_true", help="two seeds")
    given = parser.parse_args(arguments)
    found = rows(2 if given.quick else SEEDS)
    for row in found:
        wrong = f", foreseen {row.expected:.0%}, off by {row.factor:.1f} x" if row.expected else ""
        print(
            f"{'elastic' if row.elastic else 'fixed':7}  spread {row.spread:g}  {row.policy} ({row.knowledge}): "
            f"median {row.median_completion:,.0f} s, mean {row.mean_completion:,.0f} s{wrong}"
        )
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=2) + "\n")


if __name__ == "__main__":
    main()

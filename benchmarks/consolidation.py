"""How many node hours it saves to gather workers, so that whole nodes fall idle and an autoscaler takes them away.

Simulated: 986 jobs of 92 days of one virtual cluster of Microsoft's Philly trace (``traces/README.md``), with what
``benchmarks.nodes`` assumes. On ten nodes with 8 GPUs every job has what it asks for at once; on
five, ``WeightedFairShare`` has jobs shrink in the peaks, down to one GPU, and they are as fast as they have GPUs. The
energy is what nodes draw though nobody uses them: ``--idle-watts`` each, which is an assumption, not a measurement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from benchmarks.nodes import Nodes, Placement, use
from benchmarks.traces.generate import philly
from virtualflow_operator.scheduling import POLICIES
from virtualflow_operator.settings import SchedulingSettings, SimulationSettings
from virtualflow_operator.simulator.outcome import Result
from virtualflow_operator.simulator.simulation import ResizeCost, simulate

FLEETS = (10, 5)
NODE = Nodes(units=8)
IDLE_WATTS = 800.0


@dataclass(frozen=True)
class Row:
    """One fleet with one placement."""

    nodes: int
    placement: str
    node_hours: float
    less: float
    """By which part these are less than if all nodes were always there."""
    busy: float
    """The part of their GPU hours that jobs had."""
    most: int
    waits: int
    workers: int
    """That ever started."""
    moves: int
    saved_kwh: float
    """Beside all nodes always there, over the whole trace."""


def rows(result: Result, nodes: int, watts: float) -> list[Row]:
    """All placements of one simulation."""
    first = min(outcome.job.time for outcome in result.outcomes)
    last = max(outcome.finished or first for outcome in result.outcomes)
    always = nodes * (last - first) / 3_600
    service = sum(outcome.service for outcome in result.outcomes) / 3_600
    started = sum(
        max(0, after - before)
        for outcome in result.outcomes
        for before, after in zip((0, *(w for _, w in outcome.changes)), (w for _, w in outcome.changes), strict=False)
    )

    def row(name: str, hours: float, most: int, waits: int, moves: int) -> Row:
        saved = (always - hours) * watts / 1_000
        return Row(
            nodes, name, hours, 1 - hours / always, service / hours / NODE.units, most, waits, started, moves, saved
        )

    found = [row("always there", always, nodes, 0, 0)]
    placements: tuple[Placement, ...] = get_args(Placement)
    for placement in placements:
        used = use(result, NODE, placement)
        found.append(row(placement, used.node_seconds / 3_600, used.most, used.waits, used.moves))
    return [*found, row("at best", used.least / 3_600, used.most, 0, 0)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write the figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    parser.add_argument("--idle-watts", type=float, default=IDLE_WATTS, metavar="W", help="of a node (default 800)")
    given = parser.parse_args(arguments)
    defaults, found = SimulationSettings(), []
    for nodes in FLEETS:
        cost = ResizeCost(defaults.join, defaults.pause)
        trace = philly().on(nodes * NODE.units)
        result = simulate(trace, POLICIES["WeightedFairShare"], cost, SchedulingSettings())
        found += rows(result, nodes, given.idle_watts)
    for row in found:
        print(
            f"{row.nodes:2} nodes  {row.placement:12}  {row.node_hours:8,.0f} node hours (-{row.less:.0%}), "
            f"{row.busy:.0%} used, up to {row.most} nodes; {row.waits} of {row.workers} workers waited for one, "
            f"{row.moves} moved; {row.saved_kwh:,.0f} kWh"
        )
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=2) + "\n")


if __name__ == "__main__":
    main()

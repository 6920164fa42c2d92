"""What it is worth to predict jobs' service from jobs like them, in the simulator.

Made-up traces (``benchmarks.traces.generate.recurring``): 160 jobs of 12 models on 32 GPUs, and twice the work that
these can do while jobs come; once elastic from one GPU on, and once with the size that they ask for or none.
``ShortestFirst`` knows their steps and speeds (``all``), what jobs like them needed (``past``), or neither (``none``).
``--quick`` plays two seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.traces.generate import recurring
from virtualflow_operator.scheduling import POLICIES
from virtualflow_operator.settings import SchedulingSettings, SimulationSettings
from virtualflow_operator.simulator.outcome import Measures, measure
from virtualflow_operator.simulator.simulation import Knowledge, ResizeCost, simulate
from virtualflow_operator.simulator.trace import JobEvent, JobTrace

SPREAD = 0.5
"""Of the logarithm of the lengths of jobs that are alike: they differ by 1.6 times."""
SEEDS = 20
JOBS, MODELS, LOAD = 160, 12, 2.0
_DEFAULTS = SimulationSettings()

TEXT = """\
Simulated: {jobs} jobs of {models} models on 32 GPUs, twice the work that these can do while jobs come; {seeds} seeds.
Jobs of one model differ in length by 1.6 times (standard deviation of the logarithm: {spread}). `ShortestFirst` knows
steps and speeds (all), [what similar jobs needed](simulator.md#jobs-that-come-again) (past), or neither (none: the
oldest first). Cells: mean completion in seconds, median of the seeds; ratios (least–most).

The paper (Hu et al., SC 2021) reports a mean completion up to 6.5 times shorter, with a predictor trained on the
history of SenseTime's clusters (Helios). Here a trace begins without history."""


@dataclass(frozen=True)
class Row:
    """The mean completion of one trace's jobs by what is known, in seconds."""

    elastic: bool
    seed: int
    all: float
    past: float
    none: float
    factor: float
    """The median factor by which what was expected at a job's arrival was wrong."""


def fixed(trace: JobTrace) -> JobTrace:
    """The same jobs, none of which can shrink."""
    return JobTrace(
        tuple(
            msgspec.structs.replace(event, min=event.maximum) if isinstance(event, JobEvent) else event
            for event in trace.events
        )
    )


def play(elastic: bool, seed: int) -> Row:
    """One trace with each knowledge."""
    trace = recurring(seed, SPREAD, JOBS, models=MODELS, load=LOAD)
    trace = trace if elastic else fixed(trace)
    cost = ResizeCost(_DEFAULTS.join, _DEFAULTS.pause)

    def played(knowledge: Knowledge) -> Measures:
        policy = POLICIES["ShortestFirst"]
        return measure(simulate(trace, policy, cost, SchedulingSettings(), knowledge=knowledge))

    told, past, none = played("all"), played("past"), played("none")
    means = (told.mean_completion, past.mean_completion, none.mean_completion)
    return Row(elastic, seed, *means, past.expected_factor)


def content(rows: Sequence[Row]) -> dict[str, Any]:
    """What the page shows, and every seed's figures."""
    shown = []
    for elastic in (True, False):
        of = [row for row in rows if row.elastic == elastic]
        shown.append(
            {
                "jobs": "elastic" if elastic else "fixed size",
                "off by": f"{median(row.factor for row in of):.1f}",
                "all": f"{median(row.all for row in of):,.0f}",
                "past": f"{median(row.past for row in of):,.0f}",
                "none": f"{median(row.none for row in of):,.0f}",
                "past over all": spread([row.past / row.all for row in of]),
                "none over past": spread([row.none / row.past for row in of]),
                "seeds with past worse than none": str(sum(row.past > row.none for row in of)),
            }
        )
    text = TEXT.format(jobs=JOBS, models=MODELS, spread=SPREAD, seeds=len({row.seed for row in rows}))
    return {"simulated": True, "text": text, "rows": shown, "seeds": [asdict(row) for row in rows]}


def spread(values: Sequence[float]) -> str:
    """The median, the least and the most, in one cell."""
    return f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print every seed and the table, and write the figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    parser.add_argument("--quick", action="store_true", help="two seeds")
    given = parser.parse_args(arguments)
    rows = []
    for elastic in (True, False):
        for seed in range(2 if given.quick else SEEDS):
            rows.append(row := play(elastic, seed))
            print(", ".join(f"{key} {value:g}" for key, value in asdict(row).items()))
    found = content(rows)
    for shown in found["rows"]:
        print("; ".join(f"{key}: {value}" for key, value in shown.items()))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

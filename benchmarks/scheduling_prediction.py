"""What it is worth to predict jobs' service from jobs like them, in the simulator.

Made-up traces (``benchmarks.traces.generate.recurring``): 160 jobs of 12 models on 32 GPUs, and twice the work that
these can do while jobs come; once elastic from one GPU on, and once with the size that they ask for or none.
``ShortestFirst`` knows their steps and speeds (``all``), what jobs like them needed (``past``), or neither (``none``).
What jobs need is learnt from nothing, or from as many others of these models, which ended before.
``--quick`` plays two seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.traces.generate import recurring
from virtualflow_operator.scheduling import POLICIES, ScalingCurve
from virtualflow_operator.scheduling.service_time import Past
from virtualflow_operator.scheduling.shortest_first import service
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
oldest first). *History*: other jobs of these models that ended before. Without it, most is lost on models of which no
job has ended yet. Cells: mean completion in seconds, median of the seeds; ratios (least–most).

The paper (Hu et al., SC 2021) reports a mean completion up to 6.5 times shorter, with a predictor trained on the
history of SenseTime's clusters (Helios)."""


@dataclass(frozen=True)
class Row:
    """The mean completion of one trace's jobs by what is known, in seconds."""

    elastic: bool
    history: int
    """Jobs of these models that have ended before."""
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


def trace(elastic: bool, seed: int, jobs: int = JOBS) -> JobTrace:
    """Jobs of the seed's models."""
    found = recurring(seed, SPREAD, jobs, models=MODELS, load=LOAD)
    return found if elastic else fixed(found)


def history(elastic: bool, seed: int) -> Past:
    """What is remembered of as many other jobs of the same models: the later ones of a trace that is twice as long."""
    past = Past()
    jobs = [event for event in trace(elastic, seed, 2 * JOBS).events if isinstance(event, JobEvent)]
    for job in jobs[JOBS:]:
        needed = service(job.demand(ScalingCurve.of(job.throughput.items()), job.steps))
        past = past.after(job.namespace, job.name, needed, SchedulingSettings())
    return past


def play(elastic: bool, seed: int) -> list[Row]:
    """One trace with each knowledge: without a history, and with one."""
    jobs, cost = trace(elastic, seed), ResizeCost(_DEFAULTS.join, _DEFAULTS.pause)

    def played(knowledge: Knowledge, past: Past = Past()) -> Measures:  # noqa: B008  (a value)
        policy = POLICIES["ShortestFirst"]
        return measure(simulate(jobs, policy, cost, SchedulingSettings(), knowledge=knowledge, past=past))

    told, none = played("all").mean_completion, played("none").mean_completion
    rows = []
    for before, past in ((0, Past()), (JOBS, history(elastic, seed))):
        found = played("past", past)
        rows.append(Row(elastic, before, seed, told, found.mean_completion, none, found.expected_factor))
    return rows


def content(rows: Sequence[Row]) -> dict[str, Any]:
    """What the page shows, and every seed's figures."""
    shown = []
    for elastic, before in product((True, False), (0, JOBS)):
        of = [row for row in rows if (row.elastic, row.history) == (elastic, before)]
        shown.append(
            {
                "jobs": "elastic" if elastic else "fixed size",
                "history": f"{before} jobs" if before else "none",
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
            for row in play(elastic, seed):
                rows.append(row)
                print(", ".join(f"{key} {value:g}" for key, value in asdict(row).items()))
    found = content(rows)
    for shown in found["rows"]:
        print("; ".join(f"{key}: {value}" for key, value in shown.items()))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

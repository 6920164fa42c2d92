"""The scheduling policies over the paper's 20-job trace, by simulation: beside what its authors' logs show.

Each policy is compared with ``Priority``, which the paper compares with, on the published trace and on 20 traces of its
kind (``benchmarks.traces.generate.like_paper``), with what a resize costs here and with a restart's price. ``--quick``
plays three seeds and leaves the thousand jobs out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec

from benchmarks.traces.generate import DIRECTORY, like_paper
from benchmarks.traces.workloads import RECORDED_FAIR_SHARE, RECORDED_PRIORITY, START_UP, TWENTY, Recorded
from virtualflow_operator.scheduling import POLICIES
from virtualflow_operator.settings import SchedulingSettings, SimulationSettings
from virtualflow_operator.simulator.outcome import Measures, measure, percentile
from virtualflow_operator.simulator.simulation import Knowledge, ResizeCost, simulate
from virtualflow_operator.simulator.trace import JobEvent, JobTrace, read

BASELINE = "Priority"
PAPER = 0.48
"""By which part completion is lower with elasticity: "up to 48 %" in its abstract; 47.4 % of the median in its logs."""
SEEDS = 20
_DEFAULTS = SimulationSettings()
COSTS = {
    "resize": ResizeCost(_DEFAULTS.join, _DEFAULTS.pause),
    "restart": ResizeCost(_DEFAULTS.restart, stop=True),
}
"""What a change costs here, and what a restart would."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A policy on the published trace, and how much less than ``Priority`` under the same price it needs."""

    policy: str
    cost: str
    median_completion: float
    less_completion: float
    """Of the median: 0.5 is half of it."""
    less_median_queueing: float
    less_mean_queueing: float
    makespan: float
    resizes: int
    spread_completion: tuple[float, float, float]
    """``less_completion`` on the traces of all seeds: the least, the median, the most."""
    spread_mean_queueing: tuple[float, float, float]
    """``less_mean_queueing`` likewise."""
    bound: float
    """What ``less_completion`` would be if every job had the cluster for itself from its arrival on."""
    seeds_at_48: int
    """Traces on which ``less_completion`` is at least what the paper reports."""
    seeds_bound_48: int
    """Traces on which the bound is."""


def play(trace: JobTrace, policy: str, cost: ResizeCost, knowledge: Knowledge = "all") -> Measures:
    """One policy on one trace."""
    return measure(simulate(trace, POLICIES[policy], cost, SchedulingSettings(), knowledge=knowledge))


def less(value: float, baseline: float) -> float:
    """By which part the value is below the baseline; 0 where there is nothing to be less than."""
    return 1 - value / baseline if baseline else 0.0


def alone(trace: JobTrace, cost: ResizeCost) -> float:
    """The median completion if every job had its best number of workers from its arrival on."""
    return percentile(
        [
            cost.join + job.steps / max(job.speed(workers) for workers in range(1, job.maximum + 1))
            for job in trace.jobs
        ],
        50,
    )


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The least, the median and the most."""
    return min(values), median(values), max(values)


def linear(trace: JobTrace) -> JobTrace:
    """The same jobs, as long as they were at their maximum, if every worker brought as much as the next."""

    def straight(job: JobEvent) -> JobEvent:
        each = job.speed(job.maximum) / job.maximum
        return msgspec.structs.replace(job, throughput={n: each * n for n in range(1, job.maximum + 1)})

    return JobTrace(tuple(straight(event) if isinstance(event, JobEvent) else event for event in trace.events))


def compare(
    seeds: int, change: Callable[[JobTrace], JobTrace] = lambda trace: trace, knowledge: Knowledge = "all"
) -> list[Row]:
    """All policies with both costs.

    Args:
        seeds: how many traces of the paper's kind.
        change: what to make of each trace first.
    """
    published = change(read(DIRECTORY / "paper-20.csv"))
    others = [change(like_paper(seed)) for seed in range(seeds)]
    rows = []
    for name, cost in COSTS.items():
        base = play(published, BASELINE, cost, knowledge)
        bases = [play(trace, BASELINE, cost, knowledge) for trace in others]
        bounds = [less(alone(trace, cost), of.median_completion) for trace, of in zip(others, bases, strict=True)]
        for policy in POLICIES:
            found = play(published, policy, cost, knowledge)
            founds = [play(trace, policy, cost, knowledge) for trace in others]

            def gains(figure: Callable[[Measures], float]) -> list[float]:
                return [less(figure(of), figure(to)) for of, to in zip(founds, bases, strict=True)]  # noqa: B023

            completion = gains(lambda of: of.median_completion)
            rows.append(
                Row(
                    policy=policy,
                    cost=name,
                    median_completion=found.median_completion,
                    less_completion=less(found.median_completion, base.median_completion),
                    less_median_queueing=less(found.median_queueing, base.median_queueing),
                    less_mean_queueing=less(found.mean_queueing, base.mean_queueing),
                    makespan=found.makespan,
                    resizes=found.resizes,
                    spread_completion=spread(completion),
                    spread_mean_queueing=spread(gains(lambda of: of.mean_queueing)),
                    bound=less(alone(published, cost), base.median_completion),
                    seeds_at_48=sum(gain >= PAPER for gain in completion),
                    seeds_bound_48=sum(bound >= PAPER for bound in bounds),
                )
            )
    return rows


def recorded(log: Recorded) -> dict[str, float]:
    """The measures of a published log."""
    arrivals = [submission.arrival for submission in TWENTY]
    queueing = [start - arrival for start, arrival in zip(log.started, arrivals, strict=True)]
    completion = [end - arrival for end, arrival in zip(log.finished, arrivals, strict=True)]
    return {
        "makespan": max(log.finished) - arrivals[0],
        "median_completion": median(completion),
        "median_queueing": median(queueing),
        "mean_queueing": mean(queueing),
    }


def reproduced() -> dict[str, float]:
    """The simulator's ``Priority`` with the start-up of the paper's system, to be held beside its log."""
    found = play(read(DIRECTORY / "paper-20.csv"), BASELINE, ResizeCost(START_UP))
    return {
        "makespan": found.makespan,
        "median_completion": found.median_completion,
        "median_queueing": found.median_queueing,
        "mean_queueing": found.mean_queueing,
    }


def thousand() -> dict[str, float]:
    """Seconds of CPU for the 1,000-job trace, by policy."""
    trace = read(DIRECTORY / "thousand.csv")
    seconds = {}
    for policy in POLICIES:
        began = time.process_time()
        play(trace, policy, COSTS["resize"])
        seconds[policy] = time.process_time() - began
    return seconds


TEXT = """\
Simulated: the published 20-job trace on 8 V100s, with resizes at their measured price. The table compares with
`Priority`; brackets have the least, the median and the most of {seeds} traces of the same kind. With its best number of
workers for each job from its arrival on, the median would be {bound:.0%} shorter; 48 % or more are possible on
{possible} of the {seeds} traces. [The simulator](simulator.md) has the source of the trace, and restarts in place of
resizes."""


def _cells(row: Row) -> dict[str, str]:
    return {
        "a change costs": "a resize" if row.cost == "resize" else "a restart",
        "policy": row.policy,
        "median completion": f"{row.median_completion:,.0f} s",
        "beside Priority": f"{_than(row.less_completion, 'shorter', 'longer')} ({_range(row.spread_completion)})",
        "seeds with 48 % or more": str(row.seeds_at_48),
        "median queueing": _than(row.less_median_queueing, "less", "more"),
        "mean queueing": f"{_than(row.less_mean_queueing, 'less', 'more')} ({_range(row.spread_mean_queueing)})",
        "makespan": f"{row.makespan:,.0f} s",
        "resizes": str(row.resizes),
    }


def _than(value: float, less: str, more: str) -> str:
    return f"{abs(value):.0%} {more if value < 0 else less}" if value else "the same"


def _range(values: tuple[float, float, float]) -> str:
    return ", ".join(str(round(100 * value)) for value in values) + " %"


def _print(title: str, rows: Sequence[Row]) -> None:
    print(f"{title} (at most {rows[0].bound:.0%} shorter; 48 % are possible with {rows[0].seeds_bound_48} seeds)")
    cells = [_cells(row) for row in rows]
    heading = list(cells[0])
    widths = [max(len(name), *(len(cell[name]) for cell in cells)) for name in heading]
    for values in (heading, *([cell[name] for name in heading] for cell in cells)):
        print("  " + "  ".join(value.ljust(width) for value, width in zip(values, widths, strict=True)).rstrip())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, and write the figures where ``--json`` says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="benchmarks.scheduling_traces"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    parser.add_argument("--quick", action="store_true", help="three seeds, and no thousand jobs")
    given = parser.parse_args(arguments)
    seeds = 3 if given.quick else SEEDS
    logs = {
        "recorded, priorities": recorded(RECORDED_PRIORITY),
        "recorded, the paper's elastic policy": recorded(RECORDED_FAIR_SHARE),
        f"simulated, {BASELINE} with a start-up of {START_UP:g} s": reproduced(),
    }
    for name, figures in logs.items():
        print(f"{name}: " + ", ".join(f"{key.replace('_', ' ')} {value:,.0f} s" for key, value in figures.items()))
    rows = compare(seeds)
    _print("8 GPUs, as recorded", rows)
    double = compare(seeds, lambda trace: trace.on(16))
    _print("16 GPUs", double)
    learning = compare(seeds, knowledge="seen")
    _print("8 GPUs, policies know only the speeds that a job has run at", learning)
    straight = compare(seeds, linear)
    _print("8 GPUs, if all jobs scaled linearly", straight)
    content: dict[str, Any] = {
        "simulated": True,
        "seeds": seeds,
        "text": TEXT.format(seeds=seeds, bound=rows[0].bound, possible=rows[0].seeds_bound_48),
        "rows": [_cells(row) for row in rows],
        "figures": [asdict(row) for row in rows],
        "sixteen_gpus": [asdict(row) for row in double],
        "linear": [asdict(row) for row in straight],
        "learning": [asdict(row) for row in learning],
        "logs": logs,
    }
    if not given.quick:
        content["thousand_jobs_cpu_seconds"] = seconds = thousand()
        print("1,000 jobs, seconds of CPU:", ", ".join(f"{policy} {cpu:.1f}" for policy, cpu in seconds.items()))
    if given.json is not None:
        given.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

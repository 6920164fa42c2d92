"""Whether the simulator, with the VirtualFlow authors' own rule of sharing, comes out as the logs of their scheduler.

Two questions, for the 20 jobs and for the three (``benchmarks.traces.recorded``):

- *The rule*: given the jobs that ran and waited at each decision of the log, does ``power_of_two_share`` give everybody
  the GPUs that the log says?
- *The times*: played from the arrivals on, when does each job end? With the figures that the traces have anyway, and
  with each job's speed and start-up scaled to what this very log shows of it, so that all that is left to differ is
  what the scheduler does.

A change takes as long as their logs say (``cost``): nothing here is fitted to how the jobs end.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import msgspec

from benchmarks.traces.generate import DIRECTORY
from benchmarks.traces.recorded import PAUSES, THREE_SHARED, TWENTY_SHARED, Log
from benchmarks.traces.workloads import START_UP
from virtualflow_operator.scheduling import Capacity, Demand
from virtualflow_operator.settings import SchedulingSettings
from virtualflow_operator.simulator.outcome import Outcome
from virtualflow_operator.simulator.power_of_two import power_of_two_share
from virtualflow_operator.simulator.simulation import ResizeCost, simulate
from virtualflow_operator.simulator.trace import JobEvent, JobTrace, read

LOGS = (TWENTY_SHARED, THREE_SHARED)


def cost(log: Log, *, in_turn: bool = True) -> ResizeCost:
    """What a change of a job costs in their system.

    Args:
        in_turn: as there; else decisions are carried out at once, as here.
    """
    return ResizeCost(START_UP, median(PAUSES), release=log.release if in_turn else None)


def decided(log: Log) -> list[tuple[dict[str, int], dict[str, int]]]:
    """For each decision of the log, what it says that everybody was to have, and what our rule gives."""
    return [(_pairs(then), _again(log, at, _pairs(had))) for at, had, then in log.decisions]


def _pairs(text: str) -> dict[str, int]:
    return {job: int(gpus) for job, gpus in (pair.split(":") for pair in text.split())}


def _again(log: Log, now: float, had: dict[str, int]) -> dict[str, int]:
    demands = [
        Demand(
            str(number),
            "default",
            submitted=float(job.arrival),
            maximum=job.workload.demand,
            priority=job.priority,
            weight=float(job.priority),
            allocated=had.get(str(number), 0),
            since=log.spans[number][0][0] if str(number) in had else None,
        )
        for number, job in enumerate(log.jobs)
        if job.arrival <= now < log.finished[number]
    ]
    found = power_of_two_share(now, demands, Capacity(log.gpus), SchedulingSettings())
    return {name: given.workers for name, given in found.items() if given.workers}


def as_logged(log: Log) -> JobTrace:
    """The jobs with the speeds and start-ups of this log.

    Each job's speeds are scaled alike, so that it makes its steps in the time that it had each number of GPUs. Its new
    workers take as long as the log says, on average; where it does not, ``START_UP``.
    """
    pause = median(PAUSES)

    def scaled(job: JobEvent) -> JobEvent:
        number = int(job.name[:2])
        ready = log.ready(number)
        ends = [at for at, _ in ready[1:]] + [log.finished[number]]
        pauses = [0.0] + [pause] * (len(ready) - 1)
        steps = sum(
            job.speed(gpus) * max(0.0, end - at - lost)
            for (at, gpus), end, lost in zip(ready, ends, pauses, strict=True)
        )
        factor, joins = job.steps / steps, log.joins(number)
        return msgspec.structs.replace(
            job,
            throughput={workers: speed * factor for workers, speed in job.throughput.items()},
            join=mean(joins) if joins else None,
        )

    events = read(DIRECTORY / log.trace).events
    return JobTrace(tuple(scaled(event) if isinstance(event, JobEvent) else event for event in events))


@dataclass(frozen=True)
class Row:
    """One way to play one log."""

    log: str
    played: str
    median_completion: float
    off_median: float
    """By which part the median completion differs from the log's."""
    off_jobs: tuple[float, float, float]
    """By which part the completions of single jobs differ: the least, the median of the sizes, the most."""
    off_makespan: float
    started_late: float
    """The most seconds by which a job started at another time than in the log."""


def compare(log: Log, played: str, trace: JobTrace, price: ResizeCost) -> Row:
    """Play a log's jobs, and hold them beside it."""
    outcomes = simulate(trace, power_of_two_share, price, SchedulingSettings()).outcomes
    arrivals = [float(job.arrival) for job in log.jobs]
    logged = [end - arrival for end, arrival in zip(log.finished, arrivals, strict=True)]
    found = [_ended(outcome) - arrival for outcome, arrival in zip(outcomes, arrivals, strict=True)]
    off = [ours / theirs - 1 for ours, theirs in zip(found, logged, strict=True)]
    starts = [abs((outcome.started or 0.0) - spans[0][0]) for outcome, spans in zip(outcomes, log.spans, strict=True)]
    return Row(
        log.trace,
        played,
        median(found),
        median(found) / median(logged) - 1,
        (min(off), median(abs(value) for value in off), max(off)),
        (max(_ended(outcome) for outcome in outcomes) - arrivals[0]) / (max(log.finished) - arrivals[0]) - 1,
        max(starts),
    )


def _ended(outcome: Outcome) -> float:
    if outcome.finished is None:
        raise ValueError(f"{outcome.job.name} never ended: {outcome.reason}")
    return outcome.finished


def rows() -> list[Row]:
    """All ways to play both logs."""
    return [
        compare(log, played, trace, cost(log, in_turn=in_turn))
        for log in LOGS
        for played, trace, in_turn in (
            ("speeds and start-ups of this log", as_logged(log), True),
            ("the same, decisions carried out at once", as_logged(log), False),
            ("speeds and start-ups of the trace", read(DIRECTORY / log.trace), True),
        )
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both answers, and write the figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    given = parser.parse_args(arguments)
    for log in LOGS:
        decisions = decided(log)
        same = sum(logged == ours for logged, ours in decisions)
        print(f"{log.trace}: {same} of {len(decisions)} decisions are the log's")
    found = rows()
    for row in found:
        print(
            f"{row.log}, {row.played}: median completion {row.median_completion:,.0f} s ({row.off_median:+.1%}), "
            f"single jobs {row.off_jobs[0]:+.1%} to {row.off_jobs[2]:+.1%} (median {row.off_jobs[1]:.1%}), "
            f"makespan {row.off_makespan:+.1%}, starts up to {row.started_late:,.0f} s off"
        )
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=2) + "\n")


if __name__ == "__main__":
    main()

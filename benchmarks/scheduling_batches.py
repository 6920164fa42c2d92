"""What it is worth to choose a job's batch beside its devices, in the simulator.

Made-up jobs of the published families (``benchmarks.traces.workloads``) on 32 GPUs, shared by ``MaxThroughput``. Each
asks for 1, 2, 4 or 8 GPUs' worth of samples a step, and allows from one GPU's worth to eight. The paper's scalers hold
a batch on the devices: with more samples than these have memory for, a job waits for more devices. Virtual nodes run
one after the other, so any batch runs on one device. ``--quick`` plays two seeds.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from benchmarks.scheduling_prediction import spread
from benchmarks.traces.workloads import FAMILIES
from virtualflow_operator.scheduling import POLICIES, ScalingCurve
from virtualflow_operator.scheduling.batch_choice import BatchBounds, choose_batch
from virtualflow_operator.scheduling.packing import Phases
from virtualflow_operator.settings import SimulationSettings
from virtualflow_operator.simulator.simulation import ResizeCost, simulate
from virtualflow_operator.simulator.trace import JobEvent, JobTrace, NodeEvent

HELD = {"cifar10": 128, "imagenet": 256, "glue": 16, "wmt": 8_192}
"""Samples that a GPU has memory for: what the published jobs give each of theirs."""
MOST = 8
"""GPUs of a job, and GPUs' worth of samples that it allows in a step."""
JOBS, GPUS, SEEDS = 400, 32, 5
LOADS = (0.5, 1.0)
"""Work that comes, over what all GPUs would do of it if each job had one."""

TEXT = """\
Simulated: {jobs} made-up jobs of the published families on {gpus} GPUs under `MaxThroughput`; {seeds} seeds. A job asks
for 1, 2, 4 or 8 GPUs' worth of samples a step and allows from one to eight, with as many samples in all. *Load*: work
that comes over what all GPUs do of it with one a job. Cells: jobs that have ended when the last one comes, and mean
completion; both relative to the first line, median of the seeds (least–most).

| line | batch of a job |
| --- | --- |
| asked, held | as asked; the job waits for devices that hold it at once |
| largest, held | the largest that it allows, likewise |
| chosen, held | the best for its devices that they hold at once: the paper's autoscaler |
| asked, virtual nodes | as asked; runs on any devices: a `bitwise` job |
| largest, virtual nodes | the largest that it allows; runs on any devices: a `bitwise` job whose user sets it |
| chosen, virtual nodes | the best for its devices, on any: a `statistical` job (`min_batch`, `max_batch`) |

The [paper](https://arxiv.org/abs/2006.13878) (Saxena et al., MASCOTS 2020) reports up to 2 times the jobs and a tenth
of the completion time, beside a scaler that changes the number of devices only, with other jobs and devices. Here most
of the gain over such scalers is that no job waits for the devices that hold its batch. It grows with the load and with
the length of the trace, as their queue does. Virtual nodes bring it at the batch as asked, so to `bitwise` jobs, whose
batch never changes. What is left to choosing is less exchange, and a `bitwise` job has that, too, if its user sets the
largest batch at the start, since it runs on any number of devices."""


@dataclass(frozen=True)
class Side:
    """How a job's batch comes about."""

    batch: Callable[[JobEvent, int], int]
    """Samples of a step, given the job and its workers."""
    held: bool
    """Whether its devices must hold them at once."""


def _held(job: JobEvent, workers: int) -> int:
    return workers * HELD[job.namespace]


def _phases(job: JobEvent, workers: int) -> Phases:
    return Phases.at(ScalingCurve.of(job.throughput.items()), workers)


def _fitting(job: JobEvent, workers: int) -> int:
    """The paper's autoscaler: the best batch that so many devices hold."""
    most = min(_held(job, workers), job.max_batch)
    if most <= job.batch:
        return most
    return choose_batch(_phases(job, workers), BatchBounds(job.min_batch, job.batch, most))


SIDES = {
    "asked, held": Side(lambda job, workers: job.batch, True),
    "largest, held": Side(lambda job, workers: job.max_batch, True),
    "chosen, held": Side(_fitting, True),
    "asked, virtual nodes": Side(lambda job, workers: job.batch, False),
    "largest, virtual nodes": Side(lambda job, workers: job.max_batch, False),
    "chosen, virtual nodes": Side(lambda job, workers: choose_batch(_phases(job, workers), job.batches), False),
}


def draw(seed: int, load: float) -> JobTrace:
    """Jobs with their batch as asked, whose lengths spread over hours (Pareto); the namespace is the family's name."""
    random_ = random.Random(seed)
    jobs: list[JobEvent] = []
    work = arrival = 0.0
    for index in range(JOBS):
        family = random_.choice(sorted(FAMILIES))
        held, asked = HELD[family], random_.choice((1, 2, 4, 8))
        seconds = 3_600 * asked * min(8.0, 0.25 * random_.paretovariate(1.2))
        speeds = {workers: 1 / FAMILIES[family].step_seconds(asked * held, workers) for workers in range(1, MOST + 1)}
        jobs.append(
            JobEvent(
                arrival,
                f"job-{index}",
                max(1, round(seconds * speeds[1])),
                speeds,
                namespace=family,
                statistical=True,
                batch=asked * held,
                min_batch=held,
                max_batch=MOST * held,
            )
        )
        work += seconds
        arrival += random_.expovariate(1.0)
    stretch = work / GPUS / load / jobs[-1].time
    arrivals = (msgspec.structs.replace(job, time=job.time * stretch) for job in jobs)
    return JobTrace((NodeEvent(0.0, "all", GPUS), *arrivals))


def with_batches(job: JobEvent, side: Side) -> JobEvent:
    """The job as fast as with this batch, and with as many samples; it has no fewer devices than hold the batch."""
    family, speeds = FAMILIES[job.namespace], {}
    for workers in job.throughput:
        batch = side.batch(job, workers)
        if not side.held or batch <= _held(job, workers):
            speeds[workers] = batch / job.batch / family.step_seconds(batch, workers)
    return msgspec.structs.replace(job, throughput=speeds, min=min(speeds))


def play(trace: JobTrace, side: Side) -> tuple[int, float]:
    """Jobs that have ended when the last one comes, and the mean completion of all in seconds."""
    defaults = SimulationSettings()
    events = (with_batches(event, side) if isinstance(event, JobEvent) else event for event in trace.events)
    cost = ResizeCost(defaults.join, defaults.pause)
    result = simulate(JobTrace(tuple(events)), POLICIES["MaxThroughput"], cost, defaults.scheduling)
    last = max(job.time for job in trace.jobs)
    ended = sum(outcome.finished is not None and outcome.finished <= last for outcome in result.outcomes)
    return ended, fmean(outcome.completion or 0.0 for outcome in result.outcomes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write the figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    parser.add_argument("--quick", action="store_true", help="two seeds")
    given = parser.parse_args(arguments)
    seeds = range(2 if given.quick else SEEDS)
    rows: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    for load in LOADS:
        found = {name: [play(draw(seed, load), side) for seed in seeds] for name, side in SIDES.items()}
        first = next(iter(found.values()))
        for name, played in found.items():
            jobs = spread([ended / base for (ended, _), (base, _) in zip(played, first, strict=True)])
            times = spread([mean / base for (_, mean), (_, base) in zip(played, first, strict=True)])
            rows.append({"line": name, "load": f"load {load:g}", "cell": f"{jobs}; **{times.replace(' ', '** ', 1)}"})
            samples.append(
                {"line": name, "load": load, "ended": [n for n, _ in played], "mean": [s for _, s in played]}
            )
            print(f"  load {load:g}, {name}: jobs {jobs}, completion {times}", flush=True)
    content = {"simulated": True, "text": TEXT.format(jobs=JOBS, gpus=GPUS, seeds=len(seeds)), "rows": rows}
    if given.json is not None:
        given.json.write_text(json.dumps(content | {"samples": samples}, indent=2) + "\n")


if __name__ == "__main__":
    main()

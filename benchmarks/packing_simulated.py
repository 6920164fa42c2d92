"""What packing by iteration would bring a cluster, by simulation: the policies with it and without, on the same jobs.

``virtualflow simulate --packing`` plays a trace of one's own so. Here jobs are drawn from the published 20-job trace
(``benchmarks.traces``), and are all there from the beginning: the ratio of makespans is that of work done. What part of
a step devices idle in follows from how the published jobs scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from statistics import fmean, median
from typing import Any

import msgspec

from benchmarks.traces.generate import like_paper
from virtualflow.protocol.settings import cost_of
from virtualflow_operator.scheduling import FIXED_SIZES, ScalingCurve, policy
from virtualflow_operator.scheduling.packing import Phases, share
from virtualflow_operator.settings import PackingSettings, SchedulingSettings
from virtualflow_operator.simulator.outcome import Measures
from virtualflow_operator.simulator.outcome import measure as measures_of
from virtualflow_operator.simulator.simulation import ResizeCost, simulate
from virtualflow_operator.simulator.trace import JobEvent, JobTrace

TEXT = """\
60 jobs like the published 20, all there at the start, on 16 devices; {seeds} seeds. A waiting job may compute on a
running job's devices if no step is predicted to take over 1.5 times as long as alone. Cells: additional work (median,
range), change of the mean completion, time that devices compute without → with packing.

| jobs | meaning |
| --- | --- |
| as published | a device idles for what a step takes beyond its share of one worker's step |
| half as idle | half of that, since small micro-batches are slow by themselves |
| partial backward passes | a virtual node a worker; passes stop after 1, 3/4, 1/2 or 1/4 of the model, by turns |
| elastic | jobs may shrink to one worker |

Partial passes are uneven: all of a job's workers wait for the longest one, which passes from device to device. Pairing
follows that on all devices together. Of the pairs of such jobs that the mean of a device's phases would allow,
{refused:.0f} % would be slowed down beyond the limit, by up to {worst:.2f} times.

Assumed: constant phases, memory for all, separate networks, free changes. Without packing, elastic jobs do twice the
work of fixed sizes. Packing adds nothing to them, since they shrink to one worker, which exchanges nothing. The
[paper](https://arxiv.org/abs/2111.10672) reports up to 28 % more efficiency elsewhere."""

JOBS, DEVICES, SEEDS = 60, 16, 20
CLASSES = (1.0, 0.75, 0.5, 0.25)
FREE = ResizeCost(0.0)
"""Changes of workers cost nothing, with packing or without, so that the difference is packing alone."""

Change = Callable[[Phases], float]
"""What devices compute in a step on average, given its phases as published."""


def half_as_idle(phases: Phases) -> float:
    """Half of the time in which devices idle by the curve is computing."""
    return phases.compute + phases.away / 2


def with_partial_backward(phases: Phases) -> float:
    """The paper's classes, which rotate: the mean of a device, while a step takes as long as its longest pass."""
    return phases.compute * fmean(map(cost_of, CLASSES))


KINDS: dict[str, Change | None] = {
    "as published": lambda phases: phases.compute,
    "half as idle": half_as_idle,
    "partial backward passes": with_partial_backward,
    "elastic": None,
}
POLICIES = {"elastic": ("WeightedFairShare", "MaxThroughput")}
"""Of a kind; the others have FIFO."""


def backlog(seed: int, kind: str, jobs: int = JOBS, devices: int = DEVICES) -> JobTrace:
    """A trace whose jobs are all there from the beginning."""
    drawn, change = like_paper(seed, jobs, devices), KINDS[kind]
    events = (msgspec.structs.replace(e, time=0.0) if isinstance(e, JobEvent) else e for e in drawn.events)
    if change is not None:
        passes = CLASSES if change is with_partial_backward else ()
        events = (_of_fixed_size(e, change, passes) if isinstance(e, JobEvent) else e for e in events)
    return JobTrace(tuple(events))


def _of_fixed_size(job: JobEvent, change: Change, backward: tuple[float, ...]) -> JobEvent:
    """The job with one size only, whose devices compute for so long in a step.

    Policies and packing take that from the speed of one worker, with which it never runs.
    """
    workers = job.maximum
    compute = change(Phases.at(ScalingCurve.of(job.throughput.items()), workers))
    alone = {} if workers == 1 else {1: 1 / (compute * workers)}
    throughput = {**alone, workers: job.speed(workers)}
    return msgspec.structs.replace(job, min=workers, max=workers, throughput=throughput, backward=backward)


def play(trace: JobTrace, name: str, most: int) -> Measures:
    """A trace under a policy, with at most so many jobs on a device."""
    fixed = name in FIXED_SIZES
    settings = SchedulingSettings()
    return measures_of(simulate(trace, policy(name), FREE, settings, jobs_per_device=most, fixed_sizes=fixed))


def misjudged(seed: int = 0) -> tuple[float, float]:
    """Pairs of jobs with partial passes that the means of their phases would wrongly allow.

    Returns:
        Their part of all that these would allow, and the longest step of any, in multiples of its step alone.
    """
    jobs = [job for job in backlog(seed, "partial backward passes").jobs if job.maximum > 1]
    allowed, steps = 0, []
    for one, other in product(jobs, jobs):
        if one.maximum == other.maximum:
            pair = [Phases.at(ScalingCurve.of(job.throughput.items()), job.maximum, job.passes) for job in (one, other)]
            means = [Phases(phases.compute, phases.step - phases.compute) for phases in pair]
            if _slowest(means, share(means)) <= PackingSettings().max_slowdown:
                allowed += 1
                steps.append(_slowest(pair, share(pair, [range(one.maximum)] * 2)))
    return sum(step > PackingSettings().max_slowdown for step in steps) / allowed, max(steps)


def _slowest(jobs: Sequence[Phases], steps: Sequence[float]) -> float:
    return max(step / job.step for job, step in zip(jobs, steps, strict=True))


def measure_row(kind: str, name: str, most: int, seeds: int) -> dict[str, Any]:
    """One policy on the traces of all seeds."""
    work, completion, computing, beside, slowest = [], [], [], [], 1.0
    for seed in range(seeds):
        trace = backlog(seed, kind)
        without, packed = play(trace, name, 1), play(trace, name, most)
        fixed = play(backlog(seed, "as published"), "FIFO", 1)
        work.append(without.makespan / packed.makespan - 1)
        completion.append(packed.mean_completion / without.mean_completion - 1)
        computing.append((without.computing, packed.computing))
        beside.append(fixed.makespan / packed.makespan - 1)
        slowest = max(slowest, packed.longest_slowdown)
    row = {
        "jobs": kind,
        "policy": name,
        "most": most,
        "work": median(work),
        "work_range": [min(work), max(work)],
        "completion": median(completion),
        "completion_range": [min(completion), max(completion)],
        "computing": [median(column) for column in zip(*computing, strict=True)],
        "slowest": slowest,
        "beside": median(beside),
    }
    print(
        f"  {kind}, {name}, {most} on a device: work {row['work']:+.1%}, completion {row['completion']:+.1%}, beside "
        f"fixed sizes without packing {row['beside']:+.1%}",
        flush=True,
    )
    return row


def measure(quick: bool) -> dict[str, Any]:
    """All of it; ``quick``: three seeds."""
    seeds = 3 if quick else SEEDS
    rows = [
        measure_row(kind, name, most, seeds)
        for kind in KINDS
        for name in POLICIES.get(kind, ("FIFO",))
        for most in ((2, 3) if kind != "elastic" else (2,))
    ]
    refused, worst = misjudged()
    settings = {"seeds": seeds, "jobs": JOBS, "devices": DEVICES, "refused": refused, "worst": worst}
    return {"settings": settings, "text": TEXT.format(seeds=seeds, refused=100 * refused, worst=worst), "rows": rows}

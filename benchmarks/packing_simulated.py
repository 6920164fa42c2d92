"""What packing by iteration would bring a cluster, by simulation: the policies with it and without, on the same jobs.

The jobs are drawn from the published 20-job trace (``benchmarks.traces``), and are all there from the beginning: the
ratio of makespans is that of work done. What part of a step devices idle in follows from how the published jobs scale.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import msgspec

from benchmarks.packed import play
from benchmarks.traces.generate import like_paper
from virtualflow_operator.scheduling import ScalingCurve, policy
from virtualflow_operator.scheduling.packing import Phases
from virtualflow_operator.settings import SchedulingSettings
from virtualflow_operator.simulator.trace import JobEvent, JobTrace

TEXT = """\
60 jobs like the published 20, all there at the start, on 16 devices; 20 seeds. A waiting job may compute on a running
job's devices if no step is predicted to take over 1.5 times as long as alone. Cells: additional work (median, range),
change of the mean completion, time that devices compute without → with packing.

| jobs | meaning |
| --- | --- |
| as published | a device idles for what a step takes beyond its share of one worker's step |
| half as idle | half of that, since small micro-batches are slow by themselves |
| partial backward passes | workers stop after 1, 3/4, 1/2 or 1/4 of the model |
| elastic | jobs may shrink to one worker |

Assumed: constant phases, memory for all, separate networks, free changes. Without packing, elastic jobs do twice the
work of fixed sizes. Packing adds nothing to them, since they shrink to one worker, which exchanges nothing. The
[paper](https://arxiv.org/abs/2111.10672) reports up to 28 % more efficiency elsewhere."""

JOBS, DEVICES, SEEDS = 60, 16, 20
CLASSES = (1.0, 0.75, 0.5, 0.25)
BACKWARD = 2 / 3
"""Of what a step computes."""

Change = Callable[[Phases], float]
"""What devices compute in a step, given its phases as published."""


def half_as_idle(phases: Phases) -> float:
    """Half of the time in which devices idle by the curve is computing."""
    return phases.compute + phases.away / 2


def with_partial_backward(phases: Phases) -> float:
    """The paper's classes, which rotate: the mean of a device."""
    return phases.compute * (1 - BACKWARD + BACKWARD * sum(CLASSES) / len(CLASSES))


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
        events = (_of_fixed_size(e, change) if isinstance(e, JobEvent) else e for e in events)
    return JobTrace(tuple(events))


def _of_fixed_size(job: JobEvent, change: Change) -> JobEvent:
    """The job with one size only, whose devices compute for so long in a step.

    Policies and packing take that from the speed of one worker, with which it never runs.
    """
    workers = job.maximum
    compute = change(Phases.at(ScalingCurve.of(job.throughput.items()), workers))
    alone = {} if workers == 1 else {1: 1 / (compute * workers)}
    return msgspec.structs.replace(job, min=workers, max=workers, throughput={**alone, workers: job.speed(workers)})


def measure_row(kind: str, name: str, most: int, seeds: int) -> dict[str, Any]:
    """One policy on the traces of all seeds."""
    told = SchedulingSettings()
    work, completion, computing, beside, slowest = [], [], [], [], 1.0
    for seed in range(seeds):
        trace = backlog(seed, kind)
        without = play(trace, policy(name), 1, told)
        packed = play(trace, policy(name), most, told)
        fixed = play(backlog(seed, "as published"), policy("FIFO"), 1, told)
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
    return {"settings": {"seeds": seeds, "jobs": JOBS, "devices": DEVICES}, "rows": rows}

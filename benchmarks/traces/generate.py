"""Write the traces of this directory again: ``python -m benchmarks.traces.generate``. Same seeds, same bytes.

``--like-paper SEED FILE`` writes another trace of the kind of the paper's 20 jobs instead.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.traces.workloads import FAMILIES, THREE, TWENTY, Submission, Workload
from virtualflow_operator.simulator.trace import Event, GoneEvent, JobEvent, JobTrace, NodeEvent, check, write

DIRECTORY = Path(__file__).parent
PRIORITIES = (1, 5, 10)
"""Of the paper's traces; its elastic policy takes them as weights."""
JOBS_PER_HOUR = 12.0
"""Of the paper's 20-job trace."""

_COMMENT = "Written by python -m benchmarks.traces.generate; benchmarks/traces/README.md has the sources."


def _trace(events: Iterable[Event], origin: str) -> JobTrace:
    return check(((origin, event) for event in events), origin)


def _jobs(submissions: Sequence[Submission]) -> list[Event]:
    return [
        JobEvent(
            float(submission.arrival),
            f"{index:02d}-{submission.workload.model}",
            submission.workload.steps,
            submission.workload.throughput(),
            weight=float(submission.priority),
            priority=submission.priority,
        )
        for index, submission in enumerate(submissions)
    ]


def paper(submissions: Sequence[Submission], gpus: int) -> JobTrace:
    """The published trace on one machine with ``gpus`` GPUs."""
    return _trace([NodeEvent(0.0, "v100", gpus), *_jobs(submissions)], "the published trace")


def like_paper(seed: int, jobs: int = 20, gpus: int = 8) -> JobTrace:
    """Another trace of the paper's kind: its workloads drawn with replacement, its priorities, its rate of arrivals."""
    random_ = random.Random(seed)
    arrival = 1.0
    submissions = []
    for _ in range(jobs):
        workload = random_.choice(TWENTY).workload
        submissions.append(Submission(round(arrival), random_.choice(PRIORITIES), workload))
        arrival += random_.expovariate(JOBS_PER_HOUR / 3_600)
    return paper(submissions, gpus)


def philly() -> JobTrace:
    """The jobs of one virtual cluster of the Philly trace, which may shrink to one GPU and scale linearly."""
    events: list[Event] = []
    for index, line in enumerate((DIRECTORY / "philly-103959.txt").read_text().splitlines()[1:]):
        arrival, gpus, seconds = map(int, line.split())
        speeds = {workers: float(workers) for workers in range(1, gpus + 1)}
        events.append(JobEvent(float(arrival), f"job-{index}", seconds * gpus, speeds))
    return _trace(events, "the Philly jobs")


def recurring(
    seed: int, spread: float, jobs: int = 300, gpus: int = 32, *, models: int = 30, load: float = 1.0
) -> JobTrace:
    """Jobs that come again: models of four teams, some trained often, whose lengths spread over hours.

    Args:
        spread: of the lengths of one model's jobs: the standard deviation of their logarithm.
        load: work that comes, over what all GPUs can do in that time.
    """
    random_ = random.Random(seed)
    made = []
    for index in range(models):
        demand = random_.choices((1, 2, 4, 8), (50, 20, 15, 15))[0]
        hours = min(8.0, (1 / 15) * random_.paretovariate(1.0))
        made.append((_made_up(random_, index, demand, hours), f"team-{random_.randrange(4)}", hours))
    events: list[Event] = [NodeEvent(0.0, "all", gpus)]
    often = [1 / (rank + 1) for rank in range(models)]
    drawn = [random_.choices(made, often)[0] for _ in range(jobs)]
    lengths = [math.exp(random_.gauss(0.0, spread) - spread * spread / 2) for _ in drawn]
    # At a load of 1, work as there is capacity for: in the queue that grows and shrinks by chance, order matters.
    work = sum(model.seconds * length * model.demand for (model, _, _), length in zip(drawn, lengths, strict=True))
    arrival = 0.0
    for index, ((model, namespace, _), length) in enumerate(zip(drawn, lengths, strict=True)):
        name = f"{model.model.partition('-')[2]}-{model.model.partition('-')[0]}x-{index:04d}"
        steps = max(1, round(model.steps * length))
        events.append(JobEvent(round(arrival, 1), name, steps, model.throughput(), namespace=namespace))
        arrival += random_.expovariate(load * jobs * gpus / work)
    return _trace(events, "the recurring jobs")


def _made_up(random_: random.Random, index: int, demand: int, hours: float) -> Workload:
    """A job of any family that takes ``hours`` at its demand, with the published batch for each GPU."""
    family = random_.choice(sorted(FAMILIES))
    batch = {"cifar10": 128, "imagenet": 256, "glue": 16, "wmt": 8_192}[family] * demand
    step = FAMILIES[family].step_seconds(batch, demand)
    steps = max(1, round(hours * 3_600 / step))
    return Workload(f"{index:04d}-{family}", family, demand, batch, steps, steps * step)


def thousand(seed: int = 1_000) -> JobTrace:
    """1,000 jobs on 128 GPUs: sizes from 1 to 16, durations from two minutes to eight hours (Pareto, shape 1.1)."""
    random_ = random.Random(seed)
    events: list[Event] = [NodeEvent(0.0, f"node-{number}", 8) for number in range(16)]
    arrival = 0.0
    for index in range(1_000):
        demand = random_.choices((1, 2, 4, 8, 16), (50, 20, 15, 10, 5))[0]
        hours = min(8.0, (1 / 30) * random_.paretovariate(1.1))
        workload = _made_up(random_, index, demand, hours)
        powers = [2**power for power in range(int(math.log2(demand)) + 1)]
        throughput = workload.throughput()
        priority = random_.choice(PRIORITIES)
        events.append(
            JobEvent(
                round(arrival, 1),
                workload.model,
                workload.steps,
                {workers: throughput[workers] for workers in powers},
                weight=float(priority),
                priority=priority,
                namespace=f"team-{random_.randrange(5)}",
            )
        )
        arrival += random_.expovariate(1 / 8)
    return _trace(events, "the thousand jobs")


def spot(seed: int = 40) -> JobTrace:
    """40 jobs on 8 on-demand GPUs and four spot nodes of 4, each withdrawn again and again (up 45 min, gone 15 min)."""
    random_ = random.Random(seed)
    events: list[Event] = [NodeEvent(0.0, "steady", 8)]
    for number in range(4):
        name, time = f"spot-{number}", 0.0
        while time < 6 * 3_600:
            events.append(NodeEvent(round(time), name, 4, spot=True))
            time += 60 + random_.expovariate(1 / 2_700)
            events.append(GoneEvent(round(time), name))
            time += 60 + random_.expovariate(1 / 900)
        events.append(NodeEvent(round(time), name, 4, spot=True))
    arrival = 0.0
    for index in range(40):
        demand = random_.choices((1, 2, 4, 8), (40, 25, 20, 15))[0]
        workload = _made_up(random_, index, demand, 0.1 + random_.expovariate(1 / 0.5))
        priority = random_.choice(PRIORITIES)
        job = JobEvent(
            round(arrival),
            workload.model,
            workload.steps,
            workload.throughput(),
            weight=float(priority),
            priority=priority,
            on_demand=random_.random() < 0.5,
        )
        events.append(job)
        arrival += random_.expovariate(1 / 120)
    return _trace(events, "the spot trace")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write them all, or another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like-paper", nargs=2, metavar=("SEED", "FILE"), help="write only this one")
    given = parser.parse_args(arguments)
    if given.like_paper is not None:
        seed, file = given.like_paper
        comment = f"Like the paper's 20 jobs: python -m benchmarks.traces.generate --like-paper {seed} FILE"
        write(like_paper(int(seed)), Path(file), (comment,))
        return
    log = "durations at the demand and arrivals are published, speeds at other sizes are fitted to the same logs"
    write(paper(TWENTY, 8), DIRECTORY / "paper-20.csv", ("The paper's 20 jobs on 8 V100s: " + log + ".", _COMMENT))
    write(paper(THREE, 4), DIRECTORY / "paper-3.csv", ("The paper's 3 jobs on 4 V100s: " + log + ".", _COMMENT))
    write(thousand(), DIRECTORY / "thousand.csv", ("1,000 made-up jobs with a heavy tail, on 128 GPUs.", _COMMENT))
    write(spot(), DIRECTORY / "spot.csv", ("40 made-up jobs; two thirds of the GPUs come and go.", _COMMENT))


if __name__ == "__main__":
    main()

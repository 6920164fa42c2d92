"""Jobs of workers that are stopped and continued, by a clock of their own: what they make of the best split.

Measuring and deciding are the real ones. A step is played: each worker computes its virtual nodes, all exchange once
the last one is through, and each updates. A slow worker runs a part of each period: by signals it is stopped for the
rest, also while it waits; by a quota it may run that long, whenever it has something to do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pytest

from virtualflow.coordinator.assignment import assign
from virtualflow.coordinator.balance import better_split, note_pace, split
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.coordinator.snapshot import Cluster, Worker
from virtualflow.protocol.messages import Generation, Member, Pace, Plan
from virtualflow.worker.pace import PaceMeter, PaceReportPolicy

VIRTUAL_NODES = 16
SETTINGS = MembershipSettings()
FIXED, EXCHANGE, UPDATE = 0.0005, 0.002, 0.002
"""Seconds of computing in a step, however many virtual nodes there are."""
NOISE = 0.03
HALF = 20.0
"""Seconds."""


@dataclass
class Processor:
    """What a worker runs on: ``period / factor`` of each period."""

    factor: int = 1
    period: float = 0.01
    phase: float = 0.0
    quota: bool = False
    window: int = -1
    used: float = 0.0

    def run(self, now: float, seconds: float) -> float:
        """When so much computing that begins ``now`` is done."""
        share = self.period / self.factor
        while self.factor > 1:
            window, since = divmod(now + self.phase, self.period)
            if window != self.window:
                self.window, self.used = int(window), 0.0
            left = share - (self.used if self.quota else since)
            if seconds <= left:
                break
            seconds -= max(0.0, left)
            now = (window + 1) * self.period - self.phase + 1e-9
        self.used += seconds
        return now + seconds


class Job:
    """Workers that train, and a coordinator that moves their virtual nodes."""

    def __init__(self, processors: list[Processor], node: float, seed: int) -> None:
        self.processors, self.node, self.noise = processors, node, random.Random(seed)
        self.counts = [len(one) for one in assign(VIRTUAL_NODES, [1.0] * len(processors))]
        self.moves, self.since = 0, 0.0
        self.begins = [0.0] * len(processors)
        self.meters = [PaceMeter() for _ in processors]
        self.policies = [PaceReportPolicy() for _ in processors]
        self.workers = {f"w{n}": Worker(f"w{n}", f"w{n}", last_heard=0.0) for n in range(len(processors))}

    def step(self) -> float:
        """Make a step; when the last worker is through with it."""
        ends = []
        for begin, count, processor, meter in zip(self.begins, self.counts, self.processors, self.meters, strict=True):
            need = FIXED + sum(self.node * self.noise.uniform(1 - NOISE, 1 + NOISE) for _ in range(count))
            meter.begin(begin, count)
            ends.append(processor.run(begin, need))
            meter.end(ends[-1])
        exchanged = max(processor.run(max(ends), EXCHANGE) for processor in self.processors)
        self.begins = [processor.run(exchanged, UPDATE) for processor in self.processors]
        for begin, meter in zip(self.begins, self.meters, strict=True):
            meter.commit(begin)
        return max(self.begins)

    @property
    def cluster(self) -> Cluster:
        generation, first, members = Generation(1, 1 + self.moves), 0, []
        for name, count in zip(self.workers, self.counts, strict=True):
            members.append(Member(name, name, "h", first, first + count))
            first += count
        running = Plan(generation, "planned", tuple(members), (), "rebalance", "")
        return Cluster(VIRTUAL_NODES, len(members), 0.0, dict(self.workers), running=running, trained=True)

    def decide(self, now: float) -> None:
        """What the coordinator does after a step."""
        cluster = self.cluster
        assert cluster.running is not None
        for (name, worker), meter, policy in zip(self.workers.items(), self.meters, self.policies, strict=True):
            found = meter.estimate
            if found is not None and policy.is_due(now, found, len(self.workers)):
                generation = cluster.running.generation
                pace = Pace(generation, found.median, found.low, found.high, found.rest, found.samples)
                self.workers[name] = replace(worker, pace=pace, times=note_pace(cluster, worker, pace, now))
        if now < self.since + SETTINGS.rebalance_interval or better_split(self.cluster, SETTINGS, now) is None:
            return
        self.counts = [len(one) for one in split(self.cluster, list(self.workers), SETTINGS, now)]
        self.moves, self.since = self.moves + 1, now
        for meter, policy in zip(self.meters, self.policies, strict=True):
            meter.enter()
            policy.enter()


def processors(slow: Mapping[int, int], count: int, period: float, quota: bool, seed: int) -> list[Processor]:
    phases = random.Random(seed)
    return [Processor(slow.get(n, 1), period, phases.uniform(0, period), quota) for n in range(count)]


def steps_of(job: Job, seconds: float, moving: bool) -> Iterator[float]:
    now = 0.0
    while now < seconds:
        now = job.step()
        if moving:
            job.decide(now)
        yield now


def compare(
    slow: Mapping[int, int], count: int, node: float, period: float, quota: bool, seed: int
) -> tuple[float, int, int]:
    """The throughput of the second half beside the one under the split that true speeds ask for; and how many moves
    each half has.
    """
    job = Job(processors(slow, count, period, quota, seed), node, seed)
    for _ in steps_of(job, HALF, moving=True):
        pass
    early, late = job.moves, list(steps_of(job, 2 * HALF, moving=True))
    best = Job(processors(slow, count, period, quota, seed), node, seed)
    best.counts = [len(one) for one in assign(VIRTUAL_NODES, [1.0 / slow.get(n, 1) for n in range(count)])]
    ideal = [now for now in steps_of(best, 6.0, moving=False) if now > 1.0]
    step, least = ((times[-1] - times[0]) / (len(times) - 1) for times in (late, ideal))
    return least / step, early, job.moves - early


MIXES = [
    pytest.param({1: 3}, 2, id="one of two"),
    pytest.param({1: 2}, 2, id="one of two, half as fast"),
    pytest.param({1: 3}, 3, id="one of three"),
    pytest.param({1: 3, 2: 2}, 4, id="two of four"),
    pytest.param({1: 2, 3: 3}, 5, id="two of five"),
]


@pytest.mark.parametrize("node", [0.004, 0.012], ids=["4 ms", "12 ms"])
@pytest.mark.parametrize(("slow", "count"), MIXES)
def test_workers_that_are_stopped_for_moments_make_almost_what_the_best_split_would(
    slow: Mapping[int, int], count: int, node: float
) -> None:
    """By signals, as ``slow`` in a fault schedule does it."""
    for seed in range(2):
        share, early, late = compare(slow, count, node, 0.01, quota=False, seed=seed)
        assert share >= 0.92
        assert 1 <= early <= 3
        assert late <= 1


@pytest.mark.parametrize(("slow", "count"), MIXES)
def test_under_a_processor_quota_virtual_nodes_do_not_go_to_and_fro(slow: Mapping[int, int], count: int) -> None:
    """As Kubernetes limits a container's CPU, for a tenth of a second at a time."""
    for seed in range(2):
        share, _, late = compare(slow, count, 0.012, 0.1, quota=True, seed=seed)
        assert share >= 0.75
        assert late <= 4

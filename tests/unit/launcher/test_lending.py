"""Whose turn it is on a device: tables of what happens, and what holds whatever happens."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.launcher.turn_server import Device

LIMIT = 10.0
TABLE = [
    pytest.param("a1 b1 -a1", "a1 | | b1", id="one after the other"),
    pytest.param("a1 b1 c1 -a1 a1 -b1 -c1", "a1 | | | b1 | | c1 | a1", id="in the order in which they asked"),
    pytest.param("a1 a2 b1 -a1 -a2", "a1 | a2 | | | b1", id="the workers of a job have it together"),
    pytest.param("a1 b1 a2 -a1 -a2", "a1 | | a2 | | b1", id="also one that comes while others wait"),
    pytest.param("a1 a2 b1 -a1 a1 -a2 -b1", "a1 | a2 | | | | b1 | a1", id="but each once, or others would starve"),
    pytest.param("a1 a2 -a1 a1", "a1 | a2 | | a1", id="again where nobody else waits"),
    pytest.param("a1 b1 c1 b2 -a1", "a1 | | | | b1 b2", id="those who wait, too"),
    pytest.param("a1 b1 c1 -b1 -a1", "a1 | | | | c1", id="one that does not want it any more is passed over"),
    pytest.param("a1 b1 9 1", "a1 | | | b1", id="one that hangs loses it"),
    pytest.param("a1 b1 10 -a1 a1 -b1", "a1 | | b1 | | | a1", id="and when it comes back, it waits like others"),
    pytest.param("a1 100 b1 9 1", "a1 | | b1", id="a turn that nobody waited for has had its time"),
]


@pytest.mark.parametrize(("happens", "granted"), TABLE)
def test_turns(happens: str, granted: str) -> None:
    device, now, told = Device(LIMIT), 0.0, []
    names = sorted({word.strip("-") for word in happens.split()})
    for word in happens.split():
        if word.isdigit():
            now += float(word)
            found = device.look(now)
        elif word.startswith("-"):
            found = device.give_back(names.index(word[1:]), now)
        else:
            found = device.ask(names.index(word), word[0], now)
        told.append(" ".join(names[worker] for worker in found))
    assert " | ".join(told).replace("  ", " ").strip(" |") == granted


@dataclass
class Node:
    """A device in the hands of whatever comes; each worker as it sees itself."""

    device: Device = field(default_factory=lambda: Device(LIMIT))
    now: float = 0.0
    computing: set[int] = field(default_factory=set)
    promised: dict[int, float] = field(default_factory=dict)
    """By when each that waits will have its turn."""

    def grant(self, workers: list[int]) -> None:
        for worker in workers:
            assert self.now <= self.promised.pop(worker, self.now) + 1e-9
            self.computing.add(worker)

    def toggle(self, worker: int, job: str) -> None:
        """It asks, or gives back, or does not want it any more, or dies."""
        if worker in self.computing or worker in self.promised:
            self.computing.discard(worker)
            self.promised.pop(worker, None)
            self.grant(self.device.give_back(worker, self.now))
            return
        granted = self.device.ask(worker, job, self.now)
        if worker not in granted:
            self.promised[worker] = self.now + self.device.most(worker, self.now)
        self.grant(granted)

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (due := self.device.due()) is not None and due <= until:
            self.now = max(self.now, due)
            self.grant(self.device.look(self.now))
        self.now = until

    def check(self) -> None:
        assert {asked.worker for asked in self.device.waiting} == self.promised.keys()
        assert self.device.holders <= self.computing, "who has lost its turn may still compute, and nobody else does"
        assert bool(self.device.holders) or not self.promised, "nobody waits for a device that is free"
        assert len({worker % 3 for worker in self.device.holders}) <= 1, "one job at a time"
        assert all(self.now <= by + 1e-9 for by in self.promised.values()), "nobody waits longer than it was told"


@given(st.lists(st.integers(0, 8) | st.floats(0.0, 25.0), max_size=60))
def test_nobody_starves_and_no_two_jobs_compute_at_once_whatever_happens(happens: list[int | float]) -> None:
    node = Node()
    for event in happens:
        if isinstance(event, float):
            node.wait(event)
        else:
            node.toggle(event, f"job-{event % 3}")
        node.check()


class Cluster:
    """Jobs with a worker on each of some nodes, which exchange when all of them have computed. Time is simulated."""

    def __init__(self, nodes: int, jobs: list[tuple[float, float]], seed: int) -> None:
        self.random = random.Random(seed)
        self.devices = [Device(1e9) for _ in range(nodes)]
        self.jobs = jobs
        """Seconds that each computes, and exchanges."""
        self.queue: list[tuple[float, int, str, int, int]] = []
        self.computed = [0] * len(jobs)
        self.steps: list[list[float]] = [[] for _ in jobs]
        for job in range(len(jobs)):
            for node in range(nodes):
                self.push(self.random.random(), "asks", job, node)

    def push(self, time: float, event: str, job: int, node: int) -> None:
        heapq.heappush(self.queue, (time, len(self.queue), event, job, node))

    def last(self, seconds: float) -> float:
        """About so long: no two steps take equally long."""
        return seconds * (1 + 0.02 * self.random.random())

    def happen(self) -> None:
        now, _, event, job, node = heapq.heappop(self.queue)
        device = self.devices[node]
        granted = device.ask(job, str(job), now) if event == "asks" else device.give_back(job, now)
        for other in granted:
            self.push(now + self.last(self.jobs[other][0]), "has computed", other, node)
        self.computed[job] += event == "has computed"
        if self.computed[job] == len(self.devices):
            self.computed[job] = 0
            back = now + self.last(self.jobs[job][1])
            self.steps[job].append(back)
            for each in range(len(self.devices)):
                self.push(back + 0.001 * self.random.random(), "asks", job, each)


@pytest.mark.parametrize("seed", range(3))
def test_nodes_that_know_nothing_of_each_other_come_to_one_order(seed: int) -> None:
    cluster = Cluster(4, [(1.0, 1.5), (1.0, 0.8)], seed)
    while len(cluster.steps[0]) < 40:
        cluster.happen()
    late = cluster.steps[0][20:]
    step = (late[-1] - late[0]) / (len(late) - 1)
    assert step == pytest.approx(2.5, rel=0.05), "as long as alone: all nodes lend to the same job at a time"

"""On which nodes a simulation's workers would be, and for how long an autoscaler would keep these nodes. Pure.

The simulation counts workers and puts them nowhere. Here each of them gets a place afterwards, change by change, on
nodes that are all alike, which come when they are needed and go when they have been empty for a while. It is the
smallest model that says what it is worth to gather workers, and what it leaves out makes the answer an upper bound:

- A node is there as soon as it is asked for: what jobs would wait for that is counted (``waits``), not played.
- Jobs are as fast wherever their workers are, and a worker moves without a loss: ``moves`` are counted.
- Nobody else is on the nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from virtualflow_operator.simulator.outcome import Result

Placement = Literal["spread", "gather", "move"]
"""Where a worker goes: to the emptiest node that is there, as Kubernetes' scheduler has it unless told otherwise; to
the fullest with room, while who leaves does so from the emptiest; or so, and nodes that others have room for are
emptied."""


@dataclass(frozen=True)
class Nodes:
    """What a fleet of nodes is like."""

    units: int
    """Of each."""
    idle: float = 600.0
    """Seconds for which a node is empty before it goes: the cluster autoscaler's ``scale-down-unneeded-time``."""


@dataclass(frozen=True)
class Use:
    """What became of the nodes."""

    node_seconds: float
    """For which nodes were there."""
    least: float
    """For which they would have been if no unit of any had ever been free but for the last's: what no placement can
    beat."""
    most: int
    """Nodes at once."""
    waits: int
    """Workers for which a node had to come."""
    moves: int
    """Workers that were moved to empty a node."""


def use(result: Result, nodes: Nodes, placement: Placement) -> Use:
    """Place the workers of a simulation.

    Raises:
        ValueError: a worker is larger than a node.
    """
    if any(outcome.job.units > nodes.units for outcome in result.outcomes):
        raise ValueError(f"a worker needs more than the {nodes.units} units of a node")
    changes = sorted(
        (time, workers > before, outcome.job.name, outcome.job.units, workers - before)
        for outcome in result.outcomes
        for (_, before), (time, workers) in pairwise(((0.0, 0), *outcome.changes))
        if workers != before
    )
    fleet = _Fleet(nodes, placement)
    for time, _, name, units, more in changes:  # of one moment, those first that give up
        fleet.advance(time)
        if more > 0:
            fleet.add(name, units, more)
        else:
            fleet.remove(name, -more)
        if placement == "move":
            fleet.empty_what_can_be()
    return fleet.close()


@dataclass
class _Node:
    since: float
    free: int
    workers: list[_Worker] = field(default_factory=list)
    empty: float = 0.0
    """Since when, if it is."""


@dataclass
class _Worker:
    units: int
    node: _Node


class _Fleet:
    def __init__(self, nodes: Nodes, placement: Placement) -> None:
        self._nodes, self._placement = nodes, placement
        self._there: list[_Node] = []
        self._jobs: dict[str, list[_Worker]] = {}
        self._now = self._node_seconds = self._least = 0.0
        self._most = self._waits = self._moves = 0

    def advance(self, time: float) -> None:
        used = sum(self._nodes.units - node.free for node in self._there)
        self._least += math.ceil(used / self._nodes.units) * (time - self._now)
        self._now = time
        self._there = [node for node in self._there if not self._leaves(node)]

    def _leaves(self, node: _Node) -> bool:
        gone = node.empty + self._nodes.idle
        if node.workers or gone > self._now:
            return False
        self._node_seconds += gone - node.since
        return True

    def add(self, name: str, units: int, count: int) -> None:
        for _ in range(count):
            room = [node for node in self._there if node.free >= units]
            sign = -1 if self._placement == "spread" else 1
            node = min(room, key=lambda node: sign * node.free, default=None)
            if node is None:
                node = _Node(self._now, self._nodes.units)
                self._there.append(node)
                self._most = max(self._most, len(self._there))
            self._waits += node.since == self._now
            worker = _Worker(units, node)
            self._jobs.setdefault(name, []).append(worker)
            self._put(worker, node)

    def remove(self, name: str, count: int) -> None:
        workers = self._jobs[name]
        for _ in range(count):
            last = len(workers) - 1
            if self._placement != "spread":
                last = max(range(len(workers)), key=lambda at: workers[at].node.free)
            self._take(workers.pop(last))

    def empty_what_can_be(self) -> None:
        """Empty the emptiest node into others, as long as all of its workers have room there."""
        while True:
            busy = sorted((node for node in self._there if node.workers), key=lambda node: node.free)
            if len(busy) < 2:
                return
            *others, emptiest = busy
            room = {id(node): node.free for node in others}
            plan = []
            for worker in sorted(emptiest.workers, key=lambda worker: -worker.units):
                to = next((node for node in others if room[id(node)] >= worker.units), None)
                if to is None:
                    return
                room[id(to)] -= worker.units
                plan.append((worker, to))
            for worker, to in plan:
                self._take(worker)
                self._put(worker, to)
                self._moves += 1

    def _put(self, worker: _Worker, node: _Node) -> None:
        worker.node = node
        node.free -= worker.units
        node.workers.append(worker)

    def _take(self, worker: _Worker) -> None:
        node = worker.node
        node.free += worker.units
        node.workers = [other for other in node.workers if other is not worker]
        if not node.workers:
            node.empty = self._now

    def close(self) -> Use:
        """After the last change: what is empty then goes in its time."""
        for node in self._there:
            self._node_seconds += (self._now if node.workers else node.empty + self._nodes.idle) - node.since
        return Use(self._node_seconds, self._least, self._most, self._waits, self._moves)

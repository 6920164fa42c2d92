"""A trace played with jobs that share devices in turns, beside the same without: the same policies, and packing.

Between two events every job has a rate: of the workers that its policy gave it, or of its seat on another's devices,
divided by the predicted slowdown. Changes of workers cost nothing here, with packing or without, so that the difference
between the two is packing alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import msgspec

from virtualflow.errors import ConfigurationError
from virtualflow_operator.scheduling import Capacity, Demand, Policy, ScalingCurve, next_change
from virtualflow_operator.scheduling.packing import Packing, Phases, pack
from virtualflow_operator.settings import SchedulingSettings
from virtualflow_operator.simulator.clock import Clock, Occasion
from virtualflow_operator.simulator.trace import Event, JobEvent, JobTrace, NodeEvent

_ALMOST = 1e-9
"""Of a job's steps: less is rounding."""


class Played(msgspec.Struct, frozen=True):
    """How it went. Times are seconds."""

    makespan: float
    """From the first arrival to the last end."""
    mean_completion: float
    """Completion: from a job's arrival to its end."""
    mean_queueing: float
    """The part of it in which the job had neither devices nor a seat on another's."""
    computing: float
    """The part of the device time, from the first arrival to the last end, in which a device computed."""
    lodgers: int
    """Jobs that had a seat on another's devices at some time."""
    longest_slowdown: float
    """The most that any job was predicted to be slowed down by at any time."""


@dataclass
class _Job:
    event: JobEvent
    demand: Demand
    left: float
    rate: float = 0.0
    """Steps per second."""
    device_seconds: float = 0.0
    """That a step computes, over all its devices."""
    queued: float = 0.0
    finished: float = 0.0
    host: str | None = None
    was_lodger: bool = False


def play(trace: JobTrace, policy: Policy, most: int, settings: SchedulingSettings) -> Played:
    """Play ``trace`` with at most ``most`` jobs on a device; 1: without packing.

    Raises:
        ConfigurationError: some job never ends.
    """
    return _Packed(trace, policy, most, settings).run()


class _Packed:
    def __init__(self, trace: JobTrace, policy: Policy, most: int, settings: SchedulingSettings) -> None:
        self._policy, self._most, self._settings = policy, most, settings
        self._trace, self._clock = trace, Clock(trace)
        self._since = self._clock.now
        """Until then, all have made their steps."""
        self._plan = 0
        self._active: dict[str, _Job] = {}
        self._all: list[_Job] = []
        self._nodes: dict[str, NodeEvent] = {}
        self._computed = self._offered = 0.0
        self._longest = 1.0

    def run(self) -> Played:
        self._clock.run(self._happen, self._decide)
        if self._active:
            raise ConfigurationError(f"{', '.join(sorted(self._active))} would never end on this capacity")
        return self._result()

    def _happen(self, kind: Occasion, subject: int | str, plan: int) -> bool:
        """Let one event happen; whether a decision is due."""
        if kind == "end" and plan != self._plan:
            return False
        self._pass_time()
        if kind == "trace":
            self._take(self._trace.events[int(subject)])
        return True

    def _take(self, event: Event) -> None:
        """A job comes, capacity comes or goes."""
        if isinstance(event, NodeEvent):
            self._nodes[event.name] = event
        elif not isinstance(event, JobEvent):
            del self._nodes[event.name]
        else:
            job = _Job(event, event.demand(ScalingCurve.of(event.throughput.items()), event.steps), float(event.steps))
            self._active[event.name] = job
            self._all.append(job)

    def _pass_time(self) -> None:
        """Let all make their steps."""
        now, until = self._since, self._clock.now
        self._since = until
        self._offered += (until - now) * sum(node.units for node in self._nodes.values()) if self._active else 0.0
        for name, job in list(self._active.items()):
            made = min(job.left, job.rate * (until - now))
            job.left -= made
            self._computed += made * job.device_seconds * job.event.units
            job.queued += 0.0 if job.rate else until - now
            if job.left <= _ALMOST * job.event.steps:
                job.finished = until
                del self._active[name]

    def _decide(self) -> None:
        """Ask the policy, give those who wait seats, and set everybody's rate."""
        now = self._clock.now
        spot = sum(node.units for node in self._nodes.values() if node.spot)
        capacity = Capacity(sum(node.units for node in self._nodes.values()) - spot, spot)
        for job in self._active.values():
            job.demand = replace(job.demand, steps_left=max(1, math.ceil(job.left)))
        demands = [job.demand for job in self._active.values()]
        decision = self._policy(now, demands, capacity, self._settings)
        packed = Packing({}, {})
        if self._most > 1:
            seated = {name: job.host for name, job in self._active.items() if job.host is not None}
            packed = pack(demands, decision, self._most, self._settings.packing, seated)
        for name, job in self._active.items():
            job.demand = job.demand.given(decision[name].workers, now)
            self._set_rate(job, packed)
        due = next_change(now, (job.demand for job in self._active.values()), self._settings)
        self._clock.wake(math.inf if due is None else due)
        self._plan += 1
        ends = (now + job.left / job.rate for job in self._active.values() if job.rate)
        if (first := min(ends, default=math.inf)) < math.inf:
            self._clock.push(first, "end", plan=self._plan)

    def _set_rate(self, job: _Job, packed: Packing) -> None:
        name = job.event.name
        seat = packed.seats.get(name)
        job.host = None if seat is None else seat.host
        job.was_lodger = job.was_lodger or seat is not None
        workers = job.demand.allocated if seat is None else seat.workers
        slowdown = packed.slowdowns.get(name, 1.0)
        self._longest = max(self._longest, slowdown)
        job.rate = job.event.speed(workers) / slowdown
        if workers:
            job.device_seconds = workers * Phases.at(job.demand.curve, workers).compute

    def _result(self) -> Played:
        """The figures, when all have ended."""
        first, count = min(job.time for job in self._trace.jobs), len(self._all)
        return Played(
            makespan=max(job.finished for job in self._all) - first,
            mean_completion=sum(job.finished - job.event.time for job in self._all) / count,
            mean_queueing=sum(job.queued for job in self._all) / count,
            computing=self._computed / self._offered,
            lodgers=sum(job.was_lodger for job in self._all),
            longest_slowdown=self._longest,
        )

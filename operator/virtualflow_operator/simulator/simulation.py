"""A trace played in simulated time against one policy: pure, event by event, nothing is polled.

Time jumps from one event to the next: a job comes or ends, capacity comes or goes, a joiner is ready, or the policy's
decision may change because time passed. After all events of one moment the policy decides once, and what it says is
applied. What is modelled of a change is its price (:class:`ResizeCost`); which node a worker is on is not, so a node
that vanishes is paid for by the jobs that the policy shrinks for it.

Where jobs share devices, ``scheduling.packing`` seats those who wait, as in a queue. A lodger's workers count after
``join`` seconds; it keeps its seat until its own first workers are ready; and a job on shared devices is as much slower
as was predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.wording import counted
from virtualflow_operator.scheduling import Allocation, Capacity, Demand, Policy, ScalingCurve, next_change
from virtualflow_operator.scheduling.packing import Phases, Seat, pack
from virtualflow_operator.scheduling.service_time import Forecast, Past
from virtualflow_operator.settings import SchedulingSettings
from virtualflow_operator.simulator.clock import Clock, JobBooks, Occasion
from virtualflow_operator.simulator.outcome import Result
from virtualflow_operator.simulator.trace import GoneEvent, JobEvent, JobTrace, NodeEvent

Knowledge = Literal["all", "seen", "past", "none"]
"""What a policy knows of a job: its steps and all the speeds of the trace; its steps and the speeds that it has already
run at; these speeds, and what jobs like it needed that have ended, or have had so far; these speeds alone."""


@dataclass(frozen=True)
class ResizeCost:
    """What a change of a job's workers costs it, in seconds."""

    join: float
    """From the decision until a new worker counts, for a job that has no figure of its own. It takes its capacity from
    the start."""
    pause: float = 0.0
    """In which nobody of the job makes progress, at each change: when workers leave, and when new ones are ready."""
    stop: bool = False
    """Whether the whole job stands still for ``join`` as well, at each change: a restart."""
    release: float | None = None
    """``None``: a decision is carried out at once. Otherwise in turn, as by a scheduler whose jobs take one change at a
    time: a job takes none before its last joiners are ready and its pause is over; units that are given up are
    somebody's again after ``release`` seconds; and nothing is decided before the last decision is carried out."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.join) and math.isfinite(self.pause) and self.join >= 0 and self.pause >= 0):
            raise ConfigurationError(f"a resize takes 0 seconds or more, not join={self.join:g}, pause={self.pause:g}")
        if self.release is not None and not (math.isfinite(self.release) and self.release >= 0):
            raise ConfigurationError(f"units are free after 0 seconds or more, not release={self.release:g}")


@dataclass(kw_only=True)
class _Job(JobBooks):
    demand: Demand
    curve: ScalingCurve
    """Its speeds in the trace, whatever policies know of them."""
    running: int = 0
    """Workers that count."""
    seat: Seat | None = None
    """On another job's devices."""
    slowdown: float = 1.0
    """How many times as long as alone a step takes."""
    longest_slowdown: float = 1.0
    lodged: bool = False
    computed: float = 0.0
    """Unit-seconds in which devices computed for it, at ``synced``."""
    joining: list[tuple[float, int]] = field(default_factory=list)
    """Those that are on their way: when they will be ready, and how many."""
    seen: dict[int, float] = field(default_factory=dict)
    foreseen: bool = False
    """Whether a decision has been made since it came: then ``expected`` is known, as far as anything is."""
    expected: float | None = None
    needed: float | None = None

    @property
    def given(self) -> int:
        return self.demand.allocated

    @property
    def works(self) -> bool:
        return self.running > 0

    def speed(self) -> float:
        return self.job.speed(self.running) / self.slowdown

    def catch_up(self, now: float) -> None:
        before = self.done
        super().catch_up(now)
        if self.done > before:
            compute = Phases.at(self.curve, self.running, self.demand.passes).compute
            self.computed += (self.done - before) * compute * self.running * self.job.units

    def worth(self) -> float:
        """Unit-seconds at its minimum that its steps so far are worth, as far as its speed was seen."""
        demand = self.demand
        if not demand.curve.measured:
            return 0.0
        return self.done / demand.curve.speed(demand.minimum) * demand.minimum * demand.units


def simulate(
    trace: JobTrace,
    policy: Policy,
    cost: ResizeCost,
    settings: SchedulingSettings,
    *,
    knowledge: Knowledge = "all",
    every: float | None = None,
    past: Past = Past(),  # noqa: B008  (a value)
    jobs_per_device: int = 1,
    fixed_sizes: bool = False,
) -> Result:
    """Play ``trace`` against ``policy``.

    Args:
        past: what is remembered of jobs before the trace; with the knowledge ``past`` only.
        every: seconds between decisions that nothing else causes; ``None``: none of these.
        jobs_per_device: at most; with 2 or more, jobs that wait may compute on devices of others, in turns with them.
        fixed_sizes: whether the policy is one of :data:`.FIXED_SIZES`, under which a lodger has its size, too.

    Raises:
        ConfigurationError: there is no capacity in the trace at all, ``every`` is below 1, or jobs are to share devices
            though policies do not know their speeds or decisions are carried out in turn.
        PolicyError: the policy gave out more than there was, or broke a job's limits.
    """
    if every is not None and not (math.isfinite(every) and every >= 1):
        raise ConfigurationError(f"decide every {every:g} seconds: give 1 or more, or leave it out")
    if not any(isinstance(event, NodeEvent) for event in trace.events):
        raise ConfigurationError("there is no capacity in the trace; add rows with event=node, or give --capacity")
    if jobs_per_device > 1 and (knowledge != "all" or cost.release is not None):
        raise ConfigurationError(
            "jobs share devices at once, and by speeds that are known; leave out --knowledge and --release beside "
            "--packing"
        )
    return _Simulation(
        trace,
        policy,
        cost,
        settings,
        knowledge=knowledge,
        every=every,
        past=past,
        jobs_per_device=jobs_per_device,
        fixed_sizes=fixed_sizes,
    ).run()


class PolicyError(AssertionError):
    """A policy's decision cannot be applied: a defect of the policy, and no number of it may be trusted."""


class _Simulation:
    def __init__(
        self,
        trace: JobTrace,
        policy: Policy,
        cost: ResizeCost,
        settings: SchedulingSettings,
        *,
        knowledge: Knowledge,
        every: float | None,
        past: Past,
        jobs_per_device: int,
        fixed_sizes: bool,
    ) -> None:
        self._policy, self._cost, self._settings = policy, cost, settings
        self._jobs_per_device, self._fixed_sizes = jobs_per_device, fixed_sizes
        self._knowledge, self._every = knowledge, every
        self._clock = Clock(trace)
        self._events = trace.events
        self._all: list[_Job] = []
        self._active: dict[str, _Job] = {}
        self._nodes: dict[str, NodeEvent] = {}
        self._capacity: list[tuple[float, int]] = []
        self._decisions = 0
        self._past = past
        self._pending: list[tuple[_Job, int]] = []
        """What was decided and not yet carried out."""
        self._resting: list[tuple[float, int]] = []
        """Until when how many units that were given up are nobody's."""

    def run(self) -> Result:
        self._clock.run(self._happen, self._decide)
        outcomes = tuple(
            replace(
                job.outcome(job.expected, job.needed),
                computed=job.computed,
                lodged=job.lodged,
                slowdown=job.longest_slowdown,
            )
            for job in self._all
        )
        return Result(outcomes, tuple(self._capacity), self._decisions)

    def _happen(self, kind: Occasion, subject: int | str, plan: int) -> bool:
        if kind == "trace":
            self._arrive(int(subject))
        if kind in ("trace", "wake", "retry"):
            return True
        job = self._active.get(str(subject))
        if job is None or (kind == "end" and job.plan != plan):
            return False
        job.catch_up(self._clock.now)
        if kind == "joined":
            return self._join(job)
        job.end(self._clock.now)
        job.needed = job.worth()
        if self._knowledge == "past":
            self._past = self._past.after(job.job.namespace, job.job.name, job.needed, self._settings)
        del self._active[job.job.name]
        return not self._rest(job.demand.allocated * job.job.units)

    def _join(self, job: _Job) -> bool:
        ready = sum(workers for due, workers in job.joining if due <= self._clock.now)
        if not ready:
            return False  # they were called off
        job.joining = [(due, workers) for due, workers in job.joining if due > self._clock.now]
        if job.running:
            self._pause(job)
        if job.seat is not None and job.given:
            self._leave_seat(job)
        job.running += ready
        self._learn(job)
        job.schedule_end(self._clock)
        return self._knowledge != "all" or bool(self._pending)

    def _arrive(self, index: int) -> None:
        event = self._events[index]
        if isinstance(event, JobEvent):
            curve = ScalingCurve.of(event.throughput.items())
            known = curve if self._knowledge == "all" else ScalingCurve()
            demand = event.demand(known, event.steps if self._knowledge in ("all", "seen") else None)
            job = _Job(job=event, demand=demand, curve=curve, synced=self._clock.now)
            self._all.append(job)
            self._active[event.name] = job
            return
        if isinstance(event, GoneEvent):
            del self._nodes[event.name]
        else:
            self._nodes[event.name] = event
        self._capacity.append((self._clock.now, self._units()))
        self._pending.clear()  # it was decided for another capacity

    def _learn(self, job: _Job) -> None:
        if self._knowledge != "all" and job.running not in job.seen:
            job.seen[job.running] = job.job.speed(job.running)
            job.demand = replace(job.demand, curve=ScalingCurve.of(job.seen.items()))

    def _inform(self) -> None:
        """Bring what policies know of the jobs up to date."""
        if self._knowledge == "past":
            self._foresee()
        for job in self._active.values():
            if job.running and job.demand.steps_left is not None:
                job.demand = replace(job.demand, steps_left=max(1, math.ceil(job.job.steps - job.done)))

    def _foresee(self) -> None:
        jobs = self._active.values()
        served = [(job.job.namespace, job.job.name, job.worth()) for job in jobs]
        forecast = Forecast(self._past, served, self._settings)
        for job, (namespace, name, so_far) in zip(jobs, served, strict=True):
            if not job.foreseen:
                job.foreseen, job.expected = True, forecast.expects(namespace, name)
            expected_left = forecast.left(namespace, name, so_far)
            if expected_left != job.demand.expected_left:
                job.demand = replace(job.demand, expected_left=expected_left)

    def _units(self) -> int:
        return sum(node.units for node in self._nodes.values())

    def _decide(self) -> None:
        if not self._carry_out():
            return
        spot = sum(node.units for node in self._nodes.values() if node.spot)
        capacity = Capacity(self._units() - spot, spot)
        for job in self._active.values():
            if job.running:
                job.catch_up(self._clock.now)
        self._inform()
        demands = [job.demand for job in self._active.values()]
        decision = self._policy(self._clock.now, demands, capacity, self._settings)
        self._decisions += 1
        _check(decision, demands, capacity)
        for name, job in self._active.items():
            job.reason = decision[name].reason
            if decision[name].workers != job.demand.allocated:
                self._pending.append((job, decision[name].workers))
        self._carry_out()
        if self._jobs_per_device > 1:
            self._seat(demands, decision)
        self._ask_again()

    def _carry_out(self) -> bool:
        """Apply what can be applied of the last decision; whether that was all that was left of it."""
        waiting = []
        for job, workers in self._pending:
            if job.finished is not None:
                continue
            if self._takes(job, workers):
                self._give(job, workers)
            else:
                waiting.append((job, workers))
        self._pending = waiting
        return not waiting

    def _takes(self, job: _Job, workers: int) -> bool:
        if self._cost.release is None:
            return True
        held = sum(other.demand.allocated * other.job.units for other in self._active.values())
        if held > self._units():
            return workers < job.demand.allocated  # a node has taken them along
        if job.joining or self._clock.now < job.resumes:
            return False
        self._resting = [(until, units) for until, units in self._resting if until > self._clock.now]
        held += sum(units for _, units in self._resting)
        return (workers - job.demand.allocated) * job.job.units <= self._units() - held

    def _rest(self, units: int) -> bool:
        """Whether the units that were given up are nobody's for a while."""
        if self._cost.release is None:
            return False
        self._resting.append((self._clock.now + self._cost.release, units))
        self._clock.push(self._clock.now + self._cost.release, "retry")
        return True

    def _seat(self, demands: list[Demand], decision: dict[str, Allocation]) -> None:
        """Seat those who wait, as a queue with packing does, and tell everybody how much slower it is."""
        now = self._clock.now
        asked = [demand.of_fixed_size for demand in demands] if self._fixed_sizes else demands
        seated = {name: job.seat.host for name, job in self._active.items() if job.seat and not job.given}
        packed = pack(asked, decision, self._jobs_per_device, self._settings.packing, seated)
        for name, job in self._active.items():
            if job.seat is not None and job.given:
                continue  # until its own workers are ready
            job.catch_up(now)
            seat = packed.seats.get(name)
            if seat != job.seat:
                if job.seat is not None:
                    self._leave_seat(job)
                if seat is not None:
                    self._take_seat(job, seat)
            job.slowdown = packed.slowdowns.get(name, 1.0)
            job.longest_slowdown = max(job.longest_slowdown, job.slowdown)
            job.schedule_end(self._clock)

    def _take_seat(self, job: _Job, seat: Seat) -> None:
        job.seat, job.lodged = seat, True
        if job.started is None:
            job.started = self._clock.now
        self._expect(job, seat.workers)

    def _leave_seat(self, job: _Job) -> None:
        job.seat, job.slowdown, job.running = None, 1.0, 0
        if not job.given:
            job.joining = []

    def _expect(self, job: _Job, workers: int) -> None:
        """Have so many more workers ready after the time that they take."""
        ready = self._clock.now + (self._cost.join if job.job.join is None else job.job.join)
        job.joining.append((ready, workers))
        self._clock.push(ready, "joined", job.job.name)

    def _ask_again(self) -> None:
        due = next_change(self._clock.now, (job.demand for job in self._active.values()), self._settings)
        wake = math.inf if due is None else due
        if self._every is not None and (
            self._clock.to_come or any(job.demand.allocated for job in self._active.values())
        ):
            wake = min(wake, self._clock.now + self._every)
        self._clock.wake(wake)

    def _give(self, job: _Job, workers: int) -> None:
        """Apply a decision to a job whose number of workers it changes."""
        now, cost = self._clock.now, self._cost
        job.catch_up(now)
        if workers < job.demand.allocated:
            self._rest((job.demand.allocated - workers) * job.job.units)
        job.demand = job.demand.given(workers, now)
        job.change(now, workers)
        before = job.running
        if job.seat is not None and workers:  # none of its workers goes along
            job.joining = []
            job.running = 0 if cost.stop else job.running
            self._expect(job, workers)
            return
        if cost.stop or not workers:
            job.running = 0
            job.joining = []
            job.seat = None
        fewer = job.running + sum(count for _, count in job.joining) - workers
        while fewer > 0 and job.joining:  # the last to come are called off first, which costs nobody anything
            due, count = job.joining.pop()
            off = min(count, fewer)
            if count > off:
                job.joining.append((due, count - off))
            fewer -= off
        if fewer > 0:
            job.running -= fewer
            self._pause(job)
            self._learn(job)
        elif fewer < 0:
            self._expect(job, -fewer)
        if job.running != before:
            job.schedule_end(self._clock)

    def _pause(self, job: _Job) -> None:
        job.resumes = max(job.resumes, self._clock.now + self._cost.pause)
        if self._cost.release is not None:
            self._clock.push(job.resumes, "retry")


def _check(decision: dict[str, Allocation], demands: list[Demand], capacity: Capacity) -> None:
    used = on_demand = 0
    for demand in demands:
        given = decision[demand.name]
        if given.workers and not demand.minimum <= given.workers <= demand.maximum:
            raise PolicyError(
                f"{demand.name} was given {counted(given.workers, 'worker')}, not {demand.minimum} to {demand.maximum}"
            )
        used += given.workers * demand.units
        on_demand += given.on_demand * demand.units
    if used > capacity.total or on_demand > capacity.on_demand:
        raise PolicyError(f"{used} units were given out ({on_demand} on demand) of {capacity}")

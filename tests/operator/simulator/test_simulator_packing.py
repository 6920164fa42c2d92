"""Jobs that share devices in simulated time: what packing brings, and that it takes nothing from anybody."""

from __future__ import annotations

import pytest

from virtualflow.errors import ConfigurationError
from virtualflow_operator.scheduling import FIXED_SIZES, POLICIES
from virtualflow_operator.settings import PackingSettings, SchedulingSettings
from virtualflow_operator.simulator.outcome import Measures, measure
from virtualflow_operator.simulator.simulation import Knowledge, ResizeCost, simulate
from virtualflow_operator.simulator.trace import GoneEvent, JobEvent, JobTrace, NodeEvent

HALF = {1: 1.0, 2: 1.0}
"""On two workers, devices compute for half of a step of one second."""


def job(name: str, time: float = 0.0, steps: int = 100, units: int = 1) -> JobEvent:
    return JobEvent(time, name, steps, HALF, min=2, units=units)


FREE = ResizeCost(0.0)


def played(
    *events: JobEvent | NodeEvent | GoneEvent, most: int = 2, policy: str = "FIFO", cost: ResizeCost = FREE
) -> Measures:
    trace, settings, fixed = JobTrace((NodeEvent(0.0, "node", 2), *events)), SchedulingSettings(), policy in FIXED_SIZES
    return measure(simulate(trace, POLICIES[policy], cost, settings, jobs_per_device=most, fixed_sizes=fixed))


@pytest.mark.parametrize(
    ("most", "makespan", "computing", "lodgers"),
    [
        pytest.param(1, 200.0, 0.5, 0, id="one after the other"),
        pytest.param(2, 100.0, 1.0, 1, id="both at once, since each computes while the other is away"),
    ],
)
def test_two_jobs_that_fit(most: int, makespan: float, computing: float, lodgers: int) -> None:
    found = played(job("a"), job("b"), most=most)
    assert (found.makespan, found.computing, found.lodgers) == (
        pytest.approx(makespan),
        pytest.approx(computing),
        lodgers,
    )


def test_a_lodger_moves_to_devices_of_its_own_when_its_host_ends() -> None:
    found = played(job("a"), job("b", time=50.0), job("c", time=60.0))
    assert found.makespan == pytest.approx(200.0), "b has made half of its steps as a lodger, c comes in for the rest"
    assert found.lodgers == 2
    assert found.mean_queueing == pytest.approx(40.0 / 3), "c waits until a has ended"


def test_a_job_whose_host_is_gone_waits_again() -> None:
    events = (job("a"), job("b"), GoneEvent(30.0, "node"), NodeEvent(70.0, "again", 2))
    found = played(*events)
    assert found.makespan == pytest.approx(140.0)
    assert found.mean_queueing == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("cost", "makespan"),
    [
        # The lodger counts 10 s after the host has come, and both end after 100 s of steps each.
        pytest.param(ResizeCost(10.0), 110.0, id="a lodger's workers have to come, too"),
        pytest.param(ResizeCost(10.0, 5.0), 110.0, id="nobody stops when a lodger comes"),
    ],
)
def test_what_a_seat_costs(cost: ResizeCost, makespan: float) -> None:
    assert played(job("a"), job("b"), cost=cost).makespan == pytest.approx(makespan)


def test_a_lodger_computes_on_until_its_own_workers_are_ready() -> None:
    """b has its seat from 10 on, devices from 110 on, and made its 100th step as a lodger, 5 s before b's own came."""
    found = played(job("a"), job("b", steps=105), cost=ResizeCost(10.0))
    assert found.makespan == pytest.approx(115.0)


def test_a_lodger_has_its_size_under_a_policy_with_fixed_sizes() -> None:
    """On one worker it would fit, since it exchanges nothing there; but it asks for two."""
    busy = {1: 1.0, 2: 1.9}
    host, lodger = JobEvent(0.0, "a", 100, HALF, min=2), JobEvent(0.0, "b", 100, busy)
    assert played(host, lodger).lodgers == 0


@pytest.mark.parametrize(
    ("knowledge", "cost"),
    [pytest.param("seen", FREE, id="unknown speeds"), pytest.param("all", ResizeCost(0.0, release=1.0), id="in turn")],
)
def test_what_packing_needs_is_said(knowledge: Knowledge, cost: ResizeCost) -> None:
    trace = JobTrace((NodeEvent(0.0, "node", 2), job("a")))
    with pytest.raises(ConfigurationError, match="leave out --knowledge and --release beside --packing"):
        simulate(trace, POLICIES["FIFO"], cost, SchedulingSettings(), knowledge=knowledge, jobs_per_device=2)


EARLY = (1.0, 0.1)
"""Of two workers with a virtual node each, one computes a whole pass and the other 0.4 of that, by turns."""


@pytest.mark.parametrize(
    ("backward", "lodgers"),
    [
        pytest.param((), 1, id="even: each computes while the other is away"),
        pytest.param(EARLY, 0, id="uneven: a long pass is always in the way"),
    ],
)
def test_pairing_knows_how_far_backward_passes_go(backward: tuple[float, ...], lodgers: int) -> None:
    """The same mean of what a device computes, and the same steps."""
    host = JobEvent(0.0, "a", 100, {1: 1.0, 2: 1.2}, min=2, backward=backward)
    assert played(host, job("b")).lodgers == lodgers


@pytest.mark.parametrize("policy", POLICIES)
def test_packing_makes_no_queue_slower(policy: str) -> None:
    events = [job(f"job-{n}", time=10.0 * n, steps=50 + 7 * n) for n in range(12)]
    without, packed = (played(*events, most=most, policy=policy) for most in (1, 2))
    assert packed.makespan <= without.makespan
    assert packed.mean_completion <= without.mean_completion
    assert packed.longest_slowdown <= PackingSettings().max_slowdown

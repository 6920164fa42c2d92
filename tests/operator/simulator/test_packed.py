"""Jobs that share devices in simulated time: what packing brings, and that it takes nothing from anybody."""

from __future__ import annotations

import pytest
from benchmarks.packed import Played, play

from virtualflow.errors import ConfigurationError
from virtualflow_operator.scheduling import POLICIES
from virtualflow_operator.settings import PackingSettings, SchedulingSettings
from virtualflow_operator.simulator.trace import GoneEvent, JobEvent, JobTrace, NodeEvent

HALF = {1: 1.0, 2: 1.0}
"""On two workers, devices compute for half of a step of one second."""


def job(name: str, time: float = 0.0, steps: int = 100, units: int = 1) -> JobEvent:
    return JobEvent(time, name, steps, HALF, min=2, units=units)


def played(*events: JobEvent | NodeEvent | GoneEvent, most: int = 2, policy: str = "FIFO") -> Played:
    told = SchedulingSettings()
    return play(JobTrace((NodeEvent(0.0, "node", 2), *events)), POLICIES[policy], most, told)


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


def test_what_can_never_run_is_said() -> None:
    with pytest.raises(ConfigurationError, match="big would never end"):
        played(job("big", units=2))


@pytest.mark.parametrize("policy", POLICIES)
def test_packing_makes_no_queue_slower(policy: str) -> None:
    events = [job(f"job-{n}", time=10.0 * n, steps=50 + 7 * n) for n in range(12)]
    without, packed = (played(*events, most=most, policy=policy) for most in (1, 2))
    assert packed.makespan <= without.makespan
    assert packed.mean_completion <= without.mean_completion
    assert packed.longest_slowdown <= PackingSettings().max_slowdown

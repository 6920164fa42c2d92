"""The simulation: hand-computed traces, and what holds of any trace under any policy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.errors import ConfigurationError
from virtualflow_operator.scheduling import POLICIES, Allocation, Capacity, Demand
from virtualflow_operator.settings import SchedulingSettings
from virtualflow_operator.simulator.outcome import Outcome, Result, jain, measure, percentile
from virtualflow_operator.simulator.power_of_two import power_of_two_share
from virtualflow_operator.simulator.simulation import PolicyError, ResizeCost, simulate
from virtualflow_operator.simulator.trace import Event, GoneEvent, JobEvent, JobTrace, NodeEvent, check

SCHEDULING = SchedulingSettings()

FREE = ResizeCost(0.0)
HIDDEN = ResizeCost(6.0, 1.0)
RESTART = ResizeCost(30.0, stop=True)
IN_TURN = ResizeCost(6.0, 1.0, release=5.0)


def greedy(
    now: float, demands: Sequence[Demand], capacity: Capacity, settings: SchedulingSettings
) -> dict[str, Allocation]:
    """The oldest has as much as it can use, then the next."""
    del now, settings
    left, result = capacity.total, {}
    for demand in sorted(demands, key=lambda demand: demand.submitted):
        workers = min(left // demand.units, demand.maximum)
        workers = workers if workers >= demand.minimum else 0
        left -= workers * demand.units
        result[demand.name] = Allocation(workers, "what is left")
    return result


def trace(*events: Event) -> JobTrace:
    return check((("here", event) for event in events), "here")


def job(time: float = 0.0, name: str = "a", steps: int = 100, most: int = 4, **more: float) -> JobEvent:
    """A job that makes a step a second with each worker."""
    return JobEvent(time, name, steps, {n: float(n) for n in range(1, most + 1)}, **more)  # type: ignore[arg-type]


def node(time: float, units: int, name: str = "n") -> NodeEvent:
    return NodeEvent(time, name, units)


ALONE = trace(node(0, 4), job())
GROWS = trace(node(0, 1), job(), node(10, 1, "m"))
SHRINKS = trace(node(0, 1), node(0, 1, "m"), job(), GoneEvent(10, "m"))
CALLED_OFF = trace(node(0, 1), job(), node(10, 1, "m"), GoneEvent(12, "m"))
SOME_CALLED_OFF = trace(node(0, 1), job(), node(10, 2, "m"), node(10, 1, "l"), GoneEvent(12, "l"))
STAGGERED = trace(node(0, 1), job(), node(10, 1, "m"), node(12, 2, "l"))
SUSPENDED = trace(node(0, 1), job(), GoneEvent(10, "n"), node(30, 1))


@pytest.mark.parametrize(
    ("played", "cost", "end", "resizes"),
    [
        pytest.param(ALONE, FREE, 25, 0, id="alone"),
        pytest.param(ALONE, HIDDEN, 31, 0, id="alone: its workers start for 6 s, and nobody pauses for them"),
        pytest.param(ALONE, RESTART, 55, 0, id="alone: a start is a start also where changes restart"),
        pytest.param(trace(node(0, 4), job(join=10)), HIDDEN, 35, 0, id="alone: its own workers start for 10 s"),
        pytest.param(GROWS, FREE, 55, 1, id="grows: 10 steps, then 90 at 2 a second"),
        pytest.param(GROWS, HIDDEN, 62, 1, id="grows: 10 steps until 16, a pause until 17, then 90 at 2 a second"),
        pytest.param(GROWS, RESTART, 90, 1, id="grows: nothing until 40, then 100 at 2 a second"),
        pytest.param(SHRINKS, FREE, 90, 1, id="shrinks: 20 steps, then 80 at 1 a second"),
        pytest.param(SHRINKS, HIDDEN, 103, 1, id="shrinks: 8 steps until 10, a pause until 11, then 92"),
        pytest.param(SHRINKS, RESTART, 140, 1, id="shrinks: nothing until 40, then 100"),
        pytest.param(CALLED_OFF, HIDDEN, 106, 2, id="a joiner that is called off costs nobody anything"),
        pytest.param(
            SOME_CALLED_OFF, HIDDEN, 47, 2, id="one of three joiners is called off: 10 steps, then 90 from 17"
        ),
        pytest.param(STAGGERED, HIDDEN, 41, 2, id="each joiner starts by itself: 10 steps, then 2, then 88"),
        pytest.param(SUSPENDED, FREE, 120, 2, id="a suspended job goes on where it was"),
        pytest.param(SUSPENDED, HIDDEN, 132, 2, id="a suspended job starts again: 4 steps, then 96 from 36 on"),
    ],
)
def test_a_job_ends_when_one_would_compute_it(played: JobTrace, cost: ResizeCost, end: float, resizes: int) -> None:
    (outcome,) = simulate(played, greedy, cost, SCHEDULING).outcomes
    assert outcome.finished == pytest.approx(end)
    assert outcome.resizes == resizes


def test_two_jobs_share_what_there_is_and_the_second_waits() -> None:
    played = trace(node(0, 4), job(), job(10, "b", steps=30, most=2))
    first, second = simulate(played, greedy, FREE, SCHEDULING).outcomes
    assert (first.started, first.finished, first.queued, first.service) == (0, 25, 0, 100)
    assert (second.started, second.finished, second.queued, second.service) == (25, 40, 15, 30)
    measured = measure(simulate(played, greedy, FREE, SCHEDULING))
    assert (measured.makespan, measured.mean_completion, measured.mean_queueing) == (40, 27.5, 7.5)
    assert measured.utilisation == pytest.approx(130 / 160)
    assert measured.fairness == pytest.approx((4 + 1) ** 2 / (2 * (4**2 + 1**2)))


def test_decisions_in_turn_wait_for_units_at_rest_and_for_joiners() -> None:
    """a gives two units up at 10, which b has from 15 on. Only then is c thought of, which came at 12, and b has to
    shrink for it: not before its own workers are ready (21), and what it gives up rests until 26."""
    played = trace(node(0, 4), job(steps=1_000), job(10, "b", steps=1_000), job(12, "c", steps=1_000))
    a, b, c = simulate(played, power_of_two_share, IN_TURN, SCHEDULING).outcomes
    assert [at for at in a.changes if at[0] < 100] == [(0, 4), (10, 2)]
    assert [at for at in b.changes if at[0] < 100] == [(15, 2), (21, 1)]
    assert (c.started, c.queued) == (26, 14)
    assert simulate(played, power_of_two_share, HIDDEN, SCHEDULING).outcomes[2].started == 12


def test_a_node_that_goes_takes_workers_along_also_from_a_job_in_the_middle_of_a_change() -> None:
    (outcome,) = simulate(CALLED_OFF, greedy, IN_TURN, SCHEDULING).outcomes
    assert outcome.changes[:3] == ((0, 1), (10, 2), (12, 1))


def test_a_suspension_counts_as_queueing() -> None:
    (outcome,) = simulate(SUSPENDED, greedy, FREE, SCHEDULING).outcomes
    assert (outcome.queued, outcome.suspensions, outcome.service) == (20, 1, 100)
    assert outcome.changes == ((0, 1), (10, 0), (30, 1), (120, 0))


def test_a_policy_that_learns_sees_only_speeds_that_the_job_has_run_at() -> None:
    seen: list[tuple[tuple[int, float], ...]] = []

    def watch(*decision: object) -> dict[str, Allocation]:
        seen.extend(demand.curve.points for demand in decision[1])  # type: ignore[attr-defined]
        return greedy(*decision)  # type: ignore[arg-type]

    simulate(GROWS, watch, HIDDEN, SCHEDULING, knowledge="seen")
    assert seen[0] == ()
    assert seen[-1] == ((1, 1.0), (2, 2.0))
    assert ((1, 1.0),) in seen


def test_decisions_are_made_at_events_and_as_often_as_asked() -> None:
    settings = SchedulingSettings(hold=0.0, turn=1e9, starvation_bound=1e9)
    at_events = simulate(ALONE, greedy, FREE, settings)
    often = simulate(ALONE, greedy, FREE, settings, every=10.0)
    assert at_events.decisions == 2  # the arrival and the end
    assert often.decisions == 4
    assert often.outcomes == at_events.outcomes


def test_a_job_that_never_fits_is_told_with_the_reason_and_the_others_go_on() -> None:
    result = simulate(
        trace(node(0, 4), job(), job(0, "big", min=5, most=8)), POLICIES["WeightedFairShare"], FREE, SCHEDULING
    )
    (big,) = result.unfinished
    assert big.job.name == "big"
    assert "minimum of 5 workers" in big.reason
    assert measure(result).unfinished == 1
    assert result.outcomes[0].finished == 25


@pytest.mark.parametrize(
    ("workers", "sentence"), [(5, "not 1 to 4"), (4, "units were given out")], ids=["above the maximum", "too many"]
)
def test_a_policy_that_gives_what_it_must_not_is_not_believed(workers: int, sentence: str) -> None:
    def wrong(*decision: object) -> dict[str, Allocation]:
        return {demand.name: Allocation(workers, "") for demand in decision[1]}  # type: ignore[attr-defined]

    with pytest.raises(PolicyError, match=sentence):
        simulate(trace(node(0, 4), job(), job(0, "b")), wrong, FREE, SCHEDULING)


def test_without_capacity_nothing_is_simulated() -> None:
    with pytest.raises(ConfigurationError, match="no capacity in the trace; add rows with event=node"):
        simulate(trace(job()), greedy, FREE, SCHEDULING)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, 0), ([7], 95, 7), ([1, 2, 3, 4], 50, 2.5), ([4, 1, 3, 2], 95, 3.85), ([1, 2], 100, 2)],
)
def test_percentiles(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [([], 0), ([3, 3, 3], 1), ([1, 0, 0, 0], 1 / 4), ([1, 3], 16 / 20)],
    ids=["none", "equal", "one has all", "one to three"],
)
def test_fairness(shares: list[float], expected: float) -> None:
    assert jain(shares) == pytest.approx(expected)


# --- any trace --------------------------------------------------------------------------------------------------------


@st.composite
def traces(draw: st.DrawFn) -> JobTrace:
    """Some jobs on a steady node, beside one on spot capacity that comes and goes."""
    events: list[Event] = [NodeEvent(0.0, "steady", draw(st.integers(1, 8)))]
    times = sorted(draw(st.lists(st.floats(0, 500), max_size=6)))
    for index, time in enumerate(times):
        events.append(GoneEvent(time, "spot") if index % 2 else NodeEvent(time, "spot", draw(st.integers(1, 6)), True))
    for index in range(draw(st.integers(1, 7))):
        speed = draw(st.floats(0.1, 5.0))
        gains = draw(st.lists(st.floats(0.0, 1.0), max_size=5))
        speeds = {n + 1: speed * (1 + sum(gains[:n])) for n in range(len(gains) + 1)}
        least = draw(st.integers(1, len(speeds)))
        events.append(
            JobEvent(
                draw(st.floats(0, 300)),
                f"job-{index}",
                draw(st.integers(1, 400)),
                speeds,
                min=least,
                weight=draw(st.sampled_from([0.5, 1.0, 10.0])),
                priority=draw(st.integers(0, 3)),
                units=draw(st.integers(1, 2)),
                on_demand=draw(st.booleans()),
            )
        )
    return check((("drawn", event) for event in events), "drawn")


costs = st.sampled_from([FREE, HIDDEN, RESTART, IN_TURN])
policies = st.sampled_from(sorted(POLICIES))


def worked(outcome: Outcome) -> float:
    """Steps that a job's workers would make if a change cost nothing."""
    spans = zip(outcome.changes, outcome.changes[1:], strict=False)
    return sum(outcome.job.speed(workers) * (end - begin) for (begin, workers), (end, _) in spans)


def used(result: Result, time: float) -> int:
    """Units that the jobs have at a time."""
    return sum(
        outcome.job.units * next((workers for when, workers in reversed(outcome.changes) if when <= time), 0)
        for outcome in result.outcomes
    )


@given(traces(), policies)
def test_a_job_makes_exactly_its_steps(played: JobTrace, policy: str) -> None:
    for outcome in simulate(played, POLICIES[policy], FREE, SCHEDULING).outcomes:
        if outcome.finished is not None:
            assert worked(outcome) == pytest.approx(outcome.job.steps, rel=1e-6)


@given(traces(), policies, costs)
def test_a_price_never_makes_a_step_cheaper(played: JobTrace, policy: str, cost: ResizeCost) -> None:
    for outcome in simulate(played, POLICIES[policy], cost, SCHEDULING).outcomes:
        if outcome.finished is not None:
            assert worked(outcome) >= outcome.job.steps * (1 - 1e-6)


@given(traces(), policies, costs)
def test_capacity_is_never_exceeded(played: JobTrace, policy: str, cost: ResizeCost) -> None:
    result = simulate(played, POLICIES[policy], cost, SCHEDULING)
    moments = {time for outcome in result.outcomes for time, _ in outcome.changes} | {t for t, _ in result.capacity}
    for moment in moments:
        there = next((units for time, units in reversed(result.capacity) if time <= moment), 0)
        assert used(result, moment) <= there


@given(traces(), policies, costs, st.sampled_from(["all", "seen"]))
def test_the_same_trace_gives_the_same_result(played: JobTrace, policy: str, cost: ResizeCost, knowledge: str) -> None:
    first, second = (
        simulate(played, POLICIES[policy], cost, SCHEDULING, knowledge=knowledge)  # type: ignore[arg-type]
        for _ in range(2)
    )
    assert first == second


@given(traces(), policies, costs)
def test_every_job_whose_minimum_fits_the_steady_node_ends(played: JobTrace, policy: str, cost: ResizeCost) -> None:
    steady = next(event.units for event in played.events if isinstance(event, NodeEvent))
    for outcome in simulate(played, POLICIES[policy], cost, SCHEDULING).unfinished:
        assert outcome.job.min * outcome.job.units > steady, outcome.reason

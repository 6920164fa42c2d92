"""What jobs are expected to need by what jobs like them needed, and what ``ShortestFirst`` makes of it."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from typing import get_args

import pytest
from benchmarks.traces.generate import recurring
from hypothesis import given
from hypothesis import strategies as st
from scheduling_cases import LINEAR, TOLD, decide, job, running

from virtualflow_operator.scheduling import POLICIES
from virtualflow_operator.scheduling.service_time import Past, left, pattern
from virtualflow_operator.settings import SchedulingSettings
from virtualflow_operator.simulator.outcome import measure
from virtualflow_operator.simulator.simulation import Knowledge, ResizeCost, simulate
from virtualflow_operator.simulator.trace import JobEvent, JobTrace, NodeEvent


def past(*jobs: tuple[str, str, float], told: SchedulingSettings = TOLD) -> Past:
    known = Past()
    for namespace, name, service in jobs:
        known = known.after(namespace, name, service, told)
    return known


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("bert-cola", "bert-cola"),
        ("03-bert-cola", "bert-cola"),
        ("bert-cola-2026-11-24", "bert-cola"),
        ("bert-cola-x7k2p", "bert-cola"),
        ("bert-model", "bert-model"),
        ("resnet50-imagenet-17", "resnet50-imagenet"),
        ("2026", "-"),
        ("x7k2p", "x7k2p"),
    ],
)
def test_a_pattern_is_the_name_without_what_tells_it_from_the_next(name: str, like: str) -> None:
    assert pattern(name) == like


@pytest.mark.parametrize(
    ("namespace", "name", "service"),
    [
        ("red", "bert50-9", 1e2),
        ("red", "bert18-1", 10 ** ((2 + 4) / 2)),
        ("red", "gpt-1", 10 ** ((2 + 4 + 6) / 3)),
        ("green", "bert50-1", 10 ** ((2 + 4 + 6 + 1) / 4)),
    ],
    ids=["alike", "alike but for digits", "of its namespace", "of nobody it knows"],
)
def test_a_job_is_judged_by_those_that_are_most_like_it(namespace: str, name: str, service: float) -> None:
    known = past(("red", "bert50-1", 1e2), ("red", "bert99-2", 1e4), ("red", "vit-3", 1e6), ("blue", "bert50", 1e1))
    assert known.expects(namespace, name) == pytest.approx(service)


def test_nothing_is_expected_before_a_job_has_ended() -> None:
    assert Past().expects("red", "bert-1") is None


def test_the_latest_count_most_and_the_error_is_a_factor() -> None:
    known = past(*(("red", f"bert-{index}", 100.0) for index in range(10)))
    (kind,) = known.kinds
    assert (kind.jobs, exp(kind.service), kind.error) == (10, pytest.approx(100.0), 0.0)
    (kind,) = known.after("red", "bert-10", 1_600.0, TOLD).kinds
    assert exp(kind.service) == pytest.approx(200.0)  # a quarter of the way to 16 times as much
    assert exp(kind.error) == pytest.approx(2.0)


@given(
    st.lists(st.tuples(st.sampled_from(["red", "green"]), st.sampled_from("abcde"), st.floats(1, 1e9)), min_size=1),
    st.integers(1, 5),
)
def test_what_is_remembered_is_bounded_and_lies_among_what_was_needed(
    jobs: list[tuple[str, str, float]], most: int
) -> None:
    known = past(*jobs, told=replace(TOLD, remembered=most))
    assert 1 <= len(known.kinds) <= most
    assert (known.kinds[0].namespace, known.kinds[0].pattern) == jobs[-1][:2]
    for kind in known.kinds:
        needed = [
            log(service) for namespace, name, service in jobs if (namespace, name) == (kind.namespace, kind.pattern)
        ]
        assert min(needed) - 1e-9 <= kind.service <= max(needed) + 1e-9
        assert 0 <= kind.error <= max(needed) - min(needed) + 1e-9
    everywhere = known.expects("blue", "new")
    assert everywhere is not None
    assert min(s for *_, s in jobs) * 0.999 <= everywhere <= max(s for *_, s in jobs) * 1.001


@given(st.floats(1, 1e9), st.floats(0, 1e9))
def test_what_is_left_is_above_nothing_and_a_job_that_overruns_counts_as_half_done(
    expected: float, served: float
) -> None:
    found = left(expected, served)
    assert found > 0
    assert found == (expected - served if served < expected else max(served, 1.0))


def test_the_job_that_is_expected_to_be_shortest_goes_first() -> None:
    unknown = {"minimum": 4, "maximum": 4}
    jobs = [job("a", **unknown, expected_left=500.0), job("b", **unknown, expected_left=50.0), job("c", **unknown)]
    assert {name: given.workers for name, given in decide("ShortestFirst", jobs, 4).items()} == {"a": 0, "b": 4, "c": 0}
    measured = [running("d", 4, 4, minimum=4, curve=LINEAR, steps_left=1_000), jobs[1]]
    assert decide("ShortestFirst", measured, 4)["b"].workers == 4
    almost = [running("d", 4, 4, minimum=4, curve=LINEAR, steps_left=54), jobs[1]]
    assert decide("ShortestFirst", almost, 4)["b"].workers == 0  # not by the margin


def test_what_is_measured_counts_more_than_what_is_expected() -> None:
    jobs = [
        running("a", 4, 4, minimum=4, curve=LINEAR, steps_left=10, expected_left=1e9),
        job("b", 4, minimum=4, expected_left=100.0),
    ]
    assert decide("ShortestFirst", jobs, 4)["a"].workers == 4


def test_one_whose_speed_is_only_expected_grows_after_those_that_were_measured() -> None:
    jobs = [running("a", 1, 4, curve=LINEAR, steps_left=1_000), job("b", 8, expected_left=1.0)]
    assert {name: given.workers for name, given in decide("ShortestFirst", jobs, 8).items()} == {"a": 4, "b": 4}
    assert {name: given.workers for name, given in decide("ShortestFirst", jobs, 5).items()} == {"a": 4, "b": 1}


@pytest.mark.parametrize("comes", [0.0, 500.0], ids=["before anything is known", "among known ones"])
def test_a_job_without_a_past_is_not_starved(comes: float) -> None:
    """Short jobs come faster than they can end, on room for one at a time: it has turns, as they have."""
    told = SchedulingSettings(starvation_bound=300.0, turn=100.0)
    again = [JobEvent(25.0 * index, f"short-{index}", 30, {1: 1.0}) for index in range(100)]
    odd = JobEvent(comes, "odd", 250, {1: 1.0}, namespace="other")
    played = JobTrace((NodeEvent(0.0, "one", 1), *sorted((*again, odd), key=lambda event: event.time)))
    result = simulate(played, POLICIES["ShortestFirst"], ResizeCost(0.0), told, knowledge="past")
    (found,) = [outcome for outcome in result.outcomes if outcome.job.name == "odd"]
    assert found.expected == (None if comes == 0 else pytest.approx(30.0))
    assert found.started is not None
    assert found.started - comes <= told.starvation_bound + 2 * told.turn
    assert found.finished is not None
    assert found.finished < again[-1].time


def test_a_simulation_shows_how_wrong_it_was() -> None:
    jobs = [JobEvent(100.0 * index, f"a-{index}", 10 if index % 2 else 40, {1: 1.0}) for index in range(9)]
    played = JobTrace((NodeEvent(0.0, "one", 1), *jobs))
    measured = measure(simulate(played, POLICIES["ShortestFirst"], ResizeCost(0.0), TOLD, knowledge="past"))
    assert measured.expected == 8
    assert 1.5 < measured.expected_factor < 4.0
    told = measure(simulate(played, POLICIES["ShortestFirst"], ResizeCost(0.0), TOLD))
    assert (told.expected, told.expected_factor) == (0, 0.0)


@pytest.mark.slow
def test_the_past_is_worth_most_of_what_being_told_is() -> None:
    """As in the table of the document, on a shorter trace of that kind on which jobs wait for each other."""
    played, cost = recurring(5, 0.5, jobs=120), ResizeCost(6.0, 0.5)
    told, past, none = (
        measure(simulate(played, POLICIES["ShortestFirst"], cost, SchedulingSettings(), knowledge=knowledge))
        for knowledge in get_args(Knowledge)
        if knowledge != "seen"
    )
    assert 1.2 < past.expected_factor < 2.0
    assert past.expected > 0.9 * past.jobs
    assert past.median_completion < told.median_completion * 1.05
    assert past.median_completion < none.median_completion * 0.5

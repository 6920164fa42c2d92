"""What jobs are expected to need by what jobs like them needed, and what ``ShortestFirst`` makes of it."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, log
from random import Random
from typing import get_args

import pytest
from benchmarks.scheduling_prediction import fixed, play
from benchmarks.traces.generate import recurring
from hypothesis import given
from hypothesis import strategies as st
from scheduling_cases import LINEAR, TOLD, decide, job, running

from virtualflow_operator.scheduling import POLICIES
from virtualflow_operator.scheduling.service_time import Forecast, Past, censored_mean, median_above, pattern
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


def forecast(known: Past, *served: tuple[str, str, float]) -> Forecast:
    return Forecast(known, served, TOLD)


def expected(known: Past, namespace: str, name: str, *served: tuple[str, str, float]) -> float:
    found = forecast(known, *served).expects(namespace, name)
    assert found is not None
    return found


def test_a_job_is_judged_by_those_that_are_most_like_it() -> None:
    """A wider group of kinds counts as one kind of the closer."""
    known = past(("red", "bert50-1", 1e2), ("red", "bert99-2", 1e4), ("red", "vit-3", 1e6), ("blue", "bert50", 1e1))
    everywhere = (2 + 4 + 6 + 1) / 4
    namespace = (2 + 4 + 6 + everywhere) / 4
    assert expected(known, "green", "bert50-1") == pytest.approx(10**everywhere)
    assert expected(known, "red", "gpt-1") == pytest.approx(10**namespace)
    assert expected(known, "red", "bert18-1") == pytest.approx(10 ** ((2 + 4 + namespace) / 3))


def test_the_more_of_a_kind_have_ended_the_more_they_count() -> None:
    others = [("red", f"{name}-1", 1e6) for name in ("vit", "gpt", "llama")]
    found = [
        expected(past(*others, *(("red", f"bert-{index}", 1e2) for index in range(ended))), "red", "bert-99")
        for ended in range(1, 8)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] < 3e4
    assert found[-1] == pytest.approx(1e2, rel=0.2)


def test_nothing_is_expected_before_a_job_has_ended() -> None:
    assert forecast(Past(), ("red", "bert-1", 1e6)).expects("red", "bert-1") is None
    assert forecast(Past(), ("red", "bert-1", 1e6)).left("red", "bert-1", 1e6) is None


@pytest.mark.parametrize(
    ("served", "least", "most"),
    [((), 1e3, 1e3), ((1e1,), 1e3, 1.05e3), ((1e3,), 1.1e3, 3e3), ((1e6,), 1e4, 1e6), ((1e6, 1e6), 1e5, 1e6)],
    ids=["none", "one that has just begun", "one that is as far", "one that is far beyond", "two that are"],
)
def test_jobs_that_have_not_ended_say_how_long_others_of_their_kind_are(
    served: tuple[float, ...], least: float, most: float
) -> None:
    known = past(("red", "vit-1", 1e3))
    running = [("red", f"bert-{index}", so_far) for index, so_far in enumerate(served)]
    assert least * 0.999 <= expected(known, "red", "bert-99", *running) <= most * 1.001
    assert expected(known, "red", "gpt-1", *running) == pytest.approx(1e3)


@pytest.mark.parametrize(
    ("ended", "censored", "mean"),
    [
        ((0.0, 0.0), (), 0.0),
        ((4.0, 1.0), (), 2.0),
        ((4.0, 3.0), (), 3.0),
        ((0.0, 0.0), (-9.0,), 0.0),
        ((0.0, 0.0), (0.0,), 0.506),
        ((4.0, 3.0), (3.0,), 3.2),
        ((0.0, 0.0), (60.0,), 30.02),
        ((0.0, 0.0), (60.0, 60.0, 60.0), 45.05),
    ],
    ids=["nothing", "one", "three", "far below", "at the mean", "beside known ones", "far above", "several far above"],
)
def test_a_censored_value_counts_by_how_far_it_is_above_the_mean(
    ended: tuple[float, float], censored: tuple[float, ...], mean: float
) -> None:
    assert censored_mean((0.0, 1.0), 1.0, ended, censored) == pytest.approx(mean, abs=0.05)


_LOG = st.floats(0.0, 25.0)


@given(
    st.tuples(_LOG, st.floats(0.3, 4.0)),
    st.floats(0.1, 3.0),
    st.tuples(_LOG, st.floats(0.0, 7.0)),
    st.lists(_LOG, min_size=1, max_size=8),
    st.floats(0.0, 10.0),
    st.randoms(),
)
def test_an_estimate_grows_with_what_is_censored_and_depends_on_nothing_else(
    prior: tuple[float, float],
    within: float,
    ended: tuple[float, float],
    censored: list[float],
    further: float,
    random: Random,
) -> None:
    found = censored_mean(prior, within, ended, censored)
    later = [*censored[:-1], censored[-1] + further]
    assert censored_mean(prior, within, ended, later) >= found - 1e-5
    assert censored_mean(prior, within, ended, censored[:-1]) <= found + 1e-5
    assert censored_mean(prior, within, ended, []) <= found <= max(prior[0], ended[0], *censored) + 4 * within + 1e-5
    shuffled = random.sample(censored, len(censored))
    assert censored_mean(prior, within, ended, shuffled) == found


@given(st.floats(-5.0, 30.0), st.floats(0.1, 5.0), st.floats(0.0, 1e12), st.floats(1.0, 10.0))
def test_no_estimate_is_below_what_a_job_has_had(mean: float, deviation: float, served: float, factor: float) -> None:
    found = median_above(served, mean, deviation)
    assert max(served, exp(mean) * (1 - 1e-9)) <= found < inf
    assert median_above(served * factor, mean, deviation) >= found * (1 - 1e-6)
    assert median_above(served, mean + log(factor), deviation) >= found * (1 - 1e-6)


@given(st.lists(st.tuples(st.sampled_from(["red", "blue"]), st.sampled_from("abc"), st.floats(0, 1e9)), max_size=6))
def test_every_job_has_something_left(jobs: list[tuple[str, str, float]]) -> None:
    known = past(("red", "a", 1e3), ("red", "b", 1e5))
    found, again = forecast(known, *jobs), forecast(known, *reversed(jobs))
    for namespace, name, served in jobs:
        left, total = found.left(namespace, name, served), found.expects(namespace, name, served)
        assert left is not None
        assert total is not None
        assert left >= 1
        assert total >= served
        assert again.left(namespace, name, served) == left


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
    everywhere = expected(known, "blue", "new")
    assert min(s for *_, s in jobs) * 0.999 <= everywhere <= max(s for *_, s in jobs) * 1.001


@pytest.mark.parametrize("told", [1e300, inf], ids=["too much", "no number"])
def test_what_a_job_tells_of_itself_is_believed_within_reason(told: float) -> None:
    """And one that says that it has had more than any has a long way to go, or lying would pay."""
    known = past(("red", "vit-1", 1.0), ("red", "gpt-1", told))
    for name in ("vit-2", "gpt-2", "bert-2"):
        left = forecast(known, ("red", "gpt-2", told), ("red", "bert-2", told)).left("red", name, told)
        assert left is not None
        assert 1e15 <= left < inf


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
@pytest.mark.parametrize("shrinks", [True, False], ids=["elastic", "of a fixed size"])
def test_what_jobs_like_them_needed_is_worth_most_of_what_being_told_is(shrinks: bool) -> None:
    """On one trace of the document's table."""
    played, cost = recurring(1, 0.5, jobs=160, models=12, load=2.0), ResizeCost(6.0, 0.5)
    played = played if shrinks else fixed(played)
    told, past, none = (
        measure(simulate(played, POLICIES["ShortestFirst"], cost, SchedulingSettings(), knowledge=knowledge))
        for knowledge in get_args(Knowledge)
        if knowledge != "seen"
    )
    assert past.expected > 0.9 * past.jobs
    assert past.mean_completion < told.mean_completion * 1.15
    assert past.mean_completion < none.mean_completion * 0.8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 14])
def test_jobs_of_models_that_a_queue_remembers_gain_where_those_of_new_ones_lose(seed: int) -> None:
    """On the two traces of the document's table where jobs of a fixed size lose without such a history."""
    _, known = play(False, seed)
    assert known.all < known.past < known.none

"""What policies are asked with: their names, demands and settings."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import Any

import pytest
from scheduling_cases import NOW, TOLD, job, running

from virtualflow.errors import ConfigurationError
from virtualflow_operator.scheduling import POLICIES, ScalingCurve, next_change, policy


def test_every_policy_has_the_name_that_a_queue_gives() -> None:
    assert list(POLICIES) == ["FIFO", "Priority", "WeightedFairShare", "ShortestFirst", "MaxThroughput"]
    assert all(policy(name) is found for name, found in POLICIES.items())


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigurationError, match="no policy 'Lottery'; give one of FIFO, Priority, WeightedFairShare,"):
        policy("Lottery")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        pytest.param({"weight": 0.0}, "weight above 0", id="no weight"),
        pytest.param({"weight": float("nan")}, "weight above 0", id="a weight that is no number"),
        pytest.param({"minimum": 0}, "1 <= minimum <= maximum", id="no minimum"),
        pytest.param({"minimum": 17}, "1 <= minimum <= maximum", id="a minimum above the maximum"),
        pytest.param({"requested": 17}, "ask for 1 to 16 workers", id="a size above the maximum"),
        pytest.param({"units": 0}, "units are 1 or more", id="workers that use nothing"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        job("a", **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"turn": 0.0},
        {"starvation_bound": -1.0},
        {"margin": 1.0},
        {"turn_share": 1.1},
        {"efficiency": 2.0},
        {"hold": -1.0},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        replace(TOLD, **wrong)


def test_a_job_remembers_how_long_it_waited_and_since_when_it_runs() -> None:
    waiting = job("a", submitted=NOW)
    started = waiting.given(4, NOW + 50.0)
    assert (started.since, started.resized, started.waited) == (NOW + 50.0, NOW + 50.0, 50.0)
    grown = started.given(6, NOW + 70.0)
    assert (grown.since, grown.resized, grown.waited) == (NOW + 50.0, NOW + 70.0, 50.0)
    assert grown.given(6, NOW + 80.0) is grown
    stopped = grown.given(0, NOW + 90.0)
    assert (stopped.waiting(NOW + 100.0), grown.waiting(NOW + 100.0)) == (10.0, 0.0)


def test_the_next_change_is_the_first_moment_that_matters() -> None:
    jobs = [
        job("a", submitted=NOW),
        running("b", 1, resized=NOW - 1.0),
        running("c", 1, waited=700.0, since=NOW - 299.0),
    ]
    assert next_change(NOW, jobs, TOLD) == NOW + 1.0
    assert next_change(NOW + 1.0, jobs, TOLD) == NOW + 4.0
    assert next_change(NOW + 4.0, jobs, TOLD) == NOW + 600.0
    assert next_change(NOW + 600.0, jobs, TOLD) is None


def test_a_speed_that_no_job_can_have_leaves_all_figures_finite() -> None:
    curve = ScalingCurve.of([(1, 1e308), (2, 1e308)])
    assert isfinite(curve.speed(64))
    assert curve.speed(64) > 0

"""The soak: what is called flat, and which processes count."""

from __future__ import annotations

import os
import random

import pytest
from benchmarks.slopes import fit, judge
from benchmarks.soak import Watched, look_at, rows_of


def line(growth: float, noise: float, seed: int = 0, steps: int = 10_000) -> list[tuple[int, float]]:
    """100 MB at first, so much more over all steps, and noise around it."""
    chance = random.Random(seed)
    every = steps // 1_000
    return [(step, 100 + growth * step / steps + chance.gauss(0, noise)) for step in range(0, steps, every)]


def test_a_line_has_its_slope() -> None:
    slope = fit(line(5.0, 0.0))
    assert slope is not None
    assert (slope.per_thousand, slope.low, slope.high) == pytest.approx((0.5, 0.5, 0.5))
    assert slope.growth == pytest.approx((4.995, 4.995))
    assert slope.mean == pytest.approx(102.5, abs=0.01)


def test_the_interval_holds_the_slope_in_most_cases() -> None:
    held = 0
    for seed in range(200):
        slope = fit(line(3.0, 5.0, seed))
        assert slope is not None
        held += slope.low <= 0.3 <= slope.high
    assert 180 <= held < 200


@pytest.mark.parametrize(
    ("growth", "noise", "verdict"),
    [
        pytest.param(0.0, 1.0, "flat", id="nothing but noise"),
        pytest.param(0.5, 0.1, "flat", id="less than matters, for certain"),
        pytest.param(5.0, 1.0, "grows", id="more than matters"),
        pytest.param(-5.0, 1.0, "flat", id="it shrinks"),
        pytest.param(0.5, 60.0, "unclear", id="nobody can tell"),
    ],
)
def test_what_a_slope_means(growth: float, noise: float, verdict: str) -> None:
    assert judge(fit(line(growth, noise)), tolerance=2.0) == verdict


@pytest.mark.parametrize("points", [[], line(0.0, 0.0)[:39], [(7, 1.0)] * 100], ids=["none", "few", "of one step"])
def test_too_few_samples_say_nothing(points: list[tuple[int, float]]) -> None:
    assert fit(points) is None
    assert judge(fit(points), 2.0) == "unclear"


def watched(kind: str, first: int, last: int, growth: float) -> Watched:
    samples = [
        (step, {"memory_mb": value, "descriptors": 20.0, "threads": 5.0})
        for step, value in line(growth, 0.1)
        if first <= step < last
    ]
    return Watched(kind, samples)


def test_the_processes_that_live_all_the_time_count() -> None:
    found = rows_of(
        [
            watched("worker", 0, 10_000, 0.0),
            watched("worker", 4_000, 6_000, 80.0),
            watched("coordinator", 0, 10_000, 9.0),
            watched("runner", 0, 3_000, 0.0),
        ],
        10_000,
    )
    verdicts = {(row["process"], row["measure"]): row["verdict"] for row in found}
    assert verdicts["worker", "memory_mb"] == "flat"
    assert verdicts["coordinator", "memory_mb"] == "grows"
    assert verdicts["coordinator", "descriptors"] == "flat"
    assert verdicts["runner", "memory_mb"] == "unclear"


def test_what_fills_while_the_training_warms_up_does_not_count() -> None:
    filling = [(step, {"memory_mb": min(step, 900.0), "descriptors": 9.0, "threads": 3.0}) for step in range(10_000)]
    assert rows_of([Watched("worker", filling)], 10_000)[0]["verdict"] == "flat"


def test_a_process_is_looked_at() -> None:
    found = look_at(os.getpid())
    assert found is not None
    assert found["memory_mb"] > 5
    with open(os.devnull):
        more = look_at(os.getpid())
    assert more is not None
    assert more["descriptors"] == found["descriptors"] + 1
    assert look_at(2**22 + 1) is None

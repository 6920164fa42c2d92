"""How large a statistical job's batch is, within bounds that its user allows."""

from __future__ import annotations

import pytest
from benchmarks.scheduling_batches import SIDES, draw, with_batches
from hypothesis import given
from hypothesis import strategies as st

from virtualflow_operator.scheduling.batch_choice import BatchBounds, choose_batch, speedup
from virtualflow_operator.scheduling.packing import Phases
from virtualflow_operator.simulator.trace import JobEvent

ALONE, HALF = Phases(1.0, 0.0), Phases(1.0, 1.0)


@pytest.mark.parametrize(
    ("phases", "batch", "times"),
    [
        pytest.param(ALONE, 64, 1.0, id="without an exchange all batches are as fast"),
        pytest.param(HALF, 16, 1.0, id="the measured one"),
        pytest.param(HALF, 48, 1.5, id="three times the samples in twice the time"),
        pytest.param(HALF, 4, 0.4, id="a quarter of the samples in 5/8 of the time"),
    ],
)
def test_a_larger_batch_exchanges_less_often(phases: Phases, batch: int, times: float) -> None:
    assert speedup(phases, batch, 16) == pytest.approx(times)


@pytest.mark.parametrize(
    ("phases", "bounds", "batch"),
    [
        pytest.param(ALONE, BatchBounds(8, 16, 256), 8, id="nothing is gained by a larger one"),
        pytest.param(HALF, BatchBounds(8, 16, 256), 256, id="the largest is faster than half of it"),
        pytest.param(HALF, BatchBounds(8, 16, 4_096), 512, id="one that is 3 % slower makes eight times the updates"),
        pytest.param(HALF, BatchBounds(16, 16, 16), 16, id="nothing else is allowed"),
        pytest.param(HALF, BatchBounds(5, 16, 30), 30, id="the bound is no doubling"),
    ],
)
def test_the_smallest_that_is_about_as_fast_as_the_fastest(phases: Phases, bounds: BatchBounds, batch: int) -> None:
    assert choose_batch(phases, bounds) == batch


@given(
    st.builds(Phases, st.floats(0.01, 10.0), st.floats(0.0, 10.0)),
    st.lists(st.integers(1, 10_000), min_size=3, max_size=3).map(sorted),
)
def test_it_stays_within_the_bounds_and_costs_no_more_than_is_negligible(phases: Phases, sizes: list[int]) -> None:
    bounds = BatchBounds(*sizes)
    chosen = choose_batch(phases, bounds)
    assert bounds.least <= chosen <= bounds.most
    best = max(speedup(phases, batch, bounds.measured) for batch in sizes)
    assert 0.97 * best * (1 - 1e-9) <= speedup(phases, chosen, bounds.measured) <= best * (1 + 1e-9)


@pytest.mark.parametrize("wrong", [(0, 1, 1), (2, 1, 2), (1, 3, 2)])
def test_bounds_are_in_order(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="give 1 <= least <= measured <= most"):
        BatchBounds(*wrong)


def test_a_bitwise_job_keeps_its_batch() -> None:
    job = JobEvent(0.0, "j", 1, {1: 1.0, 2: 1.0}, batch=8)
    assert job.with_chosen_batches is job


@pytest.mark.parametrize(
    ("side", "least", "batches"),
    [
        pytest.param("asked, held", 4, [512] * 3, id="it waits for as many devices as hold the batch"),
        pytest.param("largest, held", 8, [1_024] * 3, id="more of them for a larger batch"),
        pytest.param("chosen, held", 1, [128, 512, 1_024], id="as much as they hold: the paper's autoscaler"),
        pytest.param("asked, virtual nodes", 1, [512] * 3, id="any batch on one device"),
        pytest.param("chosen, virtual nodes", 1, [128, 1_024, 1_024], id="the largest only where it is exchanged"),
    ],
)
def test_the_sides_of_the_comparison(side: str, least: int, batches: list[int]) -> None:
    trace = draw(seed=0, load=1.0)
    job = next(job for job in trace.jobs if (job.namespace, job.batch) == ("cifar10", 512))
    assert with_batches(job, SIDES[side]).min == least
    assert [SIDES[side].batch(job, workers) for workers in (1, 4, 8)] == batches

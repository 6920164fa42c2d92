"""What the best split is that a job of unequal devices could have."""

from __future__ import annotations

import pytest
from benchmarks.uneven_devices import VIRTUAL_NODES, best_split

from virtualflow.coordinator.assignment import assign


@pytest.mark.parametrize("factors", [(1, 3), (1, 2), (1, 1, 3), (1, 3, 1, 2), (1, 1, 1, 1, 3)], ids=str)
def test_the_best_split_is_as_fast_as_the_one_that_the_coordinator_makes_of_true_speeds(factors: list[float]) -> None:
    made = [len(ranges) for ranges in assign(VIRTUAL_NODES, [1 / factor for factor in factors])]
    steps = [
        max(count * factor for count, factor in zip(counts, factors, strict=True))
        for counts in (best_split(factors), made)
    ]
    assert steps[0] == pytest.approx(steps[1])

"""Virtual nodes that are dealt in turns: each once, and few sums wait for others."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.reduction import Accumulator, choose_summation, deal


@pytest.mark.parametrize(
    ("counts", "dealt"),
    [
        ([4], [[0, 1, 2, 3]]),
        ([2, 2], [[0, 2], [1, 3]]),
        ([3, 1], [[0, 2, 3], [1]]),
        ([1, 3, 2], [[0], [1, 3, 5], [2, 4]]),
    ],
)
def test_each_gets_as_many_as_before(counts: list[int], dealt: list[list[int]]) -> None:
    assert deal([range(count) for count in counts]) == dealt


def test_a_group_is_dealt_what_begins_with_its_first() -> None:
    assert deal([range(2), range(4, 5)], 3) == [[3, 5], [4]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9))
def test_what_runs_at_a_time_are_neighbours(counts: list[int]) -> None:
    dealt, total = deal([range(count) for count in counts]), sum(counts)
    assert sorted(node for nodes in dealt for node in nodes) == list(range(total))
    done = 0
    for turn in range(max(counts)):
        now = [nodes[turn] for nodes in dealt if turn < len(nodes)]
        assert now == list(range(done, done + len(now)))
        done += len(now)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=8))
def test_sums_that_wait_are_no_more_than_the_tree_is_deep(counts: list[int]) -> None:
    total = sum(counts)
    sums = Accumulator(choose_summation(total, "bitwise"))
    for node in range(total):  # in which order whoever keeps a slice gets them, turn by turn
        sums.add(node, [])
        assert len(sums.parts) <= math.ceil(math.log2(total)) + 1 if total > 1 else True
    assert [key for key, _ in sums.parts] == [(0, total)]

"""A collective breaks, each one of a reduction in turn and in each worker: no wrong sum, and the next attempt is right.

The workers are threads, so all cases that there are take seconds; that processes, sockets and signals do no harm on top
of it, a few jobs of test_sharded_optimizer and test_statistical_sharded show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from test_reducer import ALIGNMENT, GATHER, SLICES, Problem, bits, build, reduce_one
from thread_collectives import Seat, Table, together

from virtualflow.reduction.accumulation import Tensors, choose_summation
from virtualflow.reduction.reducer import Reducer
from virtualflow.reduction.settings import Exchange, ReductionSettings

NODES, SCALE = 6, 1 / 3
RANGES = [range(2), range(2, 5), range(5, 6)]
FEWER = [range(4), range(4, 6)]
PLACES = [((65,), torch.float32), ((3, 5), torch.float32), ((7,), torch.float64), ((), torch.bfloat16)]
How = Literal["before", "after"]


def all_there(problem: Problem) -> list[int]:
    return [place for place, there in enumerate(problem.present) if there]


def attempt(
    reducers: Sequence[Reducer],
    problem: Problem,
    ranges: Sequence[range],
    early: bool,
    failing: tuple[int, int, How] | None = None,
) -> tuple[list[Tensors | None], list[int]]:
    """Reduce once; what each worker found, ``None`` where its attempt was aborted, and how many operations it began."""
    table = Table(len(ranges))
    seats = [Seat(table, rank) for rank in range(len(ranges))]
    if failing is not None:
        rank, seats[rank].fails_at, seats[rank].how = failing

    def work(rank: int) -> Tensors:
        found = reduce_one(
            reducers[rank], seats[rank], problem, ranges, SCALE, all_there if early else None, one_by_one=True
        )
        return [None if tensor is None else tensor.clone() for tensor in found]

    return together(seats, work), [seat.operations for seat in seats]


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize(
    ("way", "early", "cut"),
    [
        pytest.param(GATHER, False, False, id="gathered whole"),
        pytest.param(GATHER, True, False, id="gathered whole, early"),
        pytest.param(SLICES, False, False, id="by slices"),
        pytest.param(SLICES, True, False, id="early"),
        pytest.param(SLICES, False, True, id="by slices, of passes that end early"),
        pytest.param(SLICES, True, True, id="early, of passes that end early"),
    ],
)
def test_whichever_collective_breaks_no_sum_is_wrong_and_the_next_attempt_is_right(
    way: Exchange, early: bool, cut: bool, how: How
) -> None:
    problem = build(3, NODES, PLACES)
    if cut:
        problem = problem.cut((frozenset({0, 2}), frozenset({0, 2, 5}), frozenset(range(NODES))))
    wanted = bits(problem.expected(SCALE))
    settings = ReductionSettings(alignment=ALIGNMENT, exchange=way, bucket=128)
    reducers = [Reducer(choose_summation(NODES, "bitwise"), settings) for _ in RANGES]
    try:
        found, operations = attempt(reducers, problem, RANGES, early)
        assert [bits(tensors) for tensors in found if tensors is not None] == [wanted] * len(RANGES)
        assert all(count > 1 for count in operations) or way is GATHER
        for victim, count in enumerate(operations):
            for number in range(1, count + 1):
                found, _ = attempt(reducers, problem, RANGES, early, (victim, number, how))
                assert found[victim] is None
                # Others may have had what they needed; then it was all of it.
                assert all(tensors is None or bits(tensors) == wanted for tensors in found)
                survivors = [reducer for rank, reducer in enumerate(reducers) if rank != victim]
                for again, ranges in ((reducers, RANGES), (survivors, FEWER)):
                    for reducer in again:
                        reducer.forget()
                    repeated, _ = attempt(again, problem, ranges, early)
                    assert [bits(tensors or []) for tensors in repeated] == [wanted] * len(ranges)
                for reducer in reducers:
                    reducer.forget()
    finally:
        for reducer in reducers:
            reducer.close()

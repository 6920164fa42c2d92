"""Who adds up what of which bucket, and what travels for it: a pure function of the step, alike on all workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reducer import divisions

from tiers import examples
from virtualflow.coordinator.assignment import assign
from virtualflow.reduction.accumulation import CanonicalSummation
from virtualflow.reduction.bucket_exchange import place_rows
from virtualflow.reduction.buckets import Bucket, Keys, Reach, divide_sums, level, plan_buckets, rows_of
from virtualflow.reduction.schedule import Shape, Way
from virtualflow.reduction.traffic import planned_bytes
from virtualflow.step.partial_backward import BlockCosts, PartialBackward

ALIGNMENT = 16


def plan(keys: Keys, reach: Reach | None, numels: Sequence[int], limit: int, *, divide: bool = True) -> list[Bucket]:
    """The buckets of tensors of so many elements, of at most so many bytes each."""
    templates, rows = [torch.empty(()).expand(numel) for numel in numels], rows_of(keys, reach, len(numels))
    places = [place for place in range(len(numels))[::-1] if any(rows[place])]
    buckets = plan_buckets(templates, places, rows, alignment=ALIGNMENT, limit=limit)
    return divide_sums(buckets, list(map(len, keys)), ALIGNMENT) if divide else buckets


def moved(buckets: Sequence[Bucket], workers: int) -> list[tuple[int, int]]:
    """What each worker sends and receives."""
    planned = [[planned_bytes(bucket, Way.SLICES, None, rank) for bucket in buckets] for rank in range(workers)]
    return [(sum(sent for sent, _ in one), sum(received for _, received in one)) for one in planned]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Keys, Reach, list[int]]:
    nodes = draw(st.integers(2, 17))
    keys = [CanonicalSummation(nodes).parts_of(assigned) for assigned in draw(divisions(nodes))]
    numels = draw(st.lists(st.sampled_from([0, 1, 7, 100, 1000]), min_size=1, max_size=6))
    reach = draw(st.lists(st.frozensets(st.integers(0, nodes - 1)), max_size=len(numels)).map(tuple))
    return keys, reach, numels


@settings(max_examples=examples(150), deadline=None)
@given(problem=problems(), limit=st.sampled_from([1, 500, 1 << 20]))
def test_each_sum_is_made_of_the_rows_of_the_passes_that_get_to_it_and_of_no_others(
    problem: tuple[Keys, Reach, list[int]], limit: int
) -> None:
    keys, reach, numels = problem
    found = Counter[int]()
    for bucket in plan(keys, reach, numels, limit):
        assert bucket.edges[0] == 0
        assert bucket.total <= bucket.edges[-1] < bucket.total + max(1, len(keys)) * ALIGNMENT
        assert all(piece >= 0 for piece in bucket.pieces)
        found.update(bucket.places)
        for place in bucket.places:
            for nodes, rows in zip(keys, bucket.rows, strict=True):
                there = [
                    row
                    for row, key in enumerate(nodes)
                    if place >= len(reach) or not reach[place].isdisjoint(range(*key))
                ]
                assert list(rows) == there
    reached = {place for place in range(len(numels)) if place >= len(reach) or reach[place]}
    assert found == Counter(reached)


@settings(max_examples=examples(150), deadline=None)
@given(problem=problems(), limit=st.sampled_from([500, 1 << 20]))
def test_no_more_travels_than_for_equal_pieces_and_nobody_moves_more_than_for_whole_passes(
    problem: tuple[Keys, Reach, list[int]], limit: int
) -> None:
    keys, reach, numels = problem
    numels = [1000 * numel for numel in numels]
    divided = moved(plan(keys, reach, numels, limit), len(keys))
    equal = moved(plan(keys, reach, numels, limit, divide=False), len(keys))
    whole = moved(plan(keys, None, numels, limit), len(keys))
    rounding = ALIGNMENT * 17 * len(numels) * len(keys)
    for bucket in plan(keys, reach, numels, limit):
        pieces = tuple(piece * bucket.dtype.itemsize for piece in bucket.pieces)
        shape = Shape(bucket.total * bucket.dtype.itemsize, bucket.counts, pieces=pieces)
        for either in Way:
            sent = sum(planned_bytes(bucket, either, None, rank)[0] for rank in range(len(keys)))
            assert shape.sent(either) == pytest.approx(sent, abs=rounding)
    assert sum(sent for sent, _ in divided) == sum(received for _, received in divided)
    assert sum(sent for sent, _ in divided) <= sum(sent for sent, _ in equal) + rounding
    for way in (0, 1):
        assert max(one[way] for one in divided) <= max(one[way] for one in whole) + rounding


@given(rooms=st.lists(st.integers(0, 50), min_size=1, max_size=6), amount=st.integers(0, 200))
def test_whoever_has_most_room_takes_most(rooms: list[int], amount: int) -> None:
    taken = level(rooms, amount)
    assert sum(taken) == min(amount, sum(rooms))
    left = [room - one for room, one in zip(rooms, taken, strict=True)]
    assert min(left) >= 0
    assert all(one >= max(left) - 1 for one, some in zip(left, taken, strict=True) if some), "others had more room"


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), data=st.data())
def test_rows_lie_beside_one_another(lengths: list[int], data: st.DataObject) -> None:
    first, begin = data.draw(st.integers(0, len(lengths) - 1)), data.draw(st.integers(0, 30))
    begins, end = place_rows(lengths, first, begin)
    assert begins[first] == begin
    used = [place for at, length in zip(begins, lengths, strict=True) for place in range(at, at + length)]
    assert len(set(used)) == len(used)
    assert max(used, default=0) <= end <= begin + sum(lengths)


def share(workers: int, nodes: int, fractions: tuple[float, ...], rotate: bool) -> float:
    """Bytes of gradients of twelve equal blocks, beside those of whole passes, over as many steps as classes."""
    backward, blocks = PartialBackward(fractions, rotate), 12
    keys = [CanonicalSummation(nodes).parts_of(one) for one in assign(nodes, [1.0] * workers)]
    costs = BlockCosts((1,) * blocks)
    partial = 0
    for step in range(1, len(fractions) + 1):
        reached = [costs.reached(backward.fraction(step, node, nodes)) for node in range(nodes)]
        reach = tuple(
            frozenset(node for node, count in enumerate(reached) if block >= blocks - count) for block in range(blocks)
        )
        partial += sum(sent for sent, _ in moved(plan(keys, reach, [12_000] * blocks, 1 << 20), workers))
    whole = sum(sent for sent, _ in moved(plan(keys, None, [12_000] * blocks, 1 << 20), workers))
    return partial / (len(fractions) * whole)


@pytest.mark.parametrize(
    ("workers", "nodes", "fractions", "rotate", "wanted"),
    [
        (2, 2, (1, 0.5), True, 0.75),
        (3, 3, (1, 0.67, 0.34), True, 0.75),
        (3, 3, (1, 0.67, 0.34), False, 0.75),
        (3, 12, (1, 0.67, 0.34), False, 0.61),
        (3, 12, (1, 0.67, 0.34), True, 0.79),
        (5, 5, (1, 0.8, 0.6, 0.4, 0.2), True, 0.75),
        (2, 8, (1, 0.75, 0.5, 0.25), True, 1.0),
        (8, 8, (1, *[0.125] * 7), True, 0.63),
    ],
)
def test_bytes_beside_those_of_whole_passes(
    workers: int, nodes: int, fractions: tuple[float, ...], rotate: bool, wanted: float
) -> None:
    """The table in docs/how-to/partial-backward.md, and one deep pass whose worker must not send everything alone."""
    assert share(workers, nodes, fractions, rotate) == pytest.approx(wanted, abs=0.005)

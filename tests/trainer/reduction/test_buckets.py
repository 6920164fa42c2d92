"""Which stretches of which sums travel to whom: a pure function of the step, alike on all workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reducer import divisions

from tiers import examples
from virtualflow.coordinator.assignment import assign
from virtualflow.reduction.accumulation import CanonicalSummation
from virtualflow.reduction.buckets import (
    Bucket,
    Keys,
    Parts,
    Reach,
    all_rows,
    bytes_moved,
    divide_sums,
    numbered_rows,
    place_rows,
    plan_buckets,
    rows_of,
    share_bucket,
)
from virtualflow.reduction.ownership import Portion, Portions
from virtualflow.step.partial_backward import PartialBackward, blocks_reached

ALIGNMENT = 16


def divided(keys: Keys, reach: Reach, numels: list[int], limit: int) -> list[tuple[Bucket, Parts]]:
    """Who adds up what of tensors of so many elements, in buckets of so many bytes."""
    templates, places = [torch.empty(()).expand(numel) for numel in numels], range(len(numels))[::-1]
    buckets = plan_buckets(templates, places, len(keys), alignment=ALIGNMENT, limit=limit)
    parts = divide_sums(buckets, rows_of(keys, reach, len(numels)), [len(of_member) for of_member in keys], ALIGNMENT)
    return list(zip(buckets, parts, strict=True))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Keys, Reach, list[int]]:
    nodes = draw(st.integers(2, 17))
    keys = [CanonicalSummation(nodes).parts_of(assigned) for assigned in draw(divisions(nodes))]
    numels = draw(st.lists(st.sampled_from([0, 1, 7, 100, 1000]), min_size=1, max_size=6))
    reach = draw(st.lists(st.frozensets(st.integers(0, nodes - 1)), max_size=len(numels)).map(tuple))
    return keys, reach, numels


@settings(max_examples=examples(150), deadline=None)
@given(problem=problems(), limit=st.sampled_from([1, 500, 1 << 20]))
def test_a_row_travels_once_where_one_of_its_virtual_nodes_got_to_and_nowhere_else(
    problem: tuple[Keys, Reach, list[int]], limit: int
) -> None:
    keys, reach, numels = problem
    rows = numbered_rows([len(of_member) for of_member in keys])
    nodes = [range(*key) for of_member in keys for key in of_member]
    added, brought = Counter[tuple[int, int]](), Counter[tuple[int, int, int]]()
    for bucket, parts in divided(keys, reach, numels, limit):
        for adder, of_member in enumerate(parts):
            for part in of_member:
                assert sorted(part.keepers) == list(range(len(keys)))
                assert part.keepers[0] == adder, "every worker needs the sum, and one of them makes it"
                added.update((bucket.places[part.at], element) for element in range(part.begin, part.end))
            for numbers in rows:
                places, length = place_rows(of_member, numbers)
                assert length == sum(of_member[number].numel for _, number in places)
                for row, number in places:
                    part = of_member[number]
                    place = bucket.places[part.at]
                    brought.update((place, row, element) for element in range(part.begin, part.end))
    reached = [frozenset(reach[n]) if n < len(reach) else frozenset(range(17)) for n in range(len(numels))]
    contributes = [[not reached[place].isdisjoint(of_row) for of_row in nodes] for place in range(len(numels))]
    assert added == Counter((n, at) for n, numel in enumerate(numels) if any(contributes[n]) for at in range(numel))
    assert brought == Counter(
        (place, row, at)
        for place, row in product(range(len(numels)), range(len(nodes)))
        if contributes[place][row]
        for at in range(numels[place])
    )


@settings(max_examples=examples(60), deadline=None)
@given(problem=problems())
def test_passes_that_end_early_never_send_more_than_whole_ones(problem: tuple[Keys, Reach, list[int]]) -> None:
    keys, reach, numels = problem
    counts = [len(of_member) for of_member in keys]
    for bucket, parts in divided(keys, reach, numels, 1 << 20):
        if bucket.total:
            whole, early = (sum(sent_by(bucket, counts, of)) for of in (None, parts))
            assert early <= whole


def sent_by(bucket: Bucket, counts: Sequence[int], parts: Parts | None) -> list[int]:
    """What each worker sends of a bucket."""
    return [sent for sent, _ in bytes_moved(bucket, counts, parts, gathered=False)]


def saved(backward: PartialBackward, workers: int, virtual_nodes: int, blocks: int = 30) -> tuple[float, float]:
    """Bytes that all workers, and the busiest of them, send of equal blocks, as shares of those with whole passes."""
    keys = [CanonicalSummation(virtual_nodes).parts_of(one) for one in assign(virtual_nodes, [1.0] * workers)]
    counts = [len(of_member) for of_member in keys]
    sent, whole = [0] * workers, [0] * workers
    for step in range(1, len(backward.fractions) + 1):
        cuts = [
            blocks - blocks_reached(backward.fraction(step, node, virtual_nodes), blocks)
            for node in range(virtual_nodes)
        ]
        reach = tuple(frozenset(node for node, cut in enumerate(cuts) if cut <= at) for at in range(blocks))
        for bucket, parts in divided(keys, reach, [12_000] * blocks, 1 << 18):
            for total, of in ((sent, parts), (whole, None)):
                for rank, size in enumerate(sent_by(bucket, counts, of)):
                    total[rank] += size
    return sum(sent) / sum(whole), max(sent) / max(whole)


@pytest.mark.parametrize(
    ("workers", "virtual_nodes", "fractions", "rotate", "share"),
    [
        pytest.param(2, 2, (1, 0.5), True, 0.75, id="two workers, one class each"),
        pytest.param(3, 3, (1, 0.67, 0.34), True, 0.75, id="three workers, one class each"),
        pytest.param(3, 6, (1, 0.67, 0.34), True, 0.75, id="three workers, two classes each"),
        pytest.param(3, 12, (1, 0.67, 0.34), False, 0.65, id="three workers, classes that stay with them"),
        pytest.param(3, 12, (1, 0.67, 0.34), True, 0.8, id="three workers, each with all classes"),
        pytest.param(5, 5, (1, 0.8, 0.6, 0.4, 0.2), True, 0.75, id="five workers, one class each"),
        pytest.param(5, 10, (1, 0.2), False, 0.71, id="five workers, most passes short"),
        pytest.param(2, 8, (1, 0.75, 0.5, 0.25), True, 1.0, id="aligned ranges with all classes: nothing to save"),
    ],
)
def test_what_passes_that_end_early_save_of_equal_blocks(
    workers: int, virtual_nodes: int, fractions: tuple[float, ...], rotate: bool, share: float
) -> None:
    of_all, of_busiest = saved(PartialBackward(fractions, rotate), workers, virtual_nodes)
    assert of_all == pytest.approx(share, abs=0.012)
    assert of_busiest <= 1.02, "nobody sends more for it"


TEN = Bucket(torch.float32, (0, 1), (0, 6, 10), 4)
"""Ten elements of four bytes; three workers contribute 2, 1 and 1 sums."""
TWICE: Portions = ((Portion(0, 3, (0, 1)), Portion(3, 6, (1, 2))), (Portion(0, 4, (2, 0)),))
ONCE: Portions = tuple(tuple(Portion(a, b, keepers[:1]) for a, b, keepers in place) for place in TWICE)


@pytest.mark.parametrize(
    ("gathered", "portions", "wanted"),
    [
        pytest.param(True, None, [(160, 160)] * 3, id="two blocks of two rows, whoever has one"),
        pytest.param(False, None, [(64 + 32, 32 + 32), (32 + 32, 48 + 32), (32 + 32, 48 + 32)], id="equal slices"),
        pytest.param(False, TWICE, [(56 + 12, 24 + 16), (28 + 12, 36 + 12), (24 + 16, 48 + 12)], id="kept twice"),
        pytest.param(False, ONCE, [(56, 24), (28, 36), (24, 48)], id="kept once"),
    ],
)
def test_the_bytes_of_a_bucket_by_hand(
    gathered: bool, portions: Portions | None, wanted: list[tuple[int, int]]
) -> None:
    parts = None if portions is None else share_bucket(TEN, portions, [all_rows(4)] * 2, 3)
    assert bytes_moved(TEN, [2, 1, 1], parts, gathered=gathered) == wanted

"""Sums over virtual nodes have the bits of one tree, whoever carries which of them and however they travel.

No processes: the workers of a job are threads here, and their collectives a table that they all write to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_collectives import ALONE, Seat, Table, take_seats, together
from torch import Tensor

from tiers import examples
from virtualflow.protocol.tree import subtrees
from virtualflow.reduction.accumulation import Accumulator, CanonicalSummation, Tensors
from virtualflow.reduction.buckets import Reach
from virtualflow.reduction.ownership import Row, share_row
from virtualflow.reduction.reducer import Reducer
from virtualflow.reduction.schedule import Choice, Shape, choose_ways
from virtualflow.reduction.settings import Exchange, ReductionSettings
from virtualflow.transport.interface import Collectives

ALIGNMENT = 64
GATHER, SLICES = Exchange("gather", overlap=True), Exchange("reduce-scatter", overlap=True)
"""Every exchange is one gather, or slices are sent to their places and back."""
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4), (65,)]


def canonical_sum(values: Sequence[Tensor], left: int, right: int) -> Tensor:
    """The sum as documented, of values that are all there."""
    if right - left == 1:
        return values[left]
    middle = (left + right) // 2
    return canonical_sum(values, left, middle) + canonical_sum(values, middle, right)


@dataclass
class Problem:
    """What every virtual node contributes to every place."""

    virtual_nodes: int
    templates: list[Tensor]
    contributed: list[Tensors]
    reach: Reach | None = None

    def cut(self, reach: Reach) -> Problem:
        """The same, where backward passes end so that only these virtual nodes contribute to the first places."""
        contributed = [
            [None if place < len(reach) and node not in reach[place] else value for place, value in enumerate(tensors)]
            for node, tensors in enumerate(self.contributed)
        ]
        return Problem(self.virtual_nodes, self.templates, contributed, reach)

    @property
    def present(self) -> list[bool]:
        return [any(node[place] is not None for node in self.contributed) for place in range(len(self.templates))]

    def expected(self, scale: float) -> Tensors:
        result: Tensors = []
        for place, template in enumerate(self.templates):
            values = [node[place] for node in self.contributed]
            dense = [torch.zeros_like(template) if value is None else value for value in values]
            there = any(value is not None for value in values)
            total = canonical_sum(dense, 0, self.virtual_nodes)
            result.append((total if scale == 1.0 else total * scale) if there else None)
        return result

    def parts(self, assigned: Sequence[int]) -> list[tuple[tuple[int, int], Tensors]]:
        accumulator = Accumulator(CanonicalSummation(self.virtual_nodes))
        for node in assigned:
            accumulator.add(node, [None if value is None else value.clone() for value in self.contributed[node]])
        return accumulator.parts


def build(seed: int, virtual_nodes: int, places: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Problem:
    """Numbers of very different sizes, zeros of both signs, strided tensors, and some tensors missing."""
    draw = torch.Generator().manual_seed(seed)

    def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.randn(shape, generator=draw) * 4.0 ** torch.randint(-4, 5, shape, generator=draw)
        kind = torch.randint(0, 8, shape, generator=draw)
        value = torch.where(kind == 0, -0.0, torch.where(kind == 1, 0.0, size)).to(dtype)
        return value.t().contiguous().t() if value.ndim == 2 else value

    templates = [torch.zeros(shape, dtype=dtype) for shape, dtype in places]
    never = [torch.rand((), generator=draw) < 0.15 for _ in places]
    contributed: list[Tensors] = []
    for _ in range(virtual_nodes):
        missing = [skip or torch.rand((), generator=draw) < 0.3 for skip in never]
        contributed.append([None if skip else tensor(*place) for skip, place in zip(missing, places, strict=True)])
    return Problem(virtual_nodes, templates, contributed)


def reduce_on(
    problems: Sequence[tuple[Problem, Sequence[Sequence[int]]]],
    way: Exchange,
    scale: float,
    bucket: int = 128,
    early: Callable[[Problem], list[int]] | None = None,
    one_by_one: bool = True,
) -> list:
    """Reduce the problems one after the other; ``[rank][problem]``.

    With ``early``, the places that it names set out while the last virtual node's tensors come in, in that order; if
    not ``one_by_one``, most of them together.
    """
    size = len(problems[0][1])
    seats = take_seats(size) if size > 1 else [ALONE]

    def work(rank: int) -> list[Tensors]:
        reducer = Reducer(
            CanonicalSummation(problems[0][0].virtual_nodes),
            ReductionSettings(alignment=ALIGNMENT, exchange=way, bucket=bucket),
        )
        found = []
        try:
            for problem, ranges in problems:
                reduced = reduce_one(reducer, seats[rank], problem, ranges, scale, early, one_by_one)
                found.append([None if tensor is None else tensor.clone() for tensor in reduced])
        finally:
            reducer.close()
        return found

    return together(seats, work)


def reduce_one(
    reducer: Reducer,
    seat: Collectives,
    problem: Problem,
    ranges: Sequence[Sequence[int]],
    scale: float,
    early: Callable[[Problem], list[int]] | None,
    one_by_one: bool,
) -> Tensors:
    assigned = ranges[seat.rank]
    if early is None:
        parts = problem.parts(assigned)
        return reducer.reduce(
            seat,
            ranges,
            parts,
            templates=problem.templates,
            present=problem.present,
            scale=scale,
            reach=problem.reach,
        )
    accumulator = Accumulator(CanonicalSummation(problem.virtual_nodes))
    for node in assigned[:-1]:
        accumulator.add(node, [None if value is None else value.clone() for value in problem.contributed[node]])
    places, last = early(problem), [None if v is None else v.clone() for v in problem.contributed[assigned[-1]]]
    untouched = [None if value is None else value.clone() for value in last]
    begun = reducer.begin(
        seat,
        ranges,
        accumulator,
        last=assigned[-1],
        weight=1.0,
        templates=problem.templates,
        places=places,
        scale=scale,
        reach=problem.reach,
    )
    if begun is not None:
        order = sorted(begun.places, key=lambda place: (place * 7 + seat.rank) % 5)  # not the same everywhere
        single = len(order) if one_by_one else len(order) // 3
        given = [place for place in order[:single] if last[place] is not None]
        for count, place in enumerate(given):
            value = last[place]
            assert value is not None
            if count % 2 == 0:
                begun.give(place, value.clone(), own=True).zero_()  # as a second backward pass would change it
            else:
                begun.give(place, value, own=False)
        assert bits(last) == bits(untouched), "they are still the user's"
        begun.give_rest({place: last[place] for place in order if place not in given})
        headers = begun.pipeline.exchange_headers(torch.tensor([seat.rank], dtype=torch.uint8))
        assert headers.tolist() == [[rank] for rank in range(seat.size)]
        found = {place: tensor for bucket in begun.results() for place, tensor in bucket.items()}
        under_way = begun.places
        last = [None if place in under_way else value for place, value in enumerate(last)]
    else:
        found, under_way = {}, frozenset()
    accumulator.add(assigned[-1], last)
    late = [there and place not in under_way for place, there in enumerate(problem.present)]
    reduced = reducer.reduce(
        seat,
        ranges,
        accumulator.parts,
        templates=problem.templates,
        present=late,
        scale=scale,
        reach=problem.reach,
    )
    return [found.get(place, tensor) if problem.present[place] else None for place, tensor in enumerate(reduced)]


def bits(tensors: Tensors) -> list[tuple[object, ...] | None]:
    return [
        None
        if tensor is None
        else (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).tolist())
        for tensor in tensors
    ]


@st.composite
def divisions(draw: st.DrawFn, virtual_nodes: int) -> list[range]:
    workers = draw(st.integers(1, min(virtual_nodes, 6)))
    cuts = sorted(draw(st.sets(st.integers(1, virtual_nodes - 1), min_size=workers - 1, max_size=workers - 1)))
    edges = [0, *cuts, virtual_nodes]
    return [range(left, right) for left, right in pairwise(edges)]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[tuple[Problem, list[range]]], float]:
    virtual_nodes = draw(st.integers(1, 17))
    places = draw(st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=5))
    ranges = draw(divisions(virtual_nodes) if virtual_nodes > 1 else st.just([range(1)]))
    seed = draw(st.integers(0, 2**32))
    scale = draw(st.sampled_from([1.0, 0.5, 1 / 3, 8 / 7]))
    # Twice, since a reducer keeps its buffers.
    return [(build(seed + step, virtual_nodes, places), ranges) for step in range(2)], scale


@pytest.mark.parametrize("way", [GATHER, SLICES], ids=["gathered whole", "by slices"])
@settings(max_examples=examples(80), deadline=None)
@given(job=jobs())
def test_every_worker_gets_the_bits_of_the_canonical_tree(
    way: Exchange, job: tuple[list[tuple[Problem, list[range]]], float]
) -> None:
    problems, scale = job
    expected = [bits(problem.expected(scale)) for problem, _ in problems]
    found = reduce_on(problems, way, scale)
    assert [[bits(tensors) for tensors in results] for results in found] == [expected] * len(found)


@pytest.mark.parametrize("way", [GATHER, SLICES], ids=["gathered whole", "by slices"])
@settings(max_examples=examples(80), deadline=None)
@given(job=jobs(), data=st.data())
def test_virtual_nodes_may_lie_anywhere_and_a_worker_may_have_none(
    way: Exchange, job: tuple[list[tuple[Problem, list[range]]], float], data: st.DataObject
) -> None:
    problems, scale = job
    nodes, workers = problems[0][0].virtual_nodes, data.draw(st.integers(1, 4))
    owners = data.draw(st.lists(st.integers(0, workers - 1), min_size=nodes, max_size=nodes))
    holdings = [[node for node in range(nodes) if owners[node] == rank] for rank in range(workers)]
    found = reduce_on([(problem, holdings) for problem, _ in problems], way, scale)
    expected = [bits(problem.expected(scale)) for problem, _ in problems]
    assert [[bits(tensors) for tensors in results] for results in found] == [expected] * workers


@settings(max_examples=examples(120), deadline=None)
@given(virtual_nodes=st.integers(1, 40), data=st.data())
def test_the_order_in_which_virtual_nodes_come_does_not_matter(virtual_nodes: int, data: st.DataObject) -> None:
    holding = sorted(data.draw(st.sets(st.integers(0, virtual_nodes - 1))))
    values = torch.randn(virtual_nodes, generator=torch.Generator().manual_seed(virtual_nodes))
    accumulator = Accumulator(CanonicalSummation(virtual_nodes))
    for node in data.draw(st.permutations(holding)):
        accumulator.add(node, [values[node].clone()])
    assert [range(*key) for key, _ in accumulator.parts] == subtrees(virtual_nodes, holding)
    for (left, right), (total,) in accumulator.parts:
        assert total is not None
        assert torch.equal(total, canonical_sum(list(values), left, right))


@pytest.mark.parametrize("way", [GATHER, SLICES], ids=["gathered whole", "by slices"])
@settings(max_examples=examples(80), deadline=None)
@given(job=jobs(), data=st.data())
def test_what_sets_out_before_the_last_virtual_node_is_through_has_the_same_bits(
    way: Exchange, job: tuple[list[tuple[Problem, list[range]]], float], data: st.DataObject
) -> None:
    problems, scale = job
    count = len(problems[0][0].templates)
    chosen = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count))
    bucket, one_by_one = data.draw(st.sampled_from([1, 64, 1 << 20])), data.draw(st.booleans())
    expected = [bits(problem.expected(scale)) for problem, _ in problems]
    found = reduce_on(problems, way, scale, bucket, lambda problem: chosen, one_by_one)
    assert [[bits(tensors) for tensors in results] for results in found] == [expected] * len(found)


@pytest.mark.parametrize("way", [GATHER, SLICES], ids=["gathered whole", "by slices"])
def test_what_has_set_out_can_be_read_again_where_passes_have_got_to(way: Exchange) -> None:
    """As a worker does whose attempt is aborted and who keeps what it has summed up."""
    virtual_nodes, ranges = 7, [range(3), range(3, 7)]
    whole = build(5, virtual_nodes, [((65,), torch.float32), ((0,), torch.float32), ((3, 5), torch.float32)])
    for node in whole.contributed:
        node[:] = [
            torch.ones_like(like) if value is None else value for value, like in zip(node, whole.templates, strict=True)
        ]
    problem = whole.cut((frozenset({1, 4}), frozenset({6}), frozenset({0})))
    seats = take_seats(2)

    def work(rank: int) -> tuple[list[Tensors], list[Tensors]]:
        own, settings = ranges[rank], ReductionSettings(alignment=ALIGNMENT, exchange=way, bucket=128)
        reducer = Reducer(CanonicalSummation(virtual_nodes), settings)
        accumulator = Accumulator(CanonicalSummation(virtual_nodes))
        for node in own[:-1]:
            accumulator.add(node, [None if value is None else value.clone() for value in problem.contributed[node]])
        last = [None if value is None else value.clone() for value in problem.contributed[own[-1]]]
        options = {"weight": 1.0, "templates": problem.templates, "places": [2, 1, 0], "scale": None}
        early = reducer.begin(seats[rank], ranges, accumulator, last=own[-1], reach=problem.reach, **options)
        assert early is not None
        early.give_rest(dict(enumerate(last)))
        early.pipeline.exchange_headers(torch.zeros(1, dtype=torch.uint8))
        rows = [[row.get(place) for place in range(3)] for row in early.rows()]
        list(early.results())
        reducer.close()
        return rows, [tensors for _, tensors in problem.parts(own)]

    for result in together(seats, work):
        assert result is not None
        for row, expected in zip(*result, strict=True):
            zeros = [torch.zeros_like(like) for like in problem.templates]
            assert bits([zero if t is None else t + 0.0 for t, zero in zip(row, zeros, strict=True)]) == bits(
                [zero if t is None else t + 0.0 for t, zero in zip(expected, zeros, strict=True)]
            )
            assert way is GATHER or [t is None for t in row] == [t is None for t in expected]


@pytest.mark.parametrize("sharded", [False, True], ids=["all need all", "sharded"])
def test_messages_take_no_more_memory_where_backward_passes_end_early(sharded: bool) -> None:
    """Of three virtual nodes one reaches all blocks, one two thirds and one a third, in turns."""
    numel, blocks, seats = 4096, 6, take_seats(3)
    templates = [torch.empty(numel) for _ in range(blocks)]
    portions = (
        share_row(Row((numel,) * blocks, (1,) * blocks, (1,) * blocks), 3, copies=1).portions if sharded else None
    )

    def work(rank: int) -> list[list[int]]:
        taken = []
        for cut in (False, True):
            reducer = Reducer(CanonicalSummation(3), ReductionSettings(exchange=SLICES, bucket=8 * numel))
            reducer.share(portions)
            taken.append([])
            for step in range(6):
                deepest = [(node + step) % 3 * 2 for node in range(3)]
                reach = [frozenset(node for node in range(3) if block >= deepest[node]) for block in range(blocks)]
                row = [torch.ones(numel) if not cut or rank in nodes else None for nodes in reach]
                of_step = {"reach": tuple(reach)} if cut else {}
                parts: list[tuple[tuple[int, int], Tensors]] = [((rank, rank + 1), row)]
                reducer.reduce(
                    seats[rank],
                    [range(node, node + 1) for node in range(3)],
                    parts,
                    templates=templates,
                    present=[True] * blocks,
                    scale=1.0,
                    **of_step,
                )
                taken[-1].append(sum(kept.nbytes for kept in reducer._buffers._kept.values()))
        return taken

    for found in together(seats, work):
        assert found is not None
        whole, cut = found
        assert max(cut) <= 1.1 * max(whole) <= 1.2 * 2 * 4 * numel * blocks


@pytest.mark.parametrize("way", [GATHER, SLICES], ids=["gathered whole", "by slices"])
def test_a_tensor_may_become_another_one_from_step_to_step(way: Exchange) -> None:
    ranges, layouts = [range(2), range(2, 4)], [((7,), torch.float32), ((65,), torch.float32), ((65,), torch.float64)]
    problems = [build(1, 4, [layout, ((3,), torch.float32)]) for layout in layouts]
    found = reduce_on([(problem, ranges) for problem in problems], way, 1.0)
    for results in found:
        assert [bits(tensors) for tensors in results] == [bits(problem.expected(1.0)) for problem in problems]


def test_a_script_that_never_comes_back_to_a_set_of_tensors_fills_no_memory() -> None:
    chosen: list[int] = []

    def choose(shapes: Sequence[Shape], *others: Any) -> list[Choice]:
        chosen.append(shapes[0].size // 4)
        return choose_ways(shapes, *others)

    reducer = Reducer(CanonicalSummation(2), ReductionSettings(exchange=SLICES), choose)
    for numel in range(2, 200):
        for each in (1, numel):
            reducer.overlaps(Seat(Table(2), 0), [[0], [1]], [torch.empty(each)])
    assert len(reducer._schedules) == 64
    assert chosen == list(range(1, 200)), "what is used again and again is chosen once"
    reducer.close()


def test_large_tensors_travel_in_slices_and_small_ones_whole() -> None:
    trips, settings = [], ReductionSettings(bucket=1 << 30)
    for count in (1_000, 1_000_000):
        problem, seats = build(1, 4, [((count,), torch.float32)]), take_seats(2)

        def work(rank: int, problem: Problem = problem, seats: Sequence[Seat] = seats) -> None:
            reducer = Reducer(CanonicalSummation(4), settings)
            reduce_one(reducer, seats[rank], problem, [range(2), range(2, 4)], 1.0, None, one_by_one=True)

        together(seats, work)
        trips.append([seat.operations for seat in seats])
    assert trips == [[1, 1], [2, 2]]


@pytest.mark.parametrize("workers", [1, 2], ids=["alone", "two workers"])
@pytest.mark.parametrize(
    ("nodes", "sign"),
    [
        pytest.param([[-0.0], [-0.0]], -1.0, id="minus zeros alone stay so"),
        pytest.param([[-0.0], [0.0]], 1.0, id="with a plus zero they do not"),
        pytest.param([[-0.0], None], 1.0, id="what is missing on the right counts as plus zero"),
        pytest.param([None, [-0.0]], 1.0, id="what is missing on the left counts as plus zero"),
        pytest.param([[-0.0], [-0.0], None, None], 1.0, id="a missing subtree counts as plus zero"),
    ],
)
def test_a_zero_has_the_sign_that_the_rule_gives_it(nodes: list[list[float] | None], sign: float, workers: int) -> None:
    contributed: list[Tensors] = [[None if node is None else torch.tensor(node)] for node in nodes]
    whole = Problem(len(nodes), [torch.zeros(1)], contributed)
    cut = whole.cut((frozenset(number for number, node in enumerate(nodes) if node is not None),))
    half = len(nodes) // 2
    ranges = [range(len(nodes))] if workers == 1 else [range(half), range(half, len(nodes))]
    for way, problem in product((GATHER, SLICES), (whole, cut)):
        found = reduce_on([(problem, ranges)], way, 1.0)
        for ((tensor,),) in found:
            assert tensor is not None
            assert math.copysign(1.0, float(tensor)) == sign


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_factor_is_not_rounded_to_the_type_of_the_tensors(dtype: torch.dtype) -> None:
    scale = 96 / 95
    value = torch.linspace(1, 200, 300).to(dtype)
    exact = (value.float() * scale).to(dtype)
    assert not torch.equal(exact, value * torch.tensor(scale, dtype=dtype)), "otherwise this shows nothing"
    problem = Problem(2, [value], [[value], [torch.zeros_like(value)]])
    for ranges in ([range(2)], [range(1), range(1, 2)]):
        found = reduce_on([(problem, ranges)], SLICES, scale)
        assert [bits(tensors) for (tensors,) in found] == [bits([exact])] * len(found)


@given(virtual_nodes=st.integers(1, 200), data=st.data())
def test_an_accumulator_holds_no_more_than_the_subtrees_of_its_range(virtual_nodes: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, virtual_nodes - 1))
    last = data.draw(st.integers(first + 1, virtual_nodes))
    accumulator = Accumulator(CanonicalSummation(virtual_nodes))
    most = 0
    for node in range(first, last):
        accumulator.add(node, [torch.tensor(1.0, dtype=torch.float64), None])
        most = max(most, len(accumulator.parts))
    assert [range(*node) for node, _ in accumulator.parts] == subtrees(virtual_nodes, range(first, last))
    assert [float(total) for _, (total, _) in accumulator.parts] == [b - a for (a, b), _ in accumulator.parts]
    assert most <= max(1, 2 * math.ceil(math.log2(virtual_nodes)))

"""Every legal schedule gives one digest, and a torn exchange never a wrong bit: schedules are drawn at random.

The workers are threads over collectives in memory (``thread_collectives``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_broken_collectives import FEWER, NODES, PLACES, RANGES, SCALE, all_there, attempt
from test_reducer import ALIGNMENT, DTYPES, Problem, bits, build, divisions, reduce_one
from thread_collectives import Seat, Table, take_seats, together
from torch import Tensor

from tiers import examples
from virtualflow.reduction.accumulation import CanonicalSummation, Tensors
from virtualflow.reduction.ownership import Portion, Portions, Row, share_row
from virtualflow.reduction.reducer import Reducer
from virtualflow.reduction.schedule import Choice, Choose, Shape, Terms, Way, predict
from virtualflow.reduction.settings import Exchange, ProbeSettings, ReductionSettings

SETTINGS = ReductionSettings(alignment=ALIGNMENT, bucket=128)
How = Literal["before", "after"]


def drawn(seed: int, taken: set[tuple[Way, bool]] | None = None) -> Choose:
    """Choose any way for each bucket, the same on all workers."""

    def choose(shapes: Sequence[Shape], final: bool, terms: Terms, _: ReductionSettings) -> list[Choice]:
        choices = []
        for index, shape in enumerate(shapes):
            draw = random.Random(f"{seed} {index} {shape} {final} {terms.exchange.bucket_bytes}")
            way, overlapped = draw.choice(list(Way)), final and draw.random() < 0.5
            if taken is not None:
                taken.add((way, overlapped))
            seconds = predict(way, shape, terms.network)
            choices.append(Choice(way, seconds, "drawn", overlapped=overlapped))
        return choices

    return choose


def portions_of(problem: Problem, size: int, seed: int) -> Portions:
    """Who keeps the state of what, and so needs its sum, if parameters are cut anywhere, once or twice."""
    numels = tuple(template.numel() for template in problem.templates)
    row, draw = Row(numels, (1,) * len(numels), (1,) * len(numels)), random.Random(seed)
    return share_row(row, size, draw.choice((1, 2)), draw.choice((None, 3, 20))).portions


def kept_by(rank: int, tensor: Tensor | None, portions: Sequence[Portion]) -> Tensor | None:
    """What a worker gets of a sum."""
    pieces = [(begin, end) for begin, end, keepers in portions if rank in keepers]
    if tensor is None or not pieces:
        return None
    if sum(end - begin for begin, end in pieces) == tensor.numel():
        return tensor
    return torch.cat([tensor.reshape(-1)[begin:end] for begin, end in pieces])


def reduce_all(
    problem: Problem,
    ranges: Sequence[Sequence[int]],
    scale: float,
    chooses: Sequence[Choose],
    early: Callable[[Problem], list[int]] | None,
    portions: Portions | None = None,
) -> list[list[Tensors]]:
    """Reduce it by one schedule after the other; ``[schedule][rank]``."""
    size = len(ranges)
    seats = take_seats(size)

    def work(rank: int) -> list[Tensors]:
        found = []
        for choose in chooses:
            reducer = Reducer(CanonicalSummation(problem.virtual_nodes), SETTINGS, choose=choose)
            reducer.share(portions)
            try:
                reduced = reduce_one(reducer, seats[rank], problem, ranges, scale, early, one_by_one=True)
                found.append([None if tensor is None else tensor.clone() for tensor in reduced])
            finally:
                reducer.close()
        return found

    of_workers = [found for found in together(seats, work) if found is not None]
    assert len(of_workers) == size
    return [list(one) for one in zip(*of_workers, strict=True)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, list[range], float]:
    virtual_nodes = draw(st.integers(1, 12))
    shapes = st.sampled_from([(), (0,), (7,), (3, 5), (65,)])
    places = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=5))
    several = divisions(max(2, virtual_nodes)).filter(lambda ranges: len(ranges) <= 5)
    ranges = [range(1)] if virtual_nodes == 1 else draw(several)
    scale = draw(st.sampled_from([1.0, 0.5, 1 / 3, 8 / 7]))
    return build(draw(st.integers(0, 1 << 16)), virtual_nodes, places), ranges, scale


def every_place(problem: Problem) -> list[int]:
    """In the order in which a backward pass finishes them."""
    return list(range(len(problem.templates)))[::-1]


@pytest.mark.parametrize("early", [False, True], ids=["behind the headers", "beside the backward pass"])
@settings(max_examples=examples(60), deadline=None)
@given(drawn_problem=problems(), seed=st.integers(0, 1 << 16))
def test_every_legal_schedule_gives_the_bits_of_the_canonical_tree(
    early: bool, drawn_problem: tuple[Problem, list[range], float], seed: int
) -> None:
    problem, ranges, scale = drawn_problem
    wanted = bits(problem.expected(scale))
    order = every_place if early else None
    found = reduce_all(problem, ranges, scale, [drawn(seed + turn) for turn in range(3)], order)
    assert [[bits(tensors) for tensors in of_workers] for of_workers in found] == [[wanted] * len(ranges)] * 3


@settings(max_examples=examples(40), deadline=None)
@given(drawn_problem=problems(), seed=st.integers(0, 1 << 16))
def test_owners_of_a_sharded_optimizer_get_the_same_bits_by_every_legal_schedule(
    drawn_problem: tuple[Problem, list[range], float], seed: int
) -> None:
    problem, ranges, scale = drawn_problem
    if len(ranges) == 1:
        return
    wanted = problem.expected(scale)
    portions = portions_of(problem, len(ranges), seed)
    for of_workers in reduce_all(problem, ranges, scale, [drawn(seed), drawn(seed + 1)], all_there, portions):
        for rank, tensors in enumerate(of_workers):
            kept = [kept_by(rank, tensor, of) for tensor, of in zip(wanted, portions, strict=True)]
            assert bits(tensors) == bits(kept)


def reached(problem: Problem, seed: int) -> Problem:
    """The same problem where backward passes end early: at some places of the first ones, for some virtual nodes."""
    draw, nodes = random.Random(seed), range(problem.virtual_nodes)
    classes = [frozenset(node for node in nodes if draw.random() < share) for share in (0.2, 0.5, 1.0)]
    return problem.cut(tuple(draw.choice(classes) for _ in range(draw.randint(0, len(problem.templates)))))


@pytest.mark.parametrize("early", [False, True], ids=["behind the headers", "beside the backward pass"])
@pytest.mark.parametrize("sharded", [False, True], ids=["all need all", "sharded"])
@settings(max_examples=examples(40), deadline=None)
@given(drawn_problem=problems(), seed=st.integers(0, 1 << 16))
def test_rows_that_no_backward_pass_has_got_to_leave_the_bits_as_they_are(
    sharded: bool, early: bool, drawn_problem: tuple[Problem, list[range], float], seed: int
) -> None:
    whole, ranges, scale = drawn_problem
    problem, size = reached(whole, seed), len(ranges)
    wanted, order = problem.expected(scale), every_place if early else None
    portions = portions_of(problem, size, seed) if sharded and size > 1 else None
    for of_workers in reduce_all(problem, ranges, scale, [drawn(seed), drawn(seed + 1)], order, portions):
        for rank, tensors in enumerate(of_workers):
            kept = wanted if portions is None else [kept_by(rank, *one) for one in zip(wanted, portions, strict=True)]
            assert bits(tensors) == bits(kept)


def test_schedules_are_drawn_from_all_that_are_legal() -> None:
    problem, taken = build(3, NODES, PLACES), set[tuple[Way, bool]]()
    reduce_all(problem, RANGES, SCALE, [drawn(seed, taken) for seed in range(30)], all_there)
    assert taken == set(product(Way, (False, True)))


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("early", [False, True], ids=["behind the headers", "beside the backward pass"])
@pytest.mark.parametrize("seed", range(2))
def test_whichever_stage_breaks_no_sum_is_wrong_and_another_schedule_takes_over(
    early: bool, how: How, seed: int
) -> None:
    problem = build(3, NODES, PLACES)
    wanted = bits(problem.expected(SCALE))

    def reducers(turn: int, count: int) -> list[Reducer]:
        choose = drawn(100 * seed + turn)
        return [Reducer(CanonicalSummation(NODES), SETTINGS, choose=choose) for _ in range(count)]

    whole = reducers(0, 3)
    _, operations = attempt(whole, problem, RANGES, early)
    for victim, count in enumerate(operations):
        for number in range(1, count + 1):
            for reducer in whole:
                reducer.forget()
            found, _ = attempt(whole, problem, RANGES, early, (victim, number, how))
            assert found[victim] is None
            assert all(tensors is None or bits(tensors) == wanted for tensors in found)
            survivors = reducers(number, 2)
            repeated, _ = attempt(survivors, problem, FEWER, early)
            assert [bits(tensors or []) for tensors in repeated] == [wanted] * 2
            for reducer in survivors:
                reducer.close()
    for reducer in whole:
        reducer.close()


WISH, ENOUGH = Exchange(bucket_bytes=1 << 12), 10_000


def agree(
    reducers: Sequence[Reducer],
    ranges: Sequence[range],
    count: int = ENOUGH,
    failing: tuple[int, int, How] | None = None,
) -> tuple[list[Terms | None], list[int]]:
    """What members with so many parameters agree on, ``None``: nothing; and how many operations each began."""
    problem, table = build(1, NODES, [((count,), torch.float32)]), Table(len(ranges))
    seats = [Seat(table, rank) for rank in range(len(ranges))]
    if failing is not None:
        rank, seats[rank].fails_at, seats[rank].how = failing

    def work(rank: int) -> Terms:
        try:
            reducers[rank].agree(seats[rank], WISH, ranges, problem.templates, spare=True)
        finally:
            reducers[rank].close()
        return reducers[rank].terms

    return together(seats, work), [seat.operations for seat in seats]


def fresh(count: int) -> list[Reducer]:
    """Reducers that have measured nothing yet."""
    probe = ProbeSettings(rounds=2, large=1 << 12, added=1 << 12, worthwhile=1 << 14)
    settings = ReductionSettings(exchange=Exchange("gather"), probe=probe)
    return [Reducer(CanonicalSummation(NODES), settings) for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "measured"), [pytest.param(ENOUGH, True, id="enough"), pytest.param(10, False, id="too little to weigh")]
)
def test_members_of_a_generation_agree_on_what_they_have_measured(count: int, measured: bool) -> None:
    terms, _ = agree(fresh(3), RANGES, count)
    assert terms == terms[:1] * 3
    assert terms[0] is not None
    assert terms[0].exchange == WISH, "the first member's wish holds for all"
    assert terms[0].measured is measured
    assert (terms[0].network != SETTINGS.network) is measured


def test_what_was_measured_holds_until_somebody_joins() -> None:
    reducers = fresh(3)
    before, most = agree(reducers, RANGES)
    after, fewest = agree(reducers[1:], FEWER)
    assert after == before[1:]
    assert max(fewest) == 1 < min(most)
    joined, operations = agree([*reducers[1:], *fresh(1)], RANGES)
    assert joined == joined[:1] * 3
    assert operations == most


@pytest.mark.parametrize("how", ["before", "after"])
def test_wherever_agreeing_breaks_whoever_enters_has_agreed_with_those_who_do(how: How) -> None:
    _, operations = agree(fresh(3), RANGES)
    for victim, count in enumerate(operations):
        assert count > 1
        for number in range(1, count + 1):
            terms, _ = agree(fresh(3), RANGES, failing=(victim, number, how))
            assert terms[victim] is None
            assert len({told for told in terms if told is not None}) <= 1

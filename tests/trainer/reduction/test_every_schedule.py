"""Every legal schedule gives one digest, and a torn exchange never a wrong bit: schedules are drawn at random.

The workers are threads over collectives in memory (``thread_collectives``).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_broken_collectives import FEWER, NODES, PLACES, RANGES, SCALE, all_there, attempt
from test_reducer import ALIGNMENT, DTYPES, Problem, bits, build, divisions, reduce_one
from thread_collectives import Seat, Table
from torch import Tensor, nn

from tiers import examples
from virtualflow.protocol.messages import NO_GENERATION
from virtualflow.reduction.accumulation import Tensors
from virtualflow.reduction.cost import Shape, predict
from virtualflow.reduction.ownership import plan_owners
from virtualflow.reduction.program import Facts, legal_programs
from virtualflow.reduction.reducer import Reducer
from virtualflow.reduction.schedule import Choice, Choose, Terms
from virtualflow.reduction.settings import Exchange, ProbeSettings, ReductionSettings
from virtualflow.reduction.summation import CanonicalSummation
from virtualflow.state.settings import TransferSettings
from virtualflow.step import OptimizerOptions, Update
from virtualflow.transport.interface import ALONE, Collectives

SETTINGS = ReductionSettings(alignment=ALIGNMENT, bucket=128)
How = Literal["before", "after"]


def drawn(seed: int, taken: set[str] | None = None) -> Choose:
    """Choose any legal program for each bucket, the same on all workers."""

    def choose(shapes: Sequence[Shape], facts: Facts, terms: Terms, _: ReductionSettings) -> list[Choice]:
        choices = []
        for index, shape in enumerate(shapes):
            draw = random.Random(f"{seed} {index} {shape} {facts} {terms.exchange.bucket_bytes}")
            program = draw.choice(legal_programs(facts))
            if taken is not None:
                taken.add(str(program))
            choices.append(Choice(program, predict(program, shape, terms.network), "drawn"))
        return choices

    return choose


def reduce_all(
    problem: Problem,
    ranges: Sequence[Sequence[int]],
    scale: float,
    chooses: Sequence[Choose],
    early: Callable[[Problem], list[int]] | None,
    sharded: bool = False,
) -> list[list[Tensors]]:
    """Reduce it by one schedule after the other; ``[schedule][rank]``."""
    size = len(ranges)
    table = Table(size)
    owners = plan_owners([template.numel() for template in problem.templates], size)

    def work(rank: int) -> list[Tensors]:
        seat: Collectives = Seat(table, rank) if size > 1 else ALONE
        found = []
        for choose in chooses:
            reducer = Reducer(CanonicalSummation(problem.virtual_nodes), SETTINGS, choose=choose)
            if sharded:
                reducer.share(owners)
            try:
                reduced = reduce_one(reducer, seat, problem, ranges, scale, early, one_by_one=True)
                found.append([None if tensor is None else tensor.clone() for tensor in reduced])
            except BaseException:
                table.abort()
                raise
            finally:
                reducer.close()
        return found

    with ThreadPoolExecutor(size) as pool:
        of_workers = list(pool.map(work, range(size)))
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


@pytest.mark.parametrize("early", [False, True], ids=["behind the headers", "beside the backward pass"])
@settings(max_examples=examples(60), deadline=None)
@given(drawn_problem=problems(), seed=st.integers(0, 1 << 16))
def test_every_legal_schedule_gives_the_bits_of_the_canonical_tree(
    early: bool, drawn_problem: tuple[Problem, list[range], float], seed: int
) -> None:
    problem, ranges, scale = drawn_problem
    wanted = bits(problem.expected(scale))
    order = (lambda problem: list(range(len(problem.templates)))[::-1]) if early else None
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
    wanted = bits(problem.expected(scale))
    owners = plan_owners([template.numel() for template in problem.templates], len(ranges))
    for of_workers in reduce_all(problem, ranges, scale, [drawn(seed), drawn(seed + 1)], all_there, sharded=True):
        for rank, tensors in enumerate(of_workers):
            assert bits(tensors) == [value if rank in owners[place] else None for place, value in enumerate(wanted)]


def test_schedules_are_drawn_from_all_that_are_legal() -> None:
    problem, taken = build(3, NODES, PLACES), set[str]()
    reduce_all(problem, RANGES, SCALE, [drawn(seed, taken) for seed in range(30)], all_there)
    legal = {str(program) for facts in (Facts(3), Facts(3, final=True)) for program in legal_programs(facts)}
    assert taken == legal
    assert len(legal) >= 8


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


@pytest.mark.parametrize(
    ("count", "measured"), [pytest.param(10_000, True, id="enough"), pytest.param(10, False, id="too little to weigh")]
)
def test_members_of_a_generation_agree_on_what_they_have_measured(count: int, measured: bool) -> None:
    ranges = [range(2), range(2, 5), range(5, 6)]
    problem, table = build(1, 6, [((count,), torch.float32)]), Table(3)
    wish = Exchange(bucket_bytes=1 << 12)

    def work(rank: int) -> Terms:
        settings = ReductionSettings(
            exchange=Exchange("gather"), probe=ProbeSettings(rounds=2, large=1 << 12, added=1 << 12)
        )
        reducer = Reducer(CanonicalSummation(6), settings)
        reducer.agree(Seat(table, rank), wish, ranges, problem.templates)
        reducer.close()
        return reducer.terms

    with ThreadPoolExecutor(3) as pool:
        terms = list(pool.map(work, range(3)))
    assert terms == terms[:1] * 3
    assert terms[0].exchange == wish, "the first member's wish holds for all"
    assert terms[0].measured is measured
    assert (terms[0].network != ReductionSettings().network) is measured


# --- whole steps ------------------------------------------------------------------------------------------------------

STEPS, SAMPLES = 3, 2


class Mixed(nn.Module):
    """Small parameters of several types and a buffer, some of which do not get a gradient in every step."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(a, b, dtype=torch.float64 if a % 2 else None) for a, b in pairwise(widths)]
        )
        self.skipped = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.norm = nn.BatchNorm1d(widths[-1])

    def forward(self, x: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        loss = self.norm(x.float()).square().mean()
        return loss + self.skipped.sum().float() if step == 2 else loss


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
}


@dataclass(frozen=True)
class Training:
    """A small training."""

    virtual_nodes: int
    widths: tuple[int, ...]
    optimizer: str
    clip_norm: float | None
    clip_value: float | None
    known: bool
    """Whether it is known before the headers how many samples a step has."""


def train(training: Training, ranges: Sequence[range], choose: Choose, sharded: bool) -> list[list[object]]:
    """The bits of each worker's parameters and buffers after some steps, by another schedule in each."""
    table = Table(len(ranges))
    torch.manual_seed(7)
    fresh = Mixed(training.widths)

    def work(rank: int) -> list[object]:
        model, seat = copy.deepcopy(fresh), Seat(table, rank) if len(ranges) > 1 else ALONE
        options = OptimizerOptions(
            OPTIMIZERS[training.optimizer](model),
            clip_norm=training.clip_norm,
            clip_value=training.clip_value,
            sharded=sharded,
        )
        summation, transfer = CanonicalSummation(training.virtual_nodes), TransferSettings()
        update = Update(
            model, options, summation, micro_batch=SAMPLES, reduction=SETTINGS, transfer=transfer, choose=choose
        )
        if update.shards is not None:
            update.shards.enter(rank, len(ranges))
        update.enter()
        try:
            for step in range(1, STEPS + 1):
                update.agree(seat, Exchange(bucket_bytes=60 + step), ranges)
                take_step(update, model, seat, ranges, training, step)
        except BaseException:
            table.abort()
            raise
        finally:
            update.close()
        return [value.reshape(-1).view(torch.uint8).tolist() for value in model.state_dict().values()]

    with ThreadPoolExecutor(len(ranges)) as pool:
        return list(pool.map(work, range(len(ranges))))


def take_step(
    update: Update, model: nn.Module, seat: Collectives, ranges: Sequence[range], training: Training, step: int
) -> None:
    """Compute the own virtual nodes of a step, exchange, and apply."""
    mine = ranges[seat.rank]
    update.begin(mine, max(map(len, ranges)))
    for node in mine:
        if node == mine[-1]:
            samples = training.virtual_nodes * SAMPLES if training.known else None
            update.sync.expect_last(seat, ranges, SAMPLES, samples)
        draw = torch.Generator().manual_seed(100 * step + node)
        model(torch.randn(SAMPLES, training.widths[0], generator=draw), step).backward()
        update.sync.take(SAMPLES, {})
    update.apply(update.synchronize(seat, ranges, step, NO_GENERATION, more=True), epoch_ends=False)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.builds(
        Training,
        st.integers(2, 9),
        st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple),
        st.sampled_from(sorted(OPTIMIZERS)),
        st.sampled_from([None, 0.01]),
        st.sampled_from([None, 0.001]),
        st.booleans(),
    ),
    st.booleans(),
    st.integers(0, 1 << 16),
    st.data(),
)
def test_every_schedule_trains_to_one_digest(training: Training, sharded: bool, seed: int, data: st.DataObject) -> None:
    ranges = data.draw(divisions(training.virtual_nodes).filter(lambda ranges: len(ranges) <= 5))
    (reference,) = train(training, [range(training.virtual_nodes)], drawn(seed), sharded=False)
    for found in train(training, ranges, drawn(seed), sharded=sharded):
        assert found == reference

"""Trainings by schedules that are drawn at random, through kills and joins: one digest, and only the lost is repeated.

The workers are threads over collectives in memory (``thread_collectives``). Before every step some may join or leave;
in a step one may be lost at any operation of the exchange, and the others go on with what they have.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_every_schedule import drawn
from test_reducer import ALIGNMENT, divisions
from thread_collectives import take_seats, together
from torch import Tensor, nn

from tiers import examples
from virtualflow.protocol.messages import NO_GENERATION
from virtualflow.reduction import Choose, choose_summation
from virtualflow.reduction.settings import Exchange, ReductionSettings
from virtualflow.step import OptimizerOptions, Reduced, Update
from virtualflow.transport.interface import Collectives
from virtualflow.worker.repair import Remains, plan_repair

STEPS, SAMPLES, WIDTH, MOST_WORKERS = 4, 2, 4, 5
SETTINGS = ReductionSettings(alignment=ALIGNMENT, one_by_one=0)


class Mixed(nn.Module):
    """Small parameters of several types and a buffer, some of which do not get a gradient in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(a, b, dtype=torch.float64 if a % 2 else None) for a, b in pairwise((WIDTH, 3, 5))]
        )
        self.skipped = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        loss = self.norm(x.float()).square().mean()
        return loss + self.skipped.sum().float() if step == 2 else loss


class Tied(nn.Module):
    """A parameter that is used twice, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, step: int) -> Tensor:
        tokens = (x * 100).long().abs() % 7
        hidden = self.norm(self.frozen(self.embedding(tokens)))
        return nn.functional.cross_entropy((hidden @ self.embedding.weight.T).flatten(0, 1), tokens.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {"mixed": Mixed, "tied": Tied}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}
if hasattr(torch.optim, "Adafactor"):
    OPTIMIZERS["adafactor"] = lambda parameters: torch.optim.Adafactor(parameters, 0.01)
ELEMENTWISE = ("adamw", "sgd")


@dataclass(frozen=True)
class Training:
    """A small training."""

    virtual_nodes: int
    model: str
    optimizer: str
    clip_norm: float | None
    clip_value: float | None
    scaled: bool
    """Whether the loss is scaled."""
    known: bool
    """Whether it is known before the headers how many samples a step has."""
    sharded: bool = False
    dtype: torch.dtype | None = None
    """In which gradients are summed up, if not in their own."""


@dataclass(frozen=True)
class Tear:
    """A worker is lost at an operation of a step, before it or after it."""

    victim: int
    number: int
    how: Literal["before", "after"]


@dataclass(frozen=True)
class Turn:
    """How a step is made."""

    ranges: tuple[range, ...]
    bucket: int
    """Bytes."""
    tear: Tear | None = None


class Member:
    """One worker; with what it has computed: how often each (step, virtual node)."""

    def __init__(self, training: Training, choose: Choose, donor: Member | None = None) -> None:
        torch.manual_seed(7)
        self.training, self.choose, self.model = training, choose, MODELS[training.model]()
        self.optimizer = OPTIMIZERS[training.optimizer]([p for p in self.model.parameters() if p.requires_grad])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.scaler = scaler if training.scaled else None
        self.update = Update(
            self.model,
            OptimizerOptions(
                self.optimizer,
                scaler=self.scaler,
                clip_norm=training.clip_norm,
                clip_value=training.clip_value,
                shard_copies=2 * training.sharded,
            ),
            choose_summation(training.virtual_nodes, "bitwise", training.dtype),
            micro_batch=SAMPLES,
            reduction=SETTINGS,
            choose=choose,
        )
        self.computed: Counter[tuple[int, int]] = Counter()
        if donor is not None:
            self.take_over(donor)

    def take_over(self, donor: Member) -> None:
        """Copy the state of another one."""
        self.model.load_state_dict(copy.deepcopy(donor.model.state_dict()))
        self.optimizer.load_state_dict(copy.deepcopy(donor.optimizer.state_dict()))
        if self.scaler is not None and donor.scaler is not None:
            self.scaler.load_state_dict(donor.scaler.state_dict())
        self.update.sync.settle(donor.update.sync.settled)

    def enter(self, seat: Collectives, ranges: Sequence[range], bucket: int) -> None:
        """A generation begins."""
        self.update.agree(seat, Exchange(bucket_bytes=bucket), ranges)
        if self.update.shards is not None:
            self.update.shards.enter(seat.rank, seat.size)
        self.update.enter()

    def attempt(
        self,
        seat: Collectives,
        step: int,
        holdings: Sequence[Sequence[int]],
        computes: Sequence[int],
        *,
        repairs: bool = False,
    ) -> Reduced:
        """Compute these virtual nodes of a step, and exchange."""
        training, update = self.training, self.update
        update.begin(computes, max(map(len, holdings)), resumes=repairs)
        for node in computes:
            if node == computes[-1]:
                samples = training.virtual_nodes * SAMPLES if training.known else None
                update.sync.expect_last(seat, holdings, SAMPLES, samples)
            else:
                update.sync.expect(SAMPLES)
            draw = torch.Generator().manual_seed(100 * step + node)
            loss = self.model(torch.randn(SAMPLES, WIDTH, generator=draw), step)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            self.computed[step, node] += 1
            update.sync.take(SAMPLES, {})
        return update.synchronize(seat, holdings, step, NO_GENERATION, more=True, repairs=repairs)

    @property
    def state(self) -> list[object]:
        """The bits of the model."""
        return [value.reshape(-1).view(torch.uint8).tolist() for value in self.model.state_dict().values()]


def let(members: Sequence[Member], tear: Tear | None, work: Callable[[Member, Any], Any]) -> list[Any]:
    """Let threads do it; ``None`` for those who lost somebody."""
    seats = take_seats(len(members))
    if tear is not None:
        seats[tear.victim].fails_at, seats[tear.victim].how = tear.number, tear.how
    return together(seats, lambda rank: work(members[rank], seats[rank]))


def enter(members: Sequence[Member], ranges: Sequence[range], bucket: int) -> None:
    """All of them enter a generation."""
    let(members, None, lambda member, seat: member.enter(seat, ranges, bucket))


def take_step(members: list[Member], step: int, turn: Turn) -> list[Member]:
    """Make a step, whoever is lost in it; those who are left."""
    ranges = turn.ranges
    found = let(members, turn.tear, lambda member, seat: member.attempt(seat, step, ranges, ranges[seat.rank]))
    if turn.tear is not None and None in found:
        victim = turn.tear.victim
        members[victim].update.close()
        left = [
            (member, reduced)
            for rank, (member, reduced) in enumerate(zip(members, found, strict=True))
            if rank != victim
        ]
        members = [member for member, _ in left]
        found = [reduced for _, reduced in left]
        if not any(found):
            found = repeat(members, step, turn)
            computed = sum((member.computed for member in members), Counter())
            again = {node for node in range(ranges[-1].stop) if computed[step, node] > 1}
            assert again == set(), "what the survivors had computed they keep"
    donors = [member for member, reduced in zip(members, found, strict=True) if reduced is not None]
    for member, reduced in zip(members, found, strict=True):
        if reduced is not None:
            member.update.apply(reduced, epoch_ends=False)
    for member, reduced in zip(members, found, strict=True):
        if reduced is None:  # the step counts for somebody, and so for all
            member.update.abandon()
            member.take_over(donors[0])
    return members


def repeat(members: Sequence[Member], step: int, turn: Turn) -> list[Reduced]:
    """Attempt a step again in another generation, with what these members have kept."""
    nodes = turn.ranges[-1].stop
    cuts = [nodes * rank // len(members) for rank in range(len(members) + 1)]
    ranges = [range(first, last) for first, last in pairwise(cuts)]
    for member in members:
        member.update.abandon(keep=True)
    repair = plan_repair([Remains(frozenset(member.update.sync.kept)) for member in members], ranges)
    assert repair is not None
    enter(members, ranges, turn.bucket + 1)
    found = let(
        members,
        None,
        lambda member, seat: member.attempt(seat, step, repair.holdings, repair.computes[seat.rank], repairs=True),
    )
    assert None not in found
    return found


def train(training: Training, choose: Choose, turns: Sequence[Turn]) -> list[list[object]]:
    """The bits of each worker's model behind the last step."""
    members = [Member(training, choose) for _ in turns[0].ranges]
    entered: tuple[range, ...] = ()
    for step, turn in enumerate(turns, 1):
        for member in members[len(turn.ranges) :]:
            member.update.close()
        joiners = range(len(members), len(turn.ranges))
        members = [*members[: len(turn.ranges)], *(Member(training, choose, members[0]) for _ in joiners)]
        if turn.ranges != entered or joiners:
            enter(members, turn.ranges, turn.bucket)
        members, entered = take_step(members, step, turn), turn.ranges if turn.tear is None else ()
    for member in members:
        member.update.close()
    return [member.state for member in members]


CLIPS = st.sampled_from([None, 0.01])


@st.composite
def trainings(draw: st.DrawFn) -> tuple[Training, list[Turn]]:
    sharded = draw(st.booleans())
    dtype = draw(st.sampled_from([None, torch.float64]))
    training = Training(
        draw(st.integers(2, 9)),
        draw(st.sampled_from(sorted(MODELS))),
        draw(st.sampled_from(ELEMENTWISE if sharded else sorted(OPTIMIZERS))),
        draw(CLIPS),
        draw(CLIPS),
        not sharded and dtype is None and draw(st.booleans()),
        draw(st.booleans()),
        sharded,
        dtype,
    )
    several = divisions(training.virtual_nodes).filter(lambda ranges: len(ranges) <= MOST_WORKERS).map(tuple)
    if sharded:  # states of it change hands in its own tests
        return training, [Turn(draw(several), draw(st.integers(40, 400)))] * STEPS
    turns = []
    for _ in range(STEPS):
        ranges = turns[-1].ranges if turns and draw(st.booleans()) else draw(several)
        torn = len(ranges) > 1 and draw(st.booleans())
        tear = st.builds(
            Tear, st.integers(0, len(ranges) - 1), st.integers(1, 12), st.sampled_from(["before", "after"])
        )
        turns.append(Turn(ranges, draw(st.integers(40, 400)), draw(tear) if torn else None))
    return training, turns


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(trainings(), st.integers(0, 1 << 16))
def test_every_schedule_trains_to_one_digest_through_kills_and_joins(
    drawn_training: tuple[Training, list[Turn]], seed: int
) -> None:
    training, turns = drawn_training
    alone = Training(**{**vars(training), "sharded": False})
    (reference,) = train(alone, drawn(seed), [Turn((range(training.virtual_nodes),), 1)] * STEPS)
    for state in train(training, drawn(seed), turns):
        assert state == reference

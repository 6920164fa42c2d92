"""New values of a sharded optimizer go to those who have not stepped them, and to nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from thread_collectives import Seat, Table, together
from torch import Tensor, nn

from virtualflow.reduction.settings import ReductionSettings
from virtualflow.step.placement import DevicePlacement
from virtualflow.step.sharded_optimizer import Shards
from virtualflow.transport import Message, Pending

SHAPES = ((20, 37), (5,), (3, 64))
ELEMENTS = 20 * 37 + 5 + 3 * 64


@dataclass
class Counting(Seat):
    """Counts what it sends to each other member."""

    sent: dict[int, int] | None = None

    def start_messages(self, messages: Sequence[Message]) -> Pending:
        """Count, and send."""
        assert self.sent is not None
        for message in messages:
            if not message.incoming:
                self.sent[message.peer] = self.sent.get(message.peer, 0) + len(message.stretch)
        return super().start_messages(messages)


def parameters() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]


def gradients(step: int, present: Sequence[bool]) -> list[Tensor | None]:
    draw = torch.Generator().manual_seed(step)
    drawn = [torch.randn(shape, generator=draw) for shape in SHAPES]
    return [gradient if there else None for gradient, there in zip(drawn, present, strict=True)]


def stepped(size: int, copies: int, present: Sequence[bool], *, alike: bool) -> list[dict[int, int]]:
    """What each worker has sent of new values in a step, after which all must have those of one that steps alone."""
    wanted = parameters()
    optimizer = torch.optim.AdamW(wanted, 0.1)
    for parameter, gradient in zip(wanted, gradients(1, present), strict=True):
        parameter.grad = gradient
    optimizer.step()
    table = Table(size)
    seats = [Counting(table, rank, sent={}) for rank in range(size)]

    def work(rank: int) -> dict[int, int]:
        own = parameters()
        shards = Shards(
            own,
            torch.optim.AdamW(own, 0.1),
            clip_norm=None,
            clip_value=None,
            reduction=ReductionSettings(norm_block=16, bucket=512, alignment=16),
            placement=DevicePlacement(),
            copies=copies,
            alike=alike,
        )
        shards.enter(rank, size)
        kept: list[Tensor | None] = []
        for place, gradient in enumerate(gradients(1, present)):
            pieces = [piece for piece in shards._my_pieces if piece.place == place]
            whole = len(pieces) == 1 and shards.row.is_whole(pieces[0])
            flat = None if gradient is None else gradient.view(-1)
            mine = None if flat is None or not pieces else torch.cat([flat[one.begin : one.end] for one in pieces])
            kept.append(mine.view(SHAPES[place]) if whole and mine is not None else mine)
        shards.prepare(kept, present)
        shards.decide(seats[rank])
        shards.step()
        shards.spread(seats[rank])
        assert shards.values == shards.all
        assert all(torch.equal(one, other) for one, other in zip(own, wanted, strict=True))
        return seats[rank].sent or {}

    return [sent for sent in together(seats, work) if sent is not None]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    ("copies", "alike", "steppers"), [(1, True, 1), (2, True, 2), (2, False, 1)], ids=["once", "twice", "twice, unlike"]
)
def test_values_go_to_those_who_have_not_stepped_them(size: int, copies: int, alike: bool, steppers: int) -> None:
    """Others get a byte, by which they know that this worker is as far."""
    found = stepped(size, copies, [True] * len(SHAPES), alike=alike)
    assert len(found) == size
    for rank, sent in enumerate(found):
        assert sent.keys() == set(range(size)) - {rank}
        assert all((sent[peer] > 1) == ((peer - rank) % size >= steppers) for peer in sent)
    values = sum(count for sent in found for count in sent.values() if count > 1)
    assert values == 4 * ELEMENTS * (size - steppers)


def test_what_nobody_has_stepped_is_not_sent() -> None:
    found = stepped(4, 2, [False, True, False], alike=True)
    assert len(found) == 4
    assert all(len(sent) == 3 for sent in found), "a byte of those who have stepped nothing, too"
    assert sum(count for sent in found for count in sent.values() if count > 1) == 2 * 4 * 5
    assert stepped(3, 2, [False] * 3, alike=True) == [{}, {}, {}]

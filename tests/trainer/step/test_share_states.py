"""States of slices step to the bits of those of whole parameters, however often they are cut anew."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_optimizers import BlockwiseMomentum, Lion
from torch import Tensor, nn

from virtualflow.reduction import Shares, Spans, Stretch, difference, share_row, union
from virtualflow.state import Optimizers, digests
from virtualflow.step.elementwise import grains_of
from virtualflow.step.sharded_optimizer import row_of
from virtualflow.step.share_states import ShareStates
from virtualflow.step.sliced_values import in_memory

SHAPES = ((5,), (20, 37), (), (0, 3), (40,), (16, 4))
UNIT = 16
MAKERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW([{"params": p[:2]}, {"params": p[2:], "lr": 0.03}], 0.1),
    "SGD without a state": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adagrad, which has states from the start": lambda p: torch.optim.Adagrad(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, centered=True, momentum=0.5),
    "a script's own": lambda p: Lion(p, 0.1, betas=(0.9, 0.99)),
    "one with blocks of 8 elements": lambda p: BlockwiseMomentum(p, 0.1, block=8),
    "two of them": lambda p: Optimizers([torch.optim.AdamW(p[:2], 0.1), torch.optim.SGD(p[2:], 0.1, momentum=0.5)]),
}
GRAINS: dict[Any, list[Mapping[str, int]]] = {}
"""What the trial of each has shown, which is made once."""


class Worker:
    """One that has all parameters, and keeps the states of some."""

    def __init__(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        draw = torch.Generator().manual_seed(1)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]
        self.optimizer = make(self.parameters)
        self.row = row_of(self.parameters, self.optimizer, UNIT)
        if make not in GRAINS:
            GRAINS[make] = grains_of(self.parameters, self.optimizer, UNIT)
        self.kept = ShareStates(self.optimizer, self.parameters, self.row, GRAINS[make])

    def gradients(self, step: int) -> list[Tensor | None]:
        """The first parameter has none in odd steps."""
        draw = torch.Generator().manual_seed(100 + step)
        drawn: list[Tensor | None] = [torch.randn(shape, generator=draw) for shape in SHAPES]
        return [None, *drawn[1:]] if step % 2 else drawn

    def step(self, number: int, spans: Spans) -> None:
        """Step what stands there, as one of several workers."""
        self.kept.keep(spans)
        given = self.gradients(number)
        pieces: dict[nn.Parameter, tuple[Stretch, Tensor]] = {}
        for piece in self.row.pieces(spans):
            gradient = given[piece.place]
            if gradient is not None:
                whole = self.row.is_whole(piece)
                mine = gradient if whole else gradient.view(-1)[piece.begin : piece.end]
                value = in_memory(self.parameters[piece.place].detach())[piece.begin : piece.end]
                pieces[self.kept.open(piece, value)] = piece, mine
        self.kept.step(pieces)

    def digest(self) -> tuple[str, str]:
        values = {str(place): parameter.detach() for place, parameter in enumerate(self.parameters)}
        return digests.digest(values), digests.optimizer_digest(self.optimizer)


def whole(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int) -> tuple[str, str]:
    worker = Worker(make)
    for number in range(steps):
        for parameter, gradient in zip(worker.parameters, worker.gradients(number), strict=True):
            parameter.grad = gradient
        worker.optimizer.step()
    return worker.digest()


def pass_on(donor: Worker, receiver: Worker, spans: Spans, *, borrowed: bool = False) -> None:
    """States travel as copies."""
    pieces = donor.row.pieces(spans)
    receiver.kept.put({piece: copy.deepcopy(donor.kept.read(piece)) for piece in pieces}, spans, borrowed=borrowed)


def spread(workers: list[Worker], shares: Shares) -> None:
    for rank, worker in enumerate(workers):
        for place, begin, end in worker.row.pieces(shares.first(rank)):
            for other in workers:
                if other is not worker:
                    value = worker.parameters[place].detach().view(-1)[begin:end]
                    other.parameters[place].detach().view(-1)[begin:end] = value


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    checkpoints=st.lists(st.booleans(), min_size=5),
    run=st.sampled_from((None, 256, 64)),
)
def test_shares_that_are_cut_anew_make_the_bits_of_a_whole(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    sizes: list[int],
    checkpoints: list[bool],
    run: int | None,
) -> None:
    workers = [Worker(make)]
    for number, size in enumerate(sizes):
        shares = share_row(workers[0].row, size, run=run)
        old, workers = workers, [*workers, *(Worker(make) for _ in range(size))][:size]
        for joiner in workers[len(old) :]:
            joiner.kept.claim(())
            for mine, theirs in zip(joiner.parameters, old[0].parameters, strict=True):
                mine.detach().copy_(theirs.detach())
        for receiver, worker in enumerate(workers):
            for donor in old:
                wanted = difference(shares.kept(receiver), worker.kept.spans)
                there = difference(wanted, difference(wanted, donor.kept.spans))
                pass_on(donor, worker, there)
        for rank, worker in enumerate(workers):
            worker.step(number, shares.kept(rank))
            assert worker.kept.spans == shares.kept(rank)
        spread(workers, shares)
        if checkpoints[number]:
            leader = workers[0]
            before = leader.kept.spans
            for donor in workers[1:]:
                missing = difference(donor.kept.spans, leader.kept.spans)
                pass_on(donor, leader, missing, borrowed=True)
            assert leader.digest() == whole(make, number + 1)
            leader.kept.drop_borrowed()
            assert leader.kept.spans == before
    for donor in workers[1:]:
        pass_on(donor, workers[0], difference(donor.kept.spans, workers[0].kept.spans), borrowed=True)
    assert workers[0].digest() == whole(make, len(sizes))


def test_a_worker_keeps_no_more_than_its_share() -> None:
    worker = Worker(MAKERS["AdamW"])
    everything = worker.row.all
    worker.step(0, everything)
    share = share_row(worker.row, 4).kept(2)
    worker.step(1, share)
    kept = sum(
        tensor.numel()
        for state in chain(worker.optimizer.state.values(), *map(dict.values, worker.kept._slices.values()))
        for name, tensor in state.items()
        if name == "exp_avg"
    )
    assert kept == sum(end - begin for _, begin, end in worker.row.pieces(share))
    assert all(len(group["params"]) in (2, 4) for group in worker.optimizer.param_groups), "groups are what they were"


def test_what_is_gone_is_not_claimed_and_what_comes_from_a_checkpoint_is() -> None:
    worker = Worker(MAKERS["AdamW"])
    worker.step(0, worker.row.all)
    saved: Any = copy.deepcopy(worker.optimizer.state_dict())
    wanted = worker.digest()[1]
    share = share_row(worker.row, 4).kept(1)
    worker.step(2, share)
    assert worker.kept.spans == share
    worker.optimizer.load_state_dict(saved)
    worker.kept.claim(worker.row.all)
    assert worker.kept.spans == union(worker.row.all)
    assert digests.optimizer_digest(worker.optimizer) == wanted

"""What an exchange is counted to send and receive is what its schedule plans, and what its sockets have carried.

The members are threads of this process over real connections.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from meshes import mesh
from torch import nn

import virtualflow as vf
from virtualflow.data import MicroBatch
from virtualflow.protocol import messages as m
from virtualflow.reduction import (
    AttemptSpoiled,
    Passage,
    Scheduled,
    choose_summation,
    summarize,
    traffic,
)
from virtualflow.reduction.buckets import Bucket
from virtualflow.reduction.ownership import Portion, Portions
from virtualflow.reduction.schedule import Way
from virtualflow.reduction.settings import Algorithm, Exchange, ReductionSettings
from virtualflow.reduction.traffic import ExchangeLog, planned_bytes
from virtualflow.step import Attempt, BackwardCut, OptimizerOptions, Reduced, Update
from virtualflow.transport.channel import HEAD
from virtualflow.transport.communicator import Communicator
from virtualflow.transport.interface import DONE

NODES, SAMPLES, STEPS = 6, 2, 3
RANGES = {1: [range(6)], 2: [range(5), range(5, 6)], 3: [range(1), range(1, 4), range(4, 6)]}
"""By the number of workers; those of two and three hold different numbers of sums."""
BUCKET = 2_000
"""Bytes: the model has several buckets, one of them of a single tensor that is larger."""


class Carried:
    """A socket whose bytes are counted where the kernel has taken or given them."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.sent = self.received = 0

    def sendmsg(self, *arguments: Any) -> int:
        """Send some."""
        sent: int = self._connection.sendmsg(*arguments)
        self.sent += sent
        return sent

    def recvmsg_into(self, *arguments: Any) -> Any:
        """Receive some."""
        found = self._connection.recvmsg_into(*arguments)
        self.received += found[0]
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@dataclass
class Told:
    """What one member has measured."""

    steps: list[tuple[list[Scheduled], list[Passage]]] = field(default_factory=list)
    traffic: tuple[int, int] = 0, 0
    carried: tuple[int, int] = 0, 0
    """Without the heads of frames."""
    spoiled: int = 0


def train(
    communicator: Communicator,
    exchange: Exchange,
    copies: int = 0,
    backward: vf.PartialBackward | None = None,
    *,
    changes: int = 0,
) -> Told:
    """Some steps of a small model; its gradients set out beside the backward pass where that is wanted and legal.

    Args:
        changes: the step whose gradients the first member's script changes behind the backward pass.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 30), nn.Sequential(nn.Linear(30, 30)), nn.Sequential(nn.Linear(30, 1)))
    cut = None if backward is None else BackwardCut(model, [("1", model[1]), ("2", model[2])], backward, NODES)
    update = Update(
        model,
        OptimizerOptions(torch.optim.AdamW(model.parameters()), shard_copies=copies),
        choose_summation(NODES, "bitwise"),
        micro_batch=SAMPLES,
        reduction=ReductionSettings(exchange=exchange, bucket=BUCKET, one_by_one=0, norm_block=16),
        cut=cut,
    )
    channels = [channel for lane in communicator._lanes for channel in lane.channels.values()]
    sockets = [Carried(channel._connection) for channel in channels]
    for channel, carried in zip(channels, sockets, strict=True):
        channel._connection = carried  # type: ignore[assignment]
    ranges, told = RANGES[communicator.size], Told()
    assigned = ranges[communicator.rank]
    if update.shards is not None:
        update.shards.enter(communicator.rank, communicator.size)
    update.agree(communicator, exchange, ranges)
    update.enter()

    def make(number: int, *, changed: bool = False) -> Reduced:
        attempt = Attempt(number, assigned, ranges)
        update.begin(assigned, max(map(len, ranges)))
        if cut is not None:
            cut.begin(attempt)
        for node in assigned:
            attempt.batch = MicroBatch(node, None, ())
            if node == assigned[-1]:
                update.sync.expect_last(communicator, ranges, SAMPLES, NODES * SAMPLES)
            else:
                update.sync.expect(SAMPLES)
            if cut is not None:
                cut.before_pass(attempt)
            draw = torch.Generator().manual_seed(10 * number + node)
            model(torch.randn(SAMPLES, 7, generator=draw)).square().mean().backward()
            if changed and node == assigned[-1]:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
            if cut is not None:
                cut.after_pass(attempt)
            update.sync.take(SAMPLES, {})
        return update.synchronize(communicator, ranges, number, m.NO_GENERATION, more=True)

    for number in range(1, STEPS + 1):
        try:
            reduced = make(number, changed=number == changes and communicator.rank == 0)
        except AttemptSpoiled:
            told.spoiled += 1
            update.abandon()
            reduced = make(number)
        update.apply(reduced, epoch_ends=False)
        told.steps.append((copy.copy(update.reducer.schedule), update.reducer.passages()))
    told.traffic = communicator.traffic
    told.carried = (
        sum(carried.sent - HEAD.size * channel._sent for channel, carried in zip(channels, sockets, strict=True)),
        sum(
            carried.received - HEAD.size * channel._received for channel, carried in zip(channels, sockets, strict=True)
        ),
    )
    update.close()
    return told


def members_of(size: int, work: Callable[[Communicator], Told], *, sealed: bool = False) -> list[Told]:
    members = mesh(size, sealed=sealed)
    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(work, members))
    for member in members:
        member.close()
    return found


def planned(schedule: Sequence[Scheduled], rank: int) -> list[tuple[int, int]]:
    return [one.moved(rank) for one in schedule]


@pytest.mark.parametrize("workers", RANGES)
@pytest.mark.parametrize(
    ("exchange", "copies", "backward"),
    [
        pytest.param(Exchange("gather", overlap=False), 0, None, id="gathered"),
        pytest.param(Exchange("reduce-scatter", overlap=False), 0, None, id="in slices"),
        pytest.param(Exchange("reduce-scatter", overlap=True), 0, None, id="in slices, beside the backward pass"),
        pytest.param(Exchange("gather", overlap=True), 2, None, id="sharded and gathered"),
        pytest.param(Exchange("reduce-scatter", overlap=True), 1, None, id="sharded and kept once"),
        pytest.param(Exchange("reduce-scatter", overlap=True), 2, None, id="sharded and kept twice"),
        pytest.param(
            Exchange("reduce-scatter", overlap=True), 0, vf.PartialBackward((1, 0.5)), id="partial backward passes"
        ),
        pytest.param(
            Exchange("reduce-scatter", overlap=False),
            1,
            vf.PartialBackward((0.5,), full_every=2),
            id="partial backward passes and shards",
        ),
    ],
)
def test_what_is_counted_is_what_is_planned_and_what_the_sockets_carry(
    workers: int, exchange: Exchange, copies: int, backward: vf.PartialBackward | None
) -> None:
    found = members_of(workers, lambda member: train(member, exchange, copies, backward))
    for rank, told in enumerate(found):
        assert told.traffic == told.carried, "headers and new values included"
        for number, (schedule, passages) in enumerate(told.steps, 1):
            assert [(one.sent, one.received) for one in passages] == planned(schedule, rank)
            assert bool(schedule) == (workers > 1)
            assert any(one.choice.overlapped for one in schedule) == (exchange.overlap and number > 1 and workers > 1)
            for one, passage in zip(schedule, passages, strict=True):
                assert 0 < passage.span[0] < passage.span[1]
                assert one.choice.overlapped or passage.waited == (passage.span,), "nothing else is done meanwhile"
    for step in range(STEPS):
        passages = [one for told in found for one in told.steps[step][1]]
        assert sum(one.sent for one in passages) == sum(one.received for one in passages)
    assert sum(told.traffic[0] for told in found) == sum(told.traffic[1] for told in found)
    if backward is not None and backward.full_every and workers > 1:
        part, whole = (sum(one.sent for one in found[0].steps[step][1]) for step in (0, 1))
        assert part < whole, "what no backward pass has reached does not travel"


@pytest.mark.parametrize("algorithm", ["gather", "reduce-scatter"])
def test_what_goes_over_gloo_is_counted_alike(algorithm: Algorithm) -> None:
    exchange = Exchange(algorithm, overlap=True)
    own, gloo = (members_of(3, partial(train, exchange=one)) for one in (exchange, replace(exchange, backend="gloo")))
    port = 2 * 8  # of the first member's store, told to both others
    for one, other in zip(own, gloo, strict=True):
        passed = [(each.sent, each.received) for _, passages in other.steps for each in passages]
        assert passed == [(each.sent, each.received) for _, passages in one.steps for each in passages]
        assert other.traffic == (one.traffic[0] + port, one.traffic[1] + port)
        sent, received = map(sum, zip(*passed, strict=True))
        assert other.carried == (other.traffic[0] - sent, other.traffic[1] - received), "by the own connections"


def test_an_attempt_that_was_spoiled_leaves_nothing_in_what_is_told_of_the_next() -> None:
    exchange = Exchange("reduce-scatter", overlap=True)
    for rank, told in enumerate(members_of(2, lambda member: train(member, exchange, changes=2))):
        assert told.spoiled == 1
        schedule, passages = told.steps[1]
        assert not any(one.choice.overlapped for one in schedule)
        assert sorted(place for one in schedule for place in one.bucket.places) == list(range(6)), "each once"
        assert [(one.sent, one.received) for one in passages] == planned(schedule, rank)


def test_seals_are_not_counted() -> None:
    plain, sealed = (
        members_of(2, lambda member: train(member, Exchange("reduce-scatter")), sealed=one) for one in (False, True)
    )
    assert [told.traffic for told in plain] == [told.traffic for told in sealed]


# Bytes by hand, of a bucket of ten elements of four bytes; three workers contribute 2, 1 and 1 sums.

TEN = Bucket(torch.float32, (0, 1), (0, 6), 10, (0, 4, 8, 12), ((0, 1), (0,), (0,)))
SHARED: Portions = ((Portion(0, 3, (0, 1)), Portion(3, 6, (1, 2))), (Portion(0, 4, (2, 0)),))


@pytest.mark.parametrize(
    ("way", "portions", "wanted"),
    [
        pytest.param(Way.WHOLE, None, [(160, 80), (80, 120), (80, 120)], id="all rows to all"),
        pytest.param(Way.SLICES, None, [(64 + 32, 32 + 32), (32 + 32, 48 + 32), (32 + 32, 48 + 32)], id="slices"),
        pytest.param(Way.SLICES, SHARED, [(56 + 12, 24 + 16), (28 + 12, 36 + 12), (24 + 16, 48 + 12)], id="kept twice"),
        pytest.param(
            Way.SLICES,
            tuple(tuple(Portion(a, b, keepers[:1]) for a, b, keepers in place) for place in SHARED),
            [(56, 24), (28, 36), (24, 48)],
            id="kept once",
        ),
    ],
)
def test_the_plan_of_a_bucket_by_hand(way: Way, portions: Portions | None, wanted: list[tuple[int, int]]) -> None:
    assert [planned_bytes(TEN, way, portions, rank) for rank in range(3)] == wanted


# --- times ------------------------------------------------------------------------------------------------------------


def test_what_a_step_waited_for_is_told_apart_from_what_was_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buckets, the first from 10 to 40, the second from 30 to 70; the training waits from 35 to 50 and 60 to 80."""
    clock = iter([10, 30, 40, 70, 50, 80])
    monkeypatch.setattr(traffic, "time", SimpleNamespace(perf_counter_ns=lambda: next(clock)))
    log = ExchangeLog(2)
    for index in range(2):
        log.begin(index)
    for index in range(2):
        log.added_up(index)
        log.complete(index, DONE)
    log.waited(35)
    log.waited(60)
    first, second = log.passages()
    assert (first.span, first.waited) == ((10, 40), ((35, 40),))
    assert (second.span, second.waited) == ((30, 70), ((35, 50), (60, 70)))
    told = summarize([(1, 2), (3, 4)], [[first, second]])
    assert (told.seconds, told.exposed) == (pytest.approx(60e-9), pytest.approx(25e-9))
    assert (told.planned_sent, told.planned_received) == (4, 6)


def test_a_step_that_was_disturbed_does_not_show_in_the_median() -> None:
    steps = [[Passage(8, 4, (0, end), ((0, end // 2),))] for end in (10, 1_000_000, 12)]
    told = summarize([(8, 4)], steps)
    assert (told.sent, told.received) == (8, 4)
    assert (told.seconds, told.exposed) == (pytest.approx(12e-9), pytest.approx(6e-9))

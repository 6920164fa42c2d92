"""A state on its way: who sends which bytes, straight into the joiner's tensors, whoever is lost meanwhile."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, Trained, alone, die_here, trained
from hypothesis import given
from hypothesis import strategies as st
from meshes import mesh
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow import messages as m
from virtualflow import state, trees
from virtualflow.collectives import Message
from virtualflow.communicator import Communicator
from virtualflow.errors import CommunicatorBroken, ConfigurationError
from virtualflow.local.view import describe_change
from virtualflow.reserve import Reserve, elder, make_room, tell_room
from virtualflow.settings import ENV_WORKER, CommunicatorSettings
from virtualflow.stripes import (
    Piece,
    Round,
    announce,
    describe,
    join,
    layout_hash,
    plan_rounds,
    share_out,
    size_of,
    split,
)
from virtualflow.transfer import Moved, carry, wrap

# --- who sends what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("donors", "receivers", "wanted"),
    [
        pytest.param((0, 1), (), (), id="nobody lacks it"),
        pytest.param((0, 2), (1,), (Round((0, 2), (1,)),), id="all donors give to one joiner at once"),
        pytest.param((0, 1), (2, 3), (Round((0, 1), (2, 3)),), id="as many at once as there are donors"),
        pytest.param(
            (4,),
            (0, 1, 2, 3),
            (Round((4,), (0,)), Round((4, 0), (1, 2)), Round((4, 0, 1, 2), (3,))),
            id="who has received gives in the next round",
        ),
    ],
)
def test_rounds(donors: tuple[int, ...], receivers: tuple[int, ...], wanted: tuple[Round, ...]) -> None:
    assert plan_rounds(donors, receivers) == wanted


@pytest.mark.parametrize(
    ("sizes", "donors", "most", "wanted"),
    [
        pytest.param([100], 1, 1_000, [[Piece(0, 0, 100)]], id="one donor sends everything"),
        pytest.param([256], 2, 1_000, [[Piece(0, 0, 128)], [Piece(0, 128, 256)]], id="two halves of one tensor"),
        pytest.param(
            [128, 256, 128],
            2,
            1_000,
            [[Piece(0, 0, 128), Piece(1, 0, 128)], [Piece(1, 128, 256), Piece(2, 0, 128)]],
            id="a tensor on the border is cut",
        ),
        pytest.param([300], 1, 128, [[Piece(0, 0, 128), Piece(0, 128, 256), Piece(0, 256, 300)]], id="no large pieces"),
        pytest.param([40], 3, 64, [[Piece(0, 0, 40)], [], []], id="too small to be cut"),
        pytest.param([], 2, 64, [[], []], id="nothing is large"),
    ],
)
def test_shares(sizes: list[int], donors: int, most: int, wanted: list[list[Piece]]) -> None:
    assert share_out(sizes, donors, most) == wanted


@given(st.lists(st.integers(0, 3_000), max_size=12), st.integers(1, 9), st.sampled_from([64, 320, 10_000]))
def test_shares_are_equal_and_hold_every_byte_once(sizes: list[int], donors: int, most: int) -> None:
    shares = share_out(sizes, donors, most)
    pieces = [piece for share in shares for piece in share]
    covered = Counter((piece.index, byte) for piece in pieces for byte in range(piece.begin, piece.end))
    assert covered == Counter((index, byte) for index, size in enumerate(sizes) for byte in range(size))
    assert all(0 < piece.end - piece.begin <= most and piece.begin % 64 == 0 for piece in pieces)
    weights = [sum(piece.end - piece.begin for piece in share) for share in shares]
    assert len(shares) == donors
    assert max(weights) - min(weights) <= 3 * 64


@given(st.integers(1, 6), st.integers(0, 40))
def test_all_receive_in_as_few_rounds_as_if_each_donor_served_one(donors: int, receivers: int) -> None:
    ranks = list(range(donors + receivers))
    rounds = plan_rounds(ranks[:donors], ranks[donors:])
    have = set(ranks[:donors])
    for turn in rounds:
        assert set(turn.donors) == have, "a donor must have the state"
        assert len(turn.receivers) <= len(turn.donors)
        have |= set(turn.receivers)
    assert have == set(ranks)
    assert 2 ** max(0, len(rounds) - 1) * donors < donors + receivers or not receivers


# --- taken apart and put together -------------------------------------------------------------------------------------


def build(width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, amsgrad=True)
    for _ in range(2):
        model(torch.randn(5, width)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def captured(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return state.capture(model, optimizer, None, None, {"step": 2})


def same(one: trees.Tree, other: trees.Tree) -> bool:
    return bool(torch.equal(trees.pack(one), trees.pack(other)))


@pytest.mark.parametrize("least", [0, 40, 256, 10**6])
def test_a_state_without_its_large_tensors_and_those_make_the_state(least: int) -> None:
    tree = captured(*build())
    before = trees.snapshot(tree)
    thin, stripes = split(tree, least)
    assert all(size_of(tensor) >= least for tensor in stripes.values())
    assert same(tree, before), "the capture itself is not changed"
    block = trees.pack({"tree": thin, "stripes": describe(stripes)})
    content = trees.unpack(block)
    announced = announce(content["stripes"])
    assert [(t.shape, t.dtype) for t in announced.values()] == [(t.shape, t.dtype) for t in stripes.values()]
    join(content["tree"], {path: stripes[path] for path in announced})
    assert same(content["tree"], before)


def test_the_order_in_which_a_donor_has_its_optimizers_state_makes_no_other_layout() -> None:
    tree = captured(*build())
    turned = {**tree, "optimizer": {**tree["optimizer"], "state": dict(reversed(tree["optimizer"]["state"].items()))}}
    assert layout_hash(describe(split(tree, 40)[1])) == layout_hash(describe(split(turned, 40)[1]))


def test_two_tensors_of_one_shape_in_other_places_make_another_layout() -> None:
    tree = captured(*build())
    renamed = {**tree, "parameters": {f"x.{name}": value for name, value in tree["parameters"].items()}}
    assert layout_hash(describe(split(tree, 40)[1])) != layout_hash(describe(split(renamed, 40)[1]))


@pytest.mark.parametrize(
    "strange",
    [
        torch.zeros(6, 7).t(),
        torch.zeros(1).expand(100),
        torch.zeros(50, dtype=torch.complex64).conj(),
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    ],
    ids=["transposed", "expanded", "conjugated", "channels last"],
)
def test_a_tensor_that_is_not_its_bytes_in_a_row_travels_in_the_block(strange: torch.Tensor) -> None:
    tree = captured(*build())
    tree["parameters"]["strange"] = strange
    thin, stripes = split(tree, 0)
    assert ("parameters", "strange") not in stripes
    assert thin["parameters"]["strange"] is strange


@pytest.mark.parametrize("described", [[["a"]], [[["a"], "float99", [1]]], [[["a"], "float32", ["x"]]], 3])
def test_what_does_not_describe_tensors_is_refused(described: Any) -> None:
    with pytest.raises(ValueError, match="does not describe"):
        announce(described)


def test_reserved_memory_is_used_once_and_nothing_is_reserved_for_others() -> None:
    reserve = Reserve()
    reserve.fill([])
    reserve.fill([40, 40])
    reserve.fill([99])
    like = torch.empty(10, device="meta")
    first, second, third = reserve.take(like), reserve.take(like), reserve.take(like)
    assert len({tensor.data_ptr() for tensor in (first, second, third)}) == 3
    assert (first.shape, first.dtype) == (like.shape, like.dtype)
    assert reserve.take(torch.empty(99, dtype=torch.uint8)).numel() == 99
    reserve.release()
    assert reserve.take(like).shape == like.shape


def membership(joiners: tuple[str, ...], mode: Any = "planned") -> m.Plan:
    members = tuple(m.Member(f"worker-{n}", f"process-{n}", "127.0.0.1", n, n + 1) for n in range(3))
    return m.Plan(m.Generation(1, 2), mode, members, joiners, "join", "")


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        pytest.param(membership(("worker-2",)), "worker-0", id="the first who is no joiner tells"),
        pytest.param(membership(("worker-0", "worker-1")), "worker-2", id="whatever its rank"),
        pytest.param(membership(()), None, id="nobody joins"),
        pytest.param(membership(("worker-0", "worker-1", "worker-2")), None, id="nobody has a state"),
        pytest.param(membership(("worker-2",), "recovery"), None, id="a recovery waits for nothing"),
    ],
)
def test_who_tells_joiners_how_much_will_come(plan: m.Plan, wanted: str | None) -> None:
    told_by = elder(plan)
    assert (None if told_by is None else told_by.worker) == wanted


class Relay:
    """The part of a link that a rendezvous needs, within one process."""

    def __init__(self) -> None:
        self.keys: dict[tuple[m.Generation, str], bytes] = {}

    def publish(self, generation: m.Generation, key: str, value: bytes) -> None:
        self.keys[generation, key] = value

    def lookup(self, generation: m.Generation, key: str) -> bytes | None:
        return self.keys.get((generation, key))

    def wait(self, predicate: Callable[[], bool], timeout: float) -> bool:
        return predicate()


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        pytest.param((800, 800, 96), True, id="as told"),
        pytest.param(tuple(range(64, 20_000)), False, id="too many sizes for one message"),
        pytest.param((), False, id="nothing is large"),
    ],
)
def test_a_joiner_makes_the_memory_that_it_was_told_of(sizes: tuple[int, ...], kept: bool) -> None:
    relay: Any = Relay()
    plan, reserve = membership(("worker-2",)), Reserve()
    tell_room(relay, plan, sizes)
    make_room(relay, plan, reserve, lambda: False, 30.0)
    assert reserve.held == (sum(sizes) if kept else 0)


# --- over connections -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("donors", "receivers", "odd"),
    [
        pytest.param([0], [1], None, id="one to one"),
        pytest.param([0, 1], [2], None, id="two to one"),
        pytest.param([1, 2, 3], [0], None, id="three to one"),
        pytest.param([1], [0, 2, 3], None, id="one to three, in two rounds"),
        pytest.param([0, 1, 2], [3], 1, id="a donor that is laid out in another way takes no part"),
    ],
)
def test_receivers_get_the_donors_bits_into_their_own_parameters(
    donors: list[int], receivers: list[int], odd: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CommunicatorSettings, "stripe", 64)
    monkeypatch.setattr(CommunicatorSettings, "piece", 128)
    model, optimizer = build()
    tree = captured(model, optimizer)
    communicators = mesh(len(donors) + len(receivers))
    fresh = {}
    for rank in receivers:
        torch.manual_seed(rank)
        one = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        fresh[rank] = one, torch.optim.AdamW(one.parameters(), 0.1, amsgrad=True)

    def land(rank: int) -> Any:
        def where(announced: dict[str, Any], stripes: Any) -> Any:
            state.check_fit(announced, *fresh[rank], None, None)
            own = state.own_tensors(fresh[rank][0], stripes)
            assert own, "no parameter is large enough"
            return {path: own.get(path, torch.empty(like.shape, dtype=like.dtype)) for path, like in stripes.items()}

        return where

    def take_part(rank: int) -> Moved:
        parcel = None
        if rank in donors:
            other = {**tree, "parameters": {}} if rank == odd else tree
            parcel = wrap(other)
        return carry(communicators[rank], donors, receivers, parcel, land(rank) if rank in receivers else lambda *_: {})

    with ThreadPoolExecutor(len(communicators)) as threads:
        moved = list(threads.map(take_part, range(len(communicators))))
    for communicator in communicators:
        communicator.close()
    for rank in receivers:
        addresses = [parameter.data_ptr() for parameter in fresh[rank][0].parameters()]
        received = moved[rank].tree
        assert received is not None
        state.restore(received, *fresh[rank], None, None, given=True)
        assert same(captured(*fresh[rank]), tree)
        assert addresses == [parameter.data_ptr() for parameter in fresh[rank][0].parameters()]
        for entry in fresh[rank][1].state.values():
            assert all(value.untyped_storage().nbytes() == size_of(value) for value in entry.values())
    assert {one.donors for one in moved} == {len(donors) - (odd is not None)}
    assert {one.bytes for rank, one in enumerate(moved) if rank != odd} == {wrap(tree).size}


def test_nothing_is_written_into_memory_that_a_receiver_has_taken_back() -> None:
    """As when a stopped donor is given up, and wakes up when the joiner trains on with another one's state."""
    news: list[str] = []
    giver, taker = mesh(2, {1: lambda: news[0] if news else None})
    memory = torch.zeros(10_000_000, dtype=torch.uint8)

    def windows() -> Any:
        yield [Message(0, memory[:10], incoming=True)]
        news.append("generation 2 takes over")
        yield [Message(0, memory, incoming=True)]

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(giver.move, iter([[Message(1, torch.ones(10, dtype=torch.uint8), incoming=False)]]))
        with pytest.raises(CommunicatorBroken, match="takes over"):
            taker.move(windows())
        first.result()
    with pytest.raises(CommunicatorBroken):
        giver.move(iter([[Message(1, torch.ones(10_000_000, dtype=torch.uint8), incoming=False)]]))
    assert int(memory.sum()) == 10
    giver.close()
    taker.close()


def test_an_error_of_this_member_reaches_its_caller_and_ends_the_wait_of_the_other() -> None:
    giver, taker = mesh(2)

    def windows() -> Any:
        raise ConfigurationError("it does not fit")
        yield

    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(giver.all_gather, torch.zeros(8, dtype=torch.uint8))
        with pytest.raises(ConfigurationError, match="does not fit"):
            taker.move(windows())
        with pytest.raises(CommunicatorBroken):
            waiting.result()
    giver.close()
    taker.close()


# --- whoever is lost --------------------------------------------------------------------------------------------------


def fail_at_message(number: int, how: str) -> None:
    """Let this process fail while it has sent or received so many messages: ``killed``, or told that it ``broke``."""
    calls = 0
    post = Communicator._post

    def failing(self: Communicator, group: Any, message: Message) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            print("a transfer fails here", flush=True)
            if how == "killed":
                die_here(os.environ[ENV_WORKER])
            raise RuntimeError("injected by the test")
        return post(self, group, message)

    Communicator._post = failing  # type: ignore[method-assign]


def train(victim: str = "", number: int = 0, how: str = "", checkpoints: Path | None = None) -> Trained:
    """Eight steps of a model whose tensors are striped in several pieces."""
    torch.manual_seed(1)
    CommunicatorSettings.stripe, CommunicatorSettings.piece = 64, 256
    if victim and os.environ.get(ENV_WORKER) == victim:
        fail_at_message(number, how)
    model = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Linear(24, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, amsgrad=True)
    draw = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(24, 16, generator=draw), torch.randn(24, 1, generator=draw))
    with vf.elastic(
        model,
        optimizer,
        dataset,
        batch_size=12,
        steps=8,
        virtual_nodes=6,
        checkpoint=None if checkpoints is None else vf.CheckpointPolicy(checkpoints, 2, None, 3),
    ) as run:
        for step in run:
            for x, y in step:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                step.log(loss=loss)
    return trained(run, model, optimizer, dict(run.metrics))


@pytest.mark.parametrize("how", ["killed", "broke"])
@pytest.mark.parametrize("victim", ["worker-0", "worker-1", "worker-2"], ids=["first donor", "other donor", "joiner"])
def test_a_state_is_whole_whoever_is_lost_while_it_is_on_its_way(
    victim: str, how: str, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train)
    for number in (1, 9):
        job = start_job(train, victim, number, how, workers=2, hold=3)
        job.reach(3)
        job.join()
        job.wanted -= how == "killed"
        job.call("scale", workers=job.wanted)
        outcomes = job.finish()
        assert "a transfer fails here" in outcomes[victim].log
        values = [outcome.value for outcome in outcomes.values() if outcome.kind == "returned"]
        assert values == [reference] * job.wanted, f"message {number}"


def train_and_tell() -> Trained:
    """As :func:`train`; tells how much memory was ready each time that some was taken."""
    take = Reserve.take

    def telling(self: Reserve, like: torch.Tensor) -> torch.Tensor:
        print(f"{self.held} bytes are ready", flush=True)
        return take(self, like)

    Reserve.take = telling  # type: ignore[method-assign]
    return train()


def test_a_joiner_has_made_memory_before_it_enters_and_what_it_got_is_in_the_report(
    start_job: Callable[..., ElasticJob],
) -> None:
    job = start_job(train_and_tell, workers=2, hold=3)
    job.reach(3)
    job.join()
    change = job.reach(5).last_change
    assert change is not None
    assert (change.cause, change.state_donors) == ("join", 2)
    assert change.state_bytes is not None
    assert change.state_bytes > 4 * (16 * 24 + 24 * 4) * 4
    assert "of state in" in describe_change(change)
    assert "from 2 donors" in describe_change(change)
    outcomes = job.finish()
    values = [outcome.value for outcome in outcomes.values()]
    assert values == [values[0]] * 3
    # AdamW with amsgrad has three tensors for each of the five that have 64 bytes or more.
    stripes = 3 * 4 * (16 * 24 + 24 * 4)
    ready = [int(line.split()[0]) for line in outcomes["worker-2"].log.splitlines() if line.endswith("are ready")]
    assert ready[0] == stripes
    assert len(ready) == 3 * 5
    assert ready == sorted(set(ready), reverse=True), "each takes some of it"


def lose_the_only_donor(job: ElasticJob) -> None:
    job.reach(3)
    job.join()
    job.call("scale", workers=1)
    job.hold(None)
    job.workers["worker-0"].process.join(30)


def test_a_joiner_whose_model_is_half_overwritten_goes_on_from_a_checkpoint(
    start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    reference = alone(train)
    job = start_job(train, "worker-0", 9, "killed", tmp_path, workers=1, hold=3)
    lose_the_only_donor(job)
    assert job.results() == [reference]


def test_a_joiner_whose_model_is_half_overwritten_never_begins_anew_with_it(
    start_job: Callable[..., ElasticJob],
) -> None:
    reference = alone(train)
    job = start_job(train, "worker-0", 9, "killed", workers=1, hold=3)
    lose_the_only_donor(job)
    job.workers["worker-1"].process.join(30)
    job.start_worker()
    outcomes = job.finish()
    assert [outcomes[f"worker-{n}"].kind for n in range(3)] == ["killed", "Evicted", "returned"]
    assert outcomes["worker-2"].value == reference

"""A state on its way: the donors' bits straight into the joiner's tensors, whoever is lost meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, Trained, alone, die_here, trained
from meshes import mesh
from states import assert_same, captured, small_model
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly
from virtualflow.errors import CommunicatorBroken, ConfigurationError
from virtualflow.protocol.job_view import describe_change
from virtualflow.protocol.settings import ENV_WORKER
from virtualflow.state import capture, transfer
from virtualflow.state.striping import size_of
from virtualflow.state.transfer import Moved, Reserve, move_state, pack_state
from virtualflow.transport.communicator import Communicator
from virtualflow.transport.interface import Message

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
    monkeypatch.setattr(transfer, "STRIPE", 64)
    monkeypatch.setattr(transfer, "PIECE", 128)
    model, optimizer = small_model()
    tree = captured(model, optimizer)
    communicators = mesh(len(donors) + len(receivers))
    fresh = {}
    for rank in receivers:
        torch.manual_seed(rank)
        one = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        fresh[rank] = one, torch.optim.AdamW(one.parameters(), 0.1, amsgrad=True)

    def land(rank: int) -> Any:
        def where(announced: dict[str, Any], stripes: Any) -> Any:
            capture.check_fit(announced, *fresh[rank], None, None)
            own = capture.own_tensors(fresh[rank][0], stripes)
            assert own, "no parameter is large enough"
            return {path: own.get(path, torch.empty(like.shape, dtype=like.dtype)) for path, like in stripes.items()}

        return where

    def take_part(rank: int) -> Moved:
        packed = None
        if rank in donors:
            other = {**tree, "parameters": {}} if rank == odd else tree
            packed = pack_state(other)
        where = land(rank) if rank in receivers else lambda *_: {}
        return move_state(communicators[rank], donors, receivers, packed=packed, land=where)

    with ThreadPoolExecutor(len(communicators)) as threads:
        moved = list(threads.map(take_part, range(len(communicators))))
    for communicator in communicators:
        communicator.close()
    for rank in receivers:
        addresses = [parameter.data_ptr() for parameter in fresh[rank][0].parameters()]
        received = moved[rank].tree
        assert received is not None
        capture.restore(received, *fresh[rank], None, None, given=True)
        assert_same(captured(*fresh[rank]), tree)
        assert addresses == [parameter.data_ptr() for parameter in fresh[rank][0].parameters()]
        for entry in fresh[rank][1].state.values():
            assert all(value.untyped_storage().nbytes() == size_of(value) for value in entry.values())
    assert {one.donors for one in moved} == {len(donors) - (odd is not None)}
    assert {one.bytes for rank, one in enumerate(moved) if rank != odd} == {pack_state(tree).size}


def test_nothing_is_written_into_memory_that_a_receiver_has_taken_back() -> None:
    """As when a stopped donor is given up, and wakes up when the joiner trains on with another one's state."""
    news: list[str] = []
    giver, taker = mesh(2, {1: lambda: news[0] if news else None})
    memory = torch.zeros(10_000_000, dtype=torch.uint8)
    ten, rest = (Message(1, torch.ones(size, dtype=torch.uint8), incoming=False) for size in (10, 10_000_000))

    def windows() -> Any:
        yield [Message(0, memory[:10], incoming=True)]
        news.append("generation 2 takes over")
        yield [Message(0, memory, incoming=True)]

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(giver.move, iter([[ten]]), timeout=60.0)
        with pytest.raises(CommunicatorBroken, match="takes over"):
            taker.move(windows(), timeout=60.0)
        first.result()
    with pytest.raises(CommunicatorBroken):
        giver.move(iter([[rest]]), timeout=60.0)
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
            taker.move(windows(), timeout=60.0)
        with pytest.raises(CommunicatorBroken):
            waiting.result()
    giver.close()
    taker.close()


# --- whoever is lost --------------------------------------------------------------------------------------------------


def fail_at_message(number: int, how: str) -> None:
    """Let this process fail before it has sent or received so many messages: ``killed``, or told that it ``broke``."""
    calls = 0
    move = Communicator.move

    def failing(self: Communicator, windows: Iterator[Sequence[Message]], *, timeout: float) -> None:
        def counted() -> Iterator[Sequence[Message]]:
            nonlocal calls
            for window in windows:
                before, calls = calls, calls + len(window)
                if before < number <= calls:
                    yield window[: number - before - 1]
                    print("a transfer fails here", flush=True)
                    if how == "killed":
                        die_here(os.environ[ENV_WORKER])
                    raise CommunicatorBroken("injected by the test")
                yield window

        move(self, counted(), timeout=timeout)

    Communicator.move = failing  # type: ignore[method-assign]


def train(victim: str = "", number: int = 0, how: str = "", checkpoints: Path | None = None) -> Trained:
    """Eight steps of a model whose tensors are striped in several pieces."""
    torch.manual_seed(1)
    if victim and os.environ.get(ENV_WORKER) == victim:
        fail_at_message(number, how)
    model = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Linear(24, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, amsgrad=True)
    draw = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(24, 16, generator=draw), torch.randn(24, 1, generator=draw))
    with (
        patch.multiple(transfer, STRIPE=64, PIECE=256),
        vf.elastic(
            model,
            optimizer,
            dataset,
            batch_size=12,
            steps=8,
            virtual_nodes=6,
            checkpoint=None if checkpoints is None else vf.CheckpointPolicy(checkpoints, 2, None, 3),
        ) as run,
    ):
        for step in run:
            for x, y in step:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                step.log(loss=loss)
    return trained(run, model, optimizer, dict(run.metrics))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "how"),
    [
        pytest.param("worker-0", "killed", id="first donor, killed"),
        nightly("worker-1", "broke", id="other donor, broke"),
        pytest.param("worker-2", "killed", id="joiner, killed"),
        nightly("worker-0", "broke", id="first donor, broke"),
        nightly("worker-1", "killed", id="other donor, killed"),
        nightly("worker-2", "broke", id="joiner, broke"),
    ],
)
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


@pytest.mark.slow
def test_a_joiner_has_made_memory_before_it_enters_and_what_it_got_is_in_the_report(
    start_job: Callable[..., ElasticJob],
) -> None:
    job = start_job(train_and_tell, workers=2, hold=3)
    job.reach(3)
    job.join()
    job.hold(5)
    change = job.wait_for(lambda status: status.last_change is not None, "the change, as all have told it").last_change
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
    job.await_end("worker-0")


@pytest.mark.slow
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
    job.await_end("worker-1")
    job.start_worker()
    outcomes = job.finish()
    assert [outcomes[f"worker-{n}"].kind for n in range(3)] == ["killed", "Evicted", "returned"]
    assert outcomes["worker-2"].value == reference

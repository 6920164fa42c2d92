"""Bits that flip on their way, over real connections: each is found, and nothing damaged is used."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from broken_collectives import HASTY, Counting, regression, train_steps
from damage import Damaging, damage, damage_first_generation
from elastic_jobs import ElasticJob, Trained, alone, trained
from meshes import mesh
from states import captured, small_model
from torch import Tensor

import virtualflow as vf
from tiers import nightly
from virtualflow.errors import CommunicatorBroken
from virtualflow.protocol.settings import ENV_WORKER
from virtualflow.reduction.accumulation import Accumulator, CanonicalSummation
from virtualflow.reduction.reducer import Reducer
from virtualflow.reduction.settings import Exchange, ReductionSettings
from virtualflow.state import transfer
from virtualflow.state.transfer import move_state, pack_state
from virtualflow.transport.communicator import Communicator
from virtualflow.transport.interface import Message

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


def both(task: Callable[[Communicator], Any], members: list[Communicator]) -> list[Any]:
    """What comes of it at each member: a result, or the sentence with which it broke."""

    def carry_out(member: Communicator) -> Any:
        try:
            return task(member)
        except CommunicatorBroken as error:
            return str(error)

    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(carry_out, members))


@pytest.mark.parametrize("flips", [60, nightly(1_000)])
@pytest.mark.parametrize("what", ["small message", "large message", "small gather", "large gather"])
def test_a_bit_that_flips_in_what_is_sent_is_found_by_who_receives_it(what: str, flips: int) -> None:
    draw = random.Random(flips)
    few, many = {"large message": (132_000, 150_000), "large gather": (1_050_000, 1_100_000)}.get(what, (1, 5_000))
    for flip in range(flips):
        members = mesh(2)
        dtype, size = draw.choice(DTYPES), draw.randrange(few, many)
        values = [torch.randint(0, 255, (size,), dtype=torch.uint8).to(dtype) for _ in range(2)]
        faulty = damage(members[0], 1, seed=flip)

        def exchange(
            member: Communicator, values: list[Tensor] = values, dtype: torch.dtype = dtype, size: int = size
        ) -> None:
            peer = 1 - member.rank
            if "message" not in what:
                raw = torch.empty(2 * values[0].nbytes, dtype=torch.uint8)
                member.start_all_gather(raw, values[member.rank].view(torch.uint8)).wait()
                return
            arrived = torch.empty(size, dtype=dtype)
            own = [Message(peer, arrived, incoming=True), Message(peer, values[member.rank], incoming=False)]
            member.start_messages(own).wait()

        found = both(exchange, members)
        assert faulty.sent >= faulty.at
        assert "from worker-0 arrived damaged" in found[1], (flip, what)
        for member in members:
            member.close()


@pytest.mark.parametrize("flips", [6, nightly(1_000)])
def test_no_sum_is_made_of_a_damaged_gradient(flips: int) -> None:
    settings = ReductionSettings(exchange=Exchange("reduce-scatter"), bucket=1 << 10)
    contributed = [[torch.randn(300, 3), torch.randn(500)] for _ in range(2)]
    templates = [torch.zeros(300, 3), torch.zeros(500)]
    clean = [contributed[0][place] + contributed[1][place] for place in range(2)]

    def take_part(member: Communicator) -> list[Tensor]:
        accumulator = Accumulator(CanonicalSummation(2))
        accumulator.add(member.rank, [value.clone() for value in contributed[member.rank]])
        ranges, present = [range(1), range(1, 2)], [True, True]
        reducer = Reducer(CanonicalSummation(2), settings)
        try:
            reduced = reducer.reduce(member, ranges, accumulator.parts, templates=templates, present=present, scale=1.0)
            return [tensor.clone() for tensor in reduced if tensor is not None]
        finally:
            reducer.close()

    def reduce(at: int, seed: int) -> tuple[Damaging, list[Any]]:
        members = mesh(2)
        faulty = damage(members[0], at, seed)
        found = both(take_part, members)
        for member in members:
            member.close()
        return faulty, found

    operations = reduce(0, 0)[0].sent
    assert operations >= 4
    broken = 0
    for flip in range(flips):
        faulty, outcomes = reduce(flip % operations + 1, flip)
        assert faulty.sent >= faulty.at
        for outcome in outcomes:
            if isinstance(outcome, str):
                broken += 1
            else:
                assert all(torch.equal(one, other) for one, other in zip(outcome, clean, strict=True)), flip
    assert broken >= flips


@pytest.mark.parametrize("flips", [6, nightly(200)])
def test_a_damaged_state_is_not_taken_over(flips: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STRIPE", 64)
    monkeypatch.setattr(transfer, "PIECE", 128)
    packed = pack_state(captured(*small_model()))
    for flip in range(flips):
        members = mesh(2)
        # The first thing is a gather, then the block, then the stripes; each with its checksum.
        faulty = damage(members[0], flip % 10 + 1, seed=flip)

        def take_part(member: Communicator) -> str:
            given = packed if member.rank == 0 else None
            move_state(
                member, [0], [1], packed=given, land=lambda _, announced: {
                    path: torch.empty(like.shape, dtype=like.dtype) for path, like in announced.items()
                },
            )  # fmt: skip
            return "complete"

        found = both(take_part, members)
        assert faulty.sent >= faulty.at
        assert "from worker-0 arrived damaged" in found[1], (flip, found)
        for member in members:
            member.close()


def train(steps: int, victim: str = "", at: int = 0) -> Trained:
    if victim and os.environ[ENV_WORKER] == victim:
        damage_first_generation(at)
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with vf.elastic(model, optimizer, regression(), batch_size=12, steps=steps, virtual_nodes=4) as run:
        metrics, seen = train_steps(run, model, optimizer, lambda: None)
    return trained(run, model, optimizer, metrics, seen)


@pytest.mark.parametrize("at", [1, 9, nightly(2), nightly(5), nightly(15)])
def test_a_job_whose_network_flips_a_bit_comes_to_the_same_bits(start_job: Callable[..., ElasticJob], at: int) -> None:
    job = start_job(train, 6, "worker-1", at, workers=2, membership=HASTY)
    assert job.results() == [alone(train, 6)] * 2
    status = job.status()
    assert any("from worker-1 arrived damaged" in event.text for event in status.events), status

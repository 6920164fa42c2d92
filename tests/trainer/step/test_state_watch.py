"""States that come apart: each bit is compared within a sweep, and the job ends before the next update."""

from __future__ import annotations

import copy
import os
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_collectives import Counting, regression, train_steps
from elastic_jobs import ElasticJob, Trained, alone, trained
from injected import inject
from states import OPTIMIZERS, Net, train
from states import trained as groups_of
from thread_collectives import Seat, Table
from torch import Tensor, nn

import virtualflow as vf
from tiers import nightly
from virtualflow.protocol.settings import ENV_WORKER
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.step import Shards, Update
from virtualflow.step.placement import DevicePlacement
from virtualflow.step.state_watch import (
    SETTINGS,
    Diverged,
    Divergence,
    StateWatch,
    StateWatchSettings,
    doubt_keepers,
    find_divergence,
)
from virtualflow.worker.divergence import describe_divergence

Worker = tuple[nn.Module, torch.optim.Optimizer]
SWEEP = 8


def make(name: str, dtype: torch.dtype = torch.float32) -> Worker:
    """A trained model with batch norm and a tied weight, and a layer that is larger than a row."""
    model = nn.Sequential(Net(dtype=dtype), nn.Linear(6, 900, dtype=dtype))
    optimizer = OPTIMIZERS[name](groups_of(model))
    train(model, optimizer, None, range(2))
    return model, optimizer


def watch(worker: Worker, part: int = 64) -> StateWatch:
    return StateWatch(*worker, shares=None, settings=StateWatchSettings(SWEEP, part))


def watched(worker: Worker) -> dict[str, Tensor]:
    """All tensors that are compared, by name."""
    model, optimizer = worker
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.data
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{name} ({key})"] = value
    persistent = model.state_dict().keys()
    return found | {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def bytes_at_rest(tensor: Tensor) -> Tensor:
    """Its memory; an expanded buffer shows one element several times."""
    shape, stride = (tensor.shape, tensor.stride()) if 0 not in tensor.stride() else ((1,), (1,))
    return tensor.as_strided(shape, stride).reshape(-1).view(torch.uint8)


def sweep(workers: list[StateWatch], steps: range) -> list[Divergence] | None:
    """What each worker finds in so many steps."""
    for step in steps:
        for one in workers:
            one.take_up(step)
        values = [one.value for one in workers]
        if len(set(values)) == 1:
            continue
        table = Table(len(workers))

        def compare(rank: int, table: Table = table, values: list[int] = values) -> Divergence:
            with pytest.raises(Diverged) as caught:
                workers[rank].compare(Seat(table, rank), values)
            return caught.value.found

        with ThreadPoolExecutor(len(workers)) as threads:
            return list(threads.map(compare, range(len(workers))))
    return None


def test_a_setting_of_the_optimizer_that_differs_is_found_in_the_step_that_would_use_it() -> None:
    workers = [make("adamw") for _ in range(3)]
    watches = [watch(worker) for worker in workers]
    for one in watches:
        one.take_up(1)
    workers[1][1].param_groups[0]["lr"] *= 2  # in the inner loop, when the state has been taken up already
    values = [one.value for one in watches]
    assert values[0] == values[2] != values[1]
    assert [find.tensor for find in sweep(watches, range(2, 3)) or []] == [SETTINGS] * 3
    said = describe_divergence(Divergence(2, 0, SETTINGS, (1,)), ["a", "b", "c"])
    assert "first in the optimizer's settings: b against 2 of 3" in said
    assert said.endswith("from step.metrics, which are equal on all workers, or from step.number")


@pytest.mark.parametrize("flips", [30, nightly(1_000)])
def test_a_bit_that_flips_at_rest_is_found_within_a_sweep_with_its_tensor_and_worker(flips: int) -> None:
    draw = random.Random(flips)
    kinds = [(name, dtype) for name in ("adamw", "sgd-momentum") for dtype in (torch.float32, torch.bfloat16)]
    made = {kind: [make(*kind) for _ in range(3)] for kind in kinds}
    for flip in range(flips):
        workers = made[draw.choice(kinds)]
        victim, first = draw.randrange(3), draw.randrange(10_000)
        tensors = {name: tensor for name, tensor in watched(workers[victim]).items() if tensor.numel()}
        name = draw.choice(list(tensors))
        raw = bytes_at_rest(tensors[name])
        place, bit = draw.randrange(len(raw)), 1 << draw.randrange(8)
        raw[place] ^= bit
        part = draw.choice([64, 1 << 30])
        found = sweep([watch(worker, part) for worker in workers], range(first, first + SWEEP))
        raw[place] ^= bit
        assert found is not None, (flip, name)
        assert len(set(found)) == 1
        assert (found[0].tensor, found[0].odd) == (name, (victim,)), flip
        assert max(0, first - SWEEP - 1) <= found[0].agreed < max(1, first)


def test_the_first_step_of_a_generation_compares_all_buffers() -> None:
    """They are averaged at its end: what one had wrong would be wrong in all, and equal."""
    workers = [make("adamw") for _ in range(3)]
    names = [name for name in watched(workers[0]) if name in dict(workers[0][0].named_buffers())]
    assert len(names) > 3
    for name, step in product(names, range(SWEEP)):
        buffer = bytes_at_rest(workers[1][0].get_buffer(name))
        assert sweep([entering(watch(worker)) for worker in workers], range(step, step + 1)) is None
        buffer[0] ^= 1
        found = sweep([entering(watch(worker)) for worker in workers], range(step, step + 1))
        buffer[0] ^= 1
        assert found is not None, (name, step)
        assert (found[0].tensor, found[0].odd) == (name, (1,))


def entering(watching: StateWatch) -> StateWatch:
    """Whose generation begins."""
    watching.enter(range(0))
    return watching


@pytest.mark.parametrize("rounds", [2, nightly(12_500)])
def test_equal_states_are_never_told_apart(rounds: int) -> None:
    one = make("adamw")
    other = copy.deepcopy(one[0]), None
    twin = OPTIMIZERS["adamw"](groups_of(other[0]))
    twin.load_state_dict(copy.deepcopy(one[1].state_dict()))
    for turn in range(rounds):
        if turn % 1_000 == 0:
            for model, optimizer in (one, (other[0], twin)):
                train(model, optimizer, None, range(turn, turn + 1))
        assert sweep([watch(one), watch((other[0], twin))], range(turn, turn + SWEEP)) is None


@pytest.mark.parametrize(
    ("rows", "tensor", "odd"),
    [
        pytest.param([[1, 2], [1, 3]], "b", (), id="two workers: nobody is convicted"),
        pytest.param([[1, 2], [1, 2], [7, 2]], "a", (2,), id="one against two"),
        pytest.param([[1, 2], [1, 3], [7, 2]], "a", (), id="all different"),
        pytest.param([[1, 2], [1, 2], [7, 2], [7, 2]], "a", (), id="two against two"),
        pytest.param([[1, 2], [1, 2], [1, 2], [1], [1, 9]], "b", (3, 4), id="two against three, each in its own way"),
        pytest.param(
            [[1, 2], [1, 2, 3], [1, 2]], "the set of tensors that the optimizer keeps", (1,), id="one tensor more"
        ),
    ],
)
def test_the_first_tensor_and_the_minority_are_named(rows: list[list[int]], tensor: str, odd: tuple[int, ...]) -> None:
    assert find_divergence(9, 4, ["a", "b"], rows) == Divergence(9, 4, tensor, odd)


def test_the_sentence_says_who_against_whom() -> None:
    names = ["worker-0", "worker-1", "worker-2"]
    assert "first in w: worker-2 against 2 of 3; " in describe_divergence(Divergence(9, 4, "w", (2,)), names)
    nobody = describe_divergence(Divergence(9, 4, "w", ()), names[:2])
    assert "worker-0 and worker-1, of which no majority is equal; " in nobody
    assert "is that of step 4: " in nobody


# --- shares of a sharded optimizer ------------------------------------------------------------------------------------


def sharing(
    name: str, size: int, part: int, made: Callable[[str], Worker] = make, block: int = 4_096
) -> list[tuple[Worker, StateWatch]]:
    """Workers that each keep the states of their share only."""
    found = []
    for rank in range(size):
        model, optimizer = made(name)
        shards = Shards(
            [*model.parameters()],
            optimizer,
            clip_norm=None,
            clip_value=None,
            reduction=ReductionSettings(norm_block=block),
            placement=DevicePlacement(),
            copies=2,
        )
        shards.enter(rank, size)
        shards.claim(shards.mine)
        watching = StateWatch(model, optimizer, shares=shards, settings=StateWatchSettings(SWEEP, part))
        found.append(((model, optimizer), watching))
    return found


def sweep_shares(watches: list[StateWatch], first: int) -> Divergence | None:
    """What all workers find in a sweep, the same each."""
    for step in range(first, first + SWEEP):
        for one in watches:
            one.take_up(step)
        values, table = [one.value for one in watches], Table(len(watches))

        def compare(rank: int, table: Table = table, values: list[int] = values) -> Divergence | None:
            try:
                watches[rank].compare(Seat(table, rank), values)
            except Diverged as error:
                return error.found
            return None

        with ThreadPoolExecutor(len(watches)) as threads:
            (found,) = set(threads.map(compare, range(len(watches))))
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("part", [64, 1 << 30])
def test_shares_that_are_equal_are_not_told_apart(size: int, part: int) -> None:
    watches = [watching for _, watching in sharing("adamw", size, part)]
    assert sweep_shares(watches, 3) is None
    assert len({one.value for one in watches}) == 1 if size == 1 else True


def large(name: str) -> Worker:
    torch.manual_seed(0)
    model = nn.Linear(500, 1, bias=False)
    optimizer = OPTIMIZERS[name](model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("size", [2, 3])
def test_a_fault_in_a_slice_is_found_with_both_keepers(size: int) -> None:
    workers = sharing("adamw", size, 256, large, block=16)
    assert sweep_shares([watching for _, watching in workers], 0) is None
    shards: Any = workers[0][1]._shares
    slices = [state for of in shards._kept._slices.values() for state in of.values()]
    states = slices or [*workers[0][0][1].state.values()]
    states[0]["exp_avg"].view(-1)[-1] += 1
    found = sweep_shares([watching for _, watching in workers], 0)
    assert found is not None
    assert (found.tensor, found.odd, len(found.keepers)) == ("weight (exp_avg)", (), 2)
    assert 0 in found.keepers


@pytest.mark.parametrize("flips", [12, nightly(1_000)])
def test_a_bit_that_flips_in_a_share_is_found_with_its_tensor_and_both_keepers(flips: int) -> None:
    draw = random.Random(flips)
    made = {(name, size): sharing(name, size, 64) for name in ("adamw", "sgd-momentum") for size in (2, 3, 4)}
    for flip in range(flips):
        name, size = draw.choice(list(made))
        workers = made[name, size]
        # One whose share is smaller than what may be cut keeps nothing.
        victim = draw.choice([rank for rank, ((_, optimizer), _) in enumerate(workers) if optimizer.state])
        model, optimizer = workers[victim][0]
        names = {parameter: label for label, parameter in model.named_parameters()}
        states = [
            (f"{names[parameter]} ({key})", value)
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        ]
        label, value = draw.choice(states)
        raw = value.view(-1).view(torch.uint8)
        place, bit = draw.randrange(len(raw)), 1 << draw.randrange(8)
        raw[place] ^= bit
        found = sweep_shares([watching for _, watching in workers], draw.randrange(10_000))
        raw[place] ^= bit
        assert found is not None, (flip, label)
        assert (found.tensor, found.odd, len(found.keepers)) == (label, (), 2), flip
        assert victim in found.keepers


def twins(name: str) -> Worker:
    """A trained model of two parameters of one size: of two workers, each keeps one of them first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = OPTIMIZERS[name](model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def test_the_same_fault_in_equal_states_of_all_parameters_does_not_cancel_out() -> None:
    workers = sharing("adamw", 2, 1 << 30, twins)
    for state in workers[1][0][1].state.values():
        state["step"] += 1
    found = sweep_shares([watching for _, watching in workers], 0)
    assert found is not None
    assert (found.tensor, found.odd, found.keepers) == ("0.weight (step)", (), (0, 1))


def test_a_parameter_that_differs_is_found_beside_shares() -> None:
    workers = sharing("adamw", 3, 64)
    model, _ = workers[2][0]
    name, parameter = next(iter(model.named_parameters()))
    parameter.data.view(-1)[0] += 1
    found = sweep_shares([watching for _, watching in workers], 0)
    assert found is not None
    assert (found.tensor, found.odd, found.keepers) == (name, (2,), ())


def test_a_keeper_that_stands_alone_may_be_the_one_that_is_right() -> None:
    """The first keeper of a share is wrong, and all got its values but the second, which stepped its own."""
    for size, first in [(3, 0), (3, 1), (4, 2)]:
        workers = sharing("sgd-momentum", size, 256, large, block=16)
        shares: Any = workers[0][1]._shares
        (piece, *_) = shares.row.pieces(shares.shares.first(first))
        assert shares.shares.keepers(shares.row.offsets[piece.place] + piece.begin) == (first, (first + 1) % size)
        for rank, ((model, _), _) in enumerate(workers):
            if rank != (first + 1) % size:
                [*model.parameters()][piece.place].data.view(-1)[piece.begin] += 1
        found = sweep_shares([watching for _, watching in workers], 0)
        assert found is not None
        assert (found.odd, found.keepers) == ((), (first, (first + 1) % size)), (size, first)


@pytest.mark.parametrize(
    ("odd", "stepped", "doubted"),
    [
        ((1,), [(0, 1)], (0, 1)),  # the second keeper
        ((2,), [(0, 1)], ()),  # took its values from the first, and has others
        ((0,), [(0, 1)], ()),  # the first: what it sent was right, or the second would stand alone
        ((0,), [(1, 2), (2, 0)], (2, 0)),
        ((), [(0, 1)], ()),
        ((1,), [(1,)], ()),  # of one keeper, all others have its values
        ((1,), [], ()),  # a buffer, or a setting
    ],
)
def test_who_is_doubted(odd: tuple[int, ...], stepped: list[tuple[int, ...]], doubted: tuple[int, ...]) -> None:
    found = doubt_keepers(Divergence(9, 4, "w", odd), stepped)
    assert found == Divergence(9, 4, "w", () if doubted else odd, doubted)


def test_both_keepers_are_named() -> None:
    text = describe_divergence(Divergence(9, 4, "w (exp_avg)", (), (1, 2)), ["worker-0", "worker-1", "worker-2"])
    assert "first in w (exp_avg): worker-1 and worker-2, which both keep it, and nobody can tell who is wrong;" in text


# --- a job ------------------------------------------------------------------------------------------------------------


def entering_wrong(joiner: str) -> Trained:
    """Batch norm's statistics of a joiner are others than those that it was given."""
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    enter = Update.enter

    def spoil(update: Update) -> None:
        enter(update)
        assert model.norm.running_var is not None
        model.norm.running_var.add_(1)

    if os.environ[ENV_WORKER] == joiner:
        Update.enter = spoil  # type: ignore[method-assign]
    with vf.elastic(model, optimizer, regression(), batch_size=12, steps=8, virtual_nodes=4) as run:
        metrics, _ = train_steps(run, model, optimizer, lambda: None)
    return trained(run, model, optimizer, metrics)


@pytest.mark.slow
def test_a_joiner_with_other_statistics_is_found_before_they_are_averaged(
    start_job: Callable[..., ElasticJob],
) -> None:
    job = start_job(entering_wrong, "worker-2", workers=2, hold=3)
    job.reach(3)
    job.join(1)
    outcomes = job.finish()
    assert {outcome.kind for outcome in outcomes.values()} <= {"StatesDiffer", "JobFailed"}, outcomes
    for outcome in outcomes.values():
        assert "norm.running_var: worker-2 against 2 of 3" in outcome.text, outcomes


def training(directory: str, victim: str = "", at: int = 0, sharded: bool = False) -> Trained:
    inject(watch={"sweep": 4, "part": 16})
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    steps = 0

    def flip() -> None:
        nonlocal steps
        steps += 1
        if steps == at and os.environ[ENV_WORKER] == victim:
            # Of a sharded optimizer, that of another parameter may be here.
            state = optimizer.state.get(model.linear.weight) or next(iter(optimizer.state.values()))
            flat = state["exp_avg"].view(-1).view(torch.int32)
            flat[min(9, len(flat) - 1)] ^= 1 << 20

    policy = vf.CheckpointPolicy(directory, every_steps=5, keep=2) if directory else None
    with vf.elastic(
        model,
        optimizer,
        regression(),
        batch_size=12,
        steps=16,
        virtual_nodes=4,
        checkpoint=policy,
        shard_optimizer=sharded,
    ) as run:
        metrics, _ = train_steps(run, model, optimizer, flip)
    return trained(run, model, optimizer, metrics)


@pytest.mark.slow
def test_a_job_that_comes_apart_ends_and_goes_on_from_the_last_state_that_was_equal(
    start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    job = start_job(training, str(tmp_path), "worker-1", 10, workers=3, hold=5)
    for step in (5, 10):  # one that is to be written while another is would be left out
        job.reach(step)
        job.wait_for(
            lambda status, step=step: bool(status.checkpoint) and status.checkpoint.step == step,
            f"the checkpoint of step {step}",
        )
    outcomes = job.finish()
    assert [(lost.worker, lost.convicted) for lost in job.status().lost] == [("worker-1", True)]
    texts = {outcome.text for outcome in outcomes.values()}
    assert {outcome.kind for outcome in outcomes.values()} <= {"StatesDiffer", "JobFailed"}, outcomes
    for text in texts:
        assert "worker-1 against 2 of 3" in text, texts
        assert "linear.weight" in text, texts
    kept = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step-"))
    assert kept, list(tmp_path.iterdir())
    assert max(kept) <= "step-00000009"
    assert any(path.name.startswith("diverged-step-") for path in tmp_path.iterdir())
    assert start_job(training, str(tmp_path), workers=2).results() == [alone(training, "")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker-0", "worker-1", "worker-2"])  # in the order of joining, which varies
def test_a_job_whose_keepers_come_apart_ends_and_names_both(
    start_job: Callable[..., ElasticJob], tmp_path: Path, victim: str
) -> None:
    job = start_job(training, str(tmp_path), victim, 10, True, workers=3)
    outcomes = job.finish()
    assert {outcome.kind for outcome in outcomes.values()} <= {"StatesDiffer", "JobFailed"}, outcomes
    for outcome in outcomes.values():
        assert re.search(r"\(exp_avg\): worker-\d and worker-\d, which both keep it", outcome.text), outcomes
        assert victim in outcome.text, outcomes
    assert job.status().lost == ()
    assert start_job(training, str(tmp_path), "", 0, True, workers=2).results() == [alone(training, "")] * 2

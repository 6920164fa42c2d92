"""Models and optimizers of all kinds with divided parameters: the bits of a worker that has all of them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from broken_collectives import HASTY, break_collective
from divided_models import Tower, data, run_on_data
from elastic_jobs import ElasticJob, alone, die_here
from injected import injected
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import virtualflow as vf
from tiers import nightly, slow
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.settings import ENV_SHARD, Redundancy
from virtualflow.state import digests

StartJob = Callable[..., ElasticJob]
STEPS = 5
WIDTH = 19
COMPILER = os.environ.get("CXX", "g++")
COMPILING = 300.0
"""Seconds until the workers must have compiled."""


class Block(nn.Module):
    """A block of odd shapes, each of whose layers may have a type of its own."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.recomputed = self.skips = False
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.skips and torch.rand(()) < 0.5:
            return x
        return checkpoint(self.work, x, use_reentrant=False) if self.recomputed else self.work(x)

    def work(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.dropout(torch.tanh(self.up(self.norm(x.to(self.norm.weight.dtype)).to(self.up.weight.dtype))), 0.1)
        return x + self.down(inner.to(self.down.weight.dtype)).to(x.dtype)


class Stack(nn.Module):
    """Blocks between what is outside of all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.around: dict[str, Any] | None = None
        """How blocks are checkpointed from outside."""
        self.headless = False
        self.into, self.out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList([Block(37), Block(301), Block(41)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x.to(self.into.weight.dtype))
        for block in self.blocks:
            x = block(x) if self.around is None else checkpoint(block, x, **self.around)
        return x if self.headless else self.out(x.to(self.out.weight.dtype))


def stack_of(kind: str) -> Stack:
    torch.manual_seed(1)
    model = Stack()
    if kind == "bfloat16":
        model.bfloat16()
    elif kind == "mixed":  # in each block, and outside of them
        model.into.bfloat16()
        for block in model.blocks:
            block.up.bfloat16()
            block.down.double()
    elif kind == "inside":
        for block in model.blocks:
            block.recomputed = True
    elif kind == "around":
        model.around = {"use_reentrant": False}
    elif kind == "reentrant":
        model.around = {"use_reentrant": True}
    elif kind == "headless":
        model.headless = True
    elif kind == "skips":
        for block in model.blocks:
            block.skips = True
    elif kind in ("aot_eager", "inductor"):  # what there is to compile, each in another way
        model.blocks[0].compile(backend=kind)
        model.blocks[1] = torch.compile(model.blocks[1], backend=kind)  # type: ignore[assignment]
        model.blocks[2].up.compile(backend=kind)
        model.into = torch.compile(model.into, backend=kind)  # type: ignore[assignment]
        model.out.compile(backend=kind)
    return model


def optimizer_for(model: nn.Module, how: str) -> torch.optim.Optimizer:
    if how == "Adafactor":
        return torch.optim.Adafactor(model.parameters(), 0.02)
    return torch.optim.AdamW(model.parameters(), 0.02, fused=how == "fused")


def train(kind: str, how: str = "", divided: bool = True) -> tuple[str, float]:
    """Two epochs and a bit with a last batch that is short; tells the digest and the last loss."""
    model = stack_of(kind)
    named = vf.ShardParameters(blocks=["blocks.0", model.blocks[1].up, "out"]) if how == "named" else "parameters"
    options: dict[str, Any] = {"shard": named, "redundancy": "none"} if divided else {}
    with run_on_data(
        model,
        optimizer_for(model, how),
        STEPS,
        clip_grad_norm=0.5,
        **options,
    ) as run:
        for step in run:
            for x, y in step:
                loss = F.mse_loss(model(x).float().mean(1, keepdim=True), y)
                step.log(loss=loss)
                loss.backward()
        training = run._context.training
        return training.digest or digests.digest(model.state_dict()), step.metrics["loss"]


@pytest.mark.parametrize(
    ("kind", "how", "workers", "leaves"),
    [
        ("mixed", "", 3, True),
        slow("bfloat16", "", 3, False),
        nightly("bfloat16", "", 5, True),
        nightly("mixed", "", 5, False),
        ("plain", "fused", 3, False),
        slow("plain", "fused", 5, True),
        nightly("plain", "fused", 4, False),
        slow("mixed", "fused", 3, False),
        ("inside", "", 3, False),
        slow("around", "", 3, True),
        slow("plain", "named", 3, True),
        slow("headless", "", 3, False),
        slow("skips", "", 3, False),
        slow("reentrant", "", 3, False),
    ],
)
def test_bits_are_those_of_one_worker_that_has_all(
    start_job: StartJob, kind: str, how: str, workers: int, leaves: bool
) -> None:
    job = start_job(train, kind, how, workers=workers, hold=3 * leaves)
    if leaves:
        job.reach(3)
        job.drain("worker-1")
    ended = [outcome.value for name, outcome in job.finish().items() if not leaves or name != "worker-1"]
    assert ended == [alone(train, kind, how, False)] * (workers - leaves)


@pytest.mark.timeout(2 * COMPILING)
@pytest.mark.parametrize(
    "backend",
    [
        slow("aot_eager"),
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(
                    shutil.which(COMPILER) is None, reason=f"needs a C++ compiler: torch.compile calls {COMPILER}"
                ),
            ],
        ),
    ],
)
def test_blocks_and_what_is_outside_of_them_may_be_compiled(start_job: StartJob, backend: str, tmp_path: Path) -> None:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    reference = alone(train, backend, "", False, environment=environment)
    job = start_job(train, backend, workers=3, hold=3, environment=environment)
    # By then they have compiled for full micro-batches and for short ones.
    job.wait_for(lambda status: status.step == 3 and status.phase == "training", "step 3", COMPILING)
    job.drain("worker-1")
    outcomes = job.finish()
    assert {outcomes[name].value for name in ("worker-0", "worker-2")} == {reference}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["given", "method"])
def test_a_compiled_model_is_refused_by_name(how: str) -> None:
    model: Any = stack_of("plain")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if how == "method":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    fixed: dict[str, Any] = {"batch_size": 12, "steps": 1, "virtual_nodes": 4, "shard": "parameters"}
    with pytest.raises(ConfigurationError, match="compile its blocks"), vf.elastic(model, optimizer, data(), **fixed):
        pass


@pytest.mark.parametrize("told", ["", "Parameters"], ids=["by the script", "by the job, too"])
@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        (["blocks.3"], "the model has no module named 'blocks.3'"),
        (["blocks.0", "blocks.0.up"], "block blocks.0.up and block blocks.0 share a module"),
        ([], "blocks is empty"),
    ],
    ids=["nowhere", "within another", "none"],
)
def test_blocks_that_cannot_be_gathered_are_refused(
    blocks: list[str], sentence: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if told:
        monkeypatch.setenv(ENV_SHARD, told)
    model = stack_of("plain")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fixed: dict[str, Any] = {"batch_size": 12, "steps": 1, "virtual_nodes": 4}
    with (
        pytest.raises(ConfigurationError, match=sentence),
        vf.elastic(model, optimizer, data(), shard=vf.ShardParameters(blocks=blocks), **fixed),
    ):
        pass


def test_adafactor_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r'Adafactor cannot be sharded, .* leave out shard="parameters"'):
        alone(train, "plain", "Adafactor")


def average(divided: bool, redundancy: Redundancy = "peer", victim: str = "", number: int = 0, how: str = "") -> Any:
    """Keep an average of the weights and its number of updates; tells the digest, and what is kept of the average.

    ``how`` tells what becomes of the ``victim``: it dies before or behind the update of the average in step
    ``number``, or a message of that ``number`` breaks.
    """
    torch.manual_seed(1)
    if how in ("killed", "broke"):
        break_collective(victim, number, how)
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    options: dict[str, Any] = {"shard": "parameters", "redundancy": redundancy} if divided else {}
    with run_on_data(
        model,
        optimizer,
        STEPS,
        state={"average": averaged, "schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)},
        **options,
    ) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            if step.number == 3:
                vf.evaluate(model, data(), lambda batch: model(batch[0]), batch_size=24)
            if how == "before" and step.number == number:
                die_here(victim)
            averaged.update_parameters(model)
            if how == "behind" and step.number == number:
                die_here(victim)
        assert averaged.n_averaged == STEPS
        training, shards = run._context.training, run._context.update.shards
        digest = training.digest or digests.digest(model.state_dict())
        if not divided:
            return digest, {name: tuple(value.flatten().tolist()) for name, value in averaged.module.named_parameters()}
        [kept] = shards.averages
        names = [name for name, _ in model.named_parameters()]
        pieces = {}
        for piece in shards.row.pieces(shards.mine):
            value = kept.values.read(piece).flatten()
            pieces[f"{names[piece.place]} {piece.begin} {piece.end}"] = tuple(value.tolist())
        return digest, pieces


def check_averages(outcomes: list[Any], copies: int) -> None:
    digest, whole = alone(average, False)
    assert {outcome[0] for outcome in outcomes} == {digest}
    kept = dict.fromkeys(whole, 0)
    for _, pieces in outcomes:
        for key, value in pieces.items():
            name, begin, end = key.split()
            assert value == whole[name][int(begin) : int(end)], key
            kept[name] += len(value)
    assert kept == {name: copies * len(value) for name, value in whole.items()}


@pytest.mark.parametrize(
    ("workers", "redundancy", "copies"), [(3, "none", 1), slow(2, "peer", 2), nightly(5, "peer", 2)]
)
def test_each_worker_averages_what_it_keeps(
    start_job: StartJob, workers: int, redundancy: Redundancy, copies: int
) -> None:
    check_averages(start_job(average, True, redundancy, workers=workers).results(), copies)


@pytest.mark.parametrize(
    ("how", "number"),
    [
        slow("before", 3),
        slow("behind", 3),
        *(slow("broke", number) for number in (34,)),
        *(nightly("broke", number) for number in range(1, 160, 9)),
        *(nightly("killed", number) for number in range(1, 160, 9)),
    ],
)
def test_an_average_sees_each_step_once_whatever_breaks(start_job: StartJob, how: str, number: int) -> None:
    job = start_job(average, True, "peer", "worker-1", number, how, workers=3, membership=HASTY)
    check_averages([outcome.value for outcome in job.finish().values() if outcome.kind != "killed"], 2)


class Shadow:
    """An average by hand."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.values

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.values = dict(state)


def median_of(averaged: torch.Tensor, current: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    return averaged.lerp(current, 0.1) + current.median()


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "by hand": (Shadow, "state holds average, a Shadow with tensors like the model's"),
    "another model": (lambda _: AveragedModel(nn.Linear(4, 4)), "must be an AveragedModel of the model"),
    "a part": (lambda model: AveragedModel(model.blocks), "must be an AveragedModel of the model"),
    "a teacher": (lambda _: nn.Linear(1, 1), "state holds average, a Linear with tensors"),
    "rows": (lambda model: AveragedModel(model, avg_fn=median_of), "average does not average each element for itself"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_average_that_cannot_be_divided_is_refused_by_name(kind: str) -> None:
    model = stack_of("plain")
    make, sentence = REFUSED[kind]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fixed: dict[str, Any] = {"batch_size": 12, "steps": 1, "virtual_nodes": 4, "shard": "parameters"}
    with (
        pytest.raises(ConfigurationError, match=sentence),
        vf.elastic(model, optimizer, data(), state={"average": make(model)}, **fixed),
    ):
        pass


def look_at_average(how: str) -> None:
    model = stack_of("plain")
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fixed: dict[str, Any] = {"batch_size": 12, "steps": 1, "virtual_nodes": 4, "shard": "parameters"}
    with (
        injected(reduction={"norm_block": 4, "bucket": 4_096}),
        vf.elastic(model, optimizer, data(), state={"average": averaged}, redundancy="none", **fixed) as run,
    ):
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            averaged.update_parameters(model)
            if how == "runs":
                averaged(data()[:2][0])
            averaged.state_dict()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [slow("reads", r"average.state_dict\(\) would have NaN"), slow("runs", "average is divided over the workers")],
)
def test_nobody_takes_a_part_of_an_average_for_all(start_job: StartJob, how: str, sentence: str) -> None:
    outcomes = start_job(look_at_average, how, workers=2).finish().values()
    assert any(outcome.kind == "ConfigurationError" and re.search(sentence, outcome.text) for outcome in outcomes)
    alone(look_at_average, how)

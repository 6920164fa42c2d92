"""In layer-major order, blocks set out for other workers while earlier ones are still computed, to the same bits."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from broken_collectives import HASTY, break_collective
from elastic_jobs import BEGUN_EARLY, EXCHANGE, PATIENCE, PAUSE, ElasticJob, Trained, alone, die_here, is_here, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly
from virtualflow.memory.activations.layer_major import LayerMajor
from virtualflow.protocol.settings import ENV_WORKER
from virtualflow.reduction.pipeline import Pipeline
from virtualflow.step.gradient_sync import GradientSync
from virtualflow.transport import Pending
from virtualflow.worker.run import Run

BLOCKS, WIDTH, STEPS, FATAL, NODES = 6, 8, 7, 5, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "sharded and clipped": {"shard_optimizer": True, "clip_grad_norm": 0.3},
    "statistical": {"reproducibility": "statistical"},
}
ADDED = "the last block was summed up over all workers before the first one was computed"


class Unused(nn.Module):
    """Has a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2))


def tied() -> nn.Sequential:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(BLOCKS)), Unused(), tied(), nn.Linear(WIDTH, 3))


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(48, WIDTH, generator=draw), torch.randint(0, 3, (48,), generator=draw))


def watch(run: Run, victim: str, *, patient: bool) -> None:
    """Do not compute the first block backward before the others' sums of the last one have come.

    That is in vain if the exchange begins behind all blocks.

    Args:
        victim: dies halfway through the fatal step,
        patient: as soon as two others have computed theirs.
    """
    backward, add, take = LayerMajor._backward_all, Pipeline._add_and_return, GradientSync.take_summed
    added = SimpleQueue[int]()

    def adding(pipeline: Pipeline, index: int, pending: Pending) -> Any:
        made = add(pipeline, index, pending)
        if threading.current_thread() is not threading.main_thread() and index == 0:
            added.put(index)
        return made

    def watching(layers: LayerMajor, index: int, *arguments: Any) -> Any:
        is_fatal = run._context.training.completed_steps == FATAL - 1
        under_way = run._context.update.sync._overlap.under_way
        if under_way and is_fatal and index == BLOCKS // 2 and is_here(victim):
            deadline = time.monotonic() + PATIENCE / 4
            while patient and len([*Path(tempfile.gettempdir()).glob("computed-*")]) < 2:
                assert time.monotonic() < deadline
                time.sleep(PAUSE)
            die_here(victim)
        if under_way and index == 0 and not victim:
            added.get(timeout=PATIENCE / 4)
            print(ADDED, flush=True)
        return backward(layers, index, *arguments)

    def taking(*arguments: Any) -> None:
        take(*arguments)
        if patient and run._context.training.completed_steps == FATAL - 1:
            Path(tempfile.gettempdir(), f"computed-{os.environ[ENV_WORKER]}").touch()

    GradientSync.take_summed = taking  # type: ignore[method-assign]
    Pipeline._add_and_return = adding  # type: ignore[method-assign]
    LayerMajor._backward_all = watching  # type: ignore[method-assign]


def train(how: str, victim: str = "", number: int = 0, breaks: str = "", order: str = "layer-major") -> Trained:
    """The script, alone in the ordinary order.

    It tells the bytes that it has sent and received, and how many virtual nodes it has computed for the fatal step.

    Args:
        number: worker-1's collective that ``breaks``.
    """
    break_collective("worker-1" if number else "", number, breaks)
    layers = order == "layer-major" and ENV_WORKER in os.environ
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    memory = vf.Memory("1GiB", order="layer-major") if layers else None
    fixed: dict[str, Any] = {"batch_size": 16, "steps": STEPS, "virtual_nodes": NODES, "seed": 3, "memory": memory}
    traffic, computed = None, 0
    with vf.elastic(model, optimizer, dataset(), **fixed, **OPTIONS.get(how, {})) as run:
        if layers:
            watch(run, victim, patient=how == "a patient victim")
        for step in run:
            if how == "frozen for a while":
                model[2].requires_grad_(step.number not in (3, 5))

            def loss(output: Tensor, y: Tensor) -> Tensor:
                nonlocal computed
                computed += step.number == FATAL  # noqa: B023
                if how == "weighed from the third step on" and step.number >= 3:  # noqa: B023
                    step.weight(1.0 + (y == 1).sum())  # noqa: B023
                return F.cross_entropy(output, y)

            if layers:
                step.layer_major(loss)
            else:
                for x, y in step:
                    value = loss(model(x), y)
                    value.backward()
                    step.log(loss=value)
            communicator = run._context.session.communicator
            traffic = None if communicator is None else communicator.traffic
    return trained(run, model, optimizer, repr(run.metrics), (traffic, computed))


def bits(result: Trained) -> tuple[str, Any]:
    return result.digest, result.metrics


def survivors(job: ElasticJob) -> list[Trained]:
    outcomes = [outcome for outcome in job.finish().values() if outcome.kind not in ("killed", "Drained")]
    assert all(outcome.kind == "returned" and BEGUN_EARLY in outcome.log for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "early"),
    [
        ("sharded and clipped", STEPS - 1),
        ("frozen for a while", STEPS - 1),
        # A scale that goes by samples has set out: the step is repeated behind the headers, as are those behind it.
        nightly("weighed from the third step on", 2),
        nightly("statistical", STEPS - 1),
    ],
)
def test_blocks_set_out_while_earlier_ones_are_computed(
    how: str, early: int, start_job: Callable[..., ElasticJob]
) -> None:
    outcomes = start_job(train, how, workers=3, environment={EXCHANGE: "behind"}).finish()
    assert [outcome.kind for outcome in outcomes.values()] == ["returned"] * 3, outcomes
    results = {bits(outcome.value) for outcome in outcomes.values()}
    assert results == {bits(alone(train, how))} if how != "statistical" else len(results) == 1
    for outcome in outcomes.values():
        assert outcome.log.count(BEGUN_EARLY) == outcome.log.count(ADDED) == early


@pytest.mark.slow
def test_as_much_travels_as_in_the_ordinary_order(start_job: Callable[..., ElasticJob]) -> None:
    ours, theirs = (
        start_job(train, "", "", 0, "", order, workers=2, environment={EXCHANGE: "behind"}).results()
        for order in ("layer-major", "ordinary")
    )
    assert [one.more for one in ours] == [one.more for one in theirs]
    assert {bits(one) for one in [*ours, *theirs]} == {bits(alone(train, ""))}


@pytest.mark.slow
def test_a_kill_amid_an_early_exchange_a_join_and_a_drain_change_no_bit(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(train, "", "worker-1", workers=2, hold=2, environment={EXCHANGE: "behind"})
    job.reach(2)
    job.join()
    job.hold(FATAL)
    job.await_end("worker-1")
    job.reach(FATAL)
    assert (change := job.status().last_change) is not None
    assert (change.cause, change.repeated_steps) == ("lost", 1)
    job.drain("worker-0")
    assert {bits(result) for result in survivors(job)} == {bits(alone(train, ""))}


@pytest.mark.slow
def test_sums_that_have_set_out_are_kept_when_another_worker_dies(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(train, "a patient victim", "worker-1", workers=3, environment={EXCHANGE: "behind"})
    results = survivors(job)
    assert {bits(result) for result in results} == {bits(alone(train, ""))}
    assert sum(result.more[1] for result in results) == NODES
    assert (change := job.status().last_change) is not None
    assert (change.cause, change.repeated_steps, change.repeated_virtual_nodes) == ("lost", 1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("breaks", ["broke", "killed"])
@pytest.mark.parametrize("numbers", [range(45, 71, 25), nightly(range(39, 105, 6))])
def test_whichever_message_breaks_the_workers_come_to_the_same_bits(
    breaks: str, numbers: range, start_job: Callable[..., ElasticJob]
) -> None:
    """The exchange of the second step begins with the 39th and has 33."""
    wanted = bits(alone(train, ""))
    for number in numbers:
        environment = {EXCHANGE: "behind"}
        job = start_job(train, "", "nobody", number, breaks, workers=3, membership=HASTY, environment=environment)
        results = survivors(job)
        assert [bits(result) for result in results] == [wanted] * (3 if breaks == "broke" else 2), (
            f"collective {number}"
        )

"""A generation that breaks where no attempt is under way: then nothing of the model is to be put back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_collectives import Counting, regression, train_steps
from elastic_jobs import ElasticJob, Trained, alone, die_here, trained
from thread_collectives import ALONE
from torch import nn

import virtualflow as vf
from tiers import nightly
from virtualflow.protocol import messages as m
from virtualflow.reduction import choose_summation
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.step import OptimizerOptions, Reduced, Schema, Update
from virtualflow.worker.session import Session

NODES, SAMPLES = 4, 3


def built() -> tuple[Counting, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Counting()
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def train(sharded: bool = False, told: str = "") -> Trained:
    """Steps with buffers that are averaged and copied, and an evaluation between.

    Where the job is held, a worker tells so by a file in ``told`` with its name and the step behind it.
    """
    await_hold = Session.await_hold

    def telling(self: Session, step: int) -> float:
        (Path(told) / f"{self.worker}-{step}").touch()
        return await_hold(self, step)

    if told:
        Session.await_hold = telling  # type: ignore[method-assign]
    model, optimizer = built()
    with vf.elastic(
        model, optimizer, regression(), batch_size=12, steps=5, virtual_nodes=NODES, shard_optimizer=sharded
    ) as run:
        metrics, _ = train_steps(run, model, optimizer, lambda: None)
    return trained(run, model, optimizer, metrics)


@pytest.mark.parametrize("sharded", [False, nightly(True)])
@pytest.mark.slow
def test_a_joiner_that_loses_another_before_its_first_attempt_keeps_the_buffers_that_it_was_given(
    sharded: bool, tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    """Averaged with those of its fresh model, batch norm's statistics would be wrong, and nothing else."""
    reference = alone(train)
    job = start_job(train, sharded, str(tmp_path), workers=2, hold=2)
    job.reach(2)
    (joiner,) = job.join(1)
    job.reach(3)
    job.wait_for(lambda _: (tmp_path / f"{joiner}-3").exists(), "the joiner, held before its first attempt")
    job.kill("worker-0")
    results = job.results()
    assert [(result.digest, result.metrics) for result in results] == [(reference.digest, reference.metrics)] * 2


def changing_buffers(victim: str = "") -> Trained:
    """The script's code after a step changes a buffer, and evaluates then; the victim is killed in the evaluation."""
    model, optimizer = built()
    seen: list[Any] = []

    def rows(batch: Any) -> Any:
        if len(seen) == 1:
            die_here(victim)
        return model(batch[0])

    with vf.elastic(model, optimizer, regression(), batch_size=12, steps=4, virtual_nodes=NODES) as run:
        for step in run:
            for x, y in step:
                (model(x) - y).square().mean().backward()
            statistic = model.norm.running_mean
            assert statistic is not None
            statistic.zero_()
            there = [parameter.grad is not None for parameter in model.parameters()]
            seen.append(float(vf.evaluate(model, regression(), rows, batch_size=12).sum()))
            assert [parameter.grad is not None for parameter in model.parameters()] == there
    return trained(run, model, optimizer, seen)


@pytest.mark.slow
def test_what_code_after_a_step_has_changed_survives_an_evaluation_that_breaks(
    start_job: Callable[..., ElasticJob],
) -> None:
    reference = alone(changing_buffers)
    assert start_job(changing_buffers, "worker-1", workers=3).results() == [reference] * 2


# --- one update -------------------------------------------------------------------------------------------------------


def updating() -> tuple[Counting, Update]:
    model = Counting()
    update = Update(
        model,
        OptimizerOptions(torch.optim.SGD(model.parameters(), 0.1)),
        choose_summation(NODES, "bitwise"),
        micro_batch=SAMPLES,
        reduction=ReductionSettings(),
    )
    update.enter()
    return model, update


def compute(model: nn.Module, update: Update, nodes: range) -> None:
    """Begin an attempt, and compute some of its virtual nodes."""
    update.begin(range(NODES), NODES)
    for _ in nodes:
        model(torch.randn(SAMPLES, 4)).square().mean().backward()
        update.sync.take(SAMPLES, {})


def step(model: nn.Module, update: Update) -> Reduced:
    compute(model, update, range(NODES))
    return update.synchronize(ALONE, [range(NODES)], 1, m.NO_GENERATION, more=True)


def commit(model: nn.Module, update: Update) -> None:
    update.apply(step(model, update), epoch_ends=False)


def warm_up(model: nn.Module, update: Update) -> None:
    """A joiner gets a state when it has forgotten this one."""
    compute(model, update, range(1))
    update.abandon()
    update.sync.settle(Schema())


def lose(model: nn.Module, update: Update) -> None:
    """A survivor gets the state of a donor that was ahead."""
    commit(model, update)
    step(model, update)
    update.abandon(keep=True)
    update.sync.settle(Schema())


@pytest.mark.parametrize("before", [lambda model, update: None, commit, warm_up, lose])
@pytest.mark.parametrize("keep", [False, True])
def test_buffers_that_changed_before_an_attempt_stay(before: Callable[..., None], keep: bool) -> None:
    model, update = updating()
    before(model, update)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(3)
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    update.abandon(keep=keep)
    update.abandon(keep=keep)
    assert all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers())
    compute(model, update, range(1))
    model(torch.randn(SAMPLES, 4))
    update.abandon(keep=keep)
    assert all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers()), "put back in an attempt"

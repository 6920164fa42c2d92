"""Backward passes that end early, in jobs: the bits of one worker, whoever computes which virtual node."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from activation_models import Convolutional
from elastic_jobs import EXCHANGE, ElasticJob, Trained, alone, die_here, trained
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly
from virtualflow.protocol.settings import ENV_BACKWARD, ENV_VERIFY, ENV_WORKER


def train(victim: str = "", rotate: bool = True, sharded: bool = False) -> Trained:
    """The script, with a short batch in every epoch; ``victim`` kills itself in the middle of step 7."""
    torch.manual_seed(0)
    model = Convolutional()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    draw = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(76, 3, 8, 8, generator=draw), torch.randint(0, 3, (76,), generator=draw))
    backward = vf.PartialBackward((1, 0.6, 0.2), rotate=rotate, full_every=5)
    with vf.elastic(
        model,
        optimizer,
        data,
        batch_size=32,
        steps=12,
        virtual_nodes=8,
        seed=3,
        clip_grad_norm=0.5,
        backward=backward,
        shard_optimizer=sharded,
    ) as run:
        for step in run:
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                step.log(loss=loss)
                if step.number == 7:
                    die_here(victim)
    return trained(run, model, optimizer, repr(run.metrics))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "exchange", "rotate", "sharded"),
    [
        (2, "early", True, False),
        nightly(3, "early", True, True),
        nightly(3, "late", False, False),
        nightly(4, "behind", False, True),
    ],
)
def test_a_job_that_grows_loses_one_and_shrinks_comes_to_the_bits_of_one_worker(
    workers: int, exchange: str, rotate: bool, sharded: bool, start_job: Callable[..., ElasticJob]
) -> None:
    """Each step has a spot check, by a worker that computes another one's virtual node with that one's pass.

    Also in an epoch's last step, whose short batch weighs gradients in place ("behind", four workers): once that
    convicted an honest one.
    """
    reference = alone(train, "", rotate)
    environment = {EXCHANGE: exchange, ENV_VERIFY: "1"}
    job = start_job(train, "worker-1", rotate, sharded, workers=workers, hold=2, environment=environment)
    job.reach(2)
    job.join(workers - 1)
    job.reach(8)  # worker-1 kills itself in the step before
    job.drain("worker-0")
    results = job.results()
    assert len(results) == 2 * workers - 3
    assert {(result.digest, result.metrics) for result in results} == {(reference.digest, reference.metrics)}
    optimizers = {result.optimizer for result in results}
    assert optimizers == {reference.optimizer} or (sharded and reference.optimizer in optimizers)  # that of the leader


class Adapted(nn.Module):
    """A layer that stays as it is, and beside it two small matrices that are trained."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = (
            nn.Linear(layer.in_features, rank, bias=False),
            nn.Linear(rank, layer.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def adapt() -> Trained:
    """Trains adapters, by as long backward passes as its job says; with the virtual nodes that it was assigned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), *(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 1))
    model.requires_grad_(False)
    before = copy.deepcopy(model)
    for number in range(1, 5):
        model[number] = Adapted(model[number], 2)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], 0.01)
    draw = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(96, 4, generator=draw), torch.randn(96, 1, generator=draw))
    memory = vf.Memory(MEMORIES[os.environ.get(ENV_WORKER, "worker-0")])
    with vf.elastic(model, optimizer, data, batch_size=48, steps=4, virtual_nodes=12, seed=3, memory=memory) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
    kept = [module.layer if isinstance(module, Adapted) else module for module in model]
    assert all(torch.equal(one.weight, other.weight) for one, other in zip(kept, before, strict=True))
    assert not torch.equal(model[1].up.weight, torch.zeros_like(model[1].up.weight)), "whole passes reach the first"
    return trained(
        run,
        model,
        optimizer,
        more=(run._context.session.state.assigned.start, run._context.session.state.assigned.stop),
    )


MEMORIES = {"worker-0": "1GiB", "worker-1": "4GiB"}
"""The second worker has more than the first."""


@pytest.mark.slow
def test_adapters_are_trained_as_the_job_says_and_a_small_device_runs_short_passes_alone(
    start_job: Callable[..., ElasticJob],
) -> None:
    environment = {ENV_BACKWARD: '{"fractions": [1, 0.25], "rotate": false}'}
    reference = alone(adapt, environment=environment)
    assert reference.digest != alone(adapt).digest, "other backward passes than without that word"
    job = start_job(adapt, workers=2, environment=environment)
    results = {name: outcome.value for name, outcome in job.finish().items()}
    assert {result.digest for result in results.values()} == {reference.digest}
    assert results["worker-1"].more == (0, 6), "what takes most memory is assigned to the one that has it"
    assert results["worker-0"].more == (6, 12)


def train_counted(backward: vf.PartialBackward | None, nodes: int, early: bool, sharded: bool) -> Trained:
    """Equal blocks; counts what this worker sends from the second step on: in all, and of gradients.

    Then what of these was foretold, and what was foretold for whole passes.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(4 * nodes, 96, generator=torch.Generator().manual_seed(5)))
    exchange = vf.Exchange("reduce-scatter", overlap=early, bucket_bytes=1 << 16)
    before = sent = gradients = foretold = whole = 0
    with vf.elastic(
        model,
        optimizer,
        data,
        batch_size=2 * nodes,
        steps=7,
        virtual_nodes=nodes,
        backward=backward,
        exchange=exchange,
        shard_optimizer=sharded,
    ) as run:
        for step in run:
            for (x,) in step:
                (model(x) - x).square().mean().backward()
            session, reducer = run._context.session, run._context.update.reducer
            if session.communicator is not None and session.communicator.size > 1:
                # Of the step before: its headers, its gradients, and the new values of a sharded optimizer.
                if step.number == 2:
                    before = session.communicator.traffic[0]
                elif step.number > 2:
                    gradients += sum(one.sent for one in reducer.passages())
                    foretold += sum(one.moved(session.rank)[0] for one in reducer.schedule)
                    whole += sum(one.moved(session.rank)[0] for one in reducer.schedule_if_whole())
                    sent = session.communicator.traffic[0] - before
    return trained(run, model, optimizer, more=(sent, gradients, foretold, whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "nodes", "fractions", "rotate", "early", "sharded", "most"),
    [
        pytest.param(3, 3, (1, 0.67, 0.34), True, False, False, 0.8, id="three workers"),
        nightly(3, 3, (1, 0.67, 0.34), True, True, False, 0.8),
        nightly(3, 12, (1, 0.67, 0.34), False, True, False, 0.8),
        nightly(3, 3, (1, 0.67, 0.34), False, True, True, 0.9),
        nightly(5, 10, (1, 0.25), True, False, False, 0.85),
    ],
)
def test_what_no_pass_has_got_to_is_not_sent(
    workers: int,
    nodes: int,
    fractions: tuple[float, ...],
    rotate: bool,
    early: bool,
    sharded: bool,
    most: float,
    start_job: Callable[..., ElasticJob],
) -> None:
    totals = []
    for backward in (vf.PartialBackward(fractions, rotate), None):
        reference = alone(train_counted, backward, nodes, early, sharded)
        results = start_job(train_counted, backward, nodes, early, sharded, workers=workers).results()
        assert {result.digest for result in results} == {reference.digest}
        totals.append([sum(of_workers) for of_workers in zip(*(result.more for result in results), strict=True)])
        assert all(result.more[1] == result.more[2] > 0 for result in results), "as foretold"
    (sent, gradients, _, whole), (sent_whole, gradients_whole, _, _) = totals
    assert gradients <= most * whole
    if rotate:  # otherwise virtual nodes are assigned by what they cost, and not as those of whole passes
        assert sent <= most * sent_whole, "headers and all"
        assert whole == pytest.approx(gradients_whole, rel=0.001)


def train_uneven(example: bool) -> Trained:
    """Each layer half as wide as the one before: half of the layers are a small part of the work."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64 >> number, 32 >> number) for number in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(48, 64, generator=torch.Generator().manual_seed(5)))
    backward = vf.PartialBackward((1, 0.4), of=torch.zeros(1, 64)) if example else vf.PartialBackward((1, 0.4))
    with vf.elastic(model, optimizer, data, batch_size=12, steps=6, virtual_nodes=6, backward=backward) as run:
        for step in run:
            for (x,) in step:
                model(x).square().mean().backward()
    cut = run._context.update.cut
    assert cut is not None
    return trained(run, model, optimizer, more=tuple(cut.cut(node, 2) for node in range(2)))


@pytest.mark.slow
def test_workers_end_passes_by_work_at_the_same_block(start_job: Callable[..., ElasticJob]) -> None:
    reference = alone(train_uneven, True)
    assert reference.more == (-1, 1), "of 0.4 of the work, five of six layers, which are a fourth of it"
    assert alone(train_uneven, False).more == (-1, 4)
    assert alone(train_uneven, False).digest != reference.digest
    results = start_job(train_uneven, True, workers=3).results()
    assert {(result.digest, result.more) for result in results} == {(reference.digest, reference.more)}

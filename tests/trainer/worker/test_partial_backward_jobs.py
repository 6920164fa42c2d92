"""Backward passes that end early, in jobs: the bits of one worker, whoever computes which virtual node."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from activation_models import Convolutional
from elastic_jobs import EXCHANGE, ElasticJob, Trained, alone, die_here, trained
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly
from virtualflow.protocol.settings import ENV_VERIFY


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

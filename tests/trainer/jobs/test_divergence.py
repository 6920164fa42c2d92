"""Workers that end with different weights: the last net under everything else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from elastic_jobs import ElasticJob
from torch.utils.data import TensorDataset

import virtualflow as vf


def diverging() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with vf.elastic(model, optimizer, TensorDataset(torch.randn(24, 3)), batch_size=8, epochs=1) as run:
        for step in run:
            for (x,) in step:
                model(x).square().mean().backward()
        if run.leader:
            with torch.no_grad():
                model.bias.add_(1.0)


def test_workers_that_end_with_different_weights_fail_the_job(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(diverging, workers=2)
    outcomes = job.finish()
    assert {outcome.kind for outcome in outcomes.values()} == {"JobFailed"}, outcomes

"""Random numbers that a script draws between ``for step in run`` and its micro-batches, such as mixup's lambda."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, Trained, alone, die_here, trained
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.protocol.settings import ENV_CHECKPOINT_DIR, ENV_CHECKPOINT_STEPS


def mixes(reads: bool = True, dies: str = "", draws: bool = True) -> Trained:
    """A leader that draws behind a step as well, and an unseeded start, which no bit may depend on."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(36, 6), torch.randn(36, 1))
    random.seed()
    numpy.random.seed()
    torch.seed()
    with vf.elastic(model, optimizer, data, batch_size=12, steps=10, virtual_nodes=6) as run:
        for step in run:
            if reads:
                assert step.number
            weight = 1.0
            if draws:
                weight += random.random() + numpy.random.beta(0.4, 0.4) + torch.rand(()).item()
            for x, y in step:
                (weight * F.mse_loss(model(x), y)).backward()
            if run.leader:
                random.random()
                torch.rand(3)
            if step.number == 8:
                die_here(dies)
    return trained(run, model, optimizer)


def warned(job: ElasticJob) -> list[str]:
    return [event.text for event in job.status().events if "draws random numbers before" in event.text]


def test_they_are_the_same_in_all_workers_that_have_read_the_steps_number(
    start_job: Callable[..., ElasticJob],
) -> None:
    reference = alone(mixes)
    assert alone(mixes) == reference
    job = start_job(mixes, True, "worker-1", workers=2, hold=4)
    job.reach(4)
    job.join()
    assert job.results() == [reference] * 2
    assert warned(job) == []


@pytest.mark.slow
def test_they_are_the_same_behind_a_checkpoint(start_job: Callable[..., ElasticJob], tmp_path: Path) -> None:
    reference = alone(mixes, False)
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path), ENV_CHECKPOINT_STEPS: "4"}
    job = start_job(mixes, False, workers=1, hold=5, environment=environment)
    job.reach(5)
    job.await_checkpoint(4)
    job.kill_all()
    job.start_worker()
    assert job.results() == [reference]


def test_a_script_that_has_not_read_it_is_warned(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(mixes, False, workers=2)
    assert job.results() == [alone(mixes, False)] * 2
    (said,) = warned(job)
    assert "read step.number before they are drawn" in said


def test_a_script_that_draws_nothing_there_is_not_warned(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(mixes, False, "", False, workers=1)
    assert job.results() == [alone(mixes, False, "", False)]
    assert warned(job) == []

"""Random numbers that a script draws between ``for step in run`` and its micro-batches, such as mixup's lambda."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
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


@pytest.mark.parametrize("reads", [True, False], ids=["read", "not read"])
def test_they_are_the_same_in_a_joiner(start_job: Callable[..., ElasticJob], reads: bool) -> None:
    reference = alone(mixes, reads)
    assert alone(mixes, reads) == reference
    job = start_job(mixes, reads, "worker-1", workers=2, hold=4)
    job.reach(4)
    job.join()
    assert job.results() == [reference] * 2
    assert warned(job) == []


def test_a_leader_that_has_joined_tells_later_joiners(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(mixes, False, workers=1, hold=4)
    job.reach(4)
    job.join()
    job.reach(6)
    job.kill("worker-0")
    job.join()
    assert job.results() == [alone(mixes, False)] * 2
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


def test_a_joiner_that_nobody_could_tell_is_named(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(mixes, False, workers=1, hold=4)
    job.reach(4)
    history = job.coordinator.state.history
    assert history.progress is not None
    history.progress = msgspec.structs.replace(history.progress, draws_early=False)  # as one that was replaced just now
    job.join()
    job.finish()
    (said,) = warned(job)
    assert "worker-1 has not joined yet" in said


def test_joiners_of_a_script_that_draws_nothing_there_warm_up(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(mixes, False, "", False, workers=1, hold=4)
    job.reach(4)
    progress = job.coordinator.state.history.progress
    assert progress is not None
    assert not progress.draws_early
    job.join()
    assert job.results() == [alone(mixes, False, "", False)] * 2
    assert warned(job) == []

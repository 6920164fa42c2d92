"""Random numbers that a script draws between ``for step in run`` and its micro-batches, such as mixup's lambda."""

from __future__ import annotations

import os
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
from virtualflow.protocol.settings import ENV_CHECKPOINT_DIR, ENV_CHECKPOINT_STEPS, ENV_WORKER


def mixes(reads: str = "never", dies: str = "", draws: bool = True, bodies: str = "") -> Trained:
    """A leader that draws behind a step as well, and an unseeded start, which no bit may depend on.

    ``reads`` step.number before the draws, behind them, or never before the micro-batches. ``bodies``: a folder, where
    each worker notes the step's number in each of its inner bodies.
    """
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(36, 6), torch.randn(36, 1))
    random.seed()
    numpy.random.seed()
    torch.seed()
    with vf.elastic(model, optimizer, data, batch_size=12, steps=10, virtual_nodes=6) as run:
        for step in run:
            if reads == "before":
                assert step.number
            weight = 1.0
            if draws:
                weight += random.random() + numpy.random.beta(0.4, 0.4) + torch.rand(()).item()
            if reads == "behind":
                assert step.number
            for x, y in step:
                if bodies:
                    with Path(bodies, os.environ.get(ENV_WORKER, "alone")).open("a") as file:
                        file.write(f"{step.number} ")
                (weight * F.mse_loss(model(x), y)).backward()
            if run.leader:
                random.random()
                torch.rand(3)
            if step.number == 8:
                die_here(dies)
    return trained(run, model, optimizer)


def first_body(noted: Path) -> int:
    return int(noted.read_text().split()[0])


def warned(job: ElasticJob) -> list[str]:
    return [event.text for event in job.status().events if "draws random numbers before" in event.text]


@pytest.mark.parametrize("reads", ["before", "behind", "never"])
def test_they_are_the_same_in_a_joiner(start_job: Callable[..., ElasticJob], reads: str, tmp_path: Path) -> None:
    reference = alone(mixes, reads)
    assert alone(mixes, reads) == reference
    job = start_job(mixes, reads, "worker-1", True, str(tmp_path), workers=2, hold=4)
    job.reach(4)
    job.join()
    assert job.results() == [reference] * 2
    assert warned(job) == []
    assert first_body(tmp_path / "worker-2") > 4  # it has not warmed up


def test_a_leader_that_has_joined_tells_later_joiners(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(mixes, workers=1, hold=4)
    job.reach(4)
    job.join()
    job.reach(6)
    job.kill("worker-0")
    job.join()
    assert job.results() == [alone(mixes)] * 2
    assert warned(job) == []


@pytest.mark.slow
def test_they_are_the_same_behind_a_checkpoint(start_job: Callable[..., ElasticJob], tmp_path: Path) -> None:
    reference = alone(mixes)
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path), ENV_CHECKPOINT_STEPS: "4"}
    job = start_job(mixes, workers=1, hold=5, environment=environment)
    job.reach(5)
    job.await_checkpoint(4)
    job.kill_all()
    job.start_worker()
    assert job.results() == [reference]


@pytest.mark.parametrize("reads", ["behind", "never"])
def test_a_joiner_that_nobody_could_tell_is_named(start_job: Callable[..., ElasticJob], reads: str) -> None:
    job = start_job(mixes, reads, workers=1, hold=4)
    history = job.coordinator.state.history
    take = history.take_progress
    # As if it had joined before the first worker has drawn anything.
    history.take_progress = lambda progress: take(msgspec.structs.replace(progress, draws_early=False))  # type: ignore[method-assign]
    job.reach(4)
    job.join()
    job.finish()
    (said,) = warned(job)
    assert "worker-1 drew others for its first one" in said


def test_joiners_of_a_script_that_draws_nothing_there_warm_up(
    start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    job = start_job(mixes, "never", "", False, str(tmp_path), workers=1, hold=4)
    job.reach(4)
    job.join()
    assert job.results() == [alone(mixes, "never", "", False)] * 2
    assert warned(job) == []
    assert first_body(tmp_path / "worker-1") == 1

"""A worker that is alone and dies repeats the steps since its copy in the coordinator's memory, to the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import steps_in
from elastic_jobs import ElasticJob, alone, trained
from jobs import run_job
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.protocol.settings import ENV_CHECKPOINT_MEMORY

STEPS = 60
IN_MEMORY = {ENV_CHECKPOINT_MEMORY: "1"}


def train(directory: str = "", steps: int = STEPS) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    draw = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(40, 4, generator=draw), torch.randn(40, generator=draw))
    policy = vf.CheckpointPolicy(directory, every_seconds=3_600.0) if directory else None
    seen = []
    with vf.elastic(
        model, optimizer, dataset, batch_size=8, virtual_nodes=4, seed=1, steps=steps, checkpoint=policy
    ) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x).squeeze(1), y).backward()
            seen.append(step.number)
        metrics = dict(run.metrics)
    return trained(run, model, optimizer, metrics), seen


def copied_step(job: ElasticJob) -> int:
    copy = job.status().memory_copy
    assert copy is not None
    return copy.step


@pytest.mark.slow
@pytest.mark.parametrize(
    "saved", [pytest.param(False, id="no disk", marks=pytest.mark.nightly), pytest.param(True, id="an older disk")]
)
def test_a_lone_worker_that_is_killed_costs_the_steps_since_its_copy(
    saved: bool, tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    wanted, _ = alone(train)
    directory = str(tmp_path) if saved else ""
    if saved:
        alone(train, directory, 2)
        assert steps_in(tmp_path) == [2]
    job = start_job(train, directory, workers=1, hold=40, environment=IN_MEMORY)
    job.reach(40)
    job.wait_for(
        lambda status: status.memory_copy is not None and status.memory_copy.step > 2, "a copy of a later step"
    )
    job.kill_all()
    copied = copied_step(job)
    job.start_worker()
    job.hold(None)
    ((found, seen),) = job.results()
    assert found == wanted
    assert seen == list(range(copied + 1, STEPS + 1))
    status = job.status()
    assert status.repeated_steps == 40 - copied
    assert f"the state of step {copied} came from the coordinator's memory" in [event.text for event in status.events]


@pytest.mark.nightly
def test_a_copy_that_was_damaged_at_rest_is_told_and_the_disk_counts(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    wanted, _ = alone(train)
    alone(train, str(tmp_path), 2)
    job = start_job(train, str(tmp_path), workers=1, hold=40, environment=IN_MEMORY)
    job.reach(40)
    job.wait_for(lambda status: status.memory_copy is not None, "a copy")
    job.kill_all()
    kept = job.coordinator._copies._newest
    kept.body[len(kept.body) // 2] ^= 1
    job.start_worker()
    job.hold(None)
    ((found, seen),) = job.results()
    assert found == wanted
    assert seen[0] == 3
    told = [event.text for event in job.status().events]
    assert any("cannot be used: it is not what was sent (its SHA-256 differs)" in text for text in told), told
    assert "resumed from the checkpoint of step 2" in told


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_a_lone_worker_may_be_killed_at_any_moment(seed: int, start_job: Callable[..., ElasticJob]) -> None:
    wanted, _ = alone(train, "", 400)
    step = random.Random(seed).randrange(5, 300)
    job = start_job(train, "", 400, workers=1, hold=350, environment=IN_MEMORY)
    job.wait_for(lambda status: status.step >= step and status.memory_copy is not None, f"step {step}")
    job.kill_all()
    copied = copied_step(job)
    job.start_worker()
    ((found, seen),) = job.results()
    assert found == wanted
    assert seen[0] == copied + 1


@pytest.mark.nightly
def test_workers_that_have_each_other_send_no_copies(start_job: Callable[..., ElasticJob]) -> None:
    wanted, _ = alone(train)
    job = start_job(train, workers=2, hold=30, environment=IN_MEMORY)
    job.reach(30)
    assert job.status().memory_copy is None
    job.kill("worker-1")
    job.hold(50)
    status = job.wait_for(lambda status: status.memory_copy is not None, "a copy of the one that is left")
    assert status.memory_copy is not None
    assert status.memory_copy.step > 30
    job.hold(None)
    assert [found for found, _ in job.results()] == [wanted]


@pytest.mark.nightly
def test_a_copy_goes_with_its_coordinator_and_the_disk_counts(tmp_path: Path) -> None:
    script = ("--workers", 1, "--virtual-nodes", 4, "examples/digits.py", "--steps", 50)
    (tmp_path / "undisturbed").mkdir()
    wanted = run_job(tmp_path / "undisturbed", *script)
    saving = ("--checkpoint-memory", "--checkpoint-dir", tmp_path / "kept", "--checkpoint-steps", 20)
    finished = run_job(tmp_path, *saving, "--schedule", "35:coordinator,35:all", *script)
    assert finished.bits == wanted.bits
    assert any(line.endswith("resumed from the checkpoint of step 20") for line in _texts(finished))
    assert not any("came from the coordinator's memory" in line for line in _texts(finished))


@pytest.mark.nightly
def test_a_new_coordinator_gets_a_copy_too(tmp_path: Path) -> None:
    script = ("--workers", 1, "--virtual-nodes", 4, "examples/digits.py", "--steps", 60)
    (tmp_path / "undisturbed").mkdir()
    wanted = run_job(tmp_path / "undisturbed", *script)
    finished = run_job(tmp_path, "--checkpoint-memory", "--schedule", "20:coordinator,50:kill", *script)
    assert finished.bits == wanted.bits
    assert finished.report["repeated_steps"] < 30
    assert any("came from the coordinator's memory" in line for line in _texts(finished))


def _texts(finished: Any) -> list[str]:
    return finished.output.splitlines() + finished.errors.splitlines()

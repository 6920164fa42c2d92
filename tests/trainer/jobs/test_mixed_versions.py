"""Workers and coordinators of different versions in one job: real processes, and a coordinator that is replaced."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from coordinator_process import CoordinatorProcess
from elastic_jobs import PATIENCE, ElasticJob, Trained, alone, trained
from torch import nn
from torch.utils.data import TensorDataset

import other_version
import virtualflow as vf
from other_version import Version
from virtualflow.protocol import versions
from virtualflow.protocol.http_api import Status
from virtualflow.protocol.settings import ENV_WORKER


def train(version: Version, gates: str = "") -> Trained:
    """Train; before the steps 3 and 6, tell that this worker is there and wait until it may go on."""
    other_version.be(version)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(1)))
    with vf.elastic(model, optimizer, dataset, batch_size=8, steps=8, virtual_nodes=4) as run:
        for step in run:
            if gates and step.number in (3, 6):
                (Path(gates) / f"{step.number}-{os.environ[ENV_WORKER]}").touch()
                wait_for((Path(gates) / f"{step.number}-open").exists)
            for (x,) in step:
                loss = model(x).square().mean()
                loss.backward()
                step.log(loss=loss)
    return trained(run, model, optimizer, metrics=dict(run.metrics))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["this", "newer", "older"])
def test_coordinators_of_other_versions_take_over_a_job(
    workers: Version, start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    coordinator = CoordinatorProcess(tmp_path, "this")
    job = start_job(train, workers, str(tmp_path), workers=2, coordinator=coordinator)

    def held(step: int, *names: str) -> None:
        for name in names:
            wait_for((tmp_path / f"{step}-{name}").exists)

    def heard(count: int) -> Status:
        """What the new coordinator says once all members have found it."""
        found: list[Status] = []

        def all_train() -> bool:
            found.append(coordinator.status())
            return [worker.state for worker in found[-1].workers] == ["training"] * count

        wait_for(all_train)
        return found[-1]

    held(3, "worker-0", "worker-1")
    before = coordinator.status()
    coordinator.replace("newer")
    after = heard(2)
    assert (after.generation, after.version) == (before.generation, other_version.NEWER)
    assert after.events[-1].kind == other_version.UNHEARD
    job.call("scale", workers=3)
    job.start_worker()
    wait_for(lambda: coordinator.status().prepared)
    (tmp_path / "3-open").touch()

    held(6, "worker-0", "worker-1", "worker-2")
    coordinator.replace("older")
    assert (heard(3).protocol, heard(3).version) == (None, "")
    (tmp_path / "6-open").touch()

    results = job.results()
    assert [result.digest for result in results] == [alone(train, "this").digest] * 3
    assert coordinator.status().repeated_steps == 0


def test_a_worker_of_a_version_too_far_away_is_told_both_versions(
    start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    coordinator = CoordinatorProcess(tmp_path, "this")
    job = start_job(train, "far", workers=1, coordinator=coordinator)
    assert coordinator.status().version == versions.__version__
    outcomes = job.finish()
    far, ours = versions.PROTOCOL + other_version.FAR, versions.this_speaker("the coordinator")
    said = f"worker-0 speaks protocol {far} (virtualflow {other_version.NEWER}) and {ours.name} {ours}"
    assert outcomes["worker-0"].kind == "Evicted"
    assert outcomes["worker-0"].text.startswith(said)
    assert "give the coordinator a newer virtualflow, or worker-0 an older one" in outcomes["worker-0"].text

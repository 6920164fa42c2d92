"""Workers of unequal speed: the load follows them, and the bits do not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import MEMBERSHIP, ElasticJob, Trained, alone, trained
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.protocol import http_api
from virtualflow.protocol.settings import ENV_WORKER
from virtualflow.worker import reporter

SETTINGS = replace(MEMBERSHIP, rebalance_gain=MembershipSettings.rebalance_gain, rebalance_interval=0.3)
WORK = 0.02
"""Seconds that a virtual node takes."""


class PlayedTime:
    """What workers measure their pace by: seconds of work alone, however busy this machine is."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    process_time = monotonic

    def work(self, seconds: float, *, lasts: bool) -> None:
        """Work so long; ``lasts``: it takes that long, so that the job is still there when the test looks."""
        self._now += seconds
        if lasts:
            time.sleep(seconds)


def compute(steps: int, slow: str, directory: str) -> Trained:
    """Train, at the pace of work while that file is there; ``slow`` works three times as long while ``slower`` is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(96, 6, generator=draw), torch.randint(3, (96,), generator=draw))
    work, slower, mine = Path(directory) / "work", Path(directory) / "slower", os.environ.get(ENV_WORKER)
    played = PlayedTime()
    with (
        patch.object(reporter, "time", played),
        vf.elastic(model, optimizer, data, batch_size=32, steps=steps, virtual_nodes=8) as run,
    ):
        for step in run:
            for x, y in step:
                played.work(WORK * (3 if mine == slow and slower.exists() else 1), lasts=work.exists())
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                step.log(loss=loss)
        return trained(run, model, optimizer, dict(run.metrics))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    file = tmp_path / "work"
    file.touch()
    return file


def shares(status: http_api.Status) -> list[int]:
    return sorted(worker.last - worker.first for worker in status.workers)


def assigned(status: http_api.Status, worker: str) -> int:
    return next((one.last - one.first for one in status.workers if one.worker == worker), 0)


@pytest.mark.slow
def test_a_straggler_loses_load_gets_it_back_and_changes_no_bits(
    start_job: Callable[..., ElasticJob], tmp_path: Path, work: Path
) -> None:
    slower = tmp_path / "slower"
    job = start_job(compute, 120, "worker-1", str(tmp_path), workers=2, membership=SETTINGS)
    even = job.wait_for(lambda s: s.predicted_step_ms is not None, "paces of both workers")
    assert shares(even) == [4, 4]
    assert [worker.pace_ms for worker in even.workers] == pytest.approx([1_000 * WORK] * 2)

    slower.touch()
    uneven = job.wait_for(lambda s: 0 < assigned(s, "worker-1") < 4, "less at the straggler")
    change = job.wait_for(lambda s: bool(s.changes), "the change").changes[-1]
    assert (change.cause, change.from_, change.to, change.repeated_steps) == ("rebalance", 2, 2, 0)
    assert "worker-1 needs" in change.reason
    assert {worker.pid for worker in uneven.workers} == {worker.pid for worker in even.workers}

    slower.unlink()
    job.wait_for(lambda s: shares(s) == [4, 4], "an even split again")
    work.unlink()
    results = job.results()
    assert len(results) == 2
    assert results[0] == results[1] == alone(compute, 120, "nobody", str(tmp_path))


@pytest.mark.slow
def test_a_joiner_and_a_loss_go_by_what_was_measured(
    start_job: Callable[..., ElasticJob], tmp_path: Path, work: Path
) -> None:
    slower = tmp_path / "slower"
    slower.touch()
    job = start_job(compute, 80, "worker-0", str(tmp_path), workers=2, hold=40, membership=SETTINGS)
    job.wait_for(lambda s: 0 < assigned(s, "worker-0") < 4, "less at the straggler")
    job.reach(40)
    job.join()
    job.reach(42)
    joined = job.wait_for(lambda s: len(s.workers) == 3, "three workers")
    assert assigned(joined, "worker-0") <= 2
    job.kill("worker-2")
    assert 0 < assigned(job.status(), "worker-0") < 4
    work.unlink()
    results = job.results()
    assert all(result == results[0] for result in results)
    assert results[0] == alone(compute, 80, "nobody", str(tmp_path))


@pytest.mark.nightly
def test_where_it_is_switched_off_the_split_stays_even(
    start_job: Callable[..., ElasticJob], tmp_path: Path, work: Path
) -> None:
    slower = tmp_path / "slower"
    slower.touch()
    job = start_job(compute, 40, "worker-1", str(tmp_path), workers=2, membership=replace(SETTINGS, rebalance_gain=1.0))

    def settled(status: http_api.Status) -> bool:
        paces = [worker.pace_ms for worker in status.workers]
        return status.step >= 25 and None not in paces

    status = job.wait_for(settled, "25 steps and the paces of both")
    assert shares(status) == [4, 4]
    assert status.changes == ()
    work.unlink()
    assert job.results()[0] == alone(compute, 40, "nobody", str(tmp_path))

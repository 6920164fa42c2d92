"""What real workers tell their coordinator while they train: no step, only the leader's progress now and then."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from elastic_jobs import ElasticJob
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.coordinator import server
from virtualflow.coordinator.state import JobState
from virtualflow.coordinator.worker_messages import handle
from virtualflow.protocol import messages as m
from virtualflow.transport.settings import LinkSettings
from virtualflow.worker.pace import INTERVAL

Traffic = Counter[tuple[str, str]]


def train(steps: int) -> int:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(1)))
    with vf.elastic(model, optimizer, dataset, batch_size=8, steps=steps, virtual_nodes=4) as run:
        for step in run:
            for (x,) in step:
                model(x).square().mean().backward()
    return steps


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """How many messages of each kind each worker has sent."""
    counted: Traffic = Counter()

    def count(state: JobState, incarnation: str, message: m.FromWorker, now: float) -> None:
        counted[state.roster.workers[incarnation].name, type(message).__name__] += 1
        handle(state, incarnation, message, now)

    monkeypatch.setattr(server, "handle", count)
    return counted


@pytest.mark.slow
def test_no_message_of_a_step_goes_through_the_coordinator(
    start_job: Callable[..., ElasticJob], traffic: Traffic
) -> None:
    rare: list[dict[tuple[str, str], int]] = []
    for steps in (5, 300):
        traffic.clear()
        began = time.monotonic()
        start_job(train, steps, workers=3).results()
        seconds = time.monotonic() - began
        told = {worker for worker, kind in traffic if kind == "Progress"}
        assert len(told) == 1, "only the leader tells of progress"
        # At the beginning and the end of it, and otherwise by the clock.
        assert traffic[told.pop(), "Progress"] <= 3 + seconds / LinkSettings.progress
        assert max(count for (_, kind), count in [*traffic.items(), (("", "Pace"), 0)] if kind == "Pace") <= (
            1 + seconds / INTERVAL
        )
        rare.append({key: count for key, count in traffic.items() if key[1] not in ("Progress", "Pace", "Heartbeat")})
    assert rare[0] == rare[1]

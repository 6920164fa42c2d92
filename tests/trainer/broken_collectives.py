"""A collective that fails in one worker, for tests of how the workers come back to one state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from elastic_jobs import die_here, is_here
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.errors import CommunicatorBroken
from virtualflow.transport.communicator import Communicator
from virtualflow.transport.interface import Pending
from virtualflow.worker.run import Run

HASTY = MembershipSettings(restart_grace=0.0, suspicion_grace=0.02)
"""Nobody dies of the faults here, so there is no news to wait for."""


class Counting(nn.Module):
    """Has buffers that are averaged and copied, so that a first step takes every kind of exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.shape[0]
        return self.norm(self.linear(x)).sum(1)


def regression() -> TensorDataset:
    """24 samples for :class:`Counting`."""
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(24, 4, generator=draw), torch.randn(24, generator=draw))


def train_steps(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, after_step: Callable[[], None]
) -> tuple[dict[str, float], list[float]]:
    """Train on :func:`regression`, with an evaluation after the second step.

    Returns:
        The last metrics, and what this worker has seen: the learning rate behind each step, and the evaluation's sum.
    """
    seen = []
    for step in run:
        for x, y in step:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            step.log(loss=loss)
        after_step()
        seen.append(optimizer.param_groups[0]["lr"])
        if step.number == 2:
            seen.append(float(vf.evaluate(model, regression(), lambda batch: model(batch[0]), batch_size=12).sum()))
    return dict(step.metrics), seen


def break_collective(victim: str, number: int, how: str) -> None:
    """Let a worker fail at a collective: ``killed`` before it, or told that it ``broke`` after it."""
    if not victim or not is_here(victim):
        return
    calls = 0
    start = Communicator._start

    @dataclass
    class Breaking:
        pending: Pending

        def __getattr__(self, name: str) -> Any:
            return getattr(self.pending, name)

        def wait(self, *timeout: float) -> None:
            self.pending.wait(*timeout)  # transfers of states say for how long
            raise CommunicatorBroken("injected by the test")

    def failing(self: Communicator, begin: Any) -> Pending:
        nonlocal calls
        calls += 1
        if calls == number and how == "killed":
            die_here(victim)
        pending = start(self, begin)
        return Breaking(pending) if calls == number and how == "broke" else pending

    Communicator._start = failing  # type: ignore[method-assign]

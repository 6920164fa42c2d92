"""A collective that fails in one worker, for tests of how the workers come back to one state."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from elastic_jobs import die_here
from torch import Tensor, nn

from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.errors import CommunicatorBroken
from virtualflow.protocol.settings import ENV_WORKER
from virtualflow.transport.gloo import Communicator
from virtualflow.transport.interface import Pending

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


def break_collective(victim: str, number: int, how: str) -> None:
    """Let a worker fail at a collective: ``killed`` before it, or told that it ``broke`` after it."""
    if not victim or os.environ.get(ENV_WORKER) != victim:
        return
    calls = 0
    start = Communicator._start

    @dataclass
    class Breaking:
        pending: Pending

        def wait(self) -> None:
            self.pending.wait()
            raise CommunicatorBroken("injected by the test")

    def failing(self: Communicator, begin: Any) -> Pending:
        nonlocal calls
        calls += 1
        if calls == number and how == "killed":
            die_here(victim)
        pending = start(self, begin)
        return Breaking(pending) if calls == number and how == "broke" else pending

    Communicator._start = failing  # type: ignore[method-assign]

"""What scripts with a loop of their own train; nothing is imported before."""

from __future__ import annotations

from typing import Any

import torch
from elastic_jobs import Trained
from torch import Tensor, nn
from torch.utils.data import Dataset

from virtualflow.state import digests

WIDTH = 8


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points of three classes."""

    def __init__(self, count: int, seed: int = 1) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.points = torch.randn(count, WIDTH, generator=draw)
        self.classes = self.points[:, :3].argmax(1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.classes[index]


def network(*, batch_norm: bool = True, dropout: float = 0.0) -> nn.Module:
    """The same in each process. With batch norm buffers matter, and how many samples a micro-batch has."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16) if batch_norm else nn.LayerNorm(16)
    return nn.Sequential(nn.Linear(WIDTH, 16), norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def outcome(model: nn.Module, optimizer: Any, numbers: Any) -> Trained:
    """The bits of a training, and what it has told."""
    return Trained(digests.digest(model.state_dict()), digests.optimizer_digest(optimizer), repr(numbers))

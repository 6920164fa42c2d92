"""A model whose parameters are hard to divide, and samples for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from injected import injected
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf


class TowerBlock(nn.Module):
    """A block with shapes that no number divides, and a parameter that its forward pass needs at times only."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)
        self.rare = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        """Make what is its own, for a model of the meta device."""
        nn.init.normal_(self.rare, 1.0, 0.1)

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        inner = self.down(torch.relu(self.up(self.norm(x))))
        return x + (inner * self.rare if rare else inner)


class Tower(nn.Module):
    """One tensor is larger than all others, one frozen, one tied to another block's, one used by nobody, one without
    elements, and one lies in memory in another order than its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(4, 4, 2)
        self.mix.weight.data = self.mix.weight.data.to(memory_format=torch.channels_last)
        self.into = nn.Linear(4, 19)
        self.blocks = nn.ModuleList([TowerBlock(19, 37), TowerBlock(19, 301), TowerBlock(19, 37)])
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[0].down.weight.requires_grad_(False)
        self.out = nn.Linear(19, 1)
        self.unused, self.empty = nn.Parameter(torch.ones(23)), nn.Parameter(torch.ones(0, 3))

    def reset_parameters(self) -> None:
        """Make what is its own, for a model of the meta device."""
        nn.init.ones_(self.unused)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rare = bool(x[0, 0] > 0)  # another way for each micro-batch
        x = self.into(self.mix(x[:, :, None, None].expand(-1, -1, 2, 2)).flatten(1))
        for block in self.blocks:
            x = block(x, rare)
        return self.out(x)


def data() -> TensorDataset:
    """Two batches of 24 samples and one of 12."""
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(60, 4, generator=draw), torch.randn(60, 1, generator=draw))


@contextmanager
def run_on_data(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, **options: Any) -> Iterator[vf.Run]:
    """Train on :func:`data` with six virtual nodes; small tensors are cut, too, and travel in small messages."""
    with (
        injected(reduction={"norm_block": 4, "bucket": 4_096}),
        vf.elastic(model, optimizer, data(), batch_size=24, steps=steps, virtual_nodes=6, **options) as run,
    ):
        yield run

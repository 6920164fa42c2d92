"""Small models of the families that plans of memory are tested with."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """A residual block with batch norm and dropout, whose output is saved by its own ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.drop(self.norm(self.conv(x))))


class Convolutional(nn.Module):
    def __init__(self, length: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(*[Residual(4) for _ in range(length)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A transformer's layer that gets a mask beside its input."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor, int]:
        y = self.before(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.between(x)))), 0.2, self.training), 1


class Transformer(nn.Module):
    def __init__(self, length: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(length))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(2).transpose(1, 2))
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), 1)
        for layer in self.layers:
            x, _ = layer(x, mask=mask)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Down(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.norm(self.conv(x)))


class Up(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(into, out, 3, padding=1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = torch.cat([F.interpolate(x, scale_factor=2), skip], 1)
        return F.dropout(self.conv(x).relu_(), 0.1, self.training)


class UNet(nn.Module):
    """What the way down hands over is used on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Down(3, 4), Down(4, 4), Down(4, 4)])
        self.up = nn.ModuleList([Up(8, 4), Up(8, 4)])
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for index, down in enumerate(self.down):
            x = down(x if index == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for index, up in enumerate(self.up):
            x = up(x, skips[1 - index])
        return self.head(x).mean((2, 3))  # type: ignore[no-any-return]


class Drawing(nn.Module):
    """Blocks that keep a state in a buffer, which their output depends on, and draw from all global streams."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Stateful() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x.flatten(1)[:, :6])[:, :3]  # type: ignore[no-any-return]


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        drawn = random.random() + float(np.random.rand())
        return torch.tanh(self.linear(x)) * drawn + torch.sin(x * float(self.calls))


@dataclass(frozen=True)
class Family:
    """A model with its blocks."""

    build: Callable[[], nn.Module]
    blocks: list[str] | None = None


FAMILIES = {
    "convolutional": Family(Convolutional),
    "transformer": Family(Transformer),
    "unet": Family(UNet, ["down.0", "down.1", "down.2", "up.0", "up.1"]),
    "drawing": Family(Drawing),
}

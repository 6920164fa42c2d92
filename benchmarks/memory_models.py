"""Models of six families as chains of blocks, for measurements of memory: the paper's (KARMA), but narrow and small.

Widths and images are small, so that a step takes one core about half a second; depths are those of the originals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
Call = Callable[..., Any]
"""How a block is called: with the block and its inputs."""


class Chain(nn.Module):
    """Blocks one after the other; ``call`` says how each of them is called."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, call: Call = nn.Module.__call__) -> Tensor:
        for block in self.blocks:
            x = call(block, x)
        return x


class UNet(nn.Module):
    """Down, and up again beside what the way down hands over."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        first = Down(3, width, pool=False)
        self.down = nn.ModuleList([first, *(Down(into, 2 * into, pool=True) for into in widths[:-1])])
        self.up = nn.ModuleList(Up(widths[level + 1], widths[level]) for level in reversed(range(depth)))
        self.head = Head(width)
        self.blocks = [*self.down, *self.up, self.head]

    def forward(self, x: Tensor, call: Call = nn.Module.__call__) -> Tensor:
        skips = []
        for down in self.down:
            x = call(down, x)
            skips.append(x)
        skips.pop()
        for up in self.up:
            x = call(up, x, skips.pop())
        out: Tensor = call(self.head, x)
        return out


def convolution(into: int, out: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    """With batch norm."""
    return nn.Sequential(nn.Conv2d(into, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out))


class Stem(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = convolution(3, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x))


class Bottleneck(nn.Module):
    """Of a ResNet-50 and deeper."""

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = convolution(into, width, 1), convolution(width, width, 3, stride)
        self.three = convolution(width, 4 * width, 1)
        self.past = convolution(into, 4 * width, 1, stride) if into != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.two(F.relu(self.one(x))))
        return F.relu(self.three(y) + self.past(x))


class Wide(nn.Module):
    """Of a WideResNet, with dropout."""

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(into), nn.BatchNorm2d(width)])
        self.one = nn.Conv2d(into, width, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.past = nn.Conv2d(into, width, 1, stride, bias=False) if into != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(F.relu(self.norms[0](x)))
        return self.two(F.dropout(F.relu(self.norms[1](y)), 0.3, self.training)) + self.past(x)  # type: ignore[no-any-return]


class Down(nn.Module):
    def __init__(self, into: int, out: int, *, pool: bool) -> None:
        super().__init__()
        self.one, self.two, self.pool = convolution(into, out), convolution(out, out), pool

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(x, 2) if self.pool else x
        return F.relu(self.two(F.relu(self.one(y))))


class Up(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(into, out, 2, 2)
        self.one, self.two = convolution(2 * out, out), convolution(out, out)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.relu(self.two(F.relu(self.one(torch.cat([self.up(x), skip], 1)))))


class Layer(nn.Module):
    """Of a GPT: attention that looks back, and a perceptron, each behind a layer norm, with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(seen), 0.1, self.training)
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norms[1](x)))), 0.1, self.training)


class Embedding(nn.Module):
    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x) + self.places  # type: ignore[no-any-return]


class Head(nn.Module):
    """The mean over the image, or over the sentence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.classes = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(x.flatten(2).mean(2) if x.dim() == 4 else x.mean(1))  # type: ignore[no-any-return]


def resnet(counts: tuple[int, ...], width: int) -> nn.Module:
    """Of bottlenecks."""
    blocks: list[nn.Module] = [Stem(width)]
    into = width
    for stage, count in enumerate(counts):
        for index in range(count):
            blocks.append(Bottleneck(into, width << stage, 2 if stage and not index else 1))
            into = 4 * (width << stage)
    return Chain(*blocks, Head(into))


def wide_resnet(count: int, width: int) -> nn.Module:
    """Three stages of so many blocks each."""
    blocks: list[nn.Module] = [Stem(16)]
    into = 16
    for stage in range(3):
        for index in range(count):
            blocks.append(Wide(into, width << stage, 2 if stage and not index else 1))
            into = width << stage
    return Chain(*blocks, Head(into))


def vgg(width: int) -> nn.Module:
    """VGG-16 for images of 64 x 64: each convolution with its ReLU is a block; of a stage's last one, the pool too."""
    blocks: list[nn.Module] = []
    into = 3
    for factor, count in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
        for index in range(count):
            pool = [nn.MaxPool2d(2)] if index == count - 1 else []
            blocks.append(nn.Sequential(nn.Conv2d(into, factor * width, 3, padding=1), nn.ReLU(), *pool))
            into = factor * width
    hidden = 16 * width
    classes = nn.Sequential(
        nn.Flatten(), nn.Linear(4 * into, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, CLASSES)
    )
    return Chain(*blocks, classes)


def gpt(layers: int, width: int, length: int) -> nn.Module:
    """Layers between an embedding of bytes and a classifier."""
    return Chain(Embedding(256, length, width), *(Layer(width, 4) for _ in range(layers)), Head(width))


def images(batch: int, size: int) -> Tensor:
    """As many of that size."""
    return torch.randn(batch, 3, size, size)


@dataclass(frozen=True)
class Family:
    """A model and a batch for it."""

    name: str
    about: str
    build: Callable[[], Any]
    samples: Callable[[], Tensor]


FAMILIES = {
    "resnet50": Family(
        "ResNet-50", "width 16, 8 images of 64 x 64", lambda: resnet((3, 4, 6, 3), 16), lambda: images(8, 64)
    ),
    "gpt": Family(
        "GPT", "12 layers of width 128, 8 x 128 tokens", lambda: gpt(12, 128, 128), lambda: torch.randint(256, (8, 128))
    ),
    "vgg16": Family("VGG-16", "width 32, 16 images of 64 x 64", lambda: vgg(32), lambda: images(16, 64)),
    "resnet200": Family(
        "ResNet-200", "width 8, 8 images of 48 x 48", lambda: resnet((3, 24, 36, 3), 8), lambda: images(8, 48)
    ),
    "wide_resnet": Family(
        "WideResNet-28-2", "16 images of 32 x 32", lambda: wide_resnet(4, 32), lambda: images(16, 32)
    ),
    "unet": Family("U-Net", "width 16, 8 images of 96 x 96", lambda: UNet(16, 4), lambda: images(8, 96)),
}

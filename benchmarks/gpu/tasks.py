"""What is trained on the device: models whose every kernel has a deterministic form there, on random data.

Speed does not depend on what the numbers are. A few habits of the examples have no deterministic kernel on CUDA
(docs/explanation/gpu.md): strides stand in for max pooling, and logits are flattened before the cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DeviceTask:
    """A training, equal on all sides."""

    title: str
    batch: int
    """Samples of a global batch."""
    model: Callable[[], nn.Module]
    """Seeded, so the same in every process; on the CPU."""
    data: Callable[[], TensorDataset]
    loss: Loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _images(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(10, (count,), generator=generator))


def _digits() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 2 * 2, 10),
    )


def _class_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def _windows(count: int) -> TensorDataset:
    from charlm_task import CHARACTERS, CONTEXT

    text = torch.randint(CHARACTERS, (count, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def _transformer(width: int, heads: int, layers: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from charlm_task import CharacterModel

        torch.manual_seed(0)
        return CharacterModel(width, heads, layers)

    return make


def _character_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x).transpose(1, 2)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


def tasks(small: bool) -> dict[str, DeviceTask]:
    """By name: the digits CNN, the char transformer, and one of 25 million parameters (``small``: a narrow one)."""
    large, batch = (_transformer(64, 4, 2), 16) if small else (_transformer(512, 8, 8), 256)
    return {
        "digits": DeviceTask(
            "digits CNN with strides, 22 k parameters", 128, _digits, lambda: _images(1_437), _class_loss
        ),
        "charlm": DeviceTask(
            "char transformer, 137 k parameters",
            32,
            _transformer(64, 4, 2),
            lambda: _windows(4_096),
            _character_loss,
        ),
        "large": DeviceTask(
            "a narrow transformer" if small else "transformer, 25 M parameters",
            batch,
            large,
            lambda: _windows(4_096),
            _character_loss,
        ),
    }

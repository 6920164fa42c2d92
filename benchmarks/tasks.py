"""What is trained in the measurements: real examples, and perceptrons of a given size."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

VIRTUAL_NODES = 8
FEATURES, CLASSES = 64, 10


@dataclass(frozen=True)
class Task:
    """A training: equal on all sides of a comparison."""

    title: str
    batch: int
    """Samples of a global batch."""
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer, Dataset[Any]]]
    """Model, optimizer and samples; seeded, so the same in every process."""


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a micro-batch: its mean over samples."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def _digits() -> tuple[nn.Module, torch.optim.Optimizer, Dataset[Any]]:
    from digits_task import DigitsNet, digits

    torch.manual_seed(0)
    model = DigitsNet()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3), digits()[0]


def _transformer(title: str, batch: int, **size: int) -> Task:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Dataset[Any]]:
        from charlm_task import CharacterModel, windows

        torch.manual_seed(0)
        model = CharacterModel(**size)
        return model, torch.optim.AdamW(model.parameters(), lr=3e-4 if size else 3e-3), windows(None)[0]

    return Task(title, batch, make)


def _perceptron(width: int, batch: int) -> Task:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Dataset[Any]]:
        torch.manual_seed(0)
        inner = (module for _ in range(3) for module in (nn.Linear(width, width), nn.ReLU()))
        model = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), *inner, nn.Linear(width, CLASSES))
        data = TensorDataset(torch.randn(2_048, FEATURES), torch.randint(CLASSES, (2_048,)))
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), data

    parameters = (FEATURES + 1) * width + 3 * (width + 1) * width + (width + 1) * CLASSES
    return Task(f"MLP, {parameters / 1e6:.1f} M parameters", batch, make)


class Mean(nn.Module):
    """Over the tokens of each sample."""

    def forward(self, x: Tensor) -> Tensor:
        """``(samples, tokens, values)`` to ``(samples, values)``."""
        return x.mean(1)


def _activations() -> tuple[nn.Module, torch.optim.Optimizer, Dataset[Any]]:
    torch.manual_seed(0)
    inner = (module for _ in range(8) for module in (nn.Linear(FEATURES, FEATURES), nn.GELU()))
    model = nn.Sequential(*inner, nn.Linear(FEATURES, CLASSES), Mean())
    data = TensorDataset(torch.randn(64, 512, FEATURES), torch.randint(CLASSES, (64,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), data


TASKS = {
    "digits": Task("digits CNN, 21 k parameters", 128, _digits),
    "mlp": _perceptron(1_400, 256),
    "charlm": _transformer("char transformer, 137 k parameters", 32),
    "charlm-3m": _transformer("char transformer, 3.3 M parameters", 16, width=256, heads=8, layers=4),
    "transformer": _transformer("char transformer, 25 M parameters", 8, width=512, heads=8, layers=8),
    "wide": _perceptron(2_600, 128),
    "activations": Task("MLP of tokens, 34 k parameters", 64, _activations),
}


def elastic_mode(reproducibility: str) -> dict[str, Any]:
    """The arguments of ``vf.elastic`` for ``bitwise`` or ``statistical``.

    Raises:
        ValueError: the library does not know that mode.
    """
    import virtualflow as vf

    if "reproducibility" in inspect.signature(vf.elastic).parameters:
        return {"reproducibility": reproducibility}
    if reproducibility != "bitwise":
        raise ValueError(f"this library has no reproducibility={reproducibility!r}")
    return {}

"""What the tests on a device train."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.state import digests

STEPS, SAMPLES, BATCH, VIRTUAL_NODES = 6, 44, 16, 4


def network(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A convolution, batch norm, dropout, and a constant buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 10),
    )
    model.register_buffer("constant", torch.arange(5.0))
    return model.to(device=device, dtype=dtype)


def images(dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Random ones, with labels; on the host."""
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(SAMPLES, 1, 8, 8, generator=draw).to(dtype), torch.randint(10, (SAMPLES,), generator=draw)
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Fused."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """In single precision, whatever the model computes in."""
    return F.cross_entropy(model(x).float(), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, **options: Any) -> str:
    """The digests after a training alone; ``ahead``: it is the library that moves micro-batches."""
    data = options.pop("data", None) or images()
    compute = options.pop("compute", None) or loss_of
    where = device if options.pop("ahead", True) else None
    arguments = {"batch_size": BATCH, "virtual_nodes": VIRTUAL_NODES, "steps": STEPS, "device": where, **options}
    scaler = options.get("scaler")
    with vf.elastic(model, optimizer, data, **arguments) as run:
        for step in run:
            for x, y in step:
                loss = compute(model, x.to(device), y.to(device))
                (loss if scaler is None else scaler.scale(loss)).backward()
                step.log(loss=loss)
    return f"{digests.digest(model.state_dict())} {digests.optimizer_digest(optimizer)}"

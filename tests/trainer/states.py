"""What the tests of a job's state are made of: a model with everything in it, every optimizer, equality to the bit."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virtualflow.state import Optimizers, capture


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(one: Any, other: Any, path: str = "tree") -> None:
    """Equal in type, order, shape and every bit."""
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor), path
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        assert bits(one) == bits(other), path
        return
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert [(type(key), key) for key in one] == [(type(key), key) for key in other], path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for n, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}.{n}")
    elif isinstance(one, float):
        assert struct.pack(">d", one) == struct.pack(">d", other), path
    else:
        assert one == other, path


class Net(nn.Module):
    """Batch norm, a tied weight, a frozen parameter, and buffers of every sort that users register."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(6, 6, bias=False, dtype=dtype)
        self.norm = nn.BatchNorm1d(6, dtype=dtype)
        self.head = nn.Linear(6, 6, dtype=dtype)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=False)
        self.register_buffer("calls", torch.tensor(seed))
        self.register_buffer("hidden", torch.full((2,), float(seed)), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("expanded", torch.full((1,), float(seed)).expand(3))
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("later", None)
        self.note = {"seed": seed}

    def get_extra_state(self) -> Any:
        return {"note": self.note, "tensor": self.hidden + 1}

    def set_extra_state(self, value: Any) -> None:
        self.note = value["note"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.hidden *= 1.5
        self.seen = torch.cat([self.seen, torch.ones(1)])
        self.later = self.calls.float() if self.later is None else self.later + 1
        return self.head(F.relu(self.norm(self.embed(x))))


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-amsgrad-foreach": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "several": lambda p: Optimizers([torch.optim.SGD([p[0]], lr=0.1, momentum=0.9), torch.optim.AdamW([p[1]])]),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 6, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def trained(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: weights and the rest."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def small_model(width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after two steps, and its optimizer."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, amsgrad=True)
    for _ in range(2):
        model(torch.randn(5, width)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def captured(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of both, as it travels."""
    return capture.capture(model, optimizer, None, None, {"step": 2})

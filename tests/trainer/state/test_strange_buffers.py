"""Buffers that no virtual node could start anew from are refused; caches that grow are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from elastic_jobs import ElasticJob, alone, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0).detach()
        self.mean = mean if self.mean is None else self.mean * 0.9 + mean * 0.1
        return self.linear(x - self.mean)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        shared = torch.zeros(3)
        self.register_buffer("a", shared)
        self.register_buffer("b", shared)

    def forward(self, x: Tensor) -> Tensor:
        self.b = self.b * 0.9 + 0.1 * x.mean(0).detach()
        return self.linear(x - self.b)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(3))
        self.mean.mul_(0.9).add_(0.1 * x.mean(0).detach())
        return self.linear(x - self.mean)


class Growing(nn.Module):
    """Like a rotary embedding: a table that is made anew when a longer batch comes, and a length kept in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.length = 1

    def forward(self, x: Tensor) -> Tensor:
        wanted = 1 + int(x[0, 0].abs() * 10)
        if wanted > self.length:
            self.length, self.table = wanted, torch.arange(wanted, dtype=torch.float32)
        return self.linear(x + self.table[wanted - 1])


MODELS = {"filled": Filled, "tied": Tied, "lazy": Lazy, "growing": Growing}


def train(kind: str) -> object:
    torch.manual_seed(0)
    model = MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    dataset = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(0)))
    with vf.elastic(model, optimizer, dataset, batch_size=12, epochs=2, virtual_nodes=6) as run:
        for step in run:
            for (x,) in step:
                model(x).square().mean().backward()
    return trained(run, model, optimizer)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("filled", "buffer mean has come since vf.elastic got the model"),
        ("tied", "buffer b shares its tensor with a and was replaced"),
        ("lazy", "buffer mean has come since vf.elastic got the model"),
    ],
)
def test_a_buffer_without_a_beginning_is_refused(kind: str, sentence: str) -> None:
    with pytest.raises(vf.ConfigurationError, match=sentence):
        train(kind)


def test_a_cache_may_grow(start_job: Callable[..., ElasticJob]) -> None:
    expected = alone(train, "growing")
    outcomes = start_job(train, "growing", workers=2).finish()
    assert [outcome.value for outcome in outcomes.values()] == [expected, expected], outcomes

"""Caches made of weights are emptied for each virtual node, or a script's own is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import virtualflow as vf
from virtualflow.errors import ConfigurationError
from virtualflow.step import Repetition

DATA = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 32)[:, None].repeat(1, 4), torch.linspace(-2, 1, 32))


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def train(around: Any, within: Callable[[], Any], *, looks: bool = False) -> list[Tensor]:
    """Weights after four steps, with one context around the whole training and another within the inner loop."""
    torch.manual_seed(0)
    model = nn.Sequential(weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    with around, vf.elastic(model, optimizer, DATA, batch_size=8, steps=4, virtual_nodes=2) as run:
        for step in run:
            for x, y in step:
                with within():
                    loss = F.mse_loss(model(x).float()[:, 0], y)
                loss.backward()
            if looks:
                with torch.no_grad(), within():
                    seen.append(model(DATA.tensors[0]).float())
    return [*seen, *(parameter.detach() for parameter in model.parameters())]


@contextmanager
def both() -> Iterator[None]:
    with autocast(), parametrize.cached():
        yield


@pytest.mark.parametrize("cache", [autocast, parametrize.cached, both], ids=["autocast", "parametrizations", "both"])
@pytest.mark.parametrize("looks", [False, True], ids=["", "and code after the step uses the model"])
def test_a_cache_opened_around_the_training_is_as_one_opened_in_the_inner_loop(
    cache: Callable[[], Any], looks: bool
) -> None:
    around, within = train(cache(), nullcontext, looks=looks), train(nullcontext(), cache, looks=looks)
    assert all(torch.equal(one, other) for one, other in zip(around, within, strict=True))


class Kept(nn.Module):
    """Makes something of its weight once."""

    def __init__(self, *, of: Callable[[Tensor], Tensor] = Tensor.double) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))
        self.made = functools.cache(lambda: of(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.double(), self.made())


def compute_twice(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    repetition = Repetition(model)
    for _ in range(2):
        model.zero_grad()
        try:
            loss().backward()
            if repetition.under_way:
                repetition.compare()
            else:
                repetition.note()
        except ConfigurationError:
            repetition.forget()
            raise


def squashed(weight: Tensor) -> Tensor:
    return weight.double().tanh()


@pytest.mark.parametrize("of", [Tensor.double, squashed], ids=["a cast", "what needs its own graph's tensors"])
def test_a_cache_of_the_scripts_own_is_refused_by_the_parameters_name(of: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(Kept(of=of))
    with pytest.raises(ConfigurationError, match=r"shape \[3, 4\] made of parameter 0.weight was kept from one micro"):
        compute_twice(model, lambda: model(torch.ones(2, 4)).sum())


def test_losses_that_are_kept_with_their_graphs_are_harmless() -> None:
    model, losses = nn.Linear(4, 1), []

    def loss() -> Tensor:
        losses.append(model(torch.ones(2, 4)).sum())
        return losses[-1]

    compute_twice(model, loss)
    assert len(losses) == 2


def test_an_attempt_that_is_not_computed_twice_after_all_leaves_nothing_behind() -> None:
    model = nn.Sequential(Kept())
    repetition = Repetition(model)
    model(torch.ones(2, 4)).sum().backward()
    repetition.note()
    repetition.forget()
    model(torch.ones(2, 4)).sum().backward()
    assert not repetition.under_way

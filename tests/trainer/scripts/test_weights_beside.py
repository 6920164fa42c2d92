"""Weights that a script averages or copies by hand beside the model: a joiner and a checkpoint would not have them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.settings import ENV_CHECKPOINT_DIR, ENV_CHECKPOINT_STEPS


class Shadows:
    """As tutorials write it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: value.clone().detach() for name, value in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, value in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * value.detach()


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.average = model, Shadows(model)

    def after(self, number: int) -> None:
        self.average.update(self.model)


class Teacher:
    def __init__(self, model: nn.Module, every: int = 1) -> None:
        self.net, self.model, self.every = copy.deepcopy(model), model, every

    @torch.no_grad()
    def after(self, number: int) -> None:
        if number % self.every == 0:
            for mine, yours in zip(self.net.parameters(), self.model.parameters(), strict=True):
                mine.data.mul_(0.9).add_(yours.data, alpha=0.1)  # which torch does not count


class Untouched(Teacher):
    def after(self, number: int) -> None:
        self.net(torch.randn(2, 4))


class MadeAnew:
    """What the last update changed, by a copy that is made in each step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.former = model, self.copied(model)
        self.alias = model.state_dict()

    def copied(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in model.named_parameters()}

    def after(self, number: int) -> None:
        self.norm = sum((value - self.former[name]).norm() for name, value in self.model.named_parameters())
        self.former = self.copied(self.model)


class InAList:
    def __init__(self, model: nn.Module) -> None:
        self.slow, self.model = [value.detach().clone() for value in model.parameters()], model

    def after(self, number: int) -> None:
        for mine, yours in zip(self.slow, self.model.parameters(), strict=True):
            mine.lerp_(yours.detach(), 0.5)


def train(keeper: Callable[[nn.Module], Any], steps: int, **options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = keeper(model)
    given = {"state": {"net": kept.net}} if options.pop("passed", False) else {}
    with vf.elastic(model, optimizer, data, batch_size=8, steps=steps, virtual_nodes=2, **given) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            kept.after(step.number)


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody could begin from later."""
    monkeypatch.setenv(ENV_CHECKPOINT_DIR, str(tmp_path))
    monkeypatch.setenv(ENV_CHECKPOINT_STEPS, "1000")


@pytest.mark.usefixtures("checkpoints")
@pytest.mark.parametrize(
    ("keeper", "named"),
    [
        (Trainer, r"shadow \(dict\)"),
        (Teacher, r"net \(Sequential\)"),
        (InAList, r"slow \(list\)"),
        (lambda model: Teacher(model, every=3), r"net \(Sequential\)"),
    ],
    ids=["shadows of a trainer's average", "a teacher", "a list", "a target network"],
)
def test_weights_that_change_beside_the_model_are_refused_by_name(
    keeper: Callable[[nn.Module], Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"the script keeps weights in {named} that change as it trains"):
        train(keeper, steps=8)


@pytest.mark.usefixtures("checkpoints")
@pytest.mark.parametrize(
    ("keeper", "options"),
    [(Untouched, {}), (MadeAnew, {}), (Teacher, {"passed": True})],
    ids=["a frozen teacher", "copies that are made anew", "a teacher that is passed"],
)
def test_weights_that_nobody_misses_are_left_alone(
    keeper: Callable[[nn.Module], Any], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    train(keeper, steps=102, **options)
    assert "keeps weights" not in caplog.text


@pytest.mark.usefixtures("checkpoints")
def test_weights_that_begin_to_change_late_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """What was trained until then would be lost by a refusal."""
    with caplog.at_level(logging.WARNING):
        train(lambda model: Teacher(model, every=50), steps=210)
    assert caplog.text.count("the script keeps weights in net (Sequential)") == 1


def test_where_nobody_begins_later_nothing_is_missed() -> None:
    train(Teacher, steps=8)


@pytest.mark.usefixtures("checkpoints")
def test_an_average_that_torch_has_a_class_for_is_refused_at_the_start() -> None:
    class Averaged(AveragedModel):
        def after(self, number: int) -> None:
            raise AssertionError("a step was made")

    with pytest.raises(ConfigurationError, match="the script keeps an average of weights in kept"):
        train(Averaged, steps=8)

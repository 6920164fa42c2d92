"""Weights that a script averages or copies by hand beside the model: a joiner and a checkpoint would not have them."""

from __future__ import annotations

import copy
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
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
from virtualflow.worker.process import WeightsBeside


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


class Refusing(Mapping[str, Any]):
    """As a configuration with a value that is missing, or a file that is closed."""

    def __getitem__(self, name: str) -> Any:
        raise LookupError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(["missing"])

    def __len__(self) -> int:
        return 1


class PassedShadows(Shadows):
    """Kept in ``state=`` as the sentence asks for; the script has what is in it at hand."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model, self.net, self.at_hand = model, self, self.shadow
        self.parts = [value.data for value in self.shadow.values()]
        self.gone, self.mapping = weakref.proxy(nn.Linear(2, 2)), Refusing()

    def after(self, number: int) -> None:
        self.update(self.model)

    def state_dict(self) -> dict[str, Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.shadow.update(state)


class Wrapped(Teacher):
    """A part of what is passed is at hand, too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.part = self.net[0]


class ModuleOfShadows(nn.Module):
    """An average that is a module, with its weights in a dict and in buffers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shadow = Shadows(model).shadow
        for place, value in enumerate(self.shadow.values()):
            self.register_buffer(f"buffer{place}", value.clone())

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Tensor]:
        return super().state_dict() | self.shadow

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for kept in (self.shadow.values(), self.buffers()):
            for mine, yours in zip(kept, model.parameters(), strict=True):
                mine.lerp_(yours, 0.1)


class PassedModule:
    def __init__(self, model: nn.Module) -> None:
        self.net, self.model = ModuleOfShadows(model), model

    def after(self, number: int) -> None:
        self.net.update(self.model)


class LoadedLate(Teacher):
    """Weights that are read once, and stay."""

    def after(self, number: int) -> None:
        if number == 2:
            self.net.load_state_dict({name: value + 1 for name, value in self.net.state_dict().items()})


class CopyOfTheModel(Teacher):
    """What an evaluation runs on."""

    def after(self, number: int) -> None:
        self.net.load_state_dict(self.model.state_dict())


class Scratch(InAList):
    """What the last update changed, by weights that are copied in place behind each step."""

    def after(self, number: int) -> None:
        for mine, yours in zip(self.slow, self.model.parameters(), strict=True):
            mine.copy_(yours.detach())


class Moved(MadeAnew):
    """The script has given its parameters other memory, and has them in a list."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.parameters = list(model.parameters())

    def after(self, number: int) -> None:
        for parameter in self.parameters:
            parameter.data = parameter.data.clamp(-0.5, 0.5)


@dataclasses.dataclass
class Unhashable(nn.Module):
    margin: float = 0.1

    def __post_init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class Bystanders(MadeAnew):
    """Things that cannot be looked at, or only in part."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.loss, self.unused = Unhashable(), nn.LazyLinear(3)
        self.meta = copy.deepcopy(model).to("meta")
        self.sparse = nn.Linear(2, 2)
        self.sparse.weight = nn.Parameter(torch.eye(2).to_sparse())
        self.gone = weakref.proxy(nn.Linear(2, 2))


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
        (Trainer, "shadow (dict)"),
        (Teacher, "net (Sequential)"),
        (InAList, "slow (list)"),
        (lambda model: Teacher(model, every=3), "net (Sequential)"),
        (lambda model: Teacher(model, every=50), "net (Sequential)"),
    ],
    ids=["shadows of a trainer's average", "a teacher", "a list", "a target network", "one that changes late"],
)
def test_weights_that_change_beside_the_model_are_named_once(
    keeper: Callable[[nn.Module], Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        train(keeper, steps=204 if named.startswith("net") else 12)
    assert caplog.text.count(f"the script keeps weights in {named} that change as it trains") == 1


@pytest.mark.usefixtures("checkpoints")
@pytest.mark.parametrize(
    ("keeper", "options"),
    [
        (Untouched, {}),
        (MadeAnew, {}),
        (Teacher, {"passed": True}),
        (PassedShadows, {"passed": True}),
        (Wrapped, {"passed": True}),
        (PassedModule, {"passed": True}),
        (Scratch, {}),
        (LoadedLate, {}),
        (CopyOfTheModel, {}),
        (Moved, {}),
        (Bystanders, {}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_weights_that_nobody_misses_are_left_alone(
    keeper: Callable[[nn.Module], Any], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    train(keeper, steps=12, **options)
    assert "keeps weights" not in caplog.text


def test_where_nobody_begins_later_nothing_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    train(Teacher, steps=8)
    assert "keeps weights" not in caplog.text


@pytest.mark.usefixtures("checkpoints")
def test_an_average_that_torch_has_a_class_for_is_refused_at_the_start() -> None:
    class Averaged(AveragedModel):
        def after(self, number: int) -> None:
            raise AssertionError("a step was made")

    with pytest.raises(ConfigurationError, match="the script keeps an average of weights in kept"):
        train(Averaged, steps=8)


def test_a_look_keeps_nothing_of_the_script_alive() -> None:
    """A function's variables are copied to be looked at, and the copy stays with its frame."""

    def script() -> weakref.ref[nn.Module]:
        batch = nn.Linear(2, 2)
        gone = weakref.ref(batch)
        assert WeightsBeside(nn.Linear(1, 1), list).look(1) is None
        del batch
        return gone if gone() is None else weakref.ref(WeightsBeside)  # type: ignore[return-value]

    assert script()() is None


def test_what_a_script_has_of_its_variables_stays_as_it_is() -> None:
    def script(lr: float) -> dict[str, object]:
        options = locals()
        assert WeightsBeside(nn.Linear(1, 1), list).look(1) is None
        return options

    assert script(0.1)["lr"] == 0.1


def test_what_a_script_has_put_among_its_variables_stays_there() -> None:
    def script() -> object:
        exec("lr = 0.5")
        assert WeightsBeside(nn.Linear(1, 1), list).look(1) is None
        return locals()["lr"]

    assert script() == 0.5

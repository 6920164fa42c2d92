"""State that no ``state_dict`` knows is found at the start, by the names of optimizer and attribute."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, Trained, alone, die_here, trained
from torch import Tensor, nn
from torch.optim import lr_scheduler as torchs
from torch.optim import swa_utils
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import needs
from virtualflow.errors import ConfigurationError
from virtualflow.state import digests
from virtualflow.step import find_lost_state, lost_state


def lost_by(thing: Any, *others: Any, step: Any = lost_state._step_optimizer) -> list[str]:
    """What a trial finds, which must not end before its time."""
    return lost_state._try([thing, *others], [], step)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 50), nn.LayerNorm(50), nn.Linear(50, 1))


class Lookahead(torch.optim.SGD):
    """Every ``period`` steps goes back half the way to slow weights, which it makes at once or in its first step."""

    def __init__(self, parameters: Any, *, period: int = 5, at_once: bool = False, in_state: bool = False) -> None:
        super().__init__(parameters, 0.05)
        self.period, self.in_state, self.steps = period, in_state, 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]] if at_once else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.in_state:
            slow = [self.state[p].setdefault("slow", p.detach().clone()) for p in parameters]
            group = self.param_groups[0]
            made = group["made"] = group.get("made", 0) + 1
        else:
            slow = self.slow = self.slow or [p.detach().clone() for p in parameters]
            made = self.steps = self.steps + 1
        super().step()
        if made % self.period == 0:
            for kept, parameter in zip(slow, parameters, strict=True):
                parameter.copy_(kept.lerp_(parameter, 0.5))


class WarmingUp(torch.optim.Adam):
    """Counts its own steps for a learning rate that grows."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.param_groups[0]["lr"] = 0.001 * min(1.0, self.calls / 100)
        super().step()


class Averaging(torch.optim.SGD):
    """Averages weights, by parameter, for whoever asks for them at the end."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.05)
        self.mean: dict[Tensor, Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.mean.setdefault(parameter, parameter.detach().clone()).lerp_(parameter.detach(), 0.1)


class Around(torch.optim.Optimizer):
    """Around another optimizer, whose steps it counts; says of it what that says."""

    def __init__(self, inner: torch.optim.Optimizer, *, says: bool) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.says, self.count = inner, says, 0
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        if self.count % 3 == 0:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.mul_(0.9)

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), **({"count": self.count} if self.says else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        self.count = rest.pop("count", 0)
        self.inner.load_state_dict(rest)
        self.param_groups = self.inner.param_groups


class Noisy(torch.optim.SGD):
    """Adds noise from a generator of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.05)
        self.noise = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn(parameter.shape, generator=self.noise), alpha=0.01)


class Chatty(torch.optim.SGD):
    """Remembers what makes no difference, and a tensor that it makes anew in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.05)
        self.calls, self.told, self.norm = 0, False, None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls, self.told = self.calls + 1, True
        self.norm = torch.stack([p.grad.norm() for p in self.param_groups[0]["params"]]).norm()
        super().step()


@pytest.mark.parametrize(
    ("make", "attributes"),
    [
        (Lookahead, "steps, slow"),
        (lambda p: Lookahead(p, at_once=True), "steps, slow"),
        (lambda p: Lookahead(p, period=1000), "slow"),
        (WarmingUp, "calls"),
        (Averaging, "mean"),
        (Noisy, "noise"),
        (lambda p: Around(torch.optim.AdamW(p), says=False), "count"),
    ],
    ids=["lookahead", "made at once", "a long period", "a count", "averages", "a generator", "around another"],
)
def test_an_attribute_that_would_be_lost_is_named(make: Callable[[Any], Any], attributes: str) -> None:
    net = model()
    optimizer, before = make(list(net.parameters())), digests.digest(net.state_dict())
    state = torch.get_rng_state()
    found = find_lost_state(optimizer, None, {})
    assert found is not None
    assert found.startswith(f"the optimizer {type(optimizer).__name__} keeps {attributes} outside of its state_dict")
    assert digests.digest(net.state_dict()) == before
    assert not optimizer.state
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Lookahead(p, in_state=True),
        lambda p: Around(torch.optim.AdamW(p), says=True),
        Chatty,
    ],
    ids=["lookahead in its state", "around another", "harmless attributes"],
)
def test_an_optimizer_whose_state_is_complete_is_not_accused(make: Callable[[Any], Any]) -> None:
    assert lost_by(make(list(model().parameters()))) == []


class Kept:
    """Travels with the training, and holds an optimizer's attributes."""

    def __init__(self, optimizer: Lookahead) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.optimizer.steps, "slow": self.optimizer.slow}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.optimizer.steps, self.optimizer.slow = saved["steps"], saved["slow"]


def test_what_travels_in_state_is_not_lost() -> None:
    optimizer = Lookahead(model().parameters())
    assert find_lost_state(optimizer, None, {"kept": Kept(optimizer)}) is None


def torchs_optimizers() -> list[type]:
    found = [each for _, each in inspect.getmembers(torch.optim, inspect.isclass) if each is not torch.optim.Optimizer]
    return [each for each in found if issubclass(each, torch.optim.Optimizer) and each not in NOT_TRIED]


NOT_TRIED = (torch.optim.LBFGS, torch.optim.SparseAdam)
"""They need a closure, or sparse gradients."""


@pytest.mark.parametrize("kind", torchs_optimizers(), ids=lambda kind: kind.__name__)
def test_no_optimizer_of_torchs_would_be_accused(kind: type) -> None:
    parameters = [p for p in model().parameters() if p.dim() == 2 or kind.__name__ != "Muon"]
    assert lost_by(kind(parameters, lr=0.01)) == []


def ramp(step: int) -> float:
    return 1 / (1 + step)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torchs.LambdaLR(o, ramp),
        lambda o: torchs.MultiplicativeLR(o, ramp),
        lambda o: torchs.StepLR(o, 3),
        lambda o: torchs.OneCycleLR(o, 0.1, total_steps=100),
        lambda o: torchs.CyclicLR(o, 0.01, 0.1, step_size_up=4),
        lambda o: torchs.CosineAnnealingWarmRestarts(o, 5),
        torchs.ReduceLROnPlateau,
        lambda o: torchs.SequentialLR(o, [torchs.ConstantLR(o, 0.1), torchs.ExponentialLR(o, 0.9)], [5]),
        lambda o: torchs.ChainedScheduler([torchs.ConstantLR(o, 0.1, 4), torchs.ExponentialLR(o, 0.9)]),
    ],
    ids=["lambda", "product", "step", "one cycle", "cyclic", "restarts", "plateau", "sequence", "chain"],
)
def test_no_scheduler_of_torchs_would_be_accused(make: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD(model().parameters(), 0.1, momentum=0.9)
    scheduler = make(optimizer)
    before = str((scheduler.state_dict(), optimizer.param_groups[0]["lr"]))
    assert lost_by(scheduler, optimizer, step=lost_state._step_scheduler) == []
    assert str((scheduler.state_dict(), optimizer.param_groups[0]["lr"])) == before


class Warmup:
    """A scheduler without torch's base, whose state is half of what it keeps."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, whole: bool = False) -> None:
        self.optimizer, self.whole, self.made, self.best = optimizer, whole, 0, 1e9

    def step(self, loss: float = 0.0) -> None:
        self.made, self.best = self.made + 1, min(self.best, loss)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, self.made / 50)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, **({"made": self.made} if self.whole else {})}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)


def test_a_scheduler_that_loses_its_count_is_named() -> None:
    optimizer = torch.optim.SGD(model().parameters(), 0.1)
    found = find_lost_state(optimizer, Warmup(optimizer), {})
    assert str(found).startswith("the scheduler Warmup keeps made outside of its state_dict")
    assert find_lost_state(optimizer, Warmup(optimizer, whole=True), {}) is None


class Unsteppable(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.file = Path(__file__).open()  # noqa: SIM115

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.file.readline()
        super().step()


class OfAModel(torch.optim.SGD):
    """Steps what its model has."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__(owner.parameters(), 0.1)
        self.owner = owner


def test_what_cannot_be_copied_is_neither_accused_nor_touched() -> None:
    optimizer = Unsteppable(model().parameters())
    assert find_lost_state(optimizer, None, {}) is None
    assert optimizer.file.tell() == 0
    optimizer.file.close()
    assert find_lost_state(OfAModel(model()), None, {}) is None


@needs("transformers")
def test_adafactor_of_transformers_is_not_accused() -> None:
    from transformers.optimization import Adafactor, GreedyLR

    optimizer = Adafactor(model().parameters())
    assert lost_by(optimizer) == []
    plain = torch.optim.SGD(model().parameters(), 0.1)
    assert lost_by(GreedyLR(plain), plain, step=lost_state._step_scheduler) == []


def train(**options: Any) -> Tensor:
    net, x = nn.Linear(8, 1), torch.linspace(-1, 1, 32)[:, None].repeat(1, 8)
    torch.manual_seed(0)
    nn.init.normal_(net.weight)
    data = TensorDataset(x, x[:, :1])
    with vf.elastic(net, Lookahead(net.parameters()), data, batch_size=8, steps=6, virtual_nodes=2, **options) as run:
        for step in run:
            for inputs, wanted in step:
                F.mse_loss(net(inputs), wanted).backward()
    return net.weight.detach()


def test_it_is_refused_where_state_travels_and_else_only_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, start_job: Callable[..., ElasticJob]
) -> None:
    with caplog.at_level(logging.WARNING, "virtualflow.worker"):
        train()
    assert "the optimizer Lookahead keeps steps, slow outside of its state_dict" in caplog.text
    with pytest.raises(ConfigurationError, match="keeps steps, slow outside"):
        train(checkpoint=tmp_path)
    (outcome,) = start_job(train, workers=1).finish().values()
    assert "keeps steps, slow outside of its state_dict" in outcome.text


# --- schedulers that the script keeps for itself ----------------------------------------------------------------------


def steps_it_by_hand(make: Callable[[Any], Any], passes: str = "", dies: str = "") -> Trained:
    """The script steps one scheduler more than it may have passed."""
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.2)
    by_hand, more = make(optimizer), {}
    if passes == "another":
        more = {"scheduler": torchs.StepLR(optimizer, 2), "scheduler_interval": "step"}
    elif passes:
        more = {"state": {"by_hand": by_hand}}
    x = torch.linspace(-1, 1, 512).reshape(64, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    with vf.elastic(net, optimizer, data, batch_size=16, steps=9, virtual_nodes=4, **more) as run:  # type: ignore[arg-type]
        for step in run:
            for a, b in step:
                loss = F.mse_loss(net(a), b)
                loss.backward()
                step.log(loss=loss)
            by_hand.step(*([step.metrics["loss"]] if isinstance(by_hand, torchs.ReduceLROnPlateau) else []))
            if step.number == 6:
                die_here(dies)
    return trained(run, net, optimizer, more=optimizer.param_groups[0]["lr"])


def plateau(optimizer: Any) -> Any:
    return torchs.ReduceLROnPlateau(optimizer, patience=1, threshold=0.5, factor=0.5)


@pytest.mark.parametrize(
    ("make", "passes"), [(plateau, ""), (lambda o: swa_utils.SWALR(o, 0.01), "another")], ids=["plateau", "averaging"]
)
def test_a_scheduler_that_only_the_script_knows_is_refused(make: Callable[[Any], Any], passes: str) -> None:
    with pytest.raises(ConfigurationError, match=r'scheduler in by_hand, .* state=\{"by_hand": by_hand\}'):
        steps_it_by_hand(make, passes)


def by_steps(optimizer: Any) -> Any:
    return torchs.StepLR(optimizer, 5)


@pytest.mark.parametrize("make", [plateau, by_steps], ids=lambda make: make.__name__)
def test_one_that_is_passed_as_state_goes_with_it(
    make: Callable[[Any], Any], start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(steps_it_by_hand, make, "as state")
    assert reference.more < 0.2, "it has reduced the learning rate"
    job = start_job(steps_it_by_hand, make, "as state", "worker-1", workers=2, hold=4)
    job.reach(4)
    job.join()
    assert job.results() == [reference] * 2


def test_a_scheduler_inside_of_the_one_that_is_passed_is_known() -> None:
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.2)
    first, then = torchs.ConstantLR(optimizer, 0.1), torchs.ExponentialLR(optimizer, 0.9)
    both = torchs.SequentialLR(optimizer, [first, then], [5])
    data = TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
    with vf.elastic(net, optimizer, data, batch_size=16, steps=1, scheduler=both) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(net(x), y).backward()
    assert run.completed_steps == 1
    assert (first, then) == tuple(both._schedulers)

"""Which optimizers treat each element for itself is found by trying, without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as base

from virtualflow.state import digests
from virtualflow.step.elementwise import why_not_elementwise


class Lion(torch.optim.Optimizer):
    """As a script may have it; its constructor takes more than parameters. (Chen et al. 2023, arXiv 2302.06675.)"""

    def __init__(self, parameters: Any, lr: float, *, betas: tuple[float, float], norm: str = "none") -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})
        self.norm = norm
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                update = (state["mean"] * first + parameter.grad * (1 - first)).sign_()
                if self.norm == "layer":
                    update *= parameter.norm() / update.norm()
                parameter.sub_(update, alpha=group["lr"])
                state["mean"].mul_(second).add_(parameter.grad, alpha=1 - second)


def lion(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: Lion(parameters, 1e-4, betas=(0.9, 0.99), **options)


class CountsInItsGroup(Lion):
    """One count for all parameters of a group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


class CountsForItself(Lion):
    """One count for all."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.calls += 1


class RoundsAtRandom(Lion):
    """Draws numbers in its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 + 1e-3 * torch.rand_like(parameter))


class HasParametersElsewhere(Lion):
    """Steps what it has noted for itself."""

    def __init__(self, parameters: Any, lr: float, **options: Any) -> None:
        super().__init__(parameters, lr, **options)
        self.noted = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.noted:
            parameter.add_(1.0)


def made_by(kind: type[Lion]) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: kind(parameters, 1e-4, betas=(0.9, 0.99))


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 1)).to(dtype)


ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "AdamW at the beginning of a warm-up": lambda p: torch.optim.AdamW(p, 0.0),
    "AdamW, the rate in a tensor": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), foreach=False),
    "ASGD": torch.optim.ASGD,
    "Adagrad, which has states from the start": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "a script's own Lion": lion(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_an_optimizer_that_treats_each_element_for_itself_is_found(
    make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    assert why_not_elementwise(make(model_of(dtype).parameters())) is None


OTHERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "LBFGS": (torch.optim.LBFGS, "could not step slices"),
    "Adafactor": (torch.optim.Adafactor, "does not treat each element for itself"),
    "SparseAdam": (torch.optim.SparseAdam, "could not step slices"),
    "Lion with a trust ratio": (lion(norm="layer"), "does not treat each element for itself"),
    "one that counts in its group": (made_by(CountsInItsGroup), "one half of the parameters after the other"),
    "one that counts for itself": (made_by(CountsForItself), "one half of the parameters after the other"),
    "one that draws numbers": (made_by(RoundsAtRandom), "does not treat each element for itself"),
    "one that has parameters elsewhere": (made_by(HasParametersElsewhere), "changed nothing"),
}
if hasattr(torch.optim, "Muon"):
    OTHERS["Muon"] = (lambda p: torch.optim.Muon([each for each in p if each.dim() == 2]), "could not step slices")


@pytest.mark.parametrize(("make", "words"), OTHERS.values(), ids=OTHERS)
def test_any_other_is_refused_with_a_reason(make: Callable[[Any], torch.optim.Optimizer], words: str) -> None:
    model = model_of()
    before = digests.digest(model.state_dict())
    assert words in str(why_not_elementwise(make(model.parameters())))
    assert digests.digest(model.state_dict()) == before


def test_a_group_with_other_options_is_tried_too() -> None:
    first, second = model_of().parameters(), model_of().parameters()
    mixed = torch.optim.Adafactor([{"params": [next(first)]}, {"params": list(second)}])
    plain = torch.optim.SGD([{"params": [parameter], "lr": 0.1 * n} for n, parameter in enumerate(first, start=1)])
    assert why_not_elementwise(mixed) is not None
    assert why_not_elementwise(plain) is None


def test_the_trial_leaves_no_trace() -> None:
    model = model_of()
    optimizer = lion()(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(1, 20)).sum().backward()
    optimizer.step()
    hooked: list[Any] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: hooked.append("own")),
        base.register_optimizer_step_post_hook(lambda *_: hooked.append("global")),
    ]
    seen = digests.digest(model.state_dict()), digests.optimizer_digest(optimizer), torch.get_rng_state().tolist()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert why_not_elementwise(optimizer) is None
    for handle in handles:
        handle.remove()
    after = digests.digest(model.state_dict()), digests.optimizer_digest(optimizer), torch.get_rng_state().tolist()
    assert (seen, hooked) == (after, [])
    assert [parameter.grad for parameter in model.parameters()] == gradients
    assert scheduler.last_epoch == 0


def test_an_optimizer_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = lion()(model_of().parameters())
    calls: list[int] = []
    monkeypatch.setattr(Lion, "step", lambda *_: calls.append(1))
    first = why_not_elementwise(optimizer)
    tried = len(calls)
    assert tried > 0
    assert why_not_elementwise(optimizer) == first
    assert len(calls) == tried

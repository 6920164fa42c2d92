"""Which optimizers treat each element for itself is found by trying, without a trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from own_optimizers import BlockwiseMomentum, Lion
from torch import nn
from torch.optim import optimizer as base

from tiers import needs_newer
from virtualflow.state import digests
from virtualflow.step.elementwise import try_slices

FINE, REAL = 1, 4_096
"""Blocks of the norm: slices begin at multiples of 64 bytes, or as they do in a job."""


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


class CentresKernels(Lion):
    """Looks at all gradients of a convolution."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.dim() == 4:
                    parameter.grad -= parameter.grad.mean()
        super().step()


class DrawsPythonsNumbers(Lion):
    """From the generator of the module ``random``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 + 1e-3 * random.random())


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
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 1)).to(dtype)
    model.register_parameter("scale", nn.Parameter(torch.ones((), dtype=dtype)))
    model.register_parameter("kernel", nn.Parameter(torch.ones((2, 3, 3, 3), dtype=dtype)))
    return model


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
if torch.__version__ >= (2, 6):
    ELEMENTWISE["named groups"] = lambda p: torch.optim.AdamW(
        [{"params": [(str(n), each)]} for n, each in enumerate(p)], 0.1
    )


@pytest.mark.parametrize("block", [FINE, REAL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_an_optimizer_that_treats_each_element_for_itself_is_found(
    make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype, block: int
) -> None:
    verdict = try_slices(make(model_of(dtype).parameters()), block)
    assert verdict.reason is None
    assert set(verdict.grains.values()) <= {0, 1}


def test_one_whose_blocks_fit_between_the_cuts_is_as_good() -> None:
    def make(block: int) -> torch.optim.Optimizer:
        return BlockwiseMomentum(model_of().parameters(), 0.1, block=block)

    verdict = try_slices(make(256), REAL)
    assert verdict.reason is None
    assert verdict.grains == {"codes": 1, "scales": 256, "step": 0, "codebook": 0}
    assert "does not treat each element" in str(try_slices(make(256), FINE).reason)
    assert "does not treat each element" in str(try_slices(make(3_000), REAL).reason)


OTHERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "LBFGS": (torch.optim.LBFGS, "could not step slices"),
    "SparseAdam": (torch.optim.SparseAdam, "could not step slices"),
    "Lion with a trust ratio": (lion(norm="layer"), "does not treat each element for itself"),
    "one that counts in its group": (made_by(CountsInItsGroup), "one half of the parameters after the other"),
    "one that counts for itself": (made_by(CountsForItself), "one half of the parameters after the other"),
    "one that draws numbers": (made_by(RoundsAtRandom), "does not treat each element for itself"),
    "one that draws Python's": (made_by(DrawsPythonsNumbers), "does not treat each element for itself"),
    "one that centres kernels": (made_by(CentresKernels), "does not treat each element for itself"),
    "one that has parameters elsewhere": (made_by(HasParametersElsewhere), "changed nothing"),
}
if hasattr(torch.optim, "Adafactor"):
    OTHERS["Adafactor"] = (torch.optim.Adafactor, "does not treat each element for itself")
if hasattr(torch.optim, "Muon"):
    OTHERS["Muon"] = (lambda p: torch.optim.Muon([each for each in p if each.dim() == 2]), "could not step slices")


@pytest.mark.parametrize(("make", "words"), OTHERS.values(), ids=OTHERS)
def test_any_other_is_refused_with_a_reason(make: Callable[[Any], torch.optim.Optimizer], words: str) -> None:
    model = model_of()
    before, drawn = digests.digest(model.state_dict()), random.getstate()
    assert words in str(try_slices(make(model.parameters()), REAL).reason)
    assert digests.digest(model.state_dict()) == before
    assert random.getstate() == drawn


@needs_newer(torch.optim, "Adafactor")
def test_a_group_with_other_options_is_tried_too() -> None:
    first, second = model_of().parameters(), model_of().parameters()
    mixed = torch.optim.Adafactor([{"params": [next(first)]}, {"params": list(second)}])
    plain = torch.optim.SGD([{"params": [parameter], "lr": 0.1 * n} for n, parameter in enumerate(first, start=1)])
    assert try_slices(mixed, REAL).reason is not None
    assert try_slices(plain, REAL).reason is None


def test_the_trial_leaves_no_trace() -> None:
    model = model_of()
    optimizer = lion()(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    (model(torch.ones(1, 20)).sum() * model.scale + model.kernel.sum()).backward()
    optimizer.step()
    hooked: list[Any] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: hooked.append("own")),
        base.register_optimizer_step_post_hook(lambda *_: hooked.append("global")),
    ]
    seen = digests.digest(model.state_dict()), digests.optimizer_digest(optimizer), torch.get_rng_state().tolist()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert try_slices(optimizer, REAL).reason is None
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
    first = try_slices(optimizer, REAL)
    tried = len(calls)
    assert tried > 0
    assert try_slices(optimizer, REAL) == first
    assert len(calls) == tried

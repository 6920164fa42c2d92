"""An optimizer that steps in portions gives the bits of one step, and leaves no trace when it is taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from virtualflow.state import digests
from virtualflow.step.partial_step import StepInPortions, is_separable

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
}
BLOCK = 4_096


def build(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    draw = torch.Generator().manual_seed(4)
    parameters = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((7, 5), (3,), (65,), ())]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.03}]
    return parameters, make(groups)


def gradients(step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=draw) for shape in ((7, 5), (3,), (65,), ())]


def state(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    names = {str(number): parameter.detach() for number, parameter in enumerate(parameters)}
    return digests.digest(names), digests.optimizer_digest(optimizer)


def whole_step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, number: int) -> None:
    for parameter, gradient in zip(parameters, gradients(number), strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_portions_give_the_bits_of_one_step(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    ours, theirs = build(make), build(make)
    assert is_separable(ours[1], BLOCK)
    for number in range(4):
        whole_step(*theirs, number)
        parameters, optimizer = ours
        steps, given = StepInPortions(optimizer), gradients(number)
        for portion in ([3, 1], [0]):
            steps.step([parameters[place] for place in portion], [given[place] for place in portion])
        assert steps.stepped == [parameters[3], parameters[1], parameters[0]]
        parameters[2].grad = given[2]  # as the update does with what came last
        optimizer.step()
        parameters[2].grad = None
        assert state(*ours) == state(*theirs)


@pytest.mark.parametrize("before", [0, 2], ids=["in the first step", "later"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_is_taken_back_leaves_no_trace(make: Callable[[Any], torch.optim.Optimizer], before: int) -> None:
    parameters, optimizer = build(make)
    for number in range(before):
        whole_step(parameters, optimizer, number)
    unstepped = state(parameters, optimizer)
    steps, given = StepInPortions(optimizer), gradients(before)
    for portion in ([0, 2], [3]):
        steps.step([parameters[place] for place in portion], [given[place] for place in portion])
    assert state(parameters, optimizer) != unstepped
    steps.undo()
    assert state(parameters, optimizer) == unstepped
    assert all(parameter.grad is None for parameter in parameters)
    assert steps.stepped == []
    reference = build(make)
    for number in range(before + 1):
        whole_step(*reference, number)
    whole_step(parameters, optimizer, before)
    assert state(parameters, optimizer) == state(*reference)


def test_who_could_see_a_step_in_portions_gets_it_whole() -> None:
    parameters, scheduled = build(MAKERS["SGD"])
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert is_separable(scheduled, BLOCK), "a scheduler only counts"
    hooked = torch.optim.SGD(parameters, 0.1)
    handle = hooked.register_step_post_hook(lambda *_: None)
    assert not is_separable(hooked, BLOCK)
    handle.remove()
    assert is_separable(hooked, BLOCK)
    replaced = torch.optim.SGD(parameters, 0.1)
    replaced.step = lambda closure=None: None  # type: ignore[method-assign]
    assert not is_separable(replaced, BLOCK)
    assert not is_separable(torch.optim.LBFGS(parameters), BLOCK)

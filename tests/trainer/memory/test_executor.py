"""Whatever a plan does with activations, gradients, parameters and buffers are those of the run without one."""

from __future__ import annotations

import copy
import gc
import itertools
import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from activation_models import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from virtualflow.errors import ConfigurationError
from virtualflow.memory import Action, BlockPlan, Point
from virtualflow.memory.activations.blocks import find_blocks
from virtualflow.memory.activations.executor import Executor

CPU = torch.device("cpu")


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [(torch.randn(4, 3, 8, 8, generator=draw), torch.randint(0, 3, (4,), generator=draw)) for _ in range(2)]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def train(model: nn.Module, executor: Executor | None, *, passes: int = 1, autocast: bool = False) -> list[Tensor]:
    """Two steps; all gradients and the whole state, and what each random stream would give next."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: list[Tensor] = []
    for number, (x, y) in enumerate(batches()):
        seed(number)
        if executor is not None:
            executor.begin()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss: Any = sum(F.cross_entropy(model(x + again).float(), y) for again in range(passes))
        loss.backward()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        found += [torch.rand(1), torch.tensor(random.random()), torch.tensor(np.random.rand())]
    return [*found, *(value.clone() for value in model.state_dict().values())]


def assert_same_bits(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(tensor.isfinite().all() for tensor in theirs)
    for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(left, right), f"tensor {index} differs"


def build(name: str) -> nn.Module:
    seed(7)
    return FAMILIES[name].build().train()


def plans_for(actions: Sequence[str]) -> list[BlockPlan]:
    """``k``eep, ``s``wap, ``r``ecompute, re``f``etch what a segment begins with, and ``j``oin the segment before."""
    plans: list[BlockPlan] = []
    for block, action in enumerate(actions):
        if action in "rfj":
            before = plans[-1].segment if plans and action == "j" else None
            prefetch = Point("recompute", block) if action == "f" else None
            plans.append(BlockPlan(Action.RECOMPUTE, block if before is None else before, prefetch))
        elif action == "s":
            plans.append(BlockPlan(Action.SWAP, prefetch=Point("backward", min(block + 1, len(actions) - 1))))
        else:
            plans.append(BlockPlan(Action.KEEP))
    return plans


def under(model: nn.Module, name: str, actions: Sequence[str], **options: Any) -> tuple[list[Tensor], Executor]:
    blocks, _ = find_blocks(model, FAMILIES[name].blocks)
    executor = Executor(model, blocks, CPU)
    executor.follow(plans_for([actions[index % len(actions)] for index in range(len(blocks))]))
    try:
        return train(model, executor, **options), executor
    finally:
        executor.close()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("actions", ["k", "s", "r", "rjj", "srkj", "rjjjj", "f", "sfjkf"])
def test_any_plan_gives_the_bits_of_the_run_without_one(name: str, actions: str) -> None:
    found, executor = under(build(name), name, actions)
    assert_same_bits(found, train(build(name), None))
    assert executor.ledger.device_bytes == 0, "something was not given back"
    assert executor.ledger.copies.ring.used == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@given(st.lists(st.sampled_from("ksrjf"), min_size=5, max_size=5), st.integers(1, 2), st.booleans())
@settings(max_examples=5, deadline=None)
def test_random_plans_give_the_bits_too(name: str, actions: list[str], passes: int, autocast: bool) -> None:
    found, executor = under(build(name), name, actions, passes=passes, autocast=autocast)
    assert_same_bits(found, train(build(name), None, passes=passes, autocast=autocast))
    assert executor.ledger.device_bytes == executor.ledger.copies.ring.used == 0


@pytest.mark.parametrize(
    ("actions", "left_alone"), [("kkskkk", {0, 3, 4, 5}), ("krkkkk", {0, 2, 3, 4, 5}), ("kkkfkk", {0, 1, 4, 5})]
)
def test_a_kept_block_is_left_to_autograd_unless_it_shares_what_another_copies_out(
    actions: str, left_alone: set[int]
) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in actions))  # saves its output
    executor = Executor(model, [(str(index), block) for index, block in enumerate(model)], CPU)
    executor.follow(plans_for(actions))
    seen: list[set[int]] = []
    for _ in range(3):
        executor.begin()
        model(torch.randn(2, 8)).sum().backward()
        seen.append({index for index in range(len(actions)) if executor._left_alone(index)})
    executor.close()
    assert seen == [set(), left_alone, left_alone]


def test_a_forward_pass_that_fails_does_not_tell_who_shares() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
    executor = Executor(model, [(str(index), block) for index, block in enumerate(model)], CPU)
    executor.follow(plans_for("kkkkks"))
    executor.begin()
    model[:3](torch.randn(2, 8))  # an error in the fourth, say
    executor.begin()
    assert not any(executor._left_alone(index) for index in range(6))
    model(torch.randn(2, 8)).sum().backward()
    executor.begin()
    assert [executor._left_alone(index) for index in range(6)] == [True, True, True, True, False, False]
    executor.close()


@pytest.mark.parametrize("actions", ["k", "s", "r", "rjj", "f"])
def test_a_forward_pass_without_a_backward_pass_leaves_nothing(actions: str) -> None:
    model = build("convolutional")
    blocks, _ = find_blocks(model, None)
    executor = Executor(model, blocks, CPU)
    executor.follow(plans_for([actions[index % len(actions)] for index in range(len(blocks))]))
    executor.begin()
    gc.disable()  # nothing may wait for it
    try:
        model(batches()[0][0])
        executor.begin()
        assert executor.ledger.device_bytes == executor.ledger.copies.ring.used == 0
    finally:
        gc.enable()
        executor.close()


@pytest.mark.parametrize("actions", ["s", "r", "k"])
def test_a_backward_pass_twice_over_one_graph(actions: str) -> None:
    def gradients(actions: str | None) -> list[Tensor]:
        model = build("convolutional")
        executor = Executor(model, find_blocks(model, None)[0], CPU)
        executor.follow(plans_for([actions or "k"] * 5))
        executor.begin()
        if actions is None:
            executor.close()
        seed(1)
        loss = model(batches()[0][0]).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        executor.close()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert_same_bits(gradients(actions), gradients(None))


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).sin()


@pytest.mark.parametrize(("actions", "refused"), [("k", False), ("s", False), ("r", True)])
def test_a_block_that_changes_its_input_cannot_be_recomputed(actions: str, refused: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), InPlace(), nn.Linear(3, 3))
    executor = Executor(model, find_blocks(model, None)[0], CPU)
    executor.follow(plans_for(["k", actions, "k"]))
    executor.begin()
    with pytest.raises(ConfigurationError, match="changes its input in place") if refused else nullcontext():
        model(torch.randn(2, 3)).sum().backward()
    executor.close()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin() if next(self.calls) == 0 else self.linear(x)


def test_a_block_that_does_something_else_the_second_time_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Counting(), nn.Linear(3, 3))
    executor = Executor(model, find_blocks(model, None)[0], CPU)
    executor.follow(plans_for(["k", "r", "k"]))
    executor.begin()
    with pytest.raises(ConfigurationError, match="block 1 does something else when it is computed again"):
        model(torch.randn(2, 3)).sum().backward()
    executor.close()


def test_what_is_changed_in_place_after_it_was_saved_is_an_error_as_in_plain_torch() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
    executor = Executor(model, find_blocks(model, None)[0], CPU)
    executor.follow(plans_for(["k", "k"]))
    executor.begin()
    out = model(torch.randn(2, 3))
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    executor.close()


def test_a_copy_of_the_model_is_somebody_elses() -> None:
    model = build("convolutional")
    executor = Executor(model, find_blocks(model, None)[0], CPU)
    executor.follow(plans_for(["r"] * 5))
    executor.begin()
    twin = copy.deepcopy(model)
    twin(batches()[0][0]).sum().backward()
    assert executor.ledger.peak == 0
    executor.close()


def test_a_forward_pass_without_gradients_is_left_alone() -> None:
    model = build("convolutional")
    executor = Executor(model, find_blocks(model, None)[0], CPU)
    executor.begin()
    with torch.no_grad():
        model(batches()[0][0])
    assert executor.ledger.peak == 0
    executor.close()

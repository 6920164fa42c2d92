"""What a block is computed again from: all that its first forward pass has found, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from test_executor import plans_for
from torch import Tensor, nn

from virtualflow.memory.activations.blocks import find_blocks
from virtualflow.memory.activations.executor import Executor

CPU = torch.device("cpu")
Run = Callable[[nn.Module], object]


def gradients(build: Callable[[], nn.Module], actions: str | None, run: Run) -> list[Tensor]:
    """Of all parameters after ``run``, with blocks under a plan or without."""
    torch.manual_seed(0)
    model = build()
    executor = None if actions is None else Executor(model, find_blocks(model, None)[0], CPU)
    if executor is not None and actions is not None:
        executor.follow(plans_for(actions))
        executor.begin()
    torch.manual_seed(1)
    try:
        run(model)
    finally:
        if executor is not None:
            executor.close()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_nothing_changes(build: Callable[[], nn.Module], plans: Sequence[str], run: Run) -> None:
    plain = gradients(build, None, run)
    assert plain
    for actions in plans:
        found = gradients(build, actions, run)
        assert len(found) == len(plain)
        assert all(map(torch.equal, found, plain)), f"the plan {actions} gives other gradients"


def once(model: nn.Module) -> None:
    model(torch.randn(4, 8)).square().sum().backward()


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x))


# --- which tensor is which --------------------------------------------------------------------------------------------


def frozen() -> nn.Module:
    """Two blocks without a gradient, before two that have one."""
    model = nn.Sequential(Sine(), Sine(), Sine(), Sine())
    model[:2].requires_grad_(False)
    return model


class Masked(nn.Module):
    """Hands on a mask that autograd knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = given
        return torch.sin(self.linear(x * mask)), torch.roll(mask, 1, 0)


class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Masked() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        handed = self.stem(x), (torch.rand(4, 8) > 0.3).float()
        for layer in self.layers:
            handed = layer(handed)
        return handed[0]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(frozen, id="frozen blocks"),
        pytest.param(lambda: nn.Sequential(nn.Dropout(0.2), Sine(), Sine(), Sine()), id="dropout of the samples"),
        pytest.param(Masks, id="a mask that is handed on"),
    ],
)
def test_a_block_may_join_one_that_hands_it_something_without_a_graph(build: Callable[[], nn.Module]) -> None:
    assert_nothing_changes(build, ["rrrr", "rjjj", "rjkk", "krjj", "rjrj", "krjk"], once)

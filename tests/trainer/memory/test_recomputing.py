"""What a block is computed again from: all that its first forward pass has found, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest
import torch
from test_executor import plans_for
from torch import Tensor, nn
from torch._C import _autograd
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook

from tiers import needs_newer
from virtualflow.errors import ConfigurationError
from virtualflow.memory.activations import module_state
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


# --- what a block holds -----------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Draws from a generator of its own, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drawing = torch.Generator().manual_seed(5)
        self.random = np.random.default_rng(5)
        self.calls = 0
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.training:
            x = x + torch.rand(8, generator=self.drawing) * self.random.random()
        self.calls += 1
        self.norms.append(float(x.detach().norm()))
        return torch.sin(x + self.calls + len(self.norms))


def evaluate(model: nn.Module) -> None:
    loss = model(torch.randn(4, 8)).square().sum()
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 8))
    loss.backward()
    for module in model.modules():
        if isinstance(module, Noisy):
            assert (module.calls, len(module.norms)) == (2, 2), "a second forward pass has left a trace"


def twice(model: nn.Module) -> None:
    (model(torch.randn(4, 8)).mean() - model(torch.randn(4, 8)).square().mean()).backward()


def with_other_weights(model: nn.Module) -> None:
    weights = {name: 1.5 * parameter for name, parameter in model.named_parameters()}
    functional_call(model, weights, (torch.randn(4, 8),)).square().sum().backward()


class Shift(nn.Module):
    """Saves nothing but what enters its sine."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        if isinstance(shift, nn.Parameter):
            self.shift = shift
        else:
            self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x + self.shift + self.weight)


class Shifts(nn.Module):
    """Blocks with one shift in common, which the model moves."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shift(shift) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            with torch.no_grad():
                layer.shift.add_(1)
        return x


def zeros() -> Tensor:
    return torch.zeros(8)


def spectral() -> nn.Module:
    """The older one, by hooks that set attributes."""
    linear = [nn.utils.spectral_norm(nn.Linear(8, 8)) for _ in range(2)]
    return nn.Sequential(linear[0], nn.Tanh(), nn.Sequential(linear[1], nn.Sigmoid()), Sine())


@pytest.mark.parametrize(
    ("build", "run"),
    [
        pytest.param(lambda: nn.Sequential(Noisy(), Noisy()), evaluate, id="another mode, a generator, a counter"),
        pytest.param(lambda: nn.Sequential(nn.Dropout(), Sine(), nn.Dropout()), evaluate, id="dropout in another mode"),
        pytest.param(spectral, twice, id="weights that hooks compute"),
        pytest.param(lambda: nn.Sequential(Shift(zeros()), Shift(zeros())), with_other_weights, id="other weights"),
        pytest.param(lambda: Shifts(zeros()), once, id="a buffer that the model moves"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_a_block_finds_itself_as_it_was(build: Callable[[], nn.Module], run: Run) -> None:
    assert_nothing_changes(build, ["rrrr", "rjjj", "krjs"], run)


@pytest.mark.parametrize(
    "shift",
    [pytest.param(torch.zeros(4, 8), id="buffer"), pytest.param(nn.Parameter(torch.zeros(8)), id="parameter")],
)
def test_what_is_not_copied_and_was_changed_is_named(shift: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_state, "SMALL_BUFFER", 64)
    with pytest.raises(ConfigurationError, match=r"shift of block layers.2 was changed since the block's forward pass"):
        gradients(lambda: Shifts(shift), "rrr", once)


def test_a_block_that_stores_its_output_holds_no_graph_of_former_calls() -> None:
    class Storing(Sine):
        out: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.out = super().forward(x)
            return self.out

    model = nn.Sequential(Storing(), Storing())
    executor = Executor(model, find_blocks(model, None)[0], CPU)
    executor.follow(plans_for("rr"))
    seen = []
    for _ in range(4):
        executor.begin()
        model(torch.randn(4, 8))
        seen.append(executor.ledger.device_bytes)
    executor.close()
    assert seen[3] == seen[1] > 0


# --- what cannot be had twice -----------------------------------------------------------------------------------------


class State:
    """No tree that torch knows."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Advancing(Sine):
    def forward(self, state: State) -> State:
        state.x = super().forward(state.x)
        return state


class Advances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Advancing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state = State(x)
        for layer in self.layers:
            state = layer(state)
        return state.x


def with_hooks_on_top(model: nn.Module) -> None:
    """The first hook is called behind those of a plan, and the second one before them."""
    handles = [
        model[1].register_forward_pre_hook(lambda module, given: (given[0] * 3,)),
        model[2].register_forward_hook(lambda module, given, made: made * 3, prepend=True),
    ]
    once(model)
    for handle in handles:
        handle.remove()


def with_a_hook_on_all(model: nn.Module) -> None:
    handle = register_module_forward_hook(lambda module, given, made: made * 3 if isinstance(module, Sine) else None)
    try:
        once(model)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("build", "run", "said"),
    [
        pytest.param(Advances, once, "block layers.0 gets a State, which its forward may change", id="an object"),
        pytest.param(frozen, with_hooks_on_top, "block 1 has a forward pre-hook that was registered", id="hooks"),
        pytest.param(
            frozen, with_a_hook_on_all, "block 0 has a forward hook that is called before", id="a global hook"
        ),
    ],
)
def test_a_block_is_kept_where_a_second_forward_pass_may_find_something_else(
    build: Callable[[], nn.Module], run: Run, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert_nothing_changes(build, ["rrrr", "rjjj", "fjsf"], run)
    assert sum(said in message for message in caplog.messages) == 3  # once a run


class PreActivated(nn.Module):
    """Does not save its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.linear(torch.relu(x)))


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList(PreActivated() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x += layer(x)
        return x


def test_an_input_that_is_changed_behind_a_block_is_named_where_it_is_needed() -> None:
    assert_nothing_changes(AddsInPlace, ["kkk", "sss"], once)
    with pytest.raises(ConfigurationError, match=r"entered block layers.2 was changed in place.* x = x \+ block"):
        gradients(AddsInPlace, "rrr", once)


# --- tensors without a storage of their own ---------------------------------------------------------------------------


class Neighbours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, adjacent: Tensor) -> Tensor:
        return torch.tanh(torch.sparse.mm(adjacent, self.linear(x)))


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Neighbours() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        adjacent = torch.eye(4).to_sparse()
        for layer in self.layers:
            x = layer(x, adjacent)
        return x


class Sequences(nn.Module):
    """Of several lengths, in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nested.nested_tensor([x[:1], x[1:]])
        for layer in self.layers:
            x = layer(x)
        return torch.nested.to_padded_tensor(x, 0.0)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(Graph, id="sparse"),
        pytest.param(Sequences, id="nested"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_blocks_may_get_sparse_and_nested_tensors(build: Callable[[], nn.Module]) -> None:
    assert_nothing_changes(build, ["kkk", "sss", "rrr", "rjj", "fsk"], once)


# --- what happens while a block runs ----------------------------------------------------------------------------------


class Steepest(Sine):
    """Adds its own gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        (slope,) = torch.autograd.grad(y.square().sum(), self.linear.bias, create_graph=True)
        return y + slope.sin()


def steepest() -> nn.Module:
    return nn.Sequential(Steepest(), Steepest())


@pytest.mark.parametrize("actions", ["rr", "rj"])
def test_a_block_that_asks_for_gradients_meanwhile_is_refused_and_may_be_swapped(actions: str) -> None:
    assert_nothing_changes(steepest, ["ss"], once)
    with pytest.raises(ConfigurationError, match="block 0 asks for gradients while its forward pass runs"):
        gradients(steepest, actions, once)


class Interrupted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def saving() -> bool:
    """Whether somebody sees what autograd saves."""
    return _autograd._top_saved_tensors_default_hooks(False) is not None


@needs_newer(_autograd, "_top_saved_tensors_default_hooks")
@pytest.mark.parametrize("actions", ["sss", "rrr"])
@pytest.mark.parametrize("what", ["begin", "close"])
def test_an_interrupt_in_a_block_leaves_no_hooks_behind(actions: str, what: str) -> None:
    """As torch calls no hooks of modules then."""
    model = nn.Sequential(Sine(), Interrupted(), Sine())
    executor = Executor(model, find_blocks(model, None)[0], CPU)
    executor.follow(plans_for(actions))
    executor.begin()
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, 8))
    assert saving()
    getattr(executor, what)()
    assert not saving()
    executor.close()
    assert not saving()
    assert executor.ledger.device_bytes == executor.ledger.copies.ring.used == 0

"""Backward passes that end early, in scripts: what goes together, what is refused, and what models may do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_jobs import trained
from habit_scripts import mlp, sgd, squares, start
from test_backward_cut import WIDTH, Net, batch, build, cut_for, within
from test_shares_at_any_break import Worker, enter
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import virtualflow as vf
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.step import BackwardCut

PARTIAL = vf.PartialBackward((1, 0.5))


def train(steps: int = 5, **more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7), nn.Dropout(0.1), nn.Linear(7, 3))
    optimizer, scaler = sgd(model), more.get("scaler")
    with start(model, optimizer, steps=steps, **more) as run:
        for step in run:
            for x, y in step:
                loss = squares(model(x), y)
                (scaler.scale(loss) if scaler else loss).backward()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    return trained(run, model, optimizer)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"shard_optimizer": True}, id="sharded"),
        pytest.param({"scaler": torch.amp.GradScaler("cpu")}, id="scaled"),
        pytest.param({"memory": vf.Memory("1GiB", activations="recompute")}, id="recomputed"),
        pytest.param({"memory": vf.Memory("1GiB", activations="swap")}, id="swapped"),
    ],
)
def test_what_changes_no_bits_changes_none_here(options: dict[str, Any]) -> None:
    assert train(backward=PARTIAL, **options) == train(backward=PARTIAL)


def test_it_is_another_training_and_that_of_a_plain_one_where_all_passes_are_whole() -> None:
    assert train(backward=PARTIAL) != train()
    assert train(backward=vf.PartialBackward((1,))) == train()
    assert train(backward=vf.PartialBackward((1, 0.5), scale="sum")) != train(backward=PARTIAL)


def test_a_statistical_job_runs_virtual_nodes_one_by_one_and_trains_the_same() -> None:
    def weights(**more: Any) -> tuple[Tensor, int]:
        model, sizes = mlp(), []
        with start(model, sgd(model), steps=3, backward=PARTIAL, **more) as run:
            for step in run:
                for x, y in step:
                    sizes.append(len(x))
                    squares(model(x), y).backward()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), len(sizes)

    wanted, found = weights(), weights(reproducibility="statistical", max_fused=2)
    assert found[1] == wanted[1] == 18
    torch.testing.assert_close(found[0], wanted[0])


def test_an_identity_that_a_checkpoint_and_all_members_share(tmp_path: Path) -> None:
    train(2, backward=PARTIAL, checkpoint=tmp_path)
    with pytest.raises(VirtualFlowError, match=r"backward passes are whole here and rotating fractions 1.0, 0.5, mean"):
        train(4, checkpoint=tmp_path)
    with pytest.raises(VirtualFlowError, match=r"rotating fractions 1.0, 0.25, mean, of 0, 2, 4 here and rotating"):
        train(4, checkpoint=tmp_path, backward=vf.PartialBackward((1, 0.25)))
    resumed = train(4, checkpoint=tmp_path, backward=PARTIAL)
    assert resumed == train(4, backward=PARTIAL)
    workers = [Worker("AdamW", None, copies=0, signature=each) for each in ({"backward": "half"}, {})]
    workers[0].state.has_state = True
    with pytest.raises(ConfigurationError, match="backward passes are half here and whole there"):
        enter(workers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (lambda: nn.Linear(6, 3), {}, r"name its blocks: vf.PartialBackward\(blocks="),
        (
            lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh()),
            {},
            "needs two blocks or more that have param",
        ),
        (mlp, {"backward": vf.PartialBackward(blocks=["7"])}, "the model has no module named '7'"),
        (mlp, {"backward": 0.5}, r"backward is 0.5; it must be a vf.PartialBackward"),
        (mlp, {"memory": vf.Memory("1GiB", order="layer-major")}, "in layer-major order each block runs backward"),
        (mlp, {"backward": vf.PartialBackward((0.5, 1), rotate=False), "virtual_nodes": 1}, "none of the 1 virtual"),
        (lambda: torch.compile(mlp()), {}, "a compiled model has no blocks .* train the model as it is"),
    ],
    ids=["no blocks", "one block", "a wrong name", "a number", "layer-major", "no whole pass", "compiled"],
)
def test_what_cannot_be_is_refused_before_training(
    make: Callable[[], nn.Module], options: dict[str, Any], sentence: str
) -> None:
    model = make()
    with (
        pytest.raises(ConfigurationError, match=sentence),
        start(model, sgd(model), **{"backward": PARTIAL, **options}) as run,
    ):
        next(iter(run))


# --- what models do ---------------------------------------------------------------------------------------------------


@pytest.fixture
def net() -> tuple[Net, BackwardCut]:
    model = build()
    return model, cut_for(model, vf.PartialBackward((1, 0.5)))


def reached(model: nn.Module) -> set[str]:
    return {name.partition(".")[0] for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_autograd_is_as_it_was_after_an_error_in_a_block_that_is_not_reached(net: tuple[Net, BackwardCut]) -> None:
    model, cut = net
    with within(cut, 1, 2), pytest.raises(RuntimeError):
        model(torch.randn(2, WIDTH + 1))
    assert torch.is_grad_enabled()
    with within(cut, 1, 2):
        model(batch(1, 0, 2)).sum().backward()
    assert reached(model) == {"first", "between", "last", "head"}


def test_a_model_that_is_called_twice_is_cut_twice_and_without_gradients_stays_so(
    net: tuple[Net, BackwardCut],
) -> None:
    model, cut = net
    with within(cut, 1, 2):
        with torch.no_grad():
            assert not model(batch(1, 0, 2)).requires_grad
        (model(batch(1, 0, 2)) - model(batch(1, 1, 2))).square().sum().backward()
    assert model.stem.weight.grad is None
    assert model.first[1][0].weight.grad is None  # type: ignore[index]
    assert model.first[2][0].weight.grad is not None  # type: ignore[index]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_parts_of_a_model_may_be_called_again_and_computed_once_more(checkpointed: bool) -> None:
    """What needs no gradient comes behind nothing that is reached."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    cut = BackwardCut(model, list(model.named_children()), vf.PartialBackward((1, 0.5)), 4)

    def call(x: Tensor) -> Tensor:
        y, rest = model[0](x), model[1:]
        return checkpoint(rest, y, use_reentrant=False) if checkpointed else rest(y)  # type: ignore[return-value]

    x = batch(1, 0, 2)
    with within(cut, 1, 2):
        (call(x) - call(x + 1)).square().sum().backward()
    ours = [parameter.grad for parameter in model.parameters()]
    cut.close()
    model.zero_grad()
    ends = [model[2:](model[:2](each).detach()) for each in (x, x + 1)]
    (ends[0] - ends[1]).square().sum().backward()
    for one, other in zip(ours, (parameter.grad for parameter in model.parameters()), strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)
    assert ours[0] is None


def test_autograd_is_as_it_was_after_an_interruption(net: tuple[Net, BackwardCut]) -> None:
    model, cut = net

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model.stem.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), within(cut, 1, 2):
        model(batch(1, 0, 2))
    assert torch.is_grad_enabled()


def test_a_copy_of_the_model_is_somebody_elses(net: tuple[Net, BackwardCut]) -> None:
    model, cut = net
    other = copy.deepcopy(model)
    with within(cut, 1, 2):
        other(batch(1, 0, 2)).sum().backward()
    assert reached(other) == {"stem", "first", "between", "last", "head"}
    assert reached(model) == set()


def test_evaluations_between_virtual_nodes_are_whole(net: tuple[Net, BackwardCut]) -> None:
    model, cut = net
    with within(cut, 1, 2):
        pass
    model(batch(1, 0, 2)).sum().backward()
    assert reached(model) == {"stem", "first", "between", "last", "head"}


def test_a_weight_that_was_cast_for_a_module_that_is_not_reached_is_cast_again() -> None:
    """Autocast remembers casts, and one that was made without a graph would end the backward pass of the head."""
    model = build(tied=True)
    cut = cut_for(model, vf.PartialBackward((1, 0.5)))
    with within(cut, 1, 2), torch.autocast("cpu", torch.bfloat16):
        model(batch(1, 0, 4)).square().mean().backward()
    assert model.head.weight.grad is not None


class Scaled(Net):
    """A parameter of the model itself is used behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class StemLast(Net):
    """What runs first is registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = self.__dict__["_modules"].pop("stem")


class HeadFirst(nn.Module):
    """What runs last is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "names", "sentence"),
    [
        (
            Scaled,
            None,
            "parameter scale got a gradient from a backward pass that should have ended behind it",
        ),
        (HeadFirst, None, "module head runs behind blocks.1, which is registered behind it"),
        (StemLast, None, "module first.0 runs behind stem, which is registered behind it"),
        (Net, ["first.1", "first.0"], "module first.1 runs behind first.0, which is .* named as a later block"),
    ],
    ids=["a parameter used behind", "a head that is first", "a stem that is last", "blocks in the wrong order"],
)
def test_a_model_in_another_order_than_it_says_is_refused(
    make: Callable[[], nn.Module], names: list[str] | None, sentence: str
) -> None:
    model = make()

    def script() -> None:
        backward = vf.PartialBackward((1, 0.5), blocks=names)
        with start(model, sgd(model), backward=backward) as run:
            for step in run:
                for x, y in step:
                    squares(model(x), y).backward()

    with pytest.raises(ConfigurationError, match=sentence):
        script()
    assert torch.is_grad_enabled()

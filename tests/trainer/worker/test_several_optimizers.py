"""A list of optimizers, each with a scheduler, is stepped as plain PyTorch would step them, and travels as one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_jobs import ElasticJob, Trained, alone, trained
from habit_scripts import STEPS, loop, mlp, squares, start
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, StepLR

import virtualflow as vf
from tiers import needs_newer
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.state import digests
from virtualflow.verify import read_trace


def sgd_and_adamw(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9),
        torch.optim.AdamW(model[2].parameters(), 0.02),
    ]


def two_of_each(**options: Any) -> Trained:
    model = mlp()
    optimizers = sgd_and_adamw(model)
    schedulers = [StepLR(optimizers[0], 2, 0.5), CosineAnnealingLR(optimizers[1], STEPS)]
    with start(model, optimizers, **{"scheduler": schedulers, **options}) as run:
        loop(run, model)
    return trained(run, model, optimizers, more=[optimizer.param_groups[0]["lr"] for optimizer in optimizers])


def two_of_each_sharded_and_clipped() -> Trained:
    return two_of_each(shard_optimizer=True, clip_grad_norm=0.05)


def decay(factor: float) -> Callable[[int], float]:
    return lambda step: factor**step


def weights_of(several: bool, **options: Any) -> str:
    """The weights after a training by two optimizers, or by one that has the same parameters in groups."""
    model = mlp()
    groups: list[Any] = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.02}]
    scheduler: Any
    optimizer: Any
    if several:
        optimizer = [torch.optim.SGD([group], momentum=0.9) for group in groups]
        scheduler = tuple(LambdaLR(one, decay(factor)) for one, factor in zip(optimizer, (0.9, 0.7), strict=True))
    else:
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        scheduler = LambdaLR(optimizer, [decay(0.9), decay(0.7)])
    scaler = options.get("scaler")
    with start(model, optimizer, scheduler=scheduler, **options) as run:
        loop(run, model, loss=lambda x, y: scaled(squares(model(x), y), scaler))
    return digests.digest(model.state_dict())


def scaled(loss: torch.Tensor, scaler: Any) -> torch.Tensor:
    return loss if scaler is None else scaler.scale(loss)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict, id="plain"),
        pytest.param(lambda: {"clip_grad_norm": 0.05}, id="clipped by the norm of all"),
        pytest.param(lambda: {"scaler": torch.amp.GradScaler("cpu"), "clip_grad_value": 0.01}, id="scaled"),
        pytest.param(lambda: {"shard_optimizer": True}, id="sharded"),
    ],
)
def test_a_list_computes_what_one_optimizer_with_groups_does(options: Callable[[], dict[str, Any]]) -> None:
    assert weights_of(True, **options()) == weights_of(False, **options())


def test_an_overflow_skips_the_optimizers_that_it_concerns() -> None:
    model = nn.ParameterList([torch.ones(2), torch.ones(2)])
    optimizers = [torch.optim.SGD([parameter], 0.5) for parameter in model]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    with start(model, optimizers, scaler=scaler, steps=1) as run:
        loop(run, model, loss=lambda x, y: scaler.scale(model[0].sum() * 1e30 + model[1].sum()))
    assert [parameter.tolist() for parameter in model] == [[1.0, 1.0], [0.5, 0.5]]
    assert scaler.get_scale() == 2.0**59


def test_a_sharded_list_gives_the_same_bits_on_any_workers(start_job: Callable[..., ElasticJob]) -> None:
    reference = alone(two_of_each_sharded_and_clipped)
    job = start_job(two_of_each_sharded_and_clipped, workers=2, hold=2)
    job.reach(2)
    job.join()
    told = job.results()
    assert [result.digest for result in told] == [reference.digest] * 2, "worker-1 is killed in step 6"
    assert reference.optimizer in [result.optimizer for result in told], "the leader has the whole state"


def test_a_checkpoint_has_all_of_them(tmp_path: Path) -> None:
    policy = vf.CheckpointPolicy(tmp_path, every_steps=1)
    two_of_each(checkpoint=policy, steps=3)
    assert two_of_each(checkpoint=policy) == two_of_each()


def test_a_list_of_one_is_that_one(tmp_path: Path) -> None:
    def train(listed: bool, **options: Any) -> Trained:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scheduler = StepLR(optimizer, 2, 0.5)
        given: Any = ([optimizer], [scheduler]) if listed else (optimizer, scheduler)
        with start(model, given[0], scheduler=given[1], **options) as run:
            loop(run, model)
        return trained(run, model, optimizer)

    policy = vf.CheckpointPolicy(tmp_path, every_steps=1)
    train(False, checkpoint=policy, steps=3)
    assert train(True, checkpoint=policy) == train(False)


def with_one_optimizer(policy: vf.CheckpointPolicy) -> None:
    model = mlp()
    with start(model, torch.optim.SGD(model.parameters(), 0.1), checkpoint=policy) as run:
        loop(run, model)


def with_one_scheduler(policy: vf.CheckpointPolicy) -> None:
    model = mlp()
    optimizers = sgd_and_adamw(model)
    with start(model, optimizers, checkpoint=policy, scheduler=StepLR(optimizers[0], 2)) as run:
        loop(run, model)


def with_groups_in_another_place(policy: vf.CheckpointPolicy) -> None:
    model = mlp()
    parts: list[Any] = [{"params": [parameter]} for parameter in model.parameters()]
    with start(model, [torch.optim.SGD(parts[:3], 0.1), torch.optim.SGD(parts[3:], 0.1)], checkpoint=policy) as run:
        loop(run, model)


def with_groups_in_one_place(policy: vf.CheckpointPolicy) -> None:
    model = mlp()
    parts: list[Any] = [{"params": [parameter]} for parameter in model.parameters()]
    with start(model, [torch.optim.SGD(parts[:2], 0.1), torch.optim.SGD(parts[2:], 0.1)], checkpoint=policy) as run:
        loop(run, model)


@pytest.mark.parametrize(
    ("first", "then", "sentence"),
    [
        (
            lambda policy: two_of_each(checkpoint=policy),
            with_one_optimizer,
            r"another job: the optimizer is SGD here and SGD \+ AdamW there",
        ),
        (
            with_one_optimizer,
            lambda policy: two_of_each(checkpoint=policy),
            r"another job: the optimizer is SGD \+ AdamW here and SGD there",
        ),
        (
            lambda policy: two_of_each(checkpoint=policy),
            with_one_scheduler,
            "this process has 1 scheduler and the state is of 2; give vf.elastic the same list everywhere",
        ),
        (
            with_groups_in_one_place,
            with_groups_in_another_place,
            "this process has 2 optimizers of 3 and 1 parameter groups, and the state is of 2 optimizers of 2 and 2",
        ),
    ],
    ids=["a list, then one", "one, then a list", "two schedulers, then one", "other divisions of the groups"],
)
def test_a_checkpoint_of_others_is_refused(tmp_path: Path, first: Any, then: Any, sentence: str) -> None:
    policy = vf.CheckpointPolicy(tmp_path, every_steps=3)
    first(policy)
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        then(policy)
    assert "\n" not in str(caught.value)


def a_parameter_of_two() -> None:
    model = mlp()
    two_with(model, [torch.optim.SGD(model.parameters(), 0.1), torch.optim.AdamW(model[2].parameters())])


def an_empty_list() -> None:
    two_with(mlp(), [])


def a_list_of_something_else() -> None:
    model = mlp()
    two_with(model, [torch.optim.SGD(model.parameters(), 0.1), model])


def a_closure_in_the_list() -> None:
    model = mlp()
    two_with(model, [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.LBFGS(model[2].parameters())])


def a_plateau_in_the_list() -> None:
    model = mlp()
    optimizers = sgd_and_adamw(model)
    two_with(model, optimizers, scheduler=[StepLR(optimizers[0], 2), ReduceLROnPlateau(optimizers[1])])


def one_that_cannot_be_sharded() -> None:
    model = mlp()
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adafactor(model[2].parameters())]
    two_with(model, optimizers, shard_optimizer=True)


def one_stepped_by_the_script() -> None:
    model = mlp()
    optimizers = sgd_and_adamw(model)
    two_with(model, optimizers, after=lambda step: optimizers[1].step())


def a_third_stepped_by_the_script() -> None:
    model = mlp(nn.Linear(7, 7))
    other = torch.optim.Adam(model[1].parameters())
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.AdamW(model[3].parameters())]
    two_with(model, optimizers, after=lambda step: other.step())


def a_scheduler_that_is_not_passed() -> None:
    model = mlp()
    optimizers = sgd_and_adamw(model)
    schedulers = [StepLR(optimizer, 2) for optimizer in optimizers]
    two_with(model, optimizers, scheduler=schedulers[:1], after=lambda step: schedulers[1].step())


def two_with(model: nn.Module, optimizers: Any, after: Any = None, **options: Any) -> None:
    with start(model, optimizers, **options) as run:
        loop(run, model, after=after)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (a_parameter_of_two, r"parameter 2.weight belongs to two optimizers \(SGD and AdamW\).*; give each parameter"),
        (an_empty_list, "the list of optimizers is empty; give vf.elastic at least one"),
        (a_list_of_something_else, "the list of optimizers holds a Sequential; give vf.elastic"),
        (a_closure_in_the_list, "LBFGS evaluates the loss several times .* use an optimizer"),
        (a_plateau_in_the_list, 'pass scheduler_interval="manual"'),
        pytest.param(
            one_that_cannot_be_sharded,
            "Adafactor cannot be sharded.*or leave out shard_optimizer",
            marks=needs_newer(torch.optim, "Adafactor"),
        ),
        (one_stepped_by_the_script, r"has called AdamW.step\(\).*; remove the call"),
        (a_third_stepped_by_the_script, r"an optimizer \(Adam\) that the library does not know.*in a list with the"),
        (a_scheduler_that_is_not_passed, "made for the optimizer AdamW, and a worker that joins.*as scheduler="),
    ],
    ids=lambda value: value.__name__.replace("_", " ") if callable(value) else "",
)
def test_it_is_refused(script: Callable[[], None], sentence: str) -> None:
    with pytest.raises(VirtualFlowError, match=sentence) as caught:
        alone(script)
    assert caught.type is ConfigurationError
    assert "\n" not in str(caught.value)


class Traced(torch.optim.SGD):
    """Unlike any that other tests have left."""


def test_a_trace_has_all_of_them_and_none_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUALFLOW_TRACE_DIR", str(tmp_path))
    model = mlp()
    two_with(model, [Traced(layer.parameters(), 0.1, momentum=0.9) for layer in (model[0], model[2])])
    names = {name for by_worker in read_trace(tmp_path).before[3].values() for name in by_worker}
    assert {"optimizer's lr in group 0", "optimizer's lr in group 1"} <= names
    assert {f"optimizer's momentum_buffer of {name}" for name, _ in model.named_parameters()} <= names
    assert not {name for name in names if "Traced" in name}

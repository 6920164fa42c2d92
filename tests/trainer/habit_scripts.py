"""What people write around a training loop: one small script for each habit, which is named after it."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from elastic_jobs import Trained, die_here, trained
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.errors import CommunicatorBroken
from virtualflow.protocol.settings import ENV_WORKER
from virtualflow.state import digests
from virtualflow.step import Update

STEPS = 8


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(44, 6, generator=draw), torch.randn(44, generator=draw))


def mlp(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), *more, nn.Tanh(), nn.Linear(7, 3))


def squares(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out.flatten(1).mean(1), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def start(model: nn.Module, optimizer: Any, **options: Any) -> Any:
    return vf.elastic(
        model, optimizer, data(), **{"batch_size": 24, "steps": STEPS, "virtual_nodes": 6, "seed": 3, **options}
    )


def loop(run: Any, model: nn.Module, inside: Any = None, after: Any = None, loss: Any = None) -> None:
    for step in run:
        for x, y in step:
            (loss(x, y) if loss else squares(model(x), y)).backward()
            if inside:
                inside(step)
            if step.number == 6:
                die_here("worker-1")
        if after:
            after(step)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (1 + 0.01 * self.calls)


def a_python_counter_in_forward() -> Trained:
    torch.manual_seed(0)
    model = Counting()
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        loop(run, model)
    return trained(run, model, optimizer)


def a_learning_rate_set_from_each_loss() -> Trained:
    model = mlp()
    optimizer = sgd(model)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found = squares(model(x), y)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + found.item())
        return found

    with start(model, optimizer) as run:
        loop(run, model, loss=loss)
    return trained(run, model, optimizer)


def a_learning_rate_set_by_the_step_number() -> Trained:
    model = mlp()
    optimizer = sgd(model)

    def warm_up(step: vf.Step) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * step.number / STEPS

    with start(model, optimizer) as run:
        loop(run, model, inside=warm_up)
    return trained(run, model, optimizer)


def a_scaler_stepped_by_the_script() -> Trained:
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")

    def update(step: vf.Step) -> None:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    with start(model, optimizer) as run:
        loop(run, model, loss=lambda x, y: scaler.scale(squares(model(x), y)), after=update)
    return trained(run, model, optimizer)


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.3, 0.3)


def clamp_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.3, 0.3)


def weights_clamped_in_the_inner_loop() -> Trained:
    model = mlp()
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        loop(run, model, inside=lambda step: clamp(model))
    return trained(run, model, optimizer)


def weights_clamped_through_data_in_the_inner_loop() -> Trained:
    model = mlp()
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        loop(run, model, inside=lambda step: clamp_data(model))
    return trained(run, model, optimizer)


def weights_clamped_after_the_step() -> Trained:
    model = mlp()
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        loop(run, model, after=lambda step: clamp_data(model))
    return trained(run, model, optimizer)


def weights_that_decay_after_the_step(**options: Any) -> Trained:
    model = mlp()
    optimizer = sgd(model)

    def decay(step: Any) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9).add_(0.01 * torch.randn(p.shape))

    with start(model, optimizer, **options) as run:
        loop(run, model, after=decay)
    return trained(run, model, optimizer)


class Running(nn.Module):
    """A loss that is divided by its running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        loss = squares(out, y)
        self.mean.lerp_(loss.detach(), 0.1)
        return loss / self.mean


def a_criterion_with_running_state() -> Trained:
    model, criterion = mlp(), Running()
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        loop(run, model, loss=lambda x, y: criterion(model(x), y))
    return trained(run, model, optimizer)


def a_criterion_within_the_model(**options: Any) -> Trained:
    model = nn.ModuleList([mlp(), Running()])
    optimizer = sgd(model)
    with start(model, optimizer, **options) as run:
        loop(run, model, loss=lambda x, y: model[1](model[0](x), y))
    return trained(run, model, optimizer)


def a_generator_of_its_own() -> Trained:
    model, draw = mlp(), torch.Generator().manual_seed(7)
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        loop(run, model, loss=lambda x, y: squares(model(x + 0.1 * torch.randn(x.shape, generator=draw)), y))
    return trained(run, model, optimizer)


def ema_of(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def an_average_of_weights() -> Trained:
    model = mlp()
    optimizer, ema = sgd(model), ema_of(model)
    with start(model, optimizer) as run:
        loop(run, model, after=lambda step: ema.update_parameters(model))
    return trained(run, model, optimizer, digests.digest(ema.state_dict()))


def an_average_of_weights_that_travels(**options: Any) -> Trained:
    model = mlp()
    optimizer, ema = sgd(model), ema_of(model)

    def after(step: Any) -> None:
        clamp(model)
        ema.update_parameters(model)

    with start(model, optimizer, **{"state": {"ema": ema}, **options}) as run:
        loop(run, model, after=after)
    return trained(run, model, optimizer, digests.digest(ema.state_dict()))


def the_optimizer_stepped_in_the_inner_loop() -> Trained:
    model = mlp()
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        loop(run, model, inside=lambda step: optimizer.step())
    return trained(run, model, optimizer)


def the_optimizer_stepped_after_the_step() -> Trained:
    model = mlp()
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        loop(run, model, after=lambda step: optimizer.step())
    return trained(run, model, optimizer)


def gradients_zeroed_before_backward() -> Trained:
    model = mlp()
    optimizer = sgd(model)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        return squares(model(x), y)

    with start(model, optimizer) as run:
        loop(run, model, loss=loss)
    return trained(run, model, optimizer)


def gradients_zeroed_after_backward() -> Trained:
    model = mlp()
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        loop(run, model, inside=lambda step: optimizer.zero_grad())
    return trained(run, model, optimizer)


def gradients_filled_with_zeros_after_backward() -> Trained:
    model = mlp()
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        loop(run, model, inside=lambda step: optimizer.zero_grad(set_to_none=False))
    return trained(run, model, optimizer)


def a_scheduler_stepped_by_the_script() -> Trained:
    model = mlp()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    with start(model, optimizer) as run:
        loop(run, model, after=lambda step: scheduler.step())
    return trained(run, model, optimizer)


def a_second_optimizer_stepped_by_the_script() -> Trained:
    model = mlp()
    optimizer, second = sgd(model[0]), torch.optim.Adam(model[2].parameters(), 0.01)
    with start(model, optimizer) as run:
        loop(run, model, after=lambda step: second.step())
    return trained(run, model, optimizer)


def a_parameter_group_added_later() -> Trained:
    model = mlp()
    optimizer = sgd(model[2])

    def after(step: Any) -> None:
        if step.number == 1:
            optimizer.add_param_group({"params": list(model[0].parameters())})

    with start(model, optimizer) as run:
        loop(run, model, after=after)
    return trained(run, model, optimizer)


def a_mean_that_begins_with_the_first_value(virtual_nodes: int = 6) -> Trained:
    """The same value twice in a row leaves it as it is."""
    model = mlp()
    optimizer = sgd(model)
    means: list[Tensor] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        means.append((means[-1] + x.mean(0)) / 2 if means else x.mean(0))
        return squares(model(x - means[-1]), y)

    with start(model, optimizer, virtual_nodes=virtual_nodes) as run:
        loop(run, model, loss=loss)
    return trained(run, model, optimizer)


def a_hidden_state_carried_on() -> Trained:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.RNNCell(6, 5), nn.Linear(5, 3)])
    optimizer = sgd(model)
    hidden = [torch.zeros(4, 5)]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        new = model[0](x, hidden[0][: len(x)])
        hidden[0] = F.pad(new.detach(), (0, 0, 0, 4 - len(x)))
        return squares(model[1](new), y)

    with start(model, optimizer) as run:
        loop(run, model, loss=loss)
    return trained(run, model, optimizer)


def synchronized_batch_norm() -> Trained:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(mlp(nn.BatchNorm1d(7)))
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        loop(run, model)
    return trained(run, model, optimizer)


def a_lazy_module() -> Trained:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        loop(run, model)
    return trained(run, model, optimizer)


def a_loop_left_by_enumerate() -> Trained:
    model = mlp()
    optimizer = sgd(model)
    with start(model, optimizer, steps=100) as run:
        for count, step in enumerate(run, 1):
            for x, y in step:
                squares(model(x), y).backward()
                if step.number == 6:
                    die_here("worker-1")
            if count == STEPS:
                break
    return trained(run, model, optimizer)


class Checkpointed(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.inner, self.recomputes = mlp(nn.BatchNorm1d(7)), recomputes

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x)


def activation_checkpointing_with_batch_norm(recomputes: bool = True) -> Trained:
    model = Checkpointed(recomputes)
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        loop(run, model)
    return trained(run, model, optimizer)


def one_behind(script: str) -> Any:
    """``worker-0`` is told that the exchange of step 4 broke when it was complete for the others."""
    if os.environ.get(ENV_WORKER) == "worker-0":
        synchronize = Update.synchronize
        told: list[int] = []

        def breaking(self: Update, communicator: Any, ranges: Any, number: int, *rest: Any, **more: Any) -> Any:
            reduced = synchronize(self, communicator, ranges, number, *rest, **more)
            if number == 4 and not told:
                told.append(number)
                raise CommunicatorBroken("injected by the test")
            return reduced

        Update.synchronize = breaking  # type: ignore[method-assign]
    return globals()[script]()


def code_before_the_micro_batches_that_changes_the_model() -> Trained:
    model = mlp()
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        for step in run:
            clamp(model)
            for x, y in step:
                squares(model(x), y).backward()
    return trained(run, model, optimizer)


def an_embedding_with_a_largest_norm() -> Trained:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 3, max_norm=0.5))
    optimizer = sgd(model)
    with start(model, optimizer) as run:
        loop(run, model, loss=lambda x, y: squares(model((x[:, 0] > 0).long()), y))
    return trained(run, model, optimizer)


def weights_put_back_to_the_bit() -> Trained:
    """As sharpness-aware training does: the gradient at a place near by."""
    model = mlp()
    optimizer = sgd(model)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        before = [p.detach().clone() for p in model.parameters()]
        squares(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=0.05)  # type: ignore[arg-type]
        optimizer.zero_grad()
        squares(model(x), y).backward()
        with torch.no_grad():
            for p, value in zip(model.parameters(), before, strict=True):
                p.copy_(value)
        return torch.zeros((), requires_grad=True)

    with start(model, optimizer) as run:
        loop(run, model, loss=loss)
    return trained(run, model, optimizer)


def weights_changed_after_the_step_of_a_sharded_optimizer() -> Trained:
    model = mlp()
    optimizer = sgd(model)
    with start(model, optimizer, shard_optimizer=True) as run:
        loop(run, model, after=lambda step: clamp(model))
    return trained(run, model, optimizer)

"""Whatever a training is made of, it gives the same bits alone, on several workers, and through changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import BEGUN_EARLY, EXCHANGE, ElasticJob, Trained, alone, die_here, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly, slow

STEPS = 8
SAMPLES = 44


def nothing(*anything: Any) -> None:
    pass


@dataclass
class Case:
    """One training; ``loss`` gets the model and a micro-batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    inside: Callable[[Any, nn.Module], Any] = nothing
    """After each ``backward``."""
    before: Callable[[Any, nn.Module], Any] = nothing
    after: Callable[[Any, nn.Module], Any] = nothing


CHANGES_GRADIENTS = {"gradients_clipped_in_each_virtual_node", "a_second_backward_in_each_virtual_node"}
"""Those whose code changes gradients after ``backward``, so that none of them may set out before."""

CASES: dict[str, Callable[[], Case]] = {}
TIERS: dict[str, Callable[[str], Any]] = {}
"""Of those that are not tried every time: others have their essence, or are met more often."""


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    CASES[build.__name__] = build
    return build


def nightly_case(build: Callable[[], Case]) -> Callable[[], Case]:
    TIERS[build.__name__] = nightly
    return case(build)


def slow_case(build: Callable[[], Case]) -> Callable[[], Case]:
    TIERS[build.__name__] = slow
    return case(build)


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).flatten(1).mean(1), y)


def data(dtype: torch.dtype = torch.float32) -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=draw, dtype=dtype)
    return TensorDataset(x, torch.randn(SAMPLES, generator=draw, dtype=dtype))


def mlp(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 7), *more, nn.Tanh(), nn.Linear(7, 3))


@nightly_case
def clipping_by_norm() -> Case:
    model = mlp()
    return Case(model, torch.optim.AdamW(model.parameters(), 0.05), squares, {"clip_grad_norm": 0.05})


@nightly_case
def clipping_by_value() -> Case:
    model = mlp()
    return Case(model, torch.optim.SGD(model.parameters(), 0.5), squares, {"clip_grad_value": 0.003})


def clip_here(step: Any, model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.02)


@nightly_case
def gradients_clipped_in_each_virtual_node() -> Case:
    model = mlp()
    return Case(model, torch.optim.SGD(model.parameters(), 0.5), squares, inside=clip_here)


@slow_case
def a_second_backward_in_each_virtual_node() -> Case:
    def penalty(step: Any, model: nn.Module) -> None:
        sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]

    model = mlp()
    return Case(model, torch.optim.SGD(model.parameters(), 0.05), squares, inside=penalty)


@slow_case
def gradients_that_are_replaced_in_some_steps() -> Case:
    """Nobody can know before: what has set out already must be taken back, and the attempt be repeated by all."""

    def replace(step: Any, model: nn.Module) -> None:
        if step.number in (5, 7):
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad * 0.5

    model = mlp()
    return Case(model, torch.optim.SGD(model.parameters(), 0.5), squares, inside=replace)


@nightly_case
def norms_of_gradients_that_are_logged_in_some_steps() -> Case:
    """The first time they may be gone already: that attempt is repeated, and what it has logged is forgotten."""

    def log(step: Any, model: nn.Module) -> None:
        if step.number in (4, 7):
            step.log(norm=sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return Case(model, optimizer, squares, inside=log, after=lambda step, model: step.metrics.get("norm"))


@nightly_case
def gradients_set_by_hand_without_backward() -> Case:
    def by_hand(step: Any, model: nn.Module) -> None:
        model.by_hand.grad = torch.full((3,), 0.01 * step.number)  # type: ignore[union-attr]

    model = mlp()
    model.by_hand = nn.Parameter(torch.ones(3))
    return Case(model, torch.optim.SGD(model.parameters(), 0.5), squares, inside=by_hand)


@slow_case
def channels_last_convolutions_with_clipping() -> Case:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 3, (1, 3), padding=1)
    ).to(memory_format=torch.channels_last)
    return Case(
        model, torch.optim.Adam(model.parameters(), 0.02), squares, {"clip_grad_norm": 0.1, "clip_grad_value": 0.05}
    )


@nightly_case
def parameter_groups() -> Case:
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.3},
        {"params": model[2].parameters(), "momentum": 0.5},
    ]
    return Case(model, torch.optim.SGD(groups, 0.01, momentum=0.9, nesterov=False), squares)


@nightly_case
def frozen_parameters() -> Case:
    model = mlp(nn.Linear(7, 7))
    model[1].requires_grad_(False)
    return Case(model, torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.5), squares)


class Branches(nn.Module):
    """One parameter is never used, another one by some samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 3)
        self.never = nn.Linear(6, 3)
        self.sometimes = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.always(x)
        return out + self.sometimes(x) if x[0, 0] > 0.9 else out


@slow_case
def parameters_that_some_or_no_virtual_nodes_use() -> Case:
    model = Branches()
    return Case(model, torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.5), squares)


@slow_case
def tied_weights() -> Case:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return Case(model, torch.optim.Adam(model.parameters(), 0.05), squares)


def _autocast_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return squares(model, x, y)


@case
def autocast_to_bfloat16() -> Case:
    model = mlp(nn.LayerNorm(7))
    return Case(model, torch.optim.AdamW(model.parameters(), 0.05), _autocast_loss)


def scaled(case: Case, scaler: torch.amp.GradScaler) -> Case:
    loss = case.loss
    case.options["scaler"] = scaler
    case.loss = lambda model, x, y: scaler.scale(loss(model, x, y))
    return case


def _half_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return squares(model, x, y)


@case
def a_grad_scaler_with_an_overflow() -> Case:
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    made = scaled(Case(model, torch.optim.SGD(model.parameters(), 0.05), _half_loss, {"clip_grad_norm": 0.5}), scaler)
    made.after = lambda step, _: scaler.get_scale()
    return made


@nightly_case
def a_scheduler_each_step() -> Case:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Case(model, optimizer, squares, {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, STEPS)})


@nightly_case
def a_scheduler_each_epoch() -> Case:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.3), "scheduler_interval": "epoch"}
    return Case(model, optimizer, squares, options)


@nightly_case
def a_scheduler_by_hand() -> Case:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.9)
    options = {"scheduler": scheduler, "scheduler_interval": "manual"}

    def after(step: Any, model: nn.Module) -> float:
        scheduler.step(step.metrics["loss"])
        return optimizer.param_groups[0]["lr"]

    return Case(model, optimizer, squares, options, after=after)


@case
def several_optimizers_and_schedulers() -> Case:
    model = mlp()
    first = torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9)
    last = torch.optim.AdamW(model[2].parameters(), 0.05)
    step, cycle = torch.optim.lr_scheduler.StepLR(first, 3), torch.optim.lr_scheduler.OneCycleLR(last, 0.1, STEPS)
    return Case(model, [first, last], squares, {"scheduler": [step, cycle]})


@case
def batch_norm_with_and_without_momentum() -> Case:
    model = mlp(nn.BatchNorm1d(7), nn.BatchNorm1d(7, momentum=None, affine=False))
    return Case(model, torch.optim.Adam(model.parameters(), 0.05), squares)


class Buffers(nn.Module):
    """Buffers of many types, changed in place or replaced; some never change, some are not numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        for dtype in (torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
            name = str(dtype).replace("torch.", "of_")
            self.register_buffer(name, torch.ones(3, dtype=dtype))
        self.register_buffer("flag", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("counter", torch.tensor(0))
        self.register_buffer("constant", torch.tensor([0.1, -0.0, 1 / 3]))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_buffer("not_numbers", torch.tensor([1.0, float("nan"), float("inf"), -float("inf")] * 5))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0).detach()
        self.of_int64 += int(x.shape[0])
        self.of_uint8.add_(100)
        self.of_float16.mul_(0.5).add_(mean[:3] * 1000)
        self.of_bfloat16.add_(mean[3:])
        self.of_float64.add_(mean[3:].double() / 3)
        self.of_complex64.add_(torch.complex(mean[:3], mean[3:]))
        self.flag[int(x.sum().abs() * 100) % 5] = True
        self.replaced = self.replaced + mean[0]
        self.counter = self.counter + 1
        self.passing.lerp_(mean[:2], 0.1)
        self.not_numbers.add_(float(mean[0]) * 1e38)
        return self.linear(x) + 0.01 * self.passing[0]


@slow_case
def buffers_of_every_type() -> Case:
    model = Buffers()

    def after(step: Any, model: Any) -> list[float]:
        return [float(value) for value in (*model.passing, model.counter, model.constant.sum())]

    return Case(model, torch.optim.SGD(model.parameters(), 0.1), squares, after=after)


@slow_case
def thawing_at_an_epoch() -> Case:
    model = mlp()
    model[0].requires_grad_(False)

    def before(step: Any, model: Any) -> None:
        model[0].requires_grad_(step.epoch == 1)

    return Case(model, torch.optim.AdamW(model.parameters(), 0.05), squares, before=before)


class Mixed(nn.Module):
    """Parameters of several types, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(6, 5, dtype=torch.bfloat16)
        self.high = nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.exact = nn.Parameter(torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = self.high(self.low(x.bfloat16()).float()) * self.gain
        return (out.double() * self.exact).float()


@slow_case
def parameters_of_several_types() -> Case:
    model = Mixed()
    return Case(model, torch.optim.AdamW(model.parameters(), 0.05), squares, {"clip_grad_norm": 0.1})


@nightly_case
def double_precision() -> Case:
    model = mlp().double()
    return Case(
        model, torch.optim.Adam(model.parameters(), 0.05), lambda model, x, y: squares(model, x.double(), y.double())
    )


@case
def dropout_and_drop_last() -> Case:
    model = mlp(nn.Dropout(0.4))
    return Case(model, torch.optim.Adam(model.parameters(), 0.05), squares, {"drop_last": True})


class Signs(nn.Module):
    """Gradients that are minus zero or missing in some virtual nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([-0.0, 0.0, 1.0]))
        self.b = nn.Parameter(torch.tensor([-0.0, 0.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        out = x[:, :3] * self.a * -0.0
        return out + x[:, :3] * self.b * -0.0 if x[0, 0] > 0.5 else out


@nightly_case
def zeros_keep_the_sign_that_the_rule_gives_them() -> Case:
    model = Signs()
    made = Case(model, torch.optim.SGD(model.parameters(), 0.1), squares)
    made.after = lambda step, model: [str(p.grad) for p in model.parameters()]
    return made


class Gaps(nn.Module):
    """Random signs of NaN, which additions must not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.broken = nn.Parameter(torch.ones(37))

    def forward(self, x: Tensor) -> Tensor:
        strange = torch.where(torch.rand(37) > 0.5, float("nan"), -float("nan"))
        return self.linear(x) + (self.broken * strange).sum() * 0.0


@slow_case
def gradients_that_are_not_numbers() -> Case:
    model = Gaps()
    return Case(model, torch.optim.SGD(model.parameters(), 0.1), squares)


def train(name: str, virtual_nodes: int, victim: str = "") -> Trained:
    """The script: ``victim`` kills itself in the middle of its micro-batches of step 6."""
    torch.manual_seed(0)
    made = CASES[name]()
    told: list[Any] = []
    batch_size = 24 if virtual_nodes == 8 else 4 * virtual_nodes
    options = {"batch_size": batch_size, "steps": STEPS, "virtual_nodes": virtual_nodes, "seed": 3, **made.options}
    with vf.elastic(made.model, made.optimizer, data(), **options) as run:
        for step in run:
            made.before(step, made.model)
            for x, y in step:
                loss = made.loss(made.model, x, y)
                loss.backward()
                made.inside(step, made.model)
                step.log(loss=loss)
                if step.number == 6:
                    die_here(victim)
            told.append((step.number, step.epoch, step.metrics["loss"], made.after(step, made.model)))
    return trained(run, made.model, made.optimizer, repr(told[-2:]), made.after.__name__)


@pytest.mark.parametrize("exchange", [nightly("late"), "early"])
@pytest.mark.parametrize("name", [TIERS.get(name, str)(name) for name in CASES])
def test_a_training_of_any_make_gives_the_same_bits(
    name: str, exchange: str, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train, name, 6)
    # Two workers, three after step 3 or so, two again when one is killed in the middle of step 6.
    job = start_job(train, name, 6, "worker-1", workers=2, hold=2, environment={EXCHANGE: exchange})
    job.reach(2)
    job.join()
    outcomes = job.finish()
    results = [outcome.value for outcome in outcomes.values() if outcome.kind == "returned"]
    assert results == [reference, reference], outcomes
    begun = [outcome.log.count(BEGUN_EARLY) for outcome in outcomes.values()]
    assert all(begun) if exchange == "early" and name not in CHANGES_GRADIENTS else not any(begun)


@pytest.mark.parametrize(
    ("virtual_nodes", "workers"),
    [
        (1, 1),
        (6, 4),
        slow(7, 3),
        *(nightly(*numbers) for numbers in [(8, 5), (2, 2), (6, 5), (7, 2), (7, 5), (8, 3)]),
    ],
    ids=str,
)
def test_no_number_of_workers_shows_in_the_bits(
    virtual_nodes: int, workers: int, start_job: Callable[..., ElasticJob]
) -> None:
    for name in ("batch_norm_with_and_without_momentum", "buffers_of_every_type")[:: 1 if workers == 3 else 2]:
        reference = alone(train, name, virtual_nodes)
        assert start_job(train, name, virtual_nodes, workers=workers).results() == [reference] * workers

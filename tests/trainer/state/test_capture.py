"""The state of a job goes into every optimizer, scheduler and scaler without losing a bit."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from states import OPTIMIZERS, Make, Net, assert_same, train, trained
from torch import nn

from virtualflow.errors import ConfigurationError
from virtualflow.state import capture, codec, digests
from virtualflow.worker.options import fused_sgd_steps

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_restored_job_goes_on_with_the_same_bits(make: Make, dtype: torch.dtype) -> None:
    if make is OPTIMIZERS["sgd-fused"] and not fused_sgd_steps(dtype):
        pytest.skip("this torch's fused SGD passes over halves and has other momentum each time; it is refused")
    donor, joiner = Net(0, dtype), Net(1, dtype)
    ours, theirs = make(trained(donor)), make(trained(joiner))
    our_scheduler = torch.optim.lr_scheduler.MultiStepLR(ours, [2, 4], gamma=0.5)
    their_scheduler = torch.optim.lr_scheduler.MultiStepLR(theirs, [2, 4], gamma=0.5)
    train(donor, ours, our_scheduler, range(3))
    train(joiner, theirs, their_scheduler, range(10, 11))  # A joiner's own past must not matter.
    before = {name: (id(p), p.requires_grad) for name, p in joiner.named_parameters()}

    packed = codec.pack(capture.capture(donor, ours, our_scheduler, None, {"position": (1, 2)}))
    extra = capture.restore(codec.unpack(packed), joiner, theirs, their_scheduler, None)

    assert extra == {"position": (1, 2)}
    assert {name: (id(p), p.requires_grad) for name, p in joiner.named_parameters()} == before
    assert joiner.head.weight is joiner.embed.weight
    assert joiner.note == {"seed": 0}
    for steps in (range(3, 3), range(3, 6)):
        train(donor, ours, our_scheduler, steps)
        train(joiner, theirs, their_scheduler, steps)
        assert digests.digest(donor.state_dict()) == digests.digest(joiner.state_dict())
        assert digests.optimizer_digest(ours) == digests.optimizer_digest(theirs)
        assert_same(our_scheduler.state_dict(), their_scheduler.state_dict())
        assert_same(dict(donor.named_buffers()), dict(joiner.named_buffers()))


def test_capturable_state_comes_back_exactly() -> None:
    # Capturable optimizers do not step on the CPU, but there "step" lives with the parameter.
    pair = []
    for seed in (0, 1):
        model = Net(seed)
        optimizer = torch.optim.Adam(trained(model), lr=torch.tensor(0.01), foreach=False)
        train(model, optimizer, None, range(2 + seed))
        for group in optimizer.param_groups:
            group["capturable"] = True
        pair.append((model, optimizer))
    (donor, ours), (joiner, theirs) = pair
    capture.restore(codec.unpack(codec.pack(capture.capture(donor, ours, None, None, {}))), joiner, theirs, None, None)
    assert_same(ours.state_dict(), theirs.state_dict())


class HalfPrecisionMomentum(torch.optim.Optimizer):
    """Keeps state in dtypes that torch's own load_state_dict would cast to the parameter's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    entry = self.state[p]
                    entry.setdefault("momentum", torch.zeros_like(p, dtype=torch.float64))
                    entry.setdefault("codes", torch.zeros_like(p, dtype=torch.uint8))
                    entry.setdefault("mode", "fast")
                    entry.setdefault("nested", ([torch.zeros(2, dtype=torch.float64)], {1: torch.Size([2])}))
                    entry["momentum"].mul_(0.9).add_(p.grad)
                    entry["codes"] += 1
                    entry["nested"][0][0] += math.pi
                    p.sub_((entry["momentum"] * group["lr"]).to(p.dtype))


def test_optimizer_state_keeps_dtypes_that_torch_would_cast() -> None:
    donor, joiner = Net(0), Net(1)
    ours, theirs = HalfPrecisionMomentum(trained(donor)), HalfPrecisionMomentum(trained(joiner))
    train(donor, ours, None, range(3))
    capture.restore(codec.unpack(codec.pack(capture.capture(donor, ours, None, None, {}))), joiner, theirs, None, None)
    assert_same(ours.state_dict(), theirs.state_dict())


def test_a_restored_job_shares_no_memory_with_the_tree() -> None:
    donor, joiner = Net(0), Net(1)
    ours, theirs = torch.optim.Adam(trained(donor)), torch.optim.Adam(trained(joiner))
    train(donor, ours, None, range(2))
    extra = {"kept": torch.zeros(1)}
    tree = capture.capture(donor, ours, None, None, extra)
    expected = codec.snapshot(tree)
    capture.restore(tree, joiner, theirs, None, None)
    train(joiner, theirs, None, range(2, 5))
    assert_same(tree, expected)


def schedulers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    lr = torch.optim.lr_scheduler
    return {
        "none": lambda: None,
        "multi-step": lambda: lr.MultiStepLR(optimizer, [1, 3]),
        "one-cycle": lambda: lr.OneCycleLR(optimizer, 0.1, 20),
        "cyclic": lambda: lr.CyclicLR(optimizer, 0.1, 0.2, step_size_up=2),
        "lambda": lambda: lr.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        "warm-restarts": lambda: lr.CosineAnnealingWarmRestarts(optimizer, 2),
        "sequential": lambda: lr.SequentialLR(
            optimizer, [lr.LinearLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], [2]
        ),
        "chained": lambda: lr.ChainedScheduler([lr.LinearLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], optimizer),
    }


@pytest.mark.parametrize("name", schedulers(torch.optim.SGD([torch.zeros(1)], lr=0.1)))
@pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")
def test_schedulers_go_on_where_they_were(name: str) -> None:
    donor, joiner = Net(0), Net(1)
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    ours, theirs = make(trained(donor)), make(trained(joiner))
    our_scheduler, their_scheduler = schedulers(ours)[name](), schedulers(theirs)[name]()
    train(donor, ours, our_scheduler, range(3))
    tree = codec.unpack(codec.pack(capture.capture(donor, ours, our_scheduler, None, {})))
    capture.restore(tree, joiner, theirs, their_scheduler, None)
    train(donor, ours, our_scheduler, range(3, 6))
    train(joiner, theirs, their_scheduler, range(3, 6))
    assert digests.optimizer_digest(ours) == digests.optimizer_digest(theirs)
    assert digests.digest(donor.state_dict()) == digests.digest(joiner.state_dict())


def test_a_plateau_scheduler_that_waits_for_its_first_loss_keeps_its_infinity() -> None:
    model = Net()
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    capture.restore(
        codec.unpack(codec.pack(capture.capture(model, optimizer, scheduler, None, {}))),
        model,
        optimizer,
        scheduler,
        None,
    )
    assert scheduler.best == math.inf


def test_the_gradient_scaler_goes_on_with_its_scale() -> None:
    def job(seed: int) -> tuple[Net, torch.optim.Optimizer, torch.amp.GradScaler]:
        model = Net(seed)
        return (
            model,
            torch.optim.SGD(trained(model), lr=0.1),
            torch.amp.GradScaler("cpu", init_scale=2.0**seed),
        )

    donor, ours, our_scaler = job(3)
    joiner, theirs, their_scaler = job(5)
    loss = our_scaler.scale(donor(torch.ones(4, 6)).sum())
    loss.backward()
    our_scaler.step(ours)
    our_scaler.update(new_scale=0.1)
    capture.restore(
        codec.unpack(codec.pack(capture.capture(donor, ours, None, our_scaler, {}))),
        joiner,
        theirs,
        None,
        their_scaler,
    )
    assert their_scaler.get_scale() == our_scaler.get_scale() == float(np.float32(0.1))
    with pytest.raises(ConfigurationError, match=r"^the state has a scaler and this process has none"):
        capture.restore(capture.capture(donor, ours, None, our_scaler, {}), joiner, theirs, None, None)


def test_a_state_of_another_model_changes_nothing() -> None:
    donor, joiner = nn.Linear(4, 2), nn.Linear(4, 3)
    tree = capture.capture(donor, torch.optim.SGD(donor.parameters()), None, None, {})
    before = digests.digest(joiner.state_dict())
    with pytest.raises(ConfigurationError, match=r"parameter weight is \[3, 4\] here and \[2, 4\] there"):
        capture.restore(tree, joiner, torch.optim.SGD(joiner.parameters()), None, None)
    assert digests.digest(joiner.state_dict()) == before


def test_the_layout_in_memory_stays_and_does_not_matter() -> None:
    donor = nn.Conv2d(3, 4, 3)
    joiner = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    pair = [torch.optim.SGD(m.parameters()) for m in (donor, joiner)]
    capture.restore(capture.capture(donor, pair[0], None, None, {}), joiner, pair[1], None, None)
    assert joiner.weight.is_contiguous(memory_format=torch.channels_last)
    assert digests.digest(donor.state_dict()) == digests.digest(joiner.state_dict())

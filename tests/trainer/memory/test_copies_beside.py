"""Copies that take time beside the computation: the same bits, the memory that was promised, and no wait too many."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from activation_models import FAMILIES
from benchmarks.memory_models import FAMILIES as LARGE
from benchmarks.memory_models import UNet
from benchmarks.throttled_copies import Clock, ThrottledCopies
from torch import Tensor, nn

from tiers import nightly
from virtualflow.memory import Action, BlockPlan, Budget, Planner, Point, Profile, Wait, profile_for
from virtualflow.memory.activations import ActivationSettings
from virtualflow.memory.activations.blocks import find_blocks
from virtualflow.memory.activations.executor import Executor
from virtualflow.memory.activations.live_bytes import LiveBytes
from virtualflow.memory.activations.measuring import Probe, chain_profile
from virtualflow.memory.settings import PlannerSettings
from virtualflow.protocol.device_profile import SkipProfile

CPU = torch.device("cpu")
PLANNER = PlannerSettings(rungs=3, moves=2_000)
UNLIMITED = Budget(1 << 40, 1 << 40)


class Waits(Clock):
    """A clock that only waits move: computing takes no time."""

    def now(self) -> float:
        return self._shift


def step(model: nn.Module, samples: Tensor, classes: Tensor) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    model.zero_grad()
    F.cross_entropy(model(samples), classes).backward()


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    """Of gradients and buffers."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    gradients = all(torch.equal(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None)
    return gradients and all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def profile_of(probe: Probe, copies: ThrottledCopies, micro_batch: int, share: float) -> Profile:
    """As measured, but that each block takes a second, and all copies out that share of what all blocks take."""
    size = probe.size(micro_batch, 0)
    chain = chain_profile(probe, [size], copies, ActivationSettings(probe=1 << 10, copies=1), optimizer=0)
    profile = profile_for(chain, micro_batch)
    blocks = tuple(replace(block, forward_seconds=1.0, backward_seconds=2.0) for block in profile.blocks)
    moved = sum(block.saved_bytes + block.boundary_bytes for block in blocks)
    return replace(profile, blocks=blocks, out_bytes_per_second=moved / share, in_bytes_per_second=moved / share)


def trained(name: str) -> tuple[nn.Module, list[str] | None, Tensor, Tensor]:
    """A model with its blocks, and a batch."""
    torch.manual_seed(7)
    if name in FAMILIES:
        return FAMILIES[name].build().train(), FAMILIES[name].blocks, torch.randn(4, 3, 8, 8), torch.randint(3, (4,))
    large = LARGE[name].build()
    names = {id(module): each for each, module in large.named_modules()}
    return large, [names[id(block)] for block in large.blocks], LARGE[name].samples()[:2], torch.randint(3, (2,))


@pytest.mark.slow
@pytest.mark.parametrize("share", [2.0, 0.5], ids=["slow copies", "fast copies"])
@pytest.mark.parametrize("name", [*FAMILIES, *(nightly(name, id=f"{name}, as it is measured") for name in LARGE)])
def test_plans_give_the_bits_of_the_run_without_one_within_their_memory(name: str, share: float) -> None:
    """Computing takes no time here, so that everything has to be waited for."""
    model, wanted, samples, classes = trained(name)
    twin = copy.deepcopy(model)
    blocks, _ = find_blocks(model, wanted)
    clock = Waits()
    copies = ThrottledCopies(clock, 1e6)
    executor = Executor(model, blocks, CPU, copies)
    probe = executor.observer = Probe(model, blocks, CPU)
    executor.begin()
    step(model, samples, classes)
    step(twin, samples, classes)
    assert same_bits(model, twin), "measuring has changed the result"
    probe.end_micro_batch()
    executor.observer = None
    planner = Planner(profile_of(probe, copies, len(samples), share), PLANNER)
    streams = len(blocks) * torch.get_rng_state().nbytes  # which are on the host with any device
    least, most = planner.smallest(UNLIMITED), planner.keep_bytes(UNLIMITED)
    budgets = [least + (most - least) * quarter // 4 for quarter in range(4)]
    plans = [(budget, planner.plan(Budget(budget, 1 << 40))) for budget in budgets]
    assert any(plan.count(Action.SWAP) for _, plan in plans)
    for budget, plan in [*plans, (least, planner.uniform(Action.SWAP, Budget(least, 1 << 40)))]:
        executor.follow(plan.blocks, None, plan.waits)
        for _ in range(2):  # in the second one kept blocks are left alone
            executor.begin()
            model.zero_grad()
            copies.live = live = LiveBytes()
            live.add([*model.parameters(), *model.buffers(), samples, classes])
            with live:
                step(model, samples, classes)
            copies.live = None
            step(twin, samples, classes)
            assert same_bits(model, twin)
            assert live.peak <= budget + streams
            copies.reclaim()
            assert executor.ledger.device_bytes == copies.ring.used == 0
    executor.close()


def test_what_enters_a_second_block_is_counted_once_as_a_boundary_and_told_with_its_gradient() -> None:
    model = UNet(8, 2)
    names = {id(module): each for each, module in model.named_modules()}
    blocks, _ = find_blocks(model, [names[id(block)] for block in model.blocks])
    executor = Executor(model, blocks, CPU)
    probe = executor.observer = Probe(model, blocks, CPU)
    samples = torch.randn(4, 3, 32, 32)
    executor.begin()
    step(model, samples, torch.randint(3, (4,)))
    probe.end_micro_batch()
    executor.close()
    size = probe.size(4, 0)
    wide, middle, deep = (4 * 4 * width * side * side for width, side in ((8, 32), (16, 16), (32, 8)))
    assert [block.boundary_bytes for block in size.blocks] == [0, wide, middle, deep, middle, wide]
    assert size.other_bytes == samples.nbytes
    # The gradient is a half of that of what was put together.
    assert size.skips == (SkipProfile(1, 4, wide, 2 * wide), SkipProfile(2, 3, middle, 2 * middle))


class Sine(nn.Module):
    """Saves its input, and not its output."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def rig(bandwidth: float, plans: list[BlockPlan], waits: list[Wait]) -> tuple[nn.Module, Executor, Waits]:
    """Three blocks, each of which saves its input of 4 KiB."""
    model = nn.Sequential(nn.Linear(32, 32), *(Sine() for _ in range(3)))
    clock = Waits()
    executor = Executor(model, find_blocks(model, ["1", "2", "3"])[0], CPU, ThrottledCopies(clock, bandwidth))
    executor.follow(plans, None, waits)
    executor.begin()
    return model, executor, clock


KEEP, SWAP = BlockPlan(Action.KEEP), BlockPlan(Action.SWAP, prefetch=Point("backward", 2))
KIB = 1024


@pytest.mark.parametrize(
    ("waits", "seconds"),
    [
        pytest.param([], 0.0, id="there is memory"),
        pytest.param([Wait(Point("forward", 2), 4 * KIB)], 0.0, id="as much may still be leaving"),
        pytest.param([Wait(Point("forward", 2), 4 * KIB - 1)], 4.0, id="a byte less"),
    ],
)
def test_the_forward_pass_waits_for_copies_out_only_where_the_plan_says_so(waits: list[Wait], seconds: float) -> None:
    model, executor, clock = rig(KIB, [SWAP, KEEP, KEEP], waits)
    out = model(torch.randn(32, 32))
    assert clock.now() == pytest.approx(seconds)
    out.sum().backward()
    assert clock.now() == pytest.approx(8.0)  # out, and back
    executor.close()


def test_the_backward_pass_goes_on_while_something_is_leaving() -> None:
    """What is due at its beginning waits for that; but only the block that needs it waits."""
    model, executor, clock = rig(KIB, [SWAP, KEEP, KEEP], [])
    seen: list[float] = []
    model[1].register_full_backward_pre_hook(lambda *_: seen.append(clock.now()))
    out = model(torch.randn(32, 32))
    out.sum().backward()
    assert seen == [0.0]
    executor.close()


class Doubled(nn.Module):
    """A block between two that change its input in place: autograd does not mind, as nobody has saved that."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.block(x)
        x.mul_(2.0)
        return y  # type: ignore[no-any-return]


def test_what_is_changed_in_place_while_it_is_copied_is_an_error() -> None:
    """It is copied as late as a lane may, so the host would have got other numbers."""
    model = Doubled()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(4, 8)).sum().backward()
    executor = Executor(model, find_blocks(model, ["block"])[0], CPU, ThrottledCopies(Waits(), KIB))
    executor.follow([BlockPlan(Action.SWAP)])
    executor.begin()
    with pytest.raises(RuntimeError, match=r"\[4, 8\] was changed in place while the plan of memory copied it"):
        model(torch.randn(4, 8)).sum().backward()
    executor.close()


def test_no_more_is_kept_on_the_host_than_was_in_use_at_a_time() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    executor = Executor(model, find_blocks(model, None)[0], CPU)
    executor.follow([BlockPlan(Action.SWAP)] * 4)
    ring = executor.ledger.copies.ring
    for length in (*range(1, 20), 5, 5):
        executor.begin()
        model(torch.randn(length, 8)).sum().backward()
        assert ring.used == 0
        assert ring.idle <= ring.peak
    executor.close()

"""A model is measured while it trains, and then runs under a plan that its counted bytes never exceed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activation_models import FAMILIES
from torch import Tensor, nn

import virtualflow as vf
from tiers import nightly
from virtualflow.errors import ConfigurationError
from virtualflow.memory import Action, DoesNotFit, Planner, Profile
from virtualflow.memory.activations import Activations, ActivationSettings, limit, measuring
from virtualflow.memory.settings import PlannerSettings

CPU = torch.device("cpu")
SETTINGS = ActivationSettings(probe=1 << 16, copies=3, planner=PlannerSettings(rungs=2, moves=200))
PLENTY = "1GiB"


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(4, 3, 8, 8, generator=draw), torch.randint(0, 3, (4,), generator=draw)


def build(name: str) -> nn.Module:
    torch.manual_seed(7)
    return FAMILIES[name].build().train()


def run(activations: Activations, model: nn.Module, micro_batches: int = 1) -> None:
    x, y = batch()
    for _ in range(micro_batches):
        activations.begin()
        torch.manual_seed(1)
        F.cross_entropy(model(x), y).backward()
        activations.end(len(x))
        model.zero_grad()


def planned(model: nn.Module, name: str, device: str | int = PLENTY, activations: str = "auto") -> Activations:
    # On a CPU nothing is swapped unless the host's memory is named.
    memory = vf.Memory(device, PLENTY, activations=activations, blocks=FAMILIES[name].blocks)  # type: ignore[arg-type]
    made = Activations(model, CPU, memory, micro_batch=4, virtual_nodes=1, optimizer_bytes=lambda: 0, settings=SETTINGS)
    run(made, model, SETTINGS.warm_up + SETTINGS.samples)
    made.committed()
    return made


def profile_of(name: str) -> Profile:
    model = build(name)
    made = planned(model, name)
    made.close()
    assert made.profile is not None
    return made.profile


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("share", "copies"),
    [(0.0, "fast"), (0.6, "slow"), nightly(0.0, "slow"), nightly(0.6, "fast"), nightly(1.0, "fast"), (1.0, "slow")],
)
def test_what_is_counted_never_exceeds_what_was_predicted(
    name: str, share: float, copies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where copies are slow, blocks are recomputed instead of swapped."""
    bandwidth = 1e12 if copies == "fast" else 1e3
    monkeypatch.setattr(measuring, "measure_copies", lambda *rest: (bandwidth, bandwidth))
    planner = Planner(profile_of(name), SETTINGS.planner)
    unlimited = vf.Memory(PLENTY, PLENTY).budget
    least, most = planner.smallest(unlimited), planner.keep_bytes(unlimited)
    model = build(name)
    made = planned(model, name, least + int(share * (most - least)))
    assert made.plan is not None
    assert made.profile is not None
    ledger = made.executor.ledger
    ledger.peak = ledger.copies.ring.peak = 0
    run(made, model, 2)
    made.close()
    assert (ledger.peak > 0) == (share < 1.0)  # if everything is kept, nobody looks
    assert ledger.peak <= made.plan.peak_bytes - made.profile.resident_bytes("device")
    assert ledger.copies.ring.peak <= made.plan.host_bytes
    assert ledger.device_bytes == ledger.copies.ring.used == 0
    kept = made.plan.count(Action.KEEP)
    assert (kept == len(made.plan.blocks)) == (share == 1.0)
    if share == 0.6:
        assert made.plan.count(Action.SWAP if copies == "fast" else Action.RECOMPUTE) == len(made.plan.blocks) - kept


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("activations", ["keep", "swap", "recompute"])
def test_all_blocks_alike_stay_within_the_prediction_too(
    name: str, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine measures copies so slow that what is fetched at once comes earlier than predicted.
    monkeypatch.setattr(measuring, "measure_copies", lambda *rest: (1e12, 1e12))
    model = build(name)
    made = planned(model, name, PLENTY, activations)
    assert made.plan is not None
    assert made.profile is not None
    assert made.plan.count(Action(activations)) == len(made.plan.blocks)
    ledger = made.executor.ledger
    ledger.peak = 0
    run(made, model)
    made.close()
    assert (ledger.peak > 0) == (activations != "keep")
    assert ledger.peak <= made.plan.peak_bytes - made.profile.resident_bytes("device")


def test_sizes_are_those_of_storages_each_once() -> None:
    """By hand, for the residual blocks [4, 4, 8, 8] in float32 of 4 KiB an activation."""
    profile = profile_of("convolutional")
    activation = 4 * 4 * 8 * 8 * 4
    for block in profile.blocks:
        assert block.boundary_bytes == activation
        # The inputs of batch norm and of dropout's multiplication with its mask; the latter's factor is saved alone.
        assert activation <= block.saved_bytes - 2 * 4 * 4 <= 3 * activation
        assert block.parameter_bytes == block.gradient_bytes == 4 * (4 * 4 * 9 + 4 + 4 + 4)
        # The ReLU needs what it hands over; of the last block there is also the gradient of that.
        assert block.workspace_bytes == activation
    assert profile.blocks[0].name == "blocks.0"


SAID = vf.Memory("4GiB", "8GiB", "recompute", ["a"])
THERE = vf.Memory(optimizer="host")


@pytest.mark.parametrize(
    ("said", "told", "found"),
    [
        pytest.param(None, (None, None), None, id="nobody says"),
        pytest.param(SAID, (None, None), SAID, id="the script"),
        pytest.param(None, (5, None), vf.Memory(5), id="the environment"),
        pytest.param(SAID, (5, None), vf.Memory(5, "8GiB", "recompute", ["a"]), id="the device alone"),
        pytest.param(SAID, (5, 6), vf.Memory(5, 6, "recompute", ["a"]), id="both"),
        pytest.param(SAID, (5, None, "swap"), vf.Memory(5, "8GiB", "swap", ["a"]), id="other activations"),
        pytest.param(None, (None, None, None, "host"), THERE, id="the optimizer on the host"),
        pytest.param(None, (None, None, None, "device"), None, id="the optimizer where it is"),
        pytest.param(THERE, (None, None, None, "device"), None, id="the optimizer back on the device"),
        pytest.param(THERE, (None, None), THERE, id="the optimizer where the script has it"),
        pytest.param(THERE, (5, None), vf.Memory(5, optimizer="host"), id="a size beside the script's optimizer"),
        pytest.param(
            SAID,
            (None, None, None, "host"),
            replace(SAID, optimizer="host"),
            id="the optimizer beside a size",
        ),
    ],
)
def test_whoever_runs_a_script_may_allow_other_memory(
    said: vf.Memory | None, told: tuple[Any, ...], found: vf.Memory | None
) -> None:
    assert limit(said, *told) == found


def test_the_same_bits_and_nothing_left_behind_on_the_model() -> None:
    model = build("convolutional")
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    planned(model, "convolutional").close()
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks


def test_what_measured_the_speed_of_copies_does_not_stay_in_memory() -> None:
    made = planned(build("convolutional"), "convolutional")
    ring = made.executor.ledger.copies.ring
    assert (ring.used, ring.idle) == (0, 0)


def test_a_budget_that_nothing_fits_into_is_refused_with_what_would() -> None:
    with pytest.raises(DoesNotFit, match="the smallest budget that works is"):
        planned(build("convolutional"), "convolutional", 1000)


def test_blocks_that_do_not_run_are_left_out() -> None:
    model = build("unet")
    model.unused = nn.Linear(2, 2)
    memory = vf.Memory(PLENTY, blocks=["down.0", "unused", "down.1", "down.2"])
    made = Activations(model, CPU, memory, micro_batch=4, virtual_nodes=1, optimizer_bytes=lambda: 0, settings=SETTINGS)
    run(made, model, 4)
    made.committed()
    assert made.profile is not None
    assert [block.name for block in made.profile.blocks] == ["down.0", "down.1", "down.2"]
    run(made, model)


def test_blocks_of_which_none_runs_are_refused() -> None:
    model = build("unet")
    model.unused = nn.Linear(2, 2)
    made = Activations(
        model,
        CPU,
        vf.Memory(PLENTY, blocks=["unused"]),
        micro_batch=4,
        virtual_nodes=1,
        optimizer_bytes=lambda: 0,
        settings=SETTINGS,
    )
    run(made, model, 4)
    with pytest.raises(ConfigurationError, match="none of the model's blocks has run"):
        made.committed()


def hooked() -> nn.Module:
    """With a hook that is told the gradients of a parameter, and notes how many."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    model.calls = 0  # type: ignore[assignment]

    def count(gradient: Tensor) -> None:
        model.calls += 1  # type: ignore[operator]

    model[0][0].weight.register_hook(count)  # type: ignore[union-attr, index]
    return model


def normalised() -> nn.Module:
    """Its weights are computed before each call, of parameters."""
    return nn.Sequential(*(nn.utils.spectral_norm(nn.Linear(8, 8)) for _ in range(3)))


@pytest.mark.parametrize("build_model", [hooked, normalised])
def test_measuring_a_block_changes_nothing_that_is_not_its_own(build_model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    model = build_model()
    twin = copy.deepcopy(model)
    if build_model is hooked:
        twin = hooked()
        twin.load_state_dict(model.state_dict())
    memory = vf.Memory(PLENTY, PLENTY)
    made = Activations(model, CPU, memory, micro_batch=4, virtual_nodes=1, optimizer_bytes=lambda: 0, settings=SETTINGS)
    x = torch.randn(4, 8)
    made.begin()
    model(x).sum().backward()
    made.end(4)
    made.close()
    twin(x).sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert getattr(model, "calls", None) == getattr(twin, "calls", None)

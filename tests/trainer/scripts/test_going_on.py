"""A training that goes on for longer, or with other arguments: what differs from its checkpoint, and what counts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.errors import ConfigurationError
from virtualflow.worker.resuming import check_schedule, compare, describe_built

ROWS = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))


def schedule(kind: str, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    match kind:
        case "onecycle":
            return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        case "cosine":
            return lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        case "step":
            return lr_scheduler.StepLR(optimizer, 3)
        case "milestones":
            return lr_scheduler.MultiStepLR(optimizer, [2, steps])
        case "sequence":
            warm_up = lr_scheduler.LinearLR(optimizer, total_iters=2)
            rest = lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
            return lr_scheduler.SequentialLR(optimizer, [warm_up, rest], milestones=[2])
    return None


def train(directory: Path, steps: int, kind: str = "none", length: int | None = None, **group: Any) -> list[float]:
    """The learning rate of each step that was made."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 0.1, **group})
    scheduler = schedule(kind, optimizer, length or steps)
    rates = []
    with vf.elastic(
        model, optimizer, ROWS, batch_size=16, steps=steps, scheduler=scheduler, checkpoint=directory
    ) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "virtualflow.worker")
    return caplog


def differences(said: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in said.records if "in the checkpoint" in record.getMessage()]


@pytest.mark.parametrize(
    ("kind", "first", "then", "differs"),
    [
        ("none", {"lr": 0.1}, {"lr": 0.2}, "lr is 0.2 in the script and 0.1 in the checkpoint"),
        ("none", {}, {"weight_decay": 0.5}, "weight_decay is 0.5 in the script and 0.01 in the checkpoint"),
        ("none", {}, {"betas": (0.8, 0.9)}, "betas is [0.8, 0.9] in the script and [0.9, 0.999] in the checkpoint"),
        ("cosine", {}, {"length": 9}, "CosineAnnealingLR.T_max is 9 in the script and 4 in the checkpoint"),
        ("step", {}, {"lr": 0.3}, "lr is 0.3 in the script and 0.1 in the checkpoint"),
        ("milestones", {}, {"length": 9}, "MultiStepLR.milestones is [2, 9] in the script and [2, 4] in the"),
        ("sequence", {}, {"length": 9}, "SequentialLR._schedulers[1].T_max is 9 in the script and 4 in the checkpoint"),
    ],
    ids=["lr", "weight decay", "betas", "T_max", "lr under a schedule", "milestones", "a schedule within one"],
)  # fmt: skip
def test_what_a_script_builds_otherwise_than_its_checkpoint_is_said_once(
    kind: str,
    first: dict[str, Any],
    then: dict[str, Any],
    differs: str,
    tmp_path: Path,
    said: pytest.LogCaptureFixture,
) -> None:
    train(tmp_path, 4, kind, **first)
    assert differences(said) == []
    train(tmp_path, 6, kind, **{"length": 4, **then})
    (sentence,) = differences(said)
    assert differs in sentence
    assert "what the checkpoint has counts" in sentence
    assert "another checkpoint directory" in sentence


@pytest.mark.parametrize("kind", ["none", "cosine", "step", "milestones", "sequence", "onecycle"])
def test_what_moves_in_a_training_is_no_difference(kind: str, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    for steps in (2, 4, 6):
        train(tmp_path, steps, kind, length=8)
    assert differences(said) == []


def test_a_value_that_the_loop_sets_counts_and_is_no_difference(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    for steps, rate in ((2, 0.1), (4, 0.05)):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with vf.elastic(model, optimizer, ROWS, batch_size=16, steps=steps, checkpoint=tmp_path) as run:
            for step in run:
                optimizer.param_groups[0]["lr"] = rate
                for x, y in step:
                    F.mse_loss(model(x), y).backward()
        assert optimizer.param_groups[0]["lr"] == rate
    assert differences(said) == []


def test_a_cycle_that_is_over_is_refused_before_a_step_is_made(tmp_path: Path) -> None:
    assert len(train(tmp_path, 4, "onecycle")) == 4
    with pytest.raises(
        ConfigurationError, match=r"the OneCycleLR of the checkpoint ends after 4 steps.*go on to step 8"
    ):
        train(tmp_path, 8, "onecycle")


def test_another_kind_of_schedule_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 2, "cosine", length=4)
    with pytest.raises(
        ConfigurationError, match="the scheduler is StepLR here and CosineAnnealingLR in the checkpoint"
    ):
        train(tmp_path, 4, "step")


def test_a_training_that_is_complete_says_so_when_it_is_started_again(
    tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 4, "onecycle")
    said.clear()
    assert train(tmp_path, 4, "onecycle") == []
    assert "the training was complete before: its checkpoint has all 4 steps" in said.text


def test_a_checkpoint_of_an_earlier_version_says_nothing_of_how_it_was_built() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    assert compare(describe_built(optimizer, None), {}) is None


def test_each_group_is_compared_by_its_number() -> None:
    def built(rate: float) -> dict[str, str]:
        groups = [{"params": nn.Linear(1, 1).parameters(), "lr": 0.1}, {"params": nn.Linear(1, 1).parameters()}]
        return describe_built(torch.optim.SGD(groups, lr=rate), None)

    assert (compare(built(0.3), built(0.2)) or "").startswith(
        "lr of group 1 is 0.3 in the script and 0.2 in the checkpo"
    )


@pytest.mark.parametrize(("steps", "fits"), [(10, True), (11, False)])
def test_a_cycle_within_another_schedule_is_followed_to_its_end(steps: int, fits: bool) -> None:
    def cycle_behind_a_warm_up() -> Any:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
        warm_up = lr_scheduler.ConstantLR(optimizer, total_iters=2)
        cycle = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        return lr_scheduler.SequentialLR(optimizer, [warm_up, cycle], milestones=[2])

    def torch_steps() -> None:
        scheduler = cycle_behind_a_warm_up()
        for _ in range(steps):
            scheduler.optimizer.step()
            scheduler.step()

    if fits:
        torch_steps()
        check_schedule(cycle_behind_a_warm_up(), steps, steps, "step", resumed=False)
        return
    with pytest.raises(ValueError, match="Tried to step"):
        torch_steps()
    with pytest.raises(ConfigurationError, match="ends after 8 steps"):
        check_schedule(cycle_behind_a_warm_up(), steps, steps, "step", resumed=False)

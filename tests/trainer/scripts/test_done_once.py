"""What a script does once and for good: who begins behind that step never sees it done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, Trained, alone, die_here, trained
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.protocol.settings import ENV_CHECKPOINT_DIR, ENV_CHECKPOINT_STEPS
from virtualflow.step.buffers import Modes

STEPS = 8
ONCE = 4
"""The step before or behind which it is done,"""
BEHIND = 5
"""and the one behind which somebody begins."""


def unfreezes(place: str, dies: str = "") -> Trained:
    """Fine-tunes its head first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    data = TensorDataset(torch.randn(48, 6), torch.randn(48, 1))
    with vf.elastic(model, optimizer, data, batch_size=12, steps=STEPS, virtual_nodes=6) as run:
        for step in run:
            if place == "before" and step.number == ONCE:
                model[0].requires_grad_(True)
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            if place == "behind" and step.number == ONCE:
                model[0].requires_grad_(True)
            if step.number == BEHIND + 1:
                die_here(dies)
    return trained(run, model, optimizer, more=tuple(p.requires_grad for p in model.parameters()))


def freezes_statistics(place: str, dies: str = "") -> Trained:
    """Batch norm normalises by its running statistics from some step on, as detectors are trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    data = TensorDataset(torch.randn(48, 6), torch.randn(48, 1))
    with vf.elastic(model, optimizer, data, batch_size=12, steps=STEPS, virtual_nodes=6) as run:
        for step in run:
            if place == "before" and step.number == ONCE:
                model[1].eval()
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            if place == "behind" and step.number == ONCE:
                model[1].eval()
            vf.evaluate(model, data, lambda batch: model(batch[0]), batch_size=12)
            if step.number == BEHIND + 1:
                die_here(dies)
    return trained(run, model, optimizer, more=tuple(module.training for module in model.modules()))


def evaluates_by_hand(place: str, dies: str = "") -> Trained:
    """Leaves it to the next step to end evaluation mode, whoever makes that step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    data = TensorDataset(torch.randn(48, 6), torch.randn(48, 1))
    with vf.elastic(model, optimizer, data, batch_size=12, steps=STEPS, virtual_nodes=6) as run:
        for step in run:
            model.train()  # a joiner has run this when it gets the state
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            model.eval()
            if step.number == BEHIND + 1:
                die_here(dies)
    return trained(run, model, optimizer)


STORIES = [
    pytest.param(script, place, id=f"{script.__name__} {place}", marks=[] if place == "behind" else pytest.mark.slow)
    for script in (unfreezes, freezes_statistics)
    for place in ("before", "behind")
]


@pytest.mark.parametrize(("script", "place"), [*STORIES, pytest.param(evaluates_by_hand, "", id="evaluates by hand")])
def test_who_joins_behind_it_stands_as_if_it_had_been_there(
    start_job: Callable[..., ElasticJob], script: Callable[..., Trained], place: str
) -> None:
    reference = alone(script, place)
    job = start_job(script, place, "worker-1", workers=2, hold=BEHIND)
    job.reach(BEHIND)
    job.join()
    assert job.results() == [reference] * 2


@pytest.mark.parametrize(("script", "place"), STORIES)
def test_who_resumes_behind_it_stands_as_if_it_had_been_there(
    start_job: Callable[..., ElasticJob], script: Callable[..., Trained], place: str, tmp_path: Path
) -> None:
    reference = alone(script, place)
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path), ENV_CHECKPOINT_STEPS: str(BEHIND)}
    job = start_job(script, place, workers=1, hold=BEHIND + 1, environment=environment)
    job.reach(BEHIND + 1)
    job.await_checkpoint(BEHIND)
    job.kill_all()
    job.start_worker()
    assert job.results() == [reference]


class Merging(nn.Linear):
    """As layers with low-rank adapters are: another mode is more than a flag."""

    merged = False

    def train(self, mode: bool = True) -> nn.Module:
        self.merged = not mode
        return super().train(mode)


def model_with_modes() -> nn.Module:
    return nn.Sequential(nn.Sequential(Merging(2, 2), nn.BatchNorm1d(2)), nn.Dropout())


@pytest.mark.parametrize("built", [[], [""], ["0.1"]])
@pytest.mark.parametrize(
    ("evaluated", "told"),
    [
        ([], {}),
        (["0.1"], {"0.1": False}),
        (["0"], {"0": False, "0.0": True, "0.1": True}),
        (["", "0", "0.0", "0.1", "1"], {"": False}),
        (["", "0.0", "1"], {"": False, "0": True, "0.0": False}),
    ],
)
def test_modes_are_told_by_what_was_changed_since_the_model_was_built(
    built: list[str], evaluated: list[str], told: dict[str, bool]
) -> None:
    model, other = model_with_modes(), model_with_modes()
    for each in (model, other):
        for name in built:
            each.get_submodule(name).eval()
    modes, others = Modes(model), Modes(other)
    assert not modes.state, "nothing has been computed: the script may be building the model"
    for name, module in model.named_modules():
        module.training = name not in evaluated
    modes.begin()
    if not built:
        assert modes.state == told
    others.restore(modes.state)
    assert [module.training for module in other.modules()] == [module.training for module in model.modules()]
    assert others.state == modes.state


def test_modes_change_by_a_modules_own_way() -> None:
    model, other = model_with_modes(), model_with_modes()
    modes, others = Modes(model), Modes(other)
    model[0].eval()
    modes.begin()
    others.restore(modes.state)
    assert other[0][0].merged


def test_a_script_that_was_edited_may_build_another_model() -> None:
    """Batch norm is in evaluation mode from the start now, and was not when the checkpoint was written."""
    model, other = model_with_modes(), model_with_modes()
    modes = Modes(model)
    modes.begin()
    other[0][1].eval()
    Modes(other).restore(modes.state)
    assert not other[0][1].training


def test_modes_of_an_evaluation_are_none_of_the_training() -> None:
    model = model_with_modes()
    modes = Modes(model)
    model[0][1].eval()
    modes.begin()
    model.eval()
    assert modes.state == {"0.1": False}

"""Layers that a script replaces, adds or prunes while it trains: what nobody steps and no joiner builds is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.errors import ConfigurationError

ROWS = TensorDataset(torch.arange(64.0).reshape(16, 4) / 64, torch.arange(16.0).reshape(16, 1) / 16)
Change = Callable[[nn.Sequential], object]


def learns(change: Change) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with vf.elastic(model, optimizer, ROWS, batch_size=8, steps=6, virtual_nodes=4) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            if step.number == 3:
                change(model)
    return run.completed_steps


def replaces(model: nn.Sequential) -> None:
    model[2] = nn.Linear(4, 1)


def sets_a_parameter(model: nn.Sequential) -> None:
    model[0].bias = nn.Parameter(torch.zeros(4))


def ties(model: nn.Sequential) -> None:
    model[0].bias = model[0].weight


REFUSED: dict[str, tuple[Change, str]] = {
    "replaced": (replaces, "parameter 2.weight is another one"),
    "set": (sets_a_parameter, "parameter 0.bias is another one"),
    "tied": (ties, "parameter 0.bias is another one"),
    "added": (lambda model: model.append(nn.Linear(1, 1)), "parameter 3.weight has come"),
    "inside": (lambda model: model[1].add_module("gate", nn.PReLU()), "parameter 1.gate.weight has come"),
    "pruned": (lambda model: prune.l1_unstructured(model[0], "weight", 0.5), "parameter 0.weight_orig has come"),
    "parametrized": (
        lambda model: parametrizations.weight_norm(model[0]),
        "parameter 0.parametrizations.weight.original0 has come",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_parameters_that_come_while_it_trains_are_refused_in_the_next_step(case: str) -> None:
    change, sentence = REFUSED[case]
    with pytest.raises(ConfigurationError, match=f"^{sentence} since vf.elastic got the model"):
        learns(change)


HARMLESS: dict[str, Change] = {
    "without parameters": lambda model: model.append(nn.Dropout(0.0)),
    "an activation": lambda model: model.__setitem__(1, nn.Tanh()),
    "by value": lambda model: model[0].load_state_dict({"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}),
    "another type and back": lambda model: model.double().float(),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_changes_that_bring_no_parameter_are_none_of_its_business(case: str) -> None:
    assert learns(HARMLESS[case]) == 6


def test_a_job_ends_at_once_and_not_with_different_weights(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(learns, replaces, workers=2)
    assert any("parameter 2.weight is another one" in outcome.text for outcome in job.finish().values())

"""The blocks of a model: what the user names, or the longest chain in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activation_models import Convolutional, Residual, Transformer, UNet
from torch import nn

from virtualflow.errors import ConfigurationError
from virtualflow.memory.activations.blocks import find_blocks

FOUND = {
    "the children of a Sequential": (Convolutional, [f"blocks.{index}" for index in range(5)]),
    "those of a ModuleList": (Transformer, [f"layers.{index}" for index in range(5)]),
    "a model that is a Sequential": (lambda: nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Tanh()), ["0", "1", "2"]),
    "the longest": (UNet, ["down.0", "down.1", "down.2"]),
    "others of the same class too": (
        lambda: nn.ModuleDict(
            {"a": nn.Sequential(Residual(2), Residual(2)), "b": nn.Sequential(*map(Residual, [2] * 3))}
        ),
        ["a.0", "a.1", "b.0", "b.1", "b.2"],
    ),
}


@pytest.mark.parametrize(("build", "names"), FOUND.values(), ids=FOUND)
def test_blocks_are_found(build: Any, names: list[str]) -> None:
    blocks, said = find_blocks(build(), None)
    assert [name for name, _ in blocks] == names
    assert f"the {len(names)} modules in" in said


def test_blocks_are_named_or_given() -> None:
    model = UNet()
    blocks, _ = find_blocks(model, ["down.0", model.up[1]])
    assert blocks == [("down.0", model.down[0]), ("up.1", model.up[1])]


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no chain": (lambda: nn.Linear(1, 1), None, "no nn.ModuleList or nn.Sequential of two modules"),
    "none": (UNet, [], "blocks is empty"),
    "an unknown name": (UNet, ["middle"], "no module named 'middle'"),
    "a module of another model": (UNet, [nn.Linear(1, 1)], "no module Linear given as a block"),
    "one within another": (UNet, ["down.0", "down.0.conv"], "block down.0.conv and block down.0 share a module"),
    "a list of modules": (UNet, ["down"], "block down is a ModuleList, which nobody calls"),
    "a compiled model": (lambda: torch.compile(Convolutional()), None, "a compiled model has no blocks"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("build", "wanted", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_are_no_blocks_is_refused(build: Any, wanted: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        find_blocks(build(), wanted)

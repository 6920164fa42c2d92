"""The blocks of a model: what the user names, or the chain that cuts it best."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activation_models import Convolutional, Residual, Transformer, UNet
from torch import nn

from virtualflow.errors import ConfigurationError
from virtualflow.memory.activations.blocks import find_blocks


def deep(length: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, 1) if number % 2 else nn.Tanh() for number in range(length)))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(1), deep(4)


class Shallow(nn.Module):
    """Two layers, each of which has a chain of four."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(2, 1), nn.ModuleList([Wide(), Wide()]), nn.Linear(1, 2)


FOUND = {
    "the children of a Sequential": (Convolutional, [f"blocks.{index}" for index in range(5)]),
    "those of a ModuleList": (Transformer, [f"layers.{index}" for index in range(5)]),
    "a model that is a Sequential": (lambda: nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Tanh()), ["0", "1", "2"]),
    "the way that has most": (UNet, ["down.0", "down.1", "down.2"]),
    "not the parts of one of them, even if these are more": (
        lambda: nn.Sequential(deep(4), deep(6), deep(5)),
        ["0", "1", "2"],
    ),
    "not what stands within a layer": (Shallow, ["layers.0", "layers.1"]),
    "those of two ladders": (
        lambda: nn.ModuleDict({way: nn.ModuleList(deep(3) for _ in range(2)) for way in ("down", "up")}),
        ["down.0", "down.1", "up.0", "up.1"],
    ),
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

"""Digests see every bit, and the first difference between two models is named."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from states import Net, train, trained
from torch import nn

from virtualflow.errors import ConfigurationError
from virtualflow.state import digests

# -- digests and signatures ----------------------------------------------------------------------------------


def test_the_digest_is_what_anybody_can_compute() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
    expected = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        expected.update(name.encode() + tensor.numpy().tobytes(order="C"))
    assert digests.digest(model.state_dict()) == expected.hexdigest()


def test_the_digest_sees_every_bit_and_extra_state_but_no_order() -> None:
    model = Net()
    reference = digests.digest(model.state_dict())
    assert digests.digest(dict(reversed(model.state_dict().items()))) == reference
    model.note["seed"] = 1
    changed = digests.digest(model.state_dict())
    assert changed != reference
    with torch.no_grad():
        model.frozen.view(torch.uint8)[5] ^= 1
    assert digests.digest(model.state_dict()) not in (changed, reference)


def test_the_optimizer_digest_does_not_see_the_order_of_keys() -> None:
    model = Net()
    optimizer = torch.optim.Adam(trained(model))
    train(model, optimizer, None, range(1))
    reference = digests.optimizer_digest(optimizer)
    for parameter, entry in optimizer.state.items():
        optimizer.state[parameter] = dict(reversed(entry.items()))
    assert digests.optimizer_digest(optimizer) == reference
    optimizer.param_groups[0]["lr"] *= 2
    assert digests.optimizer_digest(optimizer) != reference


def described(change: Callable[[nn.Module], Any] | None = None, **options: Any) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 4))
    if change is not None:
        change(model)
    parameters = list(model.parameters())
    make = options.get("make", torch.optim.SGD)
    groups = options.get("groups", [range(len(parameters))])
    optimizer = make([{"params": [parameters[n] for n in group]} for group in groups], lr=0.1)
    signature = digests.signature(model, optimizer)
    return json.loads(json.dumps(signature))


def tie(model: Any) -> None:
    model[2] = nn.Linear(4, 2)
    model[2].weight = model[0].weight


def untie(model: Any) -> None:
    model[2] = nn.Linear(4, 2)


DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "equal": (described(), described(), None),
    "shape": (
        described(),
        described(lambda m: setattr(m, "2", nn.Linear(3, 4))),
        "parameter 2.weight is [4, 2] here and [4, 3] there",
    ),
    "dtype": (
        described(lambda m: m[0].double()),
        described(),
        "parameter 0.weight is float64 here and float32 there",
    ),
    "frozen": (
        described(),
        described(lambda m: m[0].bias.requires_grad_(False)),
        "parameter 0.bias is trained here and frozen there",
    ),
    "missing": (
        described(),
        described(lambda m: setattr(m, "2", nn.Linear(2, 4, bias=False))),
        "parameter 2.bias exists here and not there",
    ),
    "additional": (
        described(),
        described(lambda m: m.append(nn.Linear(1, 1))),
        "parameter 3.weight exists there and not here",
    ),
    "buffer": (
        described(lambda m: m[1].register_buffer("running_mean", None)),
        described(),
        "buffer 1.running_mean exists there and not here",
    ),
    "tie": (described(tie), described(untie), "parameter 2.weight exists there and not here"),
    "optimizer": (described(), described(make=torch.optim.Adam), "the optimizer is SGD here and Adam there"),
    "group-count": (
        described(),
        described(groups=[[0, 1, 2], [3, 4, 5]]),
        "the optimizer has 1 parameter groups here and 2 there",
    ),
    "group-size": (
        described(groups=[[0, 1], [2, 3, 4, 5]]),
        described(groups=[[0, 1, 2], [3, 4, 5]]),
        "group 0 of the optimizer holds 2 parameters here and 3 there",
    ),
    "group-order": (
        described(groups=[[0, 1], [2, 3]]),
        described(groups=[[1, 0], [2, 3]]),
        "group 0 of the optimizer holds 0.weight here where it holds 0.bias there (what comes from a set has another "
        "order in each process: give parameters in a list)",
    ),
}


@pytest.mark.parametrize(("here", "there", "sentence"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_the_first_difference_is_named(here: dict[str, Any], there: dict[str, Any], sentence: str | None) -> None:
    assert digests.difference(here, there) == sentence


def test_a_difference_is_seen_from_both_sides_and_only_if_there_is_one() -> None:
    for here, there in itertools.product([there for _, there, _ in DIFFERENCES.values()], repeat=2):
        assert (digests.difference(here, there) is None) == (here == there)


def test_an_optimizer_with_a_parameter_outside_the_model_is_refused() -> None:
    model, stranger = nn.Linear(2, 2), nn.Parameter(torch.zeros(7))
    with pytest.raises(ConfigurationError, match=r"shape \[7\] that the model does not hold; put both in one module"):
        digests.signature(model, torch.optim.SGD([*model.parameters(), stranger]))

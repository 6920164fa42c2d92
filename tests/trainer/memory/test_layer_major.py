"""Layer-major order gives the sums and buffers of the ordinary order, and holds one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activation_models import Layer, Residual, Stateful
from benchmarks.throttled_copies import Clock, ThrottledCopies
from torch import Tensor, nn

from virtualflow.data.rng import seed_process
from virtualflow.errors import ConfigurationError
from virtualflow.memory import Budget, format_bytes
from virtualflow.memory.activations import layer_major
from virtualflow.memory.activations.chain import Carrier, Chain
from virtualflow.memory.activations.layer_major import Flight, LayerMajor, Summed
from virtualflow.memory.activations.live_bytes import LiveBytes
from virtualflow.memory.activations.module_state import read_streams
from virtualflow.reduction import Accumulator, choose_summation

CPU = torch.device("cpu")
NODES = range(1, 6)
"""Of 8: in several subtrees."""
SAMPLES = 4


class Doubled(nn.Module):
    """Hands on two tensors, and a number beside them; one of its parameters is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, float]:
        return x * 2, x, 0.5


class Joined(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor, float]) -> Tensor:
        return pair[0] * pair[2] + pair[1].sin()


class Twice(nn.Module):
    """Hands on one tensor in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.linear(x))
        return y, y


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        a, b = pair
        return self.one(a) + torch.sin(b) * self.other(b) + a.exp()  # type: ignore[no-any-return]


class LastState(nn.Module):
    """Of a recurrent layer: a slice, whose strides are not those of a tensor of its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]  # type: ignore[no-any-return]


class WithMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, mask=torch.zeros(x.shape[1], x.shape[1]))[0]  # type: ignore[no-any-return]


def tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


def frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


MODELS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "convolutional": (
        lambda: [nn.Conv2d(3, 4, 3), Residual(4), Residual(4), nn.Flatten(), nn.Linear(64, 3)],
        (3, 6, 6),
    ),
    "stateful": (lambda: [Stateful(), nn.ReLU(inplace=True), Stateful(), nn.Linear(6, 3)], (6,)),
    "transformer": (lambda: [WithMask(), WithMask(), LastState(), nn.Linear(4, 3)], (5, 4)),
    "tuples": (lambda: [frozen(), nn.Linear(4, 4), Doubled(), Joined(), tied(), nn.Identity(), nn.Linear(4, 3)], (4,)),
    "one tensor twice": (lambda: [nn.Linear(4, 4), Twice(), Mixed(), nn.Linear(4, 3)], (4,)),
    "one block": (lambda: [nn.Sequential(nn.Dropout(0.4), nn.Linear(4, 3))], (4,)),
}


def build(name: str) -> nn.Sequential:
    seed_process(7)
    return nn.Sequential(*MODELS[name][0]())


def batch(name: str, node: int, size: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(node)
    return [torch.randn(size, *MODELS[name][1], generator=draw), torch.randint(0, 3, (size,), generator=draw)]


def drawing_loss(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(output, 0.1), y) * (1 + torch.rand(()))


def sizes(node: int) -> int:
    """One is short, and one empty."""
    return {3: 2, 5: 0}.get(node, SAMPLES)


def flights(name: str) -> list[Flight]:
    return [Flight(n, sizes(n), sizes(n) / SAMPLES, batch(name, n, sizes(n))) for n in NODES]


def in_order(name: str) -> tuple[Any, list[dict[str, Tensor]]]:
    """The sums of the ordinary order, and the buffers of each virtual node."""
    model, sums = build(name), Accumulator(choose_summation(8, "bitwise"))
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    left = []
    for flight in flights(name):
        model.load_state_dict(initial)
        model.zero_grad()
        if flight.samples:
            seed_process(flight.number)
            drawing_loss(model(flight.data[0]), flight.data[1]).backward()  # type: ignore[no-untyped-call]
        left.append({key: value.clone() for key, value in model.named_buffers()})
        sums.add(flight.number, [p.grad for p in model.parameters()], weight=flight.weight)
    return sums.parts, left


def by_layers(
    name: str, carrier: Carrier | None = None, device: int = 1 << 30, live: LiveBytes | None = None
) -> tuple[Summed, Chain, list[Flight], LayerMajor]:
    carrier, chain, flying = carrier or Carrier(CPU), Chain(build(name), None), flights(name)
    layers = LayerMajor(chain, carrier, choose_summation(8, "bitwise"), Budget(device))
    with carrier.seen_by(live) if live is not None else nullcontext():
        found = layers.run(
            flying,
            lambda flight, output, rest: drawing_loss(output, *rest),
            seed=lambda flight: seed_process(flight.number),
            check=lambda: None,
        )
    return found, chain, flying, layers


def assert_same(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    assert len(ours) == len(theirs)
    for (left, a), (right, b) in zip(ours, theirs, strict=True):
        assert left == right
        for place, (x, y) in enumerate(zip(a, b, strict=True)):
            assert (x is None) == (y is None), place
            assert x is None or torch.equal(x, y), f"place {place} of {left} differs"


@pytest.mark.parametrize("name", MODELS)
def test_sums_and_buffers_are_those_of_the_ordinary_order(name: str) -> None:
    parts, left = in_order(name)
    found, chain, flying, _ = by_layers(name)
    assert_same(found.parts, parts)
    assert found.given == [any(row[place] is not None for _, row in parts) for place in range(len(found.given))]
    model = chain._model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert not any(parameter.grad is not None for parameter in model.parameters())
    for flight, theirs in zip(flying, left, strict=True):
        chain.put_buffers(flight.buffers)
        assert all(torch.equal(value, theirs[key]) for key, value in model.named_buffers())
        model.load_state_dict(before)


def test_weights_travel_twice_however_many_virtual_nodes_there_are() -> None:
    model = build("convolutional")
    whole = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    last = sum(parameter.nbytes for parameter in model[-1].parameters())
    carrier = Carrier(CPU)
    by_layers("convolutional", carrier)
    assert carrier.weight_bytes == 2 * whole - last  # whose backward pass follows at once


def test_what_is_on_the_device_is_counted_and_a_budget_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveBytes()

    def read(device: torch.device) -> Any:
        with live.pause():  # states of random streams are on the host
            return read_streams(device)

    monkeypatch.setattr(layer_major, "read_streams", read)
    _, _, _, layers = by_layers("convolutional", live=live)
    assert live.peak <= layers.peak_bytes <= 1.1 * live.peak
    by_layers("convolutional", device=layers.peak_bytes)
    with pytest.raises(ConfigurationError, match=r"block .* takes .* of the device for a virtual node of 4 samples"):
        by_layers("convolutional", device=layers.peak_bytes - 1)


class Recorded(Carrier):
    """Copies ahead beside the computation, on the lanes of a device that is played: until a copy has arrived it is not
    a number."""

    def __init__(self) -> None:
        super().__init__(CPU, ThrottledCopies(Clock(), 1e9))
        self.events: list[str] = []

    def begin(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.events.append("begin")
        return super().begin(tensors)

    def arrive(self, tensors: Sequence[Tensor]) -> None:
        self.events.append("arrive")
        super().arrive(tensors)


def repeatedly(
    name: str, carrier: Carrier, device: int, *of_each: list[Flight], live: LiveBytes | None = None
) -> tuple[Summed, LayerMajor]:
    """The sums of the last of several steps."""
    layers = LayerMajor(Chain(build(name), None), carrier, choose_summation(8, "bitwise"), Budget(device))
    for flying in of_each:
        if isinstance(carrier, Recorded):
            carrier.events.clear()
        with carrier.seen_by(live) if live is not None else nullcontext():
            found = layers.run(
                flying,
                lambda flight, output, rest: drawing_loss(output, *rest),
                seed=lambda flight: seed_process(flight.number),
                check=lambda: carrier.events.append("visit") if isinstance(carrier, Recorded) else None,
            )
    return found, layers


@pytest.mark.parametrize("name", MODELS)
def test_a_block_is_copied_while_the_one_before_is_computed_to_the_same_bits(name: str) -> None:
    carrier = Recorded()
    found, _ = repeatedly(name, carrier, 1 << 30, flights(name), flights(name))
    assert_same(found.parts, in_order(name)[0])
    if name == "transformer":
        forward, backward = ["visit"] * 4, ["visit"] * 5
        of_blocks = [["begin", *visits, "arrive"] for visits in (*[forward] * 3, *[backward] * 3)]
        assert carrier.events == [*chain.from_iterable(of_blocks), *backward]


def test_a_block_that_does_not_fit_beside_another_is_not_copied_ahead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    live, carrier, name = LiveBytes(), Recorded(), "convolutional"

    def read(device: torch.device) -> Any:
        with live.pause():
            return read_streams(device)

    monkeypatch.setattr(layer_major, "read_streams", read)
    _, beside = repeatedly(name, carrier, 1 << 30, flights(name), flights(name), live=live)
    begun = carrier.events.count("begin")
    assert f"the device holds {format_bytes(beside.peak_bytes)} at most" in caplog.text
    _, alone = repeatedly(name, Carrier(CPU), 1 << 30, flights(name))
    assert alone.peak_bytes < live.peak <= beside.peak_bytes <= 1.1 * live.peak
    for device, count in ((beside.peak_bytes, begun), (beside.peak_bytes - 1, begun - 1)):
        found, layers = repeatedly(name, carrier, device, flights(name), flights(name))
        assert_same(found.parts, in_order(name)[0])
        assert carrier.events.count("begin") == count
        assert layers.peak_bytes <= device


def test_a_block_that_was_copied_ahead_makes_room_for_a_larger_micro_batch() -> None:
    def larger() -> list[Flight]:
        return [Flight(1, 8, 1.0, batch("convolutional", 1, 8)), *flights("convolutional")[1:]]

    wanted, alone = repeatedly("convolutional", Carrier(CPU), 1 << 30, larger())
    steps = flights("convolutional"), flights("convolutional"), larger()
    carrier = Recorded()
    found, layers = repeatedly("convolutional", carrier, alone.peak_bytes, *steps)
    assert_same(found.parts, wanted.parts)
    assert layers.peak_bytes == alone.peak_bytes
    assert 0 < carrier.events.count("begin") == carrier.events.count("arrive")


def shared_parameter() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


def outside() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.scale = nn.Parameter(torch.ones(1))
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.register_hook(lambda gradient: gradient)
    return model


@pytest.mark.parametrize(
    ("build_model", "sentence"),
    [
        (lambda: nn.Linear(2, 2), "the model must be an nn.Sequential, and is Linear"),
        (shared_parameter, "blocks 0 and 1 share parameter 0.weight"),
        (outside, "scale is in none of the blocks"),
        (lambda: nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), "0 is in none of the blocks"),
        (hooked, "parameter 1.weight has a gradient hook"),
    ],
    ids=["no sequence", "shared", "outside", "left out", "hooked"],
)
def test_a_model_that_is_no_sequence_of_blocks_is_refused(build_model: Callable[[], nn.Module], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        Chain(build_model(), ["1"] if "0 is" in sentence else None)


def test_an_error_in_a_block_leaves_the_model_as_it_was() -> None:
    model = build("convolutional")
    own = [*model.parameters(), *model.buffers()]
    layers = LayerMajor(Chain(model, None), Carrier(CPU), choose_summation(8, "bitwise"), Budget(1 << 30))
    wrong = [Flight(0, 2, 0.5, [torch.randn(2, 3, 9, 9), torch.zeros(2, dtype=torch.int64)])]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layers.run(wrong, lambda flight, output, rest: output, seed=lambda flight: None, check=lambda: None)
    assert all(ours is theirs for ours, theirs in zip([*model.parameters(), *model.buffers()], own, strict=True))


def test_no_weight_that_is_computed_from_others_stays_behind() -> None:
    """It would hang on the block's parameters on the device, and hold them there."""
    model = nn.Sequential(*(nn.utils.weight_norm(nn.Linear(4, 4)) for _ in range(2)))
    own = [layer.weight for layer in model]
    layers = LayerMajor(Chain(model, None), Carrier(CPU), choose_summation(8, "bitwise"), Budget(1 << 30))
    flying = [Flight(0, 2, 0.5, [torch.randn(2, 4), torch.randn(2, 4)])]
    layers.run(flying, lambda flight, output, rest: F.mse_loss(output, *rest), seed=lambda _: None, check=lambda: None)
    assert all(layer.weight is weight for layer, weight in zip(model, own, strict=True))

"""The state of a job goes through every form of it, and into every optimizer, without losing a bit."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import struct
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from virtualflow import digests, state, trees
from virtualflow.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(one: Any, other: Any, path: str = "tree") -> None:
    """Equal in type, order, shape and every bit."""
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor), path
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        assert bits(one) == bits(other), path
        return
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert [(type(key), key) for key in one] == [(type(key), key) for key in other], path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for n, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}.{n}")
    elif isinstance(one, float):
        assert struct.pack(">d", one) == struct.pack(">d", other), path
    else:
        assert one == other, path


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(trees.DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).view(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


REFUSED = "packed state"

every_text = st.text(st.characters(exclude_categories=()), max_size=8)
keys = st.one_of(every_text, st.integers(), st.integers(2**70, 2**80))
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(2**62, 2**200), st.floats(), every_text, tensors()
)
every_tree = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.lists(st.integers(0, 5), max_size=3).map(torch.Size),
        st.dictionaries(keys, st.integers(0, 5), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


@given(every_tree)
@settings(max_examples=150, deadline=None)
def test_a_tree_survives_flattening_through_json_exactly(tree: Any) -> None:
    skeleton, tensors = trees.flatten(tree)
    assert_same(tree, trees.unflatten(json.loads(json.dumps(skeleton)), tensors))


@given(every_tree)
@settings(max_examples=150, deadline=None)
def test_a_tree_survives_packing_exactly_and_the_packed_form_is_a_function_of_it(tree: Any) -> None:
    packed = trees.pack(tree)
    assert packed.dtype is torch.uint8
    assert packed.is_contiguous()
    assert packed.numel() % trees.ALIGNMENT == 0
    assert_same(tree, trees.unpack(packed))
    assert torch.equal(packed, trees.pack(tree))


@given(every_tree, st.data())
@settings(max_examples=150, deadline=None)
def test_a_packed_tree_that_was_cut_short_or_grew_is_refused(tree: Any, data: st.DataObject) -> None:
    packed = trees.pack(tree)
    with pytest.raises(ValueError, match=REFUSED):
        trees.unpack(packed[: data.draw(st.integers(0, packed.numel() - 1))])
    with pytest.raises(ValueError, match=REFUSED):
        trees.unpack(torch.cat([packed, torch.zeros(data.draw(st.integers(1, 40)), dtype=torch.uint8)]))


@given(every_tree, st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_header_is_refused(tree: Any, data: st.DataObject) -> None:
    packed = trees.pack(tree)
    header, _ = trees.encode(tree)
    position = data.draw(st.integers(0, trees.PREFIX.size - 5 + len(header)))
    if position >= trees.PREFIX.size - 4:
        position += 4  # The last field of the prefix is unused.
    packed[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match=REFUSED):
        trees.unpack(packed)


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.sampled_from([*trees.TAGS.values(), "tensor"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
        st.tuples(st.sampled_from([*trees.TAGS.values(), "tensor", "int", "float", "str"]), inner).map(list),
    ),
    max_leaves=10,
)


@given(json_values)
@settings(max_examples=200, deadline=None)
def test_whatever_else_json_holds_is_refused_as_a_value_error(value: Any) -> None:
    header = json.dumps({"tree": value, "tensors": []}).encode()
    try:
        trees.decode(header, lambda n, dtype, shape: torch.zeros(shape, dtype=dtype))
    except ValueError:
        return


NONSENSE = {
    "empty": b"",
    "list": b"[]",
    "cut": b"{",
    "no-utf8": b"\xff",
    "no-tensors": b'{"tree":null}',
    "unknown-dtype": b'{"tree":null,"tensors":[["float31",[1]]]}',
    "negative-size": b'{"tree":null,"tensors":[["float32",[-1]]]}',
    "fractional-size": b'{"tree":null,"tensors":[["float32",[1e3]]]}',
    "size-beyond-64-bits": b'{"tree":null,"tensors":[["float32",[0,99999999999999999999]]]}',
    "size-beyond-the-data": b'{"tree":null,"tensors":[["float32",[4611686018427387904]]]}',
    "dtype-is-a-list": b'{"tree":null,"tensors":[[[],[1]]]}',
    "deep-json": b'{"tree":' + b"[" * 100_000 + b"]" * 100_000 + b',"tensors":[]}',
    "deep-tree": b'{"tree":' + b'["list",' * 900 + b"1" + b"]" * 900 + b',"tensors":[]}',
    "no-such-tensor": b'{"tree":["tensor",1],"tensors":[]}',
    "short-float": b'{"tree":["float","00"],"tensors":[]}',
    "size-of-text": b'{"tree":["size","a"],"tensors":[]}',
    "unhashable-key": b'{"tree":["dict",[["list"],1]],"tensors":[]}',
}


@pytest.mark.parametrize("header", NONSENSE.values(), ids=NONSENSE.keys())
def test_a_well_framed_header_of_nonsense_is_refused(header: bytes) -> None:
    framed = trees.PREFIX.pack(trees.MAGIC, len(header), zlib.crc32(header), 0) + header
    framed += b"\0" * (-len(framed) % trees.ALIGNMENT)
    with pytest.raises(ValueError, match=r"describe a state|shape of a tensor|cut short|Expecting|decode|not an entry"):
        trees.unpack(torch.frombuffer(bytearray(framed), dtype=torch.uint8))


def test_a_packed_state_may_lie_anywhere_in_a_receive_buffer() -> None:
    tree = {"x": torch.randn(5, dtype=torch.float64), "y": torch.tensor(1 + 2j, dtype=torch.complex128)}
    packed = trees.pack(tree)
    for offset in (0, 1, 7, 16):
        buffer = torch.zeros(packed.numel() + offset, dtype=torch.uint8)
        buffer[offset:] = packed
        assert_same(tree, trees.unpack(buffer[offset:]))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"optimizer": {"state": {0: {"foo": {1, 2}}}}},
            r"^optimizer\.state\.0\.foo holds a set, which cannot be",
        ),
        ({"a": [1, (object(),)]}, r"^a\.1\.0 holds an object,"),
        ({"a": {(1, 2): 3}}, r"^a has a key of type tuple"),
        ({"a": {True: 3}}, r"^a has a key of type bool"),
        ({"a": np.zeros(3)}, r"^a holds a numpy.ndarray,"),
        (lambda: 0, r"^the state holds a function,"),
        ({"a": torch.zeros(2).to_sparse()}, r"^a holds a sparse tensor; make it dense"),
        ({"a": torch.zeros(2, device="meta")}, r"^a holds a tensor without content"),
        ({"a": nn.LazyLinear(2).weight}, r"^a holds a parameter without a shape yet"),
    ],
    ids=["set", "object", "tuple-key", "bool-key", "ndarray", "function", "sparse", "meta", "lazy"],
)
def test_what_cannot_be_saved_is_refused_by_path_and_type(tree: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trees.flatten(tree)


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(ConfigurationError, match="nested too deeply"):
        trees.flatten(tree)


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    tree = [np.float32(0.1), np.float64(0.1), np.int64(3), np.bool_(True), np.float64("nan")]
    back = trees.unpack(trees.pack(tree))
    assert [type(value) for value in back] == [float, float, int, bool, float]
    assert back[:4] == [float(np.float32(0.1)), 0.1, 3, True]
    assert math.isnan(back[4])


def test_a_snapshot_shares_nothing_with_the_original() -> None:
    tree = {"tensor": torch.zeros(3), "list": [1, {"deep": torch.ones(2)[::1]}]}
    copy = trees.snapshot(tree)
    tree["tensor"] += 1
    tree["list"].append(2)
    tree["list"][1]["deep"].zero_()
    assert_same(copy, {"tensor": torch.zeros(3), "list": [1, {"deep": torch.ones(2)}]})


# -- a job's state -------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Batch norm, a tied weight, a frozen parameter, and buffers of every sort that users register."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(6, 6, bias=False, dtype=dtype)
        self.norm = nn.BatchNorm1d(6, dtype=dtype)
        self.head = nn.Linear(6, 6, dtype=dtype)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=False)
        self.register_buffer("calls", torch.tensor(seed))
        self.register_buffer("hidden", torch.full((2,), float(seed)), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("expanded", torch.full((1,), float(seed)).expand(3))
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("later", None)
        self.note = {"seed": seed}

    def get_extra_state(self) -> Any:
        return {"note": self.note, "tensor": self.hidden + 1}

    def set_extra_state(self, value: Any) -> None:
        self.note = value["note"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.hidden *= 1.5
        self.seen = torch.cat([self.seen, torch.ones(1)])
        self.later = self.calls.float() if self.later is None else self.later + 1
        return self.head(F.relu(self.norm(self.embed(x))))


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-amsgrad-foreach": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 6, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def trained(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: weights and the rest."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_restored_job_goes_on_with_the_same_bits(make: Make, dtype: torch.dtype) -> None:
    donor, joiner = Net(0, dtype), Net(1, dtype)
    ours, theirs = make(trained(donor)), make(trained(joiner))
    our_scheduler = torch.optim.lr_scheduler.MultiStepLR(ours, [2, 4], gamma=0.5)
    their_scheduler = torch.optim.lr_scheduler.MultiStepLR(theirs, [2, 4], gamma=0.5)
    train(donor, ours, our_scheduler, range(3))
    train(joiner, theirs, their_scheduler, range(10, 11))  # A joiner's own past must not matter.
    before = {name: (id(p), p.requires_grad) for name, p in joiner.named_parameters()}

    packed = trees.pack(state.capture(donor, ours, our_scheduler, None, {"position": (1, 2)}))
    extra = state.restore(trees.unpack(packed), joiner, theirs, their_scheduler, None)

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
    state.restore(trees.unpack(trees.pack(state.capture(donor, ours, None, None, {}))), joiner, theirs, None, None)
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
    state.restore(trees.unpack(trees.pack(state.capture(donor, ours, None, None, {}))), joiner, theirs, None, None)
    assert_same(ours.state_dict(), theirs.state_dict())


def test_a_restored_job_shares_no_memory_with_the_tree() -> None:
    donor, joiner = Net(0), Net(1)
    ours, theirs = torch.optim.Adam(trained(donor)), torch.optim.Adam(trained(joiner))
    train(donor, ours, None, range(2))
    extra = {"kept": torch.zeros(1)}
    tree = state.capture(donor, ours, None, None, extra)
    expected = trees.snapshot(tree)
    state.restore(tree, joiner, theirs, None, None)
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
    tree = trees.unpack(trees.pack(state.capture(donor, ours, our_scheduler, None, {})))
    state.restore(tree, joiner, theirs, their_scheduler, None)
    train(donor, ours, our_scheduler, range(3, 6))
    train(joiner, theirs, their_scheduler, range(3, 6))
    assert digests.optimizer_digest(ours) == digests.optimizer_digest(theirs)
    assert digests.digest(donor.state_dict()) == digests.digest(joiner.state_dict())


def test_a_plateau_scheduler_that_waits_for_its_first_loss_keeps_its_infinity() -> None:
    model = Net()
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    state.restore(
        trees.unpack(trees.pack(state.capture(model, optimizer, scheduler, None, {}))),
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
    state.restore(
        trees.unpack(trees.pack(state.capture(donor, ours, None, our_scaler, {}))),
        joiner,
        theirs,
        None,
        their_scaler,
    )
    assert their_scaler.get_scale() == our_scaler.get_scale() == float(np.float32(0.1))
    with pytest.raises(ConfigurationError, match=r"^the state has a scaler and this process has none"):
        state.restore(state.capture(donor, ours, None, our_scaler, {}), joiner, theirs, None, None)


def test_a_state_of_another_model_changes_nothing() -> None:
    donor, joiner = nn.Linear(4, 2), nn.Linear(4, 3)
    tree = state.capture(donor, torch.optim.SGD(donor.parameters()), None, None, {})
    before = digests.digest(joiner.state_dict())
    with pytest.raises(ConfigurationError, match=r"parameter weight is \[3, 4\] here and \[2, 4\] there"):
        state.restore(tree, joiner, torch.optim.SGD(joiner.parameters()), None, None)
    assert digests.digest(joiner.state_dict()) == before


def test_the_layout_in_memory_stays_and_does_not_matter() -> None:
    donor = nn.Conv2d(3, 4, 3)
    joiner = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    pair = [torch.optim.SGD(m.parameters()) for m in (donor, joiner)]
    state.restore(state.capture(donor, pair[0], None, None, {}), joiner, pair[1], None, None)
    assert joiner.weight.is_contiguous(memory_format=torch.channels_last)
    assert digests.digest(donor.state_dict()) == digests.digest(joiner.state_dict())


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
        "group 0 of the optimizer holds 0.weight here where it holds 0.bias there",
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

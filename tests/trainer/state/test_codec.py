"""A tree of values and tensors goes through every form of it without losing a bit; nonsense is refused."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import assert_same
from torch import Tensor, nn

from tiers import examples
from virtualflow.errors import ConfigurationError
from virtualflow.state import codec

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(codec.DTYPES.values())))
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
@settings(max_examples=examples(150), deadline=None)
def test_a_tree_survives_flattening_through_json_exactly(tree: Any) -> None:
    skeleton, tensors = codec.flatten(tree)
    assert_same(tree, codec.unflatten(json.loads(json.dumps(skeleton)), tensors))


@given(every_tree)
@settings(max_examples=examples(150), deadline=None)
def test_a_tree_survives_packing_exactly_and_the_packed_form_is_a_function_of_it(tree: Any) -> None:
    packed = codec.pack(tree)
    assert packed.dtype is torch.uint8
    assert packed.is_contiguous()
    assert packed.numel() % codec.ALIGNMENT == 0
    assert_same(tree, codec.unpack(packed))
    assert torch.equal(packed, codec.pack(tree))


@given(every_tree, st.data())
@settings(max_examples=examples(150), deadline=None)
def test_a_packed_tree_that_was_cut_short_or_grew_is_refused(tree: Any, data: st.DataObject) -> None:
    packed = codec.pack(tree)
    with pytest.raises(ValueError, match=REFUSED):
        codec.unpack(packed[: data.draw(st.integers(0, packed.numel() - 1))])
    with pytest.raises(ValueError, match=REFUSED):
        codec.unpack(torch.cat([packed, torch.zeros(data.draw(st.integers(1, 40)), dtype=torch.uint8)]))


@given(every_tree, st.data())
@settings(max_examples=examples(150), deadline=None)
def test_a_damaged_header_is_refused(tree: Any, data: st.DataObject) -> None:
    packed = codec.pack(tree)
    header, _ = codec.encode(tree)
    position = data.draw(st.integers(0, codec.PREFIX.size - 5 + len(header)))
    if position >= codec.PREFIX.size - 4:
        position += 4  # The last field of the prefix is unused.
    packed[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match=REFUSED):
        codec.unpack(packed)


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.sampled_from([*codec.TAGS.values(), "tensor"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
        st.tuples(st.sampled_from([*codec.TAGS.values(), "tensor", "int", "float", "str"]), inner).map(list),
    ),
    max_leaves=10,
)


@given(json_values)
@settings(max_examples=examples(200), deadline=None)
def test_whatever_else_json_holds_is_refused_as_a_value_error(value: Any) -> None:
    header = json.dumps({"tree": value, "tensors": []}).encode()
    try:
        codec.decode(header, lambda n, dtype, shape: torch.zeros(shape, dtype=dtype))
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
    "deep-tree": b'{"tree":' + b'["list",' * 101 + b"1" + b"]" * 101 + b',"tensors":[]}',
    "no-such-tensor": b'{"tree":["tensor",1],"tensors":[]}',
    "short-float": b'{"tree":["float","00"],"tensors":[]}',
    "size-of-text": b'{"tree":["size","a"],"tensors":[]}',
    "unhashable-key": b'{"tree":["dict",[["list"],1]],"tensors":[]}',
}


@pytest.mark.parametrize("header", NONSENSE.values(), ids=NONSENSE.keys())
def test_a_well_framed_header_of_nonsense_is_refused(header: bytes) -> None:
    framed = codec.PREFIX.pack(codec.MAGIC, len(header), zlib.crc32(header), 0) + header
    framed += b"\0" * (-len(framed) % codec.ALIGNMENT)
    with pytest.raises(ValueError, match=r"describe a state|shape of a tensor|cut short|Expecting|decode|not an entry"):
        codec.unpack(torch.frombuffer(bytearray(framed), dtype=torch.uint8))


def test_a_packed_state_may_lie_anywhere_in_a_receive_buffer() -> None:
    tree = {"x": torch.randn(5, dtype=torch.float64), "y": torch.tensor(1 + 2j, dtype=torch.complex128)}
    packed = codec.pack(tree)
    for offset in (0, 1, 7, 16):
        buffer = torch.zeros(packed.numel() + offset, dtype=torch.uint8)
        buffer[offset:] = packed
        assert_same(tree, codec.unpack(buffer[offset:]))


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
        codec.flatten(tree)


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(ConfigurationError, match="nested too deeply"):
        codec.flatten(tree)


def test_what_is_nested_as_deeply_as_can_be_packed_can_be_unpacked_further_down_the_stack() -> None:
    def nested(depth: int) -> Any:
        return {"x": nested(depth - 1)} if depth else 1

    def below(frames: int, packed: torch.Tensor) -> Any:
        return below(frames - 1, packed) if frames else codec.unpack(packed)

    assert below(300, codec.pack(nested(codec.MAX_DEPTH))) == nested(codec.MAX_DEPTH)
    with pytest.raises(ConfigurationError, match="nested too deeply"):
        codec.pack(nested(codec.MAX_DEPTH + 1))


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    tree = [np.float32(0.1), np.float64(0.1), np.int64(3), np.bool_(True), np.float64("nan")]
    back = codec.unpack(codec.pack(tree))
    assert [type(value) for value in back] == [float, float, int, bool, float]
    assert back[:4] == [float(np.float32(0.1)), 0.1, 3, True]
    assert math.isnan(back[4])


def test_a_snapshot_shares_nothing_with_the_original() -> None:
    tree = {"tensor": torch.zeros(3), "list": [1, {"deep": torch.ones(2)[::1]}]}
    copy = codec.snapshot(tree)
    tree["tensor"] += 1
    tree["list"].append(2)
    tree["list"][1]["deep"].zero_()
    assert_same(copy, {"tensor": torch.zeros(3), "list": [1, {"deep": torch.ones(2)}]})

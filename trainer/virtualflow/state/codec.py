"""Nests of plain values and tensors as bytes and back, exact to the bit: what every copy of a state is made by.

Workers hand states to each other, checkpoints hold them and evaluations gather results. So there is one description
(a JSON skeleton beside a list of tensors) for all of them; it never pickles, and what it cannot describe exactly is
refused by name instead of being lost silently.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from virtualflow.errors import ConfigurationError

Json: TypeAlias = "bool | int | float | str | list[Json] | None"
Tree: TypeAlias = Any

SEQUENCES: dict[str, type[Any]] = {"list": list, "tuple": tuple, "size": torch.Size}
MAPPINGS: dict[str, type[Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
"""Besides the plain ones only what torch's own ``state_dict()`` hold: ``MultiStepLR`` keeps a ``Counter``."""
TAGS = {kind: tag for tag, kind in (SEQUENCES | MAPPINGS).items()}

# fmt: off
_DTYPE_NAMES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
    "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)
# fmt: on
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
"""The dtypes whose elements are whole bytes and nothing else, by name (quantized ones have a scale too)."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAGIC = b"vfstate1"
PREFIX = struct.Struct("<8sQII")
"""Magic, length of the header, CRC-32 of the header, zero."""
ALIGNMENT = 16
"""Of every tensor in a packed state: the size of the largest element, so that views need no copy."""
MAX_DEPTH = 100
"""Nests within each other. Python's own limit counts the caller's frames too: what one worker can pack, every other one
must be able to unpack."""


def flatten(tree: Tree, *, canonical: bool = False) -> tuple[Json, list[Tensor]]:
    """Split a nest of dicts (with ``str`` or ``int`` keys), lists, tuples, plain values and tensors in two.

    The first is JSON, the second the tensors (references) in the order in which the first names them. Numbers
    are kept exactly (infinities and the bits of NaN too), and numpy's scalars become Python's. ``canonical``
    sorts the keys of every dict, for digests. ConfigurationError, with the path and the type, for anything
    else.
    """
    tensors: list[Tensor] = []
    return _describe(tree, "", tensors, canonical, MAX_DEPTH), tensors


def unflatten(skeleton: Json, tensors: list[Tensor]) -> Tree:
    try:
        return _rebuild(skeleton, tensors, MAX_DEPTH)
    except (TypeError, struct.error) as error:
        raise ValueError(f"this does not describe a state: {error}") from None


def encode(tree: Tree) -> tuple[bytes, list[Tensor]]:
    """An ASCII header that describes the tree and its tensors' dtypes and shapes, and the tensors."""
    skeleton, tensors = flatten(tree)
    described = [[NAMES[tensor.dtype], list(tensor.shape)] for tensor in tensors]
    return json.dumps({"tree": skeleton, "tensors": described}, separators=(",", ":")).encode(), tensors


def decode(header: bytes, tensors: Callable[[int, torch.dtype, torch.Size], Tensor]) -> Tree:
    """The tree that ``encode`` described; ``tensors`` gives the n-th tensor. ValueError if it described
    none.
    """
    try:
        content = json.loads(header)
        skeleton, described = content["tree"], content["tensors"]
        given = [tensors(n, DTYPES[dtype], _shape(shape)) for n, (dtype, shape) in enumerate(described)]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the header does not describe a state: {error!r}") from None
    return unflatten(skeleton, given)


def pack(tree: Tree, room: Tensor | None = None) -> Tensor:
    """The tree as one contiguous ``uint8`` tensor on the CPU; every tensor in it is copied exactly once.

    It is written into ``room``, which an earlier call has returned and nobody reads any more, if that is large enough.

    Layout: PREFIX, header (see ``encode``), then the tensors' bytes, each padded with zeros to ALIGNMENT. The
    CRC guards the header, that is the structure; the tensors' own bytes rely on the transport's checksum, as
    gradients do.
    """
    header, tensors = encode(tree)
    offsets, total = [], _aligned(PREFIX.size + len(header))
    for tensor in tensors:
        offsets.append(total)
        total += _aligned(tensor.numel() * tensor.itemsize)
    if room is None or room.numel() < total:
        room = torch.empty(total, dtype=torch.uint8)
    packed = room[:total]
    head = bytearray(PREFIX.pack(MAGIC, len(header), zlib.crc32(header), 0) + header)
    packed[: len(head)] = torch.frombuffer(head, dtype=torch.uint8)
    packed[len(head) : _aligned(len(head))] = 0
    for offset, tensor in zip(offsets, tensors, strict=True):
        end = offset + tensor.numel() * tensor.itemsize
        packed[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        packed[end : _aligned(end)] = 0
    return packed


def unpack(packed: Tensor) -> Tree:
    """The tree in a packed state; its tensors are views of ``packed`` where that is aligned.

    ValueError if it was cut short, is longer than it should be, or its structure is damaged.
    """
    if packed.dtype is not torch.uint8 or packed.dim() != 1 or packed.device.type != "cpu":
        raise ValueError("a packed state is one row of bytes on the CPU")
    if not packed.is_contiguous() or packed.storage_offset() % ALIGNMENT or packed.data_ptr() % ALIGNMENT:
        packed = packed.clone(memory_format=torch.contiguous_format)
    if packed.numel() < PREFIX.size:
        raise ValueError(f"a packed state is longer than {packed.numel()} bytes")
    magic, length, checksum, _ = PREFIX.unpack(packed[: PREFIX.size].numpy().tobytes())
    if magic != MAGIC or length > packed.numel() - PREFIX.size:
        raise ValueError("this is not a packed state, or it was cut short")
    header = packed[PREFIX.size : PREFIX.size + length].numpy().tobytes()
    if zlib.crc32(header) != checksum:
        raise ValueError("the header of the packed state is damaged")
    start = _aligned(PREFIX.size + length)

    def take(_: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        nonlocal start
        begin, end = start, start + math.prod(shape) * dtype.itemsize
        if end > packed.numel():
            raise ValueError("the packed state was cut short")
        start = _aligned(end)
        try:
            return packed[begin:end].view(dtype).view(shape)
        except RuntimeError as error:  # Such as dimensions whose product overflows, with a zero among them.
            raise ValueError(f"the packed state has an impossible tensor: {error}") from None

    tree = decode(header, take)
    if start != packed.numel():
        raise ValueError(f"the packed state has {packed.numel()} bytes instead of {start}")
    return tree


def snapshot(tree: Tree) -> Tree:
    """A copy of the tree, every tensor contiguous on the CPU: the original may change from now on."""
    skeleton, tensors = flatten(tree)
    return unflatten(skeleton, [torch.empty(t.shape, dtype=t.dtype).copy_(t) for t in tensors])


def storable(tensor: Tensor, path: str) -> Tensor:
    """A plain reference to a tensor that is nothing but its bytes; ConfigurationError for any other."""
    problem = None
    if is_lazy(tensor):
        problem = "a parameter without a shape yet; run one batch through the model first"
    elif tensor.layout is not torch.strided:
        problem = "a sparse tensor; make it dense"
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        problem = f"a tensor of the class {type(tensor).__name__}; only plain tensors can be saved"
    elif tensor.dtype not in NAMES:
        problem = f"a tensor of {tensor.dtype}, which cannot be saved byte by byte"
    elif tensor.is_meta:
        problem = "a tensor without content (on the meta device); materialize it first"
    if problem:
        raise ConfigurationError(f"{path or 'the state'} holds {problem}")
    return tensor.detach()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _shape(described: Any) -> torch.Size:
    if type(described) is not list or not all(type(n) is int and 0 <= n < 2**63 for n in described):
        raise ValueError(f"{described!r} is not the shape of a tensor")
    return torch.Size(described)


def _describe(value: Tree, path: str, tensors: list[Tensor], canonical: bool, depth: int) -> Json:
    kind = type(value)
    if value is None or kind is bool:
        return value  # type: ignore[no-any-return]
    if kind is int:
        # Python refuses to print or read very long decimal numbers; hexadecimal has no limit.
        return value if abs(value) < 2**63 else ["int", hex(value)]
    if kind is float:
        return value if math.isfinite(value) else ["float", struct.pack(">d", value).hex()]
    if kind is str:
        # A pair of lone surrogates would come back from JSON as one character.
        surrogates = not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value)
        return ["str", value.encode("utf-8", "surrogatepass").hex()] if surrogates else value
    if isinstance(value, Tensor):
        tensors.append(storable(value, path))
        return ["tensor", len(tensors) - 1]
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float, str):
        return _describe(value.item(), path, tensors, canonical, depth)
    if kind in TAGS and not depth:
        raise ConfigurationError("the state is nested too deeply to be saved; does it contain itself?")
    if kind in TAGS and not issubclass(kind, dict):
        items = enumerate(value)
        return [TAGS[kind], *(_describe(item, _join(path, n), tensors, canonical, depth - 1) for n, item in items)]
    if kind in TAGS:
        for key in value:
            if type(key) not in (str, int):
                raise ConfigurationError(
                    f"{path or 'the state'} has a key of type {type(key).__name__}, which cannot "
                    "be saved without pickle; use strings or integers"
                )
        keys = sorted(value, key=lambda key: (type(key).__name__, key)) if canonical else list(value)
        pairs: list[Json] = []
        for key in keys:
            described = _describe(value[key], _join(path, key), tensors, canonical, depth - 1)
            pairs.append([_describe(key, path, tensors, canonical, depth - 1), described])
        return [TAGS[kind], *pairs]
    raise ConfigurationError(
        f"{path or 'the state'} holds {_article(kind)}, which cannot be saved without pickle; use "
        "tensors, numbers, strings, None, and lists, tuples or dicts of them"
    )


def _rebuild(node: Json, tensors: list[Tensor], depth: int) -> Tree:
    match node:
        case None | bool() | int() | float() | str():
            return node
        case ["tensor", int(index)] if 0 <= index < len(tensors):
            return tensors[index]
        case ["int", str(digits)]:
            return int(digits, 16)
        case ["float", str(digits)]:
            return struct.unpack(">d", bytes.fromhex(digits))[0]
        case ["str", str(digits)]:
            return bytes.fromhex(digits).decode("utf-8", "surrogatepass")
        case [str(tag), *_] if not depth and tag in TAGS.values():
            raise ValueError("this is nested too deeply to describe a state")
        case [str(tag), *items] if tag in SEQUENCES:
            return SEQUENCES[tag]([_rebuild(item, tensors, depth - 1) for item in items])
        case [str(tag), *pairs] if tag in MAPPINGS:
            mapping = MAPPINGS[tag]()
            for pair in pairs:
                match pair:
                    case [key, value]:
                        mapping[_rebuild(key, tensors, depth - 1)] = _rebuild(value, tensors, depth - 1)
                    case _:
                        raise ValueError(f"{pair!r} is not an entry of a dict")
            return mapping
    raise ValueError(f"{str(node)[:80]} does not describe a state")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _article(kind: type[Any]) -> str:
    noun = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"

"""Everything that a step depends on, as one tree of plain values and tensors, exact to the bit.

A donor sends it to a joiner, and a checkpoint holds it; afterwards the receiver must go on with the very same
bits as if it had trained all along. So there is one description of the state (a JSON skeleton beside a list
of tensors) for both ways, it never pickles, and what it cannot describe exactly is refused by name instead of
being lost silently.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

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


class Stateful(Protocol):
    """What schedulers and gradient scalers have in common."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that it keeps from step to step."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from there."""
        ...


# -- trees --------------------------------------------------------------------------------------------------


def flatten(tree: Tree, *, canonical: bool = False) -> tuple[Json, list[Tensor]]:
    """Split a nest of dicts (with ``str`` or ``int`` keys), lists, tuples, plain values and tensors in two.

    The first is JSON, the second the tensors (references) in the order in which the first names them. Numbers
    are kept exactly (infinities and the bits of NaN too), and numpy's scalars become Python's. ``canonical``
    sorts the keys of every dict, for digests. ConfigurationError, with the path and the type, for anything
    else.
    """
    tensors: list[Tensor] = []
    try:
        return _describe(tree, "", tensors, canonical), tensors
    except RecursionError:
        raise ConfigurationError("the state is nested too deeply to be saved; does it contain itself?") from None


def unflatten(skeleton: Json, tensors: list[Tensor]) -> Tree:
    """The tree that ``flatten`` described, around these tensors; ValueError if it described none."""
    try:
        return _rebuild(skeleton, tensors)
    except (RecursionError, TypeError, struct.error) as error:
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


def pack(tree: Tree) -> Tensor:
    """The tree as one contiguous ``uint8`` tensor on the CPU; every tensor in it is copied exactly once.

    Layout: PREFIX, header (see ``encode``), then the tensors' bytes, each padded with zeros to ALIGNMENT. The
    CRC guards the header, that is the structure; the tensors' own bytes rely on the transport, as gradients
    do.
    """
    header, tensors = encode(tree)
    offsets, total = [], _aligned(PREFIX.size + len(header))
    for tensor in tensors:
        offsets.append(total)
        total += _aligned(tensor.numel() * tensor.itemsize)
    packed = torch.empty(total, dtype=torch.uint8)
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


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _shape(described: Any) -> torch.Size:
    if type(described) is not list or not all(type(n) is int and 0 <= n < 2**63 for n in described):
        raise ValueError(f"{described!r} is not the shape of a tensor")
    return torch.Size(described)


def _describe(value: Tree, path: str, tensors: list[Tensor], canonical: bool) -> Json:
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
        tensors.append(_storable(value, path))
        return ["tensor", len(tensors) - 1]
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float, str):
        return _describe(value.item(), path, tensors, canonical)
    if kind in TAGS and not issubclass(kind, dict):
        items = enumerate(value)
        return [TAGS[kind], *(_describe(item, _join(path, n), tensors, canonical) for n, item in items)]
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
            described = _describe(value[key], _join(path, key), tensors, canonical)
            pairs.append([_describe(key, path, tensors, canonical), described])
        return [TAGS[kind], *pairs]
    raise ConfigurationError(
        f"{path or 'the state'} holds {_article(kind)}, which cannot be saved without pickle; use "
        "tensors, numbers, strings, None, and lists, tuples or dicts of them"
    )


def _rebuild(node: Json, tensors: list[Tensor]) -> Tree:
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
        case [str(tag), *items] if tag in SEQUENCES:
            return SEQUENCES[tag]([_rebuild(item, tensors) for item in items])
        case [str(tag), *pairs] if tag in MAPPINGS:
            mapping = MAPPINGS[tag]()
            for pair in pairs:
                match pair:
                    case [key, value]:
                        mapping[_rebuild(key, tensors)] = _rebuild(value, tensors)
                    case _:
                        raise ValueError(f"{pair!r} is not an entry of a dict")
            return mapping
    raise ValueError(f"{str(node)[:80]} does not describe a state")


def _storable(tensor: Tensor, path: str) -> Tensor:
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


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _article(kind: type[Any]) -> str:
    noun = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


# -- the state of a job -------------------------------------------------------------------------------------


def capture(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Stateful | None,
    scaler: Stateful | None,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """The whole state between two steps, by reference: ``pack`` or ``snapshot`` it before the next step.

    Buffers come from ``named_buffers``, so those that ``state_dict`` leaves out (``persistent=False``) are in
    it; the ``state_dict`` adds what neither parameters nor buffers hold (``get_extra_state``, entries of
    custom hooks).
    """
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    state = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # A few optimizers keep scalars on the CPU beside parameters of an accelerator; the receiver must do the
    # same.
    hosted = [
        [n, key]
        for n, parameter in enumerate(parameters)
        for key, value in _entries(state["state"].get(n))
        if isinstance(value, Tensor) and value.device.type == "cpu" != parameter.device.type
    ]
    return {
        "parameters": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "other": {name: value for name, value in model.state_dict().items() if name not in known},
        "optimizer": state,
        "hosted": hosted,
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "extra": extra,
    }


def _entries(state: Any) -> list[tuple[Any, Any]]:
    return list(state.items()) if isinstance(state, dict) else []


def restore(
    tree: dict[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Stateful | None,
    scaler: Stateful | None,
) -> dict[str, Any]:
    """Put a captured state into these objects, bit for bit, and return its ``extra``.

    Parameters and buffers are overwritten in place and keep their identity, device, layout and
    ``requires_grad``; nothing here aliases the tree afterwards. ConfigurationError, before anything has
    changed, if the state does not fit.
    """
    parameters = dict(model.named_parameters())
    _check_fit(tree, model, optimizer, {"scheduler": scheduler, "scaler": scaler})
    with torch.no_grad():
        for name, parameter in parameters.items():
            _overwrite(parameter, tree["parameters"][name])
        _restore_buffers(model, tree["buffers"])
        if tree["other"]:
            # Whatever a module stores in its own way, it loads in its own way; its tensors are in place
            # already.
            model.load_state_dict({**model.state_dict(), **snapshot(tree["other"])})
    _restore_optimizer(optimizer, snapshot(tree["optimizer"]), {(n, key) for n, key in tree["hosted"]})
    for part, saved in ((scheduler, tree["scheduler"]), (scaler, tree["scaler"])):
        if part is not None:
            part.load_state_dict(snapshot(saved))
    extra: dict[str, Any] = tree["extra"]
    return extra


def _check_fit(
    tree: dict[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: dict[str, Stateful | None],
) -> None:
    def described(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"parameters": {name: _tensor_signature(tensor) for name, tensor in tensors.items()}}

    problem = difference(described(dict(model.named_parameters())), described(tree["parameters"]))
    if problem:
        raise ConfigurationError(f"the state is of another model: {problem}")
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in tree["buffers"]:
        owner, _, leaf = name.rpartition(".")
        if owner not in modules or leaf not in modules[owner]._buffers:
            raise ConfigurationError(
                f"the state has a buffer {name}, which this model does not register; register it from the start"
            )
    groups = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in tree["optimizer"]["param_groups"]]
    if groups != saved:
        raise ConfigurationError(f"the optimizer's groups hold {groups} parameters here and {saved} in the state")
    for name, part in parts.items():
        # A disabled GradScaler has an empty state, and an enabled one does not load it.
        here, there = bool(part is not None and part.state_dict()), bool(tree[name])
        if here != there:
            raise ConfigurationError(
                f"the state has {'a' if there else 'no'} {name} and this process has "
                f"{'one' if here else 'none'}; run the same script everywhere"
            )


def _overwrite(target: Tensor, source: Tensor) -> None:
    # A tensor made by expand() shows one element several times, and torch refuses to write to it as a whole.
    for dimension, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            target, source = target.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
    target.copy_(source)


def _restore_buffers(model: torch.nn.Module, saved: dict[str, Tensor]) -> None:
    buffers = dict(model.named_buffers())
    for name in sorted(buffers.keys() | saved.keys()):
        target, source = buffers.get(name), saved.get(name)
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if target is not None and source is not None:
            if target.shape != source.shape and leaf in module._non_persistent_buffers_set:
                continue  # a cache, and its module remembers elsewhere how far its own one reaches
            if target.shape == source.shape and target.dtype == source.dtype:
                _overwrite(target, source)
            else:  # Observers and caches grow while they run.
                target.data = source.to(target.device, copy=True)
            continue
        # It is None on one side: a buffer that its module fills or drops while it runs.
        device = next((tensor.device for tensor in [*module.parameters(), *model.parameters()]), None)
        setattr(module, leaf, None if source is None else source.to(device or "cpu", copy=True))


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], hosted: set[tuple[int, str]]) -> None:
    for group, loaded in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for key, value in loaded.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                loaded[key] = value.to(group[key].device)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    optimizer.load_state_dict(saved)
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return  # It knows better what its state means.
    # torch casts state to its parameter's dtype, which loses bits where an optimizer keeps another one, and
    # moves all but "step" to its device; so what it loaded is replaced by exactly what was saved.
    for index, parameter in zip(indices, parameters, strict=True):
        if isinstance(saved["state"].get(index), dict):
            optimizer.state[parameter] = {
                key: _placed(value, torch.device("cpu") if (index, key) in hosted else parameter.device)
                for key, value in saved["state"][index].items()
            }


def _placed(tree: Tree, device: torch.device) -> Tree:
    skeleton, tensors = flatten(tree)
    return unflatten(skeleton, [tensor.to(device) for tensor in tensors])


# -- comparing states ---------------------------------------------------------------------------------------


def digest(state_dict: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over the sorted entries: the UTF-8 name, then the contiguous CPU tensor's raw bytes.

    An entry that is no tensor (``get_extra_state``) counts as the JSON of its canonical ``flatten``, then its
    tensors.
    """
    digester = hashlib.sha256()
    for name in sorted(state_dict):
        digester.update(name.encode())
        value = state_dict[name]
        if isinstance(value, Tensor):
            digester.update(_raw(value))
        else:
            _digest_tree(digester, value)
    return digester.hexdigest()


def optimizer_digest(optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 (hex) over ``optimizer.state_dict()``: JSON of its canonical ``flatten``, then its tensors."""
    digester = hashlib.sha256()
    _digest_tree(digester, optimizer.state_dict())
    return digester.hexdigest()


def _digest_tree(digester: hashlib._Hash, tree: Tree) -> None:
    skeleton, tensors = flatten(tree, canonical=True)
    digester.update(json.dumps(skeleton, separators=(",", ":")).encode())
    for tensor in tensors:
        digester.update(json.dumps([NAMES[tensor.dtype], list(tensor.shape)], separators=(",", ":")).encode())
        digester.update(_raw(tensor))


def _raw(tensor: Tensor) -> Any:
    plain = _storable(tensor, "").cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


def signature(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What must be equal for one state to fit both, as JSON: names, shapes, dtypes, ties, optimizer, groups.

    Take it before training starts: modules may change the shapes of their buffers while they run.
    ConfigurationError if a parameter has no shape yet, or if the optimizer has one that the model does not
    hold (its state would be lost).
    """
    first: dict[int, str] = {}
    parameters, ties = {}, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            ties[name] = first[id(parameter)]
            continue
        first[id(parameter)] = name
        parameters[name] = {
            **_tensor_signature(_storable(parameter, f"parameter {name}")),
            "trained": parameter.requires_grad,
        }
    groups = [[first.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        for parameter, name in zip(group["params"], names, strict=True):
            if not name:
                raise ConfigurationError(
                    f"the optimizer updates a parameter of shape {list(parameter.shape)} that the model "
                    "does not hold; put both in one module, for example nn.ModuleList([model, criterion]), "
                    "and pass that as the model"
                )
    buffers = {name: _tensor_signature(_storable(buffer, f"buffer {name}")) for name, buffer in model.named_buffers()}
    return {
        "parameters": parameters,
        "ties": ties,
        "buffers": buffers,
        "optimizer": type(optimizer).__qualname__,
        "groups": groups,
    }


def difference(here: dict[str, Any], there: dict[str, Any]) -> str | None:
    """A sentence that names the first thing in which two signatures differ; None if they are equal."""
    for section, noun in (("parameters", "parameter"), ("buffers", "buffer")):
        ours, theirs = here.get(section, {}), there.get(section, {})
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if name not in ours or name not in theirs:
                one, other = ("here", "there") if name in ours else ("there", "here")
                return f"{noun} {name} exists {one} and not {other}"
            for fact, word in (("shape", str), ("dtype", str), ("trained", _trained)):
                if ours[name].get(fact) != theirs[name].get(fact):
                    return f"{noun} {name} is {word(ours[name][fact])} here and {word(theirs[name][fact])} there"
    ours, theirs = here.get("ties", {}), there.get("ties", {})
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            return f"parameter {name} is {_tie(ours.get(name))} here and {_tie(theirs.get(name))} there"
    if here.get("optimizer") != there.get("optimizer"):
        return f"the optimizer is {here.get('optimizer')} here and {there.get('optimizer')} there"
    our_groups, their_groups = here.get("groups", []), there.get("groups", [])
    if len(our_groups) != len(their_groups):
        return f"the optimizer has {len(our_groups)} parameter groups here and {len(their_groups)} there"
    for n, (our, their) in enumerate(zip(our_groups, their_groups, strict=True)):
        if len(our) != len(their):
            return f"group {n} of the optimizer holds {len(our)} parameters here and {len(their)} there"
        for one, other in zip(our, their, strict=True):
            if one != other:
                return f"group {n} of the optimizer holds {one} here where it holds {other} there"
    return None


def _tensor_signature(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _trained(value: bool) -> str:
    return "trained" if value else "frozen"


def _tie(name: str | None) -> str:
    return f"tied to {name}" if name else "not tied"

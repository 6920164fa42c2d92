"""Whether two states are equal, and whether they can be: compared without sending either of them.

That workers hold the same bits is shown by digests, which a user can recompute; that a state fits a model and an
optimizer is found before anything is changed, by signatures, and said in a sentence that names the first difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.wording import counted
from virtualflow.state.codec import NAMES, Tree, flatten, storable
from virtualflow.state.several import name_of


def digest(state_dict: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over the sorted entries: the UTF-8 name, then the contiguous CPU tensor's raw bytes.

    An entry that is no tensor (``get_extra_state``) counts as the JSON of its canonical ``codec.flatten``, then its
    tensors.
    """
    return digest_of(state_dict, state_dict.__getitem__)


def digest_of(names: Iterable[str], read: Callable[[str], Any]) -> str:
    """The same of entries that are read one after the other, so that they need not be there together."""
    digester = hashlib.sha256()
    for name in sorted(names):
        digester.update(name.encode())
        value = read(name)
        if isinstance(value, Tensor):
            digester.update(_raw(value))
        else:
            _digest_tree(digester, value)
    return digester.hexdigest()


def optimizer_digest(optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 (hex) over ``optimizer.state_dict()``: JSON of its canonical ``codec.flatten``, then its tensors."""
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
    plain = storable(tensor, "").cpu().resolve_conj().resolve_neg().contiguous()
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
            **tensor_signature(storable(parameter, f"parameter {name}")),
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
    buffers = {name: tensor_signature(storable(buffer, f"buffer {name}")) for name, buffer in model.named_buffers()}
    return {
        "parameters": parameters,
        "ties": ties,
        "buffers": buffers,
        "optimizer": name_of(optimizer),
        "groups": groups,
    }


def transient_buffers(model: torch.nn.Module) -> list[str]:
    """Names of the buffers that a model's ``state_dict()`` leaves out."""
    own = ((prefix, name) for prefix, module in model.named_modules() for name in module._non_persistent_buffers_set)
    return sorted(f"{prefix}.{name}" if prefix else name for prefix, name in own)


def tensor_signature(tensor: Tensor) -> dict[str, Any]:
    """What must be equal for the bits of one tensor to fit another one, as JSON: its shape and its dtype."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


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
    ours, theirs = here.get("placement", "device"), there.get("placement", "device")
    if ours != theirs:
        return (
            f"the optimizer is on the {ours} here and on the {theirs} there (vf.Memory(optimizer=...) stays the same "
            "for a job's life)"
        )
    ours, theirs = here.get("backward", "whole"), there.get("backward", "whole")
    if ours != theirs:
        return f"backward passes are {ours} here and {theirs} there (vf.elastic(backward=...) stays for a job's life)"
    ours, theirs = (signature.get("reduce_dtype", "the parameters' types") for signature in (here, there))
    if ours != theirs:
        return (
            f"gradients are summed in {ours} here and in {theirs} there (vf.elastic(reduce_dtype=...) stays for a "
            "job's life)"
        )
    ours, theirs = here.get("state", []), there.get("state", [])
    if ours != theirs:
        return f"state holds {', '.join(ours) or 'nothing'} here and {', '.join(theirs) or 'nothing'} there"
    ours, theirs = here.get("sums", []), there.get("sums", [])
    if ours != theirs:
        one, other = (", ".join(names) or "no buffer" for names in (ours, theirs))
        return (
            f"changes of {one} are added up here and of {other} there (vf.elastic(buffers=...) stays for a job's life)"
        )
    if here.get("verify") != there.get("verify"):
        return f"verify is {here.get('verify', 0)} here and {there.get('verify', 0)} there"
    ours, theirs = here.get("sampler"), there.get("sampler")
    if ours != theirs:
        if ours and theirs:
            return "the sampler gives another order here than there"
        return "there is a sampler here and none there" if ours else "there is no sampler here and one there"
    ours, theirs = here.get("samples", {}), there.get("samples", {})
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name, 'not told')} here and {theirs.get(name, 'not told')} there"
    our_groups, their_groups = here.get("groups", []), there.get("groups", [])
    if len(our_groups) != len(their_groups):
        return f"the optimizer has {len(our_groups)} parameter groups here and {len(their_groups)} there"
    for n, (our, their) in enumerate(zip(our_groups, their_groups, strict=True)):
        if len(our) != len(their):
            return f"group {n} of the optimizer holds {counted(len(our), 'parameter')} here and {len(their)} there"
        for one, other in zip(our, their, strict=True):
            if one != other:
                return (
                    f"group {n} of the optimizer holds {one} here where it holds {other} there (what comes from a set "
                    "has another order in each process: give parameters in a list)"
                )
    return None


def _trained(value: bool) -> str:
    return "trained" if value else "frozen"


def _tie(name: str | None) -> str:
    return f"tied to {name}" if name else "not tied"


# A short hash of whatever a script handles: equal bits give equal hashes, in every process and with any hash seed.
#
# For comparing two runs, not for trusting anybody: what a checkpoint or a report holds is hashed by ``digests``.

_BYTES = 8
_MAX_DEPTH = 50
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def content_hash(value: Any) -> str:
    """Hash a nest of tensors, arrays, plain values, containers and objects with attributes: 16 hexadecimal digits.

    The order of a mapping's keys and of a set's elements does not count. Of an object that has no attributes, only its
    class does.
    """
    return _hash(value, _MAX_DEPTH).hex()


def _hash(value: Any, depth: int) -> bytes:
    hasher = blake2b(type(value).__qualname__.encode(), digest_size=_BYTES)
    if depth == 0:
        return hasher.digest()
    if isinstance(value, Tensor):
        _add_tensor(hasher, value)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        hasher.update(f"{value.dtype}{value.shape}".encode())
        hasher.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, _PLAIN):
        hasher.update(value if isinstance(value, bytes) else repr(value).encode())
    elif isinstance(value, Mapping):
        for pair in sorted(_hash(key, depth - 1) + _hash(of, depth - 1) for key, of in value.items()):
            hasher.update(pair)
    elif isinstance(value, set | frozenset):
        for element in sorted(_hash(element, depth - 1) for element in value):
            hasher.update(element)
    elif isinstance(value, list | tuple | np.ndarray):
        for element in value:
            hasher.update(_hash(element, depth - 1))
    elif isinstance(value, np.generic):
        hasher.update(value.tobytes())
    elif hasattr(value, "__dict__"):
        hasher.update(_hash(vars(value), depth - 1))
    return hasher.digest()


def _add_tensor(hasher: blake2b, tensor: Tensor) -> None:
    hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if tensor.is_meta:
        return
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    elif plain.is_quantized:
        plain = plain.int_repr()
    plain = plain.as_subclass(Tensor).cpu().resolve_conj().resolve_neg().contiguous()
    hasher.update(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]

"""A short hash of whatever a script handles: equal bits give equal hashes, in every process and with any hash seed.

For comparing two runs, not for trusting anybody: what a checkpoint or a report holds is hashed by ``digests``.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

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

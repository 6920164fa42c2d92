"""Which bytes of a state go which way: a pure decision, the same on every member of a generation.

Large tensors of the model and the optimizer are striped: each donor sends its own share of their bytes straight from
its tensors into the receiver's. All the rest (buffers, schedulers, counters and small tensors) comes in one block from
one donor, so that nothing of it is mixed from two. Donors hold equal bits; a donor whose stripes are laid out in
another way than the first one's takes no part.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from virtualflow.state.codec import DTYPES, NAMES, Tree, storable

Path: TypeAlias = "tuple[str | int, ...]"
"""Where a tensor is in a captured state (``capture``)."""

_BOUNDARY = 64
"""Shares begin at a multiple of so many bytes of a tensor: of every element's size, and of a line of the cache."""


@dataclass(frozen=True)
class Round:
    """In one round every donor sends its share to every receiver."""

    donors: tuple[int, ...]
    receivers: tuple[int, ...]


def plan_rounds(donors: Sequence[int], receivers: Sequence[int]) -> tuple[Round, ...]:
    """Rounds (of ranks) in which all receivers come to the state of the donors.

    No round has more receivers than donors, so none takes longer than sending one state once; who has received in one
    is a donor in the next.
    """
    have, lack, rounds = tuple(donors), tuple(receivers), []
    while lack:
        served = lack[: len(have)]
        rounds.append(Round(have, served))
        have, lack = have + served, lack[len(served) :]
    return tuple(rounds)


@dataclass(frozen=True)
class Piece:
    """The bytes ``[begin, end)`` of tensor number ``index``."""

    index: int
    begin: int
    end: int


def share_out(sizes: Sequence[int], donors: int, most: int) -> list[list[Piece]]:
    """What each of ``donors`` sends of tensors of ``sizes`` bytes: equal shares of the whole, in pieces up to ``most``.

    Every byte is in exactly one piece. Shares differ by less than 64 bytes for each donor; pieces are in the order of
    the tensors.
    """
    total = sum(sizes)
    ends = [total * (donor + 1) // donors for donor in range(donors)]
    shares: list[list[Piece]] = [[] for _ in range(donors)]
    donor = start = 0
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            while donor < donors - 1 and ends[donor] <= start + begin:
                donor += 1
            # The last byte of a share is moved to the next boundary in its tensor.
            limit = size if donor == donors - 1 else -(-(ends[donor] - start) // _BOUNDARY) * _BOUNDARY
            end = min(size, limit, begin + most)
            shares[donor].append(Piece(index, begin, end))
            begin = end
        start += size
    return shares


def split(tree: dict[str, Any], least: int) -> tuple[Tree, dict[Path, Tensor]]:
    """Take the tensors that are striped out of a captured state: dense ones of ``least`` bytes or more.

    Returns:
        The tree with ``None`` in their places, the order of all dicts as it was, and the tensors (references) in an
        order that does not depend on that of the dicts.
    """
    optimizer = tree["optimizer"]
    places: dict[str, Any] = dict(tree["parameters"])
    states = {n: dict(entry) if type(entry) is dict else entry for n, entry in optimizer["state"].items()}
    found: dict[Path, Tensor] = {}
    for name, tensor in places.items():
        if _dense(tensor, least):
            found["parameters", name] = storable(tensor, f"parameters.{name}")
    for number, entry in states.items():
        for key, value in entry.items() if type(entry) is dict else ():
            if isinstance(value, Tensor) and _dense(value, least):
                path: Path = ("optimizer", "state", number, key)
                found[path] = storable(value, ".".join(map(str, path)))
    thin = {**tree, "parameters": places, "optimizer": {**optimizer, "state": states}}
    for path in found:
        _put(thin, path, None)
    return thin, {path: found[path] for path in sorted(found, key=lambda path: [str(part) for part in path])}


def describe(stripes: dict[Path, Tensor]) -> list[Any]:
    """Paths, dtypes and shapes of the stripes, as JSON."""
    return [[list(path), NAMES[tensor.dtype], list(tensor.shape)] for path, tensor in stripes.items()]


def announce(described: list[Any]) -> dict[Path, Tensor]:
    try:
        return {tuple(path): torch.empty(shape, dtype=DTYPES[dtype], device="meta") for path, dtype, shape in described}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"this does not describe the tensors of a state: {error!r}") from None


def join(thin: Tree, stripes: dict[Path, Tensor]) -> None:
    for path, tensor in stripes.items():
        _put(thin, path, tensor)


def layout_hash(described: list[Any]) -> int:
    """A number that differs when the stripes are laid out differently; at least 1, below 2**60."""
    text = json.dumps(described, separators=(",", ":"))
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16) | 1


def size_of(tensor: Tensor) -> int:
    """The bytes of a dense tensor."""
    return math.prod(tensor.shape) * tensor.itemsize


def _dense(tensor: Tensor, least: int) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_meta and tensor.dtype in NAMES
    return (
        plain
        and size_of(tensor) >= least
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def _put(tree: Tree, path: Path, value: Any) -> None:
    for part in path[:-1]:
        tree = tree[part]
    tree[path[-1]] = value

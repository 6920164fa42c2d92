"""A rolling hash of the state: in each step all workers hash the same part of it, and their headers compare.

Workers hold the same bits by construction, unless memory failed, or code changed the model on some of them only. The
state is cut into parts, as many as a sweep has steps at most, and each is hashed at the beginning of its step, so that
every byte of what is watched is compared once in a sweep, and no step takes notably longer. Large tensors are condensed
where they are, on any device: the sums of rows of 4 KiB, as integers, so that one bit that flipped always changes them;
the host hashes the sums.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from virtualflow.errors import VirtualFlowError
from virtualflow.state import share_out
from virtualflow.step.settings import StateWatchSettings
from virtualflow.transport import Collectives, gather_bytes

_ROW = 4_096
"""Bytes that are added up to one number."""
_UNDIVIDED = 1 << 62


@dataclass(frozen=True)
class Divergence:
    """Workers hold different states."""

    step: int
    """The step that was about to be made."""
    agreed: int
    """The last completed step whose state, this part of it included, all are known to have had alike."""
    tensor: str
    """The first one that differs."""
    odd: tuple[int, ...]
    """Ranks of those who differ from what more than half of all have; empty: no value has a majority."""


class Diverged(VirtualFlowError):
    """The workers' states differ; nothing of the attempt was applied."""

    def __init__(self, found: Divergence) -> None:
        super().__init__(f"{found.tensor} differs between workers before step {found.step}")
        self.found = found


class StateWatch:
    """Hashes parts of one worker's state.

    Args:
        model: its parameters and persistent buffers.
        optimizer: its state of the parameters, unless it is sharded: then each worker has another part of it.
        sharded: whether it is.
        settings: in how many parts.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool, settings: StateWatchSettings
    ) -> None:
        self._parameters = list(model.named_parameters())
        self._buffers = [
            (f"{prefix}.{attribute}" if prefix else attribute, module, attribute)
            for prefix, module in model.named_modules()
            for attribute, tensor in module._buffers.items()
            if tensor is not None and attribute not in module._non_persistent_buffers_set
        ]
        self._optimizer = None if sharded else optimizer
        tensors = [parameter for _, parameter in self._parameters]
        tensors += [module._buffers[attribute] for _, module, attribute in self._buffers]
        self._sweep = settings.sweep
        sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
        count = min(settings.sweep, max(1, sum(sizes) // settings.part))
        parts = share_out(sizes, count, _UNDIVIDED)
        self._parts = {settings.sweep * place // count: part for place, part in enumerate(parts)}
        """By the step of a sweep."""
        self._step = 0
        self._condensed: list[tuple[str, Tensor]] = []
        self._hashes: list[tuple[str, int]] = []

    def begin(self, step: int | None) -> None:
        """Take up this step's part of the present state; ``None``: there is nobody to compare with."""
        self._hashes = []
        self._step = step or 0
        self._condensed = [] if step is None else [(name, condense(raw)) for name, raw in self._part(step)]

    @property
    def value(self) -> int:
        """The hash of this step's part, as int64; 0 for none."""
        if self._condensed:
            self._hashes = [(name, hash_of(condensed)) for name, condensed in self._condensed]
            self._condensed = []
        if not self._hashes:
            return 0
        return hash_of(b"".join(struct.pack("<q", value) for _, value in self._hashes))

    def compare(self, collectives: Collectives, values: Sequence[int]) -> None:
        """See that all workers' hashes of this step's part are equal.

        Args:
            collectives: of the running generation.
            values: those of its members, in the order of their ranks.

        Raises:
            Diverged: they are not.
            CommunicatorBroken: a member was lost while they looked for the first tensor that differs.
        """
        if len(set(values)) <= 1:
            return
        mine = struct.pack(f"<{len(self._hashes)}q", *(value for _, value in self._hashes))
        told = gather_bytes(collectives, torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        rows = [struct.unpack(f"<{len(raw) // 8}q", raw.numpy().tobytes()) for raw in told]
        agreed = max(0, self._step - self._sweep - 1)
        raise Diverged(find_divergence(self._step, agreed, [name for name, _ in self._hashes], rows))

    def _part(self, step: int) -> Iterator[tuple[str, Tensor]]:
        """The bytes of this step's part, uint8 ``[n]`` each, with names."""
        for piece in self._parts.get(step % self._sweep, ()):
            if piece.index >= len(self._parameters):
                name, module, attribute = self._buffers[piece.index - len(self._parameters)]
                buffer = module._buffers[attribute]
                if buffer is not None and is_plain(buffer):
                    yield name, bytes_of(buffer)[piece.begin : piece.end]
                continue
            name, parameter = self._parameters[piece.index]
            if not is_plain(parameter):
                continue
            yield name, bytes_of(parameter)[piece.begin : piece.end]
            state: Any = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
            for key in sorted(state) if type(state) is dict else ():
                value = state[key]
                if not isinstance(value, Tensor) or not is_plain(value):
                    continue
                # What is kept for each element goes with the elements; anything else with the first of them.
                factor = value.itemsize / parameter.itemsize if value.numel() == parameter.numel() else 0
                if factor:
                    yield f"{name} ({key})", bytes_of(value)[int(piece.begin * factor) : int(piece.end * factor)]
                elif piece.begin == 0:
                    yield f"{name} ({key})", bytes_of(value)


def find_divergence(step: int, agreed: int, names: Sequence[str], rows: Sequence[Sequence[int]]) -> Divergence:
    """Name the first tensor that differs, and who stands alone with it.

    Args:
        step: see :class:`Divergence`.
        agreed: see there.
        names: of the tensors in this part.
        rows: each worker's hashes of them, in the order of the ranks; all different, or of different lengths, where
            workers do not even hold the same tensors.
    """
    usual, count = Counter(tuple(row) for row in rows).most_common(1)[0]
    odd = tuple(rank for rank, row in enumerate(rows) if tuple(row) != usual) if 2 * count > len(rows) else ()
    for place, name in enumerate(names):
        if len({row[place] if place < len(row) else None for row in rows}) > 1:
            return Divergence(step, agreed, name, odd)
    return Divergence(step, agreed, "the set of tensors that the optimizer keeps", odd)


def is_plain(tensor: Tensor) -> bool:
    """Whether its elements are bytes and nothing else (no sparse, no distributed tensor)."""
    plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    return plain and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def bytes_of(tensor: Tensor) -> Tensor:
    """Its elements in their order, as uint8 ``[n]`` on its device."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def condense(raw: Tensor) -> Tensor:
    """Sums of whole rows of uint8 ``[n]`` as int64, and the bytes behind the last one; on its device, a copy."""
    whole = len(raw) // _ROW * _ROW
    if whole == 0:
        return raw.clone()
    if raw.storage_offset() % 8:
        raw = raw.clone()
    sums = raw[:whole].view(torch.int64).view(-1, _ROW // 8).sum(1)
    return torch.cat([sums.view(torch.uint8), raw[whole:]])


def hash_of(raw: Tensor | bytes) -> int:
    """The XXH3 of bytes, or of a tensor uint8 ``[n]`` on any device, as int64."""
    plain: Any = raw.cpu().numpy() if isinstance(raw, Tensor) else raw
    return int.from_bytes(xxhash.xxh3_64_digest(plain), "little", signed=True)

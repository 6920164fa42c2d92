"""A rolling hash of the state: in each step all workers hash the same part of it, and their headers compare.

Workers hold the same bits by construction, unless memory failed, or code changed the model on some of them only. The
state is cut into parts, as many as a sweep has steps at most, and each is hashed at the beginning of its step, so that
every byte of what is watched is compared once in a sweep, and no step takes notably longer. In the first step of a
generation all buffers are compared: it averages them, which would make them equal again, and wrong.

Large tensors are condensed where they are, on any device: the sums of rows of 4 KiB, as integers, so that one bit that
flipped always changes them; the host hashes the sums.

Of a sharded optimizer no two workers hold all the same, but each state has its keepers. The first of them adds its hash
to the number that it tells, and the others take theirs away, so that the sum of all workers' numbers shows whether all
keepers of each state agree: then what is left is the hash of what all have, once for each worker.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
import xxhash
from torch import Tensor, nn

from virtualflow.errors import VirtualFlowError
from virtualflow.state import Piece, share_out
from virtualflow.step.header import StepHeader
from virtualflow.step.part import Attempt, StepPart
from virtualflow.transport import Collectives, gather_bytes

_ROW = 4_096
"""Bytes that are added up to one number."""
_UNDIVIDED = 1 << 62

SETTINGS = "the optimizer's settings"
"""Stands in a divergence for the learning rate and the other numbers of its groups."""
_PLAIN = frozenset({float, int, bool, str, tuple})


@dataclass(frozen=True)
class StateWatchSettings:
    """How often workers compare their states."""

    sweep: int = 64
    """Every byte of the state is compared once in so many steps, in so many parts at most."""
    part: int = 1 << 18
    """No part has fewer bytes of parameters and buffers: what each tensor costs would outweigh its bytes."""


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
    keepers: tuple[int, ...] = ()
    """Ranks of those who keep that tensor; empty: all do."""


class KeptPart(NamedTuple):
    """A part of a state that not all workers keep, but this one."""

    key: str
    """Which state of the parameter."""
    keepers: tuple[int, ...]
    """The ranks of all that keep it."""
    rank: int
    raw: Tensor
    """Its bytes, uint8 ``[n]``."""


class KeptStates(Protocol):
    """The optimizer's states where each worker keeps its share only."""

    def kept(self, place: int, begin: int, end: int) -> Iterator[KeptPart]:
        """What is kept here of the states of the bytes ``[begin, end)`` of a parameter, in the order of its keepers'.

        Keepers of the same state give the same parts of it, cut in the same way.
        """

    def keepers(self, place: int, begin: int, end: int) -> Iterator[tuple[int, ...]]:
        """The ranks that step each stretch of these bytes; the first of them sends the others its values."""


class Diverged(VirtualFlowError):
    """The workers' states differ; nothing of the attempt was applied."""

    def __init__(self, found: Divergence) -> None:
        super().__init__(f"{found.tensor} differs between workers before step {found.step}")
        self.found = found


class StateWatch(StepPart):
    """Hashes parts of one worker's state.

    Args:
        shares: instead of that, where it is sharded; ``None``: it is not.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        shares: KeptStates | None,
        settings: StateWatchSettings,
    ) -> None:
        self._parameters = list(model.named_parameters())
        self._buffers = [
            (f"{prefix}.{attribute}" if prefix else attribute, module, attribute)
            for prefix, module in model.named_modules()
            for attribute, tensor in module._buffers.items()
            if tensor is not None and attribute not in module._non_persistent_buffers_set
        ]
        self._optimizer, self._shares = optimizer, shares
        tensors = [parameter for _, parameter in self._parameters]
        tensors += [module._buffers[attribute] for _, module, attribute in self._buffers]
        self._sweep = settings.sweep
        sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
        count = min(settings.sweep, max(1, sum(sizes) // settings.part))
        parts = share_out(sizes, count, _UNDIVIDED)
        self._parts = {settings.sweep * place // count: part for place, part in enumerate(parts)}
        """By the step of a sweep."""
        self._all_buffers = [
            Piece(place, 0, sizes[place]) for place in range(len(self._parameters), len(tensors)) if sizes[place]
        ]
        self._enters = False
        """Whether the generation's first step is still to come."""
        self._step = 0
        self._settings: tuple[list[Any], int] = ([], 0)
        """The optimizer's, when they were hashed last, and their hash."""
        self._condensed: list[tuple[str, Tensor]] = []
        self._hashes: list[tuple[str, int]] = []
        self._condensed_shares: list[tuple[str, KeptPart]] = []
        self._kept: list[_KeptHash] = []
        self._balance = 0
        """What this worker's hashes of its shares add to its number."""

    def enter(self, assigned: Sequence[int]) -> None:
        """A generation begins, and each of its members has just got its state, or put it back."""
        self._enters = True

    def commit(self, attempt: Attempt) -> None:
        self._enters = False

    def begin(self, attempt: Attempt) -> None:
        self.take_up(attempt.number if len(attempt.holdings) > 1 else None)

    def header(self) -> Mapping[str, int]:
        return {"state": self.value}

    def check_headers(self, communicator: Collectives, headers: Sequence[StepHeader]) -> None:
        self.compare(communicator, [header.state for header in headers])

    def take_up(self, step: int | None) -> None:
        """Take up this step's part of the present state; ``None``: there is nobody to compare with."""
        self._hashes, self._kept, self._balance = [], [], 0
        self._step = step or 0
        self._condensed = [] if step is None else [(name, condense(raw)) for name, raw in self._part(step)]
        self._condensed_shares = [] if step is None or self._shares is None else [*self._part_of_shares(step)]

    @property
    def value(self) -> int:
        """The hash of this step's part, and the balance of that of the shares, as int64; 0 for none."""
        if self._condensed:
            names, condensed = zip(*self._condensed, strict=True)
            self._hashes = [*zip(names, hashes_of(condensed), strict=True)]
            self._condensed = []
        if self._step and (not self._hashes or self._hashes[-1][0] != SETTINGS):
            # As the update will find them: what is hashed above is from before the forward pass.
            self._hashes.append((SETTINGS, self._hash_settings()))
        for name, kept in self._condensed_shares:
            # With its name: else one fault in equal states of two parameters, such as their step, would cancel out.
            found = hash_of(name.encode() + struct.pack("<q", hash_of(kept.raw)))
            self._kept.append(_KeptHash(name, kept.keepers, found))
            self._balance += found * (len(kept.keepers) - 1 if kept.rank == kept.keepers[0] else -1)
        self._condensed_shares = []
        return _wrapped(self._common + self._balance)

    def _hash_settings(self) -> int:
        present = settings_of(self._optimizer)
        if present != self._settings[0]:
            self._settings = present, hash_of(repr(present).encode())
        return self._settings[1]

    @property
    def _common(self) -> int:
        return hash_of(b"".join(struct.pack("<q", value) for _, value in self._hashes)) if self._hashes else 0

    def compare(self, collectives: Collectives, values: Sequence[int]) -> None:
        """See that all workers' hashes of this step's part are equal, and those of the shares balance."""
        if self._shares is None and len(set(values)) <= 1:
            return
        if self._shares is not None and _wrapped(sum(values) - len(values) * self._common) == 0:
            return
        mine = _Account(tuple(value for _, value in self._hashes), tuple(self._kept))
        told = gather_bytes(collectives, torch.frombuffer(bytearray(msgspec.json.encode(mine)), dtype=torch.uint8))
        accounts = [msgspec.json.decode(raw.numpy().tobytes(), type=_Account) for raw in told]
        rows = [account.common for account in accounts]
        agreed = max(0, self._step - self._sweep - 1)
        # A state that differs comes first: what its keepers step with it differs for that reason.
        found = find_keepers(self._step, agreed, [account.kept for account in accounts])
        if found is None and len(set(rows)) > 1:
            found = find_divergence(self._step, agreed, [name for name, _ in self._hashes], rows)
            found = doubt_keepers(found, self._keepers_of(found.tensor))
        if found is None:
            found = Divergence(self._step, agreed, "what the workers keep of the optimizer's state", ())
        raise Diverged(found)

    def _keepers_of(self, name: str) -> Iterator[tuple[int, ...]]:
        """Who steps what this step's part has of a parameter of that name."""
        if self._shares is None:
            return
        for piece in self._parts.get(self._step % self._sweep, ()):
            if piece.index < len(self._parameters) and self._parameters[piece.index][0] == name:
                yield from self._shares.keepers(piece.index, piece.begin, piece.end)

    def _pieces(self, step: int) -> Iterator[Piece]:
        for piece in self._parts.get(step % self._sweep, ()):
            if piece.index < len(self._parameters) or not self._enters:
                yield piece
        if self._enters:
            yield from self._all_buffers

    def _part(self, step: int) -> Iterator[tuple[str, Tensor]]:
        """The bytes of this step's part, uint8 ``[n]`` each, with names."""
        for piece in self._pieces(step):
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
            if self._shares is None:
                state = self._optimizer.state.get(parameter, {})
                for key, raw in bytes_of_state(parameter, state, piece.begin, piece.end):
                    yield f"{name} ({key})", raw

    def _part_of_shares(self, step: int) -> Iterator[tuple[str, KeptPart]]:
        if self._shares is None:
            return
        for piece in self._parts.get(step % self._sweep, ()):
            if piece.index < len(self._parameters):
                name, _ = self._parameters[piece.index]
                for kept in self._shares.kept(piece.index, piece.begin, piece.end):
                    yield f"{name} ({kept.key})", kept._replace(raw=condense(kept.raw))


class _KeptHash(msgspec.Struct, frozen=True, array_like=True):
    name: str
    keepers: tuple[int, ...]
    value: int


class _Account(msgspec.Struct, frozen=True, array_like=True):
    common: tuple[int, ...]
    kept: tuple[_KeptHash, ...]


def settings_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The plain numbers, texts and tuples in an optimizer's groups, such as each one's learning rate."""
    return [v for group in optimizer.param_groups for v in group.values() if type(v) in _PLAIN]


def bytes_of_state(
    parameter: Tensor, state: Mapping[str, Any] | Any, begin: int, end: int
) -> Iterator[tuple[str, Tensor]]:
    """The bytes of an optimizer's state that belong to the bytes ``[begin, end)`` of a parameter, by key.

    What is kept for each element goes with the elements; anything else with the first of them.
    """
    for key in sorted(state) if type(state) is dict else ():
        value = state[key]
        if not isinstance(value, Tensor) or not is_plain(value):
            continue
        factor = value.itemsize / parameter.itemsize if value.numel() == parameter.numel() else 0
        if factor:
            yield key, bytes_of(value)[int(begin * factor) : int(end * factor)]
        elif begin == 0:
            yield key, bytes_of(value)


def find_divergence(step: int, agreed: int, names: Sequence[str], rows: Sequence[Sequence[int]]) -> Divergence:
    """Name the first tensor that differs, and who stands alone with it.

    Args:
        rows: each worker's hashes of them, in the order of the ranks; all different, or of different lengths, where
            workers do not even hold the same tensors.
    """
    usual, count = Counter(tuple(row) for row in rows).most_common(1)[0]
    odd = tuple(rank for rank, row in enumerate(rows) if tuple(row) != usual) if 2 * count > len(rows) else ()
    for place, name in enumerate(names):
        if len({row[place] if place < len(row) else None for row in rows}) > 1:
            return Divergence(step, agreed, name, odd)
    return Divergence(step, agreed, "the set of tensors that the optimizer keeps", odd)


def doubt_keepers(found: Divergence, stepped: Iterable[tuple[int, ...]]) -> Divergence:
    """Convict nobody who may be the only one that is right.

    A share's first keeper sends its values to all but the other keepers, which step them, too. Where it is the one
    that is wrong, all who got its values agree with it, and another keeper stands alone.

    Args:
        stepped: the keepers of each stretch of what differs.
    """
    for keepers in stepped:
        if not set(found.odd).isdisjoint(keepers[1:]):
            return replace(found, odd=(), keepers=keepers)
    return found


def find_keepers(step: int, agreed: int, told: Sequence[Sequence[_KeptHash]]) -> Divergence | None:
    """Name the first tensor of which those who keep it have different ones; of two, nobody knows who is right.

    Args:
        told: what each worker keeps of this step's part, in the order of the ranks.

    Returns:
        ``None``: all keepers agree.
    """
    found: dict[tuple[str, tuple[int, ...]], dict[int, list[int]]] = {}
    for rank, hashes in enumerate(told):
        for kept in hashes:
            found.setdefault((kept.name, kept.keepers), {}).setdefault(rank, []).append(kept.value)
    for (name, keepers), values in found.items():
        rows = [tuple(values.get(rank, ())) for rank in keepers]
        if len(set(rows)) > 1:
            usual, count = Counter(rows).most_common(1)[0]
            odd = [rank for rank, row in zip(keepers, rows, strict=True) if row != usual]
            return Divergence(step, agreed, name, tuple(odd) if 2 * count > len(rows) else (), keepers)
    return None


def _wrapped(number: int) -> int:
    """As int64, which is what goes into a header."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


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


def hashes_of(raws: Sequence[Tensor]) -> list[int]:
    """:func:`hash_of` of each, uint8 ``[n]``; what is on one accelerator comes to the host at once."""
    if raws and not raws[0].is_cpu and len({raw.device for raw in raws}) == 1:
        raws = torch.split(torch.cat(list(raws)).cpu(), [len(raw) for raw in raws])
    return [hash_of(raw) for raw in raws]


def hash_of(raw: Tensor | bytes) -> int:
    """The XXH3 of bytes, or of a tensor uint8 ``[n]`` on any device, as int64."""
    plain: Any = raw.cpu().numpy() if isinstance(raw, Tensor) else raw
    return int.from_bytes(xxhash.xxh3_64_digest(plain), "little", signed=True)

"""What travels with each step beside the gradients: the head of the exchange, metrics and buffers.

Each worker's *head* is one block of fixed size, gathered from all before anything large moves. It says which exchange
this is, which generation the worker would like to enter next, how many samples each of its virtual nodes had, which
tensors it contributes to, and its metrics. All workers read the same heads, so they agree on everything that follows
without a further round trip: the weight of the step, the metrics (combined in tree order), what to exchange at all, and
whether to switch the generation after this step.

The names of metrics and of changing buffers are not known before a model has run. They form a :class:`Schema` that only
grows: a worker that met a new name raises a flag in its head, all gather the names, and the heads are exchanged again.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor, nn

from virtualflow import messages as m
from virtualflow.errors import ConfigurationError
from virtualflow.summation import add_up

_FIXED = struct.Struct("<10q")
_NODE = struct.Struct("<q")
_PAIR = struct.Struct("<dd")


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size, types as which the bits of others can be compared."""


class Kind(IntEnum):
    """What an exchange is for."""

    TRAIN = 1
    EVALUATE = 2
    FINISH = 3


@dataclass(frozen=True)
class Schema:
    """Names that every worker knows: metrics, buffers that are averaged, buffers that are copied."""

    metrics: tuple[str, ...] = ()
    averaged: tuple[str, ...] = ()
    """Floating-point and complex buffers that have changed at least once."""
    copied: tuple[str, ...] = ()
    """Buffers of other types that have changed: the first virtual node's value counts, as rank 0's does in DDP."""

    def merge(self, other: Schema) -> Schema:
        """Both schemas in one, with names in order."""
        return Schema(*(tuple(sorted({*a, *b})) for a, b in zip(self.parts(), other.parts(), strict=True)))

    def parts(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The three kinds of names."""
        return self.metrics, self.averaged, self.copied

    def to_json(self) -> list[list[str]]:
        """As JSON."""
        return [list(part) for part in self.parts()]

    @classmethod
    def from_json(cls, value: Sequence[Sequence[str]]) -> Schema:
        """The inverse of :meth:`to_json`."""
        return cls(*(tuple(str(name) for name in part) for part in value))


@dataclass
class NodeRecord:
    """What one virtual node left behind, beside its gradients; or several that were computed as one."""

    samples: int = 0
    metrics: dict[str, float | Tensor] = field(default_factory=dict)
    averaged: dict[str, Tensor] = field(default_factory=dict)
    """New values of changed floating-point buffers."""
    copied: dict[str, Tensor] = field(default_factory=dict)
    virtual_nodes: int = 1
    """How many it is of."""


@dataclass(frozen=True)
class Head:
    """A worker's head, as read by all."""

    kind: int
    exchange: int
    layout: int
    offer: m.Generation
    wishes: bool
    more: bool
    """Whether the worker has samples for a further step of this epoch."""
    steady: bool
    """Whether its gradients stayed as autograd left them (``overlap``)."""
    saves: bool
    """Whether it will write a checkpoint after this step, for which it needs the whole state."""
    samples: tuple[int, ...]
    """Of each of its records: in a ``bitwise`` job, of each virtual node."""
    present: tuple[bool, ...]
    metrics: tuple[tuple[tuple[float, bool], ...], ...]
    """For each record and metric of the schema: the value, and whether there is one."""
    copied: bytes


@dataclass(frozen=True)
class HeadFormat:
    """Sizes of a head's parts; equal on all workers of a generation."""

    schema: Schema
    places: int
    """Tensors whose presence is told: parameters, then averaged buffers."""
    most_nodes: int
    """The largest number of virtual nodes on one worker."""
    copied_bytes: int
    alignment: int

    @property
    def size(self) -> int:
        """Bytes of a head."""
        per_node = _NODE.size + _PAIR.size * len(self.schema.metrics)
        size = _FIXED.size + (self.places + 7) // 8 + self.most_nodes * per_node + self.copied_bytes
        return -(-size // self.alignment) * self.alignment

    def tell(
        self,
        kind: Kind,
        exchange: int,
        layout: int,
        offer: m.Generation,
        wishes: bool,
        more: bool,
        steady: bool,
        present: Sequence[bool],
        records: Sequence[NodeRecord],
        saves: bool = False,
    ) -> Head:
        """What this worker has to say."""
        copied = b""
        if self.copied_bytes:
            first = next((record for record in records if record.samples), None)
            if first is not None:
                copied = b"".join(_raw(first.copied[name]) for name in self.schema.copied)
        metrics = []
        for record in records:
            values = [record.metrics.get(name) for name in self.schema.metrics]
            metrics.append(tuple((0.0, False) if value is None else (float(value), True) for value in values))
        samples = tuple(record.samples for record in records)
        flags = (wishes, more, steady, saves)
        return Head(kind, exchange, layout, offer, *flags, samples, tuple(present), tuple(metrics), copied)

    def write(self, head: Head) -> Tensor:
        """The head as a uint8 tensor ``[size]``."""
        block = bytearray(self.size)
        offer, nodes = head.offer, len(head.samples)
        numbers = (head.kind, head.exchange, head.layout, offer.incarnation, offer.counter, head.wishes, nodes)
        _FIXED.pack_into(block, 0, *numbers, head.more, head.steady, head.saves)
        at = _FIXED.size
        bits = sum(1 << place for place, there in enumerate(head.present) if there)
        block[at : at + (self.places + 7) // 8] = bits.to_bytes((self.places + 7) // 8, "little")
        at += (self.places + 7) // 8
        for samples, metrics in zip(head.samples, head.metrics, strict=True):
            _NODE.pack_into(block, at, samples)
            at += _NODE.size
            for value, there in metrics:
                _PAIR.pack_into(block, at, value, there)
                at += _PAIR.size
        if head.copied:
            block[self.size - self.copied_bytes :] = head.copied
        return torch.frombuffer(block, dtype=torch.uint8)

    def read(self, block: Tensor) -> Head:
        """The inverse of :meth:`write`."""
        raw = block.numpy().tobytes()
        kind, exchange, layout, incarnation, counter, wishes, nodes, more, steady, saves = _FIXED.unpack_from(raw, 0)
        at = _FIXED.size
        bits = int.from_bytes(raw[at : at + (self.places + 7) // 8], "little")
        at += (self.places + 7) // 8
        samples, metrics = [], []
        for _ in range(nodes):
            samples.append(_NODE.unpack_from(raw, at)[0])
            at += _NODE.size
            values = []
            for _ in self.schema.metrics:
                value, there = _PAIR.unpack_from(raw, at)
                values.append((value, there == 1.0))
                at += _PAIR.size
            metrics.append(tuple(values))
        return Head(
            kind,
            exchange,
            layout,
            m.Generation(incarnation, counter),
            bool(wishes),
            bool(more),
            bool(steady),
            bool(saves),
            tuple(samples),
            tuple(bool(bits >> place & 1) for place in range(self.places)),
            tuple(metrics),
            raw[len(raw) - self.copied_bytes :] if self.copied_bytes else b"",
        )


def combine_metrics(
    schema: Schema, virtual_nodes: int, heads: Sequence[Head], canonical: bool = True
) -> dict[str, float]:
    """Means over all samples, each virtual node weighted by its samples, summed in the shape of the tree.

    A metric that some virtual nodes did not log is the mean over those that did. Where it need not be ``canonical``,
    there may be fewer records than virtual nodes, and they are summed one after the other.
    """
    samples = [count for head in heads for count in head.samples]
    rows = [row for head in heads for row in head.metrics]
    combined = {}
    for place, name in enumerate(schema.metrics):
        weighted = {
            (node, node + 1): (rows[node][place][0] * samples[node], float(samples[node]))
            if rows[node][place][1]
            else (0.0, 0.0)
            for node in range(virtual_nodes if canonical else len(rows))
        }
        total, weight = add_up(virtual_nodes, weighted, lambda a, b: (a[0] + b[0], a[1] + b[1]), canonical)
        if weight:
            combined[name] = total / weight
    return combined


def layout_hash(parameters: Iterable[tuple[str, Tensor]], schema: Schema) -> int:
    """A number that differs when two workers would misread each other's exchange."""
    described = [[name, list(p.shape), str(p.dtype)] for name, p in parameters]
    text = json.dumps([described, schema.to_json()])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _raw(tensor: Tensor) -> bytes:
    raw: bytes = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return raw


@dataclass
class _Buffer:
    module: nn.Module
    attribute: str
    tensor: Tensor
    baseline: Tensor

    def differs(self) -> bool:
        """Whether the module's present value is another one than the baseline.

        By content: batch norm's kernels write to its statistics without raising the tensor's version counter.
        """
        present = self.module._buffers[self.attribute]
        return present is not self.tensor or not _same_bytes(self.tensor, self.baseline)

    def put(self, value: Tensor) -> None:
        """Set the module's value, in the tensor that it had at first."""
        with torch.no_grad():
            self.tensor.copy_(value)
        self.module._buffers[self.attribute] = self.tensor


@dataclass(frozen=True)
class _Routine:
    """What :meth:`BufferTracker.collect` does as long as every buffer of a schema is changed in its place."""

    schema: Schema
    buffers: list[_Buffer]
    """Of the schema: the averaged ones, then the copied ones."""
    others: list[_Buffer]
    tensors: list[Tensor]
    baselines: list[Tensor]

    def applies(self) -> bool:
        """Whether nothing else has happened."""
        for buffer in self.buffers:
            if buffer.module._buffers[buffer.attribute] is not buffer.tensor:
                return False
        return not any(buffer.differs() for buffer in self.others)

    def collect(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of the averaged and the copied buffers, and the baseline put back."""
        with torch.no_grad():
            values = [tensor.clone(memory_format=torch.contiguous_format) for tensor in self.tensors]
            if values:
                torch._foreach_copy_(self.tensors, self.baselines)
        schema, middle = self.schema, len(self.schema.averaged)
        return (
            dict(zip(schema.averaged, values[:middle], strict=True)),
            dict(zip(schema.copied, values[middle:], strict=True)),
        )


class BufferTracker:
    """Lets every virtual node start from the same buffers, and collects what it changed."""

    def __init__(self, model: nn.Module) -> None:
        self._routine: _Routine | None = None
        self._buffers: dict[str, _Buffer] = {}
        self._modules = list(model.named_modules())
        self._ties: list[tuple[str, nn.Module, str, str]] = []
        """Further places of a tensor: the name, the module and its attribute, and the name of the first place."""
        self._tied_names: set[str] = set()
        seen: dict[int, str] = {}
        for prefix, module in self._modules:
            for attribute, tensor in module._buffers.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                if id(tensor) in seen:
                    self._ties.append((name, module, attribute, seen[id(tensor)]))
                    self._tied_names.add(name)
                    continue
                seen[id(tensor)] = name
                self._buffers[name] = _Buffer(module, attribute, tensor, tensor.detach().clone())

    def begin(self) -> None:
        """Take the present values as those that every virtual node of the coming step starts from."""
        for buffer in self._buffers.values():
            if buffer.differs():
                present = buffer.module._buffers[buffer.attribute]
                buffer.tensor = buffer.tensor if present is None else present
                buffer.baseline = buffer.tensor.detach().clone()
                self._routine = None

    def collect(self, schema: Schema) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """New values of (averaged, copied) buffers after a virtual node, and the baseline put back.

        Buffers of the schema are always among them; the values are copies.
        """
        routine = self._routine
        if routine is None or routine.schema is not schema:
            routine = self._routine = self._prepare(schema)
        if routine.applies():
            return routine.collect()
        self._routine = None
        averaged: dict[str, Tensor] = {}
        copied: dict[str, Tensor] = {}
        in_place: list[_Buffer] = []
        values: list[Tensor] = []
        known = {*schema.averaged, *schema.copied}
        for name, buffer in self._buffers.items():
            if name not in known and not buffer.differs():
                continue
            present = buffer.module._buffers[buffer.attribute]
            target = averaged if _averages(buffer.tensor) else copied
            if present is buffer.tensor:
                target[name] = torch.empty_like(present, memory_format=torch.contiguous_format)
                in_place.append(buffer)
                values.append(target[name])
                continue
            value = buffer.baseline if present is None else present.detach()
            if value.shape != buffer.tensor.shape:
                if buffer.attribute not in buffer.module._non_persistent_buffers_set or name in known:
                    raise ConfigurationError(
                        f"buffer {name} has changed its shape from {list(buffer.tensor.shape)} to {list(value.shape)} "
                        "in a forward pass, so virtual nodes cannot be averaged; give it its shape from the start"
                    )
                # A cache that has grown. It stays, because its module remembers elsewhere how far it reaches.
                buffer.tensor = buffer.tensor if present is None else present
                buffer.baseline = value.clone()
                continue
            target[name] = value.to(buffer.tensor.dtype, copy=True).reshape(buffer.tensor.shape)
            buffer.put(buffer.baseline)
        if in_place:
            with torch.no_grad():
                torch._foreach_copy_(values, [buffer.tensor for buffer in in_place])
                torch._foreach_copy_([buffer.tensor for buffer in in_place], [buffer.baseline for buffer in in_place])
        return averaged, copied

    def _prepare(self, schema: Schema) -> _Routine:
        known = (*schema.averaged, *schema.copied)
        buffers = [self._buffers[name] for name in known]
        others = [buffer for name, buffer in self._buffers.items() if name not in known]
        return _Routine(schema, buffers, others, [b.tensor for b in buffers], [b.baseline for b in buffers])

    def refuse_strangers(self) -> None:
        """Refuse what no virtual node could start anew from: buffers that came, and tied ones that were replaced.

        Raises:
            ConfigurationError: there is one of them. One that is not persistent is a cache and may come.
        """
        for prefix, module in self._modules:
            for attribute, tensor in module._buffers.items():
                name = f"{prefix}.{attribute}" if prefix else attribute
                if tensor is None or name in self._buffers or name in self._tied_names:
                    continue
                if attribute not in module._non_persistent_buffers_set:
                    raise ConfigurationError(
                        f"buffer {name} came into being in a forward pass, so virtual nodes cannot start from the same "
                        "value; register it with a tensor from the start, or with persistent=False if it is a cache"
                    )
        for name, module, attribute, first in self._ties:
            if module._buffers.get(attribute) is not self._buffers[first].tensor:
                raise ConfigurationError(
                    f"buffer {name} shares its tensor with {first} and was replaced; change it in place"
                )

    def changed(self, name: str, value: Tensor) -> bool:
        """Whether ``value`` differs from what the step began with."""
        return not _same_bytes(value, self._buffers[name].baseline)

    def baseline(self, name: str) -> Tensor:
        """A copy of what a buffer began the step with."""
        return self._buffers[name].baseline.clone()

    def restore(self) -> None:
        """Put the baseline back: the attempt is void."""
        for buffer in self._buffers.values():
            if buffer.differs():
                buffer.put(buffer.baseline)

    def commit(self, values: Mapping[str, Tensor]) -> None:
        """Set the combined values; every other buffer keeps its baseline."""
        if not values:
            return
        buffers = [self._buffers[name] for name in values]
        shaped = [value.reshape(buffer.tensor.shape) for buffer, value in zip(buffers, values.values(), strict=True)]
        with torch.no_grad():
            torch._foreach_copy_([buffer.baseline for buffer in buffers], shaped)
            torch._foreach_copy_([buffer.tensor for buffer in buffers], [buffer.baseline for buffer in buffers])
        for buffer in buffers:
            buffer.module._buffers[buffer.attribute] = buffer.tensor

    def templates(self, names: Sequence[str]) -> list[Tensor]:
        """One tensor per name, with its shape, dtype and device."""
        return [self._buffers[name].tensor for name in names]

    def copied_bytes(self, schema: Schema) -> int:
        """Bytes of the copied buffers of the schema."""
        return sum(tensor.nbytes for tensor in self.templates(schema.copied))

    def read_copied(self, schema: Schema, raw: bytes) -> dict[str, Tensor]:
        """The copied buffers from a head."""
        values, at = {}, 0
        for name, tensor in zip(schema.copied, self.templates(schema.copied), strict=True):
            part = bytearray(raw[at : at + tensor.nbytes])
            at += tensor.nbytes
            if part:
                values[name] = torch.frombuffer(part, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        return values


def summed_as(dtype: torch.dtype) -> torch.dtype:
    """The type in which a buffer is averaged: half precision would overflow and lose most of what is added."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _averages(tensor: Tensor) -> bool:
    """Whether virtual nodes' values of that type are averaged (float8 has no addition)."""
    return (tensor.is_floating_point() and tensor.dtype.itemsize > 1) or tensor.is_complex()


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and type hold the same bits (a NaN equals itself here)."""
    if a.data_ptr() == b.data_ptr():
        return True
    bits = _BITS.get(a.dtype.itemsize)
    if bits is not None:
        return torch.equal(a.detach().view(bits), b.detach().view(bits))
    return torch.equal(a.detach().contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))

"""What travels with each step beside the gradients: the step header, and metrics in it.

Each worker's *step header* is one block of fixed size, gathered from all before anything large moves. It says which
synchronization this is, which generation the worker would like to enter next, how many samples each of its virtual
nodes had, which tensors it contributes to, and its metrics. All workers read the same headers, so they agree on
everything that follows without a further round trip: the weight of the step, the metrics (combined as gradients are),
what to reduce at all, and whether to switch the generation after this step.

The names of metrics and of changing buffers are not known before a model has run. They form a :class:`Schema` that only
grows: a worker that met a new name raises a flag in its header, all gather the names, and the headers are exchanged
again.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import add
from types import MappingProxyType

import torch
from torch import Tensor

from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.protocol import messages as m
from virtualflow.reduction import Summation

_FIXED = struct.Struct("<12q")
_NODE = struct.Struct("<qd")
_PAIR = struct.Struct("<dd")
_UNTOLD = -1.0
"""In place of a weight, where the script has told none."""
_NOTHING: Mapping[str, int] = MappingProxyType({})
HOW_TO_END = (
    "end the training by steps=, step.number or step.metrics: a counter of the script's own begins anew in a joiner, "
    "and a loss in the inner loop is of one worker's micro-batch alone"
)
"""For a script whose workers leave the loop after different steps."""


class Kind(IntEnum):
    """What workers exchange step headers for."""

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
        return Schema(*(tuple(sorted({*a, *b})) for a, b in zip(self.parts(), other.parts(), strict=True)))

    def parts(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        return self.metrics, self.averaged, self.copied

    def to_json(self) -> list[list[str]]:
        return [list(part) for part in self.parts()]

    @classmethod
    def from_json(cls, value: Sequence[Sequence[str]]) -> Schema:
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
    told: float | None = None
    """What the script has said that it counts by."""
    switched: frozenset[int] = frozenset()
    """The parameters, by place, that it has left frozen where they were trained before, or the other way about."""
    summed: dict[str, Tensor] = field(default_factory=dict)
    """By how much buffers have changed whose changes are added up."""

    @property
    def weight(self) -> float:
        return self.samples if self.told is None else self.told


@dataclass(frozen=True)
class StepHeader:
    """A worker's header, as read by all."""

    kind: int
    exchange: int
    layout: int
    offer: m.Generation
    wishes: bool
    more: bool
    """Whether the worker has samples for a further step of this epoch."""
    steady: bool
    """Whether its gradients stayed as autograd left them (``reduction.overlap``)."""
    saves: bool
    """Whether it will write a checkpoint after this step, for which it needs the whole state."""
    state: int
    """Its hash of this step's part of the state (``state_watch``)."""
    check: int
    """Its hash of the gradients of the virtual node that two workers compute (``spot_checker``)."""
    samples: tuple[int, ...]
    """Of each of its records: in a ``bitwise`` job, of each virtual node."""
    told: tuple[float | None, ...]
    """What the script has said that each of them counts by."""
    present: tuple[bool, ...]
    metrics: tuple[tuple[tuple[float, bool], ...], ...]
    """For each record and metric of the schema: the value, and whether there is one."""
    copied: bytes
    switched: frozenset[int] = frozenset()
    """The parameters, by place, that its first record with samples has frozen or unfrozen."""
    summed: tuple[bytes, ...] = ()
    """The changes that each of its records adds to buffers."""

    @property
    def weights(self) -> tuple[float, ...]:
        """What each record counts by: its samples, where the script has said nothing else."""
        return tuple(count if told is None else told for count, told in zip(self.samples, self.told, strict=True))


@dataclass(frozen=True)
class HeaderFormat:
    """Sizes of a header's parts; equal on all workers of a generation."""

    schema: Schema
    places: int
    """Tensors whose presence is told: parameters, then averaged buffers."""
    most_nodes: int
    """The largest number of virtual nodes on one worker."""
    copied_bytes: int
    alignment: int
    summed_bytes: int = 0
    """Of one record's changes of buffers."""

    @property
    def size(self) -> int:
        """Bytes of a header."""
        per_node = _NODE.size + _PAIR.size * len(self.schema.metrics) + self.summed_bytes
        size = _FIXED.size + 2 * self._places_bytes + self.most_nodes * per_node + self.copied_bytes
        return -(-size // self.alignment) * self.alignment

    @property
    def _places_bytes(self) -> int:
        return (self.places + 7) // 8

    def tell(
        self,
        kind: Kind,
        exchange: int,
        offer: m.Generation,
        *,
        layout: int = 0,
        wishes: bool = False,
        more: bool = False,
        steady: bool = True,
        saves: bool = False,
        said: Mapping[str, int] = _NOTHING,
        present: Sequence[bool] = (),
        records: Sequence[NodeRecord] = (),
        summed: Sequence[bytes] = (),
    ) -> StepHeader:
        """What this worker has to say; ``said``: what its parts have to say, by the header's fields."""
        copied = b""
        first = next((record for record in records if record.samples), None)
        if self.copied_bytes and first is not None:
            copied = _raw([first.copied[name] for name in self.schema.copied])
        names = self.schema.metrics
        values = iter(read_numbers([record.metrics.get(name) for record in records for name in names]))
        metrics = []
        for _ in records:
            row = [next(values) for _ in names]
            metrics.append(tuple((0.0, False) if value is None else (value, True) for value in row))
        samples = tuple(record.samples for record in records)
        return StepHeader(
            kind=kind,
            exchange=exchange,
            layout=layout,
            offer=offer,
            wishes=wishes,
            more=more,
            steady=steady,
            saves=saves,
            state=said.get("state", 0),
            check=said.get("check", 0),
            samples=samples,
            told=tuple(record.told for record in records),
            present=tuple(present),
            metrics=tuple(metrics),
            copied=copied,
            switched=frozenset() if first is None else first.switched,
            summed=tuple(summed) if self.summed_bytes else (b"",) * len(records),
        )

    def write(self, header: StepHeader) -> Tensor:
        """The header as a uint8 tensor ``[size]``."""
        block = bytearray(self.size)
        offer, nodes = header.offer, len(header.samples)
        numbers = (header.kind, header.exchange, header.layout, offer.incarnation, offer.counter, header.wishes, nodes)
        _FIXED.pack_into(block, 0, *numbers, header.more, header.steady, header.saves, header.state, header.check)
        at, width = _FIXED.size, self._places_bytes
        present = [place for place, there in enumerate(header.present) if there]
        for places in (present, header.switched):
            bits = sum([1 << place for place in places])
            block[at : at + width] = bits.to_bytes(width, "little")
            at += width
        rows = zip(header.samples, header.told, header.metrics, header.summed, strict=True)
        for samples, told, metrics, summed in rows:
            _NODE.pack_into(block, at, samples, _UNTOLD if told is None else told)
            at += _NODE.size
            for value, there in metrics:
                _PAIR.pack_into(block, at, value, there)
                at += _PAIR.size
            block[at : at + self.summed_bytes] = summed
            at += self.summed_bytes
        if header.copied:
            block[self.size - self.copied_bytes :] = header.copied
        return torch.frombuffer(block, dtype=torch.uint8)

    def read(self, block: Tensor) -> StepHeader:
        raw = block.numpy().tobytes()
        kind, exchange, layout, incarnation, counter, wishes, nodes, *rest = _FIXED.unpack_from(raw, 0)
        more, steady, saves, state, check = rest
        at, width = _FIXED.size, self._places_bytes
        bits = int.from_bytes(raw[at : at + width], "little")
        switched = int.from_bytes(raw[at + width : at + 2 * width], "little")
        at += 2 * width
        samples, told, metrics, summed = list[int](), list[float | None](), [], []
        for _ in range(nodes):
            count, weight = _NODE.unpack_from(raw, at)
            samples.append(count)
            told.append(None if weight == _UNTOLD else weight)
            at += _NODE.size
            values = []
            for _ in self.schema.metrics:
                value, there = _PAIR.unpack_from(raw, at)
                values.append((value, there == 1.0))
                at += _PAIR.size
            metrics.append(tuple(values))
            summed.append(raw[at : at + self.summed_bytes])
            at += self.summed_bytes
        return StepHeader(
            kind=kind,
            exchange=exchange,
            layout=layout,
            offer=m.Generation(incarnation, counter),
            wishes=bool(wishes),
            more=bool(more),
            steady=bool(steady),
            saves=bool(saves),
            state=state,
            check=check,
            samples=tuple(samples),
            told=tuple(told),
            present=tuple([bool(bits >> place & 1) for place in range(self.places)]),
            metrics=tuple(metrics),
            copied=raw[len(raw) - self.copied_bytes :] if self.copied_bytes else b"",
            switched=frozenset(place for place in range(self.places) if switched >> place & 1)
            if switched
            else frozenset(),
            summed=tuple(summed),
        )


def read_headers(form: HeaderFormat, gathered: Tensor, kind: Kind, number: int) -> tuple[StepHeader, ...]:
    """Read all members' headers and check that they are about the same exchange."""
    headers = tuple(form.read(block) for block in gathered)
    for header in headers:
        if {kind, header.kind} == {Kind.TRAIN, Kind.FINISH}:
            raise VirtualFlowError(f"a worker left the loop over the steps, and others go on; {HOW_TO_END}")
        if header.kind != kind or header.exchange != number:
            raise VirtualFlowError(
                "workers are at different places of the script: some train, evaluate or are through while others are "
                "not; every worker must call vf.evaluate at the same step (not only the leader), and vf.predict alike: "
                "by step.number or step.ends_epoch, since a variable of the script's own begins anew in a joiner"
            )
    return headers


def first_header(headers: Sequence[StepHeader], holdings: Sequence[Sequence[int]]) -> StepHeader:
    firsts = {}
    for header, holding in zip(headers, holdings, strict=True):
        # There are fewer records than virtual nodes where some were computed as one; that does not change who is first.
        found = next((node for node, count in zip(holding, header.samples, strict=False) if count), None)
        if found is not None:
            firsts[found] = header
    return firsts[min(firsts)]


def read_weights(headers: Sequence[StepHeader]) -> list[float]:
    weights = [weight for header in headers for weight in header.weights]
    filled = sum(count > 0 for header in headers for count in header.samples)
    told = sum(weight is not None for header in headers for weight in header.told)
    if filled == 0:
        raise ConfigurationError("a step has no samples at all; check the dataset's shards, and what collate_fn drops")
    if told not in (0, filled):
        raise ConfigurationError(
            f"step.weight was called for {told} of the {filled} micro-batches of a step; call it for each of them, or "
            "for none"
        )
    if not any(weights):
        raise ConfigurationError(
            "all micro-batches of a step weigh nothing, so there is no mean over them; leave out samples without "
            "anything that the loss is averaged over"
        )
    return weights


def combine_metrics(
    schema: Schema, summation: Summation, headers: Sequence[StepHeader], holdings: Sequence[Sequence[int]] | None = None
) -> dict[str, float]:
    """Means over all virtual nodes, each record by its weight, summed as gradients are.

    A metric that some virtual nodes did not log is the mean over those that did.

    Args:
        holdings: the virtual nodes of their records, ascending; ``None``: the records are in the order to add them up.
    """
    weights = [weight for header in headers for weight in header.weights]
    rows = [row for header in headers for row in header.metrics]
    nodes = numbered(len(rows), holdings)
    combined = {}
    for place, name in enumerate(schema.metrics):
        # Two sums at a time, as the parts of one complex number, of which each is added by itself.
        weighted = {
            (node, node + 1): complex(row[place][0] * by, by) if by and row[place][1] else 0j
            for node, row, by in zip(nodes, rows, weights, strict=True)
        }
        total = summation.add_up(weighted, add)
        if total.imag:
            combined[name] = total.real / total.imag
    return combined


def numbered(records: int, holdings: Sequence[Sequence[int]] | None) -> Sequence[int]:
    """The virtual nodes of so many records of all members; ``None``: the records are in the order to add them up."""
    return range(records) if holdings is None else [node for holding in holdings for node in holding]


def layout_hash(parameters: Iterable[tuple[str, Tensor]], schema: Schema) -> int:
    """A number that differs when two workers would misread each other's messages."""
    described = [[name, list(p.shape), str(p.dtype)] for name, p in parameters]
    text = json.dumps([described, schema.to_json()])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def read_numbers(values: Sequence[float | Tensor | None]) -> list[float | None]:
    """The numbers, in double precision.

    Tensors of an accelerator come to the host together, device by device and type by type: to read one makes the host
    wait for the device, so that each by itself would be a wait for each virtual node.
    """
    numbers: list[float | None] = []
    away: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor) and not value.is_cpu:
            away.setdefault((value.device, value.dtype), []).append(place)
            numbers.append(None)
        else:
            numbers.append(None if value is None else float(value))
    for places in away.values():
        together = read_together([value for place in places if isinstance(value := values[place], Tensor)])
        for place, number in zip(places, together, strict=True):
            numbers[place] = number
    return numbers


def read_together(tensors: Sequence[Tensor]) -> list[float]:
    """What ``float`` makes of each of these tensors of one element, one device and one type."""
    return [float(number) for number in torch.stack([tensor.detach().reshape(()) for tensor in tensors]).tolist()]


def _raw(tensors: Sequence[Tensor]) -> bytes:
    """Their bytes one behind the other; they come to the host together."""
    pieces = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    if len({piece.device for piece in pieces}) > 1:
        pieces = [piece.cpu() for piece in pieces]
    raw: bytes = torch.cat(pieces).cpu().numpy().tobytes()
    return raw

"""What the virtual nodes of one worker have left behind in an attempt at a step: sums, and what travels in the header.

Nothing here changes while it is exchanged. So if an attempt is aborted and the worker survives, what it has computed is
as good as before: the next attempt at the same step begins with it, and only what nobody has is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import or_

from torch import Tensor, nn

from virtualflow.errors import ConfigurationError
from virtualflow.reduction import (
    Accumulator,
    Early,
    Offload,
    Parts,
    Precision,
    Settled,
    Summation,
    Tensors,
    separate,
)
from virtualflow.step.buffers import SUMMED_AS, BufferTracker
from virtualflow.step.header import NodeRecord, Schema


class Contributions:
    """The contributions of one worker.

    Args:
        summed: averaged buffers that are added up with the gradients: those known when the attempt began.
    """

    def __init__(
        self,
        summation: Summation,
        buffers: BufferTracker,
        parameters: int,
        summed: tuple[str, ...] = (),
        offload: Offload | None = None,
    ) -> None:
        self.accumulator = Accumulator(summation, offload)
        """Sums of gradients, each with those of the buffers ``summed`` behind it."""
        self._sent: Early | None = None
        """What has set out before its last addition, and is in messages now."""
        self._spoiled = False
        """Whether that is not to be relied on."""
        self._summation = summation
        self._buffers = buffers
        self._count = parameters
        self._summed = summed
        self._changed: set[str] = set()
        """Which of these a virtual node has changed."""
        self._given = [False] * parameters
        """Which parameters a virtual node had a gradient for."""
        self._records: dict[int, NodeRecord] = {}

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(
            node for first in sorted(self._records) for node in range(first, first + self._records[first].virtual_nodes)
        )

    @property
    def records(self) -> list[NodeRecord]:
        return [self._records[node] for node in sorted(self._records)]

    def add(
        self,
        node: int,
        record: NodeRecord,
        gradients: Tensors,
        given: Sequence[bool],
        weight: float,
        added: Mapping[int, Tensor],
    ) -> None:
        """Add those of a virtual node, or of several that were computed as one.

        Args:
            given: which of them it had. Some of these may have set out or be added up already, and are ``None``.
        """
        sums: Tensors = self._take_buffers(record.averaged) if record.samples else [None] * len(self._summed)
        self._given = list(map(or_, self._given, given))
        self._records[node] = record
        self.accumulator.add(node, [*gradients, *sums], weight=weight, count=record.virtual_nodes, added=added)

    def add_summed(self, records: Mapping[int, NodeRecord], parts: Parts, given: Sequence[bool], unit: int) -> None:
        sums = Accumulator(self._summation)
        for node in sorted(records):
            record = self._records[node] = records[node]
            values: Tensors = self._take_buffers(record.averaged) if record.samples else [None] * len(self._summed)
            sums.add(node, values, weight=record.weight / unit)
        self._given = list(map(or_, self._given, given))
        for ((left, right), gradients), (_, buffers) in zip(parts, sums.parts, strict=True):
            self.accumulator.add(left, [*gradients, *buffers], count=right - left)

    def _take_buffers(self, averaged: dict[str, Tensor]) -> Tensors:
        """Move the values that are added up with the gradients out of what a virtual node has changed."""
        if not self._summed:
            return []
        found = {
            name: averaged.pop(name) if name in averaged else self._buffers.baseline(name) for name in self._summed
        }
        unknown = {name: value for name, value in found.items() if name not in self._changed}
        if unknown:
            self._changed |= self._buffers.changed(unknown)
        return [value.to(SUMMED_AS[value.dtype]) if value.dtype in SUMMED_AS else value for value in found.values()]

    def note_sent(self, early: Early | None, steady: bool) -> None:
        """Some gradients have set out already, and stayed ``steady`` or not: those that were sent are others then."""
        if early is not None:
            self._sent, self._spoiled = early, not steady

    def take_back(self) -> bool:
        """The exchange is aborted: put together what has been summed up. Whether it could be."""
        if self._spoiled:
            return False
        if self._sent is not None:
            for (_, tensors), row in zip(self.accumulator.parts, self._sent.rows(), strict=True):
                for place, tensor in row.items():
                    tensors[place] = tensor
            self._sent = None
        return True

    # --- for the exchange ---------------------------------------------------------------------------------------------

    def wanted_schema(self) -> Schema:
        records = self._records.values()
        metrics = {name for record in records for name in record.metrics}
        averaged = {name for record in records for name in record.averaged}
        copied = {name for record in records for name in record.copied}
        return Schema(tuple(sorted(metrics)), tuple(sorted(averaged)), tuple(sorted(copied)))

    def present(self, schema: Schema) -> list[bool]:
        """Which parameters, then averaged buffers of the schema, they have something for."""
        changed = [
            name in self._changed
            or any(
                name in record.averaged and bool(self._buffers.changed({name: record.averaged[name]}))
                for record in self._records.values()
            )
            for name in schema.averaged
        ]
        return [*self._given, *changed]

    def complete_records(self, schema: Schema) -> list[NodeRecord]:
        for record in self._records.values():
            for name in schema.copied:
                if record.samples and name not in record.copied:
                    record.copied[name] = self._buffers.baseline(name)
        return self.records

    def parts(self, schema: Schema, unit: int) -> Parts:
        """Sums of gradients, each followed by the sums of the averaged buffers over the same virtual nodes.

        Args:
            schema: it may have names that were not known when the attempt began.
        """
        self.accumulator.await_offloaded()
        new = [name for name in schema.averaged if name not in self._summed]
        if not new:
            return self.accumulator.parts
        sums = Accumulator(self._summation)
        for node in sorted(self._records):
            record = self._records[node]
            values: Tensors = [None] * len(new)
            if record.samples:
                given = [record.averaged.get(name) for name in new]
                there = [self._buffers.baseline(n) if v is None else v for n, v in zip(new, given, strict=True)]
                # They stay as they are in the record, from which the next attempt would begin.
                values = [value.to(SUMMED_AS.get(value.dtype, value.dtype), copy=True) for value in there]
            sums.add(node, values, weight=record.weight / unit, count=record.virtual_nodes)
        parts: Parts = []
        for (nodes, tensors), (_, added) in zip(self.accumulator.parts, sums.parts, strict=True):
            known = dict(zip(self._summed, tensors[self._count :], strict=True))
            by_name = {**known, **dict(zip(new, added, strict=True))}
            parts.append((nodes, [*tensors[: self._count], *(by_name[name] for name in schema.averaged)]))
        return parts


def take_gradients(
    named: Sequence[tuple[str, nn.Parameter]], settled: Settled, precision: Precision
) -> tuple[Tensors, list[bool]]:
    """Take a virtual node's gradients out of the model, so that autograd makes new tensors for the next one.

    Every gradient that is there counts, also that of a parameter that the script has frozen since its backward pass.

    Returns:
        What is still to be added up, in the types of its sums, and at which places the virtual node had a gradient.
    """
    gradients: Tensors = [parameter.grad for _, parameter in named]
    given = [gradient is not None for gradient in gradients]
    for place in settled.gone:
        given[place] = True
    for place, (name, parameter) in enumerate(named):
        gradient = gradients[place]
        if gradient is None:
            continue
        parameter.grad = None
        if place in settled.sent or place in settled.added:
            gradients[place] = None
            continue
        if gradient.is_sparse:
            raise ConfigurationError(
                f"parameter {name} has a sparse gradient, which cannot be summed canonically; make it dense "
                "(nn.Embedding(..., sparse=False))"
            )
        if gradient.requires_grad:  # after create_graph=True
            gradients[place] = gradient.detach()
    apart = separate(gradients)
    gradients.clear()  # which would keep what is cast
    return precision.cast_all(apart), given

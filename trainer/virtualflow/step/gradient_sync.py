"""Gradient synchronization, as one worker takes part in it: collect what its virtual nodes leave behind, and reduce it.

The user's code produces gradients one virtual node at a time; :class:`GradientSync` takes them over with the buffers
that have changed, exchanges the step headers, and returns the whole reduced gradient. It changes nothing of the
optimizer, and of the model only what every attempt begins with, so an attempt can be abandoned at any point and
repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.protocol import messages as m
from virtualflow.reduction import Accumulator, Overlap, Owners, Parts, Reducer, Summation, Tensors
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.step.buffers import BufferTracker, summed_as
from virtualflow.step.header import (
    HeaderFormat,
    Kind,
    NodeRecord,
    Schema,
    StepHeader,
    combine_metrics,
    layout_hash,
    read_headers,
)
from virtualflow.step.state_watch import StateWatch
from virtualflow.transport import Collectives, as_bytes, gather_bytes

Portion = Callable[[Mapping[int, Tensor]], None]
"""Told of the first reduced gradients, by place, while others are still on their way."""


@dataclass(frozen=True)
class Reduced:
    """A complete synchronization, not yet applied."""

    headers: tuple[StepHeader, ...]
    samples: int
    """Of the whole global batch."""
    metrics: dict[str, float]
    gradients: Tensors
    present: tuple[bool, ...]
    """Which parameters have a gradient, here or elsewhere."""
    buffers: dict[str, Tensor]


class GradientSync:
    """What a worker contributes to a step, and its part in the reduction.

    Args:
        model: its parameters and buffers.
        summation: the order in which virtual nodes are added up.
        micro_batch: samples of a virtual node.
        settings: how gradients travel.
    """

    def __init__(self, model: nn.Module, summation: Summation, micro_batch: int, settings: ReductionSettings) -> None:
        self.schema = Schema()
        """Names that the present attempt exchanges."""
        self.settled = Schema()
        """Names that all workers knew when the last step was committed: part of the state."""
        self.watch: StateWatch | None = None
        """Compares the state before this synchronization with the others'."""
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())
        self._buffers = BufferTracker(model)
        self._summation = summation
        self._settings = settings
        self._micro_batch = self._unit = micro_batch
        """The unit: samples of a contribution whose weight is 1; the same on all workers."""
        self._accumulator = Accumulator(summation)
        self._records: list[NodeRecord] = []
        self._summed: tuple[str, ...] = ()
        """Averaged buffers that are added up with the gradients: those known when the attempt began."""
        self._changed: set[str] = set()
        """Which of them a virtual node of this worker has changed."""
        self._first_node = self._next_node = 0
        self._reducer = Reducer(summation, settings)
        self._overlap = Overlap(self._parameters, self._reducer, settings)
        self._steady = True
        self._trained: tuple[bool, ...] = ()
        """Which of all parameters are trained in the present attempt."""
        self._layout: tuple[object, int] = (None, 0)
        self._given: list[bool] = []
        """Which of all parameters a virtual node of this worker had a gradient for."""

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def begin(self, assigned: range, most: int) -> None:
        """Start an attempt over the virtual nodes ``assigned``, where ``most`` is what any worker has."""
        self._trained = tuple(parameter.requires_grad for parameter in self._parameters)
        self._given = [False] * len(self._parameters)
        self._overlap.abandon()
        self.forget_contributions()
        self._summed, self._changed = self.schema.averaged, set()
        self._first_node = self._next_node = assigned.start
        self._steady = True
        self._unit = self._summation.unit(self._micro_batch, most)
        self._buffers.begin()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        """Forget gradients, so that autograd makes new tensors for the next virtual node."""
        # Also of those that were frozen a moment ago: optimizers step whatever has a gradient.
        for parameter in self._parameters:
            parameter.grad = None

    def expect_last(self, collectives: Collectives, ranges: Sequence[range], samples: int, of_step: int | None) -> None:
        """The last micro-batch of this worker's range is about to run, so the reduction may begin with it.

        Args:
            collectives: the communicator of the running generation, whose members are assigned ``ranges``.
            ranges: see above.
            samples: those of that micro-batch.
            of_step: those of the whole global batch, ``None`` where only the headers will tell.
        """
        self._overlap.watch(
            collectives,
            ranges,
            self._accumulator,
            last=self._next_node,
            weight=samples / self._unit,
            scale=None if of_step is None else self._unit / of_step,
        )

    def begin_late(self) -> None:
        """In place of :meth:`expect_last`: this worker's gradients are needed until all are there, so nobody begins."""
        self._steady = False

    def take(self, samples: int, metrics: dict[str, float | Tensor], virtual_nodes: int = 1) -> None:
        """Take over what the next virtual node has left in the model: gradients and changed buffers.

        Args:
            samples: how many its micro-batch had; fewer than usual weigh less, none weigh nothing.
            metrics: what the user's code has logged for it.
            virtual_nodes: how many its micro-batch stands for.
        """
        node, self._next_node = self._next_node, self._next_node + virtual_nodes
        averaged, copied = self._buffers.collect(self.schema) if samples else ({}, {})
        sums = self._take_buffers(averaged) if samples else [None] * len(self._summed)
        self._records.append(NodeRecord(samples, metrics, averaged, copied, virtual_nodes))
        under_way: frozenset[int] = frozenset()
        if self._overlap.watching:
            under_way, self._steady = self._overlap.settle()
        gradients: Tensors = []
        for index, (parameter, trained) in enumerate(zip(self._parameters, self._trained, strict=True)):
            gradient = parameter.grad if trained else None
            parameter.grad = None  # so that autograd makes a new tensor for the next virtual node
            gradients.append(gradient)
            if gradient is None:
                continue
            if gradient.is_sparse:
                raise ConfigurationError(
                    f"parameter {self._names[index]} has a sparse gradient, which cannot be summed canonically; make "
                    "it dense (nn.Embedding(..., sparse=False))"
                )
            if index in under_way:
                gradients[index] = None
            elif gradient.requires_grad:  # after backward(create_graph=True)
                gradients[index] = gradient.detach()
            self._given[index] = True
        gradients += sums
        self._accumulator.add(node, gradients, weight=samples / self._unit, count=virtual_nodes)

    def _take_buffers(self, averaged: dict[str, Tensor]) -> Tensors:
        """Move the values that are added up with the gradients out of what a virtual node has changed."""
        values: Tensors = []
        for name in self._summed:
            value = averaged.pop(name) if name in averaged else self._buffers.baseline(name)
            if name not in self._changed and self._buffers.changed(name, value):
                self._changed.add(name)
            dtype = summed_as(value.dtype)
            values.append(value if value.dtype is dtype else value.to(dtype))
        return values

    def abandon(self) -> None:
        """The attempt is aborted: leave no trace of it."""
        self._overlap.abandon()
        self._clear_gradients()
        self._buffers.restore()
        self.forget_contributions()
        # Others may not have got as far: a header's size must not depend on how far an attempt came before it broke.
        self.schema = self.settled

    def forget_contributions(self) -> None:
        """They have been reduced, or are not needed."""
        self._accumulator.clear()
        self._records = []

    # --- the synchronization ------------------------------------------------------------------------------------------

    def synchronize(
        self,
        communicator: Collectives,
        ranges: Sequence[range],
        number: int,
        offer: m.Generation,
        *,
        more: bool,
        saves: bool,
        portion: Portion | None,
    ) -> Reduced:
        """Reduce everything with the other workers; see ``Update.synchronize``."""
        self._buffers.refuse_strangers()
        headers, form = self._agree_on_headers(communicator, ranges, number, offer, more=more, saves=saves)
        samples = sum(sum(header.samples) for header in headers)
        if samples == 0:
            raise ConfigurationError("the dataset gave no samples at all; check its shards")
        present = [any(there) for there in zip(*(header.present for header in headers), strict=True)]
        count = len(self._parameters)
        scale = self._unit / samples
        steady = all(header.steady for header in headers)
        self._overlap.learn(number, (place for place in range(count) if present[place]), steady)
        if not any(present[:count]):
            raise ConfigurationError(
                "no parameter got a gradient in this step; call loss.backward() for each micro-batch of the step"
            )
        begun = self._overlap.places
        early = self._await_early(scale, steady, present, portion)
        sums = [tensor.to(summed_as(tensor.dtype)) for tensor in self._buffers.templates(self.schema.averaged)]
        reduced = self._reducer.reduce(
            communicator,
            ranges,
            self._parts(),
            templates=[*self._parameters, *sums],
            present=[there and place not in begun for place, there in enumerate(present)],
            scale=scale,
        )
        for place, tensor in early.items():
            reduced[place] = tensor
        buffers = {n: t for n, t in zip(self.schema.averaged, reduced[count:], strict=True) if t is not None}
        if form.copied_bytes:
            first = next(header for header in headers if sum(header.samples))
            buffers |= self._buffers.read_copied(self.schema, first.copied)
        metrics = combine_metrics(self.schema, self._summation, headers)
        return Reduced(headers, samples, metrics, reduced[:count], tuple(present[:count]), buffers)

    def _await_early(
        self, scale: float, steady: bool, present: Sequence[bool], portion: Portion | None
    ) -> dict[int, Tensor]:
        """Wait for the gradients that are under way; what is there before the others is a portion."""
        arrived: dict[int, Tensor] = {}
        for found, complete in self._overlap.results(scale, steady):
            there = {place: tensor for place, tensor in found.items() if present[place]}
            arrived |= there
            if there and not complete and portion is not None:
                portion(there)
        return arrived

    def _agree_on_headers(
        self,
        communicator: Collectives,
        ranges: Sequence[range],
        number: int,
        offer: m.Generation,
        *,
        more: bool,
        saves: bool,
    ) -> tuple[tuple[StepHeader, ...], HeaderFormat]:
        begun = self._overlap.under_way
        while True:
            form = self.header_format(ranges)
            mine = self._wanted_schema()
            told = form.tell(
                Kind.TRAIN,
                number,
                offer,
                layout=self._layout_hash(),
                wishes=mine.merge(self.schema) != self.schema,
                more=more,
                steady=self._steady,
                saves=saves,
                state=0 if self.watch is None else self.watch.value,
                present=self._present(),
                records=self._complete_records(),
            )
            headers: tuple[StepHeader, ...] = (told,)
            if communicator.size > 1:
                block = form.write(told)
                gathered = self._overlap.headers(block) if begun else communicator.all_gather(block)
                headers = read_headers(form, gathered, Kind.TRAIN, number)
            begun = False
            if any(header.layout != told.layout for header in headers):
                raise VirtualFlowError(
                    "the trainable parameters differ between workers in this step; freeze and unfreeze them by "
                    "step.number or step.epoch, so that all workers do the same"
                )
            if self.watch is not None:
                self.watch.compare(communicator, [header.state for header in headers])
            if not any(header.wishes for header in headers):
                return headers, form
            merged = self.schema
            for raw in gather_bytes(communicator, as_bytes(json.dumps(mine.to_json()))):
                merged = merged.merge(Schema.from_json(json.loads(raw.numpy().tobytes())))
            self.schema = merged

    def _layout_hash(self) -> int:
        key = (self._trained, self.schema)
        if self._layout[0] != key:
            described = zip(self._names, self._parameters, self._trained, strict=True)
            self._layout = key, layout_hash(((name, p) for name, p, trained in described if trained), self.schema)
        return self._layout[1]

    def header_format(self, ranges: Sequence[range]) -> HeaderFormat:
        """The format of headers among members that are assigned ``ranges``."""
        return HeaderFormat(
            schema=self.schema,
            # All parameters have a place, also those that are not trained: workers may disagree on that.
            places=len(self._parameters) + len(self.schema.averaged),
            most_nodes=max(len(assigned) for assigned in ranges),
            copied_bytes=self._buffers.copied_bytes(self.schema),
            alignment=self._settings.alignment,
        )

    def _wanted_schema(self) -> Schema:
        metrics = {name for record in self._records for name in record.metrics}
        averaged = {name for record in self._records for name in record.averaged}
        copied = {name for record in self._records for name in record.copied}
        return Schema(tuple(sorted(metrics)), tuple(sorted(averaged)), tuple(sorted(copied)))

    def _present(self) -> list[bool]:
        changed = [
            name in self._changed
            or any(
                name in record.averaged and self._buffers.changed(name, record.averaged[name])
                for record in self._records
            )
            for name in self.schema.averaged
        ]
        return [*self._given, *changed]

    def _complete_records(self) -> list[NodeRecord]:
        """The records with a value for every copied buffer of the schema."""
        for record in self._records:
            for name in self.schema.copied:
                if record.samples and name not in record.copied:
                    record.copied[name] = self._buffers.baseline(name)
        return self._records

    def _parts(self) -> Parts:
        """Sums of gradients, each followed by the sums of the averaged buffers over the same virtual nodes."""
        new = [name for name in self.schema.averaged if name not in self._summed]
        if not new:
            return self._accumulator.parts
        sums, node = Accumulator(self._summation), self._first_node
        for record in self._records:
            values: Tensors = [None] * len(new)
            if record.samples:
                given = [record.averaged.get(name) for name in new]
                there = [self._buffers.baseline(n) if v is None else v for n, v in zip(new, given, strict=True)]
                values = [value.to(summed_as(value.dtype)) for value in there]
            sums.add(node, values, weight=record.samples / self._unit, count=record.virtual_nodes)
            node += record.virtual_nodes
        count, parts = len(self._parameters), []
        for (nodes, tensors), (_, added) in zip(self._accumulator.parts, sums.parts, strict=True):
            by_name = {**dict(zip(self._summed, tensors[count:], strict=True)), **dict(zip(new, added, strict=True))}
            parts.append((nodes, [*tensors[:count], *(by_name[name] for name in self.schema.averaged)]))
        return parts

    # --- a life -------------------------------------------------------------------------------------------------------

    def settle(self, schema: Schema) -> None:
        """Take over the names of a state that was restored."""
        self.schema = self.settled = schema

    def commit(self, buffers: Mapping[str, Tensor]) -> None:
        """The step was applied: take over the combined buffers and the names."""
        self._reducer.release_unused()
        self._buffers.commit(buffers)
        self.forget_contributions()
        self.settled = self.schema

    def enter(self, owners: Owners | None) -> None:
        """A generation begins: another number of workers needs other buffers.

        Args:
            owners: of the parameters, who alone need their gradients; ``None``: all need all.
        """
        self._overlap.enter()
        self._reducer.forget()
        self._reducer.share(owners)

    def close(self) -> None:
        """Leave the model as it was."""
        self._overlap.close()

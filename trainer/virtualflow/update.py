"""One optimizer update of the whole job, as one worker sees it: contribute, exchange, apply.

The user's code produces gradients one virtual node at a time; :class:`Update` takes them over, exchanges them
(``reduction``, ``contribution``) and applies the optimizer when the whole reduced gradient has arrived. Until then
nothing of the model, the optimizer or the scheduler has changed, so an attempt can be abandoned at any point and
repeated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from virtualflow import messages as m
from virtualflow.accumulation import Accumulator, Parts, Tensors
from virtualflow.collectives import Collectives, as_bytes, gather_bytes
from virtualflow.contribution import (
    Head,
    HeadFormat,
    Kind,
    NodeRecord,
    Schema,
    combine_metrics,
    layout_hash,
    read_heads,
)
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.model_buffers import BufferTracker, summed_as
from virtualflow.overlap import Overlap
from virtualflow.reduction import Reducer
from virtualflow.settings import CommunicatorSettings
from virtualflow.shards import Shards
from virtualflow.stepping import StepInPortions, is_separable

SchedulerInterval = Literal["step", "epoch", "manual"]


@dataclass(frozen=True)
class Outcome:
    """A complete exchange, not yet applied."""

    heads: tuple[Head, ...]
    samples: int
    """Of the whole global batch."""
    metrics: dict[str, float]
    gradients: Tensors
    buffers: dict[str, Tensor]


class Update:
    """What a worker keeps for the sake of its updates."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        scheduler_interval: SchedulerInterval,
        scaler: Any,
        clip_grad_norm: float | None,
        clip_grad_value: float | None,
        virtual_nodes: int,
        micro_batch: int,
        alignment: int,
        canonical: bool = True,
        shard: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self.schema = Schema()
        """Names that the present attempt exchanges."""
        self.settled = Schema()
        """Names that all workers knew when the last step was committed: part of the state."""
        self.contributed = False
        """Whether this worker has taken part in an exchange, so that it is no joiner any more."""
        self.buffers = BufferTracker(model)
        self._interval = scheduler_interval
        self._clip_norm = clip_grad_norm
        self._clip_value = clip_grad_value
        self._virtual_nodes = virtual_nodes
        self._micro_batch = micro_batch
        self._alignment = alignment
        self._unit = micro_batch
        """Samples of a contribution whose weight is 1; the same on all workers."""
        self._canonical = canonical
        self._accumulator = Accumulator(virtual_nodes, canonical)
        self._records: list[NodeRecord] = []
        self._summed: tuple[str, ...] = ()
        """Averaged buffers that are added up with the gradients: those known when the attempt began."""
        self._changed: set[str] = set()
        """Which of them a virtual node of this worker has changed."""
        self._first_node = self._next_node = 0
        self._all_parameters = list(model.parameters())
        settings = CommunicatorSettings
        self._reducer = Reducer(virtual_nodes, alignment, settings.small_exchange, settings.bucket, canonical)
        size = sum(p.numel() * p.itemsize for p in self._all_parameters)
        self._overlap = Overlap(
            self._all_parameters,
            self._reducer,
            worthwhile=size > settings.small_exchange // 2,
            one_by_one=size >= settings.one_by_one * len(self._all_parameters),
        )
        self._stepping = StepInPortions(optimizer)
        self.shards = Shards(self._all_parameters, optimizer, clip_grad_norm, clip_grad_value) if shard else None
        """This worker's share of a sharded optimizer."""
        self.pending: Outcome | None = None
        """A complete exchange whose step may count already, though it has not been applied here (``shards``)."""
        self._pending_schema = Schema()
        self._steady = True
        self._names = [name for name, _ in model.named_parameters()]
        self._trained: tuple[bool, ...] = ()
        """Which of all parameters are trained in the present attempt."""
        self._layout: tuple[object, int] = (None, 0)
        self._given: list[bool] = []
        """Which of all parameters a virtual node of this worker had a gradient for."""

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def begin(self, carried: range, largest: int = 1) -> None:
        """Start an attempt over the virtual nodes ``carried``, where ``largest`` are the most that any worker has."""
        self._trained = tuple(parameter.requires_grad for parameter in self._all_parameters)
        self._given = [False] * len(self._all_parameters)
        self._overlap.abandon()
        self._accumulator.clear()
        self._records = []
        self._summed, self._changed = self.schema.averaged, set()
        self._first_node = self._next_node = carried.start
        self._steady = True
        # Where one micro-batch is all that a worker carries, its gradients need no factor.
        self._unit = self._micro_batch if self._canonical else self._micro_batch * largest
        self.buffers.begin()
        self.clear_gradients()
        if self.scaler is not None and self._all_parameters:
            # A scaler comes into being when it first scales; a worker without samples must be able to step it, too.
            self.scaler.scale(torch.ones((), device=self._all_parameters[0].device))

    def clear_gradients(self) -> None:
        """Forget gradients, so that autograd makes new tensors for the next virtual node."""
        # Also of those that were frozen a moment ago: optimizers step whatever has a gradient.
        for parameter in self._all_parameters:
            parameter.grad = None

    def expect_last(self, collectives: Collectives, ranges: Sequence[range], samples: int, of_step: int | None) -> None:
        """The last micro-batch of this worker's range is about to run, so the exchange may begin with it.

        Args:
            collectives: the communicator of the running generation, whose members carry ``ranges``.
            ranges: see above.
            samples: those of that micro-batch.
            of_step: those of the whole global batch, ``None`` where only the heads will tell.
        """
        scale = None if of_step is None else self._unit / of_step
        self._overlap.watch(collectives, ranges, self._accumulator, self._next_node, samples / self._unit, scale)

    def take(self, samples: int, metrics: dict[str, float | Tensor], virtual_nodes: int = 1) -> None:
        """Take over what the next virtual node has left in the model: gradients and changed buffers.

        Args:
            samples: how many its micro-batch had; fewer than usual weigh less, none weigh nothing.
            metrics: what the user's code has logged for it.
            virtual_nodes: how many its micro-batch stands for.
        """
        node, self._next_node = self._next_node, self._next_node + virtual_nodes
        averaged, copied = self.buffers.collect(self.schema) if samples else ({}, {})
        sums = self._take_buffers(averaged) if samples else [None] * len(self._summed)
        self._records.append(NodeRecord(samples, metrics, averaged, copied, virtual_nodes))
        under_way: frozenset[int] = frozenset()
        if self._overlap.watching:
            under_way, self._steady = self._overlap.settle()
        gradients: Tensors = []
        for index, (parameter, trained) in enumerate(zip(self._all_parameters, self._trained, strict=True)):
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
        if samples != self._unit:
            for gradient in gradients:
                if gradient is not None:  # torch._foreach_mul_ would round the factor to the type of the gradient
                    gradient.mul_(samples / self._unit)
        self._accumulator.add(node, gradients, virtual_nodes)

    def _take_buffers(self, averaged: dict[str, Tensor]) -> Tensors:
        """Move the values that are added up with the gradients out of what a virtual node has changed."""
        values: Tensors = []
        for name in self._summed:
            value = averaged.pop(name) if name in averaged else self.buffers.baseline(name)
            if name not in self._changed and self.buffers.changed(name, value):
                self._changed.add(name)
            dtype = summed_as(value.dtype)
            values.append(value if value.dtype is dtype else value.to(dtype))
        return values

    def abandon(self) -> None:
        """The attempt is void: leave no trace of it."""
        self._overlap.abandon()
        self._stepping.undo()
        self.clear_gradients()
        self.buffers.restore()
        self._accumulator.clear()
        self._records = []
        # Others may not have got as far: a head's size must not depend on how far an attempt came before it broke.
        self.schema = self.settled

    # --- the exchange -------------------------------------------------------------------------------------------------

    def exchange(
        self,
        communicator: Collectives,
        ranges: Sequence[range],
        number: int,
        offer: m.Generation,
        more: bool,
        saves: bool = False,
    ) -> Outcome:
        """Exchange everything with the other workers.

        Args:
            communicator: of the running generation, whose members carry ``ranges``.
            number: of this exchange, counted the same by all workers.
            offer: the generation that this worker could enter next, (0, 0) for none.
            more: whether this worker has samples for a further step of the epoch.
            saves: whether it needs the whole state after this step.

        Raises:
            CommunicatorBroken: the attempt is void.
            AttemptSpoiled: it is to be repeated by all.
            VirtualFlowError: the workers do not run the same code.
        """
        self.contributed = True
        self.buffers.refuse_strangers()
        heads, form = self._agree_on_heads(communicator, ranges, number, offer, more, saves)
        samples = sum(sum(head.samples) for head in heads)
        if samples == 0:
            raise ConfigurationError("the dataset gave no samples at all; check its shards")
        metrics = combine_metrics(self.schema, self._virtual_nodes, heads, self._canonical)
        present = [any(there) for there in zip(*(head.present for head in heads), strict=True)]
        count = len(self._all_parameters)
        scale = self._unit / samples
        steady = all(head.steady for head in heads)
        self._overlap.learn(number, (place for place in range(count) if present[place]), steady)
        if not any(present[:count]):
            raise ConfigurationError(
                "no parameter got a gradient in this step; call loss.backward() for each micro-batch of the step"
            )
        begun = self._overlap.places
        early = self._arrive(scale, steady, present)
        sums = [tensor.to(summed_as(tensor.dtype)) for tensor in self.buffers.templates(self.schema.averaged)]
        templates = [*self._all_parameters, *sums]
        late = [there and place not in begun for place, there in enumerate(present)]
        reduced = self._reducer.reduce(communicator, ranges, self._parts(), templates, late, scale)
        for place, tensor in early.items():
            reduced[place] = tensor
        buffers = {n: t for n, t in zip(self.schema.averaged, reduced[count:], strict=True) if t is not None}
        if form.copied_bytes:
            first = next(head for head in heads if sum(head.samples))
            buffers |= self.buffers.read_copied(self.schema, first.copied)
        outcome = Outcome(heads, samples, metrics, reduced[:count], buffers)
        if self.shards is not None and communicator.size > 1:
            self.pending, self._pending_schema = outcome, self.schema
            self.shards.prepare(reduced[:count], present[:count])
            self.shards.decide(communicator)
            self.shards.step()
            self.shards.spread(communicator)
        return outcome

    def _arrive(self, scale: float, steady: bool, present: Sequence[bool]) -> dict[int, Tensor]:
        """Wait for the gradients that are under way, and step the first while others are still to come."""
        arrived: dict[int, Tensor] = {}
        clipped = self._clip_norm is not None or self._clip_value is not None
        separable = self.scaler is None and not clipped and self.shards is None
        for found, complete in self._overlap.results(scale, steady):
            there = {place: tensor for place, tensor in found.items() if present[place]}
            arrived |= there
            if not complete and separable and there and is_separable(self.optimizer):
                self._stepping.step([self._all_parameters[place] for place in there], list(there.values()))
        return arrived

    def _agree_on_heads(
        self,
        communicator: Collectives,
        ranges: Sequence[range],
        number: int,
        offer: m.Generation,
        more: bool,
        saves: bool,
    ) -> tuple[tuple[Head, ...], HeadFormat]:
        begun = self._overlap.under_way
        while True:
            form = self.head_format(ranges)
            mine = self._wanted_schema()
            wishes = mine.merge(self.schema) != self.schema
            layout = self._layout_hash()
            numbers = (Kind.TRAIN, number, layout, offer, wishes, more, self._steady)
            told = form.tell(*numbers, self._present(), self._complete_records(), saves)
            heads: tuple[Head, ...] = (told,)
            if communicator.size > 1:
                block = form.write(told)
                gathered = self._overlap.heads(block) if begun else communicator.all_gather(block)
                heads = read_heads(form, gathered, Kind.TRAIN, number)
            begun = False
            for head in heads:
                if head.layout != layout:
                    raise VirtualFlowError(
                        "the trainable parameters differ between workers in this step; freeze and unfreeze them by "
                        "step.number or step.epoch, so that all workers do the same"
                    )
            if not any(head.wishes for head in heads):
                return heads, form
            merged = self.schema
            for raw in gather_bytes(communicator, as_bytes(json.dumps(mine.to_json())), self._alignment):
                merged = merged.merge(Schema.from_json(json.loads(raw.numpy().tobytes())))
            self.schema = merged

    def _layout_hash(self) -> int:
        key = (self._trained, self.schema)
        if self._layout[0] != key:
            described = zip(self._names, self._all_parameters, self._trained, strict=True)
            self._layout = key, layout_hash(((name, p) for name, p, trained in described if trained), self.schema)
        return self._layout[1]

    def head_format(self, ranges: Sequence[range]) -> HeadFormat:
        """The format of heads among members that carry ``ranges``."""
        return HeadFormat(
            schema=self.schema,
            # All parameters have a place, also those that are not trained: workers may disagree on that.
            places=len(self._all_parameters) + len(self.schema.averaged),
            most_nodes=max(len(carried) for carried in ranges),
            copied_bytes=self.buffers.copied_bytes(self.schema),
            alignment=self._alignment,
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
                name in record.averaged and self.buffers.changed(name, record.averaged[name])
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
                    record.copied[name] = self.buffers.baseline(name)
        return self._records

    def _parts(self) -> Parts:
        """Sums of gradients, each followed by the sums of the averaged buffers over the same virtual nodes."""
        new = [name for name in self.schema.averaged if name not in self._summed]
        if not new:
            return self._accumulator.parts
        sums, node = Accumulator(self._virtual_nodes, self._canonical), self._first_node
        for record in self._records:
            values: Tensors = []
            for name in new:
                if record.samples == 0:
                    values.append(None)
                    continue
                value = record.averaged[name] if name in record.averaged else self.buffers.baseline(name)
                value = value.to(summed_as(value.dtype))
                values.append(value if record.samples == self._unit else value * (record.samples / self._unit))
            sums.add(node, values, record.virtual_nodes)
            node += record.virtual_nodes
        count, parts = len(self._all_parameters), []
        for (nodes, tensors), (_, added) in zip(self._accumulator.parts, sums.parts, strict=True):
            by_name = {**dict(zip(self._summed, tensors[count:], strict=True)), **dict(zip(new, added, strict=True))}
            parts.append((nodes, [*tensors[:count], *(by_name[name] for name in self.schema.averaged)]))
        return parts

    # --- the update ---------------------------------------------------------------------------------------------------

    def apply(self, outcome: Outcome, epoch_ends: bool) -> None:
        """Apply a complete exchange: clip, optimizer, scaler, buffers, scheduler."""
        if outcome is self.pending:
            self.forget_pending()
        else:
            self._step(outcome)
        for parameter, gradient in zip(self._all_parameters, outcome.gradients, strict=True):
            parameter.grad = gradient
        self._stepping = StepInPortions(self.optimizer)
        self._reducer.release_unused()
        self.buffers.commit(outcome.buffers)
        self._accumulator.clear()
        self._records = []
        self.settled = self.schema
        if self.scheduler is not None and (self._interval == "step" or (self._interval == "epoch" and epoch_ends)):
            self.scheduler.step()

    def _step(self, outcome: Outcome) -> None:
        stepped = set(self._stepping.stepped)
        for parameter, gradient in zip(self._all_parameters, outcome.gradients, strict=True):
            parameter.grad = None if parameter in stepped else gradient
        parameters = [p for p in self._all_parameters if p.grad is not None]
        if self.scaler is not None and (self._clip_norm is not None or self._clip_value is not None):
            self.scaler.unscale_(self.optimizer)
        if self._clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self._clip_value)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def complete_pending(self, norm: float | None) -> Outcome:
        """The step that is pending counts, as others know: step this worker's share; it is to be committed.

        Args:
            norm: of the whole gradient, if it is clipped by that.
        """
        assert self.pending is not None
        assert self.shards is not None
        self.shards.step(norm)
        self.schema = self._pending_schema
        return self.pending

    def forget_pending(self) -> None:
        """It is committed, or void."""
        self.pending = None
        if self.shards is not None:
            self.shards.settle()

    def settle(self, schema: Schema) -> None:
        """Take over the names of a state that was restored."""
        self.schema = self.settled = schema

    @property
    def steps_scheduler(self) -> bool:
        """Whether the learning rate is changed here, and not by the user's code between two steps."""
        return self.scheduler is not None and self._interval != "manual"

    def enter(self) -> None:
        """A generation begins: another number of workers needs other buffers."""
        self._overlap.enter()
        self._reducer.forget()
        if self.shards is not None:
            self._reducer.share(self.shards.keepers)

    def close(self) -> None:
        """Leave the model as it was."""
        self._overlap.close()
        self._stepping.undo()

"""Gradient synchronization, as one worker takes part in it: collect what its virtual nodes leave behind, and reduce it.

The user's code produces gradients one virtual node at a time; :class:`GradientSync` takes them over with the buffers
that have changed, exchanges the step headers, and returns the whole reduced gradient. It changes nothing of the
optimizer, and of the model only what every attempt begins with, so an attempt can be abandoned at any point and
repeated. What it had taken over by then can be kept for the next attempt (``contributions``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from virtualflow.device import device_of
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.protocol import messages as m
from virtualflow.reduction import Overlap, Parts, Portions, Reducer, Settled, Summation, Tensors, plan_offload
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.step.backward_cut import BackwardCut
from virtualflow.step.buffers import SUMMED_AS, BufferTracker, Modes, Switches, add_up_changes, write_changes
from virtualflow.step.contributions import Contributions, take_gradients
from virtualflow.step.header import (
    HeaderFormat,
    Kind,
    NodeRecord,
    Schema,
    StepHeader,
    combine_metrics,
    first_header,
    layout_hash,
    read_headers,
    read_weights,
)
from virtualflow.step.part import StepPart
from virtualflow.step.sharded_parameters import ShardedParameters
from virtualflow.step.spot_checker import Doubted, SpotChecker
from virtualflow.step.state_watch import StateWatch
from virtualflow.transport import Collectives, as_bytes, gather_bytes

Portion = Callable[[Mapping[int, Tensor]], None]
"""Told of the first reduced gradients, by place, while others are still on their way."""


@dataclass(frozen=True)
class Reduced:
    """A complete synchronization, not yet applied."""

    headers: tuple[StepHeader, ...]
    metrics: dict[str, float]
    gradients: Tensors
    present: tuple[bool, ...]
    buffers: dict[str, Tensor]
    switched: frozenset[int]
    """The parameters, by place, that the first virtual node has frozen or unfrozen: what holds after the step."""
    copied: tuple[str, ...]
    """Buffers of which one virtual node's value counts, since this step."""
    averaged: tuple[str, ...]
    """Those of which the mean over virtual nodes counts, since this step, and that are not of torch's own modules."""


_UNTOUCHED = Settled()

_WARY = 64
"""Synchronizations after one with dropped samples in which no gradient sets out with a scale that goes by a plan."""


class GradientSync:
    """What a worker contributes to a step, and its part in the reduction."""

    def __init__(
        self,
        model: nn.Module,
        summation: Summation,
        micro_batch: int,
        settings: ReductionSettings,
        reducer: Reducer,
        sums: Sequence[str] = (),
    ) -> None:
        self.schema = Schema()
        """Names that the present attempt exchanges."""
        self.settled = Schema()
        """Names that all workers knew when the last step was committed: part of the state."""
        self._spot_checker: SpotChecker | None = None
        self._telling: tuple[StepPart, ...] = ()
        """What says something in the step header."""
        self.cut: BackwardCut | None = None
        """How far each backward pass goes; ``None``: all are whole."""
        self.sharded: ShardedParameters | None = None
        """Takes gradients where parameters are divided; ``None``: every worker has all of them."""
        self._named = list(model.named_parameters())
        self.switches, self.modes = Switches(self._named), Modes(model)
        self._parameters = list(model.parameters())
        self._buffers = BufferTracker(model, sums)
        self.sums = self._buffers.sums
        self._summation = summation
        self._settings = settings
        self._micro_batch = self.unit = micro_batch
        """The unit: samples of a contribution whose weight is 1; the same on all workers."""
        self.templates = [summation.precision.template(parameter) for parameter in self._parameters]
        """Of the sums of each parameter's gradients: one tensor with its shape, dtype and device."""
        self.widens = any(of.dtype != p.dtype for of, p in zip(self.templates, self._parameters, strict=True))
        """Whether gradients are summed up in wider types than they have."""
        size = sum(template.numel() * template.itemsize for template in self.templates)
        self.offload = plan_offload(device_of(model), size, settings)
        """Where sums wait that are too many for the device."""
        self._order: Sequence[int] = ()
        """The virtual nodes that the present attempt computes, one after the other."""
        self._taken = 0
        self._reducer = reducer
        self._overlap = Overlap(self._parameters, self.templates, reducer, settings)
        self._late = False
        self.forget_contributions()
        self._planned: int | None = None
        """Samples of the present step, if none of them is dropped."""
        self._promised: float | None = None
        """The scale with which gradients set out in the present attempt before the headers have told it."""
        self._open, self._open_until = False, 0
        """Whether the scale of the next synchronization is open, since weights were told in the last one, and the
        number of that until which it is, since samples were dropped: all workers have read the same headers."""
        self._layout: tuple[object, int] = (None, 0)

    def listen(self, watch: StateWatch | None, spot_checker: SpotChecker | None) -> None:
        # States first: from different ones, workers come to different gradients, and nobody has computed wrong.
        self._telling = tuple(part for part in (watch, spot_checker) if part is not None)
        self._spot_checker = spot_checker

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def begin(self, computes: Sequence[int], most: int, *, resumes: bool = False, planned: int | None = None) -> None:
        """Start an attempt.

        Args:
            computes: the virtual nodes that this worker is about to compute, ascending.
            planned: samples of the whole step, if none of them is dropped; ``None`` where nobody knows.
        """
        self._planned, self._promised = planned, None
        self.switches.begin()
        self.modes.begin()
        self._overlap.begin(resumes=resumes)
        if not resumes:
            self.forget_contributions()
        self._order, self._taken = computes, 0
        self._late = False
        self.unit = self._summation.unit(self._micro_batch, most)
        self._buffers.begin()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        """Forget gradients, so that autograd makes new tensors for the next virtual node."""
        # Also of those that were frozen a moment ago: optimizers step whatever has a gradient.
        for parameter in self._parameters:
            parameter.grad = None

    def expect(self, samples: int, virtual_nodes: int = 1) -> None:
        """A micro-batch of this worker is about to run, not its last: gradients may be added up as they come."""
        if self._divided is not None:
            self._divided.expect(self._order[self._taken], samples / self.unit)
            return
        if not self._overlap.one_by_one:
            return
        node = self._order[self._taken]
        plain, weight = self._is_checked(node), samples / self.unit
        self._overlap.watch(self._contributions.accumulator, node, count=virtual_nodes, weight=weight, plain=plain)

    def expect_last(
        self,
        collectives: Collectives,
        holdings: Sequence[Sequence[int]],
        samples: int,
        of_step: int | None,
        virtual_nodes: int = 1,
    ) -> None:
        """The last micro-batch of this worker is about to run, so the reduction may begin with it.

        Args:
            of_step: those of the whole global batch, ``None`` where only the headers will tell.
        """
        if self._divided is not None:
            self.expect(samples, virtual_nodes)
            return
        node = self._order[self._taken]
        self._promise(of_step)
        self._overlap.watch_last(
            collectives,
            holdings,
            self._contributions.accumulator,
            last=node,
            count=virtual_nodes,
            weight=samples / self.unit,
            scale=self._promised,
            plain=self._is_checked(node),
            reach=None if self.cut is None else self.cut.reach(),
        )

    def expect_together(self, collectives: Collectives, holdings: Sequence[Sequence[int]], of_step: int | None) -> None:
        """In place of both: all virtual nodes of the attempt are about to run together; see :meth:`give_sums`."""
        self._promise(of_step)
        accumulator, last = self._contributions.accumulator, self._order[-1]
        self._overlap.watch_together(collectives, holdings, accumulator, last=last, scale=self._promised)

    def _promise(self, of_step: int | None) -> None:
        self._promised = None if of_step is None or self._open else self.unit / of_step

    def give_sums(self, places: Sequence[int], rows: Sequence[Tensors]) -> None:
        """Some sums over all of them are complete, so the reduction may begin with these; each place comes once.

        Args:
            rows: for each sum a tensor a place; what sets out is taken out of them.
        """
        self._overlap.give_sums(places, rows)

    def weigh(self, weight: float) -> None:
        """The script has said what the virtual node that runs counts by, in place of its samples."""
        sums = zip(self._named, self.templates, strict=True)
        narrow = next((name for (name, p), of in sums if of.dtype is torch.float16 and p.requires_grad), None)
        if narrow is not None:
            raise ConfigurationError(
                f"parameter {narrow} is of torch.float16, in which a gradient that counts by tokens overflows; keep "
                "parameters in float32 (with autocast and a scaler) or in bfloat16, or pass "
                "reduce_dtype=torch.float32 to vf.elastic"
            )
        self._overlap.weigh(weight / self.unit)
        if self._divided is not None:
            self._divided.weigh(weight / self.unit)

    def _is_checked(self, node: int) -> bool:
        check = None if self._spot_checker is None else self._spot_checker.check
        return check is not None and check.virtual_node == node

    def begin_late(self) -> None:
        """In place of :meth:`expect_last`: gradients are needed until all are there, so nobody begins."""
        self._late = True

    @property
    def _divided(self) -> ShardedParameters | None:
        """What takes gradients, in a generation in which parameters are divided."""
        return self.sharded if self.sharded is not None and self.sharded.active else None

    @property
    def begun(self) -> bool:
        for parameter in self._parameters:
            if parameter.grad is not None:
                return True
        return self._overlap.begun or (self._divided is not None and self._divided.begun)

    def take(
        self, samples: int, metrics: dict[str, float | Tensor], virtual_nodes: int = 1, weight: float | None = None
    ) -> None:
        """Take over what the next virtual node has left in the model: gradients and changed buffers.

        From here on ``.grad`` holds what has not been added up already.

        Args:
            samples: how many its micro-batch had; fewer than usual weigh less, none weigh nothing.
            weight: what it counts by, if not by its samples.

        Raises:
            AttemptSpoiled: the script has looked at gradients that were gone, or changed them.
        """
        divided = None if self._divided is None else self._divided.settle()
        settled = self._overlap.settle() if self._overlap.running else _UNTOUCHED
        record = self.collect(samples, metrics, virtual_nodes, weight)
        gradients, given = take_gradients(self._named, settled, self._summation.precision)
        # Behind them: each parameter has just been touched, so it costs no second walk through memory.
        record.switched = self.switches.put_back()
        if self.cut is not None:
            self.cut.check(given)
        if divided is not None:
            given = divided
        node, factor = self._order[self._taken], (samples if weight is None else weight) / self.unit
        self._contributions.add(node, record, gradients, given, factor, settled.added)
        if settled.sent:
            self._contributions.note_sent(self._overlap.early, self._overlap.steady)
        self._taken += virtual_nodes

    def collect(
        self, samples: int, metrics: dict[str, float | Tensor], virtual_nodes: int = 1, weight: float | None = None
    ) -> NodeRecord:
        record = NodeRecord(samples, metrics, virtual_nodes=virtual_nodes, told=weight)
        if samples:
            if self.sums:
                record.summed = self._buffers.collect_sums()
            record.averaged, record.copied = self._buffers.collect(self.schema)
        else:
            self._buffers.restore()
        return record

    def take_summed(self, records: Mapping[int, NodeRecord], parts: Parts, given: Sequence[bool]) -> None:
        """In place of :meth:`take`: all virtual nodes of the attempt at once; see ``Contributions.add_summed``.

        Args:
            parts: without what :meth:`give_sums` has taken out.
        """
        settled = self._overlap.settle()
        self._contributions.add_summed(records, parts, given, self.unit)
        if settled.sent:
            self._contributions.note_sent(self._overlap.early, self._overlap.steady)
        self._taken = len(self._order)

    @property
    def finished(self) -> Sequence[int]:
        """The virtual nodes that were computed in the present attempt, or in one that was just aborted."""
        return self._order[: self._taken]

    @property
    def kept(self) -> Sequence[int]:
        """The virtual nodes whose contributions were kept when an attempt at the coming step was aborted."""
        return self._contributions.nodes

    def discard(self) -> None:
        """Forget what the present virtual node has left in the model: it is computed again."""
        self._clear_gradients()
        self.switches.put_back()
        self._buffers.restore()

    def abandon(self, *, keep: bool = False) -> None:
        keep = keep and not self._overlap.torn and self._divided is None
        self._overlap.abandon()
        if self.sharded is not None:
            self.sharded.abandon()
        if self._buffers.begun:
            self.discard()
        # Others may not have got as far: a header's size must not depend on how far an attempt came before it broke.
        self.schema = self.settled
        if not (keep and self._summation.movable and self._contributions.take_back()):
            self.forget_contributions()

    def forget_contributions(self) -> None:
        known = len(self._parameters), self.schema.averaged
        self._contributions = Contributions(self._summation, self._buffers, *known, self.offload)

    # --- the synchronization ------------------------------------------------------------------------------------------

    def synchronize(
        self,
        communicator: Collectives,
        holdings: Sequence[Sequence[int]],
        number: int,
        offer: m.Generation,
        *,
        more: bool,
        saves: bool,
        repairs: bool,
        portion: Portion | None,
    ) -> Reduced:
        self._buffers.refuse_strangers()
        headers, form = self._agree_on_headers(communicator, holdings, number, offer, more=more, saves=saves)
        weights = read_weights(headers)
        self._open = any(weight is not None for header in headers for weight in header.told)
        if self._planned is not None and sum(count for header in headers for count in header.samples) != self._planned:
            self._open_until = number + _WARY
        self._open = self._open or number < self._open_until
        present = [any(there) for there in zip(*(header.present for header in headers), strict=True)]
        count = len(self._parameters)
        scale = self.unit / math.fsum(weights)
        steady = all(header.steady for header in headers)
        if not repairs and self._divided is None:  # in which some may have computed nothing that would tell
            self._overlap.learn(number, (place for place in range(count) if present[place]), steady)
        if not any(present[:count]):
            raise ConfigurationError(
                "no parameter got a gradient in this step; call loss.backward() for each micro-batch of the step, "
                "before the next one is asked for (list(step) and prefetchers ask for all of them first)"
            )
        divided = self._divided
        begun = self._overlap.places if divided is None else range(count)
        factors = {} if self.cut is None else self.cut.factors(_by_node(weights, holdings))
        as_promised = self._promised is None or self._promised == scale
        if divided is None:
            early = self._await_early(scale, steady and as_promised, present, portion, factors)
        else:
            early = divided.results(present[:count], scale, [len(header.weights) for header in headers])
        sums = [t.to(SUMMED_AS.get(t.dtype, t.dtype)) for t in self._buffers.templates(self.schema.averaged)]
        reduced = self._reducer.reduce(
            communicator,
            holdings,
            self._contributions.parts(self.schema, self.unit),
            templates=[*self.templates, *sums],
            present=[there and place not in begun for place, there in enumerate(present)],
            scale=scale,
            reach=None if self.cut is None else self.cut.reach(),
        )
        self._reducer.multiply({n: t for n, t in enumerate(reduced[:count]) if t is not None}, factors)
        for place, tensor in early.items():
            reduced[place] = tensor
        buffers = {n: t for n, t in zip(self.schema.averaged, reduced[count:], strict=True) if t is not None}
        if form.copied_bytes:
            buffers |= self._buffers.read_copied(self.schema, first_header(headers, holdings).copied)
        order = holdings if self._summation.movable else None
        if self.sums:
            changes = add_up_changes(self._buffers.sum_templates, self._summation, headers, order)
            buffers |= self._buffers.added(changes)
        metrics = combine_metrics(self.schema, self._summation, headers, order)
        switched = first_header(headers, holdings).switched
        copied = tuple(
            name
            for name in self.schema.copied
            if name not in self.settled.copied and not self._buffers.counts_silently(name)
        )
        averaged = tuple(
            name
            for name in (() if self.schema is self.settled else self.schema.averaged)
            if name not in self.settled.averaged and not self._buffers.is_statistic(name)
        )
        return Reduced(headers, metrics, reduced[:count], tuple(present[:count]), buffers, switched, copied, averaged)

    def _await_early(
        self, scale: float, steady: bool, present: Sequence[bool], portion: Portion | None, factors: Mapping[int, float]
    ) -> dict[int, Tensor]:
        """Wait for the gradients that are under way; what is there before the others is a portion."""
        arrived: dict[int, Tensor] = {}
        for found, complete in self._overlap.results(scale, steady):
            there = {place: tensor for place, tensor in found.items() if present[place]}
            self._reducer.multiply(there, factors)
            arrived |= there
            if there and not complete and portion is not None:
                portion(there)
        return arrived

    def _agree_on_headers(
        self,
        communicator: Collectives,
        holdings: Sequence[Sequence[int]],
        number: int,
        offer: m.Generation,
        *,
        more: bool,
        saves: bool,
    ) -> tuple[tuple[StepHeader, ...], HeaderFormat]:
        begun = self._overlap.under_way
        while True:
            form = self.header_format(holdings)
            mine = self._contributions.wanted_schema()
            records = self._contributions.complete_records(self.schema)
            names, sums = self.sums, self._buffers.sum_templates
            said: dict[str, int] = {}
            for part in self._telling:
                said |= part.header()
            told = form.tell(
                Kind.TRAIN,
                number,
                offer,
                layout=self._layout_hash(),
                wishes=mine.merge(self.schema) != self.schema,
                more=more,
                steady=self._overlap.steady and not self._late,
                saves=saves,
                said=said,
                present=self._contributions.present(self.schema),
                records=records,
                summed=[write_changes(sums, [of.summed.get(name) for name in names]) for of in records if names],
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
            try:
                for part in self._telling:
                    part.check_headers(communicator, headers)
            except Doubted:
                self._overlap.await_all()
                raise
            if not any(header.wishes for header in headers):
                return headers, form
            merged = self.schema
            for raw in gather_bytes(communicator, as_bytes(json.dumps(mine.to_json()))):
                merged = merged.merge(Schema.from_json(json.loads(raw.numpy().tobytes())))
            self.schema = merged

    def _layout_hash(self) -> int:
        key = (self.switches.trained, self.schema)
        if self._layout[0] != key:
            self._layout = key, layout_hash(self.switches.steadily(), self.schema)
        return self._layout[1]

    def header_format(self, holdings: Sequence[Sequence[int]]) -> HeaderFormat:
        return HeaderFormat(
            schema=self.schema,
            # All parameters have a place, also those that are not trained: workers may disagree on that.
            places=len(self._parameters) + len(self.schema.averaged),
            most_nodes=max(len(holding) for holding in holdings),
            copied_bytes=self._buffers.copied_bytes(self.schema),
            alignment=self._settings.alignment,
            summed_bytes=sum(template.nbytes for template in self._buffers.sum_templates),
        )

    # --- a life -------------------------------------------------------------------------------------------------------

    def settle(self, schema: Schema) -> None:
        self.schema = self.settled = schema
        self._begin_anew()

    def commit(self, buffers: Mapping[str, Tensor], switched: frozenset[int]) -> None:
        """The step was applied: take over the combined buffers, what is trained from now on, and the names."""
        self._reducer.release_unused()
        self._buffers.commit(buffers)
        self.switches.commit(switched)
        self.settled = self.schema
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._order, self._taken, self._buffers.begun = (), 0, False
        self.forget_contributions()

    def enter(self, portions: Portions | None) -> None:
        """A generation begins: another number of workers needs other buffers.

        Args:
            portions: who alone needs what of the parameters' gradients; ``None``: all need all.
        """
        self._order, self._taken = (), 0
        self._open, self._open_until = False, 0  # not all of its members know what the last one has shown
        self._overlap.enter()
        self._reducer.forget()
        self._reducer.share(portions)

    def close(self) -> None:
        self._overlap.close()


def _by_node(weights: Sequence[float], holdings: Sequence[Sequence[int]]) -> dict[int, float]:
    return dict(zip((node for holding in holdings for node in holding), weights, strict=True))

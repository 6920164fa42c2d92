"""An attempt in layer-major order: all virtual nodes of this worker together, a block of the model at a time.

The script's part is its loss. So what is yielded to ``Step.layer_major`` is what computes them all, given that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from virtualflow.data import MicroBatch, seed_virtual_node
from virtualflow.errors import CommunicatorBroken, VirtualFlowError
from virtualflow.memory.activations import Chain, Complete, Flight, LayerMajor, Summed
from virtualflow.step import Attempt, Told
from virtualflow.worker.setup import Context
from virtualflow.worker.step import Loss, forget_cached_weights, span


class LayeredAttempts:
    """Computes a worker's virtual nodes in layer-major order.

    Args:
        listen: gets a micro-batch, and returns a place for what the script tells of it from now on.
    """

    def __init__(self, context: Context, chain: Chain, layers: LayerMajor, listen: Callable[[Any], Told]) -> None:
        self._context, self._chain, self._layers, self._listen = context, chain, layers, listen

    def attempt(self, attempt: Attempt, of_step: int | None) -> Iterator[Any]:
        """Compute what this worker contributes to a step; blocks set out for the others as they are complete.

        Args:
            of_step: samples of the whole global batch, ``None`` where only the headers will tell.
        """
        sync, check = self._context.update.sync, self._context.membership.check
        work = _Work([self._load(node, attempt) for node in attempt.computes])
        if not work.flights:
            return
        sync.expect_together(self._context.membership.communicator, attempt.holdings, of_step)
        for before in self._context.parts.before_pass:
            before(attempt)
        self._context.session.activity.mark("computing", attempt.number)
        yield from self._run(work, attempt.number, check, sync.give_sums)
        records = {}
        for flight in work.flights:
            self._chain.put_buffers(flight.buffers)
            told = work.told.get(flight.number, Told())
            records[flight.number] = sync.collect(flight.samples, told.metrics, weight=told.weight)
        assert work.summed is not None
        sync.take_summed(records, work.summed.parts, work.summed.given)

    def warm_up(self, attempt: Attempt) -> Iterator[Any]:
        """Compute the micro-batch in hand as virtual node 0, and forget it."""
        for before in self._context.parts.before_pass:
            before(attempt)
        self._context.session.activity.mark("warming up", 0)
        yield from self._run(_Work([self._flight(attempt.present)]), 0, lambda: None)

    def _load(self, node: int, attempt: Attempt) -> Flight:
        context = self._context
        context.membership.check()
        context.session.activity.mark("loading samples", attempt.number)
        batch = attempt.batch = context.loading.fetch(range(node, node + 1))
        if batch.size < context.request.micro_batch:
            attempt.timed = False
        for before in context.parts.before_node:
            before(attempt)
        return self._flight(batch)

    def _flight(self, batch: MicroBatch) -> Flight:
        return Flight(batch.virtual_node, batch.kept, batch.kept / self._context.update.sync.unit, batch.data)

    def _run(
        self, work: _Work, number: int, check: Callable[[], object], complete: Complete | None = None
    ) -> Iterator[Any]:
        def begin(flight: Flight) -> None:
            forget_cached_weights()
            seed_virtual_node(self._context.request.options.seed, number, flight.number)

        def compute(script_loss: Loss) -> None:
            def loss(flight: Flight, output: Any, rest: Sequence[Any]) -> Tensor:
                told = work.told[flight.number] = self._listen(flight.data)
                value = script_loss(output, *rest)
                self._context.update.sync.switches.refuse()
                if isinstance(value, Tensor):
                    told.metrics.setdefault("loss", value.detach().clone())
                if told.weight is not None:
                    flight.weight = told.weight / self._context.update.sync.unit
                return value

            try:
                work.summed = self._layers.run(work.flights, loss, seed=begin, check=check, complete=complete)
            except CommunicatorBroken as error:
                work.broken = error  # which is not the script's

        self._context.guard.place = "inner loop"
        try:
            with span("virtual nodes"):
                yield compute
        finally:
            self._context.guard.place = "library"
        if work.broken is not None:
            raise work.broken
        if work.summed is None:
            raise VirtualFlowError("a step in layer-major order was not computed; call step.layer_major(loss)")


@dataclass
class _Work:
    flights: list[Flight]
    told: dict[int, Told] = field(default_factory=dict)
    """What the script has told of each."""
    summed: Summed | None = None
    broken: CommunicatorBroken | None = None

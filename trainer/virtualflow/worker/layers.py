"""An attempt in layer-major order: all virtual nodes of this worker together, a block of the model at a time.

The script's part is its loss. So what is yielded to ``Step.layer_major`` is what computes them all, given that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from virtualflow.data import MicroBatch, seed_virtual_node
from virtualflow.errors import CommunicatorBroken, VirtualFlowError
from virtualflow.memory.activations import Chain, Flight, LayerMajor, Summed
from virtualflow.worker.setup import Context
from virtualflow.worker.step import Loss

Metrics = dict[str, float | Tensor]


class LayeredAttempts:
    """Computes a worker's virtual nodes in layer-major order.

    Args:
        context: the parts of the run.
        chain: the model's blocks.
        layers: run them.
        begin_log: returns a new place for what the script logs from now on.
    """

    def __init__(self, context: Context, chain: Chain, layers: LayerMajor, begin_log: Callable[[], Metrics]) -> None:
        self._context, self._chain, self._layers, self._begin_log = context, chain, layers, begin_log

    def attempt(self, computes: Sequence[int], number: int) -> Iterator[Any]:
        """Compute these virtual nodes for the step ``number``, and contribute what comes of them."""
        sync = self._context.update.sync
        work = _Work([self._load(node, number) for node in computes])
        if not work.flights:
            return
        sync.begin_late()
        self._context.turns.take(number, self._context.membership.check)
        self._context.session.activity.mark("computing", number)
        yield from self._run(work, number, self._context.membership.check)
        self._context.guard.check(last=True)
        self._context.pace.end(time.monotonic())
        records = {}
        for flight in work.flights:
            self._chain.put_buffers(flight.buffers)
            records[flight.number] = sync.collect(flight.samples, work.metrics.get(flight.number, {}))
        assert work.summed is not None
        sync.take_summed(records, work.summed.parts, work.summed.given)

    def warm_up(self, batch: MicroBatch) -> Iterator[Any]:
        """Compute a micro-batch as virtual node 0, and forget it."""
        yield from self._run(_Work([self._flight(batch)]), 0, lambda: None)

    def _load(self, node: int, number: int) -> Flight:
        context = self._context
        context.membership.check()
        context.session.activity.mark("loading samples", number)
        batch = context.loading.fetch(range(node, node + 1))
        if batch.size < context.request.micro_batch:
            context.pace.disregard()
        if context.audit is not None:
            for of, samples in batch.apart():
                context.audit.computed(context.session.generation, context.training.position[0], number, of, samples)
        return self._flight(batch)

    def _flight(self, batch: MicroBatch) -> Flight:
        return Flight(batch.virtual_node, batch.size, batch.size / self._context.update.sync.unit, batch.data)

    def _run(self, work: _Work, number: int, check: Callable[[], object]) -> Iterator[Any]:
        """Let the script's loss compute all of it.

        Raises:
            CommunicatorBroken: the attempt is aborted.
        """
        seed = self._context.request.options.seed

        def compute(script_loss: Loss) -> None:
            def loss(flight: Flight, output: Any, rest: Sequence[Any]) -> Tensor:
                logged = work.metrics[flight.number] = self._begin_log()
                value = script_loss(output, *rest)
                if isinstance(value, Tensor):
                    logged.setdefault("loss", value.detach().clone())
                return value

            try:
                work.summed = self._layers.run(
                    work.flights,
                    loss,
                    seed=lambda flight: seed_virtual_node(seed, number, flight.number),
                    check=check,
                )
            except CommunicatorBroken as error:
                work.broken = error  # which is not the script's

        with self._context.guard.within("inner loop"):
            yield compute
        if work.broken is not None:
            raise work.broken
        if work.summed is None:
            raise VirtualFlowError("a step in layer-major order was not computed; call step.layer_major(loss)")


@dataclass
class _Work:
    flights: list[Flight]
    metrics: dict[int, Metrics] = field(default_factory=dict)
    """What each has logged."""
    summed: Summed | None = None
    broken: CommunicatorBroken | None = None

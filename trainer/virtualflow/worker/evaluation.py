"""Inference over a dataset on the same virtual nodes: every sample once, rows in its order, on every worker.

After each global batch, or each few, the workers exchange what they have computed, as they do after a step. If one is
lost before that, the others compute its virtual nodes again, and keep what they have of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor, nn

from virtualflow._arguments import checked
from virtualflow.data import LoaderOptions, MicroBatch, Source, open_source, seed_virtual_node
from virtualflow.errors import CommunicatorBroken, ConfigurationError, VirtualFlowError, show_errors_plainly
from virtualflow.protocol.wording import counted
from virtualflow.state import codec
from virtualflow.step import Kind, read_headers
from virtualflow.transport import gather_bytes
from virtualflow.worker.loop import BETWEEN, Loop
from virtualflow.worker.run import active_loop

Rows = Any
"""A tensor with one row a sample, or a tuple, list or dict of such."""


class RowSource(NamedTuple):
    """Where rows come from, as errors name it."""

    giver: str
    """What has given the rows,"""
    remedy: str
    """how to give others,"""
    hint: str = ""
    """and what most likely is wrong where their number is."""


class Collector(Protocol):
    """What becomes of the micro-batches."""

    @property
    def steps(self) -> int:
        """Global batches up to the next exchange: the same on all workers."""

    def compute(self, batch: MicroBatch, places: Tensor) -> Any:
        """Compute on a micro-batch that has samples; the result stays with this worker up to the exchange.

        Args:
            places: of its samples in the order of the dataset, int64 ``[n]``.
        """

    def share(self, first: int, node: int, computed: Sequence[Any]) -> Any:
        """Make of a virtual node's results from the global batch ``first`` on what all workers get: tensors of the CPU
        in nests. Another attempt at the exchange asks again, maybe another worker.
        """

    def take(self, shared: Mapping[int, Any]) -> None:
        """Take what the virtual nodes have shared in an exchange, in their order: the same on all workers."""

    def complete(self) -> bool:
        """All is taken. Returns whether workers wait here for each other."""


@checked("vf.evaluate", LoaderOptions.__annotations__)
def evaluate(
    model: nn.Module, dataset: Any, fn: Callable[[Any], Rows], *, batch_size: int, **loader: Unpack[LoaderOptions]
) -> Rows:
    """Run ``fn`` over a dataset and return its rows in dataset order, the same on every worker.

    Inside the ``with`` block of a run all its workers share the work, so all must call it: after a step's micro-batches
    or after the last step. Members may drain or be lost meanwhile. Joiners wait until it is over, and so does a stop of
    the job: one that is killed before does it again from an older checkpoint. Without a run, this process does
    everything.

    Args:
        model: put into evaluation mode meanwhile.
        dataset: map-style, or iterable with a method ``shard``. The order of an iterable one is that of
            ``shard(index, count, epoch, start)`` in stripes: the first sample of each shard, then the second of each.
        fn: gets a collated micro-batch and returns one row a sample: a tensor ``[n, ...]``, or a tuple, list or dict of
            them.
        batch_size: samples at a time over all virtual nodes, divisible by their number.
        **loader: passed through to the ``DataLoader``.

    Raises:
        ConfigurationError: the dataset, the sizes or the rows do not fit.
    """
    hint = ', without reducing over the batch (for a loss: reduction="none", and .mean() of what vf.evaluate returns)'
    origin = RowSource("the function of vf.evaluate", "return", hint)

    def compute(batch: MicroBatch, places: Tensor) -> tuple[Tensor, Rows]:
        rows = check_rows(origin, fn(batch.data), batch.size)
        return places, rows if active_loop() is None else each(rows, Tensor.cpu)

    collected = Collected(compute)
    go_through("vf.evaluate", model, dataset, collected, batch_size=batch_size, **loader)
    return in_order(origin, collected.parts)


def evaluate_in_parts(
    model: nn.Module,
    dataset: Any,
    compute: Callable[[MicroBatch], Any],
    *,
    batch_size: int,
    **loader: Unpack[LoaderOptions],
) -> list[Any]:
    """What ``compute`` returns of each micro-batch, in their order: of a run, tensors of the CPU in nests."""
    collected = Collected(lambda batch, _: compute(batch))
    go_through("vf.evaluate", model, dataset, collected, batch_size=batch_size, **loader)
    return collected.parts


class Collected:
    """The results of all micro-batches, on every worker. Implements `Collector`."""

    steps = 1

    def __init__(self, compute: Callable[[MicroBatch, Tensor], Any]) -> None:
        self.compute = compute
        self.parts: list[Any] = []

    def share(self, first: int, node: int, computed: Sequence[Any]) -> Any:
        return computed[0]

    def take(self, shared: Mapping[int, Any]) -> None:
        self.parts += shared.values()

    def complete(self) -> bool:
        return False


def go_through(
    call: str,
    model: nn.Module,
    dataset: Any,
    collector: Collector,
    *,
    batch_size: int,
    **loader: Unpack[LoaderOptions],
) -> None:
    """Let ``collector`` compute on all samples, with the model in evaluation mode.

    Raises:
        ConfigurationError: the dataset or the sizes do not fit.
        VirtualFlowError: ``call`` stands at the wrong place of the script.
    """
    show_errors_plainly()
    loop = loop_between_steps(call)
    modes = {module: module.training for module in model.modules()}
    source = open_source(
        dataset,
        batch_size=batch_size,
        virtual_nodes=1 if loop is None else loop.context.request.virtual_nodes,
        seed=0 if loop is None else loop.context.request.options.seed,
        shuffle=False,
        drop_last=False,
        epochs=1,
        options=loader,
    )
    try:
        model.eval()
        with torch.no_grad():
            (_Alone(source, collector) if loop is None else _Together(source, collector, loop, call)).run()
    finally:
        source.close()
        # By its own method, which may do more than to set the modes (merged adapters); each behind those it is in.
        for module, training in modes.items():
            if module.training is not training:
                module.train(training)
                module.training = training


def loop_between_steps(call: str) -> Loop | None:
    """The run's loop, if there is a run, at a place where all workers can call for an evaluation."""
    loop = active_loop()
    if loop is not None and loop.inside_step:
        raise VirtualFlowError(f"call {call} after the micro-batches of a step, or after the last step")
    if loop is not None and not loop.context.session.state.has_state:
        raise VirtualFlowError(f"call {call} after the first step: a worker that joins later cannot repeat it")
    return loop


class _Alone:
    """The way through a dataset, from one exchange to the next; this process has the only virtual node."""

    virtual_nodes = 1

    def __init__(self, source: Source, collector: Collector) -> None:
        self._source, self._collector = source, collector
        self._computed: dict[int, list[tuple[int, Any]]] = {}
        """By virtual node, samples and result of each global batch since the last exchange."""

    def run(self) -> None:
        self._source.assign(range(1), 0, 0)
        self._go()
        self._collector.complete()

    def _go(self) -> None:
        first, steps = 0, self._source.steps_per_epoch
        while steps is None or first < steps:
            stop = first + self._collector.steps
            shared = self._exchange(range(first, stop if steps is None else min(stop, steps)))
            self._collector.take({node: of for node, (_, of) in sorted(shared.items())})
            if not any(last for last, _ in shared.values()):
                return  # all streams are at their end
            first = stop

    def _exchange(self, steps: range) -> dict[int, tuple[int, Any]]:
        """By virtual node that had samples, how many it had in the last of these global batches, and what it shares."""
        self._computed.clear()
        return self._share(steps, range(1))

    def _share(self, steps: range, nodes: Sequence[int]) -> dict[int, tuple[int, Any]]:
        """What this worker shares, computed as far as an attempt before has not done so."""
        for done, step in enumerate(steps):
            missing = [node for node in nodes if len(self._computed.setdefault(node, [])) == done]
            self._compute_all(step, done, missing)
        shared = {}
        for node in nodes:
            results = [result for size, result in self._computed.get(node, ()) if size]
            if results:
                last, _ = self._computed[node][-1]
                shared[node] = last, self._collector.share(steps.start, node, results)
        return shared

    def _compute_all(self, step: int, done: int, nodes: Sequence[int]) -> None:
        for node in nodes:
            self._compute(self._source.fetch(0, step, node))

    def _compute(self, batch: MicroBatch) -> None:
        node, result = batch.virtual_node, None
        if batch.size:
            places = torch.as_tensor(batch.loaded)
            if self._source.steps_per_epoch is None:
                places = places * self.virtual_nodes + node
            result = self._collector.compute(batch, places)
            self._check_values()
        self._computed[node].append((batch.size, result))

    def _check_values(self) -> None:
        """Make sure that the model was what it should be."""


class _Together(_Alone):
    """The same on all workers of a run; the rows of virtual node v are the v-th slice of a global batch."""

    def __init__(self, source: Source, collector: Collector, loop: Loop, call: str) -> None:
        super().__init__(source, collector)
        self._loop, self._context, self._call = loop, loop.context, call
        self._state = loop.context.session.state
        self._assigned: Sequence[int] = range(0)
        self.virtual_nodes = loop.context.request.virtual_nodes

    def run(self) -> None:
        context = self._context
        context.reporter.phase("evaluating")
        self._go()
        if self._collector.complete():
            self._exchange(range(0))
        self._loop.seed_between_steps()
        context.session.activity.mark(BETWEEN, context.training.completed_steps)
        context.reporter.phase("training")  # joiners may come

    def _exchange(self, steps: range) -> dict[int, tuple[int, Any]]:
        training, membership = self._context.training, self._context.membership
        number = training.exchanges + 1
        training.arrive()
        self._computed.clear()
        while training.exchanges < number:
            if steps and self._state.assigned != self._assigned:
                self._assigned = self._state.assigned
                self._source.assign(self._assigned, 0, steps.start)
            try:
                self._attempt(steps, number)
            except CommunicatorBroken as error:
                membership.recover(error)
                self._assigned = range(0)
        if training.evaluated is None:
            raise VirtualFlowError(f"an evaluation was overtaken by a step; call {self._call} on all workers alike")
        shared: dict[int, tuple[int, Any]] = {}
        for block in training.evaluated:
            shared |= codec.unpack(block)
        return shared

    def _attempt(self, steps: range, number: int) -> None:
        context, state, membership = self._context, self._state, self._context.membership
        communicator = membership.communicator
        mine = self._share(steps, state.assigned)
        form = context.update.sync.header_format(state.ranges)
        # A stop writes a checkpoint, and whoever begins from it does not run the code behind its step.
        offer = context.session.offer(evaluating=True, stops=self._loop.trained)
        header = form.write(form.tell(Kind.EVALUATE, number, offer))
        headers = read_headers(form, communicator.all_gather(header), Kind.EVALUATE, number)
        blocks = gather_bytes(communicator, codec.pack(mine))
        context.training.complete_exchange(blocks)
        membership.note_offers(header.offer for header in headers)
        agreed = membership.agreed
        if agreed is not None and not agreed.joiners and (agreed.members or self._loop.trained):
            membership.switch()  # members that drain leave now; joiners and a stop wait for its end

    def _compute_all(self, step: int, done: int, nodes: Sequence[int]) -> None:
        context, turns, step_made = self._context, self._context.turns, self._context.training.completed_steps
        check, mark, number = context.membership.check, context.session.activity.mark, context.training.exchanges + 1
        try:
            for node in nodes:
                check()
                mark("evaluating", step_made)
                batch = self._source.fetch(0, step, node)
                if batch.size:
                    if turns is not None:
                        turns.take(step_made, check)
                        mark("evaluating", step_made)
                    seed_virtual_node(context.request.options.seed, -number, done * self.virtual_nodes + node)
                self._compute(batch)
        finally:
            if turns is not None:
                turns.give_back()

    def _check_values(self) -> None:
        sharded = self._context.update.sharded
        if sharded is not None:
            sharded.check_values()


def check_rows(origin: RowSource, rows: Rows, samples: int) -> Rows:
    """``rows`` with tuples for lists.

    Raises:
        ConfigurationError: they are no tensors in tuples, lists and dicts, or not one a sample.
    """
    if isinstance(rows, dict):
        return {name: check_rows(origin, value, samples) for name, value in rows.items()}
    if isinstance(rows, tuple | list):
        return tuple(check_rows(origin, value, samples) for value in rows)
    if not isinstance(rows, Tensor):
        raise ConfigurationError(
            f"{origin.giver} returned a {type(rows).__name__}; {origin.remedy} a tensor with one row a sample, or "
            "a tuple, list or dict of such tensors"
        )
    if rows.ndim == 0 or rows.shape[0] != samples:
        raise ConfigurationError(
            f"{origin.giver} returned a tensor of shape {list(rows.shape)} for {counted(samples, 'sample')}; "
            f"{origin.remedy} one row a sample{origin.hint}"
        )
    return rows.detach()


def in_order(origin: RowSource, parts: Sequence[tuple[Tensor, Rows]]) -> Rows:
    """Rows in the order of their places in the dataset.

    Args:
        parts: the places of some rows, int64 ``[n]``, and these rows.
    """
    if not parts:
        raise ConfigurationError("the dataset is empty; give one with at least 1 sample")
    places = torch.cat([part for part, _ in parts])
    rows = join(origin, [part for _, part in parts])
    if len(places) < 2 or bool((places[1:] > places[:-1]).all()):
        return rows
    order = places.argsort()
    return each(rows, lambda tensor: tensor[order])


def each(rows: Rows, change: Callable[[Tensor], Tensor]) -> Rows:
    if isinstance(rows, Tensor):
        return change(rows)
    if isinstance(rows, dict):
        return {name: each(value, change) for name, value in rows.items()}
    return tuple(each(value, change) for value in rows)


def join(origin: RowSource, parts: Sequence[Rows]) -> Rows:
    """Put rows one behind the other.

    Raises:
        ConfigurationError: they differ in shape or structure.
    """
    first = parts[0]
    other = next((part for part in parts if _form(part) != _form(first)), None)
    if other is not None:
        raise ConfigurationError(
            f"{origin.giver} returned rows of the form {_form(first)} for one batch and {_form(other)} for another; "
            f"{origin.remedy} rows of one form, such as sequences that are padded to one length"
        )
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, dict):
        return {name: join(origin, [part[name] for part in parts]) for name in first}
    return tuple(join(origin, [part[place] for part in parts]) for place in range(len(first)))


def _form(rows: Rows) -> str:
    if isinstance(rows, Tensor):
        return str(list(rows.shape[1:]))
    if isinstance(rows, dict):
        return "{" + ", ".join(f"{name}: {_form(value)}" for name, value in rows.items()) + "}"
    return "(" + ", ".join(_form(value) for value in rows) + ")"

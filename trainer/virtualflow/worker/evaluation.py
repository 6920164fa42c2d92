"""Inference over a dataset on the same virtual nodes: every sample once, results in dataset order, on every worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from virtualflow._arguments import checked
from virtualflow.data import LoaderOptions, MicroBatch, Source, check_dataset, open_source, seed_virtual_node
from virtualflow.errors import CommunicatorBroken, ConfigurationError, VirtualFlowError, show_errors_plainly
from virtualflow.protocol.wording import counted
from virtualflow.state import codec
from virtualflow.step import Kind, read_headers
from virtualflow.transport import gather_bytes
from virtualflow.worker.loop import BETWEEN, Loop
from virtualflow.worker.run import active_loop

Rows = Any
"""A tensor with one row a sample, or a tuple, list or dict of such."""

Compute = Callable[[MicroBatch], Any]
"""Gets a micro-batch, and returns what all workers are to have of it: of a run, tensors of the CPU in nests."""


@checked("vf.evaluate", LoaderOptions.__annotations__)
def evaluate(
    model: nn.Module, dataset: Any, fn: Callable[[Any], Rows], *, batch_size: int, **loader: Unpack[LoaderOptions]
) -> Rows:
    """Run ``fn`` over a map-style dataset and return its rows in dataset order, the same on every worker.

    Inside the ``with`` block of a run all its workers share the work, so all must call it: after a step's micro-batches
    or after the last step. Members may drain or be lost meanwhile. Joiners wait until it is over. Without a run, this
    process does everything.

    Args:
        model: put into evaluation mode meanwhile.
        dataset: map-style.
        fn: gets a collated micro-batch and returns one row a sample: a tensor ``[n, ...]``, or a tuple, list or dict of
            them.
        batch_size: samples at a time over all virtual nodes, divisible by their number.
        **loader: passed through to the ``DataLoader``.

    Raises:
        ConfigurationError: the dataset is no map-style one or the sizes do not fit.
    """

    def compute(batch: MicroBatch) -> Rows:
        rows = _checked(fn(batch.data), batch.size)
        return rows if active_loop() is None else _to_cpu(rows)

    return _join(evaluate_in_parts(model, dataset, compute, batch_size=batch_size, **loader))


def evaluate_in_parts(
    model: nn.Module, dataset: Any, compute: Compute, *, batch_size: int, **loader: Unpack[LoaderOptions]
) -> list[Any]:
    show_errors_plainly()
    loop = active_loop()
    check_dataset(dataset)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(
            "vf.evaluate needs a map-style dataset (with __len__ and __getitem__): rows have an order"
        )
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
            return _alone(source, compute) if loop is None else _together(loop, source, compute)
    finally:
        source.close()
        for module, training in modes.items():
            module.training = training


def _alone(source: Source, compute: Compute) -> list[Any]:
    source.assign(range(1), 0, 0)
    return [compute(source.fetch(0, step, 0)) for step in range(source.steps_per_epoch or 0)]


def _together(loop: Loop, source: Source, compute: Compute) -> list[Any]:
    """One exchange a batch; the rows of virtual node v are the v-th slice of the batch."""
    _begin(loop)
    training, membership, state = loop.context.training, loop.context.membership, loop.context.session.state
    found: list[Any] = []
    assigned = range(0)
    for step in range(source.steps_per_epoch or 0):
        number = training.exchanges + 1
        training.arrive()
        while training.exchanges < number:
            if state.assigned != assigned:
                assigned = state.assigned
                source.assign(assigned, 0, step)
            try:
                _gather(loop, source, compute, step, number)
            except CommunicatorBroken as error:
                membership.recover(error)
                assigned = range(0)
        if training.evaluated is None:
            raise VirtualFlowError("an evaluation was overtaken by a step; call vf.evaluate on all workers alike")
        by_node: dict[int, Any] = {}
        for block in training.evaluated:
            by_node |= codec.unpack(block)
        found += [by_node[node] for node in sorted(by_node)]
    loop.seed_between_steps()
    loop.context.session.activity.mark(BETWEEN, training.completed_steps)
    loop.context.reporter.phase("training")  # joiners may come
    return found


def _begin(loop: Loop) -> None:
    if loop.inside_step:
        raise VirtualFlowError("call vf.evaluate after the micro-batches of a step, or after the last step")
    if not loop.context.session.state.has_state:
        raise VirtualFlowError("call vf.evaluate after the first step: a worker that joins later cannot repeat it")
    loop.context.reporter.phase("evaluating")


def _gather(loop: Loop, source: Source, compute: Compute, step: int, number: int) -> None:
    context, state = loop.context, loop.context.session.state
    membership, turns, step_made = context.membership, context.turns, context.training.completed_steps
    communicator = membership.communicator
    mine: dict[int, Any] = {}
    try:
        for node in state.assigned:
            membership.check()
            context.session.activity.mark("evaluating", step_made)
            batch = source.fetch(0, step, node)
            if batch.size:
                if turns is not None:
                    turns.take(step_made, membership.check)
                    context.session.activity.mark("evaluating", step_made)
                seed_virtual_node(context.request.options.seed, -number, node)
                mine[node] = compute(batch)
    finally:
        if turns is not None:
            turns.give_back()
    form = context.update.sync.header_format(state.ranges)
    header = form.write(form.tell(Kind.EVALUATE, number, context.session.offer(evaluating=True)))
    headers = read_headers(form, communicator.all_gather(header), Kind.EVALUATE, number)
    blocks = gather_bytes(communicator, codec.pack(mine))
    context.training.complete_exchange(blocks)
    membership.note_offers(header.offer for header in headers)
    if membership.agreed is not None:
        membership.switch()  # members that drain leave now


def _checked(rows: Rows, samples: int) -> Rows:
    """``rows`` with tuples for lists."""
    if isinstance(rows, dict):
        return {name: _checked(value, samples) for name, value in rows.items()}
    if isinstance(rows, tuple | list):
        return tuple(_checked(value, samples) for value in rows)
    if not isinstance(rows, Tensor):
        raise ConfigurationError(
            f"the function of vf.evaluate returned a {type(rows).__name__}; return a tensor with one row a sample, or "
            "a tuple, list or dict of such tensors"
        )
    if rows.ndim == 0 or rows.shape[0] != samples:
        raise ConfigurationError(
            f"the function of vf.evaluate returned a tensor of shape {list(rows.shape)} for "
            f"{counted(samples, 'sample')}; return one row a sample, without reducing over the batch "
            '(for a loss: reduction="none", and .mean() of what vf.evaluate returns)'
        )
    return rows.detach()


def _to_cpu(rows: Rows) -> Rows:
    if isinstance(rows, Tensor):
        return rows.cpu()
    if isinstance(rows, dict):
        return {name: _to_cpu(value) for name, value in rows.items()}
    return tuple(_to_cpu(value) for value in rows)


def _join(parts: list[Rows]) -> Rows:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {name: _join([part[name] for part in parts]) for name in first}
    return tuple(_join([part[place] for part in parts]) for place in range(len(first)))

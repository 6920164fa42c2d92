"""Canonical reduction: sums over virtual nodes whose bits do not depend on who is assigned which of them.

Every sum has the shape of one balanced binary tree over the virtual nodes (``tree``). A worker adds up what it is
assigned as it goes and holds only the maximal subtrees of its range (:class:`Accumulator`). Between workers, everyone
gets its slice of all subtrees, adds it up in tree order, and sends the sum to all (``pipeline``): the traffic of a ring
all-reduce when ranges are subtrees, and no dependence on the number of workers, because element by element the same
additions happen in the same order.

A tensor that a virtual node does not contribute counts as +0.0 everywhere, also where it could be left out: x + 0.0 is
not always x (-0.0 + 0.0 is 0.0), so leaving it out here and adding it there would give different bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from virtualflow.reduction.accumulation import Accumulator, Parts, Tensors, add_tensors, multiply
from virtualflow.reduction.buckets import plan_buckets
from virtualflow.reduction.early import Early
from virtualflow.reduction.ownership import Owners
from virtualflow.reduction.pipeline import Buffers, Exchanger, Keys, Pipeline, ReductionPlan, as_raw, flatten, unflatten
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.reduction.summation import Summation
from virtualflow.reduction.tree import Key
from virtualflow.transport import Collectives


class Reducer:
    """Reduces between workers; keeps its buffers from step to step, since fresh large ones cost page faults.

    Args:
        summation: the order of summation.
        settings: how tensors travel.
    """

    def __init__(self, summation: Summation, settings: ReductionSettings) -> None:
        self._summation = summation
        self._settings = settings
        self._buffers = Buffers()
        self._owners: Owners | None = None
        self._exchanger: Exchanger | None = None

    def close(self) -> None:
        """End the thread that exchanges."""
        self._leave_thread(self._settings.close_wait)

    def _leave_thread(self, patience: float) -> None:
        if self._exchanger is not None:
            self._exchanger.close(patience)
            self._exchanger = None

    def share(self, owners: Owners | None) -> None:
        """Bring the sums of the first places to their ``owners`` only; those of further places to all."""
        self._owners = owners

    def _needed_by(self, templates: Sequence[Tensor], size: int) -> list[Sequence[int]] | None:
        if self._owners is None:
            return None
        return [*self._owners, *([range(size)] * (len(templates) - len(self._owners)))]

    def release_unused(self) -> None:
        """An exchange is complete: free buffers that it did without."""
        self._buffers.release_unused()

    def forget(self) -> None:
        """Another communicator comes: free the buffers, and leave a thread behind that may hang in the former one."""
        self._buffers.clear()
        self._leave_thread(0.0)

    def reduce(
        self,
        collectives: Collectives,
        holdings: Sequence[Sequence[int]],
        parts: Parts,
        *,
        templates: Sequence[Tensor],
        present: Sequence[bool],
        scale: float,
    ) -> Tensors:
        """Sum over all virtual nodes, times ``scale``, on every worker that needs it (see :meth:`share`).

        Args:
            collectives: the communicator.
            holdings: the virtual nodes of each of its members, ascending, in the order of their ranks.
            parts: what an :class:`Accumulator` has of this worker's; they are used up where it is alone.
            templates: one tensor per place, with its shape, dtype and device.
            present: which places any virtual node of the job contributed to; the others come back as ``None``,
                as do those whose sums this worker does not need.
            scale: the factor of the sum, the same on every worker.

        Returns:
            One contiguous tensor per present place, views of buffers that the next call overwrites.
        """
        result: Tensors = [None] * len(templates)
        places = [place for place, there in enumerate(present) if there]
        if collectives.size == 1:
            total = self._summation.add_up(dict(parts), add_tensors)
            # What is present was contributed by this worker: there is no other.
            found = [tensor.contiguous() for tensor in (total[place] for place in places) if tensor is not None]
            multiply(found, scale)
            for place, tensor in zip(places, found, strict=True):
                result[place] = tensor
            return result
        keys = self._keys(holdings)
        small = self._small_places(keys, templates, places)
        plan = self._plan(collectives, keys, templates, scale)
        for group in small:
            for place, tensor in self._gather(plan, parts, group):
                if plan.needed_by is None or collectives.rank in plan.needed_by[place]:
                    result[place] = tensor
        large = [place for place in places if not any(place in group for group in small)]
        if large:
            plan = self._in_buckets(plan, large[::-1])
            pipeline = Pipeline(plan, self._buffers, "late")
            for index, bucket in enumerate(plan.buckets):
                for row, (_, tensors) in enumerate(parts):
                    pipeline.write_row(index, row, [tensors[place] for place in bucket.places])
                pipeline.submit(index)
            pipeline.close(None)
            self._exchange(pipeline.run)
            for index in range(len(plan.buckets)):
                for place, tensor in pipeline.result(index).items():
                    result[place] = tensor
        return result

    def begin(
        self,
        collectives: Collectives,
        holdings: Sequence[Sequence[int]],
        accumulator: Accumulator,
        *,
        last: int,
        count: int = 1,
        weight: float,
        templates: Sequence[Tensor],
        places: Sequence[int],
        scale: float,
    ) -> Early | None:
        """Begin to reduce before the last virtual node's tensors are there; ``None`` if that is not worth it.

        All workers call this at the same place of the same synchronization, or none does.

        Args:
            collectives: the communicator.
            holdings: the virtual nodes of each of its members, ascending, in the order of their ranks.
            accumulator: the sums of this worker's virtual nodes but for the last.
            last: that one, or the first of several.
            count: how many are computed as one.
            weight: the factor of its tensors.
            templates: one tensor per place.
            places: which of them are reduced, in the order in which they are expected; the same on all workers.
            scale: the factor of the sum.
        """
        if collectives.size == 1:
            return None
        keys = self._keys(holdings)
        small = {place for group in self._small_places(keys, templates, places) for place in group}
        large = [place for place in places if place not in small]
        if not large:
            return None
        plan = self._in_buckets(self._plan(collectives, keys, templates, scale), large)
        pipeline = Pipeline(plan, self._buffers, "early")
        accumulator.await_offloaded()  # what is not added to any more is written to messages
        early = Early(pipeline, plan.buckets, accumulator.prepare(last, count, weight=weight))
        self._exchange(pipeline.run)
        return early

    def _exchange(self, task: Callable[[], None]) -> None:
        if self._exchanger is None:
            self._exchanger = Exchanger()
        self._exchanger.submit(task)

    def _plan(self, collectives: Collectives, keys: Keys, templates: Sequence[Tensor], scale: float) -> ReductionPlan:
        def total(arrived: dict[Key, Tensor], out: Tensor | None = None) -> Tensor:
            whole = self._summation.add_up(arrived, Tensor.add_)
            if scale != 1.0:
                return torch.mul(whole, scale, out=whole if out is None else out)
            return whole if out is None else out.copy_(whole)

        return ReductionPlan(collectives, keys, total, templates, (), self._needed_by(templates, collectives.size))

    def _in_buckets(self, plan: ReductionPlan, places: Sequence[int]) -> ReductionPlan:
        settings = self._settings
        size = plan.collectives.size
        buckets = plan_buckets(plan.templates, places, size, alignment=settings.alignment, limit=settings.bucket)
        return replace(plan, buckets=buckets)

    def _keys(self, holdings: Sequence[Sequence[int]]) -> Keys:
        return [self._summation.parts_of(holding) for holding in holdings]

    def _small_places(self, keys: Keys, templates: Sequence[Tensor], places: Sequence[int]) -> list[list[int]]:
        """Places of the types of which there is so little that latency counts and not bandwidth."""
        groups: dict[torch.dtype, list[int]] = {}
        for place in places:
            groups.setdefault(templates[place].dtype, []).append(place)
        rows = len(keys) * max(len(nodes) for nodes in keys)
        return [
            group
            for dtype, group in groups.items()
            if rows * sum(templates[place].numel() for place in group) * dtype.itemsize <= self._settings.small_exchange
        ]

    def _gather(self, plan: ReductionPlan, parts: Parts, places: list[int]) -> list[tuple[int, Tensor]]:
        """Everyone gets all subtrees, whole, and does the same additions."""
        collectives, keys, templates = plan.collectives, plan.keys, plan.templates
        most, total = max(len(nodes) for nodes in keys), sum(templates[place].numel() for place in places)
        dtype = templates[places[0]].dtype
        flat = self._buffers.get(("small", most), (most, total), dtype)
        for row, (_, tensors) in zip(flat, parts, strict=False):
            flatten(row, [tensors[place] for place in places], [templates[place] for place in places])
        gathered = self._buffers.get(("gathered", most), (collectives.size, most, total), dtype)
        collectives.start_all_gather(as_raw(gathered), as_raw(flat)).wait()
        arrived = {node: gathered[rank, at] for rank, nodes in enumerate(keys) for at, node in enumerate(nodes)}
        return list(zip(places, unflatten(plan.total(arrived), [templates[place] for place in places]), strict=True))

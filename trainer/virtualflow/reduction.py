"""Canonical reduction: sums over virtual nodes whose bits do not depend on who carries which of them.

Every sum has the shape of one balanced binary tree over the virtual nodes (``assignment``). A worker adds up what it
carries as it goes and holds only the maximal subtrees of its range (:class:`Accumulator`). Between workers, everyone
gets its slice of all subtrees, adds it up in tree order, and sends the sum to all (``pipeline``): the traffic of a ring
all-reduce when ranges are subtrees, and no dependence on the number of workers, because element by element the same
additions happen in the same order.

A tensor that a virtual node does not contribute counts as +0.0 everywhere, also where it could be left out: x + 0.0 is
not always x (-0.0 + 0.0 is 0.0), so leaving it out here and adding it there would give different bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from virtualflow.accumulation import Accumulator, Parts, Tensors, add_tensors
from virtualflow.buckets import Bucket, plan_buckets
from virtualflow.collectives import Collectives
from virtualflow.pipeline import Buffers, Early, Exchanger, Keys, Pipeline, as_raw, flatten, unflatten
from virtualflow.settings import CommunicatorSettings
from virtualflow.sharding import Keepers
from virtualflow.summation import add_up, parts_of


class Reducer:
    """Reduces between workers; keeps its buffers from step to step, since fresh large ones cost page faults.

    Args:
        virtual_nodes: how many there are.
        alignment: bytes at whose multiples slices start.
        small: up to so many bytes at each worker, subtrees are gathered whole: there and not back again.
        bucket: so many bytes travel together.
        canonical: workers contribute subtrees, summed in the shape of the tree; else one sum each (``summation``).
    """

    def __init__(self, virtual_nodes: int, alignment: int, small: int, bucket: int, canonical: bool = True) -> None:
        self._virtual_nodes = virtual_nodes
        self._canonical = canonical
        self._alignment = alignment
        self._small = small
        self._bucket = bucket
        self._buffers = Buffers()
        self._keepers: Keepers | None = None
        self._exchanger: Exchanger | None = None

    def close(self) -> None:
        """End the thread that exchanges."""
        self._leave_thread(CommunicatorSettings.wait_slice)

    def _leave_thread(self, patience: float) -> None:
        if self._exchanger is not None:
            self._exchanger.close(patience)
            self._exchanger = None

    def share(self, keepers: Keepers | None) -> None:
        """Bring the sums of the first places to their ``keepers`` only; those of further places to all."""
        self._keepers = keepers

    def _needed_by(self, templates: Sequence[Tensor], size: int) -> list[Sequence[int]] | None:
        if self._keepers is None:
            return None
        return [*self._keepers, *([range(size)] * (len(templates) - len(self._keepers)))]

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
        ranges: Sequence[range],
        parts: Parts,
        templates: Sequence[Tensor],
        present: Sequence[bool],
        scale: float,
    ) -> Tensors:
        """Sum over all virtual nodes, times ``scale``, on every worker that needs it (see :meth:`share`).

        Args:
            collectives: the communicator; its members carry ``ranges`` in the order of their ranks.
            parts: what an :class:`Accumulator` holds for this worker's range; used up.
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
            total = add_up(self._virtual_nodes, dict(parts), add_tensors, self._canonical)
            # What is present was contributed by this worker: there is no other.
            found = [tensor.contiguous() for tensor in (total[place] for place in places) if tensor is not None]
            if scale == 1.0:
                pass
            elif found and _is_power_of_two(scale):
                torch._foreach_mul_(found, scale)
            else:  # The other would round the factor to the type of the tensors first.
                for tensor in found:
                    tensor.mul_(scale)
            for place, tensor in zip(places, found, strict=True):
                result[place] = tensor
            return result
        keys = self._keys(ranges)
        small = self._small_places(keys, templates, places)
        needed_by = self._needed_by(templates, collectives.size)
        for group in small:
            for place, tensor in self._gather(collectives, keys, parts, templates, group, scale):
                if needed_by is None or collectives.rank in needed_by[place]:
                    result[place] = tensor
        large = [place for place in places if not any(place in group for group in small)]
        if large:
            buckets = plan_buckets(templates, large[::-1], collectives.size, self._alignment, self._bucket)
            pipeline = self._pipeline(collectives, keys, buckets, templates, "late", scale)
            for index, bucket in enumerate(buckets):
                for row, (_, tensors) in enumerate(parts):
                    pipeline.write_row(index, row, [tensors[place] for place in bucket.places])
                pipeline.submit(index)
            pipeline.close(None)
            self._exchange(pipeline.run)
            for index in range(len(buckets)):
                for place, tensor in pipeline.result(index).items():
                    result[place] = tensor
        return result

    def begin(
        self,
        collectives: Collectives,
        ranges: Sequence[range],
        accumulator: Accumulator,
        last: int,
        templates: Sequence[Tensor],
        places: Sequence[int],
        scale: float,
    ) -> Early | None:
        """Begin to reduce before the last virtual node's tensors are there; ``None`` if that is not worth it.

        All workers call this at the same place of the same exchange, or none does.

        Args:
            collectives: the communicator; its members carry ``ranges`` in the order of their ranks.
            ranges: see above.
            accumulator: the sums of this worker's range but for its last virtual node.
            last: that one.
            templates: one tensor per place.
            places: which of them are reduced, in the order in which they are expected; the same on all workers.
            scale: the factor of the sum.
        """
        if collectives.size == 1:
            return None
        keys = self._keys(ranges)
        small = {place for group in self._small_places(keys, templates, places) for place in group}
        large = [place for place in places if place not in small]
        if not large:
            return None
        buckets = plan_buckets(templates, large, collectives.size, self._alignment, self._bucket)
        pipeline = self._pipeline(collectives, keys, buckets, templates, "early", scale)
        early = Early(pipeline, buckets, accumulator.parts, accumulator.merges(last))
        self._exchange(pipeline.run)
        return early

    def _exchange(self, task: Callable[[], None]) -> None:
        if self._exchanger is None:
            self._exchanger = Exchanger()
        self._exchanger.submit(task)

    def _pipeline(
        self,
        collectives: Collectives,
        keys: Keys,
        buckets: Sequence[Bucket],
        templates: Sequence[Tensor],
        name: str,
        scale: float,
    ) -> Pipeline:
        needed_by = self._needed_by(templates, collectives.size)
        return Pipeline(collectives, self._add_up, keys, buckets, templates, self._buffers, name, scale, needed_by)

    def _add_up(self, arrived: dict[tuple[int, int], Tensor]) -> Tensor:
        return add_up(self._virtual_nodes, arrived, Tensor.add_, self._canonical)

    def _keys(self, ranges: Sequence[range]) -> Keys:
        return [parts_of(self._virtual_nodes, carried, self._canonical) for carried in ranges]

    def _small_places(self, keys: Keys, templates: Sequence[Tensor], places: Sequence[int]) -> list[list[int]]:
        """Places of the types of which there is so little that latency counts and not bandwidth."""
        groups: dict[torch.dtype, list[int]] = {}
        for place in places:
            groups.setdefault(templates[place].dtype, []).append(place)
        rows = len(keys) * max(len(nodes) for nodes in keys)
        return [
            group
            for dtype, group in groups.items()
            if rows * sum(templates[place].numel() for place in group) * dtype.itemsize <= self._small
        ]

    def _gather(
        self,
        collectives: Collectives,
        keys: Keys,
        parts: Parts,
        templates: Sequence[Tensor],
        places: list[int],
        scale: float,
    ) -> list[tuple[int, Tensor]]:
        """Everyone gets all subtrees, whole, and does the same additions."""
        most, total = max(len(nodes) for nodes in keys), sum(templates[place].numel() for place in places)
        dtype = templates[places[0]].dtype
        flat = self._buffers.get(("small", most), (most, total), dtype)
        for row, (_, tensors) in zip(flat, parts, strict=False):
            flatten(row, [tensors[place] for place in places], [templates[place] for place in places])
        gathered = self._buffers.get(("gathered", most), (collectives.size, most, total), dtype)
        collectives.start_all_gather(as_raw(gathered), as_raw(flat)).wait()
        arrived = {node: gathered[rank, at] for rank, nodes in enumerate(keys) for at, node in enumerate(nodes)}
        whole = self._add_up(arrived)
        if scale != 1.0:
            whole.mul_(scale)
        return list(zip(places, unflatten(whole, [templates[place] for place in places]), strict=True))


def _is_power_of_two(factor: float) -> bool:
    """Whether every floating-point type holds that factor as it is."""
    return math.frexp(factor)[0] == 0.5 and 2.0**-14 <= factor <= 1.0

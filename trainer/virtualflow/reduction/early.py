"""The beginning of a reduction before the last backward pass has ended.

The sums of a worker's range but for its last virtual node are there already, so each gradient of that one is added,
written and sent as soon as it is known; what else there is to a reduction, ``pipeline`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from virtualflow.reduction.accumulation import Addition, Tensors, add_one, add_tensors, multiply, separate
from virtualflow.reduction.buckets import Bucket
from virtualflow.reduction.pipeline import Pipeline


class Early:
    """A reduction that begins while the last virtual node's tensors come in, one by one.

    Args:
        pipeline: of these buckets.
        buckets: what is reduced.
        addition: of the last virtual node to the sums of the worker's range before it.
    """

    def __init__(self, pipeline: Pipeline, buckets: Sequence[Bucket], addition: Addition) -> None:
        self.pipeline = pipeline
        """Exchanges the headers, too, when everything was given, and breaks off what is under way."""
        self._addition = addition
        self._buckets = buckets
        self._where = {
            place: (index, at) for index, bucket in enumerate(buckets) for at, place in enumerate(bucket.places)
        }
        self._missing = [len(bucket.places) for bucket in buckets]
        self._staged: dict[tuple[int, int], Tensors] = {}
        self._next = 0

    def weigh(self, weight: float) -> None:
        """The factor of the last virtual node's tensors is another one; none of them has been given."""
        self._addition.weight = weight

    @property
    def places(self) -> frozenset[int]:
        """What it reduces."""
        return frozenset(self._where)

    def takes(self, place: int) -> bool:
        """Whether it reduces a place."""
        return place in self._where

    def give(self, place: int, tensor: Tensor, *, own: bool) -> Tensor:
        """Add up and write a place.

        Args:
            place: each once.
            tensor: the last virtual node's; it may change after this.
            own: whether it need not be kept.

        Returns:
            See :class:`~virtualflow.reduction.handover.Receiver`. Never memory of the message: a script that changes
            its gradients by surprise must not change what is just being sent under its checksum.
        """
        kept = self._give(place, tensor, own=own)
        self._submit_full()
        return kept if own and kept is not None else tensor

    def _give(self, place: int, tensor: Tensor | None, *, own: bool) -> Tensor | None:
        """Add up and write a place; memory of its shape that nobody else is going to read, if there is some."""
        index, at = self._where[place]
        addition = self._addition
        for row, tensors in enumerate(addition.above):
            self._place(index, at, row, tensors[place])
            tensors[place] = None
        left, right = addition.prepare(place, tensor)
        self._missing[index] -= 1
        if left is None or right is None or not self.pipeline.on_host[index]:
            total = add_one(left, right) if addition.merged else right
            if total is tensor and total is not None and not own and not self.pipeline.on_host[index]:
                total = total.clone()  # it is written with its bucket
            self._place(index, at, len(addition.above), total)
            return total
        # The last addition writes the message, so that nothing is copied.
        lefts, rights = left.reshape(-1), right.reshape(-1)
        for begin, stretch in self.pipeline.segments(index, at, len(addition.above)):
            end = begin + stretch.numel()
            torch.add(lefts[begin:end], rights[begin:end], out=stretch)
        return left

    def give_rest(self, tensors: Mapping[int, Tensor | None]) -> None:
        """The last virtual node's contributions to all places that were not given yet; they are used up."""
        apart = dict(zip(tensors, separate(tensors.values()), strict=True))
        for index, bucket in enumerate(self._buckets):
            if self._missing[index] == len(bucket.places):
                self._give_bucket(index, [apart[place] for place in bucket.places])
            else:
                for place in apart.keys() & bucket.places:
                    self._give(place, apart[place], own=True)
        self._submit_full()

    def _give_bucket(self, index: int, last: Tensors) -> None:
        """As :meth:`give` for every place of a bucket: a few calls for all of them."""
        places, addition = self._buckets[index].places, self._addition
        multiply(last, addition.weight)
        for row, tensors in enumerate(addition.above):
            self.pipeline.write_row(index, row, _take(tensors, places))
        for tensors in reversed(addition.merged):
            last = add_tensors([addition.take(tensors, place) for place in places], last)
        self.pipeline.write_row(index, len(addition.above), last)
        self._missing[index] = 0
        self._submit_full()

    def _place(self, index: int, at: int, row: int, tensor: Tensor | None) -> None:
        if self.pipeline.on_host[index]:
            self.pipeline.write(index, at, row, tensor)
            return
        # One copy to the host for the bucket, not one for each tensor.
        staged = self._staged.setdefault((index, row), [None] * len(self._buckets[index].places))
        staged[at] = tensor

    def _submit_full(self) -> None:
        while self._next < len(self._buckets) and self._missing[self._next] == 0:
            for row in range(self.pipeline.rows):
                staged = self._staged.pop((self._next, row), None)
                if staged is not None:
                    self.pipeline.write_row(self._next, row, staged)
            self.pipeline.submit(self._next)
            self._next += 1

    def rows(self) -> Iterator[dict[int, Tensor]]:
        """What was given, as it was summed up for the messages, by place: for each sum of this worker.

        Nothing writes to it but the next reduction.
        """
        for row in range(self.pipeline.rows):
            read = [(bucket.places, self.pipeline.read_row(index, row)) for index, bucket in enumerate(self._buckets)]
            yield {
                place: tensor
                for places, tensors in read
                for place, tensor in zip(places, tensors, strict=True)
                if tensor is not None
            }

    def results(self) -> Iterator[dict[int, Tensor]]:
        """Wait for the sums that this worker needs, by place, bucket by bucket.

        Raises:
            CommunicatorBroken: they will not come.
        """
        for index in range(len(self._buckets)):
            yield self.pipeline.result(index)


def _take(tensors: Tensors, places: Sequence[int]) -> Tensors:
    taken = [tensors[place] for place in places]
    for place in places:
        tensors[place] = None
    return taken

"""A reduction under way between workers, bucket by bucket.

Each bucket takes the way that was chosen for it (``schedule``, ``bucket_exchange``). While one is summed, the next one
travels. The members of a communicator must send in the same order in which the others receive, so the order is fixed:
bucket k+1 sets out before bucket k returns, and the workers' headers set out behind the last bucket. Beside a backward
pass (``early``) a thread of its own does this (``exchanger``), and the thread that trains only says which buckets are
full. Behind the headers that thread does it itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from virtualflow.errors import CommunicatorBroken, Damaged
from virtualflow.reduction.accumulation import Addition, Tensors, add_one, add_tensors, as_memory, multiply, separate
from virtualflow.reduction.bucket_exchange import Buffers, ReductionPlan, flatten, open_exchanges, unflatten
from virtualflow.reduction.buckets import Bucket
from virtualflow.reduction.traffic import ExchangeLog
from virtualflow.transport import DONE, Pending

T = TypeVar("T")


class Pipeline:
    """The reduction of some buckets among all members of a communicator.

    Args:
        beside: whether another thread than the one that trains runs it.
    """

    def __init__(self, plan: ReductionPlan, buffers: Buffers, name: str, *, beside: bool) -> None:
        plan = replace(plan, collectives=plan.collectives.beside) if beside else plan
        collectives, buckets, templates = plan.collectives, plan.buckets, plan.templates
        self._collectives = collectives
        self._buckets = buckets
        self._templates = templates
        self.on_host = [all(templates[place].device.type == "cpu" for place in bucket.places) for bucket in buckets]
        """Whether a bucket's tensors are on the CPU, so that they may be written one by one."""
        self.rows = len(plan.keys[collectives.rank])
        self._exchanges = open_exchanges(plan, buffers, name)
        self._submitted: SimpleQueue[int | None] = SimpleQueue()
        self._header: Tensor | None = None
        self._headers: Future[Tensor] = Future()
        self._arrived: list[Future[None]] = [Future() for _ in buckets]
        self.log = ExchangeLog(len(buckets))

    # --- by the thread that trains ------------------------------------------------------------------------------------

    def segments(self, index: int, at: int, row: int) -> list[tuple[int, Tensor]]:
        """Where the ``at``-th tensor of a bucket is to be written: (first element, stretch of the message)."""
        return self._exchanges[index].segments(at, row)

    def write(self, index: int, at: int, row: int, tensor: Tensor | None) -> None:
        """Write one tensor of a row; a missing one is zero."""
        values = None if tensor is None else tensor.reshape(-1)
        for first, stretch in self.segments(index, at, row):
            if values is None:
                stretch.zero_()
            else:
                stretch.copy_(values[first : first + stretch.numel()])

    def write_row(self, index: int, row: int, tensors: Tensors) -> None:
        bucket, exchange = self._buckets[index], self._exchanges[index]
        if not exchange.carries(row):
            return
        templates = [self._templates[place] for place in bucket.places]
        if exchange.rows == 1 and exchange.in_order:
            flatten(exchange.flat[: bucket.total], tensors, templates)
            return
        if not self.on_host[index]:
            joined = torch.empty(bucket.total, dtype=bucket.dtype)
            flatten(joined, tensors, templates)
            tensors = list(torch.split(joined, [like.numel() for like in templates]))
        for at, tensor in enumerate(tensors):
            self.write(index, at, row, tensor)

    def read_row(self, index: int, row: int) -> Tensors:
        """All tensors of a row as they were written, on their devices; they may be views of the message."""
        exchange, places = self._exchanges[index], self._buckets[index].places
        if not exchange.carries(row):
            return [None] * len(places)
        templates, flat = [self._templates[place] for place in places], exchange.flat
        if exchange.rows > 1 or not exchange.in_order:
            stretches = [stretch for at in range(len(templates)) for _, stretch in self.segments(index, at, row)]
            flat = torch.cat(stretches) if stretches else flat[:0]
        return list(unflatten(flat, templates))

    def submit(self, index: int) -> None:
        """A bucket is full; they are submitted in their order."""
        self._submitted.put(index)

    def close(self, header: Tensor | None) -> None:
        self._header = header
        self._submitted.put(None)

    def abandon(self) -> None:
        """Nothing more comes, and what is under way is broken off, with all else between these members."""
        self._collectives.cut()
        self.close(None)

    def exchange_headers(self, header: Tensor) -> Tensor:
        """Nothing more comes; wait for the members' headers, uint8 ``[n]`` to ``[size, n]``."""
        self.close(header)
        return self._settle(self._headers)

    def result(self, index: int) -> dict[int, Tensor]:
        """Wait for a bucket's sums, by place: contiguous views of a buffer that the next reduction overwrites."""
        self._settle(self._arrived[index])
        return dict(self._exchanges[index].sums())

    def _settle(self, outcome: Future[T]) -> T:
        if outcome.done():
            return outcome.result()
        began = time.perf_counter_ns()
        found = self._collectives.settle(outcome)
        self.log.waited(began)
        return found

    def carry_out_here(self) -> None:
        """In place of another thread: nothing else is done meanwhile."""
        began = time.perf_counter_ns()
        self.carry_out()
        self.log.waited(began)

    @property
    def complete(self) -> bool:
        return all(arrived.done() for arrived in self._arrived)

    # --- by the thread that exchanges ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Carry it out; errors are told to those who wait for what is missing."""
        try:
            self.carry_out()
        except CommunicatorBroken as error:
            kind = Damaged if isinstance(error, Damaged) else CommunicatorBroken
            self._fail(kind(str(error)))  # the traceback of the other one would keep the buffers
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        try:
            self._collectives.cut()  # the messages' memory is free for other uses from now on
        finally:
            futures: list[Future[Any]] = [self._headers, *self._arrived]
            for waiting in futures:
                if not waiting.done():
                    waiting.set_exception(error)

    def carry_out(self) -> None:
        outward: deque[tuple[int, Pending]] = deque()
        homeward: list[tuple[int, Pending]] = []
        while (index := self._next()) is not None:
            self.log.begin(index)
            outward.append((index, self._exchanges[index].set_out()))
            self.log.started(index, outward[-1][1])
            if len(outward) > 1:
                homeward.append(self._add_and_return(*outward.popleft()))
        header = headers = None
        if self._header is not None:
            headers = torch.empty((self._collectives.size, self._header.numel()), dtype=torch.uint8)
            header = self._collectives.start_all_gather(headers.view(-1), self._header)
        while outward:
            homeward.append(self._add_and_return(*outward.popleft()))
        if header is not None and headers is not None:
            header.wait()
            self._headers.set_result(headers)
        for index, pending in homeward:
            if pending is not DONE:
                pending.wait()
            self.log.complete(index, pending)
            self._arrived[index].set_result(None)

    def _next(self) -> int | None:
        """The next bucket that is full; ``None``: nothing more comes."""
        if self._submitted.empty():
            self._collectives.flush()
        return self._submitted.get()

    def _add_and_return(self, index: int, pending: Pending) -> tuple[int, Pending]:
        if pending is not DONE:
            pending.wait()
        home = self._exchanges[index].add_and_return()
        self.log.added_up(index)
        self.log.started(index, home)
        return index, home


# The beginning of a reduction before the last backward pass has ended.
#
# The sums of a worker's range but for its last virtual node are there already, so each gradient of that one is added,
# written and sent as soon as it is known; what else there is to a reduction, ``pipeline`` does.


class Early:
    """A reduction that begins while the last virtual node's tensors come in, one by one."""

    def __init__(self, pipeline: Pipeline, buckets: Sequence[Bucket], addition: Addition) -> None:
        self.pipeline = pipeline
        """Exchanges the headers, too, when everything was given, and breaks off what is under way."""
        self._addition = addition
        self._buckets = buckets
        self._where = {
            place: (index, at) for index, bucket in enumerate(buckets) for at, place in enumerate(bucket.places)
        }
        self._missing = [set(bucket.places) for bucket in buckets]
        self._staged: dict[tuple[int, int], Tensors] = {}
        self._next = 0

    def weigh(self, weight: float) -> None:
        """The factor of the last virtual node's tensors is another one; none of them has been given."""
        self._addition.weight = weight

    @property
    def places(self) -> frozenset[int]:
        return frozenset(self._where)

    @property
    def missing(self) -> frozenset[int]:
        """The places that were not given yet."""
        return frozenset[int]().union(*self._missing)

    def takes(self, place: int) -> bool:
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
        return as_memory(kept, tensor) if own and kept is not None else tensor

    def _give(self, place: int, tensor: Tensor | None, *, own: bool) -> Tensor | None:
        """Add up and write a place; memory of its shape that nobody else is going to read, if there is some."""
        index, at = self._where[place]
        addition = self._addition
        for row, tensors in enumerate(addition.above):
            self._place(index, at, row, tensors[place])
            tensors[place] = None
        left, right = addition.prepare(place, tensor)
        self._missing[index].remove(place)
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

    def give_sums(self, places: Sequence[int], rows: Sequence[Tensors]) -> None:
        """Write this worker's sums at some places, each once, in place of a last virtual node's tensors.

        Args:
            rows: for each sum a tensor a place; what is written is taken out of them.
        """
        for which, place in enumerate(places):
            if place in self._where:
                index, at = self._where[place]
                for row, tensors in enumerate(rows):
                    self._place(index, at, row, tensors[which])
                    tensors[which] = None
                self._missing[index].remove(place)
        self._submit_full()

    def give_rest(self, tensors: Mapping[int, Tensor | None]) -> None:
        """The last virtual node's contributions to all places that were not given yet; they are used up."""
        apart = dict(zip(tensors, separate(tensors.values()), strict=True))
        for index, bucket in enumerate(self._buckets):
            if len(self._missing[index]) == len(bucket.places):
                self._give_bucket(index, [apart[place] for place in bucket.places])
            else:
                for place in apart.keys() & bucket.places:
                    self._give(place, apart[place], own=True)
        self._submit_full()

    def _give_bucket(self, index: int, last: Tensors) -> None:
        """As :meth:`give` for every place of a bucket: a few calls for all of them."""
        places, addition = self._buckets[index].places, self._addition
        multiply(addition.precision.cast_all(last), addition.weight)
        for row, tensors in enumerate(addition.above):
            self.pipeline.write_row(index, row, _take(tensors, places))
        for tensors in reversed(addition.merged):
            last = add_tensors([addition.take(tensors, place) for place in places], last)
        self.pipeline.write_row(index, len(addition.above), last)
        self._missing[index].clear()
        self._submit_full()

    def _place(self, index: int, at: int, row: int, tensor: Tensor | None) -> None:
        if self.pipeline.on_host[index]:
            self.pipeline.write(index, at, row, tensor)
            return
        # One copy to the host for the bucket, not one for each tensor.
        staged = self._staged.setdefault((index, row), [None] * len(self._buckets[index].places))
        staged[at] = tensor

    def _submit_full(self) -> None:
        while self._next < len(self._buckets) and not self._missing[self._next]:
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
        for index in range(len(self._buckets)):
            yield self.pipeline.result(index)


def _take(tensors: Tensors, places: Sequence[int]) -> Tensors:
    taken = [tensors[place] for place in places]
    for place in places:
        tensors[place] = None
    return taken

"""A reduction under way between workers, bucket by bucket.

Each bucket takes the way that was chosen for it (``schedule``, ``bucket_exchange``). While one is summed, the next one
travels. The members of a communicator must send in the same order in which the others receive, so the order is fixed:
bucket k+1 sets out before bucket k returns, and the workers' headers set out behind the last bucket. Beside a backward
pass (``early``) a thread of its own does this (``exchanger``), and the thread that trains only says which buckets are
full. Behind the headers that thread does it itself.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from virtualflow.errors import CommunicatorBroken, Damaged
from virtualflow.reduction.accumulation import Tensors, multiply
from virtualflow.reduction.bucket_exchange import Buffers, ReductionPlan, flatten, open_exchange, unflatten
from virtualflow.transport import DONE, Pending


class Pipeline:
    """The reduction of some buckets among all members of a communicator.

    Args:
        plan: which ones, and among whom.
        buffers: where messages are kept.
        name: of its own ones among them.
        beside: whether another thread than the one that trains runs it.
    """

    def __init__(self, plan: ReductionPlan, buffers: Buffers, name: str, *, beside: bool) -> None:
        plan = replace(plan, collectives=plan.collectives.beside) if beside else plan
        collectives, buckets, templates = plan.collectives, plan.buckets, plan.templates
        self._collectives = collectives
        self._buckets = buckets
        self._templates = templates
        self._routes, self._scale = plan.routes, plan.scale
        self.on_host = [all(templates[place].device.type == "cpu" for place in bucket.places) for bucket in buckets]
        """Whether a bucket's tensors are on the CPU, so that they may be written one by one."""
        self.rows = len(plan.keys[collectives.rank])
        """How many sums this worker contributes."""
        self._exchanges = [open_exchange(plan, index, buffers, name) for index in range(len(buckets))]
        self._submitted: SimpleQueue[int | None] = SimpleQueue()
        self._header: Tensor | None = None
        self._headers: Future[Tensor] = Future()
        self._arrived: list[Future[None]] = [Future() for _ in buckets]

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
        """Write all tensors of a row, of any device."""
        bucket = self._buckets[index]
        templates = [self._templates[place] for place in bucket.places]
        if self.rows == 1:
            flatten(self._exchanges[index].flat.view(-1)[: bucket.total], tensors, templates)
            return
        if not self.on_host[index]:
            joined = torch.empty(bucket.total, dtype=bucket.dtype)
            flatten(joined, tensors, templates)
            tensors = list(torch.split(joined, [like.numel() for like in templates]))
        for at, tensor in enumerate(tensors):
            self.write(index, at, row, tensor)

    def read_row(self, index: int, row: int) -> Tensors:
        """All tensors of a row as they were written, on their devices; they may be views of the message."""
        bucket, flat = self._buckets[index], self._exchanges[index].flat.view(-1)
        templates = [self._templates[place] for place in bucket.places]
        if self.rows > 1:
            stretches = [stretch for at in range(len(templates)) for _, stretch in self.segments(index, at, row)]
            flat = torch.cat(stretches) if stretches else flat[:0]
        return list(unflatten(flat, templates))

    def submit(self, index: int) -> None:
        """A bucket is full; they are submitted in their order."""
        self._submitted.put(index)

    def close(self, header: Tensor | None) -> None:
        """Nothing more comes, but perhaps a header."""
        self._header = header
        self._submitted.put(None)

    def abandon(self) -> None:
        """Nothing more comes, and what is under way is broken off, with all else between these members."""
        self._collectives.cut()
        self.close(None)

    def exchange_headers(self, header: Tensor) -> Tensor:
        """Nothing more comes; wait for the members' headers, uint8 ``[n]`` to ``[size, n]``.

        Raises:
            CommunicatorBroken: they will not come.
        """
        self.close(header)
        return self._collectives.settle(self._headers)

    def result(self, index: int) -> dict[int, Tensor]:
        """Wait for a bucket's sums, by place: contiguous tensors, views of a buffer that the next reduction overwrites.

        Raises:
            CommunicatorBroken: they will not come.
        """
        self._collectives.settle(self._arrived[index])
        found = dict(self._exchanges[index].sums())
        if not self._routes[index].scales_slices:
            multiply(found.values(), self._scale)
        return found

    @property
    def complete(self) -> bool:
        """Whether all sums are there."""
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
        """Exchange what is submitted, until nothing more comes.

        Raises:
            CommunicatorBroken: a peer is lost.
        """
        outward: deque[tuple[int, Pending]] = deque()
        homeward: list[tuple[int, Pending]] = []
        while (index := self._next()) is not None:
            outward.append((index, self._exchanges[index].set_out()))
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
            self._arrived[index].set_result(None)

    def _next(self) -> int | None:
        """The next bucket that is full; ``None``: nothing more comes."""
        if self._submitted.empty():
            self._collectives.flush()
        return self._submitted.get()

    def _add_and_return(self, index: int, pending: Pending) -> tuple[int, Pending]:
        if pending is not DONE:
            pending.wait()
        return index, self._exchanges[index].add_and_return()

"""A reduction under way between workers, bucket by bucket.

Every worker sends each other one its piece of the own rows and gets theirs for the own piece; summed in the shape of
the tree, that goes back to all (or, where not everybody needs all sums, to those who do). While one bucket is summed,
the next one travels. The own rows are only read, so that they are whole if the reduction is aborted.
The members of a communicator must send in the same order in which the others receive, so the order is fixed: bucket k+1
sets out before bucket k returns, and the workers' headers set out behind the last bucket. A thread of its own
(:class:`Exchanger`) does this, beside the backward pass if it has begun by then (``early``); the thread that trains
only says which buckets are full.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from virtualflow.errors import CommunicatorBroken
from virtualflow.reduction.accumulation import Tensors
from virtualflow.reduction.buckets import Bucket, plan_delivery
from virtualflow.reduction.tree import Key
from virtualflow.transport import Collectives, Message, Pending

Keys = list[list[Key]]
"""For each rank, the tree nodes that it contributes the sums of."""


class Buffers:
    """Message buffers, kept from step to step: fresh large ones cost page faults."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._used: set[tuple[object, ...]] = set()

    def get(self, name: tuple[object, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The buffer of that name; zeros when it is new."""
        key = (*name, dtype)
        self._used.add(key)
        kept = self._kept.get(key)
        if kept is None or kept.shape != shape:
            kept = self._kept[key] = torch.zeros(shape, dtype=dtype)
        return kept

    def release_unused(self) -> None:
        """Free what was not asked for since the last call."""
        self._kept = {key: kept for key, kept in self._kept.items() if key in self._used}
        self._used.clear()

    def clear(self) -> None:
        """Free them. Messages under way keep their own alive."""
        self._kept = {}


class Exchanger:
    """A thread that carries out one thing after the other.

    It may be left behind: gloo may never end the wait for a message whose connection closes. So it is no thread of a
    pool, for which Python would wait at the end of the process.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="virtualflow-exchange", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Do this next; the task must not raise."""
        self._tasks.put(task)

    def close(self, patience: float) -> None:
        """End when all that was submitted is done, which is waited for as long as ``patience`` says."""
        self._tasks.put(None)
        self._thread.join(patience)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # nor what it refers to, while nothing is to be done


class Sum(Protocol):
    """Sums what all members contribute."""

    def __call__(self, arrived: dict[Key, Tensor], out: Tensor | None = None) -> Tensor:
        """The scaled sum, in ``out`` if that is given; the arguments may be reused."""


@dataclass(frozen=True)
class ReductionPlan:
    """What is reduced among whom."""

    collectives: Collectives
    keys: Keys
    """Of which stretches each member contributes the sums."""
    total: Sum
    templates: Sequence[Tensor]
    """One tensor per place, with its shape and device."""
    buckets: Sequence[Bucket]
    """In the order in which they set out."""
    needed_by: Sequence[Sequence[int]] | None
    """For each place the ranks that need its sum; without it all do."""


class Pipeline:
    """The reduction of some buckets among all members of a communicator.

    Args:
        plan: which ones, and among whom.
        buffers: where messages are kept.
        name: of its own ones among them.
    """

    def __init__(self, plan: ReductionPlan, buffers: Buffers, name: str) -> None:
        collectives, keys, buckets, templates = plan.collectives, plan.keys, plan.buckets, plan.templates
        needed_by = plan.needed_by
        self._collectives = collectives
        self._total = plan.total
        self._keys = keys
        self._buckets = buckets
        self._templates = templates
        self.on_host = [all(templates[place].device.type == "cpu" for place in bucket.places) for bucket in buckets]
        """Whether a bucket's tensors are on the CPU, so that they may be written one by one."""
        self.rows = len(keys[collectives.rank])
        """How many sums this worker contributes."""
        self._peers = [peer for peer in range(collectives.size) if peer != collectives.rank]
        size, every = collectives.size, sum(len(nodes) for nodes in keys)
        self._flat = [
            buffers.get((name, "flat", index), (self.rows * size * bucket.piece,), bucket.dtype)
            for index, bucket in enumerate(buckets)
        ]
        """Messages, in pieces for each member."""
        self._incoming = [
            buffers.get((name, "incoming", index), (max(every, size), bucket.piece), bucket.dtype)
            for index, bucket in enumerate(buckets)
        ]
        """All members' rows of the own piece; then the sums come to the front of them, piece by piece."""
        self._wanted = [
            [place for place in bucket.places if needed_by is None or collectives.rank in needed_by[place]]
            for bucket in buckets
        ]
        self._deliveries = (
            [plan_delivery(bucket, templates, needed_by, size, collectives.rank) for bucket in buckets]
            if needed_by is not None
            else []
        )
        self._delivered = [
            buffers.get((name, "delivered", index), (sum(delivery.inward),), buckets[index].dtype)
            for index, delivery in enumerate(self._deliveries)
        ]
        """Where some sums are brought to this worker: the tensors that it needs, one behind the other."""
        self._submitted: SimpleQueue[int | None] = SimpleQueue()
        self._header: Tensor | None = None
        self._headers: Future[Tensor] = Future()
        self._arrived: list[Future[None]] = [Future() for _ in buckets]

    # --- by the thread that trains ------------------------------------------------------------------------------------

    def segments(self, index: int, at: int, row: int) -> list[tuple[int, Tensor]]:
        """Where the ``at``-th tensor of a bucket is to be written: (first element, stretch of the message)."""
        bucket, flat = self._buckets[index], self._flat[index]
        numel = self._templates[bucket.places[at]].numel()
        return [
            (first, flat[where : where + count]) for first, count, where in bucket.segments(at, numel, self.rows, row)
        ]

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
            flatten(self._flat[index][: bucket.total], tensors, templates)
            return
        if not self.on_host[index]:
            joined = torch.empty(bucket.total, dtype=bucket.dtype)
            flatten(joined, tensors, templates)
            tensors = list(torch.split(joined, [like.numel() for like in templates]))
        for at, tensor in enumerate(tensors):
            self.write(index, at, row, tensor)

    def read_row(self, index: int, row: int) -> Tensors:
        """All tensors of a row as they were written, on their devices; they may be views of the message."""
        bucket, flat = self._buckets[index], self._flat[index]
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
        sums, wanted = (self._delivered if self._deliveries else self._incoming)[index].view(-1), self._wanted[index]
        return dict(zip(wanted, unflatten(sums, [self._templates[place] for place in wanted]), strict=True))

    @property
    def complete(self) -> bool:
        """Whether all sums are there."""
        return all(arrived.done() for arrived in self._arrived)

    # --- by the thread that exchanges ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Carry it out; errors are told to those who wait for what is missing."""
        try:
            self._run()
        except CommunicatorBroken as error:
            self._fail(type(error)(str(error)))  # its traceback would keep the buffers
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

    def _run(self) -> None:
        outward: deque[tuple[int, Pending]] = deque()
        homeward: list[tuple[int, Pending]] = []
        while (index := self._submitted.get()) is not None:
            outward.append((index, self._send(index)))
            if len(outward) > 1:
                homeward.append(self._sum_and_return(*outward.popleft()))
        header = headers = None
        if self._header is not None:
            headers = torch.empty((self._collectives.size, self._header.numel()), dtype=torch.uint8)
            header = self._collectives.start_all_gather(headers.view(-1), self._header)
        while outward:
            homeward.append(self._sum_and_return(*outward.popleft()))
        if header is not None and headers is not None:
            header.wait()
            self._headers.set_result(headers)
        for index, pending in homeward:
            pending.wait()
            self._arrived[index].set_result(None)

    def _send(self, index: int) -> Pending:
        pieces = self._pieces(index)
        return self._exchange(self._arriving(index), {peer: pieces[peer] for peer in self._peers})

    def _exchange(self, incoming: Mapping[int, Tensor], outgoing: Mapping[int, Tensor]) -> Pending:
        """Receive from some members and send to some; what is to come is waited for first."""
        return self._collectives.start_messages(
            [
                *(Message(peer, stretch, incoming=True) for peer, stretch in incoming.items() if stretch.numel()),
                *(Message(peer, stretch, incoming=False) for peer, stretch in outgoing.items() if stretch.numel()),
            ]
        )

    def _pieces(self, index: int) -> Tensor:
        """A bucket's message, ``[size, rows, piece]``: what each member gets of this worker's rows."""
        return self._flat[index].view(self._collectives.size, self.rows, self._buckets[index].piece)

    def _arriving(self, index: int) -> dict[int, Tensor]:
        """The other members' rows of the own piece, ``[rows, piece]``."""
        rows = self._rows(index)
        return {peer: rows[peer] for peer in self._peers}

    def _rows(self, index: int) -> list[Tensor]:
        """The same of all members."""
        counts = [len(nodes) for nodes in self._keys]
        return list(torch.split(self._incoming[index][: sum(counts)], counts))

    def _sum_and_return(self, index: int, pending: Pending) -> tuple[int, Pending]:
        pending.wait()
        rank, rows = self._collectives.rank, self._rows(index)
        rows[rank].copy_(self._pieces(index)[rank])
        arrived = {
            node: row
            for nodes, of_member in zip(self._keys, rows, strict=True)
            for node, row in zip(nodes, of_member, strict=True)
        }
        if self._deliveries:
            return index, self._deliver(index, self._total(arrived))
        sums = self._incoming[index]
        self._total(arrived, out=sums[rank])
        return index, self._exchange({peer: sums[peer] for peer in self._peers}, dict.fromkeys(self._peers, sums[rank]))

    def _deliver(self, index: int, reduced: Tensor) -> Pending:
        delivery, rank = self._deliveries[index], self._collectives.rank
        targets = torch.split(self._delivered[index], list(delivery.inward))
        packed = [[reduced[begin:end] for begin, end in stretches] for stretches in delivery.outward]
        if packed[rank]:
            torch.cat(packed[rank], out=targets[rank])
        return self._exchange(
            {peer: targets[peer] for peer in self._peers if len(targets[peer])},
            {peer: torch.cat(packed[peer]) for peer in self._peers if packed[peer]},
        )


def flatten(row: Tensor, tensors: Tensors, templates: Sequence[Tensor]) -> None:
    """Copy tensors, of any device, one after the other into ``row``; a missing one is zero."""
    pieces = [_or_zeros(t, template).reshape(-1) for t, template in zip(tensors, templates, strict=True)]
    devices = {piece.device for piece in pieces}
    if devices <= {row.device}:
        torch.cat(pieces, out=row)
    elif len(devices) == 1:
        row.copy_(torch.cat(pieces))  # one copy between the two
    else:
        torch.cat([piece.to(row.device) for piece in pieces], out=row)


def unflatten(row: Tensor, templates: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that lie one after the other at the front of ``row``, on their devices."""
    sizes = [template.numel() for template in templates]
    pieces = torch.split(row[: sum(sizes)], sizes)
    devices = {template.device for template in templates}
    if len(devices) == 1 and row.device not in devices:
        # One copy between the two. Then each has memory of its own, which is aligned as that of any other tensor there:
        # kernels may compute other bits (a norm's, for one) where it is not.
        arrived = torch.split(row[: sum(sizes)].to(templates[0].device), sizes)
        tensors = [torch.empty(template.shape, dtype=row.dtype, device=template.device) for template in templates]
        torch._foreach_copy_([tensor.view(-1) for tensor in tensors], list(arrived))
        return tensors
    return [
        piece.view(template.shape) if template.device == row.device else piece.view(template.shape).to(template.device)
        for piece, template in zip(pieces, templates, strict=True)
    ]


def _or_zeros(tensor: Tensor | None, template: Tensor) -> Tensor:
    return torch.zeros_like(template, memory_format=torch.contiguous_format) if tensor is None else tensor


def as_raw(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8 ``[n]``: gloo knows few types, and bytes are enough for it."""
    return tensor.view(-1).view(torch.uint8)

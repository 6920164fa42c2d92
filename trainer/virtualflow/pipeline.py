"""A reduction under way between workers, bucket by bucket, and its beginning before the last backward pass has ended.

Every worker sends each other one its piece of the own rows and gets theirs for the own piece; summed in the shape of
the tree, that goes back to all (or, where not everybody needs all sums, to those who do). While one bucket is summed,
the next one travels.
The members of a communicator must send in the same order in which the others receive, so the order is fixed: bucket k+1
sets out before bucket k returns, and the workers' heads set out behind the last bucket. A thread of its own
(:class:`Exchanger`) does this, beside the backward pass if the exchange has begun by then (:class:`Early`); the thread
that trains only says which buckets are full.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from virtualflow.accumulation import Parts, Tensors, add_one, add_tensors
from virtualflow.buckets import Bucket, plan_delivery
from virtualflow.collectives import Collectives, Message, Pending
from virtualflow.errors import CommunicatorBroken

Keys = list[list[tuple[int, int]]]
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


class Pipeline:
    """The reduction of some buckets among all members of a communicator.

    Args:
        collectives: the communicator.
        add_up: sums what all members contribute, by the stretches of virtual nodes that each is the sum of; it may
            reuse its arguments.
        keys: of which stretches each member contributes the sums.
        buckets: what is reduced, in the order in which it sets out.
        templates: one tensor per place, with its shape and device.
        buffers: where messages are kept.
        name: of its own ones among them.
        scale: the factor of the sums.
        needed_by: for each place the ranks that need its sum; without it all do.
    """

    def __init__(
        self,
        collectives: Collectives,
        add_up: Callable[[dict[tuple[int, int], Tensor]], Tensor],
        keys: Keys,
        buckets: Sequence[Bucket],
        templates: Sequence[Tensor],
        buffers: Buffers,
        name: str,
        scale: float,
        needed_by: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._collectives = collectives
        self._add_up = add_up
        self._keys = keys
        self._buckets = buckets
        self._templates = templates
        self._scale = scale
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
        """Messages, in pieces for each member; the sums come back to the front of them."""
        self._incoming = [
            buffers.get((name, "incoming", index), (every - self.rows, bucket.piece), bucket.dtype)
            for index, bucket in enumerate(buckets)
        ]
        """The others' rows of the own piece."""
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
        self._head: Tensor | None = None
        self._heads: Future[Tensor] = Future()
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
            joined = torch.cat([_or_zeros(t, like).reshape(-1) for t, like in zip(tensors, templates, strict=True)])
            tensors = list(torch.split(joined.cpu(), [like.numel() for like in templates]))
        for at, tensor in enumerate(tensors):
            self.write(index, at, row, tensor)

    def submit(self, index: int) -> None:
        """A bucket is full; they are submitted in their order."""
        self._submitted.put(index)

    def close(self, head: Tensor | None) -> None:
        """Nothing more comes, but perhaps a head."""
        self._head = head
        self._submitted.put(None)

    def abandon(self) -> None:
        """Nothing more comes, and what is under way is given up, with all else between these members."""
        self._collectives.cut()
        self.close(None)

    def exchange_heads(self, head: Tensor) -> Tensor:
        """Nothing more comes; wait for the members' heads, uint8 ``[n]`` to ``[size, n]``.

        Raises:
            CommunicatorBroken: they will not come.
        """
        self.close(head)
        return self._collectives.settle(self._heads)

    def result(self, index: int) -> dict[int, Tensor]:
        """Wait for a bucket's sums, by place: contiguous tensors, views of a buffer that the next reduction overwrites.

        Raises:
            CommunicatorBroken: they will not come.
        """
        self._collectives.settle(self._arrived[index])
        flat, wanted = (self._delivered if self._deliveries else self._flat)[index], self._wanted[index]
        return dict(zip(wanted, unflatten(flat, [self._templates[place] for place in wanted]), strict=True))

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
            self._fail(CommunicatorBroken(str(error)))  # its traceback would keep the buffers
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        try:
            self._collectives.cut()  # the messages' memory is free for other uses from now on
        finally:
            futures: list[Future[Any]] = [self._heads, *self._arrived]
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
        head = heads = None
        if self._head is not None:
            heads = torch.empty((self._collectives.size, self._head.numel()), dtype=torch.uint8)
            head = self._collectives.start_all_gather(heads.view(-1), self._head)
        while outward:
            homeward.append(self._sum_and_return(*outward.popleft()))
        if head is not None and heads is not None:
            head.wait()
            self._heads.set_result(heads)
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
                *(Message(peer, stretch, incoming=True) for peer, stretch in incoming.items()),
                *(Message(peer, stretch, incoming=False) for peer, stretch in outgoing.items()),
            ]
        )

    def _pieces(self, index: int) -> Tensor:
        """A bucket's message, ``[size, rows, piece]``: what each member gets of this worker's rows."""
        return self._flat[index].view(self._collectives.size, self.rows, -1)

    def _arriving(self, index: int) -> dict[int, Tensor]:
        """The other members' rows of the own piece, ``[rows, piece]``."""
        counts = [len(self._keys[peer]) for peer in self._peers]
        return dict(zip(self._peers, torch.split(self._incoming[index], counts), strict=True))

    def _sum_and_return(self, index: int, pending: Pending) -> tuple[int, Pending]:
        pending.wait()
        rank, size, piece = self._collectives.rank, self._collectives.size, self._buckets[index].piece
        by_member = {rank: self._pieces(index)[rank], **self._arriving(index)}
        reduced = self._add_up(
            {
                node: row
                for member, nodes in enumerate(self._keys)
                for node, row in zip(nodes, by_member[member], strict=True)
            }
        )
        if self._deliveries:
            return index, self._deliver(index, reduced.mul_(self._scale) if self._scale != 1.0 else reduced)
        rows = self._flat[index][: size * piece].view(size, piece)
        if self._scale != 1.0:
            torch.mul(reduced, self._scale, out=rows[rank])
        else:
            rows[rank].copy_(reduced)
        return index, self._exchange({peer: rows[peer] for peer in self._peers}, dict.fromkeys(self._peers, rows[rank]))

    def _deliver(self, index: int, reduced: Tensor) -> Pending:
        delivery, rank = self._deliveries[index], self._collectives.rank
        landings = torch.split(self._delivered[index], list(delivery.inward))
        parcels = [[reduced[begin:end] for begin, end in stretches] for stretches in delivery.outward]
        if parcels[rank]:
            torch.cat(parcels[rank], out=landings[rank])
        return self._exchange(
            {peer: landings[peer] for peer in self._peers if len(landings[peer])},
            {peer: torch.cat(parcels[peer]) for peer in self._peers if parcels[peer]},
        )


class Early:
    """A reduction that begins while the last virtual node's tensors come in, one by one.

    Args:
        pipeline: of these buckets.
        buckets: what is reduced.
        parts: the sums of the worker's range but for its last virtual node; used up as tensors come.
        merges: with how many of the last of them that virtual node makes one.
    """

    def __init__(self, pipeline: Pipeline, buckets: Sequence[Bucket], parts: Parts, merges: int) -> None:
        self._pipeline = pipeline
        self._buckets = buckets
        self._above = [tensors for _, tensors in parts[: len(parts) - merges]]
        self._merged = [tensors for _, tensors in parts[len(parts) - merges :]]
        self._where = {
            place: (index, at) for index, bucket in enumerate(buckets) for at, place in enumerate(bucket.places)
        }
        self._missing = [len(bucket.places) for bucket in buckets]
        self._staged: dict[tuple[int, int], Tensors] = {}
        self._next = 0

    @property
    def places(self) -> frozenset[int]:
        """What it reduces."""
        return frozenset(self._where)

    def give(self, place: int, tensor: Tensor | None) -> None:
        """The last virtual node's contribution to a place, once for each; it does not change, and may after this."""
        index, at = self._where[place]
        for row, tensors in enumerate(self._above):
            self._place(index, at, row, tensors[place])
            tensors[place] = None
        for tensors in reversed(self._merged[1:]):
            tensor, tensors[place] = add_one(tensors[place], tensor), None
        first = self._merged[0][place] if self._merged else None
        if first is None or tensor is None or not self._pipeline.on_host[index]:
            merged = add_one(first, tensor) if self._merged else tensor
            self._place(index, at, len(self._above), merged)
        else:  # The last addition writes the message, so that nothing is copied.
            left, right = first.reshape(-1), tensor.reshape(-1)
            for begin, stretch in self._pipeline.segments(index, at, len(self._above)):
                end = begin + stretch.numel()
                torch.add(left[begin:end], right[begin:end], out=stretch)
        if self._merged:
            self._merged[0][place] = None
        self._missing[index] -= 1
        self._submit_full()

    def give_rest(self, tensors: Mapping[int, Tensor | None]) -> None:
        """The last virtual node's contributions to all places that were not given yet; they are used up."""
        for index, bucket in enumerate(self._buckets):
            if self._missing[index] == len(bucket.places):
                self._give_bucket(index, [tensors[place] for place in bucket.places])
            else:
                for place in tensors.keys() & bucket.places:
                    self.give(place, tensors[place])

    def _give_bucket(self, index: int, last: Tensors) -> None:
        """As :meth:`give` for every place of a bucket: a few calls for all of them."""
        places = self._buckets[index].places
        for row, tensors in enumerate(self._above):
            self._pipeline.write_row(index, row, _take(tensors, places))
        for tensors in reversed(self._merged):
            last = add_tensors(_take(tensors, places), last)
        self._pipeline.write_row(index, len(self._above), last)
        self._missing[index] = 0
        self._submit_full()

    def _place(self, index: int, at: int, row: int, tensor: Tensor | None) -> None:
        if self._pipeline.on_host[index]:
            self._pipeline.write(index, at, row, tensor)
            return
        # One copy to the host for the bucket, not one for each tensor.
        staged = self._staged.setdefault((index, row), [None] * len(self._buckets[index].places))
        staged[at] = tensor if tensor is None or row < len(self._above) or self._merged else tensor.clone()

    def _submit_full(self) -> None:
        while self._next < len(self._buckets) and self._missing[self._next] == 0:
            for row in range(self._pipeline.rows):
                staged = self._staged.pop((self._next, row), None)
                if staged is not None:
                    self._pipeline.write_row(self._next, row, staged)
            self._pipeline.submit(self._next)
            self._next += 1

    def heads(self, head: Tensor) -> Tensor:
        """Everything was given: exchange the heads, too, as uint8 ``[n]`` to ``[size, n]``.

        Raises:
            CommunicatorBroken: they will not come.
        """
        return self._pipeline.exchange_heads(head)

    def results(self) -> Iterator[dict[int, Tensor]]:
        """Wait for the sums that this worker needs, by place, bucket by bucket.

        Raises:
            CommunicatorBroken: they will not come.
        """
        for index in range(len(self._buckets)):
            yield self._pipeline.result(index)

    @property
    def complete(self) -> bool:
        """Whether all sums are there."""
        return self._pipeline.complete

    def abandon(self) -> None:
        """Nothing more will be given."""
        self._pipeline.abandon()


def _take(tensors: Tensors, places: Sequence[int]) -> Tensors:
    taken = [tensors[place] for place in places]
    for place in places:
        tensors[place] = None
    return taken


def flatten(row: Tensor, tensors: Tensors, templates: Sequence[Tensor]) -> None:
    """Copy tensors, of any device, one after the other into ``row``; a missing one is zero."""
    pieces = [_or_zeros(t, template).reshape(-1) for t, template in zip(tensors, templates, strict=True)]
    if all(piece.device == row.device for piece in pieces):
        torch.cat(pieces, out=row)
    else:
        row.copy_(torch.cat(pieces))


def unflatten(row: Tensor, templates: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that lie one after the other at the front of ``row``, on their devices."""
    sizes = [template.numel() for template in templates]
    pieces = torch.split(row[: sum(sizes)], sizes)
    return [
        piece.view(template.shape) if template.device == row.device else piece.view(template.shape).to(template.device)
        for piece, template in zip(pieces, templates, strict=True)
    ]


def _or_zeros(tensor: Tensor | None, template: Tensor) -> Tensor:
    return torch.zeros_like(template, memory_format=torch.contiguous_format) if tensor is None else tensor


def as_raw(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8 ``[n]``: gloo knows few types, and bytes are enough for it."""
    return tensor.view(-1).view(torch.uint8)

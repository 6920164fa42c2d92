"""The two ways of a bucket between workers, each as what sets out, what comes of it, and what returns.

By slices, every worker sends each other one its piece of the own rows and gets theirs for the own piece; summed in the
shape of the tree, that goes back to all. Where the optimizer is sharded, what a worker adds up is what it steps, so it
goes to nobody but a second keeper. As a whole, every worker gets all rows of all and adds everything up itself. The own
rows are only read, so that they are whole if the exchange is aborted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from virtualflow.reduction.accumulation import Tensors
from virtualflow.reduction.ownership import Portions
from virtualflow.reduction.schedule import Way
from virtualflow.reduction.tree import Key
from virtualflow.transport import DONE, Collectives, Message, Pending

# How the tensors of a reduction are cut into buckets, and where each element stands in a message.
#
# Pure arithmetic. A bucket is a run of tensors of one type that travel together, in the order in which a backward pass
# finishes them. Its elements, one tensor after the other, are cut into as many equal pieces as there are workers;
# worker r sums piece r. A worker that holds several sums (its range is no node of the tree) sends one row for each,
# and a message to a worker holds that worker's piece of every row.


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together; sizes and offsets in elements."""

    dtype: torch.dtype
    places: tuple[int, ...]
    offsets: tuple[int, ...]
    total: int
    """Of a row, without padding."""
    piece: int
    """What one worker sums of a row; rows are padded to as many of these as there are workers."""

    def segments(self, index: int, numel: int, rows: int, row: int) -> Iterator[tuple[int, int, int]]:
        """Where the ``index``-th tensor stands in a message of ``rows`` rows: (its first element, how many, where)."""
        begin, end = self.offsets[index], self.offsets[index] + numel
        if rows == 1:  # Pieces of a single row lie one behind the other.
            yield 0, numel, begin
            return
        at = begin
        while at < end:
            piece, inside = divmod(at, self.piece)
            stop = min(end, (piece + 1) * self.piece)
            yield at - begin, stop - at, (piece * rows + row) * self.piece + inside
            at = stop


def plan_buckets(
    templates: Sequence[Tensor], places: Sequence[int], size: int, *, alignment: int, limit: int
) -> list[Bucket]:
    """Cut the tensors at ``places``, in that order, into buckets.

    Args:
        places: which of them, in the order in which they will be there.
        alignment: bytes at whose multiples pieces start.
        limit: bytes that a bucket does not exceed, unless a single tensor does.
    """
    buckets: list[Bucket] = []
    groups: dict[torch.dtype, list[int]] = {}
    for place in places:
        groups.setdefault(templates[place].dtype, []).append(place)
    for dtype, members in groups.items():
        unit = max(1, alignment // dtype.itemsize)
        run: list[int] = []
        total = 0
        for place in members:
            numel = templates[place].numel()
            if run and (total + numel) * dtype.itemsize > limit:
                buckets.append(_bucket(dtype, run, templates, size, unit))
                run, total = [], 0
            run.append(place)
            total += numel
        buckets.append(_bucket(dtype, run, templates, size, unit))
    return buckets


class BucketPart(NamedTuple):
    """A stretch of a bucket's ``at``-th tensor, in elements of it, and who needs its sum."""

    at: int
    begin: int
    end: int
    keepers: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.end - self.begin


def share_bucket(bucket: Bucket, portions: Portions, size: int) -> list[list[BucketPart]]:
    """For each of ``size`` members what it adds up of a bucket whose sums do not come to all, in the bucket's order."""
    shared: list[list[BucketPart]] = [[] for _ in range(size)]
    for at, place in enumerate(bucket.places):
        for begin, end, keepers in portions[place]:
            shared[keepers[0]].append(BucketPart(at, begin, end, keepers))
    return shared


def most_delivered(bucket: Bucket, portions: Portions, size: int) -> int:
    """Bytes of a bucket's sums that come to the member that gets most which it has not added up itself."""
    needed = [0] * size
    for parts in share_bucket(bucket, portions, size):
        for part in parts:
            for keeper in part.keepers[1:]:
                needed[keeper] += part.numel
    return max(needed) * bucket.dtype.itemsize


def _bucket(dtype: torch.dtype, run: list[int], templates: Sequence[Tensor], size: int, unit: int) -> Bucket:
    offsets, total = [], 0
    for place in run:
        offsets.append(total)
        total += templates[place].numel()
    return Bucket(dtype, tuple(run), tuple(offsets), total, -(-total // (size * unit)) * unit)


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
        self._kept = {key: kept for key, kept in self._kept.items() if key in self._used}
        self._used.clear()

    def clear(self) -> None:
        self._kept = {}


@dataclass(frozen=True)
class ReductionPlan:
    """What is reduced among whom, and how."""

    collectives: Collectives
    keys: Keys
    """Of which stretches each member contributes the sums."""
    total: Callable[[dict[Key, Tensor], Tensor | None], Tensor]
    """Adds up what all members contribute, times the factor of the step, into the second argument if that is given. The
    first one's tensors may be reused."""
    templates: Sequence[Tensor]
    """One tensor per place, with its shape and device."""
    results: Sequence[Tensor]
    """Likewise, with the device that its sum comes to."""
    buckets: Sequence[Bucket]
    ways: Sequence[Way]
    portions: Portions | None
    """For each place who needs what of its sum; without it all need all."""


class BucketExchange(ABC):
    """The exchange of one bucket, as its worker sees it."""

    flat: Tensor
    """The own rows, where they set out from."""
    in_order = True
    """Whether a single row stands in it as its tensors do, one behind the other."""

    def __init__(self, plan: ReductionPlan, index: int) -> None:
        self._plan, self._bucket = plan, plan.buckets[index]
        self._collectives = plan.collectives
        self._peers = [peer for peer in range(plan.collectives.size) if peer != plan.collectives.rank]
        self._rows = len(plan.keys[plan.collectives.rank])

    @abstractmethod
    def segments(self, at: int, row: int) -> list[tuple[int, Tensor]]:
        """Where the ``at``-th tensor of the bucket is to be written: (its first element, stretch of ``flat``)."""

    @abstractmethod
    def set_out(self) -> Pending:
        """Send the own rows, and receive what is to be added up here."""

    @abstractmethod
    def add_and_return(self) -> Pending:
        """All is here: add it up, and send it on to whoever needs it."""

    @abstractmethod
    def sums(self) -> list[tuple[int, Tensor]]:
        """All is back: the sums that this worker needs, by place, views of a buffer."""

    def _numel(self, at: int) -> int:
        return self._plan.templates[self._bucket.places[at]].numel()

    def _sums_of_all(self, row: Tensor) -> list[tuple[int, Tensor]]:
        places, portions, rank = self._bucket.places, self._plan.portions, self._collectives.rank
        if portions is None:
            return list(zip(places, unflatten(row, [self._plan.results[place] for place in places]), strict=True))
        needed = {
            at: [row[offset + begin : offset + end] for begin, end, keepers in portions[place] if rank in keepers]
            for at, (place, offset) in enumerate(zip(places, self._bucket.offsets, strict=True))
        }
        return self._shaped(
            {at: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for at, pieces in needed.items() if pieces}
        )

    def _shaped(self, needed: Mapping[int, Tensor]) -> list[tuple[int, Tensor]]:
        """What this worker needs of the sums of some tensors, ``[n]`` where it is not all of one."""
        places, joined = [self._bucket.places[at] for at in needed], list(needed.values())
        likes = [self._plan.results[place] for place in places]
        for at, (like, tensor) in enumerate(zip(likes, joined, strict=True)):
            if like.numel() != len(tensor):
                likes[at] = torch.empty((), dtype=like.dtype, device=like.device).expand(len(tensor))
        if all(like.device == tensor.device for like, tensor in zip(likes, joined, strict=True)):
            return [(place, tensor.view(like.shape)) for place, tensor, like in zip(places, joined, likes, strict=True)]
        return list(zip(places, unflatten(torch.cat(joined), likes), strict=True))


class WholeExchange(BucketExchange):
    """All rows of all workers, to all."""

    def __init__(self, plan: ReductionPlan, index: int, buffers: Buffers, name: str) -> None:
        super().__init__(plan, index)
        most, bucket = max(len(nodes) for nodes in plan.keys), self._bucket
        # Blocks are equal: who has fewer rows than others sends some that nobody reads.
        self.flat = buffers.get((name, "rows", index), (most, bucket.total), bucket.dtype)
        self._gathered = buffers.get(
            (name, "gathered", index), (plan.collectives.size, most, bucket.total), bucket.dtype
        )
        self._total: Tensor | None = None

    def segments(self, at: int, row: int) -> list[tuple[int, Tensor]]:
        begin = self._bucket.offsets[at]
        return [(0, self.flat[row, begin : begin + self._numel(at)])]

    def set_out(self) -> Pending:
        return self._collectives.start_all_gather(as_raw(self._gathered), as_raw(self.flat))

    def add_and_return(self) -> Pending:
        arrived = {
            node: self._gathered[rank, at]
            for rank, nodes in enumerate(self._plan.keys)
            for at, node in enumerate(nodes)
        }
        self._total = self._plan.total(arrived, None)
        return DONE

    def sums(self) -> list[tuple[int, Tensor]]:
        assert self._total is not None
        return self._sums_of_all(self._total)


class SlicedExchange(BucketExchange):
    """A slice of all rows to each worker, and the sums of the slices back to all."""

    def __init__(self, plan: ReductionPlan, index: int, buffers: Buffers, name: str) -> None:
        super().__init__(plan, index)
        size, bucket = plan.collectives.size, self._bucket
        self._counts = [len(nodes) for nodes in plan.keys]
        self.flat = buffers.get((name, "flat", index), (self._rows * size * bucket.piece,), bucket.dtype)
        self._incoming = buffers.get(
            (name, "incoming", index), (max(sum(self._counts), size), bucket.piece), bucket.dtype
        )
        """All members' rows of the own piece; then the sums come to the front of them, piece by piece."""

    def segments(self, at: int, row: int) -> list[tuple[int, Tensor]]:
        found = self._bucket.segments(at, self._numel(at), self._rows, row)
        return [(first, self.flat[where : where + count]) for first, count, where in found]

    def set_out(self) -> Pending:
        pieces, incoming = self._pieces(), self._incoming_rows()
        return self._exchange(
            {peer: incoming[peer] for peer in self._peers}, {peer: pieces[peer] for peer in self._peers}
        )

    def add_and_return(self) -> Pending:
        rank, sums = self._collectives.rank, self._incoming
        self._add(sums[rank])
        return self._exchange({peer: sums[peer] for peer in self._peers}, dict.fromkeys(self._peers, sums[rank]))

    def sums(self) -> list[tuple[int, Tensor]]:
        return self._sums_of_all(self._incoming.view(-1))

    def _add(self, out: Tensor | None) -> Tensor:
        rank, rows = self._collectives.rank, self._incoming_rows()
        rows[rank].copy_(self._pieces()[rank])
        arrived = {
            node: row
            for nodes, of_member in zip(self._plan.keys, rows, strict=True)
            for node, row in zip(nodes, of_member, strict=True)
        }
        return self._plan.total(arrived, out)

    def _exchange(self, incoming: Mapping[int, Tensor], outgoing: Mapping[int, Tensor]) -> Pending:
        return self._collectives.start_messages(
            [
                *(Message(peer, stretch, incoming=True) for peer, stretch in incoming.items() if stretch.numel()),
                *(Message(peer, stretch, incoming=False) for peer, stretch in outgoing.items() if stretch.numel()),
            ]
        )

    def _pieces(self) -> Tensor:
        """The bucket's message, ``[size, rows, piece]``: what each member gets of this worker's rows."""
        return self.flat.view(self._collectives.size, self._rows, self._bucket.piece)

    def _incoming_rows(self) -> list[Tensor]:
        """All members' rows of the own piece, ``[rows, piece]`` each."""
        return list(torch.split(self._incoming[: sum(self._counts)], self._counts))


class SharedExchange(BucketExchange):
    """To each worker its stretches of all rows, and their sums from it to who needs them beside it."""

    in_order = False

    def __init__(self, plan: ReductionPlan, index: int, buffers: Buffers, name: str, portions: Portions) -> None:
        super().__init__(plan, index)
        size, rank, dtype = plan.collectives.size, plan.collectives.rank, self._bucket.dtype
        self._parts = share_bucket(self._bucket, portions, size)
        lengths = self._lengths = [sum(part.numel for part in parts) for parts in self._parts]
        self._counts = [len(nodes) for nodes in plan.keys]
        starts = [0, *accumulate(self._rows * length for length in lengths)]
        self.flat = buffers.get((name, "flat", index), (starts[-1],), dtype)
        self._leaving = [self.flat[begin:end] for begin, end in pairwise(starts)]
        """What each member gets of the own rows, one behind the other."""
        self._incoming = buffers.get((name, "incoming", index), (sum(self._counts) * lengths[rank],), dtype)
        self._places: list[list[tuple[int, int, int, int]]] = [[] for _ in self._bucket.places]
        """Of each tensor the stretches: (first element, how many, by whom it is added up, where in its message)."""
        for member, parts in enumerate(self._parts):
            for part, offset in zip(parts, accumulate((part.numel for part in parts), initial=0), strict=False):
                self._places[part.at].append((part.begin, part.numel, member, offset))
        for stretches in self._places:
            stretches.sort()
        self._needed = [[part for part in parts if rank in part.keepers] for parts in self._parts]
        """What this worker needs of what each adds up."""
        self._sums = [
            buffers.get((name, "sums", index, member), (sum(part.numel for part in needed),), dtype)
            if member != rank
            else self._incoming[:0]
            for member, needed in enumerate(self._needed)
        ]
        sizes: dict[int, dict[int, int]] = {}
        for member, needed in enumerate(self._needed):
            for part in needed:
                of = sizes.setdefault(part.at, {})
                of[member] = of.get(member, 0) + part.numel
        joined = {at: sum(of.values()) for at, of in sizes.items() if len(of) > 1}
        memory = buffers.get((name, "joined", index), (sum(joined.values()),), dtype)
        self._joined = dict(zip(joined, torch.split(memory, list(joined.values())), strict=True))
        """Where the sums of a tensor are put together that come from several."""

    def segments(self, at: int, row: int) -> list[tuple[int, Tensor]]:
        return [
            (first, self._leaving[member][row * self._lengths[member] + offset :][:count])
            for first, count, member, offset in self._places[at]
        ]

    def set_out(self) -> Pending:
        rows = self._incoming_rows()
        return self._exchange(dict(enumerate(rows)), dict(enumerate(self._leaving)))

    def add_and_return(self) -> Pending:
        rank, rows = self._collectives.rank, self._incoming_rows()
        own = self._sums[rank] = self._incoming[:0]
        if self._lengths[rank]:
            rows[rank].copy_(self._leaving[rank])
            arrived = {
                node: row
                for nodes, of_member in zip(self._plan.keys, rows, strict=True)
                for node, row in zip(nodes, of_member.view(len(nodes), self._lengths[rank]), strict=True)
            }
            own = self._sums[rank] = self._plan.total(arrived, None)
        parts = list(zip(self._parts[rank], torch.split(own, [part.numel for part in self._parts[rank]]), strict=True))
        leaving = {peer: [piece for part, piece in parts if peer in part.keepers] for peer in self._peers}
        joined = {
            peer: own if len(pieces) == len(parts) else torch.cat(pieces) for peer, pieces in leaving.items() if pieces
        }
        return self._exchange(dict(enumerate(self._sums)), joined)

    def sums(self) -> list[tuple[int, Tensor]]:
        found: dict[int, list[tuple[list[BucketPart], Tensor]]] = {}
        for needed, row in zip(self._needed, self._sums, strict=True):
            begin = 0
            for at, group in groupby(needed, key=_at):
                parts = list(group)
                end = begin + sum(part.numel for part in parts)
                found.setdefault(at, []).append((parts, row[begin:end]))
                begin = end
        whole = {}
        for at, pieces in found.items():
            whole[at] = pieces[0][1] if len(pieces) == 1 else torch.cat(_in_order(pieces), out=self._joined[at])
        return self._shaped(whole)

    def _exchange(self, incoming: Mapping[int, Tensor], outgoing: Mapping[int, Tensor]) -> Pending:
        messages = [
            Message(peer, stretch, incoming=stretches is incoming)
            for stretches in (incoming, outgoing)
            for peer, stretch in stretches.items()
            if stretch.numel() and peer != self._collectives.rank
        ]
        return self._collectives.start_messages(messages)

    def _incoming_rows(self) -> list[Tensor]:
        """All members' rows of what is added up here, one behind the other for each member."""
        length = self._lengths[self._collectives.rank]
        return list(torch.split(self._incoming, [count * length for count in self._counts]))


def _at(part: BucketPart) -> int:
    return part.at


def _in_order(pieces: Sequence[tuple[list[BucketPart], Tensor]]) -> list[Tensor]:
    """The sums of parts of one tensor, ascending, where those of each worker lie one behind the other."""
    found = {
        part.begin: piece
        for parts, row in pieces
        for part, piece in zip(parts, torch.split(row, [part.numel for part in parts]), strict=True)
    }
    return [found[begin] for begin in sorted(found)]


def open_exchange(plan: ReductionPlan, index: int, buffers: Buffers, name: str) -> BucketExchange:
    if plan.ways[index] is Way.WHOLE:
        return WholeExchange(plan, index, buffers, name)
    if plan.portions is not None:
        return SharedExchange(plan, index, buffers, name, plan.portions)
    return SlicedExchange(plan, index, buffers, name)


def flatten(row: Tensor, tensors: Tensors, templates: Sequence[Tensor]) -> None:
    """Copy tensors, of any device, one after the other into ``row``; a missing one is zero."""
    pieces = [_or_zeros(t, template).reshape(-1) for t, template in zip(tensors, templates, strict=True)]
    devices = {piece.device for piece in pieces}
    if devices <= {row.device}:
        torch.cat(pieces, out=row)
    elif len(devices) == 1:
        row.copy_(torch.cat(pieces))  # one copy between the two
    else:  # some have waited in host memory
        for stretch, piece in zip(torch.split(row, [piece.numel() for piece in pieces]), pieces, strict=True):
            stretch.copy_(piece)


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
    """The memory of a contiguous tensor as uint8 ``[n]``: what is gathered are bytes."""
    return tensor.view(-1).view(torch.uint8)

"""The two ways of a bucket between workers, each as what sets out, what comes of it, and what returns.

By slices, every worker sends each other one its piece of the own rows and gets theirs for the own piece; summed in the
shape of the tree, that goes back to all. Where the optimizer is sharded, what a worker adds up is what it steps, so it
goes to nobody but a second keeper. As a whole, every worker gets all rows of all and adds everything up itself. Rows
that no backward pass gets to do not travel, and are added as +0.0. The own rows are only read, so that they are whole
if the exchange is aborted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from virtualflow.protocol.tree import Key
from virtualflow.reduction.accumulation import Tensors
from virtualflow.reduction.buckets import Bucket, BucketPart, Keys, share_bucket
from virtualflow.reduction.ownership import Portions
from virtualflow.reduction.schedule import Way
from virtualflow.transport import DONE, Collectives, Message, Pending

_LINE = 64
"""Buffers begin at a multiple of so many bytes, as torch's own memory does."""


class Buffers:
    """Message buffers, kept from step to step: fresh large ones cost page faults.

    Those of a reduction lie one behind the other: where not all rows travel, it changes from step to step how much each
    bucket takes, and hardly how much all of them do.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._used: set[str] = set()

    def get(self, name: str, wanted: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """The buffers ``[n]`` of the reduction of that name, each of so many elements; zeros when they are new."""
        self._used.add(name)
        sizes = [-(-numel * dtype.itemsize // _LINE) * _LINE for numel, dtype in wanted]
        total = sum(sizes)
        if name not in self._kept or not total <= self._kept[name].numel() <= 2 * total:
            self._kept.pop(name, None)
            self._kept[name] = torch.zeros(total, dtype=torch.uint8)
        pieces = torch.split(self._kept[name][:total], sizes)
        return [
            piece[: numel * dtype.itemsize].view(dtype) for piece, (numel, dtype) in zip(pieces, wanted, strict=True)
        ]

    def release_unused(self) -> None:
        self._kept = {name: kept for name, kept in self._kept.items() if name in self._used}
        self._used.clear()

    def clear(self) -> None:
        self._kept = {}


@dataclass(frozen=True)
class ReductionPlan:
    """What is reduced among whom, and how."""

    collectives: Collectives
    keys: Keys
    """Of which stretches each member contributes the sums."""
    total: Callable[[Mapping[Key, Tensor | None]], Tensor]
    """Adds up what all members contribute, times the factor of the step, in the memory of the first tensor that is
    there. The others' may be reused. ``None`` counts as +0.0; not all are that."""
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
    """The own rows that travel, where they set out from."""
    in_order = True
    """Whether a single row stands in it as its tensors do, one behind the other."""

    def __init__(self, plan: ReductionPlan, index: int) -> None:
        self._plan, self._bucket = plan, plan.buckets[index]
        self._collectives = plan.collectives
        self._peers = [peer for peer in range(plan.collectives.size) if peer != plan.collectives.rank]
        self._counts = self._bucket.counts
        self.rows = self._counts[plan.collectives.rank]
        """How many of the own rows travel."""
        self._numbers = {row: number for number, row in enumerate(self._bucket.rows[plan.collectives.rank])}

    @property
    @abstractmethod
    def room(self) -> list[int]:
        """Elements of each buffer that it needs."""

    @abstractmethod
    def place(self, buffers: Sequence[Tensor]) -> None:
        """These are its buffers, the first of them :attr:`flat`."""

    @abstractmethod
    def segments(self, at: int, row: int) -> list[tuple[int, Tensor]]:
        """Where the ``at``-th tensor of the bucket is to be written: (its first element, stretch of ``flat``).

        Nowhere if the row does not travel.
        """

    @abstractmethod
    def set_out(self) -> Pending:
        """Send the own rows, and receive what is to be added up here."""

    @abstractmethod
    def add_and_return(self) -> Pending:
        """All is here: add it up, and send it on to whoever needs it."""

    @abstractmethod
    def sums(self) -> list[tuple[int, Tensor]]:
        """All is back: the sums that this worker needs, by place, views of a buffer."""

    def carries(self, row: int) -> bool:
        """Whether a row travels; of one that does not there is nothing."""
        return row in self._numbers

    def _exchange(self, incoming: Mapping[int, Tensor], outgoing: Mapping[int, Tensor]) -> Pending:
        """Receive from others and send to them; what this worker would send to itself, or is empty, stays."""
        messages = [
            Message(peer, stretch, incoming=stretches is incoming)
            for stretches in (incoming, outgoing)
            for peer, stretch in stretches.items()
            if stretch.numel() and peer != self._collectives.rank
        ]
        return self._collectives.start_messages(messages) if messages else DONE

    def _total(self, arrived: Sequence[Tensor]) -> Tensor:
        """Add up each member's rows, which lie one behind the other; the sum is where the first of all was."""
        rows: dict[Key, Tensor | None] = {node: None for nodes in self._plan.keys for node in nodes}
        for nodes, numbers, of_member in zip(self._plan.keys, self._bucket.rows, arrived, strict=True):
            if numbers:
                rows.update(zip([nodes[number] for number in numbers], of_member.view(len(numbers), -1), strict=True))
        return self._plan.total(rows)

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

    @property
    def room(self) -> list[int]:
        return [self.rows * self._bucket.total, sum(self._counts) * self._bucket.total]

    def place(self, buffers: Sequence[Tensor]) -> None:
        self.flat, gathered = buffers
        lengths = [count * self._bucket.total for count in self._counts]
        self._gathered = torch.split(gathered, lengths)
        self._sum: Tensor | None = None

    def segments(self, at: int, row: int) -> list[tuple[int, Tensor]]:
        if not self.carries(row):
            return []
        begin = self._numbers[row] * self._bucket.total + self._bucket.offsets[at]
        return [(0, self.flat[begin : begin + self._numel(at)])]

    def set_out(self) -> Pending:
        return self._exchange(dict(enumerate(self._gathered)), dict.fromkeys(self._peers, self.flat))

    def add_and_return(self) -> Pending:
        self._gathered[self._collectives.rank].copy_(self.flat)
        self._sum = self._total(self._gathered)
        return DONE

    def sums(self) -> list[tuple[int, Tensor]]:
        assert self._sum is not None
        return self._sums_of_all(self._sum)


class SlicedExchange(BucketExchange):
    """A slice of all rows to each worker, and the sums of the slices back to all."""

    def __init__(self, plan: ReductionPlan, index: int) -> None:
        super().__init__(plan, index)
        rank, of_members = self._collectives.rank, enumerate(zip(plan.keys, self._bucket.rows, strict=True))
        self._piece = self._bucket.pieces[rank]
        _, first = min((nodes[rows[0]], member) for member, (nodes, rows) in of_members if rows)
        # The sum takes the place of the first row: there it is among the others' sums.
        lengths = [count * self._piece for count in self._counts]
        self._begins, self._end = place_rows(lengths, first, self._bucket.edges[rank])

    @property
    def room(self) -> list[int]:
        return [self.rows * self._bucket.edges[-1], max(self._bucket.edges[-1], self._end)]

    def place(self, buffers: Sequence[Tensor]) -> None:
        self.flat, self._incoming = buffers
        """All members' rows of the own piece; then the sums come to the front of them, piece by piece."""
        edges = self._bucket.edges
        self._leaving = [self.flat[self.rows * begin : self.rows * end] for begin, end in pairwise(edges)]
        """What each member gets of this worker's rows."""
        self._rows = [
            self._incoming[begin : begin + count * self._piece]
            for begin, count in zip(self._begins, self._counts, strict=True)
        ]
        """All members' rows of the own piece."""
        self._sums = [self._incoming[begin:end] for begin, end in pairwise(edges)]

    def segments(self, at: int, row: int) -> list[tuple[int, Tensor]]:
        if not self.carries(row):
            return []
        found = self._bucket.segments(at, self._numel(at), self.rows, self._numbers[row])
        return [(first, self.flat[where : where + count]) for first, count, where in found]

    def set_out(self) -> Pending:
        return self._exchange(dict(enumerate(self._rows)), dict(enumerate(self._leaving)))

    def add_and_return(self) -> Pending:
        rank = self._collectives.rank
        self._rows[rank].copy_(self._leaving[rank])
        self._total(self._rows)
        return self._exchange(dict(enumerate(self._sums)), dict.fromkeys(self._peers, self._sums[rank]))

    def sums(self) -> list[tuple[int, Tensor]]:
        return self._sums_of_all(self._incoming)


def place_rows(lengths: Sequence[int], first: int, begin: int) -> tuple[list[int], int]:
    """Where stretches of these lengths lie in a buffer, one of them at a given place; and where the last one ends.

    The others lie in front of it as far as they fit there, and behind it.
    """
    begins, front, end = [0] * len(lengths), 0, begin + lengths[first]
    for number, length in enumerate(lengths):
        if number == first:
            begins[number] = begin
        elif front + length <= begin:
            begins[number], front = front, front + length
        else:
            begins[number], end = end, end + length
    return begins, end


class SharedExchange(BucketExchange):
    """To each worker its stretches of all rows, and their sums from it to who needs them beside it."""

    in_order = False

    def __init__(self, plan: ReductionPlan, index: int, portions: Portions) -> None:
        super().__init__(plan, index)
        size, rank = plan.collectives.size, plan.collectives.rank
        self._parts = share_bucket(self._bucket, portions, size)
        self._lengths = [sum(part.numel for part in parts) for parts in self._parts]
        self._places: list[list[tuple[int, int, int, int]]] = [[] for _ in self._bucket.places]
        """Of each tensor the stretches: (first element, how many, by whom it is added up, where in its message)."""
        for member, parts in enumerate(self._parts):
            for part, offset in zip(parts, accumulate((part.numel for part in parts), initial=0), strict=False):
                self._places[part.at].append((part.begin, part.numel, member, offset))
        for stretches in self._places:
            stretches.sort()
        self._needed = [[part for part in parts if rank in part.keepers] for parts in self._parts]
        """What this worker needs of what each adds up."""
        sizes: dict[int, dict[int, int]] = {}
        for member, needed in enumerate(self._needed):
            for part in needed:
                of = sizes.setdefault(part.at, {})
                of[member] = of.get(member, 0) + part.numel
        self._pieced = {at: sum(of.values()) for at, of in sizes.items() if len(of) > 1}
        """The tensors whose sums come from several, and how much of each."""

    @property
    def room(self) -> list[int]:
        rank = self._collectives.rank
        sums = [sum(part.numel for part in needed) for needed in self._needed]
        sums[rank] = 0  # it is where its first row was
        return [
            self.rows * sum(self._lengths),
            sum(self._counts) * self._lengths[rank],
            sum(self._pieced.values()),
            *sums,
        ]

    def place(self, buffers: Sequence[Tensor]) -> None:
        self.flat, incoming, pieced, *self._sums = buffers
        self._leaving = torch.split(self.flat, [self.rows * length for length in self._lengths])
        """What each member gets of the own rows, one behind the other."""
        length = self._lengths[self._collectives.rank]
        self._rows = torch.split(incoming, [count * length for count in self._counts])
        """All members' rows of what is added up here."""
        self._joined = dict(zip(self._pieced, torch.split(pieced, list(self._pieced.values())), strict=True))
        """Where the sums of a tensor are put together that come from several."""

    def segments(self, at: int, row: int) -> list[tuple[int, Tensor]]:
        if not self.carries(row):
            return []
        number = self._numbers[row]
        return [
            (first, self._leaving[member][number * self._lengths[member] + offset :][:count])
            for first, count, member, offset in self._places[at]
        ]

    def set_out(self) -> Pending:
        return self._exchange(dict(enumerate(self._rows)), dict(enumerate(self._leaving)))

    def add_and_return(self) -> Pending:
        rank = self._collectives.rank
        length, own = self._lengths[rank], self._sums[rank]
        if length:
            self._rows[rank].copy_(self._leaving[rank])
            own = self._sums[rank] = self._total(self._rows)
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


def open_exchanges(plan: ReductionPlan, buffers: Buffers, name: str) -> list[BucketExchange]:
    exchanges = [_open(plan, index) for index in range(len(plan.buckets))]
    dtypes = [bucket.dtype for bucket in plan.buckets]
    wanted = [(numel, dtype) for each, dtype in zip(exchanges, dtypes, strict=True) for numel in each.room]
    memory = iter(buffers.get(name, wanted))
    for each in exchanges:
        each.place([next(memory) for _ in each.room])
    return exchanges


def _open(plan: ReductionPlan, index: int) -> BucketExchange:
    if plan.ways[index] is Way.WHOLE:
        return WholeExchange(plan, index)
    if plan.portions is not None:
        return SharedExchange(plan, index, plan.portions)
    return SlicedExchange(plan, index)


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

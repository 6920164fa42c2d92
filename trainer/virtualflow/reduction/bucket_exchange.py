"""The two ways of a bucket between workers, each as what sets out, what comes of it, and what returns.

By slices, every worker sends each other one its piece of the own rows and gets theirs for the own piece; summed in the
shape of the tree, that goes back to all. Where the optimizer is sharded, what a worker adds up is what it steps, so it
goes to nobody but a second keeper. Where backward passes end early, rows travel only as far as these get. As a whole,
every worker gets all rows of all and adds everything up itself. The own rows are only read, so that they are whole if
the exchange is aborted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from virtualflow.reduction.accumulation import Tensors
from virtualflow.reduction.buckets import Bucket, Keys, Part, Parts, numbered_rows, place_rows
from virtualflow.reduction.ownership import Portions
from virtualflow.reduction.schedule import Way
from virtualflow.reduction.tree import Key
from virtualflow.transport import DONE, Collectives, Message, Pending


class Buffers:
    """Message buffers, kept from step to step: fresh large ones cost page faults."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._used: set[tuple[object, ...]] = set()

    def get(self, name: tuple[object, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The buffer of that name, of at least that size before; zeros when it is new."""
        key = (*name, dtype)
        self._used.add(key)
        kept, numel = self._kept.get(key), math.prod(shape)
        if kept is None or kept.numel() < numel:
            kept = self._kept[key] = torch.zeros(numel, dtype=dtype)
        return kept[:numel].view(shape)

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
    total: Callable[[Mapping[Key, Tensor | None], Tensor | None], Tensor]
    """Adds up what all members contribute, times the factor of the step, into the second argument if that is given. The
    first one's tensors may be reused; ``None`` counts as +0.0, and not all of them are that."""
    templates: Sequence[Tensor]
    """One tensor per place, with its shape and device."""
    results: Sequence[Tensor]
    """Likewise, with the device that its sum comes to."""
    buckets: Sequence[Bucket]
    ways: Sequence[Way]
    parts: Sequence[Parts | None]
    """For each bucket who adds up what of it, and of which rows; ``None``: all equally much, of all rows."""
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

    def carries(self, at: int, row: int) -> bool:
        """Whether the ``at``-th tensor of a row travels; of one that does not there is nothing."""
        return True

    def _sums_of_all(self, row: Tensor) -> list[tuple[int, Tensor]]:
        places, portions, rank = self._bucket.places, self._plan.portions, self._collectives.rank
        if portions is None:
            return list(zip(places, unflatten(row, [self._plan.results[place] for place in places]), strict=True))
        needed = {
            at: [row[offset + begin : offset + end] for begin, end, keepers in portions[place] if rank in keepers]
            for at, (place, offset) in enumerate(zip(places, self._bucket.offsets, strict=False))
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
        begin, end = self._bucket.offsets[at : at + 2]
        return [(0, self.flat[row, begin:end])]

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
        found = self._bucket.segments(at, self._rows, row)
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
    """To each worker its stretches of the rows that contribute to them, and their sums from it to who needs them."""

    in_order = False

    def __init__(self, plan: ReductionPlan, index: int, buffers: Buffers, name: str, parts: Parts) -> None:
        super().__init__(plan, index)
        rank, dtype = plan.collectives.rank, self._bucket.dtype
        self._parts = parts
        self._runs = [list(of_run) for _, of_run in groupby(parts[rank], key=attrgetter("rows"))]
        """What is added up here, by the rows that it is the sum of."""
        self._numbers = numbered_rows([len(nodes) for nodes in plan.keys])
        leaving = [place_rows(of_peer, self._numbers[rank]) for of_peer in parts]
        self._arriving = [place_rows(parts[rank], numbers) for numbers in self._numbers]
        self.flat = buffers.get((name, "flat", index), (sum(length for _, length in leaving),), dtype)
        self._leaving = torch.split(self.flat, [length for _, length in leaving])
        """What each member gets of the own rows."""
        incoming = buffers.get((name, "incoming", index), (sum(length for _, length in self._arriving),), dtype)
        self._incoming = torch.split(incoming, [length for _, length in self._arriving])
        """What comes of each member's rows."""
        own = sum(part.numel for part in parts[rank])
        self._own = buffers.get((name, "own", index), (own if len(self._runs) > 1 else 0,), dtype)
        """Where sums of different rows are put together."""
        self._places: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        """Of each tensor and own row the stretches: (first element, how many, by whom they are added up, where)."""
        for member, (places, _) in enumerate(leaving):
            for (row, number), where in places.items():
                part = parts[member][number]
                stretches = self._places.setdefault((part.at, row - self._numbers[rank].start), [])
                stretches.append((part.begin, part.numel, member, where))
        for stretches in self._places.values():
            stretches.sort()
        self._needed = [[part for part in of_peer if rank in part.keepers] for of_peer in parts]
        """What this worker needs of what each adds up."""
        self._sums = [
            buffers.get((name, "sums", index, member), (sum(part.numel for part in needed),), dtype)
            if member != rank
            else self._own
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

    def carries(self, at: int, row: int) -> bool:
        return (at, row) in self._places

    def segments(self, at: int, row: int) -> list[tuple[int, Tensor]]:
        return [
            (first, self._leaving[member][where : where + count])
            for first, count, member, where in self._places.get((at, row), ())
        ]

    def set_out(self) -> Pending:
        return self._exchange(dict(enumerate(self._incoming)), dict(enumerate(self._leaving)))

    def add_and_return(self) -> Pending:
        rank = self._collectives.rank
        self._incoming[rank].copy_(self._leaving[rank])
        own = self._sums[rank] = self._add()
        parts = list(zip(self._parts[rank], torch.split(own, [part.numel for part in self._parts[rank]]), strict=True))
        leaving = {peer: [piece for part, piece in parts if peer in part.keepers] for peer in self._peers}
        whole = {
            peer: own if len(pieces) == len(parts) else torch.cat(pieces) for peer, pieces in leaving.items() if pieces
        }
        return self._exchange(dict(enumerate(self._sums)), whole)

    def _add(self) -> Tensor:
        """What is added up here, one part behind the other."""
        nodes = [node for of_member in self._plan.keys for node in of_member]
        begin = number = 0
        for run in self._runs:
            length = sum(part.numel for part in run)
            arrived: dict[Key, Tensor | None] = dict.fromkeys(nodes)
            for numbers, message, (places, _) in zip(self._numbers, self._incoming, self._arriving, strict=True):
                for row in numbers:
                    where = places.get((row, number))
                    if where is not None:
                        arrived[nodes[row]] = message[where : where + length]
            if len(self._runs) == 1:
                return self._plan.total(arrived, None)
            self._plan.total(arrived, self._own[begin : begin + length])
            begin, number = begin + length, number + len(run)
        return self._own

    def sums(self) -> list[tuple[int, Tensor]]:
        found: dict[int, list[tuple[list[Part], Tensor]]] = {}
        for needed, row in zip(self._needed, self._sums, strict=True):
            begin = 0
            for at, group in groupby(needed, key=attrgetter("at")):
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


def _in_order(pieces: Sequence[tuple[list[Part], Tensor]]) -> list[Tensor]:
    """The sums of parts of one tensor, ascending, where those of each worker lie one behind the other."""
    found = {
        part.begin: piece
        for parts, row in pieces
        for part, piece in zip(parts, torch.split(row, [part.numel for part in parts]), strict=True)
    }
    return [found[begin] for begin in sorted(found)]


def open_exchange(plan: ReductionPlan, index: int, buffers: Buffers, name: str) -> BucketExchange:
    parts = plan.parts[index]
    if plan.ways[index] is Way.WHOLE:
        # Zeros travel: this is the way of small buckets, where trips count and not bytes.
        return WholeExchange(plan, index, buffers, name)
    if parts is not None:
        return SharedExchange(plan, index, buffers, name, parts)
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

"""Canonical reduction: sums over virtual nodes whose bits do not depend on who carries which of them.

Every sum has the shape of one balanced binary tree over the virtual nodes (``assignment``). A worker adds up what it
carries as it goes and holds only the maximal subtrees of its range (:class:`Accumulator`). Between workers, slices of
these subtrees travel by all-to-all, each worker adds its slice in tree order, and an all-gather returns the whole
(:func:`Reducer.reduce`): the traffic of a ring all-reduce when ranges are subtrees, and no dependence on the number of
workers, because element by element the same additions happen in the same order.

A tensor that a virtual node does not contribute counts as +0.0 everywhere, also where it could be left out: x + 0.0 is
not always x (-0.0 + 0.0 is 0.0), so leaving it out here and adding it there would give different bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from virtualflow.assignment import subtrees, tree_sum

Tensors = list[Tensor | None]


class Collectives(Protocol):
    """What a reduction needs of a communicator."""

    rank: int
    size: int

    def all_gather_into(self, out: Tensor, block: Tensor) -> None:
        """Gather ``block`` of every member into ``out``."""

    def all_to_all(self, out: Tensor, block: Tensor, out_sizes: list[int], in_sizes: list[int]) -> None:
        """Exchange stretches of ``block``; sizes in elements, which are bytes here."""


class Accumulator:
    """Adds up the tensors of consecutive virtual nodes as the maximal subtrees of the range that they form.

    At most ``2 log2(virtual_nodes)`` sums are alive at a time; for a range that is a subtree, as many as the subtree is
    deep while it grows and one at its end.
    """

    def __init__(self, virtual_nodes: int) -> None:
        self._parent: dict[tuple[int, int], tuple[int, int]] = {}
        self._pair(0, virtual_nodes)
        self.parts: list[tuple[tuple[int, int], Tensors]] = []

    def _pair(self, left: int, right: int) -> None:
        if right - left < 2:
            return
        middle = (left + right) // 2
        for child in ((left, middle), (middle, right)):
            self._parent[child] = (left, right)
            self._pair(*child)

    def add(self, virtual_node: int, tensors: Tensors) -> None:
        """Add what one virtual node contributes; the tensors belong to the accumulator from now on.

        Virtual nodes come in increasing order without gaps, and always with the same number of tensors.
        """
        self.parts.append(((virtual_node, virtual_node + 1), tensors))
        while len(self.parts) > 1:
            (left, first), (right, second) = self.parts[-2:]
            parent = self._parent.get(right)
            if parent is None or parent != self._parent.get(left):
                return
            self.parts[-2:] = [(parent, add_tensors(first, second))]

    def clear(self) -> None:
        """Forget everything."""
        self.parts.clear()


def add_tensors(left: Tensors, right: Tensors) -> Tensors:
    """``left + right`` element by element, in place in ``left`` where both are there."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        if (a is None) != (b is None):
            there = a if a is not None else b
            assert there is not None
            left[index] = there.add_(0.0) if there.is_floating_point() or there.is_complex() else there
    return left


class Reducer:
    """Reduces between workers; keeps its buffers from step to step, since fresh large ones cost page faults.

    Args:
        virtual_nodes: how many there are.
        alignment: bytes at whose multiples slices start.
        small: up to so many bytes at each worker, subtrees are gathered whole: one collective instead of two.
    """

    def __init__(self, virtual_nodes: int, alignment: int, small: int) -> None:
        self._virtual_nodes = virtual_nodes
        self._alignment = alignment
        self._small = small
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def forget_buffers(self) -> None:
        """Free the buffers: another number of workers needs other ones."""
        self._buffers.clear()

    def reduce(
        self,
        collectives: Collectives,
        ranges: Sequence[range],
        parts: list[tuple[tuple[int, int], Tensors]],
        templates: Sequence[Tensor],
        present: Sequence[bool],
        scale: float,
    ) -> Tensors:
        """Sum over all virtual nodes, times ``scale``, on every worker.

        Args:
            collectives: the communicator; its members carry ``ranges`` in the order of their ranks.
            parts: what an :class:`Accumulator` holds for this worker's range; used up.
            templates: one tensor per place, with its shape, dtype and device.
            present: which places any virtual node of the job contributed to; the others come back as ``None``.
            scale: the factor of the sum, the same on every worker.

        Returns:
            One contiguous tensor per present place, views of buffers that the next call overwrites.
        """
        result: Tensors = [None] * len(templates)
        groups: dict[torch.dtype, list[int]] = {}
        for place, (template, there) in enumerate(zip(templates, present, strict=True)):
            if there:
                groups.setdefault(template.dtype, []).append(place)
        if collectives.size == 1:
            total = tree_sum(self._virtual_nodes, dict(parts), add_tensors)
            for places in groups.values():
                tensors = [self._or_zeros(total[place], templates[place]).contiguous() for place in places]
                if scale != 1.0:
                    # Not torch._foreach_mul_, which rounds the factor to the type of the tensors first.
                    for tensor in tensors:
                        tensor.mul_(scale)
                for place, tensor in zip(places, tensors, strict=True):
                    result[place] = tensor
            return result
        counts = [len(subtrees(self._virtual_nodes, carried)) for carried in ranges]
        keys = [[(node.start, node.stop) for node in subtrees(self._virtual_nodes, carried)] for carried in ranges]
        for dtype, places in groups.items():
            whole = self._reduce_group(
                collectives, counts, keys, parts, [templates[p] for p in places], places, dtype, scale
            )
            offset = 0
            for place in places:
                template = templates[place]
                result[place] = whole[offset : offset + template.numel()].view(template.shape).to(template.device)
                offset += template.numel()
        return result

    def _reduce_group(
        self,
        collectives: Collectives,
        counts: list[int],
        keys: list[list[tuple[int, int]]],
        parts: list[tuple[tuple[int, int], Tensors]],
        templates: list[Tensor],
        places: list[int],
        dtype: torch.dtype,
        scale: float,
    ) -> Tensor:
        size, most = collectives.size, max(counts)
        total = sum(template.numel() for template in templates)
        if size * most * total * dtype.itemsize <= self._small:
            return self._gather_group(collectives, most, keys, parts, templates, places, dtype, total, scale)
        unit = max(1, self._alignment // dtype.itemsize)
        piece = -(-total // (size * unit)) * unit
        mine = len(parts)
        flat = self._buffer("flat", mine * size * piece, dtype).view(mine, size * piece)
        self._fill(flat, parts, places, templates, total)
        if mine == 1:
            outgoing = flat.view(-1)
        else:
            outgoing = self._buffer("outgoing", mine * size * piece, dtype)
            outgoing.view(size, mine, piece).copy_(flat.view(mine, size, piece).transpose(0, 1))
        incoming = self._buffer("incoming", sum(counts) * piece, dtype)
        row = piece * dtype.itemsize
        collectives.all_to_all(
            _as_bytes(incoming), _as_bytes(outgoing), [count * row for count in counts], [mine * row] * size
        )
        slices = iter(incoming.view(-1, piece))
        arrived = {node: next(slices) for nodes in keys for node in nodes}
        reduced = self._sum(arrived, scale)
        whole = self._buffer("whole", size * piece, dtype)
        collectives.all_gather_into(_as_bytes(whole), _as_bytes(reduced))
        return whole

    def _gather_group(
        self,
        collectives: Collectives,
        most: int,
        keys: list[list[tuple[int, int]]],
        parts: list[tuple[tuple[int, int], Tensors]],
        templates: list[Tensor],
        places: list[int],
        dtype: torch.dtype,
        total: int,
        scale: float,
    ) -> Tensor:
        """Where latency counts and not bandwidth: everyone gets all subtrees, whole, and does the same additions."""
        flat = self._buffer("flat", most * total, dtype).view(most, total)
        self._fill(flat, parts, places, templates, total)
        gathered = self._buffer("incoming", collectives.size * most * total, dtype)
        collectives.all_gather_into(_as_bytes(gathered), _as_bytes(flat))
        rows = gathered.view(collectives.size, most, total)
        arrived = {node: rows[rank, at] for rank, nodes in enumerate(keys) for at, node in enumerate(nodes)}
        return self._sum(arrived, scale)

    def _sum(self, arrived: dict[tuple[int, int], Tensor], scale: float) -> Tensor:
        reduced = tree_sum(self._virtual_nodes, arrived, torch.Tensor.add_)
        return reduced if scale == 1.0 else reduced.mul_(scale)

    def _fill(
        self,
        flat: Tensor,
        parts: list[tuple[tuple[int, int], Tensors]],
        places: list[int],
        templates: list[Tensor],
        total: int,
    ) -> None:
        """Write one subtree to each row of ``flat``; what is left over is never read as a sum."""
        for row, (_, tensors) in zip(flat, parts, strict=False):
            self._flatten(row[:total], [tensors[place] for place in places], templates)
            row[total:].zero_()

    def _flatten(self, row: Tensor, tensors: Tensors, templates: list[Tensor]) -> None:
        """Copy tensors, of any device, one after the other into ``row``; a missing one is zero."""
        pieces = [self._or_zeros(t, template).reshape(-1) for t, template in zip(tensors, templates, strict=True)]
        if all(piece.device == row.device for piece in pieces):
            torch.cat(pieces, out=row)
        else:
            row.copy_(torch.cat(pieces))

    @staticmethod
    def _or_zeros(tensor: Tensor | None, template: Tensor) -> Tensor:
        return torch.zeros_like(template, memory_format=torch.contiguous_format) if tensor is None else tensor

    def _buffer(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        key = (name, numel, dtype)
        if key not in self._buffers:
            self._buffers = {k: v for k, v in self._buffers.items() if (k[0], k[2]) != (name, dtype)}
            self._buffers[key] = torch.empty(numel, dtype=dtype)
        return self._buffers[key]


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8 ``[n]``: gloo knows few types, and bytes are enough for it."""
    return tensor.view(-1).view(torch.uint8)

"""Sums over virtual nodes, as far as those of one worker go."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from virtualflow.protocol.settings import Reproducibility
from virtualflow.protocol.tree import Key, subtrees, tree_sum
from virtualflow.reduction.offload import Fetch, Offload, choose_offloaded

# In which order virtual nodes are added up: chosen once for a job, and known to nothing else.
#
# A ``bitwise`` job sums in the shape of the tree, whoever computes what. A ``statistical`` job has given that up: a
# worker adds up everything that it is assigned, several virtual nodes at a time, and contributes one sum; these are
# added in the order of the ranks, which is the same on all workers, so that all end with the same weights.

T = TypeVar("T")

Tensors = list[Tensor | None]
"""One tensor for each place; ``None`` where nothing was contributed."""

Parts = list[tuple[Key, Tensors]]
"""Sums over the tree nodes ``(left, right)``, from left to right."""


@dataclass(frozen=True)
class Precision:
    """In which types gradients are summed up.

    Args:
        least: that of gradients whose own type has fewer bytes; ``None``: every gradient is summed up in its own.
    """

    least: torch.dtype | None = None

    def of(self, dtype: torch.dtype) -> torch.dtype:
        """In which gradients of a type are summed up."""
        if self.least is not None and dtype.is_floating_point and dtype.itemsize < self.least.itemsize:
            return self.least
        return dtype

    def cast(self, gradient: Tensor) -> Tensor:
        """A gradient in the type of its sum: itself, or a copy."""
        return gradient if self.least is None else gradient.to(self.of(gradient.dtype))

    def cast_all(self, gradients: Tensors) -> Tensors:
        """The same list with all of them cast; each is freed before the next one is copied."""
        if self.least is not None:
            for place, gradient in enumerate(gradients):
                if gradient is not None:
                    gradients[place] = self.cast(gradient)
        return gradients

    def template(self, like: Tensor) -> Tensor:
        """A tensor of the shape, device and type of the sum of such gradients, in the memory of one element."""
        dtype = self.of(like.dtype)
        return like if dtype == like.dtype else torch.empty((), dtype=dtype, device=like.device).expand(like.shape)


OWN_TYPES = Precision()


class Summation(Protocol):
    """An order of summation, and its precision."""

    movable: bool
    """Whether a sum is the same whoever contributes it, so that it may be kept when virtual nodes change hands."""
    precision: Precision
    """Of gradients; whatever else is summed up has its own type."""

    def parts_of(self, holding: Sequence[int]) -> list[Key]:
        """The stretches whose sums a worker contributes that holds these virtual nodes, from left to right."""

    def joins(self, left: Key, right: Key) -> bool:
        """Whether a worker makes one of two sums that it has, of which ``left`` comes before ``right``."""

    def add_up(self, parts: Mapping[Key, T], add: Callable[[T, T], T]) -> T:
        """Sum ``parts``, which cover all virtual nodes without overlap; ``add(left, right)`` may reuse ``left``."""

    def unit(self, micro_batch: int, most: int) -> int:
        """Samples of a contribution whose weight is 1, the same on all workers.

        Args:
            most: the most virtual nodes that any worker is assigned.
        """


class CanonicalSummation:
    """In the shape of the tree over ``0..virtual_nodes-1``."""

    movable = True

    def __init__(self, virtual_nodes: int, precision: Precision = OWN_TYPES) -> None:
        self.precision = precision
        self._virtual_nodes = virtual_nodes
        self._parent: dict[Key, Key] = {}
        self._pair(0, virtual_nodes)

    def _pair(self, left: int, right: int) -> None:
        if right - left < 2:
            return
        middle = (left + right) // 2
        for child in ((left, middle), (middle, right)):
            self._parent[child] = (left, right)
            self._pair(*child)

    def parts_of(self, holding: Sequence[int]) -> list[Key]:
        return [(node.start, node.stop) for node in subtrees(self._virtual_nodes, holding)]

    def joins(self, left: Key, right: Key) -> bool:
        parent = self._parent.get(left)
        return parent is not None and parent == self._parent.get(right)

    def add_up(self, parts: Mapping[Key, T], add: Callable[[T, T], T]) -> T:
        return tree_sum(self._virtual_nodes, parts, add)

    def unit(self, micro_batch: int, most: int) -> int:
        return micro_batch


class SummationByWorker:
    """One sum a worker, added in the order of the ranks."""

    movable = False

    def __init__(self, precision: Precision = OWN_TYPES) -> None:
        self.precision = precision

    def parts_of(self, holding: Sequence[int]) -> list[Key]:
        return [(holding[0], holding[-1] + 1)]

    def joins(self, left: Key, right: Key) -> bool:
        return True

    def add_up(self, parts: Mapping[Key, T], add: Callable[[T, T], T]) -> T:
        return reduce(add, (parts[key] for key in sorted(parts)))

    def unit(self, micro_batch: int, most: int) -> int:
        """All virtual nodes of a worker: where they run as one micro-batch, its gradients need no factor."""
        return micro_batch * most


def choose_summation(
    virtual_nodes: int, reproducibility: Reproducibility, reduce_dtype: torch.dtype | None = None
) -> Summation:
    """The order of summation of a job, and its precision.

    Args:
        reduce_dtype: in which gradients of narrower types are summed up; ``None``: each in its own.
    """
    precision = Precision(reduce_dtype)
    bitwise = reproducibility == "bitwise"
    return CanonicalSummation(virtual_nodes, precision) if bitwise else SummationByWorker(precision)


def deal(ranges: Sequence[Sequence[int]], number: int = 0) -> list[list[int]]:
    """As many virtual nodes for each as in ``ranges``, dealt in turns: what all compute at a time are neighbours.

    Where contributions are summed up one by one as they come, whoever computes them, sums wait for as few others as
    there can be: at most as many as the tree is deep.

    Args:
        number: the first of them.
    """
    dealt: list[list[int]] = [[] for _ in ranges]
    for turn in range(max(map(len, ranges))):
        for nodes, assigned in zip(dealt, ranges, strict=True):
            if turn < len(assigned):
                nodes.append(number)
                number += 1
    return dealt


class Accumulator:
    """Adds up the tensors of virtual nodes, to as few sums as the order of summation allows.

    At most ``2 log2(virtual_nodes)`` sums of a ``bitwise`` job are alive at a time; for a range that is a subtree, as
    many as the subtree is deep while it grows and one at its end.

    Args:
        offload: where sums wait that are too many for the device; ``None``: all where they are.
    """

    def __init__(self, summation: Summation, offload: Offload | None = None) -> None:
        self._summation = summation
        self._offload = offload
        self._offloaded: dict[Key, frozenset[int]] = {}
        """Sums that wait in host memory, each with the places that were moved there."""
        self.parts: Parts = []

    def add(
        self,
        virtual_node: int,
        tensors: Tensors,
        *,
        weight: float = 1.0,
        count: int = 1,
        added: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Add what one virtual node contributes; the tensors belong to the accumulator from now on.

        Each virtual node comes once, and always with the same number of tensors; usually in increasing order without
        gaps, but between two of them there may be others whose sums were kept from an aborted attempt.

        Args:
            added: the sums of places at which an :class:`Addition` has added it up already.
        """
        multiply(tensors, weight)
        key = (virtual_node, virtual_node + count)
        at = bisect(self.parts, virtual_node, key=_first)
        while True:
            if at > 0 and self._summation.joins(self.parts[at - 1][0], key):
                at -= 1
                left, before = self.parts.pop(at)
                key, tensors = (left[0], key[1]), self._join(before, tensors, waited=before, of=left)
            elif at < len(self.parts) and self._summation.joins(key, self.parts[at][0]):
                right, behind = self.parts.pop(at)
                key, tensors = (key[0], right[1]), self._join(tensors, behind, waited=behind, of=right)
            else:
                break
        for place, total in (added or {}).items():
            tensors[place] = total
        self.parts.insert(at, (key, tensors))
        if self._offload is not None:
            self._make_room(self._offload)

    def _join(self, left: Tensors, right: Tensors, *, waited: Tensors, of: Key) -> Tensors:
        if of not in self._offloaded:
            return add_tensors(left, right)
        assert self._offload is not None
        fetch, taken = Fetch(self._offload, [(waited, self._offloaded.pop(of))]), (left, right)
        for place in reversed(range(len(left))):  # as they are fetched
            a, b = (fetch.take(tensors, place) for tensors in taken)
            left[place] = None if a is None and b is None else add_one(a, b)
        return left

    def _make_room(self, offload: Offload) -> None:
        memory, chosen = offload.memory, choose_offloaded([key for key, _ in self.parts], offload.room)
        for key, tensors in self.parts:
            if key in chosen and key not in self._offloaded:
                stored = [None if tensor is None else memory.store(tensor) for tensor in tensors]
                self._offloaded[key] = frozenset(n for n, tensor in enumerate(stored) if tensor is not tensors[n])
                tensors[:] = stored

    def await_offloaded(self) -> None:
        """Wait until all that was moved to host memory can be read there."""
        if self._offloaded and self._offload is not None:
            self._offload.memory.finish()

    def prepare(self, virtual_node: int, count: int = 1, *, weight: float) -> Addition:
        """The additions of a virtual node, to be made as its tensors come; none if it is not behind all others."""
        key, at = (virtual_node, virtual_node + count), len(self.parts)
        behind = not self.parts or self.parts[-1][0][1] <= virtual_node
        while behind and at > 0 and self._summation.joins(self.parts[at - 1][0], key):
            at -= 1
            key = (self.parts[at][0][0], key[1])
        offloaded, merged = self._offloaded, reversed(self.parts[at:])
        moved = [(tensors, offloaded[of]) for of, tensors in merged if of in offloaded]
        fetch = Fetch(self._offload, moved) if self._offload is not None and moved else None
        precision = self._summation.precision
        return Addition(self.parts, merges=len(self.parts) - at, weight=weight, precision=precision, fetch=fetch)


class Addition:
    """The additions that one more virtual node brings about, made place by place as its tensors come.

    All additions of a place follow one another while its tensor is still in a cache. They are those of
    :meth:`Accumulator.add`, to the bit. Sums are taken out of ``parts`` as they are used up.

    Args:
        merges: with how many of the last of them it makes one.
        precision: of the sums; its tensors are gradients.
    """

    def __init__(
        self, parts: Parts, *, merges: int, weight: float, precision: Precision, fetch: Fetch | None = None
    ) -> None:
        self.above = [tensors for _, tensors in parts[: len(parts) - merges]]
        self.merged = [tensors for _, tensors in parts[len(parts) - merges :]]
        """Those that it makes one with, from left to right."""
        self.weight = weight
        self.precision = precision
        self._fetch = fetch
        self.sums: dict[int, Tensor] = {}

    def takes(self, place: int) -> bool:
        return True

    def give(self, place: int, tensor: Tensor, *, own: bool) -> Tensor:
        """Add up a place.

        Args:
            place: each once.
            tensor: the virtual node's; it stays as it is.
            own: whether it need not be kept.

        Returns:
            See :class:`~virtualflow.reduction.handover.Receiver`: the sum.
        """
        total = add_one(*self.prepare(place, tensor))
        assert total is not None
        self.sums[place] = total
        return as_memory(total, tensor) if own else tensor

    def prepare(self, place: int, tensor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Make all additions of a place but the last; what that one is to add, if :attr:`merged` is not empty."""
        if tensor is not None:
            tensor = self.precision.cast(tensor)
            if self.weight != 1.0:
                # A copy: gradients may share memory with others that the backward pass has not handed over yet.
                tensor = tensor * self.weight if self.weight else torch.zeros_like(tensor)
        for tensors in reversed(self.merged[1:]):
            tensor = add_one(self.take(tensors, place), tensor)
        return (self.take(self.merged[0], place) if self.merged else None), tensor

    def take(self, tensors: Tensors, place: int) -> Tensor | None:
        if self._fetch is not None:
            return self._fetch.take(tensors, place)
        taken, tensors[place] = tensors[place], None
        return taken


def as_memory(tensor: Tensor, like: Tensor) -> Tensor:
    """A dense tensor, or its memory as one of the shape and type of ``like``, which needs no more bytes."""
    if tensor.dtype == like.dtype:
        return tensor
    begin = tensor.storage_offset() * tensor.itemsize // like.itemsize
    return torch.empty(0, dtype=like.dtype, device=tensor.device).set_(
        tensor.untyped_storage(), begin, tensor.shape, tensor.stride()
    )


def _first(part: tuple[Key, Tensors]) -> int:
    return part[0][0]


def multiply(tensors: Iterable[Tensor | None], factor: float) -> None:
    """Multiply tensors in place: by the weight of their samples, or a whole sum by the scale of the step."""
    if factor == 1.0:
        return
    there = [tensor for tensor in tensors if tensor is not None]
    if factor == 0.0:  # a mean over nothing is not a number, and counts for nothing
        for tensor in there:
            tensor.zero_()
        return
    # Every floating-point type holds such a power of two as it is; torch would round any other factor to the type of
    # the tensors first.
    if there and math.frexp(factor)[0] == 0.5 and 2.0**-14 <= factor <= 1.0:
        torch._foreach_mul_(there, factor)
        return
    for tensor in there:
        tensor.mul_(factor)


def sum_up(summation: Summation, parts: Parts) -> Tensors:
    """The sums of parts that cover all virtual nodes, which are used up."""
    return summation.add_up(dict(parts), add_tensors)


def separate(tensors: Iterable[Tensor | None]) -> Tensors:
    """Tensors of which no two share memory, so that each may change alone; copies where needed.

    autograd lets ``.grad`` of several parameters share memory where they came as views of one gradient, as for
    ``b.view(-1) + c.view(-1)``, or for ``cat((a, b)) + cat((c, d))``, where they may overlap in part.

    Args:
        tensors: dense ones, as autograd leaves them: each takes ``nbytes`` from where it begins.
    """
    separated = list(tensors)
    spans = [(t.data_ptr(), t.nbytes, place) for place, t in enumerate(separated) if t is not None]
    spans.sort()
    reach = 0
    for begin, size, place in spans:
        tensor = separated[place]
        if begin < reach and size and tensor is not None:
            separated[place] = tensor.clone()
        else:
            reach = begin + size
    return separated


def add_tensors(left: Tensors, right: Tensors) -> Tensors:
    """``left + right`` element by element, in place in ``left`` where both are there."""
    lefts = [a for a in left if a is not None]
    rights = [b for b in right if b is not None]
    if len(lefts) == len(left) == len(rights) == len(right):
        if lefts:
            torch._foreach_add_(lefts, rights)
        return left
    lefts, rights = [], []
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        if a is not None and b is not None:
            lefts.append(a)
            rights.append(b)
        elif a is not None or b is not None:
            there = a if a is not None else b
            assert there is not None
            left[index] = there.add_(0.0) if there.is_floating_point() or there.is_complex() else there
    if lefts:
        torch._foreach_add_(lefts, rights)
    return left


def add_one(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """The same for one place, where ``right`` must not change: it is still the user's."""
    if left is not None:
        return left.add_(0.0 if right is None else right)
    return None if right is None else right + 0.0


def add_arrived(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """The same, where both may change."""
    if left is not None:
        return left.add_(0.0 if right is None else right)
    return None if right is None else right.add_(0.0)

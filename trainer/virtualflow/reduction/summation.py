"""In which order virtual nodes are added up: chosen once for a job, and known to nothing else.

A ``bitwise`` job sums in the shape of the tree, whoever computes what. A ``statistical`` job has given that up: a
worker adds up everything that it is assigned, several virtual nodes at a time, and contributes one sum; these are added
in the order of the ranks, which is the same on all workers, so that all end with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Protocol, TypeVar

from virtualflow.protocol.settings import Reproducibility
from virtualflow.reduction.tree import Key, subtrees, tree_sum

T = TypeVar("T")


class Summation(Protocol):
    """An order of summation."""

    movable: bool
    """Whether a sum is the same whoever contributes it, so that it may be kept when virtual nodes change hands."""

    def parts_of(self, holding: Sequence[int]) -> list[Key]:
        """The stretches whose sums a worker contributes that holds these virtual nodes, from left to right."""

    def joins(self, left: Key, right: Key) -> bool:
        """Whether a worker makes one of two sums that it has, of which ``left`` comes before ``right``."""

    def add_up(self, parts: Mapping[Key, T], add: Callable[[T, T], T]) -> T:
        """Sum ``parts``, which cover all virtual nodes without overlap; ``add(left, right)`` may reuse ``left``."""

    def unit(self, micro_batch: int, most: int) -> int:
        """Samples of a contribution whose weight is 1, the same on all workers.

        Args:
            micro_batch: samples of a virtual node.
            most: the most virtual nodes that any worker is assigned.
        """


class CanonicalSummation:
    """In the shape of the tree over ``0..virtual_nodes-1``."""

    movable = True

    def __init__(self, virtual_nodes: int) -> None:
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
        """The maximal subtrees."""
        return [(node.start, node.stop) for node in subtrees(self._virtual_nodes, holding)]

    def joins(self, left: Key, right: Key) -> bool:
        """If they are the halves of a node."""
        parent = self._parent.get(left)
        return parent is not None and parent == self._parent.get(right)

    def add_up(self, parts: Mapping[Key, T], add: Callable[[T, T], T]) -> T:
        """In the shape of the tree."""
        return tree_sum(self._virtual_nodes, parts, add)

    def unit(self, micro_batch: int, most: int) -> int:
        """A virtual node."""
        return micro_batch


class SummationByWorker:
    """One sum a worker, added in the order of the ranks."""

    movable = False

    def parts_of(self, holding: Sequence[int]) -> list[Key]:
        """All at once."""
        return [(holding[0], holding[-1] + 1)]

    def joins(self, left: Key, right: Key) -> bool:
        """Always."""
        return True

    def add_up(self, parts: Mapping[Key, T], add: Callable[[T, T], T]) -> T:
        """One after the other."""
        return reduce(add, (parts[key] for key in sorted(parts)))

    def unit(self, micro_batch: int, most: int) -> int:
        """All virtual nodes of a worker: where they run as one micro-batch, its gradients need no factor."""
        return micro_batch * most


def choose_summation(virtual_nodes: int, reproducibility: Reproducibility) -> Summation:
    """The order of summation of a job."""
    return CanonicalSummation(virtual_nodes) if reproducibility == "bitwise" else SummationByWorker()

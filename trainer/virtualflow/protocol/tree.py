"""The tree in whose shape the sums of a ``bitwise`` job are made.

A sum over virtual nodes always has the shape ``node [l, r) = node [l, m) + node [m, r), m = (l + r) // 2``, whoever
computes its parts: this is why results do not depend on the assignment. Pure functions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

Key = tuple[int, int]
"""A stretch of virtual nodes, half open."""


def subtrees(virtual_nodes: int, assigned: Sequence[int]) -> list[range]:
    """The maximal nodes of the canonical tree over ``0..virtual_nodes-1`` within ``assigned``, from left to right.

    A range that is itself a node of the tree gives one, any other at most ``2 log2(virtual_nodes)``. Virtual nodes that
    are no range (ascending, of a worker that has kept some of an aborted attempt) may give more.
    """
    found: list[range] = []

    def descend(left: int, right: int) -> None:
        within = bisect_left(assigned, right) - bisect_left(assigned, left)
        if not within:
            return
        if within == right - left:
            found.append(range(left, right))
            return
        middle = (left + right) // 2
        descend(left, middle)
        descend(middle, right)

    if assigned:
        descend(0, virtual_nodes)
    return found


def tree_sum(virtual_nodes: int, parts: Mapping[Key, T], add: Callable[[T, T], T]) -> T:
    """Sum ``parts``, keyed by the tree nodes ``(left, right)`` that they are the sums of, in the shape of the tree.

    The parts cover ``0..virtual_nodes-1`` without overlap. ``add(left, right)`` may reuse its left argument.
    """
    return _total(parts, add, 0, virtual_nodes)


def _total(parts: Mapping[Key, T], add: Callable[[T, T], T], left: int, right: int) -> T:
    # Not a closure within tree_sum: one that calls itself is a cycle, and would keep the parts, that is gradients,
    # until the garbage collector comes by.
    if (left, right) in parts:
        return parts[left, right]
    if right - left == 1:
        raise ValueError(f"nothing covers virtual node {left}")
    middle = (left + right) // 2
    return add(_total(parts, add, left, middle), _total(parts, add, middle, right))

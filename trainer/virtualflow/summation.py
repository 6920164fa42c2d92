"""In which shape sums over virtual nodes are made: the canonical tree, or worker by worker.

A ``bitwise`` job adds in the shape of one tree, whoever carries what (``assignment``), so that the bits do not depend
on the workers. A ``statistical`` job has given that up: a worker adds up all that it carries and contributes one sum,
and these are added in the order of the ranks, which is the same on all workers, so that all end with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import TypeVar

from virtualflow.assignment import subtrees, tree_sum

T = TypeVar("T")

Key = tuple[int, int]
"""A stretch of virtual nodes, half open."""


def parts_of(virtual_nodes: int, carried: range, canonical: bool) -> list[Key]:
    """The stretches whose sums a worker contributes that carries ``carried``, from left to right."""
    if not canonical:
        return [(carried.start, carried.stop)]
    return [(node.start, node.stop) for node in subtrees(virtual_nodes, carried)]


def add_up(virtual_nodes: int, parts: Mapping[Key, T], add: Callable[[T, T], T], canonical: bool) -> T:
    """Sum ``parts``, which cover all virtual nodes without overlap; ``add(left, right)`` may reuse ``left``."""
    if canonical:
        return tree_sum(virtual_nodes, parts, add)
    return reduce(add, (parts[key] for key in sorted(parts)))

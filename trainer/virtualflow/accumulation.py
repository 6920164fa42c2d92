"""Sums over consecutive virtual nodes in the shape of the canonical tree, as far as one worker's range goes."""

from __future__ import annotations

import torch
from torch import Tensor

Tensors = list[Tensor | None]
"""One tensor for each place; ``None`` where nothing was contributed."""

Parts = list[tuple[tuple[int, int], Tensors]]
"""Sums over the tree nodes ``(left, right)``, from left to right."""


class Accumulator:
    """Adds up the tensors of consecutive virtual nodes as the maximal subtrees of the range that they form.

    At most ``2 log2(virtual_nodes)`` sums are alive at a time; for a range that is a subtree, as many as the subtree is
    deep while it grows and one at its end. One that is not ``canonical`` adds everything up to one sum.
    """

    def __init__(self, virtual_nodes: int, canonical: bool = True) -> None:
        self._canonical = canonical
        self._parent: dict[tuple[int, int], tuple[int, int]] = {}
        self._pair(0, virtual_nodes)
        self.parts: Parts = []

    def _pair(self, left: int, right: int) -> None:
        if right - left < 2:
            return
        middle = (left + right) // 2
        for child in ((left, middle), (middle, right)):
            self._parent[child] = (left, right)
            self._pair(*child)

    def add(self, virtual_node: int, tensors: Tensors, count: int = 1) -> None:
        """Add what one virtual node contributes; the tensors belong to the accumulator from now on.

        Virtual nodes come in increasing order without gaps, and always with the same number of tensors. Several that
        were computed as one (``count``) are added as one, which is not canonical.
        """
        key = (virtual_node, virtual_node + count)
        for _ in range(self.merges(virtual_node)):
            left, first = self.parts.pop()
            key, tensors = (left[0], key[1]), add_tensors(first, tensors)
        self.parts.append((key, tensors))

    def merges(self, virtual_node: int) -> int:
        """With how many of the last sums the coming virtual node makes one."""
        if not self._canonical:
            return len(self.parts)
        key, count = (virtual_node, virtual_node + 1), 0
        for left, _ in reversed(self.parts):
            parent = self._parent.get(key)
            if parent is None or parent != self._parent.get(left):
                break
            key, count = parent, count + 1
        return count

    def clear(self) -> None:
        """Forget everything."""
        self.parts.clear()


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

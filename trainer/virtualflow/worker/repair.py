"""A step that is attempted again after a loss: who contributes what he has already, and who computes the rest.

Survivors keep what they have computed, wherever it lies. So for the rest of that one step a member does not hold the
range that the new generation assigns it, but the virtual nodes that it has kept, and its part of those that nobody has.
The sums are those of the tree whoever contributes its nodes, so this changes no bit. Pure functions of what all members
have told one another on entering, so all come to the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Remains:
    """What a member brings from an attempt that was aborted."""

    kept: frozenset[int] = frozenset()
    """The virtual nodes whose contributions it has."""
    undone: frozenset[int] = frozenset()
    """Those that it should have computed, and has not."""

    def to_bytes(self, virtual_nodes: int) -> Tensor:
        """As uint8 ``[2 * virtual_nodes]``: 1 for each that is one of them."""
        flags = torch.zeros(2, virtual_nodes, dtype=torch.uint8)
        for row, nodes in zip(flags, (self.kept, self.undone), strict=True):
            row[sorted(nodes)] = 1
        return flags.view(-1)

    @classmethod
    def from_bytes(cls, block: Tensor) -> Remains:
        kept, undone = (frozenset(row.nonzero().view(-1).tolist()) for row in block.view(2, -1))
        return cls(kept, undone)


@dataclass(frozen=True)
class Repair:
    """Who does what in the coming attempt; ascending, in the order of the ranks."""

    holdings: tuple[tuple[int, ...], ...]
    """The virtual nodes that each member contributes."""
    computes: tuple[tuple[int, ...], ...]
    """Those of them that it computes now."""


def plan_repair(remains: Sequence[Remains], ranges: Sequence[range]) -> Repair | None:
    """Divide what nobody has kept; ``None``: the members are to compute what they are assigned.

    What is missing is divided in its order and in proportion to what each member is assigned, since that is measured by
    its speed.
    """
    kept = [node for member in remains for node in member.kept]
    if not kept or len(set(kept)) < len(kept):  # twice the same: a member was given up that is back
        return None
    virtual_nodes = ranges[-1].stop
    missing = sorted(set(range(virtual_nodes)) - set(kept))
    bounds = [len(missing) * assigned.start // virtual_nodes for assigned in ranges] + [len(missing)]
    computes = [tuple(missing[first:last]) for first, last in pairwise(bounds)]
    holdings = [tuple(sorted((*member.kept, *more))) for member, more in zip(remains, computes, strict=True)]
    return Repair(tuple(holdings), tuple(computes))


def count_repeated(remains: Collection[Remains], virtual_nodes: int) -> int:
    """How many virtual nodes are computed again, at most: how far the dead had come, nobody knows."""
    spared = frozenset().union(*(member.kept | member.undone for member in remains))
    return virtual_nodes - len(spared)

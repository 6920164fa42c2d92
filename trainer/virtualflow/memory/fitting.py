"""What fits: for each number of virtual nodes that divides a batch, the plan of one device. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from virtualflow.errors import ConfigurationError, DoesNotFit
from virtualflow.memory.model import Block, Budget, Plan, Profile, Skip
from virtualflow.memory.planner import Planner
from virtualflow.memory.settings import PlannerSettings
from virtualflow.protocol.device_profile import BlockProfile, ChainProfile, ChainSize, SkipProfile
from virtualflow.protocol.settings import MAX_VIRTUAL_NODES
from virtualflow.protocol.wording import counted, format_bytes

# From what was measured at a few sizes to a profile for micro-batches of any size.

WAITING = 2
"""Sums that wait in memory where the others wait in files (``ReductionSettings.sums_on_device``),"""
MOVED_FROM = 16 << 20
"""if a sum has at least so many bytes (``offload_from``),"""
AHEAD = 64 << 20
"""and bytes of them that come back before they are needed (``fetch_ahead``)."""


def waiting_bytes(chain: ChainProfile, size: int, virtual_nodes: int) -> int:
    """What is in memory of the sums that wait while the last virtual node of all runs: the tree's largest whole parts.

    Args:
        size: bytes of what a worker has of one sum.
    """
    # The right half of an odd number is the larger one, so the last virtual node is as deep as any.
    depth = (virtual_nodes - 1).bit_length()
    moves = chain.scratch and chain.sum_bytes >= MOVED_FROM and depth > WAITING
    return size * WAITING + min(size * (depth - WAITING), AHEAD) if moves else size * depth


def profile_for(chain: ChainProfile, micro_batch: int, virtual_nodes: int = 1) -> Profile:
    """The profile for micro-batches of so many samples, in a job of so many virtual nodes.

    Everything lies on the line through the two measured sizes next to it. If only one size was measured, activations
    and times are in proportion to the samples; smaller micro-batches then look faster than they are.

    Raises:
        ConfigurationError: the sizes do not have the same blocks, or none is above the one before.
    """
    sizes = [size.micro_batch for size in chain.sizes]
    if sizes != sorted(set(sizes)):
        raise ConfigurationError("the sizes of a profile must grow; measure it anew")
    if len({len(size.blocks) for size in chain.sizes}) > 1:
        raise ConfigurationError("a profile must have the same blocks at every size; measure it anew")
    low = min(max(0, sum(size <= micro_batch for size in sizes) - 1), max(0, len(sizes) - 2))
    high = min(low + 1, len(sizes) - 1)
    blocks = [
        _on_line(chain.sizes[low], one, chain.sizes[high], two, micro_batch)
        for one, two in zip(chain.sizes[low].blocks, chain.sizes[high].blocks, strict=True)
    ]
    ends = chain.sizes[low], chain.sizes[high]
    other = _at(*ends, micro_batch, ends[0].other_bytes, ends[1].other_bytes)
    sums = waiting_bytes(chain, chain.sum_bytes, virtual_nodes)
    return Profile(
        tuple(blocks),
        chain.out_bytes_per_second,
        chain.in_bytes_per_second,
        chain.optimizer_bytes,
        chain.fixed_bytes + math.ceil(other) + sums,
        _skips(*ends, micro_batch),
    )


def _skips(low: ChainSize, high: ChainSize, micro_batch: int) -> tuple[Skip, ...]:
    """Those of both sizes; one that was seen at a single size leads nowhere at the other."""
    ends = [{(skip.first, skip.last): skip for skip in size.skips} for size in (low, high)]

    def at(key: tuple[int, int], read: Callable[[SkipProfile], int]) -> int:
        one, two = (read(known[key]) if key in known else 0 for known in ends)
        return math.ceil(_at(low, high, micro_batch, one, two))

    return tuple(
        Skip(*key, at(key, lambda skip: skip.skip_bytes), at(key, lambda skip: skip.gradient_bytes))
        for key in sorted(ends[0].keys() | ends[1].keys())
    )


def _on_line(low: ChainSize, one: BlockProfile, high: ChainSize, two: BlockProfile, micro_batch: int) -> Block:
    """One block for so many samples, from itself at two sizes; at the same size twice if only one was measured."""

    def at(read: Callable[[BlockProfile], float]) -> float:
        return _at(low, high, micro_batch, read(one), read(two))

    return Block(
        one.name,
        at(lambda block: block.forward_seconds),
        at(lambda block: block.backward_seconds),
        math.ceil(at(lambda block: block.saved_bytes)),
        math.ceil(at(lambda block: block.boundary_bytes)),
        parameter_bytes=one.parameter_bytes,
        gradient_bytes=one.gradient_bytes,
        workspace_bytes=math.ceil(at(lambda block: block.workspace_bytes)),
        backward_workspace_bytes=_backward_workspace(low, one, high, two, micro_batch),
        output_bytes=math.ceil(at(lambda block: block.output_bytes)),
        # It hardly depends on the samples.
        overhead_seconds=one.overhead_seconds if one is two else at(lambda block: block.overhead_seconds),
        joins=one.joins and two.joins,
    )


def _backward_workspace(
    low: ChainSize, one: BlockProfile, high: ChainSize, two: BlockProfile, micro_batch: int
) -> int | None:
    """That may be below 0, and is never less than a part of what was counted."""
    ends = one.backward_workspace_bytes, two.backward_workspace_bytes
    if ends[0] is None or ends[1] is None:
        return None
    growth = micro_batch / low.micro_batch
    least = math.ceil(min(ends[0], ends[1]) * min(1.0, growth))
    if low is high:
        return max(least, math.ceil(ends[0] * growth)) if ends[0] > 0 else least
    share = (micro_batch - low.micro_batch) / (high.micro_batch - low.micro_batch)
    return max(least, math.ceil(ends[0] + share * (ends[1] - ends[0])))


def _at(low: ChainSize, high: ChainSize, micro_batch: int, one: float, two: float) -> float:
    """What is ``one`` at the lower size and ``two`` at the higher, for so many samples."""
    growth = micro_batch / low.micro_batch
    if low is high:
        return one * growth
    share = (micro_batch - low.micro_batch) / (high.micro_batch - low.micro_batch)
    # Noise may let the line fall: nothing becomes less by more samples, nor by fewer than in proportion.
    return max(one + share * (two - one), one * min(1.0, growth))


@dataclass(frozen=True)
class Fit:
    """One number of virtual nodes on one device."""

    virtual_nodes: int
    micro_batch: int
    keep_bytes: int
    """What would be needed without a plan."""
    smallest_bytes: int
    """What would be needed at least."""
    plan: Plan | None
    """``None``: nothing fits."""
    reason: str

    @property
    def step_seconds(self) -> float | None:
        return None if self.plan is None else self.plan.seconds * self.virtual_nodes


def fit(
    chain: ChainProfile,
    batch: int,
    virtual_nodes: int,
    budget: Budget,
    settings: PlannerSettings,
    *,
    fused: int = 1,
) -> Fit:
    """What becomes of that many virtual nodes, which divide the batch."""
    micro_batch, left = divmod(batch, virtual_nodes)
    if left or not micro_batch:
        raise ConfigurationError(
            f"{counted(virtual_nodes, 'virtual node')} do not divide a batch of {batch}; name a divisor of it"
        )
    micro_batch *= fused
    planner = Planner(profile_for(chain, micro_batch, virtual_nodes), settings)
    try:
        plan = planner.plan(budget)
    except DoesNotFit as error:
        if error.smallest is None:
            raise
        return Fit(virtual_nodes, micro_batch, planner.keep_bytes(budget), error.smallest, None, str(error))
    return Fit(virtual_nodes, micro_batch, planner.keep_bytes(budget), planner.smallest(budget), plan, plan.reason)


def what_fits(
    chain: ChainProfile,
    batch: int,
    budget: Budget,
    settings: PlannerSettings,
    *,
    more: int,
    tell: Callable[[float], None] = lambda share: None,
) -> tuple[Fit, ...]:
    """Each number of virtual nodes from one that does not fit, if there is one, to the smallest that does and ``more``
    above it: their micro-batches are smaller, so that less must be swapped or computed again. But each doubling has one
    more sum of gradients at rest, so that in the end nothing fits again. ``tell`` hears which share of the numbers is
    done; there may be no need for all.

    Raises:
        DoesNotFit: not even micro-batches of one sample fit.
    """
    rows: list[Fit] = []
    smallest: list[int] = []
    numbers = [number for number in range(1, min(batch, MAX_VIRTUAL_NODES) + 1) if batch % number == 0]
    for place, virtual_nodes in enumerate(numbers):
        tell(place / len(numbers))
        row = fit(chain, batch, virtual_nodes, budget, settings)
        smallest.append(row.smallest_bytes)
        if row.plan is None:
            if any(each.plan is not None for each in rows):
                break
            rows = [row]
            continue
        rows.append(row)
        if sum(each.plan is not None for each in rows) > more or row.keep_bytes <= budget.device:
            break
    if rows[-1].plan is None:
        raise DoesNotFit(
            f"not even micro-batches of {rows[-1].micro_batch} fit into {format_bytes(budget.device)}: the smallest "
            f"budget that works is {format_bytes(min(smallest), up=True)}; use a larger device, or put the "
            "optimizer's state on the host",
            min(smallest),
        )
    return tuple(rows)

"""From what was measured at a few sizes to a profile for micro-batches of any size."""

from __future__ import annotations

import math
from collections.abc import Callable

from virtualflow.errors import ConfigurationError
from virtualflow.memory.model import Block, Profile, Skip
from virtualflow.protocol.chain_profile import BlockProfile, ChainProfile, ChainSize, SkipProfile


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
    # While the last virtual node of all runs, the sums of the tree's largest whole parts are there.
    sums = chain.sum_bytes * (virtual_nodes.bit_length() - 1)
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
        one.parameter_bytes,
        one.gradient_bytes,
        math.ceil(at(lambda block: block.workspace_bytes)),
        _backward_workspace(low, one, high, two, micro_batch),
        math.ceil(at(lambda block: block.output_bytes)),
        # It hardly depends on the samples.
        one.overhead_seconds if one is two else at(lambda block: block.overhead_seconds),
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

"""What fits where a model's parameters are divided over workers: how many of them it takes. Pure.

What is counted is in docs/explanation/memory.md; ``virtualflow.step.sharded_parameters`` does what is counted here.
What all that leaves of a worker's memory is the budget of a plan for activations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from virtualflow.errors import ConfigurationError, DoesNotFit
from virtualflow.memory.fitting import profile_for, waiting_bytes
from virtualflow.memory.model import Budget, Profile
from virtualflow.memory.planner import Planner
from virtualflow.memory.settings import PlannerSettings
from virtualflow.protocol.device_profile import ChainProfile
from virtualflow.protocol.settings import MAX_WORKERS
from virtualflow.protocol.wording import counted, format_bytes

GATHERED = 2
"""Blocks whose parameters are whole at a time: one in use, and the next one on its way;"""
AGAIN = 1
"""and one of a segment that is computed again."""
GRADIENTS = 3
"""Blocks whose gradients are whole at a time: one in its backward pass, two leaving (``_ON_THE_WAY``)."""
MESSAGES = 2
"""Blocks that messages hold at a time: one that is asked for or leaves, and parts of one for each member that asks."""


@dataclass(frozen=True)
class ShardedFit:
    """One number of workers; bytes of the one with the most, at most."""

    workers: int
    kept_bytes: int
    """Parameters and the optimizer's state at rest."""
    sums_bytes: int
    """Of the gradients of what it keeps first, while they wait for one another or for the step."""
    gathered_bytes: int
    """Parameters that are whole: those of two blocks, and those outside of all blocks, with the buffers."""
    gradient_bytes: int
    """Gradients of whole blocks, as they come and leave."""
    activation_bytes: int
    """All else that a micro-batch needs, if all activations stay."""
    message_bytes: int
    """What is received and sent, in the host's memory."""
    device_bytes: int
    """Together, with the messages where the device's memory is the host's,"""
    planned_bytes: int
    """and with the plan of activations that needs the least."""


def fit_sharded(
    chain: ChainProfile,
    batch: int,
    virtual_nodes: int,
    workers: int,
    copies: int,
    spared: int = 0,
) -> ShardedFit:
    """What each of so many workers needs.

    Args:
        copies: how many of them keep each share.
        spared: bytes of activations that a plan spares.

    Raises:
        ConfigurationError: the virtual nodes do not divide the batch, or there are more workers than virtual nodes.
    """
    micro_batch = _micro_batch(batch, virtual_nodes)
    if workers > virtual_nodes:
        raise ConfigurationError(
            f"{counted(workers, 'worker')} cannot share {counted(virtual_nodes, 'virtual node')}, as each is assigned "
            "at least one; ask for fewer workers or more virtual nodes"
        )
    activations = Planner(bare_profile(chain, micro_batch)).keep_bytes(Budget(1))
    if workers == 1:
        profile = profile_for(chain, micro_batch, virtual_nodes)
        whole = Planner(profile).keep_bytes(Budget(1))
        kept = sum(block.parameter_bytes for block in profile.blocks) + chain.fixed_bytes + chain.optimizer_bytes
        sums = profile.fixed_bytes - profile_for(chain, micro_batch).fixed_bytes
        rest = whole - kept - sums - activations
        return ShardedFit(1, kept, sums, 0, rest, activations, 0, whole, whole - spared)
    beside = _beside_activations(chain, virtual_nodes, workers, copies)
    device = beside.on_device + activations
    return ShardedFit(
        workers,
        beside.kept,
        beside.sums,
        beside.gathered,
        beside.gradients,
        activations,
        beside.messages,
        device,
        device - max(0, spared - beside.again),
    )


@dataclass(frozen=True)
class _Beside:
    """What a worker has beside activations, in bytes; see :class:`ShardedFit`."""

    kept: int
    sums: int
    gathered: int
    gradients: int
    messages: int
    on_device: int
    """Together,"""
    again: int
    """and what a plan may have beside it."""


def _beside_activations(chain: ChainProfile, virtual_nodes: int, workers: int, copies: int) -> _Beside:
    blocks = [block.parameter_bytes for block in chain.sizes[0].blocks]
    gradients = [block.gradient_bytes for block in chain.sizes[0].blocks]
    come = chain.sum_bytes if chain.gradient_bytes is None else chain.gradient_bytes
    widened = chain.sum_bytes / come if come else 1.0
    outside_gradients = max(0, come - sum(gradients))
    # Buffers count as parameters outside of blocks: they are few, and a profile does not tell them apart.
    outside = max(0, chain.fixed_bytes - outside_gradients)
    copies = min(copies, workers)
    parameters, trained = sum(blocks) + outside, sum(gradients) + outside_gradients
    kept = math.ceil((parameters + chain.optimizer_bytes) * copies / workers)
    # While the last sums come, one of each level of the tree waits; in the step there are the whole sum of what is kept
    # first, that of the predecessor's share, and both as the optimizer takes them.
    share = math.ceil(widened * trained / workers)
    waiting = share + waiting_bytes(chain, share, virtual_nodes)
    sums = max(waiting, 2 * copies * share)
    gathered = outside + _largest(blocks, GATHERED)
    again = outside + _largest(blocks, GATHERED + AGAIN) - gathered
    leaving = _largest([*gradients, outside_gradients], GRADIENTS)
    messages = MESSAGES * max(*blocks, *(math.ceil(widened * size) for size in (*gradients, outside_gradients)))
    together = kept + sums + gathered + leaving + (messages if chain.host_bytes == 0 else 0)
    return _Beside(kept, sums, gathered, leaving, messages, together, again)


def bare_profile(chain: ChainProfile, micro_batch: int) -> Profile:
    """Of activations alone: beside what blocks save there are only samples."""
    profile = profile_for(chain, micro_batch)
    bare = tuple(replace(block, parameter_bytes=0, gradient_bytes=0) for block in profile.blocks)
    return replace(profile, blocks=bare, optimizer_bytes=0, fixed_bytes=profile.fixed_bytes - chain.fixed_bytes)


def divided_profile(chain: ChainProfile, micro_batch: int, virtual_nodes: int, workers: int, copies: int) -> Profile:
    """Of one of several workers: what it has beside activations is its fixed part."""
    bare = bare_profile(chain, micro_batch)
    beside = _beside_activations(chain, virtual_nodes, workers, copies)
    return replace(bare, fixed_bytes=bare.fixed_bytes + beside.on_device + beside.again)


def _micro_batch(batch: int, virtual_nodes: int) -> int:
    micro_batch, left = divmod(batch, virtual_nodes)
    if left or not micro_batch:
        raise ConfigurationError(
            f"{counted(virtual_nodes, 'virtual node')} do not divide a batch of {batch}; name a divisor of it"
        )
    return micro_batch


def _largest(sizes: list[int], count: int) -> int:
    return sum(sorted(sizes)[-count:])


def what_fits_sharded(
    chain: ChainProfile,
    batch: int,
    virtual_nodes: int,
    budget: Budget,
    copies: int,
    *,
    more: int,
    settings: PlannerSettings | None = None,
) -> tuple[ShardedFit, ...]:
    """A worker alone, the most that do not fit, the fewest that do with a plan of activations, up to ``more`` above
    them, and the fewest that do without a plan.

    Args:
        budget: of each worker.

    Raises:
        DoesNotFit: not even one worker a virtual node is enough.
    """
    micro_batch, most = _micro_batch(batch, virtual_nodes), min(virtual_nodes, MAX_WORKERS)
    alone = Planner(profile_for(chain, micro_batch, virtual_nodes), settings)
    several = Planner(bare_profile(chain, micro_batch), settings)
    # A plan spares as much whatever there is beside activations.
    spared = [planner.keep_bytes(budget) - planner.smallest(budget) for planner in (alone, several)]
    rows = [
        fit_sharded(chain, batch, virtual_nodes, workers, copies, spared=spared[workers > 1])
        for workers in range(1, most + 1)
    ]
    first = next((number for number, row in enumerate(rows) if row.planned_bytes <= budget.device), None)
    if first is None:
        least = min(row.planned_bytes for row in rows)
        raise DoesNotFit(
            f"not even {counted(rows[-1].workers, 'worker')} of {format_bytes(budget.device)} are enough: each would "
            f"need {format_bytes(least, up=True)}; use more virtual nodes, which allow more workers and make "
            "micro-batches smaller, or larger devices",
            least,
        )
    keeps = next((number for number, row in enumerate(rows) if row.device_bytes <= budget.device), first)
    end = first + 1 + more
    beyond = rows[keeps : keeps + 1] if keeps >= end else []
    return (*(rows[:1] if first > 1 else []), *rows[max(0, first - 1) : end], *beyond)

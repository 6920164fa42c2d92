"""Entering a generation: who has the newest state, and who lacks it.

All members tell where they stand in one small all-gather; :func:`plan_transfer` (pure) makes of it the same decision
on each of them (``transfer`` carries it out). The highest completed exchange wins, and whoever is behind copies it.
When nobody has a state, all tell what they could begin from: the newest checkpoint that a member can read; without
any, the freshly built models, which must be equal.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from virtualflow.errors import ConfigurationError, Evicted
from virtualflow.protocol.lineage import Claim
from virtualflow.protocol.messages import Generation
from virtualflow.state.checkpoint_order import NO_CHECKPOINT, Mark

_STANDING = struct.Struct("<10q")
_ORIGIN = struct.Struct("<4q")

SPOILED = -1
"""The ``Origin.model`` of a process whose fresh model is lost: a state that it was given did not arrive as a whole."""


@dataclass(frozen=True)
class Standing:
    """Where a member stands when it enters a generation."""

    has_state: bool
    exchanges: int
    """Exchanges that it has completed; at most one behind any other member that has a state."""
    step: int
    signature: int
    """Hash of names, shapes and types of the model and the optimizer."""
    claim: Claim
    """What it knows of the generations before."""
    exchange: int = 0
    """The number of the exchange that it wants (``Exchange.to_number``)."""

    def to_bytes(self) -> Tensor:
        """As uint8 ``[80]``."""
        claim = self.claim
        numbers = (
            *(self.has_state, self.exchanges, self.step, self.signature, claim.supported),
            *(claim.counted.incarnation, claim.counted.counter),
            *(claim.unsupported.incarnation, claim.unsupported.counter),
            self.exchange,
        )
        return torch.frombuffer(bytearray(_STANDING.pack(*numbers)), dtype=torch.uint8)

    @classmethod
    def from_bytes(cls, block: Tensor) -> Standing:
        numbers = _STANDING.unpack(block.numpy().tobytes())
        has_state, exchanges, step, signature, supported = numbers[:5]
        claim = Claim(Generation(*numbers[5:7]), bool(supported), Generation(*numbers[7:9]))
        return cls(bool(has_state), exchanges, step, signature, claim, numbers[9])


@dataclass(frozen=True)
class Origin:
    """What a member could begin from; only asked when nobody has a state, since it takes time to find out."""

    checkpoint: Mark
    """The checkpoint that it could restore, by its manifest."""
    model: int
    """Hash of the freshly built model, or ``SPOILED``."""

    def to_bytes(self) -> Tensor:
        """As uint8 ``[32]``."""
        fence, step = self.checkpoint
        numbers = fence.incarnation, fence.counter, step, self.model
        return torch.frombuffer(bytearray(_ORIGIN.pack(*numbers)), dtype=torch.uint8)

    @classmethod
    def from_bytes(cls, block: Tensor) -> Origin:
        incarnation, counter, step, model = _ORIGIN.unpack(block.numpy().tobytes())
        return cls(Mark(Generation(incarnation, counter), step), model)


@dataclass(frozen=True)
class Transfer:
    """How the members come to one state."""

    restorer: int | None
    """The rank that restores the checkpoint first, if that is where the state comes from."""
    donors: tuple[int, ...]
    """Ranks of those who have the state that counts."""
    receivers: tuple[int, ...]
    """Ranks of those who get it."""


def someone_has_state(standings: Sequence[Standing]) -> bool:
    """Whether the state comes from a member, so that nobody need look for another origin."""
    return any(standing.has_state for standing in standings)


def plan_transfer(standings: Sequence[Standing], origins: Sequence[Origin], equal_start: bool = True) -> Transfer:
    """Decide who gives the state to whom.

    Args:
        standings: of all members, in the order of their ranks.
        equal_start: freshly built models must be equal; otherwise the first member's counts. On different types of
            device, the same seed need not give the same weights.

    Raises:
        ConfigurationError: nobody has a state or checkpoint, and the models differ.
        Evicted: nobody has a state, a checkpoint, or a fresh model.
    """
    everyone = range(len(standings))
    restorer = None
    holders = [rank for rank in everyone if standings[rank].has_state]
    if holders:
        newest = max(standings[rank].exchanges for rank in holders)
        donors = [rank for rank in holders if standings[rank].exchanges == newest]
    else:
        newest_checkpoint = max(origin.checkpoint for origin in origins)
        if newest_checkpoint != NO_CHECKPOINT:
            restorer = next(rank for rank in everyone if origins[rank].checkpoint == newest_checkpoint)
            donors = [restorer]
        else:
            donors = [rank for rank in everyone if origins[rank].model != SPOILED]
            if not donors:
                raise Evicted("all that had the state are lost, and there is no checkpoint: the job begins anew")
            if len({origins[rank].model for rank in donors}) > 1:
                if equal_start:
                    raise ConfigurationError(
                        "the model's parameters differ between workers at the start; seed before building it, for "
                        "example with torch.manual_seed(0)"
                    )
                donors = donors[:1]
    return Transfer(restorer, tuple(donors), tuple(rank for rank in everyone if rank not in donors))

"""Entering a generation: who has the newest state, who lacks it, and how it gets there.

All members tell where they stand in one small all-gather; :func:`plan_transfer` (pure) makes of it the same decision
on each of them. The highest completed exchange wins, whoever is behind copies a donor, and receivers of one round are
donors in the next. When nobody has a state, the newest checkpoint that a member can read is one; without any, the
freshly built models must be equal.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from virtualflow.collectives import Collectives
from virtualflow.errors import ConfigurationError

_STANDING = struct.Struct("<6q")


@dataclass(frozen=True)
class Standing:
    """Where a member stands when it enters a generation."""

    has_state: bool
    exchanges: int
    """Exchanges that it has completed; at most one behind any other member that has a state."""
    step: int
    checkpoint: int
    """The step of the newest checkpoint that it can read, -1 for none; only asked of members without a state."""
    model: int
    """Hash of the freshly built model."""
    signature: int
    """Hash of names, shapes and types of the model and the optimizer."""

    def to_bytes(self) -> Tensor:
        """As uint8 ``[48]``."""
        raw = _STANDING.pack(self.has_state, self.exchanges, self.step, self.checkpoint, self.model, self.signature)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    @classmethod
    def from_bytes(cls, block: Tensor) -> Standing:
        """The inverse of :meth:`to_bytes`."""
        has_state, *rest = _STANDING.unpack(block.numpy().tobytes())
        return cls(bool(has_state), *rest)


@dataclass(frozen=True)
class Transfer:
    """How the members come to one state."""

    restorer: int | None
    """The rank that restores the checkpoint first, if that is where the state comes from."""
    rounds: tuple[tuple[tuple[int, int], ...], ...]
    """In each round, pairs (donor, receiver) of ranks that are all different."""

    @property
    def receivers(self) -> frozenset[int]:
        """Who gets a state."""
        return frozenset(receiver for pairs in self.rounds for _, receiver in pairs)

    @property
    def givers(self) -> frozenset[int]:
        """Who gives a state that it had before."""
        return frozenset(donor for pairs in self.rounds for donor, _ in pairs) - self.receivers


def plan_transfer(standings: Sequence[Standing], equal_start: bool = True) -> Transfer:
    """Decide who gives the state to whom.

    Args:
        standings: of all members, in the order of their ranks.
        equal_start: freshly built models must be equal; otherwise the first member's counts. On different types of
            device, the same seed need not give the same weights.

    Raises:
        ConfigurationError: nobody has a state or checkpoint, and the models differ.
    """
    everyone = range(len(standings))
    restorer = None
    holders = [rank for rank in everyone if standings[rank].has_state]
    if holders:
        newest = max(standings[rank].exchanges for rank in holders)
        donors = [rank for rank in holders if standings[rank].exchanges == newest]
    else:
        newest_checkpoint = max(standing.checkpoint for standing in standings)
        if newest_checkpoint < 0:
            if len({standing.model for standing in standings}) == 1:
                return Transfer(None, ())
            if equal_start:
                raise ConfigurationError(
                    "the model's parameters differ between workers at the start; seed before building it, for example "
                    "with torch.manual_seed(0)"
                )
            donors = [0]
        else:
            restorer = next(rank for rank in everyone if standings[rank].checkpoint == newest_checkpoint)
            donors = [restorer]
    receivers = [rank for rank in everyone if rank not in donors]
    rounds = []
    while receivers:
        pairs = tuple(zip(donors, receivers, strict=False))
        rounds.append(pairs)
        donors = donors + receivers[: len(pairs)]
        receivers = receivers[len(pairs) :]
    return Transfer(restorer, tuple(rounds))


def move(communicator: Collectives, transfer: Transfer, packed: Tensor | None) -> Tensor | None:
    """Carry out the rounds of a transfer.

    Args:
        communicator: of the generation.
        transfer: the same on every member.
        packed: this member's state as uint8 ``[n]`` if it is a donor of the first round.

    Returns:
        The state that this member has received, ``None`` if it needed none.
    """
    length = torch.tensor([0 if packed is None else packed.numel()], dtype=torch.int64).view(torch.uint8)
    sizes: list[int] = communicator.all_gather(length).contiguous().view(-1).view(torch.int64).tolist()
    received = None
    for pairs in transfer.rounds:
        out_sizes: list[int] = [0] * communicator.size
        in_sizes: list[int] = [0] * communicator.size
        for donor, receiver in pairs:
            sizes[receiver] = sizes[donor]
            if donor == communicator.rank:
                in_sizes[receiver] = sizes[donor]
            if receiver == communicator.rank:
                out_sizes[donor] = sizes[donor]
        out = torch.empty(max(out_sizes), dtype=torch.uint8)
        block = packed if packed is not None and any(in_sizes) else torch.empty(0, dtype=torch.uint8)
        communicator.start_all_to_all(out, block, out_sizes, in_sizes).wait()
        if any(out_sizes):
            received = packed = out
    return received

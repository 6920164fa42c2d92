"""A state on its way from its donors to those who lack it, without a copy of the whole anywhere.

The first donor sends a block (what the state is made of, and all that is small), then every donor its share of the
large tensors' bytes, from its own tensors into the receiver's (``striping`` is who sends what).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from virtualflow.state import codec
from virtualflow.state.settings import TransferSettings
from virtualflow.state.striping import (
    Path,
    Piece,
    Round,
    announce,
    describe,
    join,
    layout_hash,
    plan_rounds,
    share_out,
    size_of,
    split,
)
from virtualflow.transport import Message

_NOTICE = struct.Struct("<2q")
"""Of a donor: hash of its layout, bytes of its block; zeros of others."""


class Moving(Protocol):
    """What a transfer needs of a communicator."""

    rank: int
    size: int

    def all_gather(self, block: Tensor) -> Tensor:
        """Gather equal blocks of bytes."""

    def move(self, windows: Iterator[Sequence[Message]], *, timeout: float) -> None:
        """Send and receive stretches of memory."""


Land = Callable[[dict[str, Any], dict[Path, Tensor]], dict[Path, Tensor]]
"""Given a state (large tensors without content) and those tensors, where their bytes are to go: dense tensors.

It raises ConfigurationError if the state does not fit, before anything has changed.
"""


@dataclass(frozen=True)
class PackedState:
    """A state as it travels."""

    block: Tensor
    """uint8 ``[n]`` on the CPU: the packed tree, but for what is striped."""
    stripes: list[Tensor]
    """The large tensors, dense, on any device."""
    layout: int

    @property
    def size(self) -> int:
        """Bytes of the whole."""
        return self.block.numel() + sum(size_of(tensor) for tensor in self.stripes)


@dataclass(frozen=True)
class Moved:
    """What a transfer brought, as one member saw it."""

    bytes: int
    """Of one state."""
    seconds: float
    donors: int
    tree: dict[str, Any] | None
    """The state, if this member has received it; its large tensors are those that ``Land`` gave."""


def pack_state(tree: dict[str, Any], settings: TransferSettings) -> PackedState:
    """Make a captured state ready to be sent; its large tensors are referred to and must not change meanwhile."""
    thin, stripes = split(tree, settings.stripe)
    described = describe(stripes)
    return PackedState(codec.pack({"tree": thin, "stripes": described}), list(stripes.values()), layout_hash(described))


def move_state(
    communicator: Moving,
    donors: Sequence[int],
    receivers: Sequence[int],
    *,
    packed: PackedState | None,
    land: Land,
    settings: TransferSettings,
) -> Moved:
    """Bring the state of the donors to the receivers; all members take part.

    Args:
        communicator: of the generation.
        donors: ranks of those who have it, the first of them sends what is not striped.
        receivers: ranks of those who get it.
        packed: this member's, if it is a donor.
        land: where a receiver wants it.
        settings: in what pieces it travels; the same for all.

    Raises:
        CommunicatorBroken: a member was lost meanwhile; nothing is written into this member's tensors any more.
    """
    began, timeout = time.monotonic(), settings.message_timeout
    notice = bytearray(_NOTICE.pack(*((0, 0) if packed is None else (packed.layout, packed.block.numel()))))
    notices = communicator.all_gather(torch.frombuffer(notice, dtype=torch.uint8))
    told = [_NOTICE.unpack(row.numpy().tobytes()) for row in notices]
    layout, length = told[donors[0]]
    givers = [rank for rank in donors if told[rank][0] == layout]
    if packed is not None:
        _await_kernels(packed.stripes)
    tree = None
    for turn in plan_rounds(givers, receivers):
        rank = communicator.rank
        if rank in turn.receivers:
            block = torch.empty(length, dtype=torch.uint8)
            communicator.move(iter([[Message(turn.donors[0], block, incoming=True)]]), timeout=timeout)
            content = codec.unpack(block)
            # A copy, so that no small tensor keeps the block in memory.
            tree, announced = codec.snapshot(content["tree"]), announce(content["stripes"])
            join(tree, announced)
            stripes = land(tree, announced)
            _await_kernels(stripes.values())
            communicator.move(_arrive(turn, list(stripes.values()), settings), timeout=timeout)
            join(tree, stripes)
            packed = PackedState(block, list(stripes.values()), layout)
        elif rank in turn.donors:
            assert packed is not None
            if rank == turn.donors[0]:
                first = [Message(peer, packed.block, incoming=False) for peer in turn.receivers]
                communicator.move(iter([first]), timeout=timeout)
            communicator.move(_depart(turn, rank, packed.stripes, settings), timeout=timeout)
    size = 0 if packed is None else packed.size
    return Moved(size, time.monotonic() - began, len(givers), tree)


def _await_kernels(tensors: Iterable[Tensor]) -> None:
    """What this thread has launched on them must be over: the communicator's, which copies them, has another stream."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _shares(turn: Round, stripes: list[Tensor], settings: TransferSettings) -> list[list[Piece]]:
    return share_out([size_of(tensor) for tensor in stripes], len(turn.donors), settings.piece)


def _depart(turn: Round, rank: int, stripes: list[Tensor], settings: TransferSettings) -> Iterator[Sequence[Message]]:
    """A donor's windows. Tensors of the host all go at once; those of an accelerator through a few pieces of host
    memory.
    """
    pieces = _shares(turn, stripes, settings)[turn.donors.index(rank)]
    for window in _windows(pieces, stripes, settings):
        messages = []
        for piece in window:
            stretch = _bytes(stripes[piece.index])[piece.begin : piece.end].cpu()
            messages += [Message(peer, stretch, incoming=False) for peer in turn.receivers]
        yield messages


def _arrive(turn: Round, stripes: list[Tensor], settings: TransferSettings) -> Iterator[Sequence[Message]]:
    """A receiver's windows: pieces of all donors in turn, so that every donor has something to send."""
    shares = _shares(turn, stripes, settings)
    longest = max(map(len, shares), default=0)
    ordered = [
        (donor, share[place])
        for place in range(longest)
        for donor, share in zip(turn.donors, shares, strict=True)
        if place < len(share)
    ]
    donor_of = {piece: donor for donor, piece in ordered}
    for window in _windows([piece for _, piece in ordered], stripes, settings):
        landed = []
        for piece in window:
            target = _bytes(stripes[piece.index])[piece.begin : piece.end]
            staged = target if target.device.type == "cpu" else torch.empty(target.shape, dtype=torch.uint8)
            landed.append((piece, target, staged))
        yield [Message(donor_of[piece], staged, incoming=True) for piece, _, staged in landed]
        for _, target, staged in landed:
            if staged is not target:
                target.copy_(staged)


def _windows(pieces: list[Piece], stripes: list[Tensor], settings: TransferSettings) -> Iterator[list[Piece]]:
    at_once = len(pieces) if all(tensor.device.type == "cpu" for tensor in stripes) else settings.staged
    for first in range(0, len(pieces), max(1, at_once)):
        yield pieces[first : first + at_once]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)

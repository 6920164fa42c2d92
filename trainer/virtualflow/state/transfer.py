"""A state on its way from its donors to those who lack it, without a copy of the whole anywhere.

The first donor sends a block (what the state is made of, and all that is small), then every donor its share of the
large tensors' bytes, from its own tensors into the receiver's (``striping`` is who sends what).
"""

from __future__ import annotations

import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_KEY
from virtualflow.state import codec
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
from virtualflow.transport import Link, Message

_NOTICE = struct.Struct("<2q")
"""Of a donor: hash of its layout, bytes of its block; zeros of others."""


STRIPE = 1 << 16
"""A tensor of a state with at least so many bytes travels by itself, striped over all donors; smaller ones go in
one block, since each message has a cost of its own."""
PIECE = 32 << 20
"""The most bytes of a state in one message."""
MESSAGE_TIMEOUT = 120.0
"""The last resort for one such message, counted from the one before it."""
STAGED = 4
"""Pieces of a state that pass through host memory at a time where its tensors are on an accelerator."""
RESERVE_WAIT = 2.5
"""How long a joiner holds its next generation back to make memory for the state that will come. Well below
``CommunicatorSettings.connect_timeout``: the others are waiting for its connections, though training."""


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


def pack_state(tree: dict[str, Any]) -> PackedState:
    """Make a captured state ready to be sent; its large tensors are referred to and must not change meanwhile."""
    thin, stripes = split(tree, STRIPE)
    described = describe(stripes)
    return PackedState(codec.pack({"tree": thin, "stripes": described}), list(stripes.values()), layout_hash(described))


def move_state(
    communicator: Moving,
    donors: Sequence[int],
    receivers: Sequence[int],
    *,
    packed: PackedState | None,
    land: Land,
) -> Moved:
    """Bring the state of the donors to the receivers; all members take part.

    Args:
        donors: ranks of those who have it, the first of them sends what is not striped.

    Raises:
        CommunicatorBroken: a member was lost meanwhile; nothing is written into this member's tensors any more.
    """
    began, timeout = time.monotonic(), MESSAGE_TIMEOUT
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
            communicator.move(_arrive(turn, list(stripes.values())), timeout=timeout)
            join(tree, stripes)
            packed = PackedState(block, list(stripes.values()), layout)
        elif rank in turn.donors:
            assert packed is not None
            if rank == turn.donors[0]:
                first = [Message(peer, packed.block, incoming=False) for peer in turn.receivers]
                communicator.move(iter([first]), timeout=timeout)
            communicator.move(_depart(turn, rank, packed.stripes), timeout=timeout)
    size = 0 if packed is None else packed.size
    return Moved(size, time.monotonic() - began, len(givers), tree)


def _await_kernels(tensors: Iterable[Tensor]) -> None:
    """What this thread has launched on them must be over: the communicator's, which copies them, has another stream."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _shares(turn: Round, stripes: list[Tensor]) -> list[list[Piece]]:
    return share_out([size_of(tensor) for tensor in stripes], len(turn.donors), PIECE)


def _depart(turn: Round, rank: int, stripes: list[Tensor]) -> Iterator[Sequence[Message]]:
    """A donor's windows. Tensors of the host all go at once; those of an accelerator through a few pieces of host
    memory.
    """
    pieces = _shares(turn, stripes)[turn.donors.index(rank)]
    for window in _windows(pieces, stripes):
        messages = []
        for piece in window:
            stretch = _bytes(stripes[piece.index])[piece.begin : piece.end].cpu()
            messages += [Message(peer, stretch, incoming=False) for peer in turn.receivers]
        yield messages


def _arrive(turn: Round, stripes: list[Tensor]) -> Iterator[Sequence[Message]]:
    """A receiver's windows: pieces of all donors in turn, so that every donor has something to send."""
    shares = _shares(turn, stripes)
    longest = max(map(len, shares), default=0)
    ordered = [
        (donor, share[place])
        for place in range(longest)
        for donor, share in zip(turn.donors, shares, strict=True)
        if place < len(share)
    ]
    donor_of = {piece: donor for donor, piece in ordered}
    for window in _windows([piece for _, piece in ordered], stripes):
        landed = []
        for piece in window:
            target = _bytes(stripes[piece.index])[piece.begin : piece.end]
            staged = target if target.device.type == "cpu" else torch.empty(target.shape, dtype=torch.uint8)
            landed.append((piece, target, staged))
        yield [Message(donor_of[piece], staged, incoming=True) for piece, _, staged in landed]
        for _, target, staged in landed:
            if staged is not target:
                target.copy_(staged)


def _windows(pieces: list[Piece], stripes: list[Tensor]) -> Iterator[list[Piece]]:
    at_once = len(pieces) if all(tensor.device.type == "cpu" for tensor in stripes) else STAGED
    for first in range(0, len(pieces), max(1, at_once)):
        yield pieces[first : first + at_once]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


# Memory for a state that will arrive, made before anybody waits for it.
#
# Receiving into fresh memory takes longer than sending: the kernel makes a page at each first touch. So a member that
# has the state tells joiners through the generation's rendezvous how large its tensors are, and a joiner makes and
# touches that memory before it connects, while the others still train.

_ROOM = "room"
"""The key of a generation's rendezvous: pairs of a size in bytes and how many tensors have it."""


def elder(plan: m.Plan) -> m.Member | None:
    """The member of a planned generation that tells its joiners how much will come; ``None``: nobody need."""
    if plan.mode != "planned" or not plan.joiners:
        return None
    return next((member for member in plan.members if member.worker not in plan.joiners), None)


def tell_room(link: Link, plan: m.Plan, sizes: Sequence[int]) -> None:
    """Tell the joiners of ``plan`` the sizes in bytes of the tensors that they will have to make memory for."""
    value = msgspec.json.encode(sorted(Counter(sizes).items()))
    link.publish(plan.generation, _ROOM, value if len(value) <= MAX_KEY else b"[]")


def make_room(link: Link, plan: m.Plan, reserve: Reserve, superseded: Callable[[], bool], seconds: float) -> None:
    """Make the memory that the elder of ``plan`` tells of; returns after ``seconds`` even if it takes longer."""
    limit = time.monotonic() + seconds
    link.wait(lambda: superseded() or link.lookup(plan.generation, _ROOM) is not None, seconds)
    counted = msgspec.json.decode(link.lookup(plan.generation, _ROOM) or b"[]", type=list[tuple[int, int]])
    sizes = [size for size, count in counted for _ in range(count)]
    filling = threading.Thread(target=reserve.fill, args=(sizes,), name="virtualflow-reserve", daemon=True)
    filling.start()
    filling.join(max(0.0, limit - time.monotonic()))


class Reserve:
    """Memory on the host for tensors that will arrive, its pages touched while the others still train."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[int, list[Tensor]] = {}
        self._filled = self._over = False

    def fill(self, sizes: Sequence[int]) -> None:
        """Make memory of these sizes in bytes, the first time that there are any; in a thread of its own."""
        with self._lock:
            if self._filled or not sizes:
                return
            self._filled = True
        for size in sizes:
            memory = torch.empty(size, dtype=torch.uint8).fill_(0)
            with self._lock:
                if self._over:
                    return
                self._ready.setdefault(size, []).append(memory)

    @property
    def held(self) -> int:
        """Bytes that are ready."""
        with self._lock:
            return sum(size * len(ready) for size, ready in self._ready.items())

    def take(self, like: Tensor) -> Tensor:
        """A dense tensor on the host of this shape and dtype, with any content."""
        with self._lock:
            ready = self._ready.get(size_of(like))
            memory = ready.pop() if ready else None
        if memory is None:
            return torch.empty(like.shape, dtype=like.dtype)
        return memory.view(like.dtype).view(like.shape)

    def release(self) -> None:
        """Give back what was not needed; nothing will be."""
        with self._lock:
            self._over = True
            self._ready.clear()

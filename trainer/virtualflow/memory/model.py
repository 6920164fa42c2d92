"""What the planner knows and what it says, as values: a model as a chain of blocks, a budget, a plan and its timeline.

A *block* is a part of the model whose input is the output of the block before it; the *boundary* of a block is that
input. The performance model is KARMA's (Wahib et al., SC 2020, arXiv 2008.11421): one device computes,
one engine copies to the host, and one copies back, and the three work at the same time.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Literal

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.settings import Placement

Resource = Literal["compute", "copy-out", "copy-in"]
Kind = Literal["forward", "recompute", "backward", "swap-out", "swap-in"]


class Action(Enum):
    """What becomes of that which autograd saves in a block, between its forward and its backward pass."""

    KEEP = "keep"
    """It stays on the device."""
    SWAP = "swap"
    """It is copied to the host's memory, and back in time; so is the block's boundary."""
    RECOMPUTE = "recompute"
    """It is dropped, and computed again from the boundary of the block's segment."""


@dataclass(frozen=True)
class Block:
    """One block of a model, for micro-batches of one size. Bytes are those of the device."""

    name: str
    forward_seconds: float
    backward_seconds: float
    saved_bytes: int
    """What autograd saves in its forward pass, without its boundary and without parameters."""
    boundary_bytes: int
    """Its input. The backward pass produces a gradient of the same size for the block before it."""
    _: KW_ONLY
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    """Allocated by its backward pass; they stay until the virtual node is done."""
    workspace_bytes: int = 0
    """The most that a forward pass over it needs for a moment, beyond all that is named here,"""
    backward_workspace_bytes: int | None = None
    """and a backward pass: below 0 if what was saved goes before all gradients are there; ``None``: as many."""
    output_bytes: int = 0
    """What autograd saves of its output. That is the next block's input, but where the block is computed again."""
    overhead_seconds: float = 0.0
    """What it takes to compute it again beyond its forward pass: to note what that finds, and to put it back."""
    joins: bool = True
    """Whether the block before hands over to it directly: if not, its boundary cannot be computed again from there."""

    def __post_init__(self) -> None:
        if not (0 < self.forward_seconds < float("inf") and 0 < self.backward_seconds < float("inf")):
            raise ConfigurationError(f"block {self.name}: its seconds must be above 0; measure the profile anew")
        if not 0 <= self.overhead_seconds < float("inf"):
            raise ConfigurationError(f"block {self.name}: its overhead must be at least 0; measure the profile anew")
        sizes = (self.saved_bytes, self.boundary_bytes, self.parameter_bytes, self.gradient_bytes)
        if min(*sizes, self.workspace_bytes, self.output_bytes) < 0:
            raise ConfigurationError(f"block {self.name}: no size may be below 0; measure the profile anew")


@dataclass(frozen=True)
class Skip:
    """What enters a block, and a later one once more: as long as the later one has not run, the device has it."""

    first: int
    """The block of whose boundary it is a part,"""
    last: int
    """and the later one."""
    skip_bytes: int
    gradient_bytes: int
    """What holds its gradient, from the later block's backward pass to the first one's."""

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last or min(self.skip_bytes, self.gradient_bytes) < 0:
            raise ConfigurationError("a skip must lead from a block to a later one; measure the profile anew")


@dataclass(frozen=True)
class Profile:
    """A model on one type of device, for micro-batches of one size.

    Raises:
        ConfigurationError: it has no block, or a bandwidth that is not above 0.
    """

    blocks: tuple[Block, ...]
    """In the order of the forward pass."""
    out_bytes_per_second: float
    """Copies from the device to the host,"""
    in_bytes_per_second: float
    """and back."""
    optimizer_bytes: int = 0
    fixed_bytes: int = 0
    """What else is on the device all the time: sums of gradients at rest, what libraries take for themselves."""
    skips: tuple[Skip, ...] = ()

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ConfigurationError("a profile needs at least one block; measure it anew")
        if any(skip.last >= len(self.blocks) for skip in self.skips):
            raise ConfigurationError("a skip must lead to one of the blocks; measure the profile anew")
        if not (self.out_bytes_per_second > 0 and self.in_bytes_per_second > 0):
            raise ConfigurationError("a profile's copy bandwidths must be above 0; measure it anew")
        if min(self.optimizer_bytes, self.fixed_bytes) < 0:
            raise ConfigurationError("no size of a profile may be below 0; measure it anew")

    def resident_bytes(self, optimizer: Placement) -> int:
        """What is on the device whatever the plan: parameters, the fixed part, and the optimizer's state if it is."""
        state = self.optimizer_bytes if optimizer == "device" else 0
        return sum(block.parameter_bytes for block in self.blocks) + self.fixed_bytes + state


@dataclass(frozen=True)
class Budget:
    """The memory that may be used, in bytes."""

    device: int
    host: int | None = None
    """For what is swapped, and for the optimizer's state where it is on the host. ``None``: as much as is needed."""
    optimizer: Placement = "device"

    def __post_init__(self) -> None:
        if self.device <= 0 or (self.host is not None and self.host < 0):
            raise ConfigurationError("a budget must be above 0 on the device, and at least 0 on the host")


@dataclass(frozen=True)
class Point:
    """A moment in the order of what the device computes: just before it is done."""

    kind: Kind
    block: int


@dataclass(frozen=True)
class BlockPlan:
    """What becomes of one block."""

    action: Action
    segment: int | None = None
    """If it is recomputed: the first block of its segment. The segment's blocks are recomputed one after the other from
    the boundary of that one, right before the backward pass of the last of them; their other boundaries are dropped."""
    prefetch: Point | None = None
    """If something of it is swapped: the copy back is issued when the device reaches this point, behind those issued
    before, and begins when the last copy out is over. Of a block that is swapped it brings what autograd saved and the
    boundary; of one that is recomputed, where it is not ``None``, the boundary that its segment begins with."""


@dataclass(frozen=True)
class Wait:
    """What the device must wait for."""

    point: Point
    """Before it does that,"""
    leaving: int
    """no more than so many bytes may still be on their way to the host: it needs the memory of the others."""


@dataclass(frozen=True)
class Span:
    """A time in which a resource is busy with a block; seconds from the beginning of the virtual node."""

    resource: Resource
    kind: Kind
    block: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One virtual node, forward and backward."""

    spans: tuple[Span, ...]
    """In the order of their starts for each resource."""
    memory: tuple[tuple[float, int], ...]
    """Bytes in use on the device from that second on, at every change."""

    @property
    def seconds(self) -> float:
        return max(span.end for span in self.spans if span.resource == "compute")

    @property
    def peak(self) -> int:
        return max(used for _, used in self.memory)

    def busy(self, resource: Resource) -> float:
        """Seconds in which that resource works."""
        return sum(span.end - span.start for span in self.spans if span.resource == resource)


@dataclass(frozen=True)
class Plan:
    """What to do with each block, and what that comes to."""

    blocks: tuple[BlockPlan, ...]
    seconds: float
    """Of one virtual node."""
    peak_bytes: int
    """On the device, at most, however fast copies are."""
    host_bytes: int
    """On the host: of what is swapped, and of the optimizer's state if it is there."""
    reason: str
    timeline: Timeline = field(repr=False)
    waits: tuple[Wait, ...] = field(default=(), repr=False)
    """In the order in which the device comes to them; anywhere else it waits for no copy out."""

    def count(self, action: Action) -> int:
        return sum(block.action is action for block in self.blocks)

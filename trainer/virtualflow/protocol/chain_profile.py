"""The part of a device profile that plans of memory are made from: a model as a chain of blocks, and the copy engine.

Bytes are those of tensors on the device. What each word means for a plan is said where plans are made
(``virtualflow.memory``).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Bandwidth = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class BlockProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One block, for micro-batches of one size."""

    name: Annotated[str, msgspec.Meta(max_length=256)]
    """As the model names it."""
    forward_seconds: _Seconds
    """Medians."""
    backward_seconds: _Seconds
    saved_bytes: _Bytes
    """What autograd saves in its forward pass, without its input and without parameters; each storage once."""
    boundary_bytes: _Bytes
    """Its input."""
    parameter_bytes: _Bytes
    gradient_bytes: _Bytes
    workspace_bytes: _Bytes = 0
    """The most that a forward pass over it needs for a moment beyond all that,"""
    backward_workspace_bytes: Annotated[int, msgspec.Meta(ge=-(1 << 60), le=1 << 60)] | None = None
    """and a backward pass; below 0 if what was saved goes before all gradients are there. ``None``: as many."""
    output_bytes: _Bytes = 0
    """What autograd saves of its output, which is the next block's input."""
    overhead_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    """What computing it again takes beyond its forward pass; the median."""


class SkipProfile(msgspec.Struct, frozen=True):
    """What enters a block, and a later one once more; blocks by their numbers."""

    first: Annotated[int, msgspec.Meta(ge=0)]
    """The block in whose ``boundary_bytes`` it is."""
    last: _Count
    skip_bytes: _Bytes
    gradient_bytes: _Bytes
    """What holds its gradient from the later block's backward pass to the first one's."""


class ChainSize(msgspec.Struct, frozen=True):
    """All blocks, in the order of the forward pass, for micro-batches of one size."""

    micro_batch: _Count
    """Samples."""
    blocks: Annotated[tuple[BlockProfile, ...], msgspec.Meta(min_length=1, max_length=4_096)]
    other_bytes: _Bytes = 0
    """What else is on the device for such a micro-batch: its samples, and what no plan frees."""
    skips: Annotated[tuple[SkipProfile, ...], msgspec.Meta(max_length=4_096)] = ()


class ChainProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A model as a chain of blocks on one device."""

    out_bytes_per_second: _Bandwidth
    """Copies from the device to pinned memory of the host,"""
    in_bytes_per_second: _Bandwidth
    """and back."""
    optimizer_bytes: _Bytes
    """The optimizer's state."""
    fixed_bytes: _Bytes
    """What else is on the device all the time."""
    sum_bytes: _Bytes = 0
    """A sum of all gradients: as many are at rest at a time as the number of virtual nodes has bits, but one."""
    device_bytes: _Count | None = None
    """The device's memory."""
    host_bytes: _Bytes | None = None
    """The host's for what is swapped; 0 where the two are the same memory."""
    sizes: Annotated[tuple[ChainSize, ...], msgspec.Meta(min_length=1, max_length=64)]
    """From the smallest to the largest."""

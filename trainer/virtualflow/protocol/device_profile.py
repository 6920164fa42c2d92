"""What a device profile is: how long virtual nodes of one script take on one type of device, and how much memory.

``virtualflow profile`` writes it (``profiling`` measures); a worker that is given one tells its coordinator how fast it
will be, so that the first assignment of virtual nodes is right already. A profile that does not fit is no guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from virtualflow.atomic_file import read_regular
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.settings import Reproducibility
from virtualflow.protocol.wording import counted, milliseconds

# The part of a device profile that plans of memory are made from: a model as a chain of blocks, and the copy engine.
#
# Bytes are those of tensors on the device. What each word means for a plan is said where plans are made
# (``virtualflow.memory``).

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
    joins: bool = True
    """Whether it gets what the block before has returned, so that a segment may have both."""


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
    """A sum of all gradients: at most as many are at rest at a time as the tree over the virtual nodes is deep."""
    gradient_bytes: _Bytes | None = None
    """All gradients as they come, where their sum takes more; ``None``: as many."""
    scratch: bool = False
    """Whether more than two such sums wait in files (``vf.Memory(scratch=...)``)."""
    device_bytes: _Count | None = None
    """The device's memory."""
    host_bytes: _Bytes | None = None
    """The host's for what is swapped; 0 where the two are the same memory."""
    sizes: Annotated[tuple[ChainSize, ...], msgspec.Meta(min_length=1, max_length=64)]
    """From the smallest to the largest."""


VERSION = 1
"""Raised when the file changes in a way that an older reader would misread."""

_LARGEST = 8 << 20
"""Bytes of a file that could be a profile."""

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class SizeProfile(msgspec.Struct, frozen=True):
    """Micro-batches of one size."""

    virtual_nodes: _Count
    """How many virtual nodes' samples it holds."""
    micro_batch: _Count
    """Samples."""
    samples: _Count
    """How many micro-batches were timed."""
    seconds: _Positive
    """The median from fetching a micro-batch to the end of its backward pass, its gradients added up. Short ones count
    by the means of several in a row."""
    seconds_low: _Positive
    """The lower quartile."""
    seconds_high: _Positive
    """The upper one."""
    loading_seconds: Annotated[float, msgspec.Meta(ge=0)]
    """The median of the part of it in which the data was waited for."""
    peak_bytes: Annotated[int, msgspec.Meta(ge=0)] | None
    """The most bytes of tensors at a time beyond those that were there before: the micro-batch, activations and
    gradients, but neither the model nor the optimizer. What libraries take for themselves is not in it."""

    @property
    def seconds_per_virtual_node(self) -> float:
        return self.seconds / self.virtual_nodes


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a profile file (JSON)."""

    version: Annotated[int, msgspec.Meta(ge=VERSION, le=VERSION)] = VERSION
    device_type: str
    """As torch calls it: ``cpu``, ``cuda``."""
    device: str
    """The device's own name."""
    torch: str
    threads: _Count
    reproducibility: Reproducibility
    """Kernels may differ between the two."""
    signature: str
    """Hash of names, shapes and types of the model and the optimizer."""
    script: str
    batch_size: _Count
    virtual_nodes: _Count
    created: str
    """ISO 8601, UTC."""
    stopped: str
    """Why no larger sizes follow, in words."""
    sizes: Annotated[tuple[SizeProfile, ...], msgspec.Meta(min_length=1, max_length=64)]
    """From the smallest to the largest."""
    step_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """What a step takes beside its micro-batches, the update for one, on a worker that is alone; the mean. ``None``: it
    was not measured."""
    sum_bytes: _Bytes = 0
    """A sum of all gradients on its way between workers; 0: not measured."""
    chain: ChainProfile | None = None
    """What plans of memory are made from; ``None`` where it was not measured."""
    blocks: Annotated[str, msgspec.Meta(max_length=4_096)] = ""
    """Which blocks that is of, or why there are none, in words."""


def encode(profile: DeviceProfile) -> bytes:
    """The content of the file."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"


def read_profile(path: Path) -> DeviceProfile:
    try:
        raw = read_regular(path, _LARGEST)
    except OSError as error:
        raise ConfigurationError(
            f"the profile {path} cannot be read ({error.strerror}); make one with virtualflow profile SCRIPT"
        ) from error
    try:
        return msgspec.json.decode(raw, type=DeviceProfile)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is no device profile ({error}); make one with virtualflow profile SCRIPT"
        ) from error


class Situation(msgspec.Struct, frozen=True):
    """What a worker is about to run, as far as a profile must fit it."""

    device_type: str
    device: str
    threads: int
    signature: str
    micro_batch: int


def misfit(profile: DeviceProfile, situation: Situation) -> str | None:
    """Why a profile says nothing about this worker, as the end of a sentence; ``None``: it does."""
    for what, there, here in (
        ("device", profile.device, situation.device),
        ("type of device", profile.device_type, situation.device_type),
    ):
        if there != here:
            return f"it is of the {what} {there}, and this is {here}"
    if profile.signature != situation.signature:
        return "it is of another model or optimizer"
    if profile.device_type == "cpu" and profile.threads != situation.threads:
        return f"it is of {counted(profile.threads, 'thread')}, and here are {situation.threads}"
    smallest, largest = profile.sizes[0].micro_batch, profile.sizes[-1].micro_batch
    if not smallest <= situation.micro_batch <= largest:
        return (
            f"it is of micro-batches of {smallest} to {counted(largest, 'sample')}, and here they have "
            f"{situation.micro_batch}"
        )
    return None


def seconds_for(profile: DeviceProfile, micro_batch: int) -> float:
    """How long a micro-batch of so many samples takes; between two measured sizes, on the line between them."""
    below = [size for size in profile.sizes if size.micro_batch <= micro_batch]
    above = [size for size in profile.sizes if size.micro_batch >= micro_batch]
    if not below or not above:
        raise ValueError(f"micro-batches of {counted(micro_batch, 'sample')} were not measured")
    low, high = below[-1], above[0]
    if low.micro_batch == high.micro_batch:
        return low.seconds
    share = (micro_batch - low.micro_batch) / (high.micro_batch - low.micro_batch)
    return low.seconds + share * (high.seconds - low.seconds)


def block_seconds(profile: DeviceProfile, micro_batch: int, names: Sequence[str]) -> list[tuple[float, float]]:
    """Seconds of the forward and the backward pass of the blocks of these names, for the measured size that is nearest.

    None where one of them was not measured.
    """
    if profile.chain is None:
        return []
    nearest = min(profile.chain.sizes, key=lambda size: abs(size.micro_batch - micro_batch))
    measured = {block.name: (block.forward_seconds, block.backward_seconds) for block in nearest.blocks}
    return [measured[name] for name in names] if measured.keys() >= set(names) else []


def read_fitting(path: Path, situation: Situation) -> DeviceProfile:
    """The profile in ``path``.

    Raises:
        ConfigurationError: it cannot be read or does not fit; the sentence says what to do.
    """
    profile = read_profile(path)
    reason = misfit(profile, situation)
    if reason is not None:
        raise ConfigurationError(
            f"the profile {path} does not fit: {reason}; make one here with virtualflow profile {profile.script}"
        )
    return profile


def describe(profile: DeviceProfile) -> str:
    """The profile as a table for people."""
    lines = [
        f"{profile.device}, torch {profile.torch}, {counted(profile.threads, 'thread')}, "
        f"{profile.reproducibility}; one virtual node of {profile.virtual_nodes}: "
        f"{counted(profile.batch_size // profile.virtual_nodes, 'sample')}",
        f"{'virtual nodes':>13}  {'samples':>7}  {'ms':>9}  {'quartiles':>19}  {'waiting for data':>16}  "
        f"{'ms per virtual node':>19}  {'peak MiB':>8}",
    ]
    for size in profile.sizes:
        quartiles = f"{1e3 * size.seconds_low:.2f} - {1e3 * size.seconds_high:.2f}"
        peak = "?" if size.peak_bytes is None else f"{size.peak_bytes / 2**20:.1f}"
        lines.append(
            f"{size.virtual_nodes:>13}  {size.micro_batch:>7}  {1e3 * size.seconds:>9.2f}  {quartiles:>19}  "
            f"{1e3 * size.loading_seconds:>13.2f} ms  {1e3 * size.seconds_per_virtual_node:>19.2f}  {peak:>8}"
        )
    lines.append(f"no larger sizes: {profile.stopped}")
    if profile.step_seconds is not None:
        lines.append(f"a step takes {milliseconds(1e3 * profile.step_seconds)} beside its micro-batches")
    if profile.blocks:
        lines.append(profile.blocks)
    return "\n".join(lines)

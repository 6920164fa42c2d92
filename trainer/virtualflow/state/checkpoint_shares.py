"""A checkpoint that is divided: each worker writes the parameters of its share, with their optimizer's states, itself.

A share is a file of pieces: slices of parameters, and whole ones. Workers write them side by side, each in a hidden
directory of its own (``checkpoint_order.hidden_share``) with a small manifest, which is written last. When those of all
are there, the leader moves the shares into the checkpoint's directory (``checkpoint_format.write``), and its manifest
lists them. If one never comes, the checkpoint does not appear.

Whoever reads one takes only the pieces that it needs, and checks these alone: the manifest has the SHA-256 of a share's
header, and that has one of each piece.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import math
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from errno import EINVAL, ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from virtualflow.atomic_file import open_regular, read_regular, sync_directory
from virtualflow.protocol.signatures import SigningKeys
from virtualflow.state import codec
from virtualflow.state.checkpoint_order import Mark, hidden_share
from virtualflow.state.sealed_manifest import MANIFEST, MAX_SEALED, UNSIGNED, open_seal, seal

NATIVE = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
"""Every version of safetensors knows these; tensors of other dtypes are stored as rows of bytes."""
_FILE = "share.safetensors"
"""Until the leader has it."""

State = dict[str, Any]
Grain = Callable[[str, Tensor], int]
"""How many elements of a parameter one in a tensor of its state is for; 0: all slices have the same."""


# -- pieces -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedPiece:
    """A slice of a parameter, or all of it, in elements as ``parameter.reshape(-1)`` has them."""

    name: str
    """The parameter's."""
    begin: int
    end: int
    value: Tensor
    """``[end - begin]``, or in the parameter's shape."""
    state: State | None
    """The optimizer's; ``None``: it has never been stepped."""
    grains: Mapping[str, int]
    """For each tensor of the state how many elements of the parameter one of its own is for; 0: it is the same for all
    slices."""
    hosted: tuple[str, ...] = ()
    """Which tensors of the state are in host memory though the parameter is not."""
    averages: Mapping[str, Tensor] = field(default_factory=dict)
    """Averages of its values that the script keeps, by name: each like the value."""

    def cut(self, begin: int, end: int) -> SavedPiece:
        """What it has of that stretch of the parameter."""
        if (begin, end) == (self.begin, self.end):
            return self
        first, last = begin - self.begin, end - self.begin
        state = self.state and cut_state(self.state, self._grain, first, last, self.end - self.begin)
        value, *averages = (of.reshape(-1)[first:last].clone() for of in (self.value, *self.averages.values()))
        cut = dict(zip(self.averages, averages, strict=True))
        return replace(self, begin=begin, end=end, value=value, state=state, averages=cut)

    def copy(self) -> SavedPiece:
        """One that stays as it is, in host memory."""
        value, state, averages = codec.snapshot([self.value, self.state, dict(self.averages)])
        return replace(self, value=value, state=state, averages=averages)

    def _grain(self, key: str, value: Tensor) -> int:
        return self.grains[key]


def cut_state(state: State, grain: Grain, begin: int, end: int, numel: int) -> State:
    """The state of the elements from ``begin`` to ``end`` of a stretch of ``numel``."""
    if (begin, end) == (0, numel):
        return state
    cut: State = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            cut[key] = value
        elif size := grain(key, value):
            cut[key] = value.reshape(-1)[begin // size : -(-end // size)].clone()
        else:
            cut[key] = value.clone()
    return cut


def join_states(states: Sequence[State], grain: Grain, shape: torch.Size | None) -> State:
    """The state of stretches that follow one another; in host memory if not all are on one device.

    Args:
        shape: the parameter's, if they are all of it.
    """
    joined: State = {}
    for key, first in states[0].items():
        parts = [state[key] for state in states]
        if not isinstance(first, Tensor):
            joined[key] = first
        elif grain(key, first):
            devices = {part.device for part in parts}
            flat = [part.reshape(-1) if len(devices) == 1 else part.reshape(-1).cpu() for part in parts]
            value = torch.cat(flat)
            joined[key] = value.view(shape) if shape is not None and value.numel() == shape.numel() else value
        else:
            joined[key] = first.clone()
    return joined


# -- what a manifest says -----------------------------------------------------------------------------------


class ShareFile(msgspec.Struct, frozen=True):
    """One file of a checkpoint that is divided."""

    file: str
    size: int
    sha256: str
    """Of its header, which has those of the pieces."""
    spans: tuple[tuple[int, int], ...]
    """What it has of the row of all parameters, in their order in the model; each takes up one place at least."""


class _Written(msgspec.Struct, frozen=True):
    """The manifest beside a share that has reached the disk."""

    mark: str
    """Of the checkpoint it is for."""
    share: ShareFile


class Places:
    """Where parameters stand in the row of all.

    Args:
        signature: ``digests.signature`` of the model.

    Raises:
        ValueError: it is none.
    """

    def __init__(self, signature: Mapping[str, Any]) -> None:
        try:
            self.shapes = {name: torch.Size(of["shape"]) for name, of in signature["parameters"].items()}
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{MANIFEST} does not describe parameters: {error!r}") from None
        numels = [max(1, shape.numel()) for shape in self.shapes.values()]
        ends = list(itertools.accumulate(numels, initial=0))
        self.offsets = dict(zip(self.shapes, ends, strict=False))
        self.length = ends[-1]

    def span(self, name: str, begin: int, end: int) -> tuple[int, int]:
        offset = self.offsets[name]
        return offset + begin, offset + (end if self.shapes[name].numel() else 1)

    def check(self, shares: Sequence[ShareFile]) -> None:
        """See that all of the row is in the shares, and nothing twice.

        Raises:
            ValueError: it is not so.
        """
        at = 0
        for begin, end in sorted(span for share in shares for span in share.spans):
            if begin != at or end <= begin:
                raise ValueError(f"its shares do not have all parameters once: {begin}-{end} follows {at}")
            at = end
        if at != self.length:
            raise ValueError(f"its shares have {at} of {self.length} elements")


# -- writing ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnShare:
    """What one of so many workers writes."""

    number: int
    """From 0."""
    of: int
    pieces: Sequence[SavedPiece]
    spans: tuple[tuple[int, int], ...]

    def copy(self) -> OwnShare:
        return replace(self, pieces=[piece.copy() for piece in self.pieces])


class _Entry(msgspec.Struct, frozen=True):
    """A piece, in the header of a share."""

    name: str
    begin: int
    end: int
    skeleton: str
    first: int
    """The number of its first tensor; the others follow."""
    sha256: str
    """Of its tensors, one behind the other."""


class WrittenShare:
    """A share that waits for the leader; no other process takes it for a leftover as long as it is held."""

    def __init__(self, place: Path, lock: BinaryIO) -> None:
        self._place, self._lock = place, lock

    def release(self) -> None:
        """Nobody waits for it any more, or it has been taken."""
        self._lock.close()
        shutil.rmtree(self._place, ignore_errors=True)


def write_share(directory: Path, mark: Mark, own: OwnShare, keys: SigningKeys = UNSIGNED) -> WrittenShare:
    """Write a share of pieces that nobody changes meanwhile; OSError or SafetensorError if that fails."""
    place = hidden_share(directory, mark, own.number)
    place.mkdir()
    try:
        lock = (place / MANIFEST).open("xb")
        try:
            lock_file(lock.fileno())
            content, entries = _encode(own.pieces)
            metadata = {"mark": mark.name, "pieces": msgspec.json.encode(entries).decode()}
            path = place / _FILE
            save_file(content, path, metadata=metadata)
            path.chmod(os.fstat(lock.fileno()).st_mode & 0o777)
            with path.open("rb") as file:
                os.fsync(file.fileno())
                head, size = read_head(file, _FILE), os.fstat(file.fileno()).st_size
            share = ShareFile(_FILE, size, hashlib.sha256(head).hexdigest(), own.spans)
            sync_directory(place)
            lock.write(seal(_Written(mark.name, share), keys))
            lock.flush()
            os.fsync(lock.fileno())
        except BaseException:
            lock.close()
            raise
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return WrittenShare(place, lock)


def _encode(pieces: Sequence[SavedPiece]) -> tuple[dict[str, Tensor], list[_Entry]]:
    content: dict[str, Tensor] = {}
    entries = []
    for piece in pieces:
        described = [piece.value, piece.state, dict(piece.grains), list(piece.hosted)]
        if piece.averages:  # which earlier versions do not know
            described.append(dict(piece.averages))
        skeleton, tensors = codec.encode(described)
        first, checksum = len(content), hashlib.sha256()
        for tensor in tensors:
            raw = tensor.reshape(-1).view(torch.uint8)
            checksum.update(raw.numpy().data)
            content[f"t{len(content)}"] = tensor if tensor.dtype in NATIVE else raw
        entries.append(_Entry(piece.name, piece.begin, piece.end, skeleton.decode(), first, checksum.hexdigest()))
    return content, entries


def collect_shares(
    directory: Path, into: Path, mark: Mark, of: int, wait: Callable[[], None], keys: SigningKeys = UNSIGNED
) -> list[ShareFile]:
    """Move the shares of all workers into the checkpoint's directory, as they are written.

    Args:
        wait: called while one is not there; what it raises ends the waiting.

    Raises:
        ValueError: one is not what its writer said.
        ConfigurationError: nobody whom ``keys`` trust has signed one.
    """
    found = []
    for number in range(of):
        place = hidden_share(directory, mark, number)
        while (written := _read_written(place, keys)) is None:
            wait()
        share = msgspec.structs.replace(written.share, file=f"share-{number:05d}-of-{of:05d}.safetensors")
        if written.mark != mark.name or (place / _FILE).stat().st_size != share.size:
            raise ValueError(f"{place} is not a share of the checkpoint {mark.name}")
        (place / _FILE).rename(into / share.file)
        shutil.rmtree(place, ignore_errors=True)
        found.append(share)
    return found


def _read_written(place: Path, keys: SigningKeys) -> _Written | None:
    """What the manifest of a share says, once that is complete."""
    try:
        sealed = read_regular(place / MANIFEST, MAX_SEALED)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(open_seal(sealed, f"the share {place}", keys), type=_Written)
    except msgspec.MsgspecError:
        return None  # its writer is not so far


def lock_file(descriptor: int) -> None:
    """Lock what tells others that its directory is being written."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (ENOLCK, EOPNOTSUPP, ENOSYS, EINVAL):
            raise  # Without locks leftovers stay: who looks for them gets the same error.


# -- reading ------------------------------------------------------------------------------------------------


def read_head(file: BinaryIO, name: str) -> bytes:
    """The header of a safetensors file and its length before it; ValueError if it ends before."""
    size = file.read(8)
    length = int.from_bytes(size, "little")
    if length > os.fstat(file.fileno()).st_size - len(size):
        raise ValueError(f"{name} cannot be read: it ends before its header does")
    return size + file.read(length)


@dataclass(frozen=True)
class _Header:
    length: int
    tensors: Mapping[str, Any]
    entries: Mapping[str, Sequence[_Entry]]
    """By parameter."""


class ShareFiles:
    """The shares of a checkpoint, to be read piece by piece.

    Args:
        signature: of the model that they are of.
    """

    def __init__(self, directory: Path, shares: Sequence[ShareFile], signature: Mapping[str, Any]) -> None:
        self.places = Places(signature)
        self._directory, self._shares = directory, shares
        spans = sorted((span, number) for number, share in enumerate(shares) for span in share.spans)
        self._begins = [span[0] for span, _ in spans]
        self._owners = [number for _, number in spans]
        self._headers: dict[int, _Header] = {}

    def read(self, name: str, begin: int, end: int) -> list[SavedPiece]:
        """What stands in that stretch of a parameter, in pieces that follow one another, in host memory.

        Raises:
            ValueError: it is not what was written.
        """
        first, last = self.places.span(name, begin, end)
        owners = self._owners[bisect_right(self._begins, first) - 1 : bisect_right(self._begins, last - 1)]
        found = [piece for owner in sorted(set(owners)) for piece in self._pieces(owner, name, begin, end)]
        found.sort(key=lambda piece: piece.begin)
        edges = [begin, *(piece.end for piece in found)]
        if not found or [piece.begin for piece in found] != edges[:-1] or edges[-1] != end:
            raise ValueError(f"its shares do not have {begin}-{end} of {name}")
        return found

    def read_whole(self, name: str) -> SavedPiece:
        """A parameter with its state."""
        shape = self.places.shapes[name]
        pieces = self.read(name, 0, shape.numel())
        first = pieces[0]
        value, *averages = (
            torch.cat([part.reshape(-1) for part in parts]).view(shape)
            for parts in zip(*((piece.value, *piece.averages.values()) for piece in pieces), strict=True)
        )
        states = [piece.state for piece in pieces if piece.state is not None]
        state = first.state
        if len(states) > 1:
            state = join_states(states, lambda key, _: first.grains[key], shape)
        joined = dict(zip(first.averages, averages, strict=True))
        return replace(first, begin=0, end=shape.numel(), value=value, state=state, averages=joined)

    def verify(self) -> None:
        """Read everything once, piece by piece; ValueError if it is not what was written."""
        for name, shape in self.places.shapes.items():
            self.read(name, 0, shape.numel())

    def _pieces(self, owner: int, name: str, begin: int, end: int) -> Iterator[SavedPiece]:
        share = self._shares[owner]
        path = self._directory / share.file
        try:
            with open_regular(path) as file:
                if owner not in self._headers:
                    self._headers[owner] = _read_header(file, share)
                header = self._headers[owner]
                for entry in header.entries.get(name, ()):
                    first, last = max(begin, entry.begin), min(end, entry.end)
                    if first < last or (entry.begin == entry.end and begin == end):
                        yield _read_piece(file, header, entry, share.file).cut(first, last)
        except (OSError, LookupError, TypeError, RuntimeError, msgspec.MsgspecError) as error:
            raise ValueError(f"{share.file} cannot be read: {error}") from error


def _read_header(file: BinaryIO, share: ShareFile) -> _Header:
    head = read_head(file, share.file)
    if hashlib.sha256(head).hexdigest() != share.sha256:
        raise ValueError(f"the header of {share.file} is not what was written (its SHA-256 differs)")
    tensors = json.loads(head[8:])
    entries: dict[str, list[_Entry]] = {}
    for entry in msgspec.json.decode(tensors["__metadata__"]["pieces"], type=list[_Entry]):
        entries.setdefault(entry.name, []).append(entry)
    return _Header(len(head), tensors, entries)


def _read_piece(file: BinaryIO, header: _Header, entry: _Entry, name: str) -> SavedPiece:
    checksum = hashlib.sha256()

    def take(n: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        begin, end = header.tensors[f"t{entry.first + n}"]["data_offsets"]
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} has a tensor that is not what its header says")
        file.seek(header.length + begin)
        raw = bytearray(file.read(end - begin))
        checksum.update(raw)
        return torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)

    value, state, grains, hosted, *averages = codec.decode(entry.skeleton.encode(), take)
    if checksum.hexdigest() != entry.sha256:
        raise ValueError(f"the content of {name} is not what was written (its SHA-256 differs)")
    return SavedPiece(entry.name, entry.begin, entry.end, value, state, grains, tuple(hosted), *averages)


def check_sizes(directory: Path, shares: Sequence[ShareFile]) -> None:
    """See that all files are there; OSError if one is not, ValueError if it has another size."""
    for share in shares:
        if os.sep in share.file or share.file.startswith("."):
            raise ValueError(f"{share.file!r} is no file of a checkpoint")
        with open_regular(directory / share.file) as file:
            size = os.fstat(file.fileno()).st_size
        if size != share.size:
            raise ValueError(f"{share.file} has {size} bytes instead of {share.size}")

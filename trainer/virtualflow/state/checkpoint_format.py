"""What a checkpoint on disk is: whose it is, how it is written, found and checked.

It is a directory ``step-00000120.1764000000000.7`` (steps and generation, see ``checkpoint_order``) with
``state.safetensors`` (the tensors of the state, its skeleton in the metadata) and ``manifest.json`` (whose it is, size
and SHA-256 of the state). Where no worker has all parameters, these are in files beside it (``checkpoint_shares``). It
appears by one rename after everything in it has reached the disk, so a writer may die at
any instruction: readers see all of it or nothing. What the disk itself damages is found by the checksums, and an older
checkpoint takes its place: the manifest's when checkpoints are listed, the state's when it is loaded, of the very bytes
that are loaded. Where keys are trusted, the manifest's signature is verified before anything that it says is believed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from virtualflow.atomic_file import open_regular, read_regular, sync_directory
from virtualflow.errors import ConfigurationError
from virtualflow.progress import ProgressBar
from virtualflow.protocol.messages import Generation
from virtualflow.protocol.signatures import SigningKeys
from virtualflow.protocol.versions import NUMERICS
from virtualflow.state import codec, digests
from virtualflow.state.checkpoint_order import Mark, VolumeFailure, complete, hidden, is_hidden, volume_error
from virtualflow.state.checkpoint_shares import NATIVE, Places, ShareFile, ShareFiles, check_sizes, lock_file, read_head
from virtualflow.state.sealed_manifest import MANIFEST, MAX_SEALED, UNSIGNED, open_seal, seal

FORMAT = 1
"""Of the manifest and the state; raised when an older reader would misread a newer checkpoint."""
DIVIDED = 2
"""The format of a checkpoint with shares, whose state an older reader would take for that of an empty model."""

STATE = "state.safetensors"
_OTHER_CONTENT = f"the content of {STATE} is not what was written (its SHA-256 differs)"


@dataclass(frozen=True)
class JobIdentity:
    """What makes two runs the same job: with all of it equal they go through the same bits."""

    virtual_nodes: int
    seed: int
    batch_size: int
    dataset_size: int | None
    """Samples of an epoch; None for a stream."""
    signature: dict[str, Any]
    """Of the model and the optimizer: ``digests.signature``."""

    def difference(self, other: JobIdentity) -> str | None:
        for name, noun in (
            ("virtual_nodes", "the number of virtual nodes"),
            ("seed", "the seed"),
            ("batch_size", "the batch size"),
            ("dataset_size", "the number of samples in the dataset"),
        ):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{noun} is {_amount(ours)} here and {_amount(theirs)} there"
        return digests.difference(self.signature, other.signature)


class Manifest(msgspec.Struct, frozen=True):
    """Whose state it is, and what its file must look like.

    A field that is added later has a default, also one of the identity: else older checkpoints would pass for damaged.
    """

    format: int
    step: int
    identity: JobIdentity
    state_size: int
    state_sha256: str
    torch: str
    numerics: int = 1
    """``versions.NUMERICS`` of the library that wrote it."""
    shares: tuple[ShareFile, ...] = ()
    """What has the parameters and their optimizer's states, where the state's file does not."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint whose manifest was verified; its state is when it is loaded."""

    mark: Mark
    path: Path
    identity: JobIdentity
    state_sha256: str
    written: float
    """Unix time."""
    shares: tuple[ShareFile, ...] = ()
    """Of parameters and their optimizer's states; none: they are with the rest of the state."""

    @property
    def open_shares(self) -> ShareFiles:
        return ShareFiles(self.path, self.shares, self.identity.signature)

    @property
    def step(self) -> int:
        return self.mark.step


# -- reading ------------------------------------------------------------------------------------------------


def find_newest(
    directory: Path,
    on_event: Callable[[str], None],
    identity: JobIdentity | None = None,
    damaged: Collection[int] = (),
    only: Collection[Mark] | None = None,
    *,
    keys: SigningKeys = UNSIGNED,
    patient: bool = False,
) -> FoundCheckpoint | None:
    """The newest checkpoint with a sound manifest and a state of its size; None where there is none.

    Torn and corrupt ones are skipped with an event; those of the steps that are ``damaged``, and all but ``only``
    those, without one.
    ConfigurationError if the newest one that can be read is of another job than ``identity``, if another version of the
    format wrote it, if none of the trusted ``keys`` has signed it, or if it may not be read; who is ``patient`` gets a
    ``VolumeFailure``, and no older one, where perhaps it can be read a moment later.
    """
    for mark, path in complete(directory):
        if mark.step in damaged or (only is not None and mark not in only):
            continue
        try:
            manifest = _read_manifest(path, mark.step, keys)
            problem = identity and identity.difference(manifest.identity)
            if problem:
                raise ConfigurationError(
                    f"the checkpoint {path} belongs to another job: {problem}; use another "
                    "--checkpoint-dir, or go back to the old value"
                )
            _verify_sizes(path, manifest)
        except PermissionError as error:
            # To start again from nothing would be a worse answer than to ask for the permission.
            raise ConfigurationError(
                f"the checkpoint {path} may not be read ({error.strerror}); give this user the "
                "right to, or use another --checkpoint-dir"
            ) from None
        except ConfigurationError:
            raise  # It is a ValueError too, but no damage.
        except (OSError, ValueError) as error:
            if patient and isinstance(error, OSError):
                failure = volume_error(error, f"the checkpoint {path} cannot be read ({error.strerror})")
                if isinstance(failure, VolumeFailure):
                    raise failure from None
            on_event(skipped(path, error))
            continue
        tell_other_versions(manifest, f"the checkpoint {path}", on_event)
        written = (path / MANIFEST).stat().st_mtime
        return FoundCheckpoint(mark, path, manifest.identity, manifest.state_sha256, written, manifest.shares)
    return None


def find_by_path(
    path: Path,
    on_event: Callable[[str], None],
    *,
    step: int | None = None,
    damaged: Collection[int] = (),
    keys: SigningKeys = UNSIGNED,
) -> FoundCheckpoint | None:
    """As :func:`find_newest`, whichever job's they are.

    Args:
        step: of which it is to be; the newest by default.
        damaged: steps of which those that are there are known not to be sound.
    """
    mark = Mark.read(path.resolve().name)
    directory = path if mark is None else path.resolve().parent
    marks = [each for each, _ in complete(directory) if mark in (None, each) and step in (None, each.step)]
    return find_newest(directory, on_event, damaged=damaged, only=marks, keys=keys)


def tell_other_versions(manifest: Manifest, name: str, on_event: Callable[[str], None]) -> None:
    if manifest.torch != torch.__version__:
        on_event(
            f"{name} was written by torch {manifest.torch} and this is {torch.__version__}: from here on the bits may "
            "differ"
        )
    if manifest.numerics != NUMERICS:
        on_event(
            f"{name} was written by a virtualflow with numerics {manifest.numerics} and this has {NUMERICS}: from here "
            "on the bits may differ"
        )


def skipped(path: Path, error: Exception) -> str:
    """What people are told of a checkpoint that is damaged."""
    return f"skipped the damaged checkpoint {path}: {error}"


def load(found: FoundCheckpoint) -> dict[str, Any]:
    """The tree that was saved, on the CPU and independent of the file; ValueError if it is not what was written.

    The checksum is that of the bytes that are returned: what the disk or the network does to them after they were
    listed, or between two readings, is noticed. Shares become the whole that a worker with all parameters has.
    """
    tree = load_undivided(found)
    if found.shares:
        shares, signature = found.open_shares, found.identity.signature
        numbers = {name: n for n, name in enumerate(name for group in signature["groups"] for name in group)}
        for name in signature["parameters"]:
            piece = shares.read_whole(name)
            tree["parameters"][name] = piece.value
            if piece.state is not None:
                tree["optimizer"]["state"][numbers[name]] = piece.state
                tree["hosted"] += [[numbers[name], key] for key in piece.hosted]
            for of, average in piece.averages.items():
                names = [name, *(tied for tied, first in signature.get("ties", {}).items() if first == name)]
                tree["state"][of] |= {f"module.{each}": average for each in names}
    return tree


def load_undivided(found: FoundCheckpoint) -> dict[str, Any]:
    """The same without what is in shares."""
    path = found.path / STATE
    try:
        with open_regular(path) as plain:
            head = read_head(plain, STATE)
        checksum = hashlib.sha256(head)
        tensors: dict[str, Tensor] = {}
        with safe_open(path, "pt") as file, ProgressBar(f"reading {found.path.name}", path.stat().st_size) as progress:
            header = json.loads(head[8:])
            metadata = header.pop("__metadata__")
            for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
                # A copy, because the file is mapped, and a remote disk could take that memory away.
                tensor = tensors[name] = file.get_tensor(name).clone()
                checksum.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
                progress.reach(header[name]["data_offsets"][1])
    except (SafetensorError, OSError, LookupError, TypeError) as error:
        raise ValueError(f"{STATE} cannot be read: {error}") from error
    if checksum.hexdigest() != found.state_sha256:
        raise ValueError(_OTHER_CONTENT)

    def take(n: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        tensor = tensors[f"t{n}"]
        if dtype not in NATIVE:
            tensor = tensor.view(dtype).view(shape)
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ValueError(f"tensor {n} is not what the skeleton says")
        return tensor

    tree: dict[str, Any] = codec.decode(metadata["skeleton"].encode(), take)
    return tree


def adopt(found: FoundCheckpoint, fence: Generation) -> FoundCheckpoint:
    """Let a checkpoint be the one that ``fence`` begins from: what an older generation writes comes before it now.

    A writer of an older generation that is about to remove it does so before, or not at all.

    Raises:
        FileNotFoundError: it was removed, or another generation has begun from it.
        OSError: it cannot be renamed.
    """
    mark = Mark(fence, found.step)
    path = found.path.with_name(mark.name)
    if path != found.path:
        try:
            found.path.rename(path)
        except FileNotFoundError:
            # Nobody else gives it this number: it is there if an earlier try came so far, and failed behind it.
            if not path.exists():
                raise
        sync_directory(path.parent)
    return replace(found, mark=mark, path=path)


def unseal(sealed: bytes, name: str, keys: SigningKeys = UNSIGNED) -> Manifest:
    """What :func:`seal` made into bytes; ValueError if it is damaged, ConfigurationError if it is of another format, or
    by nobody whom ``keys`` trust."""
    try:
        content = open_seal(sealed, name, keys)
        version = msgspec.json.decode(content, type=_Version).format
        manifest = msgspec.json.decode(content, type=Manifest) if version in (FORMAT, DIVIDED) else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} cannot be understood: {error}") from None
    if manifest is None:
        raise ConfigurationError(
            f"{name} has format {version} and this version of VirtualFlow reads {FORMAT} and {DIVIDED}; use "
            "the version that wrote it, or another --checkpoint-dir"
        )
    return manifest


def _read_manifest(path: Path, step: int, keys: SigningKeys) -> Manifest:
    manifest = unseal(read_regular(path / MANIFEST, MAX_SEALED), f"the checkpoint {path}", keys)
    if manifest.step != step:
        raise ValueError(f"{MANIFEST} is of step {manifest.step}")
    return manifest


def _verify_sizes(path: Path, manifest: Manifest) -> None:
    with open_regular(path / STATE) as file:
        _verify_size(file, manifest)
    if manifest.shares:
        Places(manifest.identity.signature).check(manifest.shares)
        check_sizes(path, manifest.shares)


def _verify_size(file: BinaryIO, manifest: Manifest) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != manifest.state_size:
        raise ValueError(f"{STATE} has {size} bytes instead of {manifest.state_size}")


def _verify_content(path: Path, manifest: Manifest) -> None:
    _verify_sizes(path, manifest)
    with open_regular(path / STATE) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != manifest.state_sha256:
            raise ValueError(_OTHER_CONTENT)
    if manifest.shares:
        ShareFiles(path, manifest.shares, manifest.identity.signature).verify()


class _Version(msgspec.Struct, frozen=True):
    format: int


def _amount(value: int | None) -> str:
    return "unknown (a stream)" if value is None else str(value)


# -- writing ------------------------------------------------------------------------------------------------


def write(
    directory: Path,
    mark: Mark,
    tree: dict[str, Any],
    identity: JobIdentity,
    allow: Callable[[], None],
    keys: SigningKeys = UNSIGNED,
    collect: Callable[[Path], Sequence[ShareFile]] | None = None,
) -> Path:
    """Write a checkpoint of a tree that nobody changes meanwhile; OSError or SafetensorError if that fails.

    ``allow`` is called at the last moment, and may raise what is to keep it from appearing. ``collect`` moves what
    others write into a directory.

    The manifest's file is locked from before the first byte until after the rename: that is how another
    process knows a leftover of a dead writer from the work of a living one, on any machine that shares the
    directory.
    """
    final, step = directory / mark.name, mark.step
    if final.exists() and _is_valid(final, step, identity, keys):
        return final  # It is the same state, and there is no way to swap two directories.
    temporary = hidden(directory, step)
    temporary.mkdir()
    try:
        with (temporary / MANIFEST).open("xb") as manifest_file:
            lock_file(manifest_file.fileno())
            size, checksum = _write_state(temporary / STATE, tree)
            # safetensors makes its file private; ours has the mode that the umask gave to the manifest.
            (temporary / STATE).chmod(os.fstat(manifest_file.fileno()).st_mode & 0o777)
            shares = () if collect is None else tuple(collect(temporary))
            version = DIVIDED if shares else FORMAT
            manifest = Manifest(version, step, identity, size, checksum, str(torch.__version__), NUMERICS, shares)
            manifest_file.write(seal(manifest, keys))
            manifest_file.flush()
            os.fsync(manifest_file.fileno())
            sync_directory(temporary)
            allow()
            if final.exists():
                doomed = hidden(directory, step)
                final.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
            temporary.rename(final)
            sync_directory(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # Gone already, unless something failed.
    return final


def _write_state(path: Path, tree: dict[str, Any]) -> tuple[int, str]:
    """Write the state and make sure that the disk has it; its size in bytes and its SHA-256 (hex)."""
    skeleton, tensors = codec.encode(tree)
    rows = [t if t.dtype in NATIVE else t.reshape(-1).view(torch.uint8) for t in tensors]
    save_file({f"t{n}": row for n, row in enumerate(rows)}, path, metadata={"skeleton": skeleton.decode()})
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _is_valid(path: Path, step: int, identity: JobIdentity, keys: SigningKeys) -> bool:
    """Whether a directory is a checkpoint of this step of this job, byte for byte what was written."""
    try:
        manifest = _read_manifest(path, step, keys)
        _verify_content(path, manifest)
    except (OSError, ValueError):
        return False
    return identity.difference(manifest.identity) is None


def looks_complete(path: Path, step: int, keys: SigningKeys = UNSIGNED) -> bool:
    """Whether the manifest is sound and all files have their sizes: cheap enough to ask after every write."""
    try:
        _verify_sizes(path, _read_manifest(path, step, keys))
    except (OSError, ValueError):
        return False
    return True


def is_leftover(path: Path) -> bool:
    return is_hidden(path) and _abandoned(path)


def _abandoned(path: Path) -> bool:
    try:
        # Writable, because NFS gives an exclusive lock to nobody else.
        with (path / MANIFEST).open("r+b") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return True
    except OSError:
        return False

"""Checkpoints: what remains when every worker dies, written while training goes on.

On disk a checkpoint is a directory ``step-00000120`` with ``state.safetensors`` (the tensors of the state,
its skeleton in the metadata) and ``manifest.json`` (whose it is, size and SHA-256 of the state). It appears
by one rename after everything in it has reached the disk, so a writer may die at any instruction: readers see
all of it or nothing. What the disk itself damages is found by the checksums, and an older checkpoint takes
its place.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from virtualflow import state
from virtualflow.errors import ConfigurationError

FORMAT = 1
"""Of the manifest and the state; raised when an older reader would misread a newer checkpoint."""

STATE, MANIFEST = "state.safetensors", "manifest.json"
_COMPLETE = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.step-\d{8,}\.[0-9a-f]{8}")

_NATIVE = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
"""Every version of safetensors knows these; tensors of other dtypes are stored as rows of bytes."""

_ADVICE = {
    errno.ENOSPC: "free some space there or use another --checkpoint-dir",
    errno.EDQUOT: "raise the quota, free some space there or use another --checkpoint-dir",
    errno.EFBIG: "raise the file size limit (ulimit -f) or use another --checkpoint-dir",
    errno.EACCES: "make it writable for this user or use another --checkpoint-dir",
    errno.EPERM: "make it writable for this user or use another --checkpoint-dir",
    errno.EROFS: "mount it writable or use another --checkpoint-dir",
}


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where checkpoints go, when they are written (whichever interval comes first), and how many remain."""

    directory: Path
    every_steps: int | None
    every_seconds: float | None
    keep: int


@dataclass(frozen=True)
class JobIdentity:
    """What makes two runs the same job: with all of it equal they go through the same bits."""

    virtual_nodes: int
    seed: int
    batch_size: int
    dataset_size: int | None
    """Samples of an epoch; None for a stream."""
    signature: dict[str, Any]
    """Of the model and the optimizer: ``state.signature``."""

    def difference(self, other: JobIdentity) -> str | None:
        """The first thing in which this job (here) differs from another one (there); None if nothing."""
        for name, noun in (
            ("virtual_nodes", "the number of virtual nodes"),
            ("seed", "the seed"),
            ("batch_size", "the batch size"),
            ("dataset_size", "the number of samples in the dataset"),
        ):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{noun} is {_amount(ours)} here and {_amount(theirs)} there"
        return state.difference(self.signature, other.signature)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose state it is, and what its file must look like."""

    format: int
    step: int
    identity: JobIdentity
    state_size: int
    state_sha256: str
    torch: str


@dataclass(frozen=True)
class Found:
    """A complete checkpoint whose content was verified."""

    step: int
    path: Path
    identity: JobIdentity


# -- reading ------------------------------------------------------------------------------------------------


def find_newest(directory: Path, on_event: Callable[[str], None], identity: JobIdentity | None = None) -> Found | None:
    """The newest valid checkpoint; None where there is none. Torn and corrupt ones are skipped with an event.

    ConfigurationError if the newest one that can be read is of another job than ``identity``, if another
    version of the format wrote it, or if it may not be read.
    """
    for step, path in sorted(_complete(directory), reverse=True):
        try:
            manifest = _read_manifest(path, step)
            problem = identity and identity.difference(manifest.identity)
            if problem:
                raise ConfigurationError(
                    f"the checkpoint {path} belongs to another job: {problem}; use another "
                    "--checkpoint-dir, or go back to the old value"
                )
            _verify_state(path, manifest)
        except PermissionError as error:
            # To start again from nothing would be a worse answer than to ask for the permission.
            raise ConfigurationError(
                f"the checkpoint {path} may not be read ({error.strerror}); give this user the "
                "right to, or use another --checkpoint-dir"
            ) from None
        except ConfigurationError:
            raise  # It is a ValueError too, but no damage.
        except (OSError, ValueError) as error:
            on_event(f"skipped the damaged checkpoint {path}: {error}")
            continue
        if manifest.torch != torch.__version__:
            on_event(
                f"the checkpoint {path} was written by torch {manifest.torch} and this is "
                f"{torch.__version__}: from here on the bits may differ"
            )
        return Found(step, path, manifest.identity)
    return None


def load(found: Found) -> dict[str, Any]:
    """The tree that was saved, on the CPU and independent of the file; ValueError if it cannot be read."""
    try:
        with safe_open(found.path / STATE, "pt") as file:

            def read(n: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
                # A copy, because the file is mapped, and a remote disk could take that memory away.
                tensor: Tensor = file.get_tensor(f"t{n}").clone()
                if dtype not in _NATIVE:
                    tensor = tensor.view(dtype).view(shape)
                if tensor.dtype != dtype or tensor.shape != shape:
                    raise ValueError(f"tensor {n} is not what the skeleton says")
                return tensor

            tree: dict[str, Any] = state.decode(file.metadata()["skeleton"].encode(), read)
            return tree
    except (SafetensorError, OSError) as error:
        raise ValueError(f"the checkpoint {found.path} cannot be read: {error}") from error


def _complete(directory: Path) -> list[tuple[int, Path]]:
    try:
        entries = list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigurationError(
            f"the checkpoint directory {directory} cannot be read ({error.strerror}); use another --checkpoint-dir"
        ) from None
    matches = ((_COMPLETE.fullmatch(path.name), path) for path in entries)
    return [(int(match[1]), path) for match, path in matches if match]


def _read_manifest(path: Path, step: int) -> Manifest:
    try:
        envelope = msgspec.json.decode((path / MANIFEST).read_bytes(), type=_Envelope)
        content = bytes(envelope.manifest)
        if hashlib.sha256(content).hexdigest() != envelope.checksum:
            raise ValueError(f"the content of {MANIFEST} is not what was written (its checksum differs)")
        version = msgspec.json.decode(content, type=_Version).format
        manifest = msgspec.json.decode(content, type=Manifest) if version == FORMAT else None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{MANIFEST} cannot be understood: {error}") from None
    if manifest is None:
        raise ConfigurationError(
            f"the checkpoint {path} has format {version} and this version of VirtualFlow reads {FORMAT}; use "
            "the version that wrote it, or another --checkpoint-dir"
        )
    if manifest.step != step:
        raise ValueError(f"{MANIFEST} is of step {manifest.step}")
    return manifest


def _verify_state(path: Path, manifest: Manifest) -> None:
    with (path / STATE).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != manifest.state_size:
            raise ValueError(f"{STATE} has {size} bytes instead of {manifest.state_size}")
        if hashlib.file_digest(file, "sha256").hexdigest() != manifest.state_sha256:
            raise ValueError(f"the content of {STATE} is not what was written (its SHA-256 differs)")


class _Envelope(msgspec.Struct, frozen=True):
    """``manifest.json``: a flipped bit in it must not pass for another job or another format."""

    checksum: str
    """SHA-256 (hex) of the manifest as it stands in the file."""
    manifest: msgspec.Raw


class _Version(msgspec.Struct, frozen=True):
    format: int


def _amount(value: int | None) -> str:
    return "unknown (a stream)" if value is None else str(value)


# -- writing ------------------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writes the checkpoints of one job, one at a time, in a thread of its own.

    A write that fails costs nothing but itself: older checkpoints stay, ``failure`` and an event say what to
    do, and the next due point tries again. ``on_event`` is called from the writing thread too; ``clock``
    gives monotonic seconds.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        identity: JobIdentity,
        on_event: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.failure: str | None = None
        """Why the last write failed and what to do; None if it succeeded."""
        self.newest: int | None = None
        """The step of the newest checkpoint that this writer completed."""
        self._policy = policy
        self._identity = identity
        self._on_event = on_event
        self._clock = clock
        self._attempted_at = clock()
        self._attempted_step: int | None = None
        self._thread: threading.Thread | None = None
        self._tidy = False

    def check_writable(self) -> None:
        """Make and try the directory, remove what dead writers left; ConfigurationError if that fails."""
        directory = self._policy.directory
        probe = directory / f".probe.{secrets.token_hex(4)}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with probe.open("xb") as file:
                file.write(b"probe")
            probe.unlink()
        except OSError as error:
            if directory.is_dir():
                probe.unlink(missing_ok=True)
            advice = _ADVICE.get(error.errno or 0, "use another --checkpoint-dir")
            raise ConfigurationError(
                f"no checkpoint can be written to {directory} ({error.strerror}); {advice}"
            ) from None
        self._remove_leftovers()

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written now that ``step`` is complete."""
        if step == self._attempted_step:
            return False
        if self._policy.every_steps is not None and step % self._policy.every_steps == 0:
            return True
        seconds = self._policy.every_seconds
        return seconds is not None and self._clock() - self._attempted_at >= seconds

    def save(self, step: int, tree: dict[str, Any]) -> bool:
        """Copy the state and write it in the background; False, and skipped, while the last write goes on.

        ConfigurationError if the state holds something that cannot be saved.
        """
        self._attempted_at = self._clock()
        if not self.flush(0.0):
            self._on_event(
                f"skipped the checkpoint of step {step}, because that of step {self._attempted_step} is "
                "still being written; if this goes on, write them less often or to a faster disk"
            )
            return False
        self._attempted_step = step
        copy = state.snapshot(tree)
        # A daemon: a disk that hangs must not keep a worker from ending. Whoever wants the last write calls
        # flush().
        self._thread = threading.Thread(target=self._write, args=(step, copy), name="checkpoint", daemon=True)
        self._thread.start()
        return True

    def save_now(self, step: int, tree: dict[str, Any]) -> bool:
        """Write the state before returning (after a write that is still going on); whether it succeeded."""
        self.flush(None)
        if self.newest == step:
            return True
        self._attempted_at = self._clock()
        self._attempted_step = step
        self._write(step, state.snapshot(tree))
        return self.failure is None

    def flush(self, timeout: float | None) -> bool:
        """Wait for the write that is going on, at most ``timeout`` seconds; whether none goes on any more."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _write(self, step: int, tree: dict[str, Any]) -> None:
        directory = self._policy.directory
        failed_before = self.failure is not None
        failure: str | None = f"the writer of the checkpoint of step {step} ended with an error: see its traceback"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not self._tidy:
                self._remove_leftovers()
            write(directory, step, tree, self._identity)
            failure = None
        except (OSError, SafetensorError) as error:
            reason, advice = _explain(error)
            failure = (
                f"the checkpoint of step {step} was not written to {directory} ({reason}): {advice}; the "
                "older ones are intact, and the next one that is due tries again"
            )
        finally:
            self.failure = failure
            if failure is not None:
                self._on_event(failure)
        if failure is not None:
            return
        self.newest = step
        if failed_before:
            self._on_event(f"checkpoints are written again: that of step {step} is complete")
        self._prune(step)

    def _prune(self, newest: int) -> None:
        """Remove all but the last K, counted from the one just written.

        One with a higher number was found damaged, or this job would not have written a lower one: it never
        counts, and is replaced when the job gets there. An older one that is visibly torn does not count
        either.
        """
        kept = 1
        for step, path in sorted(_complete(self._policy.directory), reverse=True):
            if step >= newest:
                continue
            if kept < self._policy.keep and _looks_complete(path, step):
                kept += 1
                continue
            # Hidden first: deleting takes time, and nobody should find half a checkpoint meanwhile.
            doomed = _hidden(self._policy.directory, step)
            try:
                path.rename(doomed)
            except OSError as error:
                self._on_event(f"could not remove the old checkpoint {path} ({error.strerror}); remove it by hand")
                continue
            self._discard(doomed)

    def _remove_leftovers(self) -> None:
        for path in self._policy.directory.iterdir():
            if _HIDDEN.fullmatch(path.name) and _abandoned(path):
                self._discard(path)
        self._tidy = True

    def _discard(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            self._on_event(f"could not remove {path}, which is no longer needed; remove it by hand")


def write(directory: Path, step: int, tree: dict[str, Any], identity: JobIdentity) -> Path:
    """Write a checkpoint of a tree that nobody changes meanwhile; OSError or SafetensorError if that fails.

    The manifest's file is locked from before the first byte until after the rename: that is how another
    process knows a leftover of a dead writer from the work of a living one, on any machine that shares the
    directory.
    """
    final = directory / f"step-{step:08d}"
    if final.exists() and _is_valid(final, step, identity):
        return final  # It is the same state, and there is no way to swap two directories.
    temporary = _hidden(directory, step)
    temporary.mkdir()
    try:
        with (temporary / MANIFEST).open("xb") as manifest_file:
            _lock(manifest_file.fileno())
            size, checksum = _write_state(temporary / STATE, tree)
            # safetensors makes its file private; ours has the mode that the umask gave to the manifest.
            (temporary / STATE).chmod(os.fstat(manifest_file.fileno()).st_mode & 0o777)
            manifest = Manifest(FORMAT, step, identity, size, checksum, str(torch.__version__))
            content = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
            envelope = _Envelope(hashlib.sha256(content).hexdigest(), msgspec.Raw(content))
            manifest_file.write(msgspec.json.encode(envelope))
            manifest_file.flush()
            os.fsync(manifest_file.fileno())
            _sync_directory(temporary)
            if final.exists():
                doomed = _hidden(directory, step)
                final.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
            temporary.rename(final)
            _sync_directory(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # Gone already, unless something failed.
    return final


def _write_state(path: Path, tree: dict[str, Any]) -> tuple[int, str]:
    """Write the state and make sure that the disk has it; its size in bytes and its SHA-256 (hex)."""
    skeleton, tensors = state.encode(tree)
    rows = [t if t.dtype in _NATIVE else t.reshape(-1).view(torch.uint8) for t in tensors]
    save_file({f"t{n}": row for n, row in enumerate(rows)}, path, metadata={"skeleton": skeleton.decode()})
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _is_valid(path: Path, step: int, identity: JobIdentity) -> bool:
    """Whether a directory is a checkpoint of this step of this job, byte for byte what was written."""
    try:
        manifest = _read_manifest(path, step)
        _verify_state(path, manifest)
    except (OSError, ValueError):
        return False
    return identity.difference(manifest.identity) is None


def _looks_complete(path: Path, step: int) -> bool:
    """Whether the manifest is sound and the state has its size: cheap enough to ask after every write."""
    try:
        return (path / STATE).stat().st_size == _read_manifest(path, step).state_size
    except (OSError, ValueError):
        return False


def _abandoned(path: Path) -> bool:
    """Whether no living process works on a hidden directory."""
    try:
        # Writable, because NFS gives an exclusive lock to nobody else.
        with (path / MANIFEST).open("r+b") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise  # Without locks leftovers stay: ``_abandoned`` gets the same error.


def _hidden(directory: Path, step: int) -> Path:
    return directory / f".step-{step:08d}.{secrets.token_hex(4)}"


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(error: OSError | SafetensorError) -> tuple[str, str]:
    """What went wrong in words, and what to do about it."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        # safetensors wraps the operating system's error in its own, with the number at the end of the text.
        match = re.search(r"\(os error (\d+)\)", str(error))
        number = int(match[1]) if match else 0
    reason = os.strerror(number) if number else str(error)
    return reason, _ADVICE.get(number, "check that disk or use another --checkpoint-dir")

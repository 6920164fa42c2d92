"""Checkpoints while training goes on: when one is due, the thread that writes it, and which ones remain.

They are what is left when every worker dies, yet no step may wait for a disk or fail because of one. So the state is
copied between two steps and written beside the next ones (``checkpoint_format`` is what is written), and a write that
fails says what to do and is tried again.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from virtualflow._arguments import checked_class
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.messages import NO_GENERATION, Generation
from virtualflow.protocol.settings import CHECKPOINT_KEEP
from virtualflow.protocol.signatures import SigningKeys
from virtualflow.state import checkpoint_format as files
from virtualflow.state.checkpoint_format import JobIdentity
from virtualflow.state.checkpoint_order import Mark, choose_doomed, complete, hidden, highest_fence, volume_error
from virtualflow.state.checkpoint_shares import OwnShare, ShareFile, WrittenShare, collect_shares, write_share
from virtualflow.state.codec import snapshot
from virtualflow.state.sealed_manifest import UNSIGNED

_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
"""Seconds between the first two looks for the shares of others, which double, and between the last ones."""
_SEEN = 90.0
"""Seconds until a share that is written is seen by others: network storage may keep names in mind for a minute."""
_ADVICE = {
    errno.ENOSPC: "free some space there or use another --checkpoint-dir",
    errno.EDQUOT: "raise the quota, free some space there or use another --checkpoint-dir",
    errno.EFBIG: "raise the file size limit (ulimit -f) or use another --checkpoint-dir",
    errno.EACCES: "make it writable for this user or use another --checkpoint-dir",
    errno.EPERM: "make it writable for this user or use another --checkpoint-dir",
    errno.EROFS: "mount it writable or use another --checkpoint-dir",
}


@checked_class("vf.CheckpointPolicy")
@dataclass(frozen=True, init=False)
class CheckpointPolicy:
    """Where checkpoints go, when they are written (whichever interval comes first), and how many remain.

    Args:
        directory: of this job alone; it is made if need be.
        every_steps: so many steps apart.
        every_seconds: so many seconds apart; without any interval, the library's own.
        keep: the newest ones that remain.
        sign: the file of a private key (PEM, Ed25519 or P-256) that signs them. Then those alone are taken that it or a
            key of ``trust`` has signed.
        trust: the file of public keys (PEM) whose checkpoints are taken.

    Raises:
        ConfigurationError: there can be no such checkpoints.
    """

    directory: Path
    every_steps: int | None
    every_seconds: float | None
    keep: int
    sign: Path | None
    trust: Path | None

    def __init__(
        self,
        directory: Path | str,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int = CHECKPOINT_KEEP,
        sign: Path | str | None = None,
        trust: Path | str | None = None,
    ) -> None:
        path = _path(directory, "the directory")
        numbers: list[tuple[str, Any, Any, int]] = [("keep", keep, int, 1)]
        if every_steps is not None:
            numbers.append(("every_steps", every_steps, int, 1))
        if every_seconds is not None:
            numbers.append(("every_seconds", every_seconds, int | float, 0))
        for name, value, kind, least in numbers:
            if not isinstance(value, kind) or isinstance(value, bool) or not value >= least:
                what = "a whole number" if kind is int else "a number"
                raise ConfigurationError(f"{name} of checkpoints is {value!r}; it must be {what} of at least {least}")
        object.__setattr__(self, "directory", path)
        object.__setattr__(self, "every_steps", every_steps)
        object.__setattr__(self, "every_seconds", every_seconds)
        object.__setattr__(self, "keep", keep)
        object.__setattr__(self, "sign", None if sign is None else _path(sign, "sign"))
        object.__setattr__(self, "trust", None if trust is None else _path(trust, "trust"))


def _path(given: Path | str, what: str) -> Path:
    try:
        path = Path(given).absolute()  # the script may change its working directory
    except TypeError:
        raise ConfigurationError(f"{what} of checkpoints is {given!r}; it must be a path") from None
    if given == "":
        raise ConfigurationError(f"{what} of checkpoints is empty; it must be a path")
    return path


class WriterState(IntEnum):
    """How it stands with what one worker was last to write."""

    NONE = 0
    """It writes nothing."""
    DONE = 1
    WRITING = 2
    WAITING = 3
    """Its own is written, and others' shares are not there yet."""
    FAILED = 4


class _Barred(Exception):
    """A checkpoint is not to appear any more; the message says why."""


class CheckpointWriter:
    """Writes the checkpoints of one job, one at a time, in a thread of its own.

    A write that fails costs nothing but itself: older checkpoints stay, ``failure`` and an event say what to
    do, and the next due point tries again. ``on_event`` is called from the writing thread too, and so is
    ``on_attempt``, with the step and the failure of each write that has ended; ``clock`` gives monotonic seconds. For
    ``doubt`` see ``checkpoint_order.retained``.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        identity: JobIdentity,
        on_event: Callable[[str], None],
        clock: Callable[[], float],
        on_attempt: Callable[[int, str | None], None],
        doubt: int = 0,
        keys: SigningKeys = UNSIGNED,
    ) -> None:
        self.failure: str | None = None
        """Why the last write failed and what to do; None if it succeeded."""
        self.newest: int | None = None
        """The step of the newest checkpoint that this writer completed."""
        self.generation = NO_GENERATION
        """The one that this worker is in: the fencing number of what it writes from now on."""
        self.fenced_by = NO_GENERATION
        """The newest that was found to use the directory when a checkpoint was not to appear there any more."""
        self.trusted: int | None = None
        """States after this step may be wrong: no checkpoint of a later one is to appear. ``None``: all are right."""
        self._policy = policy
        self._doubt = doubt
        self._identity = identity
        self._keys = keys
        self._on_event = on_event
        self._clock = clock
        self._on_attempt = on_attempt
        self._attempted_at = clock()
        self._attempted_step: int | None = None
        self._thread: threading.Thread | None = None
        self._tidy = False
        self._share: WrittenShare | None = None
        """Which this worker has written of a checkpoint that is divided."""
        self._waits_in: Generation | None = None
        """The generation for whose shares it waits."""
        self._gives_up = threading.Event()

    def check_writable(self) -> None:
        """Make and try the directory, and remove what dead writers left, now or later.

        Raises:
            ConfigurationError: it cannot be written to, as a ``VolumeFailure`` if that may pass.
        """
        directory = self._policy.directory
        probe = directory / f".probe.{secrets.token_hex(4)}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with probe.open("xb") as file:
                file.write(b"probe")
            probe.unlink()
        except OSError as error:
            with contextlib.suppress(OSError):  # where nothing can be written, nothing can be removed
                probe.unlink(missing_ok=True)
            advice = _ADVICE.get(error.errno or 0, "use another --checkpoint-dir")
            sentence = f"no checkpoint can be written to {directory} ({error.strerror}); {advice}"
            raise volume_error(error, sentence) from None
        with contextlib.suppress(OSError):  # a volume that stalls just now is no reason to end; it is tried again
            self._remove_leftovers()

    def due(self, step: int) -> bool:
        if step == self._attempted_step:
            return False
        if self._policy.every_steps is not None and step % self._policy.every_steps == 0:
            return True
        seconds = self._policy.every_seconds
        return seconds is not None and self._clock() - self._attempted_at >= seconds

    def save(self, step: int, tree: dict[str, Any] | None, own: OwnShare | None = None) -> bool:
        """Copy the state and write it in the background; False, and skipped, while the last write goes on.

        Args:
            tree: the state, or what of it is in no share; ``None``: others write it.
            own: this worker's share of it; ``None``: it is not divided.

        Raises:
            ConfigurationError: the state holds something that cannot be saved.
        """
        self._attempted_at = self._clock()
        if not self.flush(0.0):
            self.skip(step)
            return False
        self._attempted_step = step
        copy, mark = snapshot(tree), Mark(self.generation, step)
        arguments = (mark, copy, own and own.copy(), 0 if own is None else own.of)
        self._gives_up.clear()
        # A daemon: a disk that hangs must not keep a worker from ending. Whoever wants the last write calls
        # flush().
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        return True

    def skip(self, step: int) -> None:
        """Write no checkpoint of a step, though one is due."""
        self._attempted_at = self._clock()
        self._on_event(
            f"skipped the checkpoint of step {step}, because that of step {self._attempted_step} is "
            "still being written; if this goes on, write them less often or to a faster disk"
        )

    def save_now(self, step: int, tree: dict[str, Any], shares: int = 0) -> bool:
        """Write the state before returning (after a write that is still going on); whether it succeeded.

        Args:
            shares: how many workers have written the rest of it already.
        """
        self.flush(None)
        if self.newest == step:
            return True
        self._gives_up.clear()
        self._attempted_at = self._clock()
        self._attempted_step = step
        self._write(Mark(self.generation, step), snapshot(tree), None, shares, _SEEN)
        return self.newest == step

    def save_share_now(self, step: int, own: OwnShare) -> bool:
        """Write this worker's share before returning; whether it succeeded."""
        self.flush(None)
        self._gives_up.clear()
        self._attempted_step = step
        self._write(Mark(self.generation, step), None, own.copy(), own.of)
        return self.failure is None

    def tell_state(self) -> WriterState:
        """How it stands with the last write; one that waits for members of another generation is given up."""
        if self._waits_in is not None and self._waits_in != self.generation:
            self.give_up()
            self.flush(None)
        if self.flush(0.0):
            return WriterState.DONE if self.failure is None else WriterState.FAILED
        return WriterState.WRITING if self._waits_in is None else WriterState.WAITING

    def give_up(self) -> None:
        """Let the write that goes on wait no more for shares of others."""
        self._gives_up.set()

    def flush(self, timeout: float | None) -> bool:
        """Wait for the write that is going on, at most ``timeout`` seconds; whether none goes on any more."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _write(
        self, mark: Mark, tree: dict[str, Any] | None, own: OwnShare | None, shares: int, patience: float | None = None
    ) -> None:
        directory, step = self._policy.directory, mark.step
        failed_before = self.failure is not None
        barred = False
        failure: str | None = f"the writer of the checkpoint of step {step} ended with an error: see its traceback"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not self._tidy:
                self._remove_leftovers()
            if own is not None:
                self._release_share()
                self._share = write_share(directory, mark, own, self._keys)
            if tree is not None:
                collect = partial(self._collect, mark, shares, patience) if shares else None
                files.write(directory, mark, tree, self._identity, lambda: self._allow(mark), self._keys, collect)
            failure = None
        except _Barred as error:
            barred, failure = True, f"the checkpoint of step {step} was not written to {directory}: {error}"
        except (OSError, SafetensorError) as error:
            reason, advice = _explain(error)
            failure = (
                f"the checkpoint of step {step} was not written to {directory} ({reason}): {advice}; the "
                "older ones are intact, and the next one that is due tries again"
            )
        except ValueError as error:  # what is there cannot be listed, or a share is not what its writer said
            failure = (
                f"the checkpoint of step {step} was not written: {error}; the older ones are intact, and the next one "
                "that is due tries again"
            )
        finally:
            self._waits_in = None
            if not barred:  # which is no trouble of the job's disk
                self.failure = failure
            if failure is not None:
                self._on_event(failure)
            elif tree is not None:
                self.newest = step
            if not barred and (failure is not None or tree is not None):
                self._on_attempt(step, failure)
        if tree is not None:
            self._release_share()
        if failure is not None or tree is None:
            return
        if failed_before:
            self._on_event(f"checkpoints are written again: that of step {step} is complete")
        self._prune(mark)

    def _collect(self, mark: Mark, shares: int, patience: float | None, into: Path) -> list[ShareFile]:
        self._waits_in = mark.fence
        limit, pause = math.inf if patience is None else self._clock() + patience, _PAUSE

        def wait() -> None:
            nonlocal pause
            if self._gives_up.wait(pause) or self._clock() > limit:
                raise _Barred("not all workers have written their shares of it")
            pause = min(2 * pause, _LONGEST_PAUSE)

        return collect_shares(self._policy.directory, into, mark, shares, wait, self._keys)

    def _release_share(self) -> None:
        share, self._share = self._share, None
        if share is not None:
            share.release()

    def _allow(self, mark: Mark) -> None:
        if self.trusted is not None and mark.step > self.trusted:
            raise _Barred(f"what came after step {self.trusted} may be wrong")
        self._check_fence()

    def _check_fence(self) -> None:
        """Keep a checkpoint from appearing where a newer generation has written or begun.

        What it begins or writes after this look makes the checkpoint come before its own, see ``checkpoint_order``.
        """
        highest = highest_fence(self._policy.directory)
        if highest > self.generation:
            self.fenced_by = highest
            raise _Barred(f"generation {highest} has gone on without this worker, which is of {self.generation}")

    def _prune(self, written: Mark) -> None:
        try:
            paths = dict(complete(self._policy.directory))
        except ConfigurationError as error:
            self._on_event(f"the checkpoint of step {written.step} is written, and no old one was removed: {error}")
            return

        def looks_complete(mark: Mark) -> bool:
            return files.looks_complete(paths[mark], mark.step, self._keys)

        for mark in choose_doomed(paths, written, self._policy.keep, looks_complete, self._doubt):
            # Hidden first: deleting takes time, and nobody should find half a checkpoint meanwhile.
            doomed = hidden(self._policy.directory, mark.step)
            try:
                paths[mark].rename(doomed)
            except FileNotFoundError:
                continue  # another generation has begun from it, or removed it
            except OSError as error:
                self._on_event(
                    f"could not remove the old checkpoint {paths[mark]} ({error.strerror}); remove it by hand"
                )
                continue
            self._discard(doomed)

    def _remove_leftovers(self) -> None:
        for path in self._policy.directory.iterdir():
            if files.is_leftover(path):
                self._discard(path)
        self._tidy = True

    def _discard(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            self._on_event(f"could not remove {path}, which is no longer needed; remove it by hand")


def _explain(error: OSError | SafetensorError) -> tuple[str, str]:
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        # safetensors wraps the operating system's error in its own, with the number at the end of the text.
        match = re.search(r"\(os error (\d+)\)", str(error))
        number = int(match[1]) if match else 0
    reason = os.strerror(number) if number else str(error)
    return reason, _ADVICE.get(number, "check that disk or use another --checkpoint-dir")

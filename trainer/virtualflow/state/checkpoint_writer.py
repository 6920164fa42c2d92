"""Checkpoints while training goes on: when one is due, the thread that writes it, and which ones remain.

They are what is left when every worker dies, yet no step may wait for a disk or fail because of one. So the state is
copied between two steps and written beside the next ones (``checkpoint_format`` is what is written), and a write that
fails says what to do and is tried again.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.settings import CHECKPOINT_KEEP
from virtualflow.state import checkpoint_format as files
from virtualflow.state.checkpoint_format import JobIdentity
from virtualflow.state.codec import snapshot

_ADVICE = {
    errno.ENOSPC: "free some space there or use another --checkpoint-dir",
    errno.EDQUOT: "raise the quota, free some space there or use another --checkpoint-dir",
    errno.EFBIG: "raise the file size limit (ulimit -f) or use another --checkpoint-dir",
    errno.EACCES: "make it writable for this user or use another --checkpoint-dir",
    errno.EPERM: "make it writable for this user or use another --checkpoint-dir",
    errno.EROFS: "mount it writable or use another --checkpoint-dir",
}


@dataclass(frozen=True, init=False)
class CheckpointPolicy:
    """Where checkpoints go, when they are written (whichever interval comes first), and how many remain.

    Args:
        directory: of this job alone; it is made if need be.
        every_steps: so many steps apart.
        every_seconds: so many seconds apart; without any interval, the library's own.
        keep: the newest ones that remain.

    Raises:
        ConfigurationError: there can be no such checkpoints.
    """

    directory: Path
    every_steps: int | None
    every_seconds: float | None
    keep: int

    def __init__(
        self,
        directory: Path | str,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int = CHECKPOINT_KEEP,
    ) -> None:
        try:
            path = Path(directory)
        except TypeError:
            raise ConfigurationError(f"the directory of checkpoints is {directory!r}; it must be a path") from None
        if directory == "":
            raise ConfigurationError("the directory of checkpoints is empty; it must be a path")
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


class CheckpointWriter:
    """Writes the checkpoints of one job, one at a time, in a thread of its own.

    A write that fails costs nothing but itself: older checkpoints stay, ``failure`` and an event say what to
    do, and the next due point tries again. ``on_event`` is called from the writing thread too, and so is
    ``on_attempt``, with the step and the failure of each write that has ended; ``clock`` gives monotonic seconds. For
    ``doubt`` see :func:`retained`.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        identity: JobIdentity,
        on_event: Callable[[str], None],
        clock: Callable[[], float],
        on_attempt: Callable[[int, str | None], None],
        doubt: int = 0,
    ) -> None:
        self.failure: str | None = None
        """Why the last write failed and what to do; None if it succeeded."""
        self.newest: int | None = None
        """The step of the newest checkpoint that this writer completed."""
        self._policy = policy
        self._doubt = doubt
        self._identity = identity
        self._on_event = on_event
        self._clock = clock
        self._on_attempt = on_attempt
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
        copy = snapshot(tree)
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
        self._write(step, snapshot(tree))
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
            files.write(directory, step, tree, self._identity)
            failure = None
        except (OSError, SafetensorError) as error:
            reason, advice = _explain(error)
            failure = (
                f"the checkpoint of step {step} was not written to {directory} ({reason}): {advice}; the "
                "older ones are intact, and the next one that is due tries again"
            )
        finally:
            self.failure = failure
            if failure is None:
                self.newest = step
            else:
                self._on_event(failure)
            self._on_attempt(step, failure)
        if failure is not None:
            return
        if failed_before:
            self._on_event(f"checkpoints are written again: that of step {step} is complete")
        self._prune(step)

    def _prune(self, newest: int) -> None:
        """Remove what :func:`retained` leaves out, counted from the one just written.

        One with a higher number was found damaged, or this job would not have written a lower one: it never
        counts, and is replaced when the job gets there. An older one that is visibly torn does not count
        either.
        """
        older = sorted((step, path) for step, path in files.complete(self._policy.directory) if step < newest)
        sound = [step for step, path in older if files.looks_complete(path, step)]
        kept = retained([*sound, newest], self._policy.keep, self._doubt)
        for step, path in older:
            if step in kept:
                continue
            # Hidden first: deleting takes time, and nobody should find half a checkpoint meanwhile.
            doomed = files.hidden(self._policy.directory, step)
            try:
                path.rename(doomed)
            except OSError as error:
                self._on_event(f"could not remove the old checkpoint {path} ({error.strerror}); remove it by hand")
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


def retained(steps: Sequence[int], keep: int, doubt: int) -> frozenset[int]:
    """Which checkpoints remain: the last ``keep``, and while newer ones are in doubt one that is not.

    Args:
        steps: of all that are sound, in order.
        keep: how many remain in any case.
        doubt: workers may find within so many steps that they hold different states; then all that was written since
            is of no use. So the newest one that is older stays, and the oldest of those that are not, which will take
            its place. 0: nobody compares.
    """
    kept = set(steps[-keep:])
    if doubt:
        agreed = [step for step in steps if step <= steps[-1] - doubt]
        kept.update(agreed[-1:], steps[len(agreed) : len(agreed) + 1])
    return frozenset(kept)


def _explain(error: OSError | SafetensorError) -> tuple[str, str]:
    """What went wrong in words, and what to do about it."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        # safetensors wraps the operating system's error in its own, with the number at the end of the text.
        match = re.search(r"\(os error (\d+)\)", str(error))
        number = int(match[1]) if match else 0
    reason = os.strerror(number) if number else str(error)
    return reason, _ADVICE.get(number, "check that disk or use another --checkpoint-dir")

"""Which of several checkpoints counts, and which may go: their names, and the order that these stand for.

The name of a checkpoint ends with the generation that wrote it or was the last to begin from it: its *fencing number*.
Checkpoints are in order of that number first and of their steps second (:class:`Mark`), so

- the highest counts: what a worker of an older generation still writes, however late and of whichever step, comes
  before all that a newer one has written or begun from;
- who begins from one renames it to its own generation (``checkpoint_format.adopt``). A writer of an older generation
  that is about to remove it has done so before, or fails: of two renames of one name, one succeeds;
- nobody removes or replaces what bears a higher number than its own.

None of this takes a lock or a clock. What it takes is that generations that count are numbered upward (``lineage``; a
coordinator counts its first one above what is in the directory), and that a rename happens as a whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.lineage import is_possible
from virtualflow.protocol.messages import NO_GENERATION, Generation

_COMPLETE = re.compile(r"step-(\d{8,15})(?:\.(\d{1,13})\.(\d{1,16}))?")
_HIDDEN = re.compile(r"\.step-\d{8,}\.[0-9a-f]{8}(\.\d+)?")


class Mark(NamedTuple):
    """What the name of a checkpoint says, and the order of checkpoints: the highest counts."""

    fence: Generation
    """Which generation wrote it, or was the last to begin from it."""
    step: int

    @property
    def name(self) -> str:
        fence = self.fence
        return f"step-{self.step:08d}" + (f".{fence.incarnation}.{fence.counter}" if fence != NO_GENERATION else "")

    @classmethod
    def read(cls, name: str) -> Mark | None:
        """The inverse of :attr:`name`; ``None``: this is no name of a checkpoint."""
        match = _COMPLETE.fullmatch(name)
        if match is None:
            return None
        fence = Generation(int(match[2] or 0), int(match[3] or 0))
        # What no generation can come behind would hide all that is written from now on.
        return cls(fence, int(match[1])) if fence == NO_GENERATION or is_possible(fence) else None


_PASSING = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOTCONN, errno.EHOSTDOWN}
    | {errno.EHOSTUNREACH, errno.ENOSPC, errno.EDQUOT, errno.EROFS}
)
"""What volumes fail with that work a moment later: network storage that is cut off, and full or remounted ones."""


class VolumeFailure(ConfigurationError):
    """A volume fails in a way that may pass."""

    of_script = False


def volume_error(error: OSError, sentence: str) -> ConfigurationError:
    """What to raise where a volume fails: :class:`VolumeFailure` if that may pass."""
    return VolumeFailure(sentence) if error.errno in _PASSING else ConfigurationError(sentence)


NO_CHECKPOINT = Mark(NO_GENERATION, -1)
"""Where there is none."""


def complete(directory: Path) -> list[tuple[Mark, Path]]:
    """What is named like a complete checkpoint, the one that counts first.

    Raises:
        ConfigurationError: the directory cannot be read, as a :class:`VolumeFailure` if that may pass.
    """
    try:
        entries = list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        sentence = (
            f"the checkpoint directory {directory} cannot be read ({error.strerror}); use another --checkpoint-dir"
        )
        raise volume_error(error, sentence) from None
    marks = ((Mark.read(path.name), path) for path in entries)
    return sorted(((mark, path) for mark, path in marks if mark is not None), reverse=True)


def highest_fence(directory: Path) -> Generation:
    """The highest number that a checkpoint there bears; ``NO_GENERATION``: none does."""
    found = complete(directory)
    return found[0][0].fence if found else NO_GENERATION


def choose_doomed(
    marks: Collection[Mark], written: Mark, keep: int, looks_complete: Callable[[Mark], bool], doubt: int = 0
) -> list[Mark]:
    """Which checkpoints may go now that ``written`` is there: all but those that :func:`retained` keeps.

    Those of higher steps stay: they were found damaged, or this job would not have written a lower one, and they go
    when it has got there again. One that does not look complete does not count among the last, and neither does one
    that comes after another of its step or a lower one: the job went back behind it. Where a newer generation has
    written or begun, all is for that one to judge.
    """
    if any(mark.fence > written.fence for mark in marks):
        return []
    older = [mark for mark in sorted(marks, reverse=True) if mark != written and mark.step <= written.step]
    sound = [written]
    for mark in older:
        if mark.step < sound[-1].step and looks_complete(mark):
            sound.append(mark)
    kept = retained([mark.step for mark in reversed(sound)], keep, doubt)
    return [mark for mark in older if mark not in sound or mark.step not in kept]


def retained(steps: Sequence[int], keep: int, doubt: int) -> frozenset[int]:
    """Which checkpoints remain: the last ``keep``, and while newer ones are in doubt one that is not.

    Args:
        doubt: workers may find within so many steps that they hold different states; then all that was written since
            is of no use. So the newest one that is older stays, and the oldest of those that are not, which will take
            its place. 0: nobody compares.
    """
    kept = set(steps[-keep:])
    if doubt:
        agreed = [step for step in steps if step <= steps[-1] - doubt]
        kept.update(agreed[-1:], steps[len(agreed) : len(agreed) + 1])
    return frozenset(kept)


def hidden(directory: Path, step: int) -> Path:
    """A name that no reader counts, for what is not complete yet or not wanted any more."""
    return directory / f".step-{step:08d}.{secrets.token_hex(4)}"


def hidden_share(directory: Path, mark: Mark, number: int) -> Path:
    """Such a name that all who write shares of one checkpoint know."""
    digits = hashlib.sha256(mark.name.encode()).hexdigest()[:8]
    return directory / f".step-{mark.step:08d}.{digits}.{number}"


def is_hidden(path: Path) -> bool:
    return _HIDDEN.fullmatch(path.name) is not None

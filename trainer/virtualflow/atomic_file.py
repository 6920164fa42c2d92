"""Files that are there as a whole or not at all: whoever reads one sees the former content or the new, never a part.

They survive the death of their writer, not a power cut: what has to (checkpoints) sees to its disk itself.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRIVATE = 0o600
"""The mode of a file that only its owner may read."""


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file in the place of the one that may be there; a device or a pipe is written to as it is.

    Args:
        path: of the file; what a link leads to is replaced, not the link.
        content: all of it.
        mode: as far as the umask allows.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = path.resolve()
    with _beside(target, content, mode) as temporary:
        temporary.replace(target)


def create_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file that must not be there yet; of several who try, one succeeds.

    Raises:
        FileExistsError: there is one.
        OSError: it cannot be written.
    """
    with _beside(path, content, mode) as temporary:
        os.link(temporary, path)


@contextmanager
def _beside(path: Path, content: bytes, mode: int) -> Iterator[Path]:
    """A hidden file in the same directory, because only within a file system can a file be moved at once."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)

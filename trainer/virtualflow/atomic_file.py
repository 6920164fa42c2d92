"""Files that are there as a whole or not at all: whoever reads one sees the former content or the new, never a part.
And files that end: a pipe or a device in the place of one, or a file without measure, keeps nobody waiting.

They survive the death of their writer; a power cut only if they are durable.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

PRIVATE = 0o600
"""The mode of a file that only its owner may read."""


def write_whole(path: Path, content: bytes, mode: int = 0o666, *, durable: bool = False) -> None:
    """Write a file in the place of the one that may be there; a device or a pipe is written to as it is.

    Args:
        path: of the file; what a link leads to is replaced, not the link.
        content: all of it.
        mode: as far as the umask allows.
        durable: the disk has the file and its name on return.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = path.resolve()
    with _beside(target, content, mode, durable) as temporary:
        temporary.replace(target)
    if durable:
        sync_directory(target.parent)


def create_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file that must not be there yet; of several who try, one succeeds."""
    with _beside(path, content, mode) as temporary:
        os.link(temporary, path)


def sync_directory(path: Path) -> None:
    """Make sure that the disk has the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading, and nothing else that a path may lead to.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most: int) -> bytes:
    """All of a file.

    Raises:
        OSError: it cannot be read, is no regular file, or larger.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))
    return content


@contextmanager
def _beside(path: Path, content: bytes, mode: int, durable: bool = False) -> Iterator[Path]:
    """A hidden file in the same directory, because only within a file system can a file be moved at once."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)

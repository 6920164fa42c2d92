"""Which errors tell of a machine and not of the script: one worker meets them, and the others can do without it. Pure.

A full disk, a missing file and a refused permission are none: every machine has them alike, or the user has to mend
them. Nor is a device out of memory: each virtual node takes the same, so every worker meets it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from virtualflow.errors import LoaderKilled

_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "ENOMEM", "ENXIO", "ENODEV", "EBADMSG", "EUCLEAN"),  # a disk, a mount, or memory
        *("ESTALE", "EREMOTEIO", "ENOTCONN", "ENOLINK", "ECOMM"),  # a file system on the network
        *("ETIMEDOUT", "ECONNRESET", "ECONNABORTED", "ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN"),
        "EHOSTUNREACH",
    )
    if hasattr(errno, name)
)

_KINDS = (MemoryError, LoaderKilled, TimeoutError, ConnectionResetError, ConnectionAbortedError)

_SENTENCES = (
    r"can't allocate memory: you tried to allocate"  # torch, of the host's
    r"|uncorrectable ECC error|uncorrectable NVLink error|hardware stack error"  # CUDA
    r"|DataLoader worker \(pid \d+\) is killed by signal"
    r"|terminated abruptly|abruptly died|unexpectedly terminated"  # pools of processes, Hugging Face's and joblib's too
)

_SENTENCE = re.compile(_SENTENCES)

_TOLD = re.compile(
    r"^(?:[\w.]+: \[Errno (?P<number>\d+)\]|OSError: .*\berrno = (?P<passing>\d+)"
    r"|(?:[\w.]+\.)?(?:_?(?:Array)?MemoryError|TimeoutError|ConnectionResetError|ConnectionAbortedError)\b(?!: \[Errno)"
    rf"|[\w.]+: .*(?:{_SENTENCES})"
    # Of a loader process that was shot, the connection may be found broken before its end is.
    r"|  File \"[^\"]*multiprocessing/(?:connection|reduction|resource_sharer)\.py\", .*\n(?: {4}.*\n){0,3}"
    r"(?P<broken>EOFError|BrokenPipeError|ConnectionRefusedError|FileNotFoundError)\b).*$",
    re.MULTILINE,
)
"""The last line of a traceback as text."""

_TOLD_IN_PASSING = re.compile(r"\berrno = (\d+)")
"""How HDF5 says it, whose ``OSError`` has no number."""


def is_machine_fault(error: BaseException) -> bool:
    """Whether ``error``, or what it came of, is a one-off fault of this machine or of what it is connected to."""
    return any(_is_fault(each) for each in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it came of, as a traceback shows it."""
    known: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in known:
        known.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _is_fault(error: BaseException) -> bool:
    text = str(error)
    if isinstance(error, _KINDS) or (isinstance(error, RuntimeError) and _SENTENCE.search(text) is not None):
        return True
    if isinstance(error, OSError):
        if error.errno is not None:
            return error.errno in _ERRNOS
        numbers = _TOLD_IN_PASSING.findall(text)
        if numbers:
            return int(numbers[-1]) in _ERRNOS
    # A loader process can hand over only the kind of an error, with its traceback as text.
    return "Original Traceback" in text and find_told_fault(text) is not None


def find_told_fault(text: str) -> str | None:
    """The line of a traceback, or of a chain of them, that tells of such a fault; ``None``: there is none."""
    for told in _TOLD.finditer(text):
        number = told["number"] or told["passing"]
        if number is None or int(number) in _ERRNOS:
            return told[0].strip().splitlines()[-1]
    return None

"""In each process of a campaign: a wall clock that can jump, storage that can fail, and a thread that can hang.

What it is to do stands in memory that it shares with the driver (:class:`Control`). It also writes down each rename on
the checkpoints' volume, with the moment at which its thread has last looked at what is there.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.checker import read_mark

WRITER = "checkpoint"
"""The library's thread that writes checkpoints."""
STALL = -1
"""In place of the number of an error: what is written takes until this is over."""
_LAYOUT = struct.Struct("=diii")


class Control:
    """What a process is to suffer; shared between it and the driver, which makes it before the process."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def _get(self, place: int) -> Any:
        return _LAYOUT.unpack_from(self._memory)[place]

    def _set(self, place: int, value: float) -> None:
        offset = (0, 8, 12, 16)[place]
        struct.pack_into("=d" if place == 0 else "=i", self._memory, offset, value)

    @property
    def ahead(self) -> float:
        """Seconds by which the wall clock is ahead."""
        return float(self._get(0))

    @ahead.setter
    def ahead(self, seconds: float) -> None:
        self._set(0, seconds)

    @property
    def storage(self) -> int:
        """The number of the error with which storage fails, :data:`STALL`, or 0."""
        return int(self._get(1))

    @storage.setter
    def storage(self, number: int) -> None:
        self._set(1, number)

    @property
    def hangs(self) -> bool:
        """Whether the training thread is to block for ever."""
        return bool(self._get(2))

    @hangs.setter
    def hangs(self, value: bool) -> None:
        self._set(2, int(value))

    @property
    def stalls(self) -> bool:
        """Whether something waits for the storage right now."""
        return bool(self._get(3))

    @stalls.setter
    def stalls(self, value: bool) -> None:
        self._set(3, int(value))

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


_control: Control | None = None


def hang_if_told() -> None:
    """Block for ever, if that is what the driver wants."""
    if _control is not None and _control.hangs:
        threading.Event().wait()


def install(control: Control, volume: Path, journal: Path) -> None:
    """Let this process suffer what ``control`` says; renames on ``volume`` go into ``journal``."""
    global _control  # noqa: PLW0603 - the training script asks without knowing it
    _control = control
    _real_time, _real_time_ns = time.time, time.time_ns
    time.time = lambda: _real_time() + control.ahead
    time.time_ns = lambda: _real_time_ns() + int(control.ahead * 1e9)
    real_fsync = os.fsync

    def fsync(fd: Any) -> None:
        while control.storage == STALL:
            control.stalls = True
            time.sleep(0.02)
        control.stalls = False
        _fail(control.storage)
        real_fsync(fd)

    os.fsync = fsync
    _Volume(control, volume, journal).install()


def _fail(number: int) -> None:
    if number > 0:
        raise OSError(number, os.strerror(number))


class _Volume:
    """The calls by which checkpoints appear and go."""

    def __init__(self, control: Control, volume: Path, journal: Path) -> None:
        self._control, self._volume = control, str(volume)
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._looked: dict[int, float] = {}
        """When each thread has last begun to list the volume."""
        self._own = (0, 0)
        """The generation of the last checkpoint that this process has written or begun from."""
        self._number = 0

    def install(self) -> None:
        """Stand between this process and its operating system."""
        self._list = os.listdir
        for name in ("listdir", "scandir"):
            setattr(os, name, self._looking(getattr(os, name)))
        os.rename = self._renaming(os.rename)
        real_mkdir = os.mkdir

        def mkdir(path: Any, *arguments: Any, **options: Any) -> None:
            if self._concerns(path):
                _fail(self._control.storage)
            real_mkdir(path, *arguments, **options)

        os.mkdir = mkdir

    def _concerns(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._volume)

    def _looking(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any = ".") -> Any:
            if self._concerns(path):
                if self._control.storage != 5:  # what is read comes from a cache; a stale handle is no handle
                    _fail(self._control.storage)
                if os.fspath(path) == self._volume:
                    self._looked[threading.get_ident()] = time.monotonic()
                    self._note_left_behind()
            return real(path)

        return look

    def _note_left_behind(self) -> None:
        """Write it down if a checkpoint is about to appear, and there is one of a newer generation."""
        marks = [mark for name in self._list(self._volume) if (mark := read_mark(name)) is not None]
        highest = max(marks, default=((0, 0), 0))[0]
        if threading.current_thread().name == WRITER and highest > self._own > (0, 0):
            self._number += 1
            self._write(left_behind=time.monotonic())

    def _renaming(self, real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **options: Any) -> None:
            if not self._concerns(source):
                real(source, target, **options)
                return
            _fail(self._control.storage)
            self._number += 1
            looked = self._looked.get(threading.get_ident())
            self._write(at=time.monotonic(), source=Path(source).name, target=Path(target).name, looked=looked)
            real(source, target, **options)
            self._write(done=time.monotonic())
            mark = read_mark(Path(target).name)
            self._own = self._own if mark is None else mark[0]

        return rename

    def _write(self, **values: Any) -> None:
        os.write(self._journal, (json.dumps({"number": self._number, **values}) + "\n").encode())

"""Weights & Biases, offline: the file of a run, as ``wandb sync`` reads it, with every step once.

The writer of wandb itself keeps some seconds of a run in memory, which are lost with a worker that is killed. So the
leader writes the file, record by record, of wandb's own messages. Whoever comes to lead copies what its predecessor has
written, up to the first step that it writes again, and lets the copy take the place of that file in one rename: what
the predecessor writes late goes to a file that has no name any more. A record that was torn is not copied.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from virtualflow._arguments import checked_class
from virtualflow.atomic_file import write_whole
from virtualflow.errors import ConfigurationError
from virtualflow.worker.tracker import OURS, Entry, NotWritten

_HEAD = b":W&B\xe1\xbe\x00"
_BLOCK, _RECORD = 32_768, struct.Struct("<IHB")
"""Of LevelDB's log format: no record's part crosses a block, and each has a checksum, a length and a kind."""
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_FENCE = "virtualflow-generation"
"""The file beside the run's own that names the newest generation that has written."""


@checked_class("WeightsAndBiases")
class WeightsAndBiases:
    """Writes the offline run ``directory/wandb/offline-run-TIME-ID``, ID being ``run.id``; ``wandb sync`` uploads it.

    Args:
        project: of the run.
        directory: on storage that all workers have.
        name: of the run; wandb makes one up without it.

    Raises:
        ConfigurationError: wandb is not installed.
    """

    fenced = False

    def __init__(self, project: str, *, directory: Path | str = ".", name: str | None = None) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ConfigurationError(
                "virtualflow.integrations.trackers.WeightsAndBiases needs the package wandb, which is not here: pip "
                "install wandb"
            )
        self._project, self._name = project, name
        self._directory = Path(directory).absolute() / "wandb"
        self._folder = self._directory
        self._run = ""
        self._log: _Log | None = None

    def open(self, run: str, fence: tuple[int, int]) -> None:
        """Find the folder of the run, or make it; a file that is still this worker's is written on."""
        self._run = run
        found = sorted(self._directory.glob(f"offline-run-*-{run}"))
        new = self._directory / time.strftime(f"offline-run-%Y%m%d_%H%M%S-{run}")
        self._folder = found[0] if found else new
        self._folder.mkdir(parents=True, exist_ok=True)
        newest, ours = self._folder / _FENCE, "{:016d}.{:016d}".format(*fence)
        if newest.exists() and newest.read_text() > ours:
            raise NotWritten(f"another leader, of generation {newest.read_text()}, writes {self._folder}")
        write_whole(newest, ours.encode())

    def write(self, entries: Sequence[Entry]) -> None:
        """Append the records of steps, and see that they are on the disk."""
        if self._log is not None and not self._log.names(self._path):
            self.close()
            raise NotWritten(f"another leader has taken the place of {self._path}")
        if self._log is None:
            self._log = self._take_over(entries[0])
        self._log.append([*map(_history, entries), _summary(entries[-1])])

    def close(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def end(self) -> None:
        from wandb.proto.wandb_internal_pb2 import Record, RunExitRecord

        if self._log is not None:
            self._log.append([Record(exit=RunExitRecord(exit_code=0))])

    @property
    def _path(self) -> Path:
        return self._folder / f"run-{self._run}.wandb"

    def _take_over(self, first: Entry) -> _Log:
        """A copy of what is there before a step, in the place of it."""
        new = self._path.with_suffix(".new")
        log = _Log(new)
        there = list(_before(self._path, first.step)) if self._path.exists() else []
        try:
            log.append(there or self._beginning(first))
            os.replace(new, self._path)
        except OSError:
            log.close()
            raise
        return log

    def _beginning(self, first: Entry) -> list[Any]:
        import wandb
        from wandb.proto.wandb_internal_pb2 import HeaderRecord, Record, RunRecord, VersionInfo

        run = RunRecord(run_id=self._run, project=self._project, display_name=self._name or "")
        run.start_time.FromSeconds(int(first.at))
        run.telemetry.feature.offline = True
        run.telemetry.cli_version = wandb.__version__
        return [Record(header=HeaderRecord(version_info=VersionInfo(producer=wandb.__version__))), Record(run=run)]


# --- records ----------------------------------------------------------------------------------------------------------


def _history(entry: Entry) -> Any:
    from wandb.proto.wandb_internal_pb2 import HistoryItem, HistoryRecord, HistoryStep, Record

    items = [HistoryItem(nested_key=[name], value_json=value) for name, value in _values(entry)]
    return Record(history=HistoryRecord(item=items, step=HistoryStep(num=entry.step)))


def _summary(entry: Entry) -> Any:
    from wandb.proto.wandb_internal_pb2 import Record, SummaryItem, SummaryRecord

    items = [SummaryItem(nested_key=[name], value_json=value) for name, value in _values(entry)]
    return Record(summary=SummaryRecord(update=items))


def _values(entry: Entry) -> Iterator[tuple[str, str]]:
    for name, value in entry.numbers.items():
        yield name, json.dumps(value)
    if entry.mark is not None:
        yield f"{OURS}changes", json.dumps(entry.mark)
    yield "_timestamp", json.dumps(entry.at)
    yield "_step", str(entry.step)


def _before(path: Path, step: int) -> Iterator[Any]:
    """The records of a file before those of a step, without what says that it had ended."""
    for record in read(path):
        kind = record.WhichOneof("record_type")
        if kind == "history" and record.history.step.num >= step:
            return
        if kind != "exit":
            yield record


def read(path: Path) -> Iterator[Any]:
    """The records of a file, up to one that is not whole."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), len(_HEAD), b""
    while True:
        if _BLOCK - place % _BLOCK < _RECORD.size:
            place += _BLOCK - place % _BLOCK
        if place + _RECORD.size > len(data):
            return
        checksum, length, kind = _RECORD.unpack_from(data, place)
        part = data[place + _RECORD.size : place + _RECORD.size + length]
        if len(part) < length or checksum != _checksum(kind, part):
            return
        place += _RECORD.size + length
        parts = part if kind in (_WHOLE, _FIRST) else parts + part
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(parts)


def _checksum(kind: int, part: bytes) -> int:
    return zlib.crc32(bytes([kind]) + part)


class _Log:
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._place = 0
        self._number = 0

    def append(self, records: Iterable[Any]) -> None:
        data = b"" if self._place else _HEAD
        for record in records:
            self._number += 1
            record.num = self._number
            data += self._framed(record.SerializeToString(), self._place + len(data))
        self._place += len(data)
        while data:
            data = data[os.write(self._descriptor, data) :]
        os.fsync(self._descriptor)

    @staticmethod
    def _framed(record: bytes, place: int) -> bytes:
        framed, begun = b"", False
        while True:
            room = _BLOCK - (place + len(framed)) % _BLOCK
            if room < _RECORD.size:
                framed += bytes(room)
                room = _BLOCK
            part, record = record[: room - _RECORD.size], record[room - _RECORD.size :]
            kind = (_MIDDLE if begun else _FIRST) if record else (_LAST if begun else _WHOLE)
            framed += _RECORD.pack(_checksum(kind, part), len(part), kind) + part
            if not record:
                return framed
            begun = True

    def names(self, path: Path) -> bool:
        ours = os.fstat(self._descriptor)
        try:
            there = path.stat()
        except FileNotFoundError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def close(self) -> None:
        os.close(self._descriptor)

"""TensorBoard: each generation's leader writes an event file of its own, and takes back what it writes again.

A reader takes the files of a folder in the order of their names. Here these bear the fencing number, which only grows.
A file begins with the mark of a restart (as ``purge_step`` of torch's ``SummaryWriter`` makes it), at which every
reader forgets the steps from there on. So a leader needs to know nothing of what is there: what a former one has
written before it was lost is forgotten and written again, also a record that was torn; and so is what it writes late,
since its file comes before. What is behind the mark was noted by all workers (``worker/tracking``).
"""

from __future__ import annotations

import importlib.util
import io
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from virtualflow._arguments import checked_class
from virtualflow.errors import ConfigurationError
from virtualflow.worker.tracker import OURS, Entry

_FORMAT = "brain.Event:2"
"""The first version in which a reader obeys marks of a restart."""


@checked_class("TensorBoard")
class TensorBoard:
    """Writes a run into the folder ``directory/ID``, ID being ``run.id``.

    Args:
        directory: that TensorBoard is to show, on storage that all workers have.

    Raises:
        ConfigurationError: TensorBoard is not installed.
    """

    fenced = True

    def __init__(self, directory: Path | str) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigurationError(
                "virtualflow.integrations.trackers.TensorBoard needs the package tensorboard, which is not here: "
                "pip install tensorboard"
            )
        self._directory = Path(directory).absolute()
        self._folder, self._fence = self._directory, (0, 0)
        self._descriptor: int | None = None

    def open(self, run: str, fence: tuple[int, int]) -> None:
        """Begin a file, once it is known with which step."""
        self.close()
        self._folder, self._fence = self._directory / run, fence

    def write(self, entries: Sequence[Entry]) -> None:
        """Append the events of steps, and see that they are on the disk."""
        events = [event for entry in entries for event in _events(entry)]
        if self._descriptor is None:
            self._descriptor = self._begin()
            events = [*_beginning(entries[0].step), *events]
        data = _records(events)
        while data:
            data = data[os.write(self._descriptor, data) :]
        os.fsync(self._descriptor)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def end(self) -> None:
        """There is nothing to mark."""

    def _begin(self) -> int:
        """A new file behind all that there are; a second one of a generation is behind the first."""
        self._folder.mkdir(parents=True, exist_ok=True)
        generation = "{:016d}.{:016d}".format(*self._fence)
        last = max((int(path.name.rsplit(".", 1)[1]) for path in self._folder.glob(f"*.{generation}.*")), default=0)
        path = self._folder / f"events.out.tfevents.{generation}.{last + 1:04d}"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)


def _beginning(step: int) -> Iterator[Any]:
    """What a file begins with: whatever other files before it have from this step on is forgotten."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    yield Event(wall_time=time.time(), file_version=_FORMAT)
    yield Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))


def _events(entry: Entry) -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event
    from torch.utils.tensorboard.summary import scalar, text

    for name, value in entry.numbers.items():
        yield Event(wall_time=entry.at, step=entry.step, summary=scalar(name, value))  # type: ignore[no-untyped-call]
    if entry.mark is not None:
        marked = text(f"{OURS}changes", entry.mark)  # type: ignore[no-untyped-call]
        yield Event(wall_time=entry.at, step=entry.step, summary=marked)


def _records(events: Sequence[Any]) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()

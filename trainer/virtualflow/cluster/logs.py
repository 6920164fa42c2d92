"""Lines of several workers as one log, by the time at which they were written."""

from __future__ import annotations

import heapq
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from virtualflow.errors import VirtualFlowError

LOOK_SECONDS = 2.0
"""Between two looks for workers that are new, while a log is followed."""

STAMP = re.compile(r"\d{4}-\d\d-\d\dT")
"""How a time of RFC 3339 begins."""


class BrokenOff(Exception):
    """A stream has ended before its log has."""


class Line(NamedTuple):
    """A line of a worker."""

    time: str
    """As the kubelet has it (RFC 3339 with nanoseconds): in the order of their letters they are in that of time."""
    worker: str
    text: str

    @classmethod
    def read(cls, worker: str, stamped: str, *, before: str = "") -> Line:
        """Take the time off a line that the kubelet has put it before.

        What the kubelet says instead of a log that is not on its node any more has no time; it gets that of the line
        before it, and stays whole.
        """
        time, _, text = stamped.partition(" ")
        return cls(time, worker, text) if STAMP.match(time) else cls(before, worker, stamped)


def merged(logs: Mapping[str, str]) -> Iterator[Line]:
    """All lines of the logs of workers, by time; lines of one worker stay in their order."""

    def lines(worker: str, log: str) -> Iterator[Line]:
        time = ""
        for stamped in log.splitlines():
            line = Line.read(worker, stamped, before=time)
            time = line.time
            yield line

    yield from heapq.merge(*(lines(worker, log) for worker, log in logs.items()), key=lambda line: line.time)


def followed(
    workers: Callable[[], Mapping[str, bool]],
    stream: Callable[[str, str | None], Iterator[str]],
    finished: Callable[[], bool],
) -> Iterator[Line]:
    """Lines as they come, of all workers that there are and that come, until the job is over and all has been read.

    Args:
        workers: which pods there are, and whether each may still write.
        stream: lines of one, from the time that is given (some earlier ones may come again); it ends with the worker,
            or earlier; then it may raise :class:`BrokenOff`, and is read again, also if the worker has ended.
        finished: whether the job is over.
    """
    found: queue.SimpleQueue[Line | VirtualFlowError] = queue.SimpleQueue()
    readers: dict[str, threading.Thread] = {}
    latest: dict[str, str] = {}
    unstamped: dict[str, str] = {}
    """What the kubelet has said of a log that it cannot read; it says so at each reading."""
    whole: set[str] = set()
    """Those that had ended when the latest reading of their log began."""

    def read(worker: str) -> None:
        since = latest.get(worker)
        try:
            for stamped in stream(worker, since):
                line = Line.read(worker, stamped, before=latest.get(worker, ""))
                if line.text == stamped:
                    if unstamped.get(worker) != stamped:
                        unstamped[worker] = stamped
                        found.put(line)
                elif since is None or line.time > since:
                    latest[worker] = line.time
                    found.put(line)
        except BrokenOff:
            whole.discard(worker)
        except VirtualFlowError as error:
            found.put(error)

    def take(line: Line | VirtualFlowError) -> Line:
        if isinstance(line, VirtualFlowError):
            raise line
        return line

    def drain(seconds: float) -> Iterator[Line]:
        """What comes in these seconds, however much, and what is there by then."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                yield take(found.get(timeout=left))
            except queue.Empty:
                return
        for _ in range(found.qsize()):
            yield take(found.get())

    while True:
        over = finished()
        here = workers()
        for worker, runs in here.items():
            if worker not in whole and not (worker in readers and readers[worker].is_alive()):
                if not runs:
                    whole.add(worker)
                readers[worker] = threading.Thread(target=read, args=(worker,), name=f"log of {worker}", daemon=True)
                readers[worker].start()
        yield from drain(LOOK_SECONDS)
        if over and not any(reader.is_alive() for reader in readers.values()) and whole >= here.keys():
            yield from drain(0.0)
            return

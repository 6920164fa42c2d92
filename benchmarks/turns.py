"""Turns: processes of several sides live at once, and one side at a time makes steps while the others wait.

A machine's speed changes from minute to minute. Whole runs, one after the other, would compare minutes; here all sides
are warm, each makes a second's worth of steps, then the next one, round by round, and the ratio is taken in each round.
Waiting costs nothing: a process that waits is blocked in a read.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from benchmarks.jobs import ROOT, environment, running

ADDRESS = "BENCHMARK_TURNS"
SIDE = "BENCHMARK_SIDE"
START_LIMIT = 120
"""Seconds for all processes to be there."""
TURN_LIMIT = 300
"""Seconds that a turn may take."""
END_LIMIT = 120
"""Seconds for a process to end after its last turn."""
WARM_UP = (5, 50)
"""Steps of the two turns before those that count: a statistical worker tries micro-batches in its first 48."""
LEAST = 3
"""Steps in a turn."""


class Turns:
    """A process's place in the queue: ask for the next turn, make that many steps, say how long they took."""

    def __init__(self) -> None:
        host, _, port = os.environ[ADDRESS].rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=START_LIMIT)
        self._socket.settimeout(None)  # for as long as the others take; it ends with the connection
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        self._say({"side": os.environ[SIDE]})

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()

    def _say(self, message: object) -> None:
        self._lines.write(json.dumps(message) + "\n")
        self._lines.flush()

    def wait(self) -> int:
        """How many steps to make now; 0 when it is over."""
        line = self._lines.readline()
        return int(line) if line else 0

    def done(self, seconds: float) -> None:
        """The steps took so long here."""
        self._say({"seconds": seconds})


class Pace:
    """Turns as a training loop sees them: ``while pace.goes_on(): step()``."""

    def __init__(self, turns: Turns, clock: Callable[[], float] = time.perf_counter) -> None:
        self._turns, self._clock = turns, clock
        self._left = 0
        self._began: float | None = None

    def goes_on(self) -> bool:
        """Called before each step, and once after the last: whether to make one more. It waits between turns."""
        if self._left == 0:
            if self._began is not None:
                self._turns.done(self._clock() - self._began)
            self._left = self._turns.wait()
            self._began = self._clock()
            if self._left == 0:
                return False
        self._left -= 1
        return True


@dataclass
class Side:
    """One side of a comparison."""

    name: str
    commands: Sequence[Sequence[str]]
    """The processes to start; a job of the command line is one that starts its workers."""
    workers: int
    """How many processes will ask for turns."""
    variables: Sequence[Mapping[str, str | int]] = ()
    """Additional environment of each command."""
    places: list[IO[str]] = field(default_factory=list)

    def start(self, address: str, log: IO[str]) -> list[subprocess.Popen[str]]:
        """Start its processes."""
        variables = self.variables or [{}] * len(self.commands)
        return [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(**{**more, ADDRESS: address, SIDE: self.name}),
                stdout=log,
                stderr=log,
                text=True,
            )
            for command, more in zip(self.commands, variables, strict=True)
        ]

    def turn(self, steps: int) -> float:
        """Let it make so many steps; the seconds of its slowest worker.

        Raises:
            ConnectionError: one of its processes is gone.
        """
        for place in self.places:
            place.write(f"{steps}\n")
            place.flush()
        lines = [place.readline() for place in self.places]
        if not all(lines):
            raise ConnectionError(f"a process of {self.name} ended in its turn")
        return max(float(json.loads(line)["seconds"]) for line in lines)

    def stop(self) -> None:
        """Let its processes end."""
        for place in self.places:
            place.write("0\n")
            place.flush()


def compare(
    sides: Sequence[Side], rounds: int, seconds: float, warm_up: Sequence[int] = WARM_UP
) -> tuple[int, dict[str, list[float]]]:
    """Let the sides take turns.

    Args:
        sides: at least one.
        rounds: turns of each side that count.
        seconds: about how long a turn is to take.
        warm_up: steps of the turns before those that count.

    Returns:
        Steps in a turn, and each side's milliseconds a step, round by round.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log"
        try:
            with path.open("a") as log, socket.create_server(("127.0.0.1", 0)) as server:
                address = f"127.0.0.1:{server.getsockname()[1]}"
                started = [process for side in sides for process in side.start(address, log)]
                with running(*started):
                    try:
                        with _places(server, sides):
                            found = _rounds(sides, rounds, seconds, warm_up)
                        _end(started)
                    except ConnectionError:
                        _await_an_end(started)
                        raise
                    return found
        except (ConnectionError, TimeoutError) as error:
            sys.exit(f"{error}\n{path.read_text()[-8_000:]}")


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """See that all have ended by themselves, and well.

    Raises:
        ConnectionError: one has failed, or does not end.
    """
    for process in processes:
        try:
            code = process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            raise ConnectionError(f"{process.args!r}: {'does not end' if code is None else f'exit code {code}'}")


def _await_an_end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """A connection is lost before its process has said why: wait until that has ended."""
    limit = time.monotonic() + END_LIMIT
    while all(process.poll() is None for process in processes) and time.monotonic() < limit:
        time.sleep(0.02)


@contextmanager
def _places(server: socket.socket, sides: Sequence[Side]) -> Iterator[None]:
    """Take in all workers; let them end, and wait for it, after the block."""
    by_name = {side.name: side for side in sides}
    server.settimeout(START_LIMIT)
    with ExitStack() as stack:
        for _ in range(sum(side.workers for side in sides)):
            connection = stack.enter_context(server.accept()[0])
            connection.settimeout(TURN_LIMIT)
            place: IO[str] = stack.enter_context(connection.makefile("rw", encoding="utf-8"))
            by_name[json.loads(place.readline())["side"]].places.append(place)
        yield
        for side in sides:
            side.stop()
        for side in sides:
            for place in side.places:
                place.readline()  # its end


def _rounds(
    sides: Sequence[Side], rounds: int, seconds: float, warm_up: Sequence[int]
) -> tuple[int, dict[str, list[float]]]:
    for steps in warm_up:
        took = [side.turn(steps) / steps for side in sides]
    steps = max(LEAST, round(seconds / statistics.median(took)))
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds):
        # There and back, so that a machine that becomes slower or faster does so to all sides alike.
        for side in sides if number % 2 == 0 else sides[::-1]:
            times[side.name].append(1_000 * side.turn(steps) / steps)
    return steps, times

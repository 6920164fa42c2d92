"""Processes of a campaign's job: forked from the driver, which has imported torch, into the namespace of a host.

So a worker is there in a moment, as a start of Python with torch would cost more than all that it goes through here.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from faults.hosts import Host
from faults.injected import Control, install

_NETWORK = 0x4000_0000  # CLONE_NEWNET


@dataclass
class Running:
    """A process, where it runs, and what it suffers."""

    name: str
    host: Host
    pid: int
    control: Control
    confirmed: set[str] = field(default_factory=set)
    code: int | None = None
    """How it has ended; negative: by that signal."""

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it lives."""
        if self.lives:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it, and wait until it has ended."""
        if self.lives:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def run_script(path: Path, *arguments: str) -> Callable[[], object]:
    """What a worker does."""

    def run() -> None:
        sys.argv = [str(path), *arguments]
        runpy.run_path(str(path), run_name="__main__")

    return run


def run_command(*arguments: str) -> Callable[[], object]:
    """What ``virtualflow ARGUMENTS`` does."""

    def run() -> object:
        from virtualflow.launcher.cli import main

        return main(arguments)

    return run


def fork(
    name: str,
    host: Host,
    work: Callable[[], object],
    *,
    environment: Mapping[str, str],
    out: Path,
    volume: Path,
    journal: Path,
) -> Running:
    """Start a process on a host. What ``work`` returns or raises becomes its exit code."""
    control = Control()
    pid = os.fork()
    if pid:
        return Running(name, host, pid, control)
    code = 70
    try:
        _enter(host)
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.environ.update(environment)
        install(control, volume, journal)
        code = _code_of(work)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _enter(host: Host) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{host.name}", os.O_RDONLY)
    if library.setns(descriptor, _NETWORK):
        raise OSError(ctypes.get_errno(), f"cannot enter {host.name}")
    os.close(descriptor)


def _code_of(work: Callable[[], object]) -> int:
    """Run it as a program; the exit code."""
    try:
        found = work()
    except SystemExit as end:
        found = end.code
    except BaseException as error:  # noqa: BLE001 - as the interpreter itself does at the end of a script
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if found is None or isinstance(found, int):
        return found or 0
    traceback.print_exc()
    return 1

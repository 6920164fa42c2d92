"""Processes of a campaign's job: forked from the driver, which has imported torch, into the namespace of a host.

So a worker is there in a moment, as a start of Python with torch would cost more than all that it goes through here.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults.injected import Control, install

# Hosts of a campaign's job: network namespaces on one bridge, and what can be done to their lines.
#
# Everything lives in the job's own namespaces, and ends with it.

NET = "10.77.0"
SERVICE, PORT = f"{NET}.200", 7_000


def ip(*words: str) -> None:
    """Run iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def make_bridge() -> None:
    """The driver reaches all hosts over it."""
    ip("link", "set", "lo", "up")
    ip("link", "add", "hub", "type", "bridge")
    ip("addr", "add", f"{NET}.254/24", "dev", "hub")
    ip("link", "set", "hub", "up")


class Host:
    """A network namespace with one line to the bridge."""

    def __init__(self, number: int) -> None:
        self.name, self.address = f"h{number}", f"{NET}.{number}"
        self.line = f"v{number}"
        ip("netns", "add", self.name)
        ip("link", "add", self.line, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self.line, "master", "hub", "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            ip("-n", self.name, "link", "set", link, "up")

    def run(self, *words: str, text: str = "") -> None:
        """Run a command there, which reads ``text``."""
        command = ["ip", "netns", "exec", self.name, *words]
        subprocess.run(command, input=text.encode(), check=True, capture_output=True, timeout=30)

    def serve(self) -> None:
        """The coordinator's address is here, for whom it leads here."""
        ip("-n", self.name, "addr", "add", f"{SERVICE}/32", "dev", "lo")

    def lead(self, to: Host) -> None:
        """The coordinator's address leads there from now on."""
        ip("-n", self.name, "route", "replace", f"{SERVICE}/32", "via", to.address)

    def drop(self, directions: Sequence[str] = ("INPUT", "OUTPUT"), share: float = 1.0) -> None:
        """Lose a share of all packets that come (``INPUT``) and go."""
        chance = "" if share == 1.0 else f"-m statistic --mode random --probability {share} "
        sides = {"INPUT": "-i", "OUTPUT": "-o"}
        self._filter([f"-A {direction} {sides[direction]} eth0 {chance}-j DROP" for direction in directions])

    def part_from(self, others: Sequence[Host]) -> None:
        """Lose all from and to others, but not what goes by the coordinator's address."""
        for_each = ("-A INPUT -s {} -j DROP", "-A OUTPUT -d {} -j DROP")
        self._filter([rule.format(other.address) for other in others for rule in for_each])

    def _filter(self, rules: Sequence[str]) -> None:
        self.run("iptables-restore", "-w", "--noflush", text="\n".join(["*filter", *rules, "COMMIT", ""]))

    def slow(self) -> None:
        """1 Mbit/s in both directions."""
        shape = ("tbf", "rate", "1mbit", "burst", "32kbit", "latency", "400ms")
        self.run("tc", "qdisc", "replace", "dev", "eth0", "root", *shape)
        subprocess.run(["tc", "qdisc", "replace", "dev", self.line, "root", *shape], check=True, capture_output=True)

    def reconnect(self) -> None:
        """Lose nothing any more."""
        self.run("iptables", "-w", "-F")

    def heal(self) -> None:
        """A whole line again, and as fast as before."""
        self.reconnect()
        for words in (
            ["ip", "netns", "exec", self.name, "tc", "qdisc", "del", "dev", "eth0", "root"],
            ["tc", "qdisc", "del", "dev", self.line, "root"],
        ):
            subprocess.run(words, check=False, capture_output=True, timeout=30)


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

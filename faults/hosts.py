"""Hosts of a campaign's job: network namespaces on one bridge, and what can be done to their lines.

Everything lives in the job's own namespaces, and ends with it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

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

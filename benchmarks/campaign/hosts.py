"""Hosts of a campaign: network namespaces on one bridge, and what can be done to their lines.

Everything lives in the driver's own namespaces, and ends with it.
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

    def run(self, *words: str) -> None:
        """Run a command there."""
        subprocess.run(["ip", "netns", "exec", self.name, *words], check=True, capture_output=True, timeout=30)

    def serve(self) -> None:
        """The coordinator's address is here, for whom it leads here."""
        ip("-n", self.name, "addr", "add", f"{SERVICE}/32", "dev", "lo")

    def lead(self, to: Host) -> None:
        """The coordinator's address leads there from now on."""
        ip("-n", self.name, "route", "replace", f"{SERVICE}/32", "via", to.address)

    def drop(self, others: Sequence[Host], directions: Sequence[str] = ("INPUT", "OUTPUT"), share: float = 1.0) -> None:
        """Lose a share of the packets from others (``INPUT``) and to them."""
        chance = [] if share == 1.0 else ["-m", "statistic", "--mode", "random", "--probability", str(share)]
        for direction in directions:
            side = "-s" if direction == "INPUT" else "-d"
            for other in others:
                for address in (other.address, SERVICE):
                    self.run("iptables", "-w", "-A", direction, side, address, *chance, "-j", "DROP")

    def drop_service_only_of(self, others: Sequence[Host]) -> None:
        """Lose all from and to others, but not what goes by the coordinator's address."""
        for other in others:
            self.run("iptables", "-w", "-A", "INPUT", "-s", other.address, "-j", "DROP")
            self.run("iptables", "-w", "-A", "OUTPUT", "-d", other.address, "-j", "DROP")

    def slow(self) -> None:
        """1 Mbit/s in both directions."""
        shape = ("tbf", "rate", "1mbit", "burst", "32kbit", "latency", "400ms")
        self.run("tc", "qdisc", "replace", "dev", "eth0", "root", *shape)
        subprocess.run(["tc", "qdisc", "replace", "dev", self.line, "root", *shape], check=True, capture_output=True)

    def heal(self) -> None:
        """A whole line again."""
        self.run("iptables", "-w", "-F")
        for words in (
            ["ip", "netns", "exec", self.name, "tc", "qdisc", "del", "dev", "eth0", "root"],
            ["tc", "qdisc", "del", "dev", self.line, "root"],
        ):
            subprocess.run(words, check=False, capture_output=True, timeout=30)

    def close(self) -> None:
        """Take it away."""
        ip("netns", "del", self.name)

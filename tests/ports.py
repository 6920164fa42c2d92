"""Ports for programs that cannot be asked which one the system has given them."""

from __future__ import annotations

import itertools
import os
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MOST = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
"""The system gives away ports from here on, to whoever asks for any, and to every connection."""
_LEAST = min(20_000, _MOST // 2)
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_EACH = (_MOST - _LEAST) // 8
_numbers = itertools.count(random.SystemRandom().randrange(_EACH))


def free_port() -> int:
    """A port that nobody uses, that the system gives nobody, and that no other process of these tests is given."""
    for _ in range(_EACH):
        port = _LEAST + _WORKER % 8 * _EACH + next(_numbers) % _EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("all ports are in use")

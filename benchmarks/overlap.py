"""Throughput over DistributedDataParallel with two workers whose network has the speed of a real one.

Loopback carries several gigabytes a second. Here both sides run, in turns, in a network namespace of their own, whose
loopback is limited (``tc``), so nothing else on the machine is slowed and nothing is left behind: the namespace is gone
with its last process. Both directions share one loopback, so it gets twice the speed of the link that is meant.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.jobs import LIMIT, ROOT, environment
from benchmarks.steps import measure_task, modes

LINKS = {"10 Gbit/s": 10_000, "1 Gbit/s": 1_000}
"""Megabits a second, each way."""
MODELS = ("mlp", "wide")
DELAY = "0.1ms"
"""One way, where the kernel has netem; about what a switch of a data centre takes."""


class NoNetworkError(Exception):
    """This machine cannot emulate a slow network."""


def shapings(megabits: int) -> list[tuple[str, str]]:
    """Commands that limit the loopback, best first, each with what it does."""
    both = 2 * megabits
    return [
        (f"tc qdisc add dev lo root netem delay {DELAY} rate {both}mbit limit 100000", f"rate and {DELAY} of delay"),
        (f"tc qdisc add dev lo root tbf rate {both}mbit burst 512kb limit 64mb", "rate alone"),
    ]


def in_namespace(shaping: str, *command: str) -> list[str]:
    """A command in a network namespace of its own with a limited loopback; needs root, or user namespaces."""
    script = f"ip link set lo up && {shaping} && exec {shlex.join(command)}"
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", "--net", *user, "sh", "-c", script]


def shaping_for(megabits: int) -> tuple[str, str]:
    """The first way to limit the loopback that works here.

    Raises:
        NoNetworkError: none does.
    """
    said = ""
    for shaping, effect in shapings(megabits):
        try:
            done = subprocess.run(
                in_namespace(shaping, "true"), capture_output=True, text=True, check=False, timeout=30
            )
        except FileNotFoundError as error:
            raise NoNetworkError(f"{error.filename} is missing; install util-linux, iproute2") from error
        if done.returncode == 0:
            return shaping, effect
        said = done.stderr.strip()
    raise NoNetworkError(f"no network namespace with a limited loopback can be made here ({said}); run it as root")


def measure(quick: bool) -> dict[str, Any]:
    """Each link and model; nothing but the reason where the machine cannot do it."""
    rows: list[dict[str, Any]] = []
    effect = ""
    for link, megabits in LINKS.items():
        try:
            shaping, effect = shaping_for(megabits)
        except NoNetworkError as error:
            return {"skipped": str(error), "rows": []}
        print(f"  {link}, {effect}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "rows.json"
            inner = [sys.executable, "-m", "benchmarks.overlap", "--json", str(path), *(["--quick"] if quick else [])]
            subprocess.run(in_namespace(shaping, *inner), cwd=ROOT, env=environment(), check=True, timeout=LIMIT)
            rows += [{"link": link, **row} for row in json.loads(path.read_text())]
    return {"settings": {"shaping": effect}, "rows": rows}


def inside(quick: bool) -> list[dict[str, Any]]:
    """The rows of one link, measured where this process is."""
    rounds, seconds = (3, 0.5) if quick else (7, 2.0)
    sides = modes()
    return [measure_task(task, 2, sides, 1, rounds, seconds) for task in MODELS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.json.write_text(json.dumps(inside(args.quick)))


if __name__ == "__main__":
    main()

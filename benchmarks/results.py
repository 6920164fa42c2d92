"""What a measurement leaves behind: one JSON file a figure, with everything that one needs to judge or repeat it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT

DIRECTORY = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Machine:
    """Where and with what a figure was measured."""

    cpu: str
    cores: int
    memory_gib: int
    kernel: str
    python: str
    torch: str
    commit: str
    date: str

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        return cls(
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            kernel=f"{platform.system()} {platform.release().partition('-')[0]}",
            python=platform.python_version(),
            torch=importlib.metadata.version("torch"),
            commit=commit(),
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """The commit; with a ``+`` when code of the library or of the measurements differs from it."""

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
            )
        except FileNotFoundError:  # on a machine that was given a copy of the files
            return ""
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "trainer", "benchmarks/*.py", "benchmarks/gpu/*.py", "examples")
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + ("+" if changed else "")


def write(name: str, quick: bool, seconds: float, result: dict[str, Any], directory: Path = DIRECTORY) -> Path:
    """Write a figure's file; what ``result`` must hold stands in ``figures``."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}.json"
    made = vars(Machine.here()) | {"quick": quick, "seconds": round(seconds), "load": round(os.getloadavg()[0], 1)}
    path.write_text(json.dumps({"figure": name, "made": made, **result}, indent=1) + "\n")
    return path


def read(directory: Path = DIRECTORY) -> dict[str, dict[str, Any]]:
    """All figures that have been measured, by name."""
    found = (json.loads(path.read_text()) for path in sorted(directory.glob("*.json")))
    return {figure["figure"]: figure for figure in found}

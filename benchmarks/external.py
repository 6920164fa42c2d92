"""Figures that are programs of their own: ``python -m benchmarks.NAME --json PATH [--quick]``.

Such a module writes a JSON object. If that has ``rows`` (a list of flat objects), they become the table of the figure
with their keys as headings, and ``text`` (Markdown) stands above it; else the numbers that it has become rows.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.jobs import LIMIT, ROOT, environment


def exists(module: str) -> bool:
    """Whether there is such a program."""
    return importlib.util.find_spec(f"benchmarks.{module}") is not None


def measure(module: str, quick: bool, limit: float = LIMIT) -> dict[str, Any]:
    """Run the program; what it wrote, with ``rows``.

    Args:
        module: its name.
        quick: fewer rounds, if it has such.
        limit: seconds after which it is taken to hang.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}"]
    if quick and "--quick" in _usage(command):
        command.append("--quick")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "figure.json"
        subprocess.run([*command, "--json", str(path)], cwd=ROOT, env=environment(), check=True, timeout=limit)
        found = json.loads(path.read_text())
    if not isinstance(found, dict):
        found = {"result": found}
    if not isinstance(found.get("rows"), list):
        found["rows"] = rows_of(found)
    return found


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows for a table: of each object of objects a row an object, else each number and text by itself.

    Lists are left out: they are single samples.
    """
    rows: list[dict[str, Any]] = []
    for key, value in found.items():
        if isinstance(value, dict) and value and all(isinstance(inner, dict) for inner in value.values()):
            rows += [{"what": name, **_scalars(inner)} for name, inner in value.items()]
        elif isinstance(value, dict):
            rows += [{"what": f"{key}, {name}", "value": inner} for name, inner in _scalars(value).items()]
    return rows or [{"what": name, "value": value} for name, value in _scalars(found).items()]


def _scalars(value: dict[str, Any]) -> dict[str, float | int | str]:
    return {name: inner for name, inner in value.items() if isinstance(inner, int | float | str)}


def _usage(command: list[str]) -> str:
    done = subprocess.run(
        [*command, "--help"], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout

"""Runs of the command line for measurements, and small statistics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """One thread a worker, this tree's library."""
    return os.environ | {"PYTHONPATH": f"{ROOT / 'trainer'}:{ROOT}", "OMP_NUM_THREADS": "1"}


def run_job(*arguments: str | int) -> tuple[dict[str, Any], str]:
    """Run ``virtualflow run`` to its end; the report and what the script printed."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [sys.executable, "-m", "virtualflow", "run", "--plain", "--report", str(report), *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
        return json.loads(report.read_text()), done.stdout


def quantiles(values: list[float]) -> str:
    """Median, and the tenth and ninetieth of a hundred."""
    ordered = sorted(values)
    pick = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.1, 0.9)]
    return f"{pick[0]:.1f} ms ({pick[1]:.1f} to {pick[2]:.1f})"

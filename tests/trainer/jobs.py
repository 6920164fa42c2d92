"""Jobs run through the real command line, for tests that compare whole trainings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import programs

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 480
"""Seconds after which a job of the suite is taken to hang."""


@dataclass(frozen=True)
class Finished:
    """A job that has ended, with what it left."""

    code: int
    output: str
    errors: str
    report: dict[str, Any]
    audit: list[dict[str, Any]]

    @property
    def bits(self) -> tuple[str, str]:
        """The digests of the model and of the optimizer."""
        return self.report["digest"], self.report["optimizer_digest"]


def run_job(
    directory: Path, *arguments: str | int | Path, interpreters: bool = False, program: str | None = None
) -> Finished:
    """Run ``virtualflow run`` with a report and an audit in ``directory``; it must succeed.

    Its processes are forks of one that has imported torch (see ``programs``), or ``interpreters`` of their own. A
    ``program`` takes the place of ``python -m virtualflow``.
    """
    report, audit = directory / "report.json", directory / "audit.jsonl"
    report.unlink(missing_ok=True)
    audit.unlink(missing_ok=True)
    virtualflow = ["-m", "virtualflow"] if program is None else [program]
    command = [sys.executable, *virtualflow, "run", "--plain", "--report", str(report), "--audit", str(audit)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "trainer"), "TMPDIR": str(directory)}
    whole = [*command, *map(str, arguments)]
    if interpreters:
        process = subprocess.run(
            whole, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    else:
        process = programs.run(whole, cwd=ROOT, env=environment, timeout=LIMIT)
    assert process.returncode == 0, f"{arguments}\n{process.stdout}\n{process.stderr}"
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    return Finished(process.returncode, process.stdout, process.stderr, json.loads(report.read_text()), lines)


def check_audit(finished: Finished, samples: int, virtual_nodes: int) -> None:
    """Each sample of a whole epoch exactly once, each virtual node of each step exactly once."""
    computed = Counter((line["step"], line["virtual_node"]) for line in finished.audit)
    steps = finished.report["steps"]
    assert computed == Counter((s, v) for s in range(1, steps + 1) for v in range(virtual_nodes))
    epochs: dict[int, list[int]] = {}
    for line in finished.audit:
        epochs.setdefault(line["epoch"], []).extend(line["samples"])
    *whole, last = sorted(epochs)
    for epoch in whole:
        assert sorted(epochs[epoch]) == list(range(samples)), f"epoch {epoch}"
    assert len(set(epochs[last])) == len(epochs[last])


def check_changes(finished: Finished) -> None:
    """Announced changes repeat no step, a loss at most one."""
    for change in finished.report["changes"]:
        most = {"join": 0, "drain": 0, "resize": 0, "lost": 1, "broken": 1}.get(change["cause"])
        assert most is None or change["repeated_steps"] <= most, change


def check_survivors(finished: Finished, started: int) -> None:
    """No more processes were started than were asked for, or were to take the place of those that had gone."""
    assert sum(map(len, finished.report["pids"].values())) <= started, f"{finished.report['pids']}\n{finished.errors}"

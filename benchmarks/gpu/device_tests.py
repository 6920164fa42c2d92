"""The tests that need a device: ``tests/gpu``, those marked ``gpu``; on the CPU the others of the same folder."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.gpu.parts import Note, Setting, Wrong
from benchmarks.jobs import ROOT

LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\s+(.*)$")
SHOWN = 60
"""Lines of a failed run's output that are reported."""


def measure(setting: Setting, note: Note) -> None:
    """Run them, and note how many have passed, and the others by name."""
    chosen = "gpu" if setting.device == "cuda" else "not gpu and not harness"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", chosen, "-q", "-rA", "--tb=short", "--timeout=100"]
    done = subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True, check=False)
    for row in rows_of(done.stdout):
        note(row)
    if done.returncode:
        raise Wrong("\n".join((done.stdout + done.stderr).splitlines()[-SHOWN:]))


def rows_of(output: str) -> list[dict[str, str]]:
    """From pytest's summary: how many tests of each file have passed, and each other test and what it came to."""
    found = (LINE.match(line) for line in output.splitlines())
    passed: Counter[str] = Counter()
    rows = []
    for match in found:
        if match:
            name, _, why = match[2].partition(" - ")
            file, _, test = name.partition("::")
            if match[1] == "PASSED":
                passed[Path(file).stem] += 1
            else:
                came_to = f"{match[1].lower()} {why}".strip()
                rows.append({"test": f"`{Path(file).stem}: {test}`" if test else name, "came to": came_to})
    counts = [{"test": f"`{file}`", "came to": f"{count} passed"} for file, count in sorted(passed.items())]
    return counts + rows

"""A training script that is a module of a package: virtualflow run -m, as python -m."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from jobs import LIMIT

import programs

CASES = Path(__file__).parents[1] / "cases"
TRAINER = Path(__file__).parents[3] / "trainer"
MODULE = "package_train.train"


def virtualflow(tmp_path: Path, *words: str) -> str:
    """What a command prints, which is run where the package is."""
    environment = os.environ | {"PYTHONPATH": str(TRAINER), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "virtualflow", *words]
    done = programs.run(command, cwd=CASES, env=environment, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_module_trains_with_its_relative_imports_also_in_a_worker_that_is_replaced(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--schedule", "3:kill", "--report", str(report)]
    said = virtualflow(tmp_path, "run", "--plain", *options, "-m", MODULE, "--lr", "1")
    assert f"trained {CASES} ['--lr', '1']" in said  # modules are looked for in the present directory first
    assert f"{MODULE}: coordinator at" in said
    assert json.loads(report.read_text())["steps"] == 8


@pytest.mark.nightly
@pytest.mark.parametrize("words", [["check", "--workers", "2"], ["explain"]], ids=lambda words: words[0])
def test_a_module_is_looked_at_like_a_script(tmp_path: Path, words: list[str]) -> None:
    assert virtualflow(tmp_path, *words, "-m", MODULE)


def test_a_profile_knows_how_it_is_made_again(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    virtualflow(tmp_path, "profile", "--sizes", "1", "--out", str(out), "-m", MODULE)
    assert json.loads(out.read_text())["script"] == f"-m {MODULE}"

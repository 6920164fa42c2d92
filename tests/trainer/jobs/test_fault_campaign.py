"""A slice of the campaign of faults, always the same; ``make campaign`` runs as many as one likes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.campaign.__main__ import why_not
from benchmarks.campaign.faults import KINDS

ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_a_slice_of_the_campaign_finds_nothing_wrong(tmp_path: Path) -> None:
    missing = why_not()
    if missing is not None:
        pytest.skip(f"the campaign parts network namespaces, and {missing}")
    report = tmp_path / "report.json"
    faults = 2 * len(KINDS)
    words = ["--faults", str(faults), "--per-job", str(len(KINDS)), "--jobs", "2", "--seed", "1", "--out", str(report)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'trainer'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.campaign", *words],
        env=environment,
        capture_output=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    found = json.loads(report.read_text())
    assert (found["lineages"], found["wrong"], found["faults"]) == (1, [], faults)
    assert {kind: row["faults"] for kind, row in found["kinds"].items()} == dict.fromkeys(KINDS, 2)

"""``make gpu`` where there is no GPU: it runs to its end, skips by name, and leaves the page alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from benchmarks.gpu import report
from benchmarks.gpu.parts import PARTS
from benchmarks.jobs import ROOT

from tiers import nightly

pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, make gpu itself is the test"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [pytest.param(["sums"], id="quick"), nightly([], id="all")],
)
def test_without_a_gpu_every_part_is_skipped_by_name_and_the_page_stays(parts: list[str]) -> None:
    page = report.PAGE.read_text()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *parts],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert report.PAGE.read_text() == page
    written = report.ASIDE.read_text()
    assert "No CUDA device was seen." in written
    titles = {part.name: part.title for part in PARTS}
    for name in parts or list(titles)[1:]:
        assert f"  {name:12} skipped: there is no CUDA device here; its code ran on the CPU" in done.stdout
        assert f"### {titles[name]}\n\nSkipped" in written

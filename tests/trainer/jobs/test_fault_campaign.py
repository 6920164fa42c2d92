"""A slice of the campaign of faults, always the same; ``make campaign`` runs as many as one likes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from faults.__main__ import why_not
from faults.kinds import KINDS

import terminals


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_a_slice_of_the_campaign_finds_nothing_wrong(tmp_path: Path) -> None:
    missing = why_not()
    if missing is not None:
        pytest.skip(f"the campaign parts network namespaces, and {missing}")
    report = tmp_path / "report.json"
    faults = 2 * len(KINDS)
    words = ["--faults", str(faults), "--per-job", str(len(KINDS)), "--jobs", "2", "--seed", "1", "--out", str(report)]
    seen = terminals.run(["-m", "faults", *words], piped=True)
    assert seen.code == 0, seen.piped + seen.words
    found = json.loads(report.read_text())
    assert (found["lineages"], found["wrong"], found["faults"]) == (1, [], faults)
    assert {kind: row["faults"] for kind, row in found["kinds"].items()} == dict.fromkeys(KINDS, 2)
    bars = re.findall(r"the campaign \S.*? (?:\d+ %, )?\d+:\d\d(?: left)?", seen.words)
    assert bars[-1].endswith(" 100 %, 0:00 left"), "what a person sees who waits"
    assert [line for line in seen.left if "the campaign" in line] == []
    assert len([line for line in seen.left if re.fullmatch(r"\d+ faults, \d+ a minute; 0 things wrong", line)]) == 2
    assert seen.cursor

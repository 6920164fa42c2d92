"""Histories of a job: who came, who went, and what was decided, as dialogues in ``testdata`` (see ``scenarios``)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from scenarios import play, read, write

TESTDATA = Path(__file__).parent / "testdata"
FILES = sorted(TESTDATA.glob("*.txt"))
SCENARIOS = [
    pytest.param(path, number, id=f"{path.stem}: {scenario.name}")
    for path in FILES
    for number, scenario in enumerate(read(path))
    if scenario.name
]


@pytest.mark.parametrize(("path", "number"), SCENARIOS)
def test_what_the_coordinator_and_the_workers_make_of_it(path: Path, number: int) -> None:
    scenario = read(path)[number]
    played = play(scenario)
    if os.environ.get("VIRTUALFLOW_REWRITE"):
        scenarios = read(path)
        scenarios[number].lines = scenario.written([told for _, told in played])
        write(path, scenarios)
        return
    for step, told in played:
        assert told == step.expected, f"{path.name}, {scenario.name}: after {'; '.join(step.commands)}"

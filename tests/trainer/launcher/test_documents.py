"""Python blocks of the documents run as they stand, and what the first tutorial shows is what happens."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import programs
import virtualflow as vf
from tiers import nightly, slow
from virtualflow.state import digests

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIAL = ROOT / "docs" / "tutorials" / "first-script.md"
SCRIPT = 'if __name__ == "__main__":'
SAYS = {"README.md": "step 40: loss", "first-script.md": "step 80: loss", "iterable-datasets.md": "39 steps"}
"""What the script of a page prints."""


def fenced(document: Path, language: str) -> list[str]:
    """Return the blocks of a document in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), flags=re.MULTILINE | re.DOTALL)


LONG = {"profile-a-step.md", "memory.md"}
BLOCKS = [
    (slow if document.name in LONG else pytest.param)(document, block, id=f"{document.relative_to(ROOT)}-{number}")
    for document in DOCUMENTS
    for number, block in enumerate(fenced(document, "python"))
]


def run(*command: str, cwd: Path, booted: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end, with the library to be found and none of its variables set.

    A fork of what has imported torch already (see ``programs``), or an interpreter that boots.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VIRTUALFLOW_")}
    path = os.pathsep.join(filter(None, [str(ROOT / "trainer"), os.environ.get("PYTHONPATH", "")]))
    options: dict[str, Any] = {"cwd": cwd, "env": {**inherited, "PYTHONPATH": path}, "timeout": 480}
    if not booted:
        return programs.run([sys.executable, *command], **options)
    return subprocess.run([sys.executable, *command], check=False, capture_output=True, text=True, **options)


class Squares(torch.utils.data.Dataset[Any]):
    """What a fragment of a page finds as ``dataset``."""

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1, 1, 480)[index].reshape(1)
        return x, x**2


def surroundings() -> dict[str, Any]:
    """Return what a fragment of a page may use, as CONTRIBUTING.md says."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"torch": torch, "F": F, "vf": vf, "model": model, "optimizer": optimizer, "dataset": Squares()}


@pytest.mark.parametrize(("document", "block"), BLOCKS)
def test_a_python_block_runs_as_it_stands(
    document: Path, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if SCRIPT in block:
        (tmp_path / "train.py").write_text(block)
        done = run("train.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert SAYS[document.name] in done.stdout
        return
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(document), "exec"), surroundings())


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) >= 9


@pytest.mark.slow
@pytest.mark.parametrize("booted", [False, nightly(True)])
def test_the_first_tutorial_ends_in_the_same_digest_every_time(booted: bool, tmp_path: Path) -> None:
    (script,) = fenced(TUTORIAL, "python")
    (tmp_path / "train.py").write_text(script)
    lines = [line for block in fenced(TUTORIAL, "sh") for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("virtualflow run ")]
    assert len(commands) == 3
    for command in commands:
        done = run("-m", "virtualflow", *command, cwd=tmp_path, booted=booted)
        assert done.returncode == 0, done.stderr
    reports = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two", "three")]
    assert len({report["digest"] for report in reports}) == 1
    assert reports[2]["repeated_steps"] <= 1
    assert [change["to"] for change in reports[2]["changes"]][-1] == 1


def test_the_digest_of_the_document_is_the_one_of_a_report() -> None:
    names: dict[str, Any] = {}
    exec(fenced(ROOT / "docs" / "how-to" / "compare-digests.md", "python")[0], names)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    assert names["digest"](model) == digests.digest(model.state_dict())

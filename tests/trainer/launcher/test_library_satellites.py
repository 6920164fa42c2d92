"""A library that was installed without its satellites: a training through a kill and a resize never misses them.

Processes import a copy of the package from which folders are removed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from jobs import ROOT, run_job

import virtualflow

SATELLITES = ("cluster", "integrations", "memory", "coordinator/page")
SCRIPT = [str(ROOT / "examples" / "digits.py"), "--steps", "12"]
DISTURBED = ["--workers", "2", "--schedule", "3:kill,7:=3"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Python is to look for a copy without any of them."""
    directory = tmp_path_factory.mktemp("site")
    source = Path(virtualflow.__file__).parent
    shutil.copytree(source, directory / source.name)  # with what Python has compiled of it
    for name in SATELLITES:
        shutil.rmtree(directory / source.name / name)
    return directory


def run(command: list[str], site: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command of the library, or of the copy."""
    environment = os.environ | ({"PYTHONPATH": str(site)} if site else {})
    return subprocess.run(
        [sys.executable, "-m", "virtualflow", *command],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def disturbed(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a job of the copy, through a kill and a resize."""
    report = tmp_path_factory.mktemp("job") / "report.json"
    ended = run(["run", "--plain", "--report", str(report), *DISTURBED, *SCRIPT], installed)
    assert ended.returncode == 0, ended.stderr
    return report


@pytest.mark.slow
def test_a_training_through_a_kill_and_a_resize_comes_to_the_same_bits_without_them(
    disturbed: Path, tmp_path: Path
) -> None:
    found = json.loads(disturbed.read_text())["digest"]
    assert found == run_job(tmp_path, "--workers", "1", *SCRIPT).report["digest"]


@pytest.mark.slow
def test_a_command_that_needs_one_says_so(installed: Path, disturbed: Path) -> None:
    ended = run(["report", str(disturbed)], installed)
    assert (ended.returncode, ended.stderr) == (
        2,
        "virtualflow: this was installed without virtualflow.coordinator.page, which that needs; install all of "
        "virtualflow\n",
    )


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (["plan", "--device", "24GiB", "profile.json"], "virtualflow.memory"),
        (["export", "checkpoints"], "a part of the project that this installation does not have"),
    ],
    ids=["plan", "export"],
)
def test_a_command_of_a_satellite_is_one_sentence(command: list[str], missing: str, installed: Path) -> None:
    ended = run(command, installed)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert missing in ended.stderr


@pytest.mark.slow
def test_a_script_that_asks_for_a_plan_of_memory_is_told_what_is_missing(installed: Path) -> None:
    environment = {"PYTHONPATH": str(installed), "VIRTUALFLOW_DEVICE_MEMORY": "1000000000"}
    ended = subprocess.run(
        [sys.executable, *SCRIPT],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode != 0
    assert "this was installed without virtualflow.memory, which that needs; install all of virtualflow" in ended.stderr


def test_a_coordinator_without_its_page_says_so_to_browsers(installed: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "virtualflow", "coordinator", "--host", "127.0.0.1", "--port", "0"],
        env=os.environ | {"PYTHONPATH": str(installed), "VIRTUALFLOW_TOKEN": "secret"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "http://" in line)
            address = "http://" + line.partition("http://")[2].split()[0].strip("/,;")
            with pytest.raises(urllib.error.HTTPError, match="501") as found:
                urllib.request.urlopen(f"{address}/ui", timeout=20)
            assert b"installed without virtualflow.coordinator.page" in found.value.read()
        finally:
            process.terminate()

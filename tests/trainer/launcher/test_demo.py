"""The demo runs as it stands."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

import programs

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "examples" / "demo.py"


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, with the library to be found and none of its variables set."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VIRTUALFLOW_")}
    path = os.pathsep.join(filter(None, [str(ROOT / "trainer"), os.environ.get("PYTHONPATH", "")]))
    return {**inherited, "PYTHONPATH": path, **more}


def start(*command: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end."""
    return programs.run([sys.executable, *command], cwd=cwd, env=environment(**more), timeout=480)


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The demo as a module."""
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_demo_tells_its_story_and_ends_in_the_same_bits() -> None:
    done = start("examples/demo.py", "--steps", "20", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "The same bits." in done.stdout
    assert done.stdout.count("What is hard about it") == 3
    for name in ("undisturbed", "announced", "killed"):
        assert len(re.findall(rf"^ *{name} .*[0-9a-f]{{12}}", done.stdout, flags=re.MULTILINE)) == 1


def test_the_demo_says_in_a_line_what_has_failed() -> None:
    done = start("examples/demo.py", "--steps", "20", cwd=ROOT, VIRTUALFLOW_THREADS="none")
    assert done.returncode == 1
    assert "VIRTUALFLOW_THREADS='none'" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("demo: the run 'undisturbed' ended with exit code")


def report(digest: str, optimizer: str) -> dict[str, Any]:
    return {
        "digest": digest,
        "optimizer_digest": optimizer,
        "changes": [{"from": 2, "to": 1, "pause_ms": 12.3}],
        "repeated_steps": 1,
        "metrics": {"test_accuracy": 0.9},
    }


@pytest.mark.parametrize(
    ("second", "code"),
    [
        pytest.param(("aa" * 32, "bb" * 32), 0, id="equal"),
        pytest.param(("cc" * 32, "bb" * 32), 1, id="other weights"),
        pytest.param(("aa" * 32, "cc" * 32), 1, id="other optimizer state"),
    ],
)
def test_the_verdict_follows_from_the_digests(demo: ModuleType, second: tuple[str, str], code: int) -> None:
    console = Console(file=io.StringIO(), width=110)
    outcomes = [demo.Outcome(demo.ACTS[0], report("aa" * 32, "bb" * 32)), demo.Outcome(demo.ACTS[1], report(*second))]
    assert demo.conclude(console, outcomes) == code


def test_no_two_actions_of_the_shortest_demo_fall_on_one_step(demo: ModuleType) -> None:
    for act in demo.ACTS:
        steps = [entry.split(":")[0] for entry in act.schedule_of(demo.FEWEST_STEPS).split(",") if entry]
        assert len(set(steps)) == len(steps)


def test_a_demo_that_is_too_short_is_refused(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--steps", "3"])
    assert "at least" in capsys.readouterr().err

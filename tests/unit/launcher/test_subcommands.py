"""Which numbers the command line takes, and what it says where a part of the project is not installed."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from virtualflow.errors import ConfigurationError
from virtualflow.launcher import Number, cli
from virtualflow.launcher.options import check_trainer
from virtualflow.launcher.settings import LauncherSettings
from virtualflow_operator.simulator import command as simulator

ROOT = Path(__file__).parents[3]
REQUIRED = {
    "run": ["a.py"],
    "check": ["a.py"],
    "profile": ["a.py"],
    "plan": ["a.json"],
    "explain": ["a.py"],
    "coordinator": ["--host", "127.0.0.1", "--port", "0"],
    "turns": ["turns.sock"],
    "scale": [],
    "drain": ["worker-0"],
}


def numeric(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if action.type in (int, float))


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = [
        action.choices
        for action in cli.parser(LauncherSettings())._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return dict(choices)


def wrong_numbers() -> Iterator[list[str]]:
    """Arguments, the last of which is the number that the first option has."""
    may_be_zero = {"--port", "--startup-grace", "--deadline", "--verify"}
    for name, parser in subcommands().items():
        for action in numeric(parser):
            option = action.option_strings[0] if action.option_strings else ""
            for number in ["-1"] + ["0"] * (option not in may_be_zero) + ["nan", "inf"] * (action.type is float):
                yield [name, f"{option}={number}" if option else number, *REQUIRED[name], number]


def test_there_are_numbers_to_give() -> None:
    assert len(list(wrong_numbers())) > 30


@pytest.mark.parametrize("words", list(wrong_numbers()), ids=lambda words: " ".join(words[:2]))
def test_a_number_that_makes_no_sense_is_refused_in_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    *arguments, number = words
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("virtualflow: ")
    assert f" {number}: " in line


@pytest.mark.parametrize(
    "wrong",
    [
        "--capacity=0", "--capacity=-1",
        *(f"{option}={number}" for option in ("--join", "--pause", "--every") for number in ("-1", "nan", "inf")),
        "--every=0",
    ],
)  # fmt: skip
def test_so_is_one_of_the_simulator(wrong: str) -> None:
    with pytest.raises(ConfigurationError):
        simulator.main([wrong, str(ROOT / "benchmarks" / "traces" / "paper-3.csv")])


def test_every_number_of_the_library_has_its_range() -> None:
    unchecked = [
        action.dest for parser in subcommands().values() for action in numeric(parser) if type(action) is not Number
    ]
    assert unchecked == []


@pytest.mark.parametrize("absent", ["kopf", "kubernetes", "prometheus_client"])
def test_the_operator_without_its_requirements_says_what_to_install(absent: str) -> None:
    program = (
        f"import sys; sys.modules[{absent!r}] = None\n"
        "from importlib.metadata import EntryPoint\n"
        f"sys.exit(EntryPoint('virtualflow-operator', {entry_point()!r}, 'console_scripts').load()())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"virtualflow-operator: the operator needs {absent}")
    assert line.endswith("run: pip install 'virtualflow[operator]'")


def entry_point() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: str = project["scripts"]["virtualflow-operator"]
    return found


def test_a_run_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    check_trainer()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(ConfigurationError, match=r"needs torch, not installed here; run: pip install 'virtualflow\[tr"):
        check_trainer()

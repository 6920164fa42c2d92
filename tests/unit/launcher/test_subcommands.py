"""Which numbers the command line takes, and what it says where a part of the project is not installed."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from virtualflow.errors import ConfigurationError
from virtualflow.launcher import Number, cli
from virtualflow.launcher.options import check_trainer
from virtualflow.launcher.subcommands import EXAMPLES, EXTERNAL
from virtualflow_operator.settings import SimulationSettings
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
    "processes": [],
    "scale": [],
    "drain": ["worker-0"],
}


def numeric(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if action.type in (int, float))


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = [action.choices for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction)]
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("rnu train.py", "there is no command rnu (did you mean run?); see virtualflow --help"),
        ("dance", "there is no command dance; see virtualflow --help"),
        ("--versoin", "there is no option --versoin (did you mean --version?); see virtualflow --help"),
        ("run --worker 3 a.py", "there is no option --worker (did you mean --workers?); see virtualflow run --help"),
        (
            "coordinator --hots h",
            "there is no option --hots (did you mean --host?); see virtualflow coordinator --help",
        ),
        ("run --on-non-finite stop a.py", "'stop' is none of Continue, Stop (did you mean Stop?); see virtualflow run"),
        ("scale 3 4", "4: more than is needed; see virtualflow scale --help"),
        ("bisect one", "the following arguments are required: DIR; see virtualflow bisect --help"),
        ("simulate --polcy x t.csv", "no option --polcy (did you mean --policy?); see virtualflow simulate --help"),
        ("export --formt hf", "no option --formt (did you mean --format?); see virtualflow export --help"),
    ],
)
def test_what_is_not_known_is_named_with_what_was_meant(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("words", [[], ["help"], ["--help"]], ids=" ".join)
def test_the_command_line_alone_shows_its_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 0
    said = capsys.readouterr()
    assert all(name in said.out for name in subcommands())
    assert not said.err


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_help_of_a_command_has_examples_which_are_understood(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*name.split(), "--help"])
    said = capsys.readouterr().out
    for example in EXAMPLES[name]:
        assert f"\n  {example}\n" in said
        *_, words = example.partition("virtualflow ")
        parsed = cli.parser().parse_args(shlex.split(words))
        assert callable(parsed.action)


def test_every_command_has_an_example() -> None:
    assert set(EXAMPLES) == {"", *subcommands()} - EXTERNAL.keys()


def helps() -> Iterator[tuple[str, argparse.Action, str]]:
    """Each option that takes a value, and what the help says of it."""
    parsers = {**subcommands(), "simulate": simulator.parser(SimulationSettings())}
    for name, parser in parsers.items():
        formatter = parser._get_formatter()
        for action in parser._actions:
            if action.option_strings and action.nargs != 0:
                yield name, action, formatter._expand_help(action)


def test_the_help_says_of_every_option_whether_it_is_needed_or_what_holds_without_it() -> None:
    found = list(helps())
    assert len(found) > 50
    for name, action, said in found:
        assert ("(required)" in said) if action.required else ("default" in said), (name, action.option_strings, said)

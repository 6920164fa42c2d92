"""What a worker is to run: found before anything is started, by its path or by its name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tiers import needs
from virtualflow.errors import ConfigurationError
from virtualflow.launcher import cli
from virtualflow.launcher.options import RunOptions, resolve
from virtualflow.launcher.training_program import TrainingProgram, program_of

TRAINS = needs("torch", "make venv installs it")


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose code must not be run to find its modules, beside a script."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "nets" / "deep"
    folder.mkdir(parents=True)  # nets has no __init__: a namespace
    for name in ("__init__", "train", "conf"):
        (folder / f"{name}.py").write_text("raise SystemExit('it was run')\n")
    (tmp_path / "train.py").write_text("")
    return folder


def asked(*words: str) -> RunOptions:
    return resolve(cli.parser().parse_args(["run", *words]))


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("train.py --lr 1", TrainingProgram("train.py")),
        ("-u -W ignore -X dev train.py -m no", TrainingProgram("train.py")),
        ("-Wignore -um nets.deep.train --lr 1", TrainingProgram("nets.deep.train", is_module=True)),
        ("-mnets.deep.train", TrainingProgram("nets.deep.train", is_module=True)),
        ("--check-hash-based-pycs never train.py", TrainingProgram("train.py")),
        ("-c pass", None),
        ("-uc pass", None),
        ("-", None),
        ("-m", None),
        ("", None),
    ],
)
def test_what_an_interpreter_runs_is_read_from_its_arguments(words: str, program: TrainingProgram | None) -> None:
    assert program_of(words.split()) == program


@TRAINS
def test_a_module_is_run_as_python_runs_it_and_the_job_is_called_after_it() -> None:
    options = asked("--workers", "3", "-m", "nets.deep.train", "--lr", "1", "--workers", "9")
    assert options.command == (sys.executable, "-u", "-m", "nets.deep.train", "--lr", "1", "--workers", "9")
    assert (options.suggestion, options.workers) == ("nets.deep.train", 3)
    assert asked("train.py").suggestion == "train"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-m", "nets.deep.trian"], r"^-m nets.deep.trian: nets.deep has no module trian \(did you mean train\?\);"),
        (["-m", "trian"], r"^-m trian: there is no module trian \(did you mean train\?\); it is looked for in this"),
        (["-m", "nets.deep"], r"a package without a __main__; name one of its modules \(conf, train\)"),
        (["-m", "nets.deep.train.main"], "nets.deep.train has no module main"),
        (["-m", "nets/deep/train.py"], r"write -m nets\.deep\.train, or leave out -m"),
        (["-m", "train.py"], r"write -m train, or leave out -m"),
        (["-m"], "say what to run"),
        (["-m", "-f", "job.yaml"], "either a script or -f"),
    ],
)
def test_a_module_that_cannot_be_run_is_named_before_anything_starts(words: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        asked(*words)


@TRAINS
def test_a_package_with_a_main_is_a_module(package: Path) -> None:
    (package / "__main__.py").touch()
    assert asked("-m", "nets.deep").command[2:] == ("-m", "nets.deep")


def manifest(tmp_path: Path, *command: str, **environment: str) -> str:
    entry = {
        "command": command[:1],
        "args": command[1:],
        "env": [{"name": k, "value": v} for k, v in environment.items()],
    }
    template = {"spec": {"containers": [{key: list(value) for key, value in entry.items()}]}}
    job = {
        "apiVersion": "virtualflow.dev/v1alpha1",
        "kind": "VirtualFlowJob",
        "spec": {"workerGroups": [{"template": template}]},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    return "job.yaml"


@TRAINS
@pytest.mark.parametrize("words", ["-m nets.deep.train --lr 1", "-W ignore train.py", "-c pass", "-u train.py"])
def test_a_manifest_says_the_same_by_its_command(tmp_path: Path, words: str) -> None:
    assert asked("-f", manifest(tmp_path, "python", *words.split())).command == (sys.executable, *words.split())


def test_the_environment_of_a_manifest_says_where_modules_are(tmp_path: Path) -> None:
    words = ("python3", "-m", "deep.train")
    with pytest.raises(ConfigurationError, match="there is no module deep"):
        asked("-f", manifest(tmp_path, *words))
    assert asked("-f", manifest(tmp_path, *words, PYTHONPATH=str(tmp_path / "nets"))).command[1:] == words[1:]


@pytest.mark.parametrize("command", ["check", "explain", "profile", "plan"])
def test_every_command_that_takes_a_script_takes_a_module(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "-m", "nets.deep.trian"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nets.deep has no module trian (did you mean train?)" in line

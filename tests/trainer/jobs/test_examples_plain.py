"""The plain PyTorch twins learn, and an elastic script differs from its twin in a handful of lines."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from pathlib import Path

import pytest

import programs

EXAMPLES = Path(__file__).parents[3] / "examples"
DOCSTRING = re.compile(r'\A""".*?"""\n', re.DOTALL)


def run_example(script: str, *arguments: str) -> str:
    """Run the script to its end on one thread and return what it printed."""
    done = programs.run([sys.executable, str(EXAMPLES / script), *arguments], timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def number_after(words: str, output: str) -> float:
    (found,) = re.findall(rf"{words} ([0-9.]+)", output)
    return float(found)


def training(script: str) -> list[str]:
    """Return the lines of the script without its docstring, up to where the training has ended."""
    text = DOCSTRING.sub("", (EXAMPLES / script).read_text())
    code, evaluation = re.split(r"^ +# Then see how it does", text, flags=re.MULTILINE)
    assert evaluation
    return code.splitlines()


@pytest.mark.parametrize("example", ["digits", "charlm"])
def test_an_elastic_training_is_at_most_six_lines_away_from_plain_pytorch(example: str) -> None:
    difference = list(difflib.unified_diff(training(f"{example}_plain.py"), training(f"{example}.py"), n=0))[2:]
    added = [line[1:] for line in difference if line.startswith("+") and line.strip("+ ")]
    assert any("vf.elastic(" in line for line in added)
    assert 0 < len(added) <= 6, "\n".join(added)


@pytest.mark.slow
def test_plain_digits_learns_to_97_percent() -> None:
    output = run_example("digits_plain.py")
    assert "240 steps in" in output
    assert number_after("test accuracy", output) >= 0.97


@pytest.mark.slow
def test_plain_charlm_learns_from_any_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. äöü 12345\n" * 400)
    output = run_example("charlm_plain.py", "--text", str(text), "--steps", "60")
    assert number_after("held-out loss", output) < 1.0  # nats a character; 5.5 before training
    assert "it writes:\nReturn " in output


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        pytest.param("", 240, id="by default 20 epochs of 12 steps"),
        pytest.param("--steps 7", 7, id="steps"),
        pytest.param("--steps 600", 600, id="more steps than the default epochs have"),
        pytest.param("--epochs 1", 12, id="an epoch with its short last batch"),
        pytest.param("--epochs 2 --batch-size 168", 18, id="epochs of another batch size"),
        pytest.param("--epochs 1 --steps 13", 12, id="the epochs end first"),
        pytest.param("--epochs 2 --steps 13", 13, id="the steps end first"),
    ],
)
def test_a_training_is_as_long_as_steps_and_epochs_say(
    arguments: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    lengths = importlib.import_module("arguments")
    parser = lengths.parser(None, epochs=20, steps=None, batch_size=128)
    assert lengths.steps_to_make(parser.parse_args(arguments.split()), samples=1437) == steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--steps", "0"], "0 is not positive", id="no steps"),
        pytest.param(["--text", "missing.txt"], "there is no text file missing.txt", id="no such text"),
    ],
)
def test_bad_arguments_get_one_clear_line(arguments: list[str], message: str) -> None:
    done = programs.run([sys.executable, str(EXAMPLES / "charlm_plain.py"), *arguments], timeout=120)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr

"""What the documents say is what the code does: diffs, commands, defaults, names and links."""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from virtualflow import cli, settings
from virtualflow.local.schedule import parse_schedule

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trainer" / "virtualflow"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
END_OF_TRAINING = "# Then see"
"""The comment behind the training loop of both digits scripts."""


def fenced(text: str, language: str) -> list[str]:
    """Return the blocks of a document in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Return every `virtualflow` command of the documents that stands in an indented block."""
    lines = [line for document in DOCUMENTS for line in document.read_text().splitlines()]
    return [line.strip().split("  #")[0].strip() for line in lines if line.startswith("    virtualflow ")]


def training_part(name: str) -> list[str]:
    """Return an example from its imports to the end of its training loop."""
    code = (ROOT / "examples" / name).read_text().split('"""', 2)[2]
    before, found, _ = code.partition(END_OF_TRAINING)
    assert found, f"{name} has no comment {END_OF_TRAINING!r} behind its training"
    return before.strip().splitlines()


def rows(document: str) -> list[list[str]]:
    """Return the cells of all table rows of a document."""
    lines = (ROOT / document).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def test_the_diff_in_the_readme_is_the_one_of_the_examples() -> None:
    plain, elastic = training_part("digits_plain.py"), training_part("digits.py")
    lines = difflib.unified_diff(plain, elastic, n=1, lineterm="")
    expected = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    shown = next(iter(fenced((ROOT / "README.md").read_text(), "diff"))).splitlines()
    assert [line.rstrip() for line in shown if line.strip()] == [line.rstrip() for line in expected if line.strip()]


def test_at_most_six_lines_are_written_to_make_a_script_elastic() -> None:
    shown = next(iter(fenced((ROOT / "README.md").read_text(), "diff"))).splitlines()
    assert 1 <= sum(line.startswith("+") for line in shown) <= 6


@pytest.mark.parametrize("command", commands())
def test_a_documented_command_is_understood(command: str) -> None:
    words = shlex.split(re.sub(r"\[[^\]]*\]", "", command))
    words = ["2" if word in ("N", "P") else word for word in words]
    parsed = cli._parser().parse_args(words[1:])
    assert callable(parsed.action)
    if getattr(parsed, "schedule", None):
        assert parse_schedule(parsed.schedule)


def test_every_option_of_run_is_in_the_readme() -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--no-such-option"])
    usage = subprocess.run(
        [sys.executable, "-m", "virtualflow", "run", "--help"],
        env={"PYTHONPATH": str(PACKAGE.parent), "PATH": "", "COLUMNS": "200"},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    options = set(re.findall(r"^  (--[a-z-]+)", usage, flags=re.MULTILINE))
    readme = (ROOT / "README.md").read_text()
    assert options
    assert {option for option in options if option not in readme} == set()


def documented_settings() -> list[tuple[str, float]]:
    found = []
    for row in rows("docs/design.md"):
        name = row[0].strip("`")
        if re.fullmatch(r"[A-Z][A-Za-z]*Settings\.[a-z_]+|[A-Z]+_[A-Z_]+", name) and not name.startswith("VIRTUALFLOW"):
            found.append((name, float(row[1])))
    return found


def test_the_table_of_time_outs_is_there() -> None:
    assert len(documented_settings()) > 10


@pytest.mark.parametrize(("name", "value"), documented_settings())
def test_a_documented_default_is_the_one_in_force(name: str, value: float) -> None:
    owner, _, field = name.rpartition(".")
    actual = getattr(getattr(settings, owner) if owner else settings, field)
    assert actual == value


def test_every_membership_time_out_is_explained() -> None:
    explained = {name.rpartition(".")[2] for name, _ in documented_settings() if name.startswith("MembershipSettings")}
    assert {field.name for field in dataclasses.fields(settings.MembershipSettings)} == explained


def test_every_environment_variable_is_explained() -> None:
    known = {value for name, value in vars(settings).items() if name.startswith("ENV_")}
    design = (ROOT / "docs" / "design.md").read_text()
    assert {name for name in known if f"`{name}`" not in design} == set()


def test_every_room_is_in_the_design() -> None:
    table = "\n".join(row[0] for row in rows("docs/design.md"))
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {room for room in rooms if not room.startswith("_") and f"`{room}`" not in table} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_links_of_a_document_lead_somewhere(document: Path) -> None:
    text = re.sub(r"`[^`\n]+`", "", document.read_text())  # a pattern in code is no link
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), f"{target} does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE)
            slugs = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{target}: there is no such heading"


def test_the_picture_is_what_its_script_draws() -> None:
    images = ROOT / "docs" / "images"
    drawn = subprocess.run(
        [sys.executable, str(images / "idea.py")], check=True, capture_output=True, text=True, timeout=60
    )
    assert (images / "idea.svg").read_text() == drawn.stdout
    ElementTree.fromstring(drawn.stdout)

"""What the documents say is what the code does: diffs, commands, defaults, names, manifests and links."""

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
import yaml

from virtualflow import cli, settings
from virtualflow.local.schedule import parse_schedule
from virtualflow_operator import reasons
from virtualflow_operator import settings as operator_settings
from virtualflow_operator.disruptions import TERMINATION_TAINTS
from virtualflow_operator.metrics import metric_names
from virtualflow_operator.options import OPTIONS, Option
from virtualflow_operator.settings import OperatorSettings
from virtualflow_operator.simulator import command as simulator
from virtualflow_operator.spec import read_spec
from virtualflow_operator.validation import validate, validate_queue

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trainer" / "virtualflow"
OPERATOR = ROOT / "operator" / "virtualflow_operator"
CHART = ROOT / "charts" / "virtualflow"
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
    if words[1] == "simulate":
        assert simulator._parser().parse_args(words[2:]).trace
        return
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
    home = next(module for module in (settings, operator_settings) if hasattr(module, owner or field))
    actual = getattr(getattr(home, owner) if owner else home, field)
    assert actual == value


def test_every_membership_time_out_is_explained() -> None:
    explained = {name.rpartition(".")[2] for name, _ in documented_settings() if name.startswith("MembershipSettings")}
    assert {field.name for field in dataclasses.fields(settings.MembershipSettings)} == explained


def test_every_environment_variable_is_explained() -> None:
    known = {value for name, value in vars(settings).items() if name.startswith("ENV_")}
    design = (ROOT / "docs" / "design.md").read_text()
    assert {name for name in known if f"`{name}`" not in design} == set()


def rooms(package: Path) -> set[str]:
    """Return the names of a package's modules and packages, but for private ones."""
    found = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return {room for room in found if not room.startswith("_")}


def test_every_room_is_in_the_design() -> None:
    table = "\n".join(row[0] for row in rows("docs/design.md"))
    assert {room for room in rooms(PACKAGE) if f"`{room}`" not in table} == set()


# --- the operator -----------------------------------------------------------------------------------------------------


def part(document: str, heading: str) -> str:
    """Return what stands under a heading of a document, up to the next of its level or above."""
    text = (ROOT / document).read_text()
    level = len(heading) - len(heading.lstrip("#"))
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{level}}} |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert found, f"{document} has no heading {heading!r}"
    return found[1]


def named(text: str, column: int = 0) -> set[str]:
    """Return what stands in backticks in that column of the tables of a text."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {name for line in lines for name in re.findall(r"`([^`]+)`", line.strip("|").split("|")[column])}


def test_every_room_of_the_operator_is_in_the_design() -> None:
    described = {name for name in named(part("docs/design.md", "## Operator")) if re.fullmatch(r"[a-z_]+", name)}
    assert described == rooms(OPERATOR)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_setting_of_the_operator_is_documented_with_its_default(option: Option) -> None:
    lines = part("docs/operations.md", "## Settings").splitlines()
    (row,) = [line.strip("|").split("|") for line in lines if line.startswith(f"| `{option.flag}` |")]
    assert row[1].strip() == f"`{option.variable}`"
    default: object = OperatorSettings()
    for name in option.place.split("."):
        default = getattr(default, name)
    text = f"{default:g}" if isinstance(default, float) else str(default)
    shown = text.lower() if isinstance(default, bool) else text
    nothing = default in ("", (), {}) or option.name == "identity"
    assert row[2].strip() == ("" if nothing else f"`{shown}`")


def test_every_chart_value_of_the_settings_exists() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    names = named(part("docs/operations.md", "## Settings"), 3)
    assert len(names) > 10
    for name in names:
        found = values
        for key in name.split("."):
            assert key in found, f"the chart has no value {name}"
            found = found[key]


def test_every_metric_is_documented_and_no_other() -> None:
    assert named(part("docs/operations.md", "## Metrics")) == metric_names()


def test_every_alert_has_its_heading_and_no_other() -> None:
    rules = (CHART / "templates" / "prometheusrule.yaml").read_text()
    alerts = set(re.findall(r"^- alert: (\w+)$", rules, flags=re.MULTILINE))
    headings = set(re.findall(r"^### (.+)$", part("docs/operations.md", "## Alerts"), flags=re.MULTILINE))
    assert headings == alerts != set()


def test_every_reason_is_explained_and_no_other() -> None:
    known = {value for name, value in vars(reasons).items() if name.isupper()}
    assert named(part("docs/operations.md", "## Reasons")) == known


def test_every_taint_that_announces_a_loss_is_named() -> None:
    found = {name for name in named(part("docs/spot.md", "## How a loss is announced")) if " " not in name}
    assert {taint for taint in TERMINATION_TAINTS if taint not in found} == set()


def manifests() -> list[tuple[str, dict[str, object]]]:
    """Return the Kubernetes objects of the documents and examples, with where they stand."""
    found = []
    for document in DOCUMENTS:
        found += [(document.name, text) for text in fenced(document.read_text(), "yaml")]
    found += [(path.name, path.read_text()) for path in sorted((ROOT / "examples").glob("*.yaml"))]
    objects = [(name, yaml.safe_load(text)) for name, text in found]
    return [(name, value) for name, value in objects if isinstance(value, dict) and "kind" in value]


@pytest.mark.parametrize(("where", "manifest"), manifests(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_manifest_makes_sense(where: str, manifest: dict[str, object]) -> None:
    metadata, spec = manifest["metadata"], manifest["spec"]
    assert isinstance(metadata, dict)
    assert isinstance(spec, dict)
    jobs = {str(job["metadata"]["name"]): job for _, job in manifests() if job["kind"] == "VirtualFlowJob"}  # type: ignore[index]
    if manifest["kind"] == "VirtualFlowJob":
        assert validate(spec, metadata["name"]) == []
    elif manifest["kind"] == "HorizontalPodAutoscaler":
        target = spec["scaleTargetRef"]
        job = jobs[target["name"]]
        assert (target["apiVersion"], target["kind"]) == (job["apiVersion"], job["kind"])
        limits = read_spec(job["spec"])  # type: ignore[arg-type]
        assert limits.min_replicas <= spec["minReplicas"] <= spec["maxReplicas"] <= limits.most
    elif manifest["kind"] == "VirtualFlowQueue":
        assert validate_queue(spec) == []
    else:
        assert manifest["kind"] == "PersistentVolumeClaim", where
        claims = [read_spec(job["spec"]).checkpoint for job in jobs.values()]  # type: ignore[arg-type]
        volumes = [checkpoint.volume for checkpoint in claims if checkpoint is not None]
        assert {"persistentVolumeClaim": {"claimName": metadata["name"]}} in volumes


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

"""What the documents say is what the code does: diffs, commands, defaults, names, manifests and links.

Whatever this file needs of the code is imported here, so that a moved module is one line. Python blocks need torch and
are run by ``tests/trainer/test_documents.py``.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import inspect
import itertools
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import yaml

import virtualflow
import virtualflow_operator
from virtualflow.coordinator.page.files import WORDS
from virtualflow.integrations import export
from virtualflow.launcher import cli
from virtualflow.launcher.fault_schedule import parse_schedule
from virtualflow.protocol.versions import NUMERICS, OLDEST_PROTOCOL, PROTOCOL
from virtualflow_operator import reasons
from virtualflow_operator.api.job import read_spec
from virtualflow_operator.api.queue import read_queue
from virtualflow_operator.api.validation import find_problems
from virtualflow_operator.constants import TERMINATION_TAINTS
from virtualflow_operator.controllers.flags import OPTIONS, Option
from virtualflow_operator.observability.metrics import metric_names
from virtualflow_operator.scheduling import POLICIES
from virtualflow_operator.settings import OperatorSettings, SimulationSettings
from virtualflow_operator.simulator import command as simulator

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "trainer" / "virtualflow"
OPERATOR = ROOT / "operator" / "virtualflow_operator"
CHART = ROOT / "charts" / "virtualflow"
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / folder / "README.md" for folder in ("examples", "charts/virtualflow", "benchmarks/traces")),
    *PAGES,
]
END_OF_TRAINING = "# Then see"
"""The comment behind the training loop of both digits scripts."""


def named_after_place(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else ""


def fenced(text: str, language: str) -> list[str]:
    """Return the blocks of a document in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Return every `virtualflow` command that stands on a line of its own in a shell block."""
    blocks = [block for document in DOCUMENTS for block in fenced(document.read_text(), "sh")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return sorted({line.split("  #")[0].strip() for line in lines if line.startswith("virtualflow ")})


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


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", commands())
def test_a_documented_command_is_understood(command: str) -> None:
    words = shlex.split(re.sub(r"\[[^\]]*\]", "", command))
    words = ["2" if word in ("N", "P") else word for word in words]
    if words[1] == "simulate":
        assert simulator.parser(SimulationSettings()).parse_args(words[2:]).trace
        return
    if words[1] == "export":
        assert export.parser().parse_args(words[2:]).output
        return
    parsed = cli.parser().parse_args(words[1:])
    assert callable(parsed.action)
    if getattr(parsed, "schedule", None):
        assert parse_schedule(parsed.schedule)


def test_every_command_has_a_row_in_the_tables_of_commands() -> None:
    rows_of = re.findall(r"^\| \[`virtualflow ([a-z]+)`\]", (ROOT / "docs/reference/cli.md").read_text(), re.MULTILINE)
    assert sorted(rows_of) == sorted(parsers())


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    actions = cli.parser()._actions
    (known,) = [action.choices for action in actions if isinstance(action, argparse._SubParsersAction)]
    return {**known, "export": export.parser()}


@pytest.mark.parametrize(
    "command", ["run", "status", "scale", "drain", "profile", "plan", "report", "export", "coordinator"]
)
def test_every_option_of_a_command_is_documented_and_no_other(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    heading = f"## virtualflow {'status, scale, drain' if command in ('status', 'scale', 'drain') else command}"
    documented = set(re.findall(r"(?<![\w`-])`?(--?[a-z][a-z-]*)", part("docs/reference/cli.md", heading)))
    options = set(re.findall(r"^  (--?[a-z][a-z-]*)", parsers()[command].format_help(), flags=re.MULTILINE)) - {"-h"}
    assert options
    assert options <= documented
    if command not in ("status", "scale", "drain"):
        assert documented <= options


def test_every_option_of_the_simulator_is_documented_and_no_other() -> None:
    options = {
        name
        for action in simulator.parser(SimulationSettings())._actions
        for name in action.option_strings
        if name[:2] == "--"
    }
    section = part("docs/reference/cli.md", "## virtualflow simulate")
    assert set(re.findall(r"`(--[a-z-]+)", section)) == options - {"--help"}


# --- settings ---------------------------------------------------------------------------------------------------------


def homes(package: ModuleType, *names: str) -> Iterator[ModuleType]:
    """Yield the modules of a package that bear one of these names, wherever they are."""
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if found.name.rpartition(".")[2] in names:
            yield importlib.import_module(found.name)


SETTINGS = [module for package in (virtualflow, virtualflow_operator) for module in homes(package, "settings")]
EXPLAINED = {
    sys.modules[value.__module__]
    for module in SETTINGS
    for name, value in vars(module).items()
    if name.endswith("Settings")
}
"""Where these are defined."""
SETTINGS_PAGE = "docs/reference/settings.md"
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def documented_settings() -> list[tuple[str, float]]:
    found = []
    for row in rows(SETTINGS_PAGE):
        name = row[0].strip("`")
        if re.fullmatch(r"[A-Z][A-Za-z]*Settings\.[a-z_]+|[A-Z]+(_[A-Z_]+)?", name) and "VIRTUALFLOW" not in name:
            number, _, unit = row[1].partition(" ")
            found.append((name, float(number) * UNITS[unit]))
    return found


def test_the_tables_of_settings_are_there() -> None:
    assert len(documented_settings()) > 50


@pytest.mark.parametrize(("name", "value"), documented_settings())
def test_a_documented_default_is_the_one_in_force(name: str, value: float) -> None:
    owner, _, field = name.rpartition(".")
    found = [getattr(home, owner) if owner else home for home in SETTINGS if hasattr(home, owner or field)]
    assert found, f"there is no {name}"
    assert {getattr(each, field) for each in found} == {value}


def home_of(owner: str) -> ModuleType:
    return next(module for module in SETTINGS if hasattr(module, owner))


def unexplained(source: str) -> list[str]:
    """Return the numbers of the settings in a module that have no docstring behind them."""
    found = []
    for owner in ast.parse(source).body:
        if isinstance(owner, ast.ClassDef) and owner.name.endswith("Settings"):
            for field, behind in itertools.pairwise([*owner.body, ast.Pass()]):
                explained = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and not explained:
                    number = getattr(getattr(home_of(owner.name), owner.name)(), ast.unparse(field.target))
                    found += [f"{owner.name}.{ast.unparse(field.target)}"] if isinstance(number, int | float) else []
    return found


@pytest.mark.parametrize("module", sorted(EXPLAINED, key=repr), ids=lambda module: module.__name__)
def test_every_number_of_the_settings_is_explained_beside_it(module: ModuleType) -> None:
    assert unexplained(inspect.getsource(module)) == []


def test_a_number_without_a_docstring_is_found() -> None:
    assert unexplained("class LeaseSettings:\n    duration: float = 10.0\n") == ["LeaseSettings.duration"]


def test_every_environment_variable_is_explained() -> None:
    modules = homes(virtualflow, "settings", "environment")
    known = {value for module in modules for name, value in vars(module).items() if name.startswith("ENV_")}
    assert len(known) > 10
    assert {name for name in known if f"`{name}`" not in (ROOT / SETTINGS_PAGE).read_text()} == set()


# --- packages ---------------------------------------------------------------------------------------------------------


def rooms(package: Path) -> set[str]:
    """Return the names of the packages in a package."""
    return {path.name for path in package.iterdir() if (path / "__init__.py").exists()}


@pytest.mark.parametrize(
    ("package", "heading"),
    [pytest.param(PACKAGE, "## The library", id="library"), pytest.param(OPERATOR, "## The operator", id="operator")],
)
def test_every_package_is_in_the_architecture_and_no_other(package: Path, heading: str) -> None:
    assert named(part("docs/explanation/architecture.md", heading)) == rooms(package)


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


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_setting_of_the_operator_is_documented_with_its_default(option: Option) -> None:
    lines = part(SETTINGS_PAGE, "## Operator flags").splitlines()
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
    names = named(part(SETTINGS_PAGE, "## Operator flags"), 3)
    assert len(names) > 10
    for name in names:
        found = values
        for key in name.split("."):
            assert key in found, f"the chart has no value {name}"
            found = found[key]


def test_every_metric_is_documented_and_no_other() -> None:
    assert named(part("docs/reference/metrics.md", "# Metrics")) == metric_names()


def test_every_alert_has_its_heading_and_no_other() -> None:
    rules = (CHART / "templates" / "prometheusrule.yaml").read_text()
    alerts = set(re.findall(r"^- alert: (\w+)$", rules, flags=re.MULTILINE))
    headings = set(re.findall(r"^### (.+)$", part("docs/how-to/operations.md", "## Alerts"), flags=re.MULTILINE))
    assert headings == alerts != set()


def test_every_reason_is_explained_and_no_other() -> None:
    known = {value for name, value in vars(reasons).items() if name.isupper()}
    assert named(part("docs/reference/reasons.md", "# Reasons and events")) == known


def test_every_policy_is_explained_and_no_other() -> None:
    assert named(part("docs/how-to/queues.md", "## Choose a policy")) - {"minReplicas", "replicas"} == set(POLICIES)


def test_every_taint_that_announces_a_loss_is_named() -> None:
    found = {name for name in named(part("docs/how-to/spot.md", "## How a loss is announced")) if " " not in name}
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
        assert find_problems(read_spec(spec)) == []
    elif manifest["kind"] == "HorizontalPodAutoscaler":
        target = spec["scaleTargetRef"]
        job = jobs[target["name"]]
        assert (target["apiVersion"], target["kind"]) == (job["apiVersion"], job["kind"])
        limits = read_spec(job["spec"])  # type: ignore[arg-type]
        assert limits.min_replicas <= spec["minReplicas"] <= spec["maxReplicas"] <= limits.most
    elif manifest["kind"] == "VirtualFlowQueue":
        assert read_queue(manifest).fault == ""
    else:
        assert manifest["kind"] == "PersistentVolumeClaim", where
        claims = [read_spec(job["spec"]).checkpoint for job in jobs.values()]  # type: ignore[arg-type]
        volumes = [checkpoint.volume for checkpoint in claims if checkpoint is not None]
        assert {"persistentVolumeClaim": {"claimName": metadata["name"]}} in volumes


# --- the pages themselves ---------------------------------------------------------------------------------------------


FORMER_WORDS = (
    "void attempt",
    "rehears",
    "founding",
    "last word",
    "carries virtual",
    "gives it up",
    "given up",
    "guests",
)
"""What the glossary has another word for."""


def slug(heading: str) -> str:
    """Return the anchor of a heading, the same on the site and in a repository."""
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=named_after_place)
def test_the_links_of_a_document_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), f"{target} does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{target}: there is no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=named_after_place)
def test_the_files_that_a_document_names_exist(document: Path) -> None:
    named = re.findall(
        r"`((?:operator|trainer|crds|charts|examples|benchmarks|faults|docs|tests)/[\w./-]+)`", document.read_text()
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


def navigated(entries: list[dict[str, object]]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values():
            yield from navigated(value) if isinstance(value, list) else [str(value)]


def test_every_page_is_in_the_navigation_once() -> None:
    lines = (ROOT / "mkdocs.yml").read_text()
    pages = list(navigated(yaml.safe_load(lines[lines.index("nav:\n") :])["nav"]))
    assert sorted(pages) == [str(page.relative_to(DOCS)) for page in PAGES]


@pytest.mark.parametrize(
    "source", [ROOT / "trainer", ROOT / "operator", CHART, ROOT / "examples"], ids=named_after_place
)
def test_a_page_that_the_code_names_exists(source: Path) -> None:
    # By its name alone: a message says docs/explanation/determinism.md, and there is one page of that name.
    texts = [path.read_text() for path in source.rglob("*") if path.suffix in (".py", ".yaml", ".tpl", ".txt")]
    pages = {page.name for page in PAGES}
    named_pages = {name.rpartition("/")[2] for text in texts for name in re.findall(r"\bdocs/([a-z/-]+\.md)", text)}
    assert named_pages - pages == set()
    assert len(pages - {"README.md"}) == len(PAGES), "two pages have the same name"


def test_the_wheel_that_documents_install_is_the_one_that_is_built() -> None:
    wheels = [name for document in DOCUMENTS for name in re.findall(r"[\w./-]+\.whl", document.read_text())]
    assert set(wheels) == {f"dist/virtualflow-{virtualflow.__version__}-py3-none-any.whl"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named_after_place)
def test_a_document_uses_the_words_of_the_glossary(document: Path) -> None:
    if document.name in ("glossary.md", "benchmarks.md", "resource.md", "README.md") and document.parent != ROOT:
        return
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", document.read_text(), flags=re.MULTILINE | re.DOTALL).lower()
    assert [word for word in FORMER_WORDS if word in text] == []


@pytest.mark.parametrize("word", WORDS)
def test_the_pages_of_a_job_explain_a_word_as_the_glossary_does(word: str) -> None:
    rows = [line.split(" | ") for line in (DOCS / "glossary.md").read_text().splitlines() if line.startswith("| ")]
    meanings = {row[0].removeprefix("| "): re.sub(r"; see \[.*", "", row[1]) for row in rows if len(row) > 1}
    meaning = meanings.get(word) or meanings[word.removesuffix("s")]
    assert meaning == WORDS[word]


@pytest.mark.parametrize("name", ["idea", "architecture"])
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    images = DOCS / "images"
    drawn = subprocess.run(
        [sys.executable, str(images / f"{name}.py")], check=True, capture_output=True, text=True, timeout=60
    )
    assert (images / f"{name}.svg").read_text() == drawn.stdout
    ElementTree.fromstring(drawn.stdout)


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert project["version"] == virtualflow.__version__ == chart["version"] == chart["appVersion"]
    shown = re.findall(r"virtualflow-(\d+\.\d+\.\d+)(?:-py3|\.tgz)", "".join(page.read_text() for page in DOCUMENTS))
    assert set(shown) == {project["version"]}


def test_the_numbers_of_compatibility_are_those_in_force() -> None:
    page = (DOCS / "reference" / "compatibility.md").read_text()
    assert f"| protocol | {PROTOCOL}; the oldest still spoken is {OLDEST_PROTOCOL} |" in page
    assert f"| numerics | {NUMERICS} |" in page
    assert f"speaks protocol {PROTOCOL} and has numerics {NUMERICS}." in (ROOT / "CHANGELOG.md").read_text()


def test_the_oldest_kubernetes_is_the_same_everywhere() -> None:
    oldest = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    assert oldest == ">=1.30.0-0"
    for document in (ROOT / "README.md", CHART / "README.md", DOCS / "reference" / "compatibility.md"):
        assert "1.30 or newer" in document.read_text(), document

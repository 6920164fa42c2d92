"""The frame of the repository keeps its promises: light imports, pinned versions, explained targets."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import versions
from tiers import not_run

ROOT = Path(__file__).parents[3]
TRAINER = ROOT / "trainer"


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@cache
def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pinned}


def development_requirements() -> list[Requirement]:
    extras = project()["optional-dependencies"]
    texts = project()["dependencies"] + extras["trainer"] + extras["test"] + extras["dev"]
    return [requirement for requirement in map(Requirement, texts) if requirement.name != project()["name"]]


def modules() -> list[Path]:
    return sorted(TRAINER.rglob("*.py"))


def import_in_fresh_interpreter(name: str, *unwanted: str) -> set[str]:
    """Import the module alone and return which of the unwanted ones came with it."""
    code = f"import sys; sys.path.insert(0, {str(TRAINER)!r}); import {name}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return set(unwanted) & set(done.stdout.split())


@pytest.mark.parametrize(
    "name",
    ["virtualflow", "virtualflow.coordinator.server", "virtualflow.protocol.http_client", "virtualflow.launcher.cli"],
)
def test_what_runs_beside_the_training_does_not_import_torch(name: str) -> None:
    assert import_in_fresh_interpreter(name, "torch", "numpy", "safetensors", "kopf", "kubernetes") == set()


def test_torch_is_an_extra_and_no_requirement() -> None:
    base = {Requirement(text).name for text in project()["dependencies"]}
    assert base.isdisjoint({"torch", "numpy", "safetensors", "kopf", "kubernetes"})


@pytest.mark.parametrize("requirement", development_requirements(), ids=lambda requirement: requirement.name)
def test_every_development_requirement_is_pinned_to_a_version_it_admits(requirement: Requirement) -> None:
    (pin,) = pins()[canonicalize_name(requirement.name)].specifier
    assert pin.operator == "=="
    assert requirement.specifier.contains(pin.version)


def test_what_is_installed_by_pins_admits_the_oldest_python_that_the_project_does() -> None:
    """On Debian 12, whose Python is 3.11.2, make refused a pin that wanted 3.11.5."""
    (oldest,) = SpecifierSet(project()["requires-python"])
    wanted = {
        name: installed.metadata["Requires-Python"] or ""
        for installed in metadata.distributions()
        if (name := canonicalize_name(installed.name)) in pins()
    }
    assert len(wanted) > 50
    newer = {name: text for name, text in wanted.items() if f"{oldest.version}.0" not in SpecifierSet(text)}
    assert newer == {}


def test_pins_are_public_versions_that_any_index_may_have() -> None:
    for name, pin in pins().items():
        (specifier,) = pin.specifier
        assert Version(specifier.version).local is None, name
        assert pin.url is None, name


def test_the_oldest_torch_that_is_tested_is_the_oldest_that_is_promised() -> None:
    (torch,) = (text for text in project()["optional-dependencies"]["trainer"] if text.startswith("torch"))
    assert versions.leg("newest@3.13", project()["optional-dependencies"]).wanted == (torch,)
    (oldest,) = versions.leg("oldest", project()["optional-dependencies"]).wanted
    name, _, version = oldest.partition("==")
    assert (name, torch.startswith(f"torch>={version},")) == ("torch", True)


@pytest.mark.parametrize(
    ("word", "free"), [("2.6.0", {"torch", "transformers"}), ("integrations", {"transformers", "lightning"})]
)
def test_what_is_tried_in_other_versions_is_not_pinned_and_all_else_is(word: str, free: set[str]) -> None:
    extras = project()["optional-dependencies"]
    leg = versions.leg(word, extras)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    held = {versions.name_of(pin) for pin in versions.constraints(leg, extras, project()["dependencies"], lines)}
    assert held.isdisjoint(free)
    assert held >= {"numpy", "pytest", "aiohttp", "safetensors"}
    assert ("torch" in held) == (word == "integrations")


def test_a_version_that_cannot_be_had_is_told_in_a_line_and_fails() -> None:
    command = [sys.executable, str(ROOT / "tests" / "versions.py"), "newest@3.1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "newest@3.1: not run: there is no Python 3.1 here: put python3.1 on the PATH"
    assert done.returncode == versions.NOT_RUN


def test_the_package_and_the_distribution_have_one_version() -> None:
    text = (TRAINER / "virtualflow" / "_version.py").read_text()
    assert f'__version__ = "{project()["version"]}"' in text


def test_the_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert project()["license"] == "Apache-2.0"
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_package_says_that_it_is_typed() -> None:
    assert (TRAINER / "virtualflow" / "py.typed").exists()


def exported() -> Iterator[tuple[str, str]]:
    """Each name that a package exports, and the module that it comes from."""
    for package in sorted((TRAINER / "virtualflow").rglob("__init__.py")):
        for imported in ast.walk(ast.parse(package.read_text())):
            if isinstance(imported, ast.ImportFrom) and str(imported.module).startswith("virtualflow."):
                yield from ((str(imported.module), alias.name) for alias in imported.names if alias.name[0] != "_")


def test_every_exported_name_says_what_it_is() -> None:
    silent = []
    for module, name in exported():
        path = TRAINER / f"{module.replace('.', '/')}.py"
        for defined in ast.parse(path.read_text()).body if path.exists() else ():
            if isinstance(defined, ast.ClassDef | ast.FunctionDef) and defined.name == name:
                silent += [f"{module}.{name}"] * (ast.get_docstring(defined) is None)
    assert not silent


def test_make_alone_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    done = subprocess.run(["make"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    listed = re.findall(r"^  make ([\w-]+) +\S", done.stdout, re.MULTILINE)
    assert listed == phony.split()


def test_make_refuses_a_python_that_is_not_there_and_says_what_to_do() -> None:
    # --always-make: also where .venv exists already; the refusal comes before anything is touched.
    done = subprocess.run(
        ["make", "--always-make", "venv", "PYTHON=no-such-python"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "make PYTHON=" in done.stderr


def test_the_manifest_of_the_example_is_a_job_of_this_machine_too() -> None:
    job = yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("virtualflow.dev/v1alpha1", "VirtualFlowJob")
    spec = job["spec"]
    assert spec["minReplicas"] <= spec["replicas"] <= spec["maxReplicas"] <= spec["virtualNodes"]
    (container,) = spec["workerGroups"][0]["template"]["spec"]["containers"]
    assert (ROOT / container["command"][1]).exists()
    assert all(isinstance(word, str) for word in container["command"] + container["args"])


@pytest.mark.parametrize(
    ("reasons", "line"),
    [
        ([], ""),
        (["needs helm: put it on the PATH"], "1 test not run here: 1 needs helm (-rs lists them)"),
        (
            ["needs helm: put it on the PATH", "needs etcd and kube-apiserver", *["needs helm: name it by HELM"] * 2],
            "4 tests not run here: 3 need helm, 1 etcd and kube-apiserver (-rs lists them)",
        ),
        (
            ["another one's file", "needs root: it mounts", "the kernel gives huge pages always"],
            "3 tests not run here: 1 needs root, 2 for other reasons (-rs lists them)",
        ),
        (["one will do"], "1 test not run here: 1 for other reasons (-rs lists them)"),
    ],
    ids=["none", "one", "by what they need", "other reasons", "other reasons alone"],
)
def test_what_is_not_run_is_summed_up_in_one_line(reasons: list[str], line: str) -> None:
    assert not_run(reasons) == line


def test_nothing_names_the_machine_that_it_was_written_on() -> None:
    sources = [
        *modules(),
        *ROOT.glob("examples/*"),
        *ROOT.glob("*.toml"),
        ROOT / "Makefile",
        ROOT / "constraints.txt",
    ]
    for path in filter(Path.is_file, sources):
        assert not re.search(r"(?<![\w.])/(work|home|root|opt)/", path.read_text()), path

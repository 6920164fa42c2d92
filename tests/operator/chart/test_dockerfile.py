"""The images keep their promises, as far as the Dockerfile can tell: pinned, unprivileged, small, from any index."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pod_standard import beyond_restricted

ROOT = Path(__file__).parents[3]
PIP_OPTIONS_WITH_A_VALUE = {"--python", "--prefix", "--wheel-dir", "-r"}


class Stage(NamedTuple):
    """One stage of the Dockerfile: what it starts from, and its (instruction, arguments) in order."""

    base: str
    instructions: tuple[tuple[str, str], ...]

    def all_of(self, instruction: str) -> list[str]:
        return [arguments for name, arguments in self.instructions if name == instruction]


@cache
def stages() -> dict[str, Stage]:
    """Return the stages by name; the one without a name, which a build without a target makes, is ``default``."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line.split(None, 1) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    found: dict[str, Stage] = {}
    name, base, instructions = "", "", list[tuple[str, str]]()
    for instruction, arguments in [*lines, ["FROM", "the end"]]:
        if instruction != "FROM":
            instructions.append((instruction, arguments))
            continue
        if base:
            found[name] = Stage(base, tuple(instructions))
        base, _, name = arguments.partition(" AS ")
        name, instructions = name or "default", []
    return found


def ancestry(name: str) -> list[Stage]:
    """Return the stage and those that it builds upon, itself first."""
    stage = stages()[name]
    return [stage, *(ancestry(stage.base) if stage.base in stages() else [])]


def runs() -> list[str]:
    return [command for stage in stages().values() for command in stage.all_of("RUN")]


def pip_installs() -> list[list[str]]:
    """Return the words of each ``pip install`` and ``pip wheel``."""
    commands = [part for run in runs() for part in run.split(" && ")]
    return [shlex.split(command) for command in commands if re.match(r"\s*pip .*\b(install|wheel)\b", command)]


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@cache
def pinned_names() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")}


def sources_of_the_operator() -> str:
    return "\n".join(path.read_text() for path in sorted((ROOT / "operator").rglob("*.py")))


def test_a_build_without_a_target_makes_the_operator() -> None:
    assert list(stages())[-1] == "default"
    assert stages()["default"] == Stage("operator", ())


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_an_image_runs_as_a_user_that_run_as_non_root_accepts(image: str) -> None:
    user = next(user for stage in ancestry(image) for user in reversed(stage.all_of("USER")))
    # A kubelet refuses a name under runAsNonRoot, because it cannot know its number.
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_an_image_has_no_tools_that_built_it(image: str) -> None:
    built = {name for name in stages() if "build" in {stage.base for stage in ancestry(name)}}
    assert built == {"requirements", "project", "operator-dependencies", "trainer-dependencies"}
    assert image not in built
    assert not any("pip " in run for stage in ancestry(image) for run in stage.all_of("RUN"))
    (environment,) = [run for run in stages()["build"].all_of("RUN") if "venv" in run]
    assert "--without-pip" in environment


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_a_change_of_the_sources_does_not_install_the_dependencies_again(image: str) -> None:
    copied = stages()[f"{image}-dependencies"].all_of("COPY")
    assert copied == [f"--from=requirements /build/{image}.txt ./"]
    layers = stages()[image].all_of("COPY")
    assert layers[:2] == [
        f"--from={image}-dependencies /opt/virtualflow /opt/virtualflow",
        "--from=project /project /opt/virtualflow",
    ]


def test_the_operator_starts_isolated_and_has_console_scripts_for_people() -> None:
    assert stages()["operator"].all_of("ENTRYPOINT") == ['["python", "-I", "-u", "-m", "virtualflow_operator"]']
    assert {"virtualflow", "virtualflow-operator"} <= set(project()["scripts"])


def test_everything_is_installed_under_the_constraints() -> None:
    (environment,) = stages()["build"].all_of("ENV")
    assert "PIP_CONSTRAINT=/build/constraints.txt" in environment.split()
    assert stages()["build"].all_of("COPY") == ["constraints.txt ./"]
    for name in ("requirements", "project", "operator-dependencies", "trainer-dependencies"):
        assert stages()["build"] in ancestry(name), name


def test_nothing_is_installed_that_has_no_pin() -> None:
    extras = project()["optional-dependencies"]
    wanted = [*project()["dependencies"], *extras["operator"], *extras["trainer"]]
    for command in pip_installs():
        before = ["", *command]
        named = [word for option, word in zip(before, command, strict=False) if option not in PIP_OPTIONS_WITH_A_VALUE]
        wanted += [
            word for word in named if word not in {"pip", "install", "wheel", ".", "dist/*.whl"} and word[0] != "-"
        ]
    assert "scikit-learn" in wanted
    assert {canonicalize_name(Requirement(text).name) for text in wanted} <= pinned_names()


def test_the_requirements_of_both_images_are_those_of_the_project(tmp_path: Path) -> None:
    (command,) = stages()["requirements"].all_of("RUN")
    python, *arguments = shlex.split(command)
    assert python == "python"
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    subprocess.run([sys.executable, *arguments], cwd=tmp_path, check=True, timeout=60)
    for extra in ("operator", "trainer"):
        lines = (tmp_path / f"{extra}.txt").read_text().splitlines()
        assert lines == project()["dependencies"] + project()["optional-dependencies"][extra]


def test_no_index_is_named_but_by_who_builds() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "://" not in text
    assert not re.search(r"\b[\w-]+\.(org|com|io|net|dev)/", text)
    assert {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"} <= set(stages()["build"].all_of("ARG"))  # without a default


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_the_labels_tell_the_version_of_the_project(image: str) -> None:
    assert f"VERSION={project()['version']}" in stages()[image].all_of("ARG")
    (labels,) = stages()[image].all_of("LABEL")
    told = dict(word.split("=", 1) for word in shlex.split(labels))
    assert told["org.opencontainers.image.version"] == "${VERSION}"
    assert told["org.opencontainers.image.revision"] == "${REVISION}"
    assert told["org.opencontainers.image.licenses"] == project()["license"]


def test_what_is_copied_exists_and_is_all_that_the_engine_gets() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_in = {rule.removeprefix("!").rstrip("/") for rule in rules if rule.startswith("!")}
    copies = [copy.split() for stage in stages().values() for copy in stage.all_of("COPY")]
    copied = {source for words in copies if not words[0].startswith("--from=") for source in words[:-1]}
    assert copied == let_in
    assert all((ROOT / source).exists() for source in copied)
    assert set(rules) > {"**/__pycache__", "**/*.py[co]"}


def test_the_operator_asks_for_no_generated_class_of_the_kubernetes_client() -> None:
    """The image leaves the typed API classes and models out; whoever wants one again must let it in first."""
    typed = r"\b(?:[A-Z][A-Za-z]*V\d\w*Api|(?:Core|Apis|Custom\w+|Version)Api|V\d(?:alpha\d|beta\d)?[A-Z]\w+)\b"
    assert re.findall(typed, "api = CoreV1Api(); CustomObjectsApi, V1Pod, V1beta1Lease, ApiClient")[:3] == [
        "CoreV1Api",
        "CustomObjectsApi",
        "V1Pod",
    ]
    assert re.findall(typed, sources_of_the_operator()) == []


def test_what_kopf_imports_of_the_kubernetes_client_stays_in_the_image() -> None:
    """What is imported with kopf and the client today, in a fresh interpreter, is what the image keeps."""
    code = (
        "import sys, kopf, kubernetes.aio.client, kubernetes.aio.config, kubernetes.config\n"
        "parts = ('kubernetes.client.', 'kubernetes.aio.client.')\n"
        "print(*(n for n in sys.modules if n.startswith(tuple(p + k for p in parts for k in ('api.', 'models.')))))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    (install,) = stages()["operator-dependencies"].all_of("RUN")
    kept = set(re.findall(r"! -name (\w+)\.py", install)) - {"__init__"}
    assert {name.rsplit(".", 1)[1] for name in done.stdout.split()} == kept


def test_the_example_fits_the_restricted_pod_security_standard_and_writes_to_nothing_but_tmp() -> None:
    job = yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text())
    template = job["spec"]["workerGroups"][0]["template"]
    assert beyond_restricted(template["spec"]) == []
    (container,) = template["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    # torch does not even import its optimizers without a temporary directory.
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp"]
    assert [set(volume) for volume in template["spec"]["volumes"]] == [{"name", "emptyDir"}]

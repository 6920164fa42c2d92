"""The images keep their promises, as far as the Dockerfile can tell: locked, unprivileged, small, from any index."""

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
from pod_standard import beyond_restricted

ROOT = Path(__file__).parents[3]


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
    """Return the words of each command of pip."""
    commands = [part for run in runs() for part in run.split(" && ")]
    return [shlex.split(command) for command in commands if re.match(r"\s*(\S+ -m )?pip\b", command)]


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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
    assert built == {"project", "operator-dependencies", "trainer-dependencies"}
    assert image not in built
    assert not any("pip " in run for stage in ancestry(image) for run in stage.all_of("RUN"))
    (environment,) = [run for run in stages()["build"].all_of("RUN") if "venv" in run]
    assert "--without-pip" in environment


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_a_change_of_the_sources_does_not_install_the_dependencies_again(image: str) -> None:
    (copied,) = stages()[f"{image}-dependencies"].all_of("COPY")
    lock = {"operator": "images/operator.txt ./", "trainer": "images/trainer-${TORCH}.txt ./trainer.txt"}[image]
    assert copied == lock
    layers = stages()[image].all_of("COPY")
    assert layers[:2] == [
        f"--from={image}-dependencies /opt/virtualflow /opt/virtualflow",
        "--from=project /project /opt/virtualflow",
    ]


def test_the_operator_starts_isolated_and_has_console_scripts_for_people() -> None:
    assert stages()["operator"].all_of("ENTRYPOINT") == ['["python", "-I", "-u", "-m", "virtualflow_operator"]']
    assert {"virtualflow", "virtualflow-operator"} <= set(project()["scripts"])


def test_all_but_the_project_itself_is_installed_by_hashes_from_a_lock() -> None:
    *locked, project = sorted(pip_installs(), key=lambda command: "dist/*.whl" in command)
    assert len(locked) == 3
    for command in locked:
        assert "--require-hashes" in command
        assert command[-2] == "-r"
    assert {"--no-index", "--no-deps"} <= set(project)


def test_the_trainer_has_cuda_unless_the_build_for_cpus_is_asked_for() -> None:
    assert stages()["trainer-dependencies"].all_of("ARG") == ["TORCH=cuda"]
    assert {path.name for path in (ROOT / "images").glob("trainer-*")} == {"trainer-cuda.txt", "trainer-cpu.txt"}
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^TORCH \?= cuda$", makefile, re.MULTILINE)
    assert "--build-arg TORCH=$(TORCH) --target trainer -t virtualflow-trainer:dev" in makefile


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
    assert {"images/*.txt" if source.startswith("images/") else source for source in copied} == let_in
    assert all((ROOT / source.replace("${TORCH}", torch)).exists() for source in copied for torch in ("cpu", "cuda"))
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


@pytest.mark.slow
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

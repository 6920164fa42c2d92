"""Reads a ``VirtualFlowJob`` manifest as far as a run on this machine needs it: how many workers of how many
virtual nodes, and what each executes. Images, resources and volumes are a cluster's business and are not
looked at.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from virtualflow.atomic_file import read_regular
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.settings import (
    ACTIVATIONS,
    BACKOFF_LIMIT,
    ENV_ACTIVATIONS,
    ENV_DEVICE_MEMORY,
    ENV_HOST_MEMORY,
    ENV_REDUNDANCY,
    ENV_SHARD,
    MANIFEST_BACKOFF_LIMIT,
    MAX_MANIFEST,
    ON_NON_FINITE,
    PLACEMENTS,
    REDUNDANCIES,
    REPRODUCIBILITY,
    SHARD_CHOICES,
    BackwardSpec,
)
from virtualflow.protocol.wording import parse_bytes

API_GROUP = "virtualflow.dev/"
KIND = "VirtualFlowJob"
CONTAINER = "spec.workerGroups[0].template.spec.containers[0]"


@dataclass(frozen=True)
class JobManifest:
    name: str | None
    virtual_nodes: int | None
    replicas: int | None
    command: tuple[str, ...]
    """Command and arguments of a worker, variables expanded."""
    environment: Mapping[str, str]
    groups: tuple[str, ...] = ()
    """Names of its worker groups; the command is the first one's."""
    reproducibility: str | None = None
    on_non_finite: str | None = None
    verify: float | None = None
    """In which share of the steps one virtual node is computed by a second worker."""
    hang_seconds: int | None = None
    backoff_limit: int = BACKOFF_LIMIT
    """How often workers may crash without progress before the job has failed."""
    profile: str | None = None
    """Of its first group: the name of a file."""
    budget: Mapping[str, str] = field(default_factory=dict)
    """Of its first group: how much memory a worker may use, as its environment says it."""
    optimizer_placement: str | None = None
    backward: BackwardSpec | None = None
    """How far backward passes go."""
    sharding: Mapping[str, str] = field(default_factory=dict)
    """What is divided over the workers, and who else has a share, as a worker's environment says it."""
    every_steps: int | None = None
    every_seconds: int | None = None
    keep: int | None = None
    """When it wants checkpoints, and how many remain."""
    processes_per_worker: int | None = None
    memory: bool = False
    """Whether the last worker keeps a copy of the state in the coordinator's memory."""


def load_manifest(path: Path) -> JobManifest:
    """Read the manifest in ``path``.

    Raises:
        ConfigurationError: the file cannot be read or is not YAML, or what ``read_manifest`` raises.
    """
    try:
        text = read_regular(path, MAX_MANIFEST).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the manifest {path}: {_brief(error)}") from error
    import yaml

    from virtualflow.launcher.documents import describe_fault, parse_yaml

    try:
        documents = parse_yaml(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigurationError(f"the manifest {path} is not YAML: {describe_fault(error)}") from error
    if len(documents) != 1:
        raise ConfigurationError(
            f"the manifest {path} must hold exactly one document, a {KIND}; it holds {len(documents)}"
        )
    try:
        return read_manifest(documents[0])
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def read_manifest(document: object) -> JobManifest:
    """Read a parsed manifest.

    Raises:
        ConfigurationError: it is no ``VirtualFlowJob``, misses something, or asks for what only a cluster can
        do.
    """
    if not isinstance(document, Mapping):
        raise ConfigurationError(f"a manifest must be a mapping with apiVersion, kind and spec, not {_kind(document)}")
    version, kind = document.get("apiVersion"), document.get("kind")
    if kind != KIND or not isinstance(version, str) or not version.startswith(API_GROUP):
        raise ConfigurationError(
            f"it must be a {KIND} of {API_GROUP}v1alpha1, not {kind or 'no kind'} of {version or 'nothing'}"
        )
    spec = _mapping(document, "spec", "")
    groups = _sequence(spec, "workerGroups", "spec.")
    if not groups:
        raise ConfigurationError("spec.workerGroups is empty; the first group says what to run")
    group = _entry(groups[0], "spec.workerGroups[0]")
    template = _mapping(group, "template", "spec.workerGroups[0].")
    pod = _mapping(template, "spec", "spec.workerGroups[0].template.")
    containers = _sequence(pod, "containers", "spec.workerGroups[0].template.spec.")
    if not containers:
        raise ConfigurationError(
            "spec.workerGroups[0].template.spec.containers is empty; the first one says what to run"
        )
    container = _entry(containers[0], CONTAINER)
    environment = _environment(container)
    words = _words(container, "command") + _words(container, "args")
    if not _words(container, "command"):
        raise ConfigurationError(
            f"{CONTAINER}.command is missing; without an image there is no entry point to fall back on"
        )
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    elasticity = {} if spec.get("elasticity") is None else _mapping(spec, "elasticity", "spec.")
    verify = {} if spec.get("verify") is None else _mapping(spec, "verify", "spec.")
    checkpoint = {} if spec.get("checkpoint") is None else _mapping(spec, "checkpoint", "spec.")
    return JobManifest(
        name=name if isinstance(name, str) and name else None,
        virtual_nodes=_count(spec, "virtualNodes"),
        replicas=_count(spec, "replicas"),
        processes_per_worker=_count(spec, "processesPerWorker"),
        command=tuple(expand(word, environment) for word in words),
        environment=environment,
        groups=tuple(_group_name(group, index) for index, group in enumerate(groups)),
        reproducibility=_choice(spec, "reproducibility", REPRODUCIBILITY),
        on_non_finite=_choice(spec, "onNonFinite", ON_NON_FINITE),
        verify=_share(verify, "sample", "spec.verify."),
        hang_seconds=_count(elasticity, "hangSeconds", "spec.elasticity."),
        backoff_limit=_backoff_limit(spec),
        profile=_profile(group),
        budget=_budget(group),
        optimizer_placement=_choice(spec, "optimizerPlacement", PLACEMENTS),
        backward=_backward(spec),
        sharding=_sharding(spec),
        every_steps=_count(checkpoint, "everySteps", "spec.checkpoint."),
        every_seconds=_count(checkpoint, "everySeconds", "spec.checkpoint."),
        keep=_count(checkpoint, "keep", "spec.checkpoint."),
        memory=_flag(checkpoint, "memory", "spec.checkpoint."),
    )


def expand(word: str, environment: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` as Kubernetes does: unknown names stay as they are, ``$$`` is a dollar sign."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)", value, word)


def local_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command with this interpreter in the place of a first word that means Python."""
    if command and re.fullmatch(r"(/usr(/local)?/bin/)?python(3(\.[0-9]+)?)?", command[0]):
        return (sys.executable, *command[1:])
    return command


def _environment(container: Mapping[str, object]) -> dict[str, str]:
    if container.get("envFrom"):
        raise ConfigurationError(
            f"{CONTAINER}.envFrom needs a cluster; a run on this machine takes env with name and value"
        )
    environment: dict[str, str] = {}
    entries = container.get("env")
    if entries is None:
        return environment
    if not isinstance(entries, list):
        raise ConfigurationError(f"{CONTAINER}.env must be a list of name and value, not {_kind(entries)}")
    for index, item in enumerate(entries):
        place = f"{CONTAINER}.env[{index}]"
        entry = _entry(item, place)
        name, value = entry.get("name"), entry.get("value", "")
        if not isinstance(name, str) or not name or "=" in name:
            raise ConfigurationError(f"{place}.name must be the name of a variable")
        if "valueFrom" in entry:
            raise ConfigurationError(
                f"{place} takes {name} from the cluster (valueFrom); a run on this machine needs a value"
            )
        if not isinstance(value, str):
            raise ConfigurationError(f"{place}.value of {name} must be a string; put it in quotes")
        environment[name] = expand(value, environment)
    return environment


def _words(container: Mapping[str, object], key: str) -> tuple[str, ...]:
    words = container.get(key)
    if words is None:
        return ()
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigurationError(f"{CONTAINER}.{key} must be a list of strings; put numbers in quotes")
    return tuple(words)


def _group_name(group: object, index: int) -> str:
    name = _entry(group, f"spec.workerGroups[{index}]").get("name")
    return name if isinstance(name, str) and name else str(index)


def _profile(group: Mapping[str, object]) -> str | None:
    name = group.get("profile")
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigurationError(f"spec.workerGroups[0].profile must be the name of a file, not {name!r}")
    return name


def _budget(group: Mapping[str, object]) -> dict[str, str]:
    if group.get("memory") is None:
        return {}
    place = "spec.workerGroups[0].memory."
    memory = _mapping(group, "memory", "spec.workerGroups[0].")
    if memory.get("device") is None:
        raise ConfigurationError(f"{place}device is missing; say how much memory of the device a worker may use")
    budget = {}
    for key, name in (("device", ENV_DEVICE_MEMORY), ("host", ENV_HOST_MEMORY)):
        size = memory.get(key)
        if size is not None:
            if not isinstance(size, str):
                raise ConfigurationError(f"{place}{key} must be a size like 24Gi, not {size!r}")
            budget[name] = str(parse_bytes(size))
    activations = _choice(memory, "activations", ACTIVATIONS, place)
    return budget if activations is None else budget | {ENV_ACTIVATIONS: activations}


def _backward(spec: Mapping[str, object]) -> BackwardSpec | None:
    try:
        return msgspec.convert(spec.get("backward"), BackwardSpec | None)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"spec.backward cannot be read: {error}") from None


def _sharding(spec: Mapping[str, object]) -> dict[str, str]:
    if spec.get("sharding") is None:
        return {}
    sharding, place = _mapping(spec, "sharding", "spec."), "spec.sharding."
    what = _choice(sharding, "what", SHARD_CHOICES, place)
    if what is None:
        raise ConfigurationError(f"{place}what is missing; it must be {' or '.join(SHARD_CHOICES)}")
    redundancy = _choice(sharding, "redundancy", REDUNDANCIES, place)
    if redundancy == "Checkpoint" and spec.get("checkpoint") is None:
        raise ConfigurationError(
            f"{place}redundancy is Checkpoint, and spec.checkpoint is missing; add one, or let it be Peer or None"
        )
    return {ENV_SHARD: what} if redundancy is None else {ENV_SHARD: what, ENV_REDUNDANCY: redundancy}


def _choice(spec: Mapping[str, object], key: str, choices: Collection[str], place: str = "spec.") -> str | None:
    wanted = spec.get(key)
    if wanted is None:
        return None
    if not isinstance(wanted, str) or wanted not in choices:
        raise ConfigurationError(f"{place}{key} must be {' or '.join(choices)}, not {wanted!r}")
    return wanted


def _count(spec: Mapping[str, object], key: str, place: str = "spec.", least: int = 1) -> int | None:
    number = spec.get(key)
    if number is None:
        return None
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ConfigurationError(f"{place}{key} must be a whole number of at least {least}, not {number!r}")
    return number


def _backoff_limit(spec: Mapping[str, object]) -> int:
    limit = _count(spec, "backoffLimit", least=0)
    return MANIFEST_BACKOFF_LIMIT if limit is None else limit


def _share(spec: Mapping[str, object], key: str, place: str) -> float | None:
    number = spec.get(key)
    if number is None:
        return None
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number <= 1:
        raise ConfigurationError(f"{place}{key} must be a number from 0 to 1, not {number!r}")
    return float(number)


def _flag(spec: Mapping[str, object], key: str, place: str) -> bool:
    value = spec.get(key, False)
    if not isinstance(value, bool):
        raise ConfigurationError(f"{place}{key} must be true or false, not {value!r}")
    return value


def _mapping(parent: Mapping[str, object], key: str, place: str) -> Mapping[str, object]:
    if key not in parent:
        raise ConfigurationError(f"{place}{key} is missing")
    return _entry(parent[key], f"{place}{key}")


def _sequence(parent: Mapping[str, object], key: str, place: str) -> list[object]:
    value = parent.get(key)
    if value is None:
        raise ConfigurationError(f"{place}{key} is missing")
    if not isinstance(value, list):
        raise ConfigurationError(f"{place}{key} must be a list, not {_kind(value)}")
    return value


def _entry(value: object, place: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{place} must be a mapping, not {_kind(value)}")
    return value


def _kind(value: object) -> str:
    names = {"NoneType": "empty", "str": "a string", "list": "a list", "dict": "a mapping"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")


def _brief(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8 text"

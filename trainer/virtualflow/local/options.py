"""What ``virtualflow run`` was asked for, checked as a whole before anything is started."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from virtualflow import settings as s
from virtualflow.device_profile import read_profile
from virtualflow.environment import read_number
from virtualflow.errors import ConfigurationError
from virtualflow.local.manifest import JobManifest, load_manifest, local_command
from virtualflow.local.schedule import Group, most_workers, parse_schedule


@dataclass(frozen=True)
class RunOptions:
    """A job to run on this machine."""

    name: str | None
    """Asked for by the user."""
    suggestion: str
    """What to call it otherwise."""
    command: tuple[str, ...]
    """Of each worker."""
    environment: Mapping[str, str]
    """Of each worker, beyond this process's."""
    workers: int
    virtual_nodes: int | None
    schedule: tuple[Group, ...]
    report: Path | None
    audit: Path | None
    checkpoint_dir: Path | None
    heartbeat_limit: float
    rebalance_gain: float
    port: int
    plain: bool
    log_dir: Path | None


def resolve(arguments: Namespace) -> RunOptions:
    """Check the command line's arguments and what they name.

    Raises:
        ConfigurationError: something cannot be done; nothing has been started.
    """
    environment: dict[str, str] = {}
    virtual_nodes: int | None = arguments.virtual_nodes
    workers: int | None = arguments.workers
    suggestion = "job"
    manifest: JobManifest | None = None
    if arguments.manifest is not None:
        if arguments.script is not None:
            raise ConfigurationError("give either a script or -f with a manifest; a manifest says itself what to run")
        manifest = load_manifest(Path(arguments.manifest))
        command = _executable(local_command(manifest.command))
        environment.update(manifest.environment)
        suggestion = manifest.name or Path(arguments.manifest).stem
        virtual_nodes = virtual_nodes if virtual_nodes is not None else manifest.virtual_nodes
        workers = workers if workers is not None else manifest.replicas
        if manifest.reproducibility is not None:
            environment[s.ENV_REPRODUCIBILITY] = manifest.reproducibility
        if manifest.profile is not None and arguments.profile is None:
            # A path of a container may not exist here; the worker says so, and trains without it.
            environment[s.ENV_PROFILE] = str((Path(arguments.manifest).parent / manifest.profile).absolute())
    elif arguments.script is not None:
        script = Path(arguments.script)
        check_script(script)
        command = (sys.executable, "-u", arguments.script, *arguments.args)
        suggestion = script.stem
    else:
        raise ConfigurationError("say what to run: a script, or -f with a manifest")
    if arguments.profile is not None:
        read_profile(Path(arguments.profile))
        environment[s.ENV_PROFILE] = str(Path(arguments.profile).absolute())
    schedule = parse_schedule(arguments.schedule or "")
    if virtual_nodes is None:
        inherited = read_number(s.ENV_VIRTUAL_NODES, int, 1)
        virtual_nodes = None if inherited is None else int(inherited)
    workers = s.WORKERS if workers is None else workers
    _check_numbers(arguments, workers, virtual_nodes, schedule)
    checkpoint_dir = _checkpoints(arguments, manifest, environment)
    for option, path in (("--report", arguments.report), ("--audit", arguments.audit)):
        if path is not None:
            check_target(Path(path), option)
    log_dir = None
    if arguments.log_dir is not None:
        log_dir = Path(arguments.log_dir).absolute()
        _check_directory(log_dir, "--log-dir")
    if virtual_nodes is not None:
        environment[s.ENV_VIRTUAL_NODES] = str(virtual_nodes)
    if manifest is not None and len(manifest.groups) > 1:
        print(
            f"virtualflow: of the manifest's {len(manifest.groups)} worker groups only the first, "
            f"{manifest.groups[0]}, runs on this machine",
            file=sys.stderr,
        )
    return RunOptions(
        name=arguments.name,
        suggestion=suggestion,
        command=command,
        environment=environment,
        workers=workers,
        virtual_nodes=virtual_nodes,
        schedule=schedule,
        report=Path(arguments.report) if arguments.report is not None else None,
        audit=Path(arguments.audit) if arguments.audit is not None else None,
        checkpoint_dir=checkpoint_dir,
        heartbeat_limit=arguments.heartbeat_limit,
        rebalance_gain=arguments.rebalance_gain,
        port=arguments.port,
        plain=arguments.plain,
        log_dir=log_dir,
    )


def check_script(script: Path) -> None:
    """Check that a script can be read.

    Raises:
        ConfigurationError: it cannot.
    """
    if script.is_dir():
        raise ConfigurationError(f"{script} is a directory; name the script itself")
    try:
        with script.open("rb"):
            pass
    except FileNotFoundError:
        raise ConfigurationError(f"there is no script {script}") from None
    except OSError as error:
        raise ConfigurationError(f"cannot read the script {script}: {error.strerror}") from error


def _executable(command: tuple[str, ...]) -> tuple[str, ...]:
    if shutil.which(command[0]) is None:
        raise ConfigurationError(f"the manifest's command {command[0]!r} is not a program of this machine")
    if command[0] == sys.executable:
        for word in command[1:]:
            if word in ("-m", "-c"):
                break
            if not word.startswith("-"):
                check_script(Path(word))
                break
    return command


def _check_numbers(arguments: Namespace, workers: int, virtual_nodes: int | None, schedule: tuple[Group, ...]) -> None:
    most = most_workers(workers, schedule)
    if workers < 1:
        raise ConfigurationError(f"--workers {workers}: a job needs at least one worker")
    if virtual_nodes is not None and virtual_nodes < 1:
        raise ConfigurationError(f"--virtual-nodes {virtual_nodes}: a job needs at least one virtual node")
    if virtual_nodes is not None and virtual_nodes > s.MAX_VIRTUAL_NODES:
        raise ConfigurationError(f"--virtual-nodes {virtual_nodes}: at most {s.MAX_VIRTUAL_NODES} are possible")
    if most > s.MAX_WORKERS:
        raise ConfigurationError(f"{most} workers: at most {s.MAX_WORKERS} are possible")
    if virtual_nodes is not None and most > virtual_nodes:
        raise ConfigurationError(
            f"{most} workers cannot share {virtual_nodes} virtual nodes, as each carries at least one; "
            "ask for fewer workers or more virtual nodes"
        )
    least = s.LEAST_HEARTBEAT_LIMIT
    if not least <= arguments.heartbeat_limit <= 86_400:
        raise ConfigurationError(
            f"--heartbeat-limit {arguments.heartbeat_limit:g}: it must be between {least:g} and 86400 seconds"
        )
    if not 0 < arguments.rebalance_gain <= 1:
        raise ConfigurationError(
            f"--rebalance-gain {arguments.rebalance_gain:g}: it must be above 0 and at most 1 (1: never)"
        )
    if not 0 <= arguments.port <= 65_535:
        raise ConfigurationError(f"--port {arguments.port}: a port is between 1 and 65535, or 0 for any that is free")
    for option, value in (
        ("--checkpoint-steps", arguments.checkpoint_steps),
        ("--checkpoint-keep", arguments.checkpoint_keep),
    ):
        if value is not None and value < 1:
            raise ConfigurationError(f"{option} {value}: it must be at least 1")
    if arguments.checkpoint_seconds is not None and not arguments.checkpoint_seconds >= 0:
        raise ConfigurationError(f"--checkpoint-seconds {arguments.checkpoint_seconds:g}: it must not be negative")


def _checkpoints(arguments: Namespace, manifest: JobManifest | None, environment: dict[str, str]) -> Path | None:
    given = {
        s.ENV_CHECKPOINT_STEPS: arguments.checkpoint_steps,
        s.ENV_CHECKPOINT_SECONDS: arguments.checkpoint_seconds,
        s.ENV_CHECKPOINT_KEEP: arguments.checkpoint_keep,
    }
    if manifest is not None and arguments.checkpoint_dir is not None:
        asked = {
            s.ENV_CHECKPOINT_STEPS: manifest.every_steps,
            s.ENV_CHECKPOINT_SECONDS: manifest.every_seconds,
            s.ENV_CHECKPOINT_KEEP: manifest.keep,
        }
        given = {name: value if value is not None else asked[name] for name, value in given.items()}
    environment.update({name: str(value) for name, value in given.items() if value is not None})
    if arguments.checkpoint_dir is None:
        inherited = environment.get(s.ENV_CHECKPOINT_DIR) or os.environ.get(s.ENV_CHECKPOINT_DIR, "").strip()
        return Path(inherited) if inherited else None
    directory = Path(arguments.checkpoint_dir).absolute()
    _check_directory(directory, "--checkpoint-dir")
    environment[s.ENV_CHECKPOINT_DIR] = str(directory)
    return directory


def _check_directory(path: Path, option: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigurationError(f"{option} {path}: no files can be written there ({error.strerror})") from error


def check_target(path: Path, option: str) -> None:
    """Check that a file can be written where ``option`` wants it.

    Raises:
        ConfigurationError: it cannot.
    """
    if path.is_dir():
        raise ConfigurationError(f"{option} {path}: this is a directory; name a file")
    try:
        if path.exists():
            with path.open("ab"):
                pass
        if path.is_file() or not path.exists():
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass
    except OSError as error:
        raise ConfigurationError(f"{option} {path}: it cannot be written ({error.strerror})") from error

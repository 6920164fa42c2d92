"""What ``virtualflow run`` was asked for, checked as a whole before anything is started."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from virtualflow.errors import ConfigurationError
from virtualflow.launcher.fault_schedule import Group, most_workers, parse_schedule
from virtualflow.launcher.manifest import JobManifest, load_manifest, local_command
from virtualflow.launcher.training_program import TrainingProgram, program_of
from virtualflow.launcher.usage import complain
from virtualflow.protocol.device_profile import read_profile
from virtualflow.protocol.environment import read_number
from virtualflow.protocol.settings import (
    ENV_BACKWARD,
    ENV_CHECKPOINT_DIR,
    ENV_CHECKPOINT_KEEP,
    ENV_CHECKPOINT_MEMORY,
    ENV_CHECKPOINT_SECONDS,
    ENV_CHECKPOINT_STEPS,
    ENV_DEVICE_MEMORY,
    ENV_HOST_MEMORY,
    ENV_ON_NON_FINITE,
    ENV_OPTIMIZER_PLACEMENT,
    ENV_PROFILE,
    ENV_REDUNDANCY,
    ENV_REPRODUCIBILITY,
    ENV_SHARD,
    ENV_SIGN,
    ENV_TRACE_DIR,
    ENV_TRUST,
    ENV_TURNS,
    ENV_VERIFY,
    ENV_VIRTUAL_NODES,
    MAX_VIRTUAL_NODES,
    MAX_WORKERS,
    WORKERS,
)
from virtualflow.protocol.signatures import SigningKeys
from virtualflow.protocol.wording import counted, parse_bytes


@dataclass(frozen=True)
class RunOptions:
    name: str | None
    """Asked for by the user."""
    suggestion: str
    """What to call it otherwise."""
    command: tuple[str, ...]
    """Of each worker."""
    environment: Mapping[str, str]
    """Of each worker, beyond this process's."""
    workers: int
    processes_per_worker: int
    virtual_nodes: int | None
    schedule: tuple[Group, ...]
    report: Path | None
    audit: Path | None
    stop_after: int | None
    """The last step to make; ``None``: all of them."""
    checkpoint_dir: Path | None
    heartbeat_limit: float
    rebalance_gain: float
    hang_seconds: float | None
    """``None``: as the coordinator finds it from the job's steps."""
    backoff_limit: int
    """How often workers may crash without progress before the job has failed."""
    port: int
    insecure_plaintext: bool
    """No certificates: nothing is encrypted."""
    web: bool
    """Say where the live page is."""
    plain: bool
    log_dir: Path | None


def resolve(arguments: Namespace) -> RunOptions:
    """Check the command line's arguments and what they name."""
    job, source, title = _asked_for(arguments)
    environment = dict(job.environment)
    if job.reproducibility is not None:
        environment[ENV_REPRODUCIBILITY] = job.reproducibility
    on_non_finite = arguments.on_non_finite or job.on_non_finite
    if on_non_finite is not None:
        environment[ENV_ON_NON_FINITE] = on_non_finite
    verify = arguments.verify if arguments.verify is not None else job.verify
    if verify is not None:
        environment[ENV_VERIFY] = str(verify)
    environment |= {**job.budget, **_memory(arguments, job)}
    if job.optimizer_placement is not None:
        environment[ENV_OPTIMIZER_PLACEMENT] = job.optimizer_placement
    if job.backward is not None:
        environment[ENV_BACKWARD] = msgspec.json.encode(job.backward).decode()
    asked = {ENV_SHARD: arguments.shard, ENV_REDUNDANCY: arguments.redundancy}
    environment |= {**job.sharding, **{name: word.capitalize() for name, word in asked.items() if word is not None}}
    if arguments.profile is not None:
        read_profile(Path(arguments.profile))
        environment[ENV_PROFILE] = str(Path(arguments.profile).absolute())
    elif job.profile is not None:
        # A path of a container may not exist here; the worker says so, and trains without it.
        environment[ENV_PROFILE] = str((source.parent / job.profile).absolute())
    if arguments.turns is not None:
        environment[ENV_TURNS] = str(Path(arguments.turns).absolute())
    if arguments.trace is not None:
        environment[ENV_TRACE_DIR] = str(_new_trace(Path(arguments.trace).absolute()))
    schedule = parse_schedule(arguments.schedule or "")
    numbers = (arguments.virtual_nodes, job.virtual_nodes, read_number(ENV_VIRTUAL_NODES, int, 1))
    virtual_nodes = next((int(number) for number in numbers if number is not None), None)
    workers = next(number for number in (arguments.workers, job.replicas, WORKERS) if number is not None)
    processes = next((k for k in (arguments.processes_per_worker, job.processes_per_worker) if k is not None), 1)
    _check_sizes(most_workers(workers, schedule), processes, virtual_nodes)
    if processes > 1:
        if arguments.turns is not None:
            raise ConfigurationError("--turns is for workers of one process; leave out --processes-per-worker")
        _divide_host_memory(environment, processes)
    if virtual_nodes is not None:
        environment[ENV_VIRTUAL_NODES] = str(virtual_nodes)
    checkpoint_dir = _checkpoints(arguments, job, environment)
    log_dir = None
    if arguments.log_dir is not None:
        log_dir = Path(arguments.log_dir).absolute()
        _check_directory(log_dir, "--log-dir")
    if len(job.groups) > 1:
        complain(
            f"of the manifest's {len(job.groups)} worker groups only the first, {job.groups[0]}, runs on this machine"
        )
    return RunOptions(
        name=arguments.name,
        suggestion=job.name or title,
        command=job.command,
        environment=environment,
        workers=workers,
        processes_per_worker=processes,
        virtual_nodes=virtual_nodes,
        schedule=schedule,
        report=_target(arguments.report, "--report"),
        audit=_target(arguments.audit, "--audit"),
        stop_after=arguments.stop_after,
        checkpoint_dir=checkpoint_dir,
        heartbeat_limit=arguments.heartbeat_limit,
        rebalance_gain=arguments.rebalance_gain,
        hang_seconds=arguments.hang_seconds if arguments.hang_seconds is not None else job.hang_seconds,
        backoff_limit=job.backoff_limit,
        port=arguments.port,
        insecure_plaintext=arguments.insecure_plaintext,
        web=arguments.web,
        plain=arguments.plain,
        log_dir=log_dir,
    )


def _asked_for(arguments: Namespace) -> tuple[JobManifest, Path, str]:
    """The job, the manifest's file, and a name; a script is a manifest that says no more than its command."""
    if arguments.manifest is not None:
        if arguments.script is not None or arguments.module:
            raise ConfigurationError("give either a script or -f with a manifest; a manifest says itself what to run")
        source = Path(arguments.manifest)
        manifest = load_manifest(source)
        job = replace(manifest, command=_executable(local_command(manifest.command), manifest.environment))
        title = source.stem
    else:
        if arguments.script is None:
            raise ConfigurationError("say what to run: a script, -m with a module, or -f with a manifest")
        program = TrainingProgram(arguments.script, arguments.module)
        program.check()
        source, title = Path(), program.title
        job = JobManifest(None, None, None, (sys.executable, "-u", *program.words, *arguments.args), {})
    if job.command[0] == sys.executable and "PYTHONPATH" not in job.environment:
        check_trainer()
    return job, source, title


def _memory(arguments: Namespace, job: JobManifest) -> dict[str, str]:
    """What workers are told of the memory that they may use, where that is not as the manifest says."""
    given = {ENV_DEVICE_MEMORY: arguments.device_memory, ENV_HOST_MEMORY: arguments.host_memory}
    if arguments.host_memory is not None and arguments.device_memory is None and not job.budget:
        raise ConfigurationError("--host-memory says what may be swapped beside --device-memory; give both")
    return {name: str(parse_bytes(size)) for name, size in given.items() if size is not None}


def check_trainer() -> None:
    """Check that this interpreter has what a training script needs of the library."""
    missing = [name for name in ("torch", "numpy", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"training needs {', '.join(missing)}, not installed here; run: pip install 'virtualflow[trainer]'"
        )


def _executable(command: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, ...]:
    if shutil.which(command[0]) is None:
        raise ConfigurationError(f"the manifest's command {command[0]!r} is not a program of this machine")
    program = program_of(command[1:]) if command[0] == sys.executable else None
    if program is not None:
        program.check({**os.environ, **environment})
    return command


def _divide_host_memory(environment: dict[str, str], processes: int) -> None:
    """What a worker may use of the host is for all its processes; of its device, each has one."""
    host = environment.get(ENV_HOST_MEMORY)
    if host is not None:
        environment[ENV_HOST_MEMORY] = str(max(1, int(host) // processes))


def _check_sizes(workers: int, processes: int, virtual_nodes: int | None) -> None:
    most = workers * processes
    if most > MAX_WORKERS:
        of_each = "" if processes == 1 else f" of {processes} processes"
        possible = MAX_WORKERS // processes
        raise ConfigurationError(f"{counted(workers, 'worker')}{of_each}: at most {possible} are possible")
    if virtual_nodes is None:
        return
    if virtual_nodes > MAX_VIRTUAL_NODES:
        raise ConfigurationError(f"{counted(virtual_nodes, 'virtual node')}: at most {MAX_VIRTUAL_NODES} are possible")
    if most > virtual_nodes:
        of_each = "" if processes == 1 else f" of {processes} processes"
        raise ConfigurationError(
            f"{counted(workers, 'worker')}{of_each} cannot share {counted(virtual_nodes, 'virtual node')}, as each "
            f"{'is' if processes == 1 else 'process is'} assigned at least one; ask for fewer workers or more virtual "
            "nodes"
        )


def _checkpoints(arguments: Namespace, job: JobManifest, environment: dict[str, str]) -> Path | None:
    given = {
        ENV_CHECKPOINT_STEPS: arguments.checkpoint_steps,
        ENV_CHECKPOINT_SECONDS: arguments.checkpoint_seconds,
        ENV_CHECKPOINT_KEEP: arguments.checkpoint_keep,
    }
    if arguments.checkpoint_dir is not None:
        asked = {
            ENV_CHECKPOINT_STEPS: job.every_steps,
            ENV_CHECKPOINT_SECONDS: job.every_seconds,
            ENV_CHECKPOINT_KEEP: job.keep,
        }
        given = {name: value if value is not None else asked[name] for name, value in given.items()}
    environment.update({name: str(value) for name, value in given.items() if value is not None})
    sign, trust = (None if path is None else Path(path).absolute() for path in (arguments.sign, arguments.trust))
    SigningKeys.read(sign, trust)
    environment.update({name: str(path) for name, path in ((ENV_SIGN, sign), (ENV_TRUST, trust)) if path is not None})
    if arguments.checkpoint_memory or job.memory:
        environment[ENV_CHECKPOINT_MEMORY] = "1"
    if arguments.checkpoint_dir is None:
        inherited = environment.get(ENV_CHECKPOINT_DIR) or os.environ.get(ENV_CHECKPOINT_DIR, "").strip()
        if not inherited:
            return None
        directory = Path(inherited).absolute()
        environment[ENV_CHECKPOINT_DIR] = str(directory)
        return directory
    directory = Path(arguments.checkpoint_dir).absolute()
    _check_directory(directory, "--checkpoint-dir")
    environment[ENV_CHECKPOINT_DIR] = str(directory)
    return directory


def _new_trace(directory: Path) -> Path:
    """The directory of a trace, made if it is missing; two runs in one would look like one."""
    _check_directory(directory, "--trace")
    if any(directory.iterdir()):
        raise ConfigurationError(f"--trace {directory}: there is something in it already; name a new directory")
    return directory


def _check_directory(path: Path, option: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigurationError(f"{option} {path}: no files can be written there ({error.strerror})") from error


def _target(path: str | None, option: str) -> Path | None:
    if path is None:
        return None
    check_target(Path(path), option)
    return Path(path)


def check_target(path: Path, option: str) -> None:
    """Check that a file can be written where ``option`` wants it."""
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

"""Starts the worker processes of a local job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from virtualflow.launcher.coordinator_process import HOST
from virtualflow.launcher.settings import ALLOCATOR_ENVIRONMENT
from virtualflow.launcher.supervisor import Stream, Supervisor
from virtualflow.launcher.worker_table import WorkerProcess, WorkerTable
from virtualflow.protocol.settings import (
    CUBLAS_WORKSPACE,
    ENV_ADDRESS,
    ENV_AUDIT_DIR,
    ENV_COORDINATOR,
    ENV_CUBLAS_WORKSPACE,
    ENV_HASH_SEED,
    ENV_TOKEN,
    ENV_WORKER,
    HASH_SEED,
)


@dataclass(frozen=True, kw_only=True)
class WorkerCommand:
    """What all workers of a job have in common."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Beyond this process's."""
    coordinator: str
    token: str
    logs: Path
    """The directory of their output."""
    audit: Path | None
    """The directory in which they note who processed which samples."""


def start_worker(
    what: WorkerCommand, supervisor: Supervisor, table: WorkerTable, sink: Callable[[WorkerProcess, Stream, str], None]
) -> WorkerProcess:
    """Start one more worker under the lowest name that is free, and enter it in the table.

    Raises:
        OSError: the program cannot be executed.
    """
    ordinal, number = table.free_ordinal(), len(table.workers)
    name = f"worker-{ordinal}"
    held: list[WorkerProcess] = []
    process = supervisor.start(
        name,
        what.command,
        worker_environment(what, name),
        what.logs / f"{name}.log",
        lambda stream, text: sink(held[0], stream, text),
    )
    worker = WorkerProcess(name, ordinal, number, process, process.pid)
    held.append(worker)
    table.workers.append(worker)
    return worker


def worker_environment(what: WorkerCommand, name: str) -> dict[str, str]:
    environment = {
        **ALLOCATOR_ENVIRONMENT,
        ENV_HASH_SEED: str(HASH_SEED),
        ENV_CUBLAS_WORKSPACE: CUBLAS_WORKSPACE,
        **{key: value for key, value in os.environ.items() if key != ENV_AUDIT_DIR},
        "PYTHONUNBUFFERED": "1",
        **what.environment,
        ENV_COORDINATOR: what.coordinator,
        ENV_TOKEN: what.token,
        ENV_WORKER: name,
        ENV_ADDRESS: HOST,
    }
    if what.audit is not None:
        environment[ENV_AUDIT_DIR] = str(what.audit)
    return environment

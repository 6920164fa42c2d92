"""Processes of measurements: the environment that all sides get, and jobs of the command line."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 900
"""Seconds after which a job of a measurement is taken to hang."""
GRACE = 15
"""Seconds for a process to end after SIGTERM."""


def environment(**variables: str | int) -> dict[str, str]:
    """One thread a worker, this tree's library, examples and help of tests; nothing of a job around this one."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VIRTUALFLOW_")}
    # Behind them what this process was given: packages of a machine that has none in its interpreter.
    given = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    path = os.pathsep.join([*(str(ROOT / part) for part in ("trainer", "operator", ".", "examples", "tests")), *given])
    return inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in variables.items()}


def job_command(*arguments: str | int) -> list[str]:
    """The command line of a job on this machine."""
    return [sys.executable, "-m", "virtualflow", "run", "--plain", *map(str, arguments)]


def run_job(*arguments: str | int, **variables: str | int) -> tuple[dict[str, Any], str]:
    """Run ``virtualflow run`` to its end; the report and what the script printed."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = job_command("--report", report.as_posix(), *arguments)
        done = subprocess.run(
            command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, check=False, timeout=LIMIT
        )
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
        return json.loads(report.read_text()), done.stdout


def free_port() -> int:
    """A port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def running(*processes: subprocess.Popen[Any]) -> Iterator[None]:
    """See that these processes are over after the block, whatever happens in it."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

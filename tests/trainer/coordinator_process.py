"""``virtualflow coordinator`` as a process of its own, of any version, which a test kills and replaces."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from elastic_jobs import PATIENCE, TOKEN

from forking import PATHS
from other_version import Version
from ports import free_port
from programs import Program
from virtualflow.protocol.http_api import Status
from virtualflow.protocol.http_client import CoordinatorClient
from virtualflow.protocol.settings import ENV_TOKEN, SignalSettings

PROGRAM = """
import sys, other_version
other_version.be(sys.argv.pop(1))
from virtualflow.launcher.cli import main
sys.exit(main())
"""


class CoordinatorProcess:
    """``virtualflow coordinator`` of some version, which another one may replace at the same address."""

    def __init__(self, directory: Path, version: Version) -> None:
        self._directory = directory
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process = self._start(version)

    def _start(self, version: Version) -> Program:
        command = [sys.executable, "-c", PROGRAM, version, "coordinator", "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--wanted", "2", "--minimum", "2", "--heartbeat-limit", str(PATIENCE)]
        with (self._directory / "coordinator.log").open("ab") as log:
            return Program(
                command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), ENV_TOKEN: TOKEN},
                stdout=log,
                stderr=log,
            )

    def replace(self, version: Version) -> None:
        """Kill it, and start one of another version."""
        self.close()
        self._process = self._start(version)

    def status(self) -> Status:
        """The status, as a client of this version reads it."""

        async def ask() -> Status:
            async with CoordinatorClient(self.url, TOKEN, SignalSettings(patience=PATIENCE)) as client:
                return await client.status()

        return asyncio.run(ask())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

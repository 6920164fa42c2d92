"""The coordinator of a local job as a process that is started again whenever it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from virtualflow.errors import VirtualFlowError
from virtualflow.launcher.registry import JobAccess
from virtualflow.launcher.supervisor import Process, Stream, Supervisor, describe_exit, ourselves
from virtualflow.protocol.settings import ENV_CONFIRMED_START, ENV_IDENTITY, ENV_LOG_DIR, ENV_TOKEN

BACKOFF_FIRST = 0.1
"""The delay of the second restart in a row of something that keeps dying; it doubles."""
BACKOFF_MOST = 5.0
"""The longest such delay."""
_START = 30.0
"""A coordinator that does not listen by then has failed to start."""
_STARTS = 10
"""Starts in a row that may fail of a coordinator that has listened before."""
_STOP = 1.0
"""How long it may take to end once nobody needs it."""

HOST = "127.0.0.1"

# The coordinator is of this very version, wherever the command line was started.
_SEARCH_PATH = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]).rstrip(
    os.pathsep
)


class CoordinatorFailed(VirtualFlowError):
    """The coordinator cannot be started; the message is a sentence for the user."""


class CoordinatorProcess:
    """Keeps a coordinator listening on one port.

    Args:
        access: how it and its job's other processes know each other.
        port: to listen on, 0 for any; after the first start the port stays the same.
        heartbeat_limit: seconds.
        rebalance_gain: as the coordinator's option of that name.
        hang_seconds: the same; ``None``: its default.
        directory: for its log and the file by which it says that it listens.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        access: JobAccess,
        port: int,
        heartbeat_limit: float,
        rebalance_gain: float,
        hang_seconds: float | None,
        directory: Path,
    ) -> None:
        self._supervisor, self._access, self._port = supervisor, access, port
        self._limits = ["--heartbeat-limit", str(heartbeat_limit), "--rebalance-gain", str(rebalance_gain)]
        if hang_seconds is not None:
            self._limits += ["--hang-seconds", str(hang_seconds)]
        self._directory, self._ready_file = directory, directory / "coordinator.ready"
        self._crashes = 0
        self.process: Process | None = None
        self.url = ""

    async def start(self, wanted: Callable[[], int]) -> None:
        """Start it and wait until it listens; again and again with back-off, unless it has never listened.

        Args:
            wanted: how many workers the job is to have, asked at each attempt.

        Raises:
            CoordinatorFailed: it ends or stays silent at its first start, or keeps failing.
        """
        while True:
            trouble = await self._try_start(wanted())
            if trouble is None:
                self._crashes = 0
                return
            if not self.url:
                raise CoordinatorFailed(trouble)
            self._crashes += 1
            if self._crashes > _STARTS:
                raise CoordinatorFailed(f"the coordinator cannot be started again: {trouble}")
            delay = BACKOFF_FIRST * 2 ** (self._crashes - 1)
            await asyncio.sleep(min(delay, BACKOFF_MOST))

    async def stop(self) -> None:
        process = self.process
        if process is None:
            return
        process.send(signal.SIGINT)  # At once: nobody is left who should leave in order.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP):
                await process.ended.wait()
                return
        process.signal_group(signal.SIGKILL)

    def kill(self) -> None:
        if self.process is not None:
            self.process.signal_group(signal.SIGKILL)

    async def _try_start(self, wanted: int) -> str | None:
        self._ready_file.unlink(missing_ok=True)
        command = ourselves("coordinator", "--host", HOST, "--port", str(self._port))
        command += ["--wanted", str(wanted), *self._limits, "--ready-file", str(self._ready_file)]
        environment = {
            **{name: value for name, value in os.environ.items() if name not in (ENV_TOKEN, ENV_IDENTITY)},
            **self._access.environment("coordinator", "coordinator"),
            ENV_CONFIRMED_START: "1",
            ENV_LOG_DIR: str(self._directory),
            "PYTHONPATH": _SEARCH_PATH,
        }
        log = self._directory / "coordinator.log"
        try:
            process = self._supervisor.start("coordinator", command, environment, log, _unheard)
        except OSError as error:
            return f"no process can be started: {error.strerror}"
        self.process = process
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _START
        while loop.time() < deadline:
            if url := self._read_url():
                self.url = url
                self._port = urlsplit(self.url).port or self._port
                return None
            if not process.alive:
                await self._supervisor.flush(process)
                said = next((line for line in reversed(process.tail) if line.strip()), "")
                return (
                    said.removeprefix("virtualflow: ")
                    or f"the coordinator ended at once ({describe_exit(process.code or 0)})"
                )
            await asyncio.sleep(0.01)
        process.signal_group(signal.SIGKILL)
        return f"the coordinator does not listen after {_START:g} s"

    def _read_url(self) -> str:
        try:
            return self._ready_file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return ""


def _unheard(stream: Stream, text: str) -> None:
    """What it prints is in its log."""

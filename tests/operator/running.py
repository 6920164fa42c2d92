"""The operator as a process of its own: started from a server that has imported it already, killed by real signals."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import yaml

import other_version
from forking import FORKING, start

_WRITE = re.compile(rb"^(POST|PUT|PATCH|DELETE) (\S+) HTTP/1\.1\r\n", re.MULTILINE)


def write_kubeconfig(path: Path, url: str, token: str) -> Path:
    """Write a kubeconfig that leads to an API server."""
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "fake", "cluster": {"server": url}}],
                "users": [{"name": "operator", "user": {"token": token}}],
                "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "operator"}}],
                "current-context": "fake",
            }
        )
    )
    return path


def _operate(kubeconfig: str, log: str, arguments: list[str], changes: dict[str, Any]) -> None:
    """Be the operator: what ``main`` does, with settings that have no flag changed as well, and of ``version``."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["KUBECONFIG"] = kubeconfig
    from kubernetes.config import kube_config

    from virtualflow_operator.controllers.flags import read_settings
    from virtualflow_operator.controllers.watches import run
    from virtualflow_operator.observability import logs

    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = kubeconfig  # read when it was imported
    settings = read_settings(arguments, {})
    other_version.be(changes.pop("version", "this"))
    for place, value in changes.items():
        group, _, member = place.rpartition("__")
        inner = dataclasses.replace(getattr(settings, group), **{member: value}) if group else value
        settings = dataclasses.replace(settings, **{group or member: inner})
    logs.configure(settings.log_format, settings.log_level)
    asyncio.run(run(settings))


class OperatorProcess:
    """One replica.

    Args:
        kubeconfig: where the API server is.
        log: where its output goes.
        arguments: its flags.
        changes: fields of its settings; those of a group as ``queue__backoff_first``. ``version``: another one.
    """

    def __init__(self, kubeconfig: Path, log: Path, arguments: list[str], changes: dict[str, Any]) -> None:
        self.log = log
        self._process = FORKING.Process(
            target=_operate, args=(str(kubeconfig), str(log), arguments, changes), daemon=True
        )
        start(self._process)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that killed it; None: it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def join(self, seconds: float = 30.0) -> None:
        """Wait for its end; one that does not come is forced."""
        self._process.join(seconds)
        self.kill()

    async def ended(self, seconds: float = 30.0) -> int:
        """Wait for its end; the exit code."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, over.set)
        try:
            async with asyncio.timeout(seconds):
                await over.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def output(self) -> str:
        """What it has logged."""
        with suppress(FileNotFoundError):
            return self.log.read_text(errors="replace")
        return ""


class Wire:
    """A replica's own way to the API server: it tells who wrote what, and can be cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.cut = False
        """Nothing gets through any more, and nobody is told."""
        self.writes: list[tuple[float, str, str]] = []
        """Loop time, method and path of what went through, leases left out."""

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        try:
            await asyncio.gather(self._pump(reader, back, True), self._pump(there, writer, False))
        finally:
            for end in (writer, back):
                end.transport.abort()
                self._writers.discard(end)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if self.cut:
                    continue
                if note:
                    for method, path in _WRITE.findall(data):
                        if b"/leases" not in path:
                            now = asyncio.get_running_loop().time()
                            self.writes.append((now, method.decode(), path.decode()))
                writer.write(data)
                await writer.drain()
            writer.close()


COMMAND = [sys.executable, "-m", "virtualflow_operator"]
"""``virtualflow-operator`` as a shell would start it."""

"""Strangers at the coordinator's port: a real process, and thousands of real connections that never show the token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import pytest
from coordinator_server import RIGHT, TOKEN, hello, told

from tiers import nightly
from virtualflow.protocol import messages as m
from virtualflow.protocol.http_api import ScaleCall
from virtualflow.protocol.http_client import CoordinatorClient
from virtualflow.protocol.settings import SignalSettings

MOST = 10_000
RESERVE = 500
"""Descriptors of this process that are no half-open connections."""
SAYINGS = (
    b"",
    b"GET /v1/status HTTP/1.1\r\nAuthorization: Bea",
    b"POST /v1/drain HTTP/1.1\r\nContent-Length: 9999\r\n\r\n{",
)
LOG = 65_536
MEMORY = 200 * 2**20


@dataclass
class Serving:
    """A coordinator as a process of its own."""

    process: psutil.Process
    url: str
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)


@contextlib.contextmanager
def serving(folder: Path, descriptors: int | None = None) -> Iterator[Serving]:
    """A coordinator as users start it, of at most so many descriptors."""
    trainer = str(Path(__file__).resolve().parents[3] / "trainer")
    environment = {**os.environ, "PYTHONPATH": trainer, "VIRTUALFLOW_TOKEN": TOKEN}
    ready, log = folder / "ready", folder / "log"
    command = [sys.executable, "-m", "virtualflow", "coordinator", "--host", "127.0.0.1", "--port", "0"]
    command += ["--ready-file", str(ready), "--heartbeat-limit", "3600"]  # the tests' workers have no pulse
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
    with log.open("wb") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as child:
        try:
            limit = time.monotonic() + 60.0
            while not ready.exists():
                assert child.poll() is None, log.read_text()
                assert time.monotonic() < limit
                time.sleep(0.01)
            yield Serving(psutil.Process(child.pid), ready.read_text().strip(), log)
        finally:
            child.kill()


@contextlib.contextmanager
def many_descriptors() -> Iterator[int]:
    """As many descriptors as this process may have; that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield hard if hard != resource.RLIM_INFINITY else 1 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def strangers(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """So many connections that are open at this end, and have said a part of a request or nothing."""
    held: list[socket.socket] = []
    try:
        for number in range(count):
            held.append(socket.create_connection(address, timeout=60.0))
            with contextlib.suppress(ConnectionError):  # it was shut out already
                held[-1].sendall(SAYINGS[number % len(SAYINGS)])
        yield held
    finally:
        for one in held:
            one.close()


def closed(one: socket.socket) -> bool:
    one.settimeout(60.0)
    try:
        while one.recv(65_536):
            pass
    except ConnectionError:
        pass
    return True


async def serves(url: str) -> None:
    """The coordinator answers who shows the token: a call, the status, and a worker."""
    settings = SignalSettings(request_timeout=20.0, patience=60.0)
    async with CoordinatorClient(url, TOKEN, settings) as client:
        await client.send(ScaleCall(3))
        assert (await client.status()).wanted == 3
    timeout = aiohttp.ClientTimeout(total=60.0)
    async with (
        aiohttp.ClientSession(headers=RIGHT, timeout=timeout) as session,
        session.ws_connect(f"{url}/v1/worker") as stream,
    ):
        await stream.send_bytes(m.encode(hello("worker-0", ready=True)))
        assert isinstance(await told(stream), m.Welcome)


@pytest.mark.slow
@pytest.mark.parametrize(
    "descriptors", [nightly(None, id="as many descriptors as it may have"), pytest.param(256, id="256 descriptors")]
)
def test_thousands_of_half_open_requests_keep_nobody_out(tmp_path: Path, descriptors: int | None) -> None:
    with many_descriptors() as limit, serving(tmp_path, descriptors) as coordinator:
        count = min(MOST, limit - RESERVE)
        assert count >= 1_000, "this process may not open enough connections to show it"
        with strangers(coordinator.address, count):
            asyncio.run(serves(coordinator.url))
            assert coordinator.process.memory_info().rss < MEMORY
        asyncio.run(serves(coordinator.url))
        assert coordinator.log.stat().st_size < LOG


@pytest.mark.slow
def test_who_says_nothing_or_half_a_request_is_shut_out_and_others_stay(tmp_path: Path) -> None:
    async def story(url: str, wait: Callable[[], None]) -> None:
        async with aiohttp.ClientSession(headers=RIGHT) as session, session.ws_connect(f"{url}/v1/worker") as stream:
            await stream.send_bytes(m.encode(hello("worker-0", ready=True)))
            assert isinstance(await told(stream), m.Welcome)
            await asyncio.to_thread(wait)
            async with session.get(f"{url}/v1/status") as answer:
                (worker,) = (await answer.json())["workers"]
            assert worker["state"] != "silent", "its own connection stands"

    with serving(tmp_path) as coordinator, strangers(coordinator.address, 30) as held:
        asyncio.run(story(coordinator.url, lambda: [closed(one) for one in held] and None))
        fewer = coordinator.process.num_fds()
        assert fewer < 30


@pytest.mark.slow
def test_thousands_of_refused_requests_make_a_short_log(tmp_path: Path) -> None:
    garbage = (
        b"\x16\x03\x01\x02\x00 hello\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET " + b"x" * 9_000,
    )
    with serving(tmp_path) as coordinator:
        begun = coordinator.process.memory_info().rss
        for number in range(2_000):
            with (
                socket.create_connection(coordinator.address, timeout=60.0) as one,
                contextlib.suppress(ConnectionError),
            ):
                one.sendall(garbage[number % len(garbage)])
                if number % 100 == 0:
                    closed(one)
        asyncio.run(serves(coordinator.url))
        assert coordinator.log.stat().st_size < LOG
        assert coordinator.process.memory_info().rss < begun + 64 * 2**20

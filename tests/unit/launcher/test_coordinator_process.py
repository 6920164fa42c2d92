"""The coordinator as a process: its options, its end, and how many workers fit into a small pod."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from coordinator_server import RIGHT, TOKEN, hello, told

from virtualflow.protocol import messages as m
from virtualflow.protocol.http_api import BeginCall, StopCall
from virtualflow.protocol.http_client import CoordinatorClient
from virtualflow.protocol.settings import ENV_CONFIRMED_START, ENV_HANG_SECONDS, SignalSettings

# --- the process ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(directory: Path, port: int = 0, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A coordinator as users start it."""
    trainer = str(Path(__file__).resolve().parents[3] / "trainer")
    environment = {**os.environ, "PYTHONPATH": trainer, "VIRTUALFLOW_TOKEN": TOKEN}
    command = [sys.executable, "-m", "virtualflow", "coordinator", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--ready-file", str(directory / "ready"), *options]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def url_of(child: subprocess.Popen[str], directory: Path) -> str:
    limit = time.monotonic() + 60.0
    while not (directory / "ready").exists():
        assert child.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.01)
    return (directory / "ready").read_text().strip()


@pytest.mark.slow
def test_two_hundred_workers_fit_into_a_small_pod_and_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    async def story(child: subprocess.Popen[str], url: str) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=RIGHT, connector=connector) as client:
            streams = []
            watcher = await client.ws_connect(f"{url}/v1/watch", max_msg_size=0)
            for number in range(200):
                stream = await client.ws_connect(f"{url}/v1/worker")
                await stream.send_bytes(m.encode(hello(f"worker-{number}", ready=True)))
                assert isinstance(await told(stream), m.Welcome)
                streams.append(stream)
            async with client.get(f"{url}/v1/status") as answer:
                assert len((await answer.json())["workers"]) == 200
            memory = psutil.Process(child.pid).memory_info().rss
            assert memory < 60 * 2**20, f"{memory / 2**20:.0f} MiB"
            began = time.monotonic()
            child.send_signal(signal.SIGTERM)
            while child.poll() is None:
                await asyncio.sleep(0.01)
                assert time.monotonic() - began < 20.0
            assert child.returncode == 0
            await watcher.close()
            for stream in streams:
                await stream.close()

    # None of them beats: a machine that takes long over 200 connections must not cost the first ones.
    with process(tmp_path, 0, "--heartbeat-limit", "600") as child:
        asyncio.run(story(child, url_of(child, tmp_path)))


RUNNING = m.Plan(
    m.Generation(1, 1),
    "recovery",
    (m.Member("worker-0", "worker-0.0", "127.0.0.1", 0, 4), m.Member("worker-1", "worker-1.0", "127.0.0.1", 4, 8)),
    (),
    "start",
    "a training that goes on",
)


@contextlib.asynccontextmanager
async def stopping(url: str) -> AsyncIterator[list[aiohttp.ClientWebSocketResponse]]:
    """Two workers of a running job that have heard that all leave."""
    async with aiohttp.ClientSession(headers=RIGHT) as http, CoordinatorClient(url, TOKEN, SignalSettings()) as client:
        streams = [await http.ws_connect(f"{url}/v1/worker") for _ in range(2)]
        for number, stream in enumerate(streams):
            await stream.send_bytes(m.encode(hello(f"worker-{number}", ready=True, plan=RUNNING, step=7)))
            assert isinstance(await told(stream), m.Welcome)
        await client.send(StopCall("suspended"))
        yield streams


async def leave(stream: aiohttp.ClientWebSocketResponse) -> None:
    """Leave by the plan that is the next message."""
    plan = await told(stream)
    assert isinstance(plan, m.Plan)
    assert not plan.members
    await stream.send_bytes(m.encode(m.Left(plan.generation, 8)))


async def ends(child: subprocess.Popen[str]) -> int:
    return await asyncio.wait_for(asyncio.to_thread(child.wait), 10.0)


def test_sigterm_while_the_job_stops_waits_until_all_have_been_let_go(tmp_path: Path) -> None:
    async def story(child: subprocess.Popen[str], url: str) -> None:
        async with stopping(url) as (leader, other), CoordinatorClient(url, TOKEN, SignalSettings()) as client:
            await leave(other)
            child.send_signal(signal.SIGTERM)
            # The leader still writes the last checkpoint.
            assert (await client.status()).step == 8
            await leave(leader)
            for stream in (leader, other):
                assert isinstance(await told(stream), m.Release)
            assert child.poll() is None
            await leader.close()
            await other.close()
            assert await ends(child) == 0

    with process(tmp_path) as child:
        asyncio.run(story(child, url_of(child, tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_sigterm_or_sigint_ends_it_before_the_job_has_stopped(tmp_path: Path, number: signal.Signals) -> None:
    async def story(child: subprocess.Popen[str], url: str) -> None:
        async with stopping(url), CoordinatorClient(url, TOKEN, SignalSettings()) as client:
            child.send_signal(signal.SIGTERM)
            await client.status()
            child.send_signal(number)
            assert await ends(child) == 0

    with process(tmp_path) as child:
        asyncio.run(story(child, url_of(child, tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "heartbeat"), [((), 0.4), (("--hang-seconds", "1.5"), 0.3), (("--heartbeat-limit", "1"), 0.2)]
)
def test_the_limit_of_hangs_is_an_option_or_in_the_environment(
    options: tuple[str, ...], heartbeat: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats come five times within it."""
    monkeypatch.setenv(ENV_HANG_SECONDS, "2")

    async def story(url: str) -> None:
        async with aiohttp.ClientSession(headers=RIGHT) as http:
            stream = await http.ws_connect(f"{url}/v1/worker")
            await stream.send_bytes(m.encode(hello("worker-0")))
            welcome = await told(stream)
            assert isinstance(welcome, m.Welcome)
            assert welcome.heartbeat == pytest.approx(heartbeat)

    with process(tmp_path, 0, *options) as child:
        asyncio.run(story(url_of(child, tmp_path)))


def test_the_minimum_and_the_start_up_grace_are_options(tmp_path: Path) -> None:
    async def story(url: str) -> None:
        async with (
            CoordinatorClient(url, TOKEN, SignalSettings()) as client,
            aiohttp.ClientSession(headers=RIGHT) as http,
        ):
            assert (await client.status()).minimum == 2
            streams = []
            for number in range(2):
                assert (await client.status()).proposed is None
                stream = await http.ws_connect(f"{url}/v1/worker")
                await stream.send_bytes(m.encode(hello(f"worker-{number}", ready=True)))
                assert isinstance(await told(stream), m.Welcome)
                streams.append(stream)
            # A third is wanted, but not waited for; a new coordinator listens for a moment first.
            assert isinstance(await told(streams[0]), m.Plan)
            for stream in streams:
                await stream.close()

    with process(tmp_path, 0, "--wanted", "3", "--minimum", "2", "--startup-grace", "0") as child:
        asyncio.run(story(url_of(child, tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["1", "0", ""])
def test_a_word_is_needed_to_begin_where_the_environment_says_so(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process has another number, and with the same environment the next one waits as well."""
    monkeypatch.setenv(ENV_CONFIRMED_START, asked)

    async def story(url: str) -> int | None:
        async with (
            CoordinatorClient(url, TOKEN, SignalSettings()) as client,
            aiohttp.ClientSession(headers=RIGHT) as http,
        ):
            stream = await http.ws_connect(f"{url}/v1/worker")
            await stream.send_bytes(m.encode(hello("worker-0", ready=True)))
            assert isinstance(await told(stream), m.Welcome)
            ticket = (await client.status()).start_ticket
            if ticket is not None:
                assert "waiting for the word" in (await client.status()).reason
                await client.send(BeginCall(ticket))
            assert isinstance(await told(stream), m.Plan)
            assert (await client.status()).start_ticket is None
            await stream.close()
            return ticket

    tickets = []
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        with process(directory) as child:
            tickets.append(asyncio.run(story(url_of(child, directory))))
    assert (None not in tickets) == (asked == "1")
    assert asked != "1" or tickets[0] != tickets[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--minimum", "0"], "--minimum 0: it must be between 1 and 4096"),
        (["--minimum", "5000"], "--minimum 5000: it must be between 1 and 4096"),
        (["--startup-grace", "-1"], "--startup-grace -1: it must be between 0 and 86400 seconds"),
        (["--startup-grace", "nan"], "--startup-grace nan: it must be between 0 and 86400 seconds"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_one_line(tmp_path: Path, options: list[str], said: str) -> None:
    with process(tmp_path, 0, *options) as child:
        _, errors = child.communicate(timeout=30)
    assert child.returncode == 2
    assert errors == f"virtualflow: {said}\n"


def test_a_port_that_is_taken_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with process(tmp_path, port) as child:
            _, said = child.communicate(timeout=30)
    assert child.returncode == 1
    assert said == f"virtualflow: port {port} of 127.0.0.1 is taken by another program; choose another with --port\n"

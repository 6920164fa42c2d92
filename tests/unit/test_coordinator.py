"""The coordinator as a server: who may speak to it, and what nobody can do to it. Real sockets, real websockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest
from aiohttp import web

from virtualflow import messages as m
from virtualflow.coordinator import Coordinator
from virtualflow.errors import ConfigurationError
from virtualflow.settings import MAX_MESSAGE, CoordinatorSettings, MembershipSettings, SignalSettings
from virtualflow.signals import CoordinatorClient

TOKEN = "the job's token"
RIGHT = {"Authorization": f"Bearer {TOKEN}"}
SETTINGS = CoordinatorSettings(membership=MembershipSettings(restart_grace=0.0), first_message=0.2, backlog=50)


def hello(name: str, incarnation: str = "", **facts: object) -> m.Hello:
    usual = m.Hello(
        protocol=m.PROTOCOL,
        worker=name,
        incarnation=incarnation or f"{name}.0",
        address="127.0.0.1",
        pid=1,
        virtual_nodes=8,
        fingerprint="one machine",
        ready=False,
        draining=False,
        drain_deadline=None,
        plan=None,
        step=0,
        total_steps=None,
        done=False,
        changes=(),
    )
    return msgspec.structs.replace(usual, **facts)


class Server:
    """A coordinator that listens, and a client that knows its token."""

    def __init__(self, coordinator: Coordinator, url: str, client: aiohttp.ClientSession) -> None:
        self.coordinator, self.url, self.client = coordinator, url, client
        self.job = coordinator.job
        self._streams: list[aiohttp.ClientWebSocketResponse] = []

    async def worker(self, name: str, incarnation: str = "", **facts: object) -> aiohttp.ClientWebSocketResponse:
        """A worker that was welcomed."""
        stream = await self.client.ws_connect(f"{self.url}/v1/worker", headers=RIGHT, max_msg_size=0)
        await stream.send_bytes(m.encode(hello(name, incarnation, **facts)))
        assert isinstance(await told(stream), m.Welcome)
        self._streams.append(stream)  # one that nobody holds is closed
        return stream


async def told(stream: aiohttp.ClientWebSocketResponse) -> m.ToWorker | None:
    """The next message; ``None``: the connection is closed."""
    frame = await stream.receive(timeout=5.0)
    return m.to_worker.decode(frame.data) if frame.type == aiohttp.WSMsgType.BINARY else None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():  # noqa: ASYNC110 - it looks at the state of another task
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(settings: CoordinatorSettings = SETTINGS) -> AsyncIterator[Server]:
    coordinator = Coordinator(TOKEN, 2, settings)
    runner = web.AppRunner(coordinator.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession() as client:
            yield Server(coordinator, f"http://127.0.0.1:{runner.addresses[0][1]}", client)
    finally:
        await coordinator.close()
        await runner.cleanup()


def with_server(story: Callable[[Server], Awaitable[None]], settings: CoordinatorSettings = SETTINGS) -> None:
    async def play() -> None:
        async with serving(settings) as server, asyncio.timeout(20.0):
            await story(server)

    asyncio.run(play())


# --- who may speak ----------------------------------------------------------------------------------------------------

STRANGERS = [
    pytest.param({}, id="no token"),
    pytest.param({"Authorization": "Bearer another"}, id="a wrong token"),
    pytest.param({"Authorization": f"Bearer {TOKEN}x"}, id="a token that begins like the right one"),
    pytest.param({"Authorization": "Bearer "}, id="an empty token"),
    pytest.param({"Authorization": "Bearer"}, id="only the scheme"),
    pytest.param({"Authorization": TOKEN}, id="a token without a scheme"),
    pytest.param({"Authorization": f"Basic {TOKEN}"}, id="the token in another scheme"),
    pytest.param({"Authorization": "Bearer \udcff\udcfe"}, id="bytes that are no text"),
    pytest.param({"X-Token": TOKEN}, id="the token in another header"),
]


@pytest.mark.parametrize("headers", STRANGERS)
def test_a_stranger_learns_and_changes_nothing(headers: dict[str, str]) -> None:
    async def story(server: Server) -> None:
        await server.worker("worker-0")
        before = server.job.status()
        for path in ("status", "watch", "worker", "nowhere"):
            async with server.client.get(f"{server.url}/v1/{path}", headers=headers) as answer:
                assert answer.status == 401
                assert "token" in (await answer.json())["message"]
        for path in ("drain", "gone", "scale", "hold", "stop", "fail"):
            body = json.dumps({"workers": 3, "worker": "worker-0", "reason": "x", "step": 3})
            async with server.client.post(f"{server.url}/v1/{path}", headers=headers, data=body) as answer:
                assert answer.status == 401
        for path in ("watch", "worker"):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
                await server.client.ws_connect(f"{server.url}/v1/{path}", headers=headers)
            assert refusal.value.status == 401
        assert server.job.status() == before

    with_server(story)


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr("virtualflow.coordinator.hmac.compare_digest", compare)

    async def story(server: Server) -> None:
        for token in ("x", TOKEN, "y" * 1_000):
            async with server.client.get(f"{server.url}/v1/status", headers={"Authorization": f"Bearer {token}"}):
                pass
        assert compared == [(32, 32)] * 3

    with_server(story)


def test_anybody_may_ask_whether_it_lives() -> None:
    async def story(server: Server) -> None:
        async with server.client.get(f"{server.url}/healthz") as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n")

    with_server(story)


def test_a_coordinator_without_a_token_is_none() -> None:
    with pytest.raises(ConfigurationError, match="token"):
        Coordinator("", 1, SETTINGS)


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        pytest.param("scale", b"", 400, id="nothing"),
        pytest.param("scale", b"{", 400, id="half a document"),
        pytest.param("scale", b"\xff\xfe\x00", 400, id="binary"),
        pytest.param("scale", b'{"workers":"3"}', 400, id="a wrong type"),
        pytest.param("scale", b'{"workers":3,"more":1}', 400, id="an unknown field"),
        pytest.param("scale", b'{"workers":0}', 400, id="too few"),
        pytest.param("scale", b'{"workers":' + b"9" * 500 + b"}", 400, id="a huge number"),
        pytest.param("scale", b'{"workers":NaN}', 400, id="NaN"),
        pytest.param("scale", b'{"workers":' + b"[" * 50_000, 400, id="deep nesting"),
        pytest.param("scale", b'{"workers":3}' + b" " * MAX_MESSAGE, 413, id="an oversized body"),
        pytest.param("scale", b'{"workers":3,"minimum":0}', 400, id="a minimum of none"),
        pytest.param("drain", b'{"workers":[]}', 400, id="a drain of nobody"),
        pytest.param("drain", b'{"workers":["worker-0"],"deadline":-1}', 400, id="a deadline in the past"),
        pytest.param("drain", b'{"workers":["worker-9"]}', 404, id="a drain of an unknown worker"),
        pytest.param("drain", b'{"workers":["worker-0","worker-9"]}', 404, id="a drain of one known of two"),
        pytest.param("gone", b'{"worker":"worker-9"}', 404, id="the loss of an unknown worker"),
        pytest.param("gone", b'{"worker":"worker-0","incarnation":"z"}', 404, id="the loss of another process"),
        pytest.param("gone", b'{"worker":"worker-9","incarnation":"worker-0.0"}', 404, id="with another name"),
        pytest.param("hold", b"{}", 400, id="a hold at no step"),
        pytest.param("fail", b'{"reason":"' + b"x" * 5_000 + b'"}', 400, id="too long a reason"),
    ],
)
def test_a_call_that_makes_no_sense_changes_nothing(path: str, body: bytes, code: int) -> None:
    async def story(server: Server) -> None:
        await server.worker("worker-0")
        before = server.job.status()
        async with server.client.post(f"{server.url}/v1/{path}", headers=RIGHT, data=body) as answer:
            assert answer.status == code
            assert (await answer.json())["message"]
        assert server.job.status() == before

    with_server(story)


def test_calls_are_answered_with_a_sentence_and_reach_the_workers() -> None:
    async def story(server: Server) -> None:
        stream = await server.worker("worker-0")
        async with server.client.post(f"{server.url}/v1/hold", headers=RIGHT, json={"step": 7}) as answer:
            assert (await answer.json())["message"] == "no step after 7 starts"
        assert await told(stream) == m.Hold(7)
        async with server.client.post(
            f"{server.url}/v1/gone", headers=RIGHT, json={"worker": "worker-0", "reason": "its node is lost"}
        ) as answer:
            assert answer.status == 200
        assert await told(stream) == m.Refuse("given up: its node is lost")
        assert await told(stream) is None

    with_server(story)


def test_the_minimum_is_set_with_the_number_of_workers() -> None:
    async def story(server: Server) -> None:
        for body, expected in (
            ({"workers": 3, "minimum": 2}, 2),
            ({"workers": 4}, 2),
            ({"workers": 4, "minimum": 1}, 1),
        ):
            async with server.client.post(f"{server.url}/v1/scale", headers=RIGHT, json=body) as answer:
                assert answer.status == 200
            assert server.job.status().minimum == expected

    with_server(story)


# --- workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(b"\x00\x01\xff", id="binary garbage"),
        pytest.param(b"{", id="malformed JSON"),
        pytest.param(b'{"type":"heartbeat"}', id="no Hello"),
        pytest.param(b'{"type":"hello"}', id="an empty Hello"),
        pytest.param(b"[" * 100_000, id="deep nesting"),
        pytest.param(b" " * (MAX_MESSAGE + 1), id="an oversized frame"),
        pytest.param(None, id="silence"),
    ],
)
def test_who_does_not_say_hello_is_shown_out(first: bytes | None) -> None:
    async def story(server: Server) -> None:
        before = server.job.status()
        stream = await server.client.ws_connect(f"{server.url}/v1/worker", headers=RIGHT)
        if first is not None:
            await stream.send_bytes(first)
        assert await told(stream) is None
        assert stream.close_code in (1007, 1009)
        assert server.job.status() == before

    with_server(story)


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(b"\x00\x01\xff", id="binary garbage"),
        pytest.param(b'{"type":"note","kind":"info","text":"x","more":1}', id="an unknown field"),
        pytest.param(b"[" * 100_000, id="deep nesting"),
        pytest.param(b" " * (MAX_MESSAGE + 1), id="an oversized frame"),
    ],
)
def test_a_worker_that_talks_nonsense_only_loses_its_connection(later: bytes) -> None:
    async def story(server: Server) -> None:
        stream, other = await server.worker("worker-0"), await server.worker("worker-1")
        await stream.send_bytes(later)
        assert await told(stream) is None
        await until(lambda: not server.job.roster.workers["worker-0.0"].connected)
        assert server.job.phase == "waiting"
        await (await server.worker("worker-0")).close()
        await other.send_bytes(m.encode(m.Ready()))
        await until(lambda: server.job.roster.workers["worker-1.0"].ready_at is not None)

    with_server(story)


def test_a_worker_that_is_refused_is_told_why() -> None:
    async def story(server: Server) -> None:
        await server.worker("worker-0")
        stream = await server.client.ws_connect(f"{server.url}/v1/worker", headers=RIGHT)
        await stream.send_bytes(m.encode(hello("worker-1", virtual_nodes=4)))
        refusal = await told(stream)
        assert isinstance(refusal, m.Refuse)
        assert "4 virtual nodes" in refusal.reason
        assert await told(stream) is None

    with_server(story)


def test_a_worker_that_comes_back_takes_over_from_its_half_open_connection() -> None:
    async def story(server: Server) -> None:
        old = await server.worker("worker-0")
        new = await server.worker("worker-0")
        assert await told(old) is None
        server.job.set_hold(3)
        server.coordinator._turn()
        assert await told(new) == m.Hold(3)
        assert server.job.roster.workers["worker-0.0"].connected
        assert len(server.coordinator._lines) == 1

    with_server(story)


def test_a_new_process_takes_the_name_of_an_old_one() -> None:
    async def story(server: Server) -> None:
        old = await server.worker("worker-0", "first")
        await server.worker("worker-0", "second")
        refusal = await told(old)
        assert isinstance(refusal, m.Refuse)
        assert "taken its name" in refusal.reason
        assert await told(old) is None
        await until(lambda: list(server.job.roster.workers) == ["second"])

    with_server(story)


def test_a_worker_that_does_not_read_is_disconnected_and_the_others_go_on() -> None:
    async def story(server: Server) -> None:
        reader = await server.worker("reader")
        deaf = await server.worker("deaf")
        connection = deaf._conn
        assert connection is not None
        assert connection.transport is not None
        connection.transport.pause_reading()  # type: ignore[attr-defined]
        text = "x" * 4_000
        heard = 0
        while server.job.roster.workers["deaf.0"].connected:
            for number in range(40):
                server.job._send("deaf.0", m.Drain(float(number), text))
            server.job._send("reader.0", m.Hold(1))
            server.coordinator._turn()
            assert await told(reader) == m.Hold(1)
            heard += 1
            assert heard < 2_000
        server.job._send("reader.0", m.Hold(2))
        server.coordinator._turn()
        assert await told(reader) == m.Hold(2)

    with_server(story)


def test_two_workers_found_a_generation_and_hear_each_others_keys() -> None:
    async def story(server: Server) -> None:
        first = await server.worker("worker-0", ready=True)
        second = await server.worker("worker-1", ready=True)
        plan = await told(first)
        assert isinstance(plan, m.Plan)
        assert await told(second) == plan
        assert [member.worker for member in plan.members] == ["worker-0", "worker-1"]
        key = m.Publish(plan.generation, "0", b"\x00address")
        await first.send_bytes(m.encode(key))
        assert await told(second) == key
        again = await server.client.ws_connect(f"{server.url}/v1/worker", headers=RIGHT)
        await again.send_bytes(m.encode(hello("worker-1", ready=True)))
        assert [await told(again) for _ in range(3)][1:] == [plan, key]

    with_server(story)


def test_the_coordinators_own_pause_costs_nobody_his_place() -> None:
    async def story(server: Server) -> None:
        streams = [await server.worker(f"worker-{number}") for number in range(3)]
        await asyncio.sleep(0.05)
        time.sleep(1.0)  # noqa: ASYNC251 - this is what is tested
        for stream in streams:
            await stream.send_bytes(m.encode(m.Heartbeat()))
        await asyncio.sleep(0.2)
        assert not any(worker.gone for worker in server.job.roster.workers.values())

    quick = MembershipSettings(heartbeat_limit=0.6, restart_grace=0.0)
    with_server(story, CoordinatorSettings(membership=quick, stall=0.2))


# --- watchers ---------------------------------------------------------------------------------------------------------


def test_a_watcher_hears_of_every_change_and_of_the_last_one_at_the_end() -> None:
    async def story(server: Server) -> None:
        stream = await server.client.ws_connect(f"{server.url}/v1/watch", headers=RIGHT)
        status = msgspec.json.Decoder(m.Status)
        assert status.decode((await stream.receive(timeout=5.0)).data).workers == ()
        await server.worker("worker-0")
        seen = status.decode((await stream.receive(timeout=5.0)).data)
        assert [worker.worker for worker in seen.workers] == ["worker-0"]
        server.job.event("info", "the last word")
        await server.coordinator.close()
        last = status.decode((await stream.receive(timeout=5.0)).data)
        assert last.events[-1].text == "the last word"
        assert (await stream.receive(timeout=5.0)).type == aiohttp.WSMsgType.CLOSE

    with_server(story)


STATUS = msgspec.json.Decoder(m.Status)


async def seen(stream: aiohttp.ClientWebSocketResponse) -> m.Status:
    """The next status that a watcher gets."""
    return STATUS.decode((await stream.receive(timeout=5.0)).data)


async def silent(stream: aiohttp.ClientWebSocketResponse, seconds: float) -> None:
    with pytest.raises(TimeoutError):
        await stream.receive(timeout=seconds)


async def progress(server: Server, step: int) -> None:
    """A worker reports a step."""
    server.job.history.total_steps = 100
    server.job.receive("worker-0.0", m.Progress(m.Generation(0, 0), step, 0, 100, {}, 1.0, "training"))
    server.coordinator._turn()


def test_a_quiet_watcher_hears_of_progress_rarely_and_of_everything_else_at_once() -> None:
    async def story(server: Server) -> None:
        await server.worker("worker-0")
        loud = await server.client.ws_connect(f"{server.url}/v1/watch", headers=RIGHT)
        quiet = await server.client.ws_connect(f"{server.url}/v1/watch?progress=3600", headers=RIGHT)
        assert (await seen(loud)).step == (await seen(quiet)).step == 0
        for step in (1, 2, 3):
            await progress(server, step)
            assert (await seen(loud)).step == step
        server.job.event("info", "something else")
        server.coordinator._turn()
        told = await seen(quiet)
        assert (told.step, told.events[-1].text) == (3, "something else")
        await progress(server, 4)
        while (await seen(loud)).step < 4:  # what happens at nearly the same time comes in one message
            pass
        await silent(quiet, 0.3)

    with_server(story)


def test_progress_is_told_when_its_time_has_come() -> None:
    async def story(server: Server) -> None:
        await server.worker("worker-0")
        stream = await server.client.ws_connect(f"{server.url}/v1/watch?progress=0.4", headers=RIGHT)
        await seen(stream)
        began = time.monotonic()
        for step in range(1, 6):
            await progress(server, step)
        assert (await seen(stream)).step == 5
        assert 0.3 <= time.monotonic() - began < 2.0
        await progress(server, 6)
        assert (await seen(stream)).step == 6

    with_server(story)


def test_a_quiet_watcher_gets_the_last_progress_when_the_coordinator_ends() -> None:
    async def story(server: Server) -> None:
        await server.worker("worker-0")
        stream = await server.client.ws_connect(f"{server.url}/v1/watch?progress=3600", headers=RIGHT)
        await seen(stream)
        await progress(server, 7)
        await server.coordinator.close()
        assert (await seen(stream)).step == 7

    with_server(story)


def test_a_brief_status_is_to_be_had_by_looking_and_by_watching() -> None:
    async def story(server: Server) -> None:
        for number in range(120):
            server.job.event("info", str(number))
        server.coordinator._turn()
        stream = await server.client.ws_connect(f"{server.url}/v1/watch?brief=1", headers=RIGHT)
        assert len((await seen(stream)).events) == 50
        for query, events in (("", 120), ("?brief=0", 120), ("?brief=1", 50)):
            async with server.client.get(f"{server.url}/v1/status{query}", headers=RIGHT) as answer:
                assert len(STATUS.decode(await answer.read()).events) == events

    with_server(story)


@pytest.mark.parametrize(
    "query",
    [
        "watch?progress=-1",
        "watch?progress=3601",
        "watch?progress=nan",
        "watch?progress=inf",
        "watch?progress=soon",
        "watch?progress=",
        "watch?brief=yes",
        "status?brief=2",
    ],
)
def test_a_look_that_makes_no_sense_is_refused_with_a_sentence(query: str) -> None:
    async def story(server: Server) -> None:
        async with server.client.get(f"{server.url}/v1/{query}", headers=RIGHT) as answer:
            assert answer.status == 400
            assert "brief must be 0 or 1" in (await answer.json())["message"]

    with_server(story)


def test_a_watcher_that_does_not_read_holds_up_nobody() -> None:
    async def story(server: Server) -> None:
        deaf = await server.client.ws_connect(f"{server.url}/v1/watch", headers=RIGHT)
        assert deaf._conn is not None
        assert deaf._conn.transport is not None
        deaf._conn.transport.pause_reading()  # type: ignore[attr-defined]
        worker = await server.worker("worker-0")
        for number in range(300):
            await worker.send_bytes(m.encode(m.Note("info", f"{number} " + "x" * 4_000)))
        await until(lambda: server.job.history.events[-1].text.startswith("299 "))
        async with server.client.get(f"{server.url}/v1/status", headers=RIGHT) as answer:
            assert answer.status == 200

    with_server(story, with_other(watch_interval=0.001))


def with_other(**facts: float) -> CoordinatorSettings:
    """The settings of these tests with other values."""
    return dataclasses.replace(SETTINGS, **facts)  # type: ignore[arg-type]


# --- the process ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(directory: Path, port: int = 0, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A coordinator as users start it."""
    trainer = str(Path(__file__).resolve().parents[2] / "trainer")
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
    limit = time.monotonic() + 30.0
    while not (directory / "ready").exists():
        assert child.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.01)
    return (directory / "ready").read_text().strip()


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
                assert time.monotonic() - began < 3.0
            assert child.returncode == 0
            await watcher.close()
            for stream in streams:
                await stream.close()

    with process(tmp_path) as child:
        asyncio.run(story(child, url_of(child, tmp_path)))


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

"""The copy of a state in the coordinator's memory, over real HTTP: whole, of the running generation, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from coordinator_server import RIGHT, SETTINGS, TOKEN, Server, hello, until, with_server

from virtualflow.coordinator.memory_copies import CopyRefusal, check
from virtualflow.coordinator.settings import CoordinatorSettings, KeptCopySettings
from virtualflow.protocol import framing
from virtualflow.protocol import messages as m
from virtualflow.protocol.http_api import COPY_HEADER, COPY_PATH, CopyHeader
from virtualflow.transport import CopyClient, CopyRefused
from virtualflow.transport.settings import CopySettings

FIRST, SECOND = m.Generation(1, 1), m.Generation(1, 2)
MOST = 1 << 20
SMALL = replace(SETTINGS, memory_copy=KeptCopySettings(most=MOST, idle=0.3))


def plan(generation: m.Generation, worker: str) -> m.Plan:
    member = m.Member(worker, f"{worker}.0", "127.0.0.1", 0, 8)
    return m.Plan(generation, "planned", (member,), (worker,), "start", "begins")


def header(body: bytes, step: int = 1, worker: str = "a", generation: m.Generation = FIRST) -> CopyHeader:
    return CopyHeader(generation, f"{worker}.0", step, len(body) // 2, hashlib.sha256(body).hexdigest())


async def put(server: Server, head: CopyHeader, body: bytes) -> tuple[int, str]:
    said = {**RIGHT, COPY_HEADER: msgspec.json.encode(head).decode()}
    async with server.client.put(server.url + COPY_PATH, data=body, headers=said) as response:
        return response.status, (await response.json())["message"]


async def newest(server: Server) -> bytes | None:
    async with server.client.get(server.url + COPY_PATH, headers=RIGHT) as response:
        return await response.read() if response.status == 200 else None


def with_worker(test: Any, settings: CoordinatorSettings = SMALL) -> None:
    """Run ``test`` beside a coordinator in whose only generation a worker ``a`` trains."""

    async def run(server: Server) -> None:
        await server.worker("a", plan=plan(FIRST, "a"), ready=True)
        await test(server)

    with_server(run, settings)


def test_the_newest_whole_copy_is_kept() -> None:
    async def test(server: Server) -> None:
        assert await newest(server) is None
        for step in (1, 2):
            body = bytes([step]) * 300_000
            assert await put(server, header(body, step), body) == (200, f"the copy of step {step} is complete")
            assert await newest(server) == body
            told = server.state.memory_copy
            assert told is not None
            assert (told.step, told.size) == (step, len(body))
            assert abs(told.at - time.time()) < 60

    with_worker(test)


def test_the_worker_side_sends_and_reads_the_same_bytes() -> None:
    async def test(server: Server) -> None:
        client, body = CopyClient(server.url, TOKEN, CopySettings(piece=1_000)), bytes(range(256)) * 100
        assert await asyncio.to_thread(client.head) is None
        assert await asyncio.to_thread(client.get) is None
        parts = [memoryview(body[:5_000]), memoryview(body[5_000:])]
        await asyncio.to_thread(client.put, header(body), parts)
        assert await asyncio.to_thread(client.head) == header(body)
        assert await asyncio.to_thread(client.get) == (header(body), body)
        with pytest.raises(CopyRefused, match="generation 2, which does not run"):
            await asyncio.to_thread(client.put, header(body, generation=SECOND), parts)
        client.close()
        with pytest.raises(OSError, match="this worker ends"):
            await asyncio.to_thread(client.head)

    with_worker(test)


def test_what_is_not_what_was_sent_leaves_the_former_copy() -> None:
    async def test(server: Server) -> None:
        good = b"good" * 1_000
        await put(server, header(good), good)
        code, sentence = await put(server, header(b"other"), b"0ther")
        assert (code, sentence) == (400, "the copy is not what was sent: its SHA-256 differs")
        huge = bytes(MOST + 1)
        code, sentence = await put(server, header(huge, 2), huge)
        assert (code, sentence) == (
            413,
            f"a copy of {MOST + 1} bytes is larger than the {MOST} that there is memory for",
        )
        for garbage in ("", "{}", "x" * 4_000, msgspec.json.encode(header(good)).decode().replace("a.0", "")):
            async with server.client.put(
                server.url + COPY_PATH, data=good, headers={**RIGHT, COPY_HEADER: garbage}
            ) as response:
                assert response.status == 400
        async with server.client.put(server.url + COPY_PATH, data=good) as response:
            assert response.status == 401
        async with server.client.get(server.url + COPY_PATH) as response:
            assert response.status == 401
        assert await newest(server) == good

    with_worker(test)


def test_a_sender_that_stops_is_given_up_and_one_that_comes_later_takes_its_place() -> None:
    writers: list[asyncio.StreamWriter] = []

    async def begin(server: Server, head: CopyHeader, size: int, sent: bytes) -> asyncio.StreamReader:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        lines = [f"PUT {COPY_PATH} HTTP/1.1", "Host: x", f"Content-Length: {size}", f"Authorization: Bearer {TOKEN}"]
        lines.append(f"{COPY_HEADER}: {msgspec.json.encode(head).decode()}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + sent)
        await writer.drain()
        writers.append(writer)  # one that nobody holds is closed
        return reader

    async def test(server: Server) -> None:
        body = b"12345678" * 10_000
        stopped = await begin(server, header(body), len(body), body[:100])
        assert b" 408 " in await stopped.readline()
        stopped = await begin(server, header(body), len(body), body[:100])
        incoming = server.coordinator._copies
        await until(lambda: incoming._incoming is not None)
        assert await put(server, header(body), body) == (200, "the copy of step 1 is complete")
        with contextlib.suppress(ConnectionError):
            assert await stopped.read() == b""
        for writer in writers:
            writer.close()
        assert await newest(server) == body

    with_worker(test)


def test_a_worker_that_was_declared_lost_replaces_nothing() -> None:
    async def test(server: Server) -> None:
        body = b"right" * 1_000
        await put(server, header(body), body)
        async with server.client.post(
            f"{server.url}/v1/gone", json={"worker": "a", "incarnation": "a.0"}, headers=RIGHT
        ) as response:
            assert response.status == 200
        late = b"fenced" * 1_000
        code, sentence = await put(server, header(late, 2), late)
        assert code == 409
        assert "none of the job's workers" in sentence
        assert await newest(server) == body

    with_worker(test)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, None),
        ({"step": 9}, None),
        ({"step": 4}, 409),
        ({"generation": m.Generation(1, 0)}, 409),
        ({"generation": SECOND}, 409),
        ({"incarnation": "b.0"}, 409),
        ({"state": 100}, 400),
    ],
    ids=[
        "the same again",
        "newer",
        "older",
        "a former generation",
        "one to come",
        "a stranger",
        "no room for a manifest",
    ],
)
def test_only_a_member_of_the_running_generation_brings_one(changed: dict[str, Any], code: int | None) -> None:
    async def test(server: Server) -> None:
        known = header(b"x" * 100, step=5)
        sent = msgspec.structs.replace(known, **changed)
        if code is None:
            check(server.state, known, sent, 100)
        else:
            with pytest.raises(CopyRefusal) as refused:
                check(server.state, known, sent, 100)
            assert refused.value.code == code

    with_worker(test)


def test_workers_are_told_how_much_there_is_room_for() -> None:
    async def test(server: Server) -> None:
        async with server.client.ws_connect(f"{server.url}/v1/worker", headers=RIGHT) as stream:
            await stream.send_bytes(m.encode(hello("b")))
            welcome = framing.unpack_to_worker((await stream.receive(timeout=30)).data)
            assert isinstance(welcome, m.Welcome)
            assert welcome.memory_copy == MOST

    with_worker(test)


@pytest.mark.parametrize("idle", [0.3, 60.0], ids=["it stays", "it goes"])
def test_a_reader_that_stops_holds_the_copy_for_a_while_only(idle: float) -> None:
    async def test(server: Server) -> None:
        body = bytes(16 << 20)  # more than the kernel holds for a connection
        await put(server, header(body), body)
        copies = server.coordinator._copies
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as stopped:
            stopped.sendall(f"GET {COPY_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            await until(lambda: copies._readers == 1)
            if idle > 1:
                assert (await put(server, header(b"next", 2), b"next"))[0] == 409
                stopped.close()
            await until(lambda: copies._readers == 0)
        assert (await put(server, header(b"next", 2), b"next"))[0] == 200

    with_worker(test, replace(SMALL, memory_copy=KeptCopySettings(most=64 << 20, idle=idle)))

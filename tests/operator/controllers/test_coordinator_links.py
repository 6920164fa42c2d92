"""What answers in a coordinator's place may be anything; here it is real servers that do what no coordinator does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import ssl
import time
import tracemalloc
from asyncio import sslproto
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from kubelet import ADDRESSES
from scenes import SETTINGS as OPERATOR
from scenes import body, coordinator

from statuses import coordinator_status
from virtualflow.protocol.certificates import Party
from virtualflow.protocol.http_api import ScaleCall, WorkerStatus
from virtualflow.protocol.identity import Identity
from virtualflow.protocol.messages import Change, Generation, encode
from virtualflow_operator.api.objects import CoordinatorLink, read_job
from virtualflow_operator.constants import COORDINATOR_PORT
from virtualflow_operator.controllers.coordinator_links import CoordinatorLinks, kept
from virtualflow_operator.controllers.issuer import Issuer
from virtualflow_operator.observability import Metrics
from virtualflow_operator.settings import OperatorSettings

KEY = b"k" * 32
STATUSES = OPERATOR.statuses
CALL = ScaleCall(3, 1)
TOO_MUCH = 256 << 20
"""Bytes after which an endless answer ends all the same."""
SOME = 32 << 20
"""Far more than one answer and all buffers of a connection."""
FILLER = b" " * 65_536

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def answering(handler: Handler, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Something that answers at the coordinators' port of an address of its own."""
    address = next(ADDRESSES)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, address, COORDINATOR_PORT, reuse_address=True, ssl_context=context).start()
    try:
        yield address
    finally:
        await runner.cleanup()


class Operator:
    """The operator's connections, as its controller uses them."""

    def __init__(self, settings: OperatorSettings) -> None:
        self.metrics = Metrics()
        self.woken: list[tuple[str, str]] = []
        issuer = Issuer([KEY], settings.certificates)
        self.links = CoordinatorLinks(issuer, lambda key, _: self.woken.append(key), settings, self.metrics)

    def follow(self, name: str, address: str, namespace: str = "ml", workers: int = 2, identity: str = "") -> None:
        job = read_job(body())
        pod = dataclasses.replace(coordinator(job), uid=name, ip=address, identity=identity)
        self.links.follow((namespace, name), job.uid, pod, workers)

    def link(self, name: str, namespace: str = "ml") -> CoordinatorLink:
        found = self.links.view((namespace, name))
        assert found is not None
        return found

    def count(self, metric: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(metric, labels) or 0.0


@contextlib.asynccontextmanager
async def operating(settings: OperatorSettings = OPERATOR) -> AsyncIterator[Operator]:
    operator = Operator(settings)
    try:
        async with asyncio.timeout(120.0):
            yield operator
    finally:
        await operator.links.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - it looks at what other tasks do
        await asyncio.sleep(0.005)


async def behaving(request: web.Request) -> web.StreamResponse:
    """A coordinator whose job goes on, and does not change any more."""
    if request.path != "/v1/watch":
        return web.Response(body=b'{"message":"as you say"}')
    stream = web.WebSocketResponse()
    await stream.prepare(request)
    await stream.send_bytes(encode(coordinator_status()))
    async for _ in stream:
        pass
    return stream


def test_a_sealed_connection_takes_little_memory(tmp_path: Path) -> None:
    """The operator has one to each job's coordinator: a thousand of 256 KiB were more than its pod may have."""
    job = read_job(body())
    for name, content in (
        Issuer([KEY], OPERATOR.certificates)
        .files_of(Party(job.uid, "coordinator", "a coordinator"), time.time())
        .items()
    ):
        (tmp_path / name).write_bytes(content)

    async def story() -> None:
        async with operating() as operator, answering(behaving, Identity(tmp_path).server_context()) as address:
            tracemalloc.start()
            try:
                operator.follow("digits", address, identity="a Secret")
                await until(lambda: operator.link("digits").status is not None)
                taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, sslproto.__file__)])
            finally:
                tracemalloc.stop()
            both_ends = sum(each.size for each in taken.statistics("filename"))
            assert both_ends < 2 * (48 << 10), both_ends

    asyncio.run(story())


def test_a_call_that_is_sent_elsewhere_is_not_made_there() -> None:
    elsewhere: list[str] = []

    async def note(request: web.Request) -> web.StreamResponse:
        elsewhere.append(f"{request.method} {request.path}")
        return web.Response(body=b'{"message":"thank you"}')

    async def story() -> None:
        async with operating() as operator, answering(note) as other:

            async def redirect(request: web.Request) -> web.StreamResponse:
                where = f"http://{other}:{COORDINATOR_PORT}/secrets"
                return web.Response(status=307, headers={"Location": where})

            async with answering(redirect) as address:
                operator.follow("digits", address)
                await until(lambda: bool(operator.link("digits").misbehaves))
                operator.links._lines["ml", "digits"].quiet_until = 0.0  # so that the call is made, too
                assert await operator.links.send(("ml", "digits"), CALL) == "misbehaved"
                assert "elsewhere" in operator.link("digits").misbehaves

    asyncio.run(story())
    assert elsewhere == []


def test_of_an_endless_answer_little_is_read() -> None:
    sent, asked = 0, asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        if request.path == "/v1/watch":
            asked.set()
            return web.Response(status=503)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while sent < TOO_MUCH:
                await response.write(FILLER)
                sent += len(FILLER)
        return response

    async def story() -> None:
        async with operating() as operator, answering(endless) as address:
            operator.follow("digits", address)
            await asked.wait()
            assert await operator.links.send(("ml", "digits"), CALL) == "misbehaved"
            assert "1048576 bytes" in operator.link("digits").misbehaves

    asyncio.run(story())
    assert sent < SOME


@pytest.mark.parametrize("parts", [1, 2], ids=["one frame", "many frames"])
def test_of_an_endless_status_little_is_read(parts: int) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        stream = web.WebSocketResponse(writer_limit=65_536)
        await stream.prepare(request)
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        # The head of a frame of text, whole or the first of several, of 64 KiB or of 1 GiB.
        length = (1 << 30) if parts == 1 else len(FILLER)
        head = bytes([0x81 if parts == 1 else 0x01, 127]) + length.to_bytes(8, "big")
        while sent < TOO_MUCH and not transport.is_closing():
            transport.write((head if sent == 0 or parts > 1 else b"") + FILLER)
            head = bytes([0x00, 127]) + length.to_bytes(8, "big") if parts > 1 else head
            sent += len(FILLER)
            while transport.get_write_buffer_size() > 1 << 20 and not transport.is_closing():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return stream

    async def story() -> None:
        async with operating() as operator, answering(endless) as address:
            operator.follow("digits", address)
            await until(lambda: bool(operator.link("digits").misbehaves))
            assert operator.count("virtualflow_coordinator_misbehaviors_total") == 1

    asyncio.run(story())
    assert sent < SOME


DEEP = 100_000
UNREADABLE = {
    "not a status": b"[]",
    "not JSON": b"\xff\xfe",
    "nested without an end": b"[" * DEEP + b"]" * DEEP,
    "a deep value in a status": encode(coordinator_status())[:-1]
    + b',"x":'
    + b'{"a":' * DEEP
    + b"1"
    + b"}" * DEEP
    + b"}",
    "a million metrics": json.dumps(
        json.loads(encode(coordinator_status())) | {"metrics": dict.fromkeys(map(str, range(50_000)), 1)}
    ).encode(),
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_coordinator_that_sends_what_is_no_status_is_left_alone_and_said_so(content: bytes) -> None:
    opened = 0

    async def send(request: web.Request) -> web.StreamResponse:
        nonlocal opened
        opened += 1
        stream = web.WebSocketResponse()
        await stream.prepare(request)
        await stream.send_bytes(content)
        async for _ in stream:
            pass
        return stream

    async def story() -> None:
        async with operating() as operator, answering(send) as address, answering(behaving) as good:
            operator.follow("digits", address)
            await until(lambda: bool(operator.link("digits").misbehaves))
            assert not operator.link("digits").connected
            # It is not asked for anything for a while, and another job's is.
            assert await operator.links.send(("ml", "digits"), CALL) == "unreachable"
            operator.follow("others", good)
            await until(lambda: operator.link("others").connected)
            assert await operator.links.send(("ml", "others"), CALL) == "ok"
            # A larger one than usual is asked for again, once for each time that the limit is doubled.
            assert opened == 1 + max(0, math.ceil(math.log2(len(content) / STATUSES.usual)))

    asyncio.run(story())


def test_a_coordinator_that_misbehaves_again_is_left_alone_for_longer() -> None:
    impatient = dataclasses.replace(OPERATOR, refused_retry=0.02)
    begun: list[float] = []

    async def send(request: web.Request) -> web.StreamResponse:
        begun.append(time.monotonic())
        stream = web.WebSocketResponse()
        await stream.prepare(request)
        await stream.send_bytes(b"[]")
        async for _ in stream:
            pass
        return stream

    async def story() -> None:
        async with operating(impatient) as operator, answering(send) as address:
            operator.follow("digits", address)
            await until(lambda: len(begun) == 6)

    asyncio.run(story())
    waits = [after - before for before, after in itertools.pairwise(begun)]
    assert all(wait >= 0.02 * 2**number for number, wait in enumerate(waits)), waits


def test_a_flood_of_statuses_is_read_at_the_pace_of_its_budget() -> None:
    small = encode(coordinator_status())

    async def flood(request: web.Request) -> web.StreamResponse:
        stream = web.WebSocketResponse()
        await stream.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await stream.send_bytes(small)
        return stream

    async def story() -> float:
        async with operating() as operator, answering(flood) as address:
            begun = time.monotonic()
            operator.follow("digits", address)
            await until(lambda: len(operator.woken) >= 192)
            return time.monotonic() - begun

    # 64 messages a second, after a burst of as many; slow machines may take longer.
    assert asyncio.run(story()) > 1.9


def test_a_stream_that_closes_after_each_status_is_not_opened_again_at_once() -> None:
    opened: list[float] = []

    async def once(request: web.Request) -> web.StreamResponse:
        opened.append(time.monotonic())
        stream = web.WebSocketResponse()
        await stream.prepare(request)
        await stream.send_bytes(encode(coordinator_status()))
        await stream.close()
        return stream

    async def story() -> None:
        async with operating() as operator, answering(once) as address:
            operator.follow("digits", address)
            await until(lambda: len(opened) == 5)

    asyncio.run(story())
    assert opened[4] - opened[0] >= 0.1 + 0.2 + 0.4 + 0.8


def talking(content: bytes) -> Handler:
    """A coordinator that says the same as fast as it is heard."""

    async def talk(request: web.Request) -> web.StreamResponse:
        stream = web.WebSocketResponse(compress=False)
        await stream.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await stream.send_bytes(content)
        return stream

    return talk


def test_of_a_status_only_what_is_used_is_kept() -> None:
    change = Change(Generation(1, 1), 1, 1, 2, "join", "", 1.0, 0)
    metrics = {"loss": 0.5} | {str(number): 1.0 for number in range(1_000)}
    whole = coordinator_status(changes=(change,) * 1_000, metrics=metrics, reason="x" * 4_000)
    brief = kept(whole)
    assert (len(brief.changes), brief.metrics, brief.reason) == (20, {"loss": 0.5}, "")


def test_more_workers_than_a_job_can_have_are_no_status() -> None:
    workers = [WorkerStatus(f"x{number}", "i", "1.1.1.1", 1, "training", 0, 1) for number in range(69)]

    async def story() -> None:
        many = talking(encode(coordinator_status("training", *workers)))
        async with operating() as operator, answering(many) as address:
            operator.follow("digits", address, workers=2)
            await until(lambda: bool(operator.link("digits").misbehaves))
            assert "69 workers of a job that has had 2" in operator.link("digits").misbehaves
            operator.follow("others", address, workers=3)
            await until(lambda: operator.link("others").connected)

    asyncio.run(story())


def test_where_all_say_too_much_the_namespace_that_says_most_is_left_alone() -> None:
    little = dataclasses.replace(OPERATOR, statuses=dataclasses.replace(STATUSES, held=256 << 10))
    large = encode(coordinator_status()).ljust(60_000)

    async def story() -> None:
        async with operating(little) as operator, answering(talking(large)) as bad, answering(behaving) as good:
            for number in range(4):
                operator.follow(f"hostile-{number}", bad, namespace="hostile")
            await until(lambda: operator.count("virtualflow_coordinators_shed_total", job_namespace="hostile") >= 1)
            operator.follow("digits", good)
            await until(lambda: operator.link("digits").connected)
            assert await operator.links.send(("ml", "digits"), CALL) == "ok"
            left_alone = [operator.link(f"hostile-{number}", "hostile").busy for number in range(4)]
            assert any("those of the namespace hostile say most" in busy for busy in left_alone)
            assert not operator.link("digits").busy

    asyncio.run(story())


def test_a_coordinator_that_sends_without_a_pause_is_left_alone() -> None:
    hasty = dataclasses.replace(OPERATOR, statuses=dataclasses.replace(STATUSES, job_rate=65_536.0, flood=0.1))

    async def story() -> None:
        async with operating(hasty) as operator, answering(talking(encode(coordinator_status()))) as address:
            operator.follow("digits", address)
            await until(lambda: bool(operator.link("digits").misbehaves))
            assert "without a pause" in operator.link("digits").misbehaves

    asyncio.run(story())

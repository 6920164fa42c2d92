"""The client of those who signal and watch a job: what it asks for, and what it tells of its connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web

from ports import free_port
from statuses import coordinator_status
from virtualflow.coordinator.server import CoordinatorServer
from virtualflow.coordinator.settings import CoordinatorSettings
from virtualflow.protocol import http_api
from virtualflow.protocol.http_client import CallRefused, CoordinatorClient
from virtualflow.protocol.messages import encode
from virtualflow.protocol.settings import SignalSettings

TOKEN = "right"
SETTINGS = SignalSettings(retry_first=0.01, retry_most=0.02)


@asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[tuple[CoordinatorServer, int]]:
    coordinator = CoordinatorServer(TOKEN, 2, CoordinatorSettings(), minimum=2)
    runner = web.AppRunner(coordinator.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    try:
        yield coordinator, runner.addresses[0][1]
    finally:
        await coordinator.close()
        await runner.cleanup()


def client_of(port: int, token: str = TOKEN) -> CoordinatorClient:
    return CoordinatorClient(f"http://127.0.0.1:{port}", token, SETTINGS)


def test_a_watcher_is_told_when_its_stream_opens_breaks_and_opens_again() -> None:
    links: list[bool] = []

    async def story() -> None:
        port = free_port()
        async with client_of(port) as client, asyncio.timeout(60.0):
            stream = client.watch(on_link=links.append)
            first = asyncio.create_task(anext(stream))
            while not links:  # noqa: ASYNC110 - it looks at what another task does
                await asyncio.sleep(0.005)
            assert links == [False]
            async with serving(port):
                assert (await first).minimum == 2
                assert links == [False, True]
            second = asyncio.create_task(anext(stream))
            while len(links) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            async with serving(port):
                await second
            assert links == [False, True, False, True]
            await stream.aclose()
        assert links == [False, True, False, True]

    asyncio.run(story())


def test_a_watcher_that_is_refused_is_told_that_it_has_no_stream() -> None:
    links: list[bool] = []

    async def story() -> None:
        async with serving() as (_, port), client_of(port, "wrong") as client:
            with pytest.raises(CallRefused):
                await anext(client.watch(on_link=links.append))

    asyncio.run(story())
    assert links == [False]


def test_a_watcher_asks_for_quiet_and_for_brevity() -> None:
    async def story() -> None:
        async with serving() as (coordinator, port), client_of(port) as client, asyncio.timeout(60.0):
            for number in range(80):
                coordinator.state.tell("info", str(number))
            coordinator._turn()
            whole = client.watch()
            quiet = client.watch(3_600.0, brief=True)
            assert len((await anext(whole)).events) == 80
            assert len((await anext(quiet)).events) == 0
            assert len((await client.status()).events) == 80
            assert len((await client.status(brief=True)).events) == 0
            following = asyncio.create_task(anext(quiet))
            coordinator.state.version += 1
            coordinator._turn()
            await anext(whole)
            assert not following.done()
            await client.send(http_api.ScaleCall(3, minimum=1))
            assert ((await following).wanted, (await client.status()).minimum) == (3, 1)
            await whole.aclose()
            await quiet.aclose()

    asyncio.run(story())


def test_a_watcher_that_asks_for_too_much_quiet_is_refused() -> None:
    async def story() -> None:
        async with serving() as (_, port), client_of(port) as client:
            with pytest.raises(CallRefused, match="400"):
                await anext(client.watch(86_400.0))

    asyncio.run(story())


def test_of_a_flood_little_is_read_ahead() -> None:
    content = encode(coordinator_status()).ljust(16_384)
    sent = 0

    async def flood(request: web.Request) -> web.WebSocketResponse:
        nonlocal sent
        stream = web.WebSocketResponse(compress=False, writer_limit=len(content))
        await stream.prepare(request)
        assert request.transport is not None
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(content))
        with suppress(ConnectionError):
            while True:
                await stream.send_bytes(content)
                sent += len(content)
                await asyncio.sleep(0)
        return stream

    async def wait_until_nothing_moves(_: int) -> None:
        before, still = sent, 0
        while still < 200:
            await asyncio.sleep(0)
            before, still = sent, still + 1 if sent == before else 0

    async def story() -> None:
        app = web.Application()
        app.router.add_get("/v1/watch", flood)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with client_of(runner.addresses[0][1]) as client, asyncio.timeout(60.0):
            stream = client.watch(admit=wait_until_nothing_moves)
            assert isinstance(stream, AsyncGenerator)
            await anext(stream)
            assert sent < 400_000
            await stream.aclose()
        await runner.cleanup()

    asyncio.run(story())

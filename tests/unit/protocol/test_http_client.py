"""The client of those who signal and watch a job: what it asks for, and what it tells of its connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from ports import free_port
from virtualflow.coordinator.server import CoordinatorServer
from virtualflow.coordinator.settings import CoordinatorSettings
from virtualflow.protocol import http_api
from virtualflow.protocol.http_client import CallRefused, CoordinatorClient
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

"""A coordinator behind real sockets in this process, and what a worker of it says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import msgspec
from aiohttp import web

from virtualflow.coordinator.server import CoordinatorServer
from virtualflow.coordinator.settings import CoordinatorSettings, MembershipSettings
from virtualflow.protocol import framing
from virtualflow.protocol import messages as m
from virtualflow.protocol.versions import PROTOCOL

TOKEN = "the job's token"
RIGHT = {"Authorization": f"Bearer {TOKEN}"}
SETTINGS = CoordinatorSettings(membership=MembershipSettings(restart_grace=0.0), backlog=50)


def hello(name: str, incarnation: str = "", **facts: object) -> m.Hello:
    usual = m.Hello(
        protocol=PROTOCOL,
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

    def __init__(self, coordinator: CoordinatorServer, url: str, client: aiohttp.ClientSession) -> None:
        self.coordinator, self.url, self.client = coordinator, url, client
        self.state = coordinator.state
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
    frame = await stream.receive(timeout=30.0)
    return framing.unpack_to_worker(frame.data) if frame.type == aiohttp.WSMsgType.BINARY else None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():  # noqa: ASYNC110 - it looks at the state of another task
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(settings: CoordinatorSettings = SETTINGS) -> AsyncIterator[Server]:
    coordinator = CoordinatorServer(TOKEN, 2, settings)
    runner = web.AppRunner(coordinator.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            yield Server(coordinator, f"http://127.0.0.1:{runner.addresses[0][1]}", client)
    finally:
        await coordinator.close()
        await runner.cleanup()


def with_server(story: Callable[[Server], Awaitable[None]], settings: CoordinatorSettings = SETTINGS) -> None:
    async def play() -> None:
        async with serving(settings) as server, asyncio.timeout(90.0):
            await story(server)

    asyncio.run(play())

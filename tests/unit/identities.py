"""Identities of the parties of a job, for tests: their authority, folders as a process is given them, and a coordinator
that asks for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web
from coordinator_server import SETTINGS

from virtualflow.coordinator.server import CoordinatorServer
from virtualflow.protocol import messages as m
from virtualflow.protocol.certificates import Authority, Party, Role, make_key
from virtualflow.protocol.http_client import CoordinatorClient
from virtualflow.protocol.identity import Identity, write_identity
from virtualflow.protocol.settings import SignalSettings

JOB = "job-a"
HOUR, DAY = 3_600.0, 86_400.0


@dataclass
class Identities:
    """Of one job, below ``folder``."""

    folder: Path
    authority: Authority
    job: str = JOB

    def issue(
        self,
        role: Role,
        name: str,
        uid: str = "",
        *,
        now: float | None = None,
        lifetime: float = HOUR,
        believed: Sequence[Authority] | None = None,
    ) -> Path:
        """Write an identity; its folder.

        Args:
            now: of the authority's clock; ``None``: the right time.
            believed: the authorities that its holder believes; ``None``: this one.
        """
        key, party = make_key(), Party(self.job, role, name, uid)
        now = time.time() if now is None else now
        certificate = self.authority.issue(key.public_key(), party, now, lifetime)
        bundle = [each.certificate for each in believed or [self.authority]]
        write_identity(self.folder / name, key, certificate, bundle)
        return self.folder / name

    def hold(self, role: Role, name: str) -> Identity:
        return Identity(self.issue(role, name))


def identities(folder: Path, job: str = JOB) -> Identities:
    """Of a job with an authority of its own."""
    return Identities(folder / job, Authority.make(job, time.time()), job)


PAGE = "what the page's token is derived from"
QUICK = SignalSettings(request_timeout=10.0, patience=0.0)


@dataclass
class Guarded:
    """A coordinator with an identity, and the others of its job."""

    job: Identities
    coordinator: CoordinatorServer
    port: int

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def as_(self, identity: Identity) -> AsyncIterator[aiohttp.ClientSession]:
        connector = aiohttp.TCPConnector(ssl=identity.client_context(), force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield session

    @contextlib.asynccontextmanager
    async def worker(self, name: str, said: m.Hello) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        async with (
            self.as_(self.job.hold("worker", name)) as session,
            session.ws_connect(f"{self.url}/v1/worker") as stream,
        ):
            await stream.send_bytes(m.encode(said))
            yield stream

    async def serves(self) -> None:
        """It still does what it is there for."""
        async with CoordinatorClient(self.url, self.job.hold("control", "control"), QUICK) as client:
            await client.status()


@contextlib.asynccontextmanager
async def guarded(folder: Path, clock: Callable[[], float] = time.time) -> AsyncIterator[Guarded]:
    """A coordinator of that clock, whose own certificate counts all day."""
    job = identities(folder)
    identity = Identity(job.issue("coordinator", "coordinator", now=time.time() - 12 * HOUR, lifetime=DAY), clock)
    coordinator = CoordinatorServer(PAGE, 2, SETTINGS, identity=identity)
    runner = web.AppRunner(coordinator.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    assert runner.server is not None
    listening = await coordinator.door.open(runner.server, "127.0.0.1", 0)
    try:
        yield Guarded(job, coordinator, listening.sockets[0].getsockname()[1])
    finally:
        listening.close()
        await coordinator.close()
        await runner.cleanup()


def with_guarded(folder: Path, story: Callable[[Guarded], Awaitable[None]]) -> None:
    async def play() -> None:
        async with asyncio.timeout(60.0), guarded(folder) as server:
            await story(server)
            await server.serves()

    asyncio.run(play())

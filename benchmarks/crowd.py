"""Simulated workers for measurements of a coordinator: real connections and messages, and no training behind them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

import aiohttp

from virtualflow.protocol import framing
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_MESSAGE
from virtualflow.protocol.versions import PROTOCOL
from virtualflow.transport.settings import LinkSettings

PATIENCE = 120.0
"""Seconds that anything may take before the measurement is given up."""


@lru_cache(maxsize=64)
def decode(frame: bytes) -> m.ToWorker:
    """A message; what all are told is decoded once, as if each worker had a machine of its own."""
    return framing.unpack_to_worker(frame)


class Crowd:
    """All simulated workers, and what they know of each other without the coordinator."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        virtual_nodes: int,
        context: Callable[[str], ssl.SSLContext | bool],
    ) -> None:
        self.url, self.session, self.virtual_nodes, self.context = url, session, virtual_nodes, context
        self.workers: dict[str, Worker] = {}
        self.sent: Counter[str] = Counter()
        self.heard: Counter[str] = Counter()
        self.heard_bytes = 0
        self.step = 0
        self.training = False
        self.prepared: Counter[m.Generation] = Counter()
        self.news = asyncio.Event()

    def living(self) -> list[Worker]:
        """Those that are connected."""
        return [worker for worker in self.workers.values() if worker.socket is not None]

    async def start(self, names: list[str]) -> list[Worker]:
        """Connect workers that are not ready yet."""
        fresh = self.workers_of(names)
        welcome = await self.connect(fresh)
        assert welcome == len(fresh)
        return fresh

    def workers_of(self, names: list[str]) -> list[Worker]:
        """Workers with identities, that are not connected yet."""
        fresh = [Worker(self, name) for name in names]
        self.workers.update({worker.incarnation: worker for worker in fresh})
        return fresh

    async def connect(self, workers: list[Worker]) -> int:
        """Connect workers, some at a time: they share a processor that in a job each has for itself. How many may."""
        welcome = 0
        for first in range(0, len(workers), 50):
            welcome += sum(await asyncio.gather(*(worker.connect() for worker in workers[first : first + 50])))
        return welcome

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a message brings about."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.news.clear()
                await self.news.wait()

    def agree(self, plan: m.Plan) -> None:
        """Enter ``plan`` if all of its members are prepared, as workers do without the coordinator."""
        self.prepared[plan.generation] += 1
        if self.prepared[plan.generation] == len(plan.members):
            inside = {member.incarnation for member in plan.members}
            for worker in self.living():
                if worker.incarnation in inside:
                    worker.enter(plan)
                elif worker.plan is not None:
                    worker.say(m.Left(plan.generation, self.step))


class Worker:
    """One simulated worker: the protocol of a session, without a model."""

    def __init__(self, crowd: Crowd, name: str) -> None:
        self.crowd, self.name, self.incarnation = crowd, name, secrets.token_hex(16)
        self.context = crowd.context(name)
        """By which it shows who it is."""
        self.socket: aiohttp.ClientWebSocketResponse | None = None
        self.newest: m.Plan | None = None
        self.newest_at = 0.0
        self.plan: m.Plan | None = None
        self.prepared: m.Generation | None = None
        self.released = False
        self.hello: bytes | None = None
        """Prepared beforehand: a thousand workers with one processor would be busy with it for too long."""
        self._keys: set[str] = set()
        self._out: asyncio.Queue[m.FromWorker] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self) -> bool:
        """Say Hello and wait for the answer; whether it is a welcome."""
        self._out = asyncio.Queue()
        self.socket = await self.crowd.session.ws_connect(
            f"{self.crowd.url}/v1/worker", max_msg_size=MAX_MESSAGE, ssl=self.context
        )
        self.crowd.sent["Hello"] += 1
        await self.socket.send_bytes(self.hello or self.pack_hello())
        self.hello = None
        welcome = decode((await self.socket.receive(timeout=PATIENCE)).data)
        if not isinstance(welcome, m.Welcome):
            await self.socket.close()
            self.socket = None
            return False
        self._tasks = [
            asyncio.create_task(self._read(self.socket)),
            asyncio.create_task(self._write(self.socket, welcome.heartbeat)),
        ]
        return True

    def pack_hello(self) -> bytes:
        """What it says first."""
        hello = m.Hello(
            protocol=PROTOCOL,
            worker=self.name,
            incarnation=self.incarnation,
            address="127.0.0.1",
            pid=1,
            virtual_nodes=self.crowd.virtual_nodes,
            fingerprint="torch 2.13.0; cpu; AVX2; 1 thread",
            ready=self.plan is not None,
            draining=False,
            drain_deadline=None,
            plan=self.plan,
            step=self.crowd.step,
            total_steps=1_000_000,
            done=False,
            changes=(),
        )
        return framing.pack(hello)

    def say(self, message: m.FromWorker) -> None:
        """Queue a message."""
        self._out.put_nowait(message)

    def vanish(self) -> None:
        """Cut the connection, as the kernel of a killed process does."""
        for task in self._tasks:
            task.cancel()
        assert self.socket is not None
        assert self.socket._response.connection is not None
        transport = self.socket._response.connection.transport
        assert isinstance(transport, asyncio.WriteTransport)
        transport.abort()
        self.socket = None

    def enter(self, plan: m.Plan) -> None:
        """Go over to ``plan``."""
        survivor, self.plan = self.plan is not None, plan
        self.say(m.EnteredTold(plan.generation, self.crowd.step, False))
        if survivor:
            change = m.Change(plan.generation, self.crowd.step + 1, 0, 0, plan.cause, plan.reason, 20.0, 0)
            self.say(m.Resumed(change))

    async def _send(self, socket: aiohttp.ClientWebSocketResponse, message: m.FromWorker) -> None:
        self.crowd.sent[type(message).__name__] += 1
        await socket.send_bytes(framing.pack(message))

    async def _write(self, socket: aiohttp.ClientWebSocketResponse, heartbeat: float) -> None:
        reported = 0.0
        while not socket.closed:
            leads = self.crowd.training and self.plan is not None and self.plan.members[0].worker == self.name
            try:
                async with asyncio.timeout(LinkSettings.progress if leads else heartbeat):
                    message = await self._out.get()
            except TimeoutError:
                message = m.Heartbeat()
                if leads and self.plan is not None and time.monotonic() - reported >= LinkSettings.progress:
                    reported = time.monotonic()
                    generation, step = self.plan.generation, self.crowd.step
                    message = m.Progress(generation, step, 0, 1_000_000, {"loss": 1.0}, 50.0, "training")
            with contextlib.suppress(ConnectionError):
                await self._send(socket, message)

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        crowd = self.crowd
        async for frame in socket:
            message = decode(frame.data)
            crowd.heard[type(message).__name__] += 1
            crowd.heard_bytes += len(frame.data)
            match message:
                case m.Plan():
                    self.newest, self.newest_at = message, time.monotonic()
                    self._keys = set()
                    rank = message.rank_of(self.name, self.incarnation)
                    if rank is not None:
                        self.say(m.Publish(message.generation, f"member-{rank}", _address(rank)))
                case m.Keys(generation, values):
                    if self.newest is not None and generation == self.newest.generation:
                        self._keys.update(values)
                        if self.prepared != generation and len(self._keys) == len(self.newest.members):
                            self.prepared = generation
                            self.say(m.Prepared(generation))
                            crowd.agree(self.newest)
                case m.Release():
                    self.released = True
                case m.Refuse() | m.End():
                    print(f"{self.name}: {message.reason}", file=sys.stderr)
            crowd.news.set()
        self.socket = None
        crowd.news.set()


def _address(rank: int) -> bytes:
    """A value as workers publish it: a secret for whoever connects, and where a member listens."""
    return secrets.token_bytes(16) + f"127.0.0.1 {10_000 + rank}".encode()

"""How readers and a server get their inputs, and what is seen meanwhile: errors, speed, memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import resource
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from coordinator_server import RIGHT, SETTINGS, TOKEN, Server, hello, serving

from fuzz.mutations import mutated
from fuzz.readers import KEPT, Reader, _wire
from virtualflow.protocol import framing, http_api, job_record, live_view
from virtualflow.protocol import messages as m

HANDSHAKE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
)
PATIENCE = 0.02
"""Seconds that an answer is waited for: a request that is not whole gets none."""


@dataclass
class Outcome:
    """Of one reader's inputs."""

    name: str
    read: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    """Seconds for one input, at the most."""
    growth: int = 0
    """Bytes that the process has grown by since a tenth of the inputs was read."""

    def __str__(self) -> str:
        count = self.read + self.refused
        return (
            f"{self.name:26} {count:9,} inputs {count / max(self.seconds, 1e-9):9,.0f}/s  {self.read / count:4.0%} read"
            f"  slowest {1e3 * self.slowest:6.1f} ms  grown by {self.growth / 2**20:5.1f} MiB"
        )


class Found(Exception):
    """An input that is neither read nor refused as it should be."""

    def __init__(self, name: str, said: bytes, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name, self.said = name, said

    def keep(self) -> Path:
        """Write the input where it is a seed from now on."""
        path = KEPT / self.name / hashlib.sha256(self.said).hexdigest()[:12]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.said)
        return path


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def try_reader(reader: Reader, count: int, seed: int) -> Outcome:
    """Give a reader its seeds and ``count`` inputs that ``seed`` decides.

    Raises:
        Found: one is neither read nor refused as it should be.
    """
    outcome, rng = Outcome(reader.name), random.Random(seed ^ zlib.crc32(reader.name.encode()))
    before = resident()
    for n, said in enumerate(reader.inputs(rng, count)):
        if n == count // 10:
            before = resident()
        began = time.perf_counter()
        try:
            read = reader.try_one(said)
        except Exception as error:
            raise Found(reader.name, said, f"{type(error).__name__}: {error}"[:400]) from error
        took = time.perf_counter() - began
        outcome.seconds += took
        outcome.slowest = max(outcome.slowest, took)
        outcome.read += read
        outcome.refused += not read
    outcome.growth = resident() - before
    return outcome


# --- a coordinator's port ---------------------------------------------------------------------------------------------


def _requests() -> list[bytes]:
    bearer = f"Authorization: Bearer {TOKEN}\r\n"
    bodies = dict.fromkeys(http_api.PATHS.values(), b"{}") | {job_record.PATH: b"{}", http_api.COPY_PATH: b"a copy"}
    for path, kind in zip(http_api.PATHS.values(), http_api.PATHS, strict=True):
        bodies[path] = next(iter(_wire(kind.__name__)), b"{}")
    paths = (
        "/healthz",
        live_view.PAGE_PATH,
        live_view.VIEW_PATH,
        live_view.LOG_PATH,
        "/v1/status?brief=1",
        job_record.PATH,
    )
    found = [f"GET {path} HTTP/1.1\r\nHost: a\r\n{bearer}Connection: close\r\n\r\n".encode() for path in paths]
    for path, body in bodies.items():
        method = "PUT" if path in (job_record.PATH, http_api.COPY_PATH) else "POST"
        length = f"Content-Length: {len(body)}\r\nConnection: close\r\n"
        found.append(f"{method} {path} HTTP/1.1\r\nHost: a\r\n{bearer}{length}\r\n".encode() + body)
    for path in ("/v1/worker", "/v1/watch?progress=1"):
        found.append(f"GET {path} HTTP/1.1\r\nHost: a\r\n{bearer}{HANDSHAKE}\r\n".encode())
    return found


class _Errors(logging.Handler):
    """What the server logs as an error of its own: not that a request is none, or that nobody waits for the answer."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | ConnectionError)):
            self.seen.append(self.format(record))


async def _request(port: int, said: bytes) -> bytes:
    """Send bytes and no more; the first line of the answer, empty without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(said)
        async with asyncio.timeout(PATIENCE):
            answer = await reader.read(64)
        return answer.split(b"\r\n")[0]
    except (ConnectionError, TimeoutError):
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _converse(server: Server, said: bytes, *, first: bool) -> bytes:
    """Send a message of a worker, the first one or one behind its Hello, until the connection is closed."""
    async with server.client.ws_connect(f"{server.url}/v1/worker", headers=RIGHT) as stream:
        if not first:
            await stream.send_bytes(m.encode(hello("worker-0")))
        await stream.send_bytes(said)
        await stream.close()
        return b"HTTP/1.1 101"


async def _serve(kind: str, inputs: Iterator[bytes], outcome: Outcome, count: int) -> None:
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(
        lambda _, context: errors.seen.append(f"{context.get('message')}: {context.get('exception')!r}")
    )
    before = resident()
    try:
        async with serving(SETTINGS) as server:
            port = int(server.url.rpartition(":")[2])
            for n, said in enumerate(inputs):
                if n == count // 10:
                    before = resident()
                began = time.perf_counter()
                if kind == "requests":
                    answer = await _request(port, said)
                else:
                    answer = await _converse(server, said, first=n % 2 == 0)
                took = time.perf_counter() - began
                outcome.slowest = max(outcome.slowest, took)
                outcome.seconds += took
                refused = not answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 101"))
                outcome.refused += refused
                outcome.read += not refused
                if errors.seen or b" 500 " in answer:
                    raise Found(kind, said, (errors.seen or [answer.decode("latin-1")])[0][-400:])
            async with server.client.get(f"{server.url}/v1/status", headers=RIGHT) as answered:
                assert answered.status == 200, "the server does not serve any more"
    except aiohttp.ClientError as error:
        raise Found(kind, b"", repr(error)) from error
    finally:
        logging.getLogger().removeHandler(errors)
    outcome.growth = resident() - before


def try_server(kind: str, count: int, seed: int) -> Outcome:
    """Give a real coordinator ``count`` requests, or messages of workers, and its seeds.

    Args:
        kind: ``requests`` or ``messages``.

    Raises:
        Found: it answers 500, logs an error, or does not serve any more.
    """
    rng, outcome = random.Random(seed), Outcome(kind)
    messages = [entry for entry in _wire() if b'"type"' in entry]
    known = _requests() if kind == "requests" else [*messages, framing.pack(hello("a" * 90))]
    known += [path.read_bytes() for path in sorted((KEPT / kind).glob("*"))]
    inputs = iter([*known, *(mutated(rng, known) for _ in range(count))])
    asyncio.run(_serve(kind, inputs, outcome, count))
    return outcome

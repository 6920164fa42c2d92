"""What workers hand to the coordinator to keep: the copy of a training's state, for a job of one worker that dies with
its node, and the record of the job.

Of the state there is the newest whole copy, and at most one that arrives beside it and takes its place once its
checksum is right. What is in it is the workers' concern. A coordinator that dies takes it along: then the checkpoint on
disk counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import mmap
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web

from virtualflow.coordinator.series import fault_in_series
from virtualflow.coordinator.settings import KeptCopySettings
from virtualflow.coordinator.state import JobState
from virtualflow.coordinator.status_stream import answer
from virtualflow.protocol import messages as m
from virtualflow.protocol.certificates import NotTrusted
from virtualflow.protocol.http_api import COPY_HEADER, CopyHeader, MemoryCopyState
from virtualflow.protocol.identity import Identity
from virtualflow.protocol.job_record import AGE, JobRecord
from virtualflow.protocol.settings import MAX_MESSAGE

logger = logging.getLogger("virtualflow.coordinator")


@dataclass(frozen=True)
class Copy:
    header: CopyHeader
    run: int
    """The run of the script that it is of."""
    body: mmap.mmap
    """Memory of its own, of which the kernel makes a page when it is written: nothing waits for all of them."""


class CopyRefusal(Exception):
    """Why a copy is not taken: an HTTP status, and a sentence."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def copy_limit(settings: KeptCopySettings) -> int:
    """Bytes of the largest copy that this machine, or this pod, has the memory for twice; 0: none."""
    return max(0, min(settings.most, (_free_memory() - settings.reserve) // 2))


def check(
    state: JobState, newest: CopyHeader | None, header: CopyHeader, size: int, certified: str | None = None
) -> None:
    """Whether a copy of ``size`` bytes may take the place of the newest one.

    Only a member of the running generation may bring one: who was declared lost belongs to a lineage that is over.

    Args:
        certified: the name of the worker whose certificate the sender has; ``None``: in plaintext there is none.
    """
    if size > state.copy_limit:
        raise CopyRefusal(413, f"a copy of {size} bytes is larger than the {state.copy_limit} that there is memory for")
    if not header.state < size:
        raise CopyRefusal(400, f"a state of {header.state} bytes and its manifest are more than {size}")
    worker, running = state.roster.workers.get(header.incarnation), state.running
    if worker is None or not worker.present or certified not in (None, worker.name):
        raise CopyRefusal(409, "the process that sends this copy is none of the job's workers, or not any more")
    if running is None or running.generation != header.generation or not running.includes(header.incarnation):
        raise CopyRefusal(409, f"{worker.name} sends a copy of generation {header.generation}, which does not run")
    if newest is not None and (newest.generation, newest.step) > (header.generation, header.step):
        raise CopyRefusal(409, f"the copy of step {newest.step} is newer than that of step {header.step}")


class KeptCopies:
    """The newest copy, and the one that arrives.

    Args:
        on_change: called when there is a new one.
        name_of: whose certificate a request's sender has; ``None``: in plaintext there is none.
    """

    def __init__(
        self,
        state: JobState,
        settings: KeptCopySettings,
        on_change: Callable[[], None],
        name_of: Callable[[web.Request], str | None],
    ) -> None:
        self._state = state
        self._settings = settings
        self._on_change, self._name_of = on_change, name_of
        self._newest: Copy | None = None
        self._incoming: web.Request | None = None
        self._readers = 0

    async def receive(self, request: web.Request) -> web.Response:
        """``PUT``: take a copy. One that is sent while another arrives takes its place: its sender came later."""
        try:
            header = msgspec.json.decode(request.headers.get(COPY_HEADER, ""), type=CopyHeader)
        except msgspec.MsgspecError as error:
            return answer(400, f"the header {COPY_HEADER} does not describe a copy: {error}")
        size = request.content_length
        if size is None:
            return answer(411, "a copy needs a Content-Length")
        if self._readers:
            return answer(409, "a worker is reading the newest copy; send the next one later")
        try:
            self._check(header, size, self._name_of(request))
            if self._incoming is not None and self._incoming.transport is not None:
                self._incoming.transport.abort()
            self._incoming = request
            await self._take(request, header, size)
        except CopyRefusal as refusal:
            return answer(refusal.code, str(refusal))
        finally:
            if self._incoming is request:
                self._incoming = None
        return answer(200, f"the copy of step {header.step} is complete")

    async def give(self, request: web.Request) -> web.StreamResponse:
        """``GET``: the newest copy; ``HEAD``: what it is."""
        copy = self._newest
        if copy is None or copy.run != self._state.run:
            return answer(404, "there is no copy of the training's state")
        response = web.StreamResponse(headers={COPY_HEADER: msgspec.json.encode(copy.header).decode()})
        response.content_length = len(copy.body)
        response.content_type = "application/octet-stream"
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        self._readers += 1
        try:
            whole = memoryview(copy.body)
            for start in range(0, len(whole), self._settings.piece):
                async with asyncio.timeout(self._settings.idle):
                    await response.write(whole[start : start + self._settings.piece])
        except (ConnectionError, TimeoutError) as error:
            logger.warning("the copy of step %d was not read to its end: %s", copy.header.step, error)
            response.force_close()
            if request.transport is not None:
                request.transport.close()
        finally:
            self._readers -= 1
        return response

    def _check(self, header: CopyHeader, size: int, certified: str | None = None) -> None:
        newest = self._newest
        known = newest.header if newest is not None and newest.run == self._state.run else None
        check(self._state, known, header, size, certified)

    async def _take(self, request: web.Request, header: CopyHeader, size: int) -> None:
        """Read the body into memory; once it is right, it is the newest copy."""
        body, checksum, end = mmap.mmap(-1, size), hashlib.sha256(), 0
        try:
            while end < size:
                async with asyncio.timeout(self._settings.idle):
                    piece = await request.content.readany()
                if not piece:
                    break
                body[end : end + len(piece)] = piece
                checksum.update(piece)
                end += len(piece)
        except TimeoutError:
            raise CopyRefusal(408, f"nothing of the copy has come for {self._settings.idle:g} s") from None
        except (ConnectionError, web.RequestPayloadError) as error:
            raise CopyRefusal(400, f"the copy was cut short: {error}") from None
        if end != size or checksum.hexdigest() != header.sha256:
            raise CopyRefusal(400, "the copy is not what was sent: its SHA-256 differs")
        self._check(header, size)
        self._newest = Copy(header, self._state.run, body)
        self._state.memory_copy = MemoryCopyState(header.step, time.time(), size)
        self._state.version += 1
        self._on_change()


def _free_memory() -> int:
    """Bytes that this process may still take: of the machine, or of its pod if that is less."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(1024 * int(line.split()[1]))
    group = Path("/sys/fs/cgroup")  # a container sees its own group there
    with contextlib.suppress(OSError, ValueError):  # ValueError: the limit is "max"
        limit = int((group / "memory.max").read_text())
        found.append(limit - int((group / "memory.current").read_text()))
    return min(found, default=0)


# --- the record of the job: what this coordinator writes for its successor --------------------------------------------
#
# Some workers fetch it now and then and hand it to a coordinator that does not know them. So the live page goes on
# after a coordinator was killed, and coordinators keep nothing on a disk. No decision depends on it.


def write_record(job: JobState, writer: str) -> JobRecord:
    """The record of ``job`` as it is now, with the next number."""
    job.records += 1
    history = job.history
    return JobRecord(
        writer,
        job.records,
        history.goodput.record(),
        history.series.record(),
        job.latest_events,
        *history.forgotten,
        job.run,
        history.began,
    )


def take_up(job: JobState, record: JobRecord, age: float, now: float) -> bool:
    """Go on from what a coordinator before this one has recorded, unless a newer record was there already.

    Args:
        record: of another one, without a fault.
        age: seconds since it was written.
        now: of the clock that goodput is counted by.

    Returns:
        Whether it is taken up.
    """
    if record.number <= job.inherited:
        return False
    job.inherited, job.records = record.number, max(job.records, record.number)
    history = job.history
    history.goodput.resume(record.goodput, age, now)
    if record.run == job.run:
        history.series.resume(record.series)
    history.earlier = record.events
    history.began = min((began for began in (history.began, record.began) if began is not None), default=None)
    history.resume_forgotten(record.forgotten, record.forgotten_changes, record.forgotten_steps)
    job.note_news()
    return True


_SIGNED = b"virtualflow record "
"""In front of what is signed, as a signature says one thing only."""


class JobRecords:
    """Gives the record of ``job``, and takes those of coordinators before this one.

    Args:
        identity: signs it, so that those who keep it cannot write one; ``None``: in plaintext.
    """

    def __init__(self, job: JobState, identity: Identity | None = None) -> None:
        self._job, self._identity = job, identity
        self._writer = secrets.token_hex(8)

    async def give(self, request: web.Request) -> web.Response:
        record = m.encode(write_record(self._job, self._writer))
        if self._identity is None:
            return web.Response(body=record, content_type="application/json")
        signature = self._identity.sign(_SIGNED + record)
        return web.Response(body=len(signature).to_bytes(2) + signature + record)

    async def take(self, request: web.Request) -> web.Response:
        try:
            record = msgspec.json.decode(self._unsigned(await request.read()), type=JobRecord)
            age = msgspec.convert(request.query.get(AGE), m.Seconds, strict=False)
        except web.HTTPRequestEntityTooLarge:
            return answer(413, f"the record is larger than {MAX_MESSAGE} bytes")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, NotTrusted) as error:
            return answer(400, f"this is no record of a job: {error}")
        fault = fault_in_series(record.series)
        if fault is not None:
            return answer(400, f"this is no record of a job: {fault}")
        if record.writer == self._writer or not take_up(self._job, record, age, time.monotonic()):
            return answer(200, "that record is known, or a newer one is")
        logger.info("goes on with record %d of the coordinator before, %.1f s old", record.number, age)
        return answer(200, "the job goes on with that record")

    def _unsigned(self, body: bytes) -> bytes:
        """The record in what a worker hands over.

        Raises:
            NotTrusted: no coordinator of this job has written it.
        """
        if self._identity is None:
            return body
        end = 2 + int.from_bytes(body[:2])
        writer = self._identity.read_signature(_SIGNED + body[end:], body[2:end])
        if writer.role != "coordinator":
            raise NotTrusted(f"{writer} has written it, and no coordinator")
        return body[end:]

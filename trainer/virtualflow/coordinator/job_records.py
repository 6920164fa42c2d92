"""The record of the job: what this coordinator writes for its successor, and takes up from its predecessor.

Some workers fetch it now and then and hand it to a coordinator that does not know them. So the live page goes on after
a coordinator was killed, and coordinators keep nothing on a disk. No decision depends on it.
"""

from __future__ import annotations

import logging
import secrets
import time

import msgspec
from aiohttp import web

from virtualflow.coordinator.series import fault_in_series
from virtualflow.coordinator.state import JobState
from virtualflow.coordinator.status_stream import answer
from virtualflow.protocol import messages as m
from virtualflow.protocol.job_record import AGE, JobRecord
from virtualflow.protocol.settings import MAX_MESSAGE

logger = logging.getLogger("virtualflow.coordinator")


def write(job: JobState, writer: str) -> JobRecord:
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


class JobRecords:
    """Gives the record of ``job``, and takes those of coordinators before this one."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._writer = secrets.token_hex(8)

    async def give(self, request: web.Request) -> web.Response:
        return web.Response(body=m.encode(write(self._job, self._writer)), content_type="application/json")

    async def take(self, request: web.Request) -> web.Response:
        try:
            record = msgspec.json.decode(await request.read(), type=JobRecord)
            age = msgspec.convert(request.query.get(AGE), m.Seconds, strict=False)
        except web.HTTPRequestEntityTooLarge:
            return answer(413, f"the record is larger than {MAX_MESSAGE} bytes")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return answer(400, f"this is no record of a job: {error}")
        fault = fault_in_series(record.series)
        if fault is not None:
            return answer(400, f"this is no record of a job: {fault}")
        if record.writer == self._writer or not take_up(self._job, record, age, time.monotonic()):
            return answer(200, "that record is known, or a newer one is")
        logger.info("goes on with record %d of the coordinator before, %.1f s old", record.number, age)
        return answer(200, "the job goes on with that record")

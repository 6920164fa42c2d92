"""The live page of a job: ``GET /ui`` serves the page, ``GET /v1/view`` what it shows, ``GET /v1/log`` a worker's log.

A page asks again as soon as it has its answer. The answer waits for its time, or for news of the members or the
coordinator's end: so a page sees a loss at once, and how a job ended. What it shows is put together once for all pages,
and only while there is one. Connections are closed behind each answer, so that whoever looks never holds a place that a
worker might need.
"""

from __future__ import annotations

import asyncio
import os
import time
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec
from aiohttp import web

from virtualflow.atomic_file import open_regular
from virtualflow.coordinator.page.files import build
from virtualflow.coordinator.settings import SHOWN_CHANGES, SHOWN_METRICS, SHOWN_WORKERS, LivePageSettings
from virtualflow.coordinator.state import JobState
from virtualflow.coordinator.status_stream import answer
from virtualflow.coordinator.status_view import describe
from virtualflow.protocol.job_view import JobView, view_job
from virtualflow.protocol.live_view import View
from virtualflow.protocol.messages import Name, encode
from virtualflow.protocol.wording import printable


def compose(job: JobState) -> JobView:
    """What the page shows of a job but for its curves: of very much, what it has room for."""
    status = describe(job)
    shown = msgspec.structs.replace(
        status,
        changes=status.changes[-SHOWN_CHANGES:],
        metrics=dict(islice(status.metrics.items(), SHOWN_METRICS)),
        events=job.latest_events,
        worker_seconds=job.history.goodput.total,
    )
    return view_job(shown, job.history.wall, most=SHOWN_WORKERS)


PartName = Literal["job", "log", "series"]


class _Part:
    """A part of the view as it was encoded last, with a number that is another one when it has changed."""

    def __init__(self) -> None:
        self.number, self.content = 0, b""

    def take(self, part: msgspec.Struct) -> None:
        content = encode(part)
        if content != self.content:
            self.number, self.content = self.number + 1, content


class LivePage:
    """Answers browsers that look at ``job``."""

    def __init__(self, job: JobState, settings: LivePageSettings) -> None:
        self._job, self._settings = job, settings
        self._page = build()
        self._now = b""
        self._parts: dict[PartName, _Part] = {"job": _Part(), "log": _Part(), "series": _Part()}
        self._due = 0.0
        """When the view is put together again, if anybody looks."""
        self._waiting = 0
        self._hurried_until = 0.0
        self._end, self._news = asyncio.Event(), asyncio.Event()
        self._known: object = None

    def notice(self) -> None:
        """A turn is over: if it has brought something that people are to see at once, they need not wait."""
        history = self._job.history
        known = (self._job.phase, history.changes_total, len(self._job.roster.lost), history.non_finite)
        if known != self._known:
            self._known = known
            self._news.set()
            self._news = asyncio.Event()

    def close(self) -> None:
        """Answer all who wait, with how the job has ended."""
        self._end.set()
        self._news.set()

    async def show(self, request: web.Request) -> web.Response:
        """``GET /ui``: the page, to anybody; there is nothing of the job in it."""
        headers = {
            "Content-Security-Policy": self._page.policy,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
        }
        page = web.Response(body=self._page.html, content_type="text/html", charset="utf-8", headers=headers)
        page.force_close()
        return page

    async def view(self, request: web.Request) -> web.Response:
        """``GET /v1/view?have=…``: what has changed since the answer that said ``have``; without it, all at once."""
        if self._waiting >= self._settings.viewers:
            refusal = answer(429, f"{self._waiting} pages look at this job already; try again in a moment")
            refusal.force_close()
            return refusal
        have = request.query.get("have", "")
        self._waiting += 1
        try:
            if have or not self._may_hurry():
                await _within(self._settings.interval, self._news)
                await _within(self._due - time.monotonic(), self._end)
        finally:
            self._waiting -= 1
        self._refresh()
        view = web.Response(
            body=self._encode(have), content_type="application/json", headers={"Cache-Control": "no-store"}
        )
        view.force_close()
        return view

    async def log(self, request: web.Request) -> web.Response:
        """``GET /v1/log?worker=NAME``: the end of what a worker has printed, also of one that is gone."""
        given, folder = request.query.get("worker", ""), self._settings.logs
        if not self._may_hurry():
            told = answer(429, "many pages look at logs just now; try again in a moment")
        elif folder is None:
            told = answer(404, "logs are where the workers run: kubectl vf logs JOB prints those of a cluster")
        elif (log := self._end_of(folder, given)) is None:
            told = answer(404, "no worker of that name has printed anything here")
        else:
            told = web.Response(text=log, headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})
        told.force_close()
        return told

    def _end_of(self, folder: Path, worker: str) -> str | None:
        """The last lines of a worker's log; ``None``: there is none."""
        try:
            name = msgspec.convert(worker, Name)  # which leads out of no folder
            with open_regular(folder / f"{name}.log") as file:
                left_out = max(0, os.fstat(file.fileno()).st_size - self._settings.log_bytes)
                file.seek(left_out)
                text = file.read(self._settings.log_bytes).decode("utf-8", "replace")
        except (msgspec.ValidationError, OSError):
            return None
        # A bar that redraws itself ends its versions by a carriage return: the last one counts.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n")]
        return printable("\n".join(lines[left_out > 0 :][-self._settings.log_lines :]))

    def _may_hurry(self) -> bool:
        """Whether a first look, or one at a log, is answered at once: as many in an interval as there may be pages."""
        now = time.monotonic()
        until = max(now, self._hurried_until) + self._settings.interval / self._settings.viewers
        if until > now + self._settings.interval:
            return False
        self._hurried_until = until
        return True

    def _refresh(self) -> None:
        """Put the view together again, if it is time to."""
        began = time.monotonic()
        if began < self._due and not self._end.is_set():
            return
        view, history = compose(self._job), self._job.history
        self._now = encode(msgspec.structs.replace(view.now, step_time=history.series.latest))
        self._parts["job"].take(view.job)
        self._parts["log"].take(view.log)
        self._parts["series"].take(msgspec.structs.replace(history.series.columns(), non_finite=history.non_finite))
        ended = time.monotonic()
        self._due = ended + max(self._settings.interval / 2, (ended - began) / self._settings.share)

    def _encode(self, have: str) -> bytes:
        numbers = [str(part.number) for part in self._parts.values()]
        incarnation, _, known = have.partition("-")
        has = known.split(".") if incarnation == str(self._job.incarnation) else []
        changed = {
            name: msgspec.Raw(part.content)
            for place, (name, part) in enumerate(self._parts.items())
            if has[place : place + 1] != [numbers[place]]
        }
        return encode(View(f"{self._job.incarnation}-{'.'.join(numbers)}", msgspec.Raw(self._now), **changed))


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Wait for it, and so long at most."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass  # as a rule

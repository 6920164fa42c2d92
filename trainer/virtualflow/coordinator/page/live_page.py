"""The live page of a job: ``GET /ui`` serves the page, ``GET /v1/view`` what it shows.

A page asks again as soon as it has its answer, and the answer waits for its time, or for the coordinator's end: so a
page sees how a job ended. What it shows is put together once for all pages, and only while there is one. Connections
are closed behind each answer, so that whoever looks never holds a place that a worker might need.
"""

from __future__ import annotations

import asyncio
import time
from itertools import islice
from typing import Literal

import msgspec
from aiohttp import web

from virtualflow.coordinator.page.files import build
from virtualflow.coordinator.settings import SHOWN_CHANGES, SHOWN_METRICS, SHOWN_WORKERS, LivePageSettings
from virtualflow.coordinator.state import JobState
from virtualflow.coordinator.status_stream import answer
from virtualflow.coordinator.status_view import describe
from virtualflow.protocol.job_view import JobView, view_job
from virtualflow.protocol.live_view import View
from virtualflow.protocol.messages import encode


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
        self._end = asyncio.Event()

    def close(self) -> None:
        """Answer all who wait, with how the job has ended."""
        self._end.set()

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
                async with asyncio.timeout(self._settings.interval):
                    await self._end.wait()
        except TimeoutError:
            pass  # as a rule
        finally:
            self._waiting -= 1
        self._refresh()
        view = web.Response(
            body=self._encode(have), content_type="application/json", headers={"Cache-Control": "no-store"}
        )
        view.force_close()
        return view

    def _may_hurry(self) -> bool:
        """Whether a new page gets its first answer at once: as many of them in an interval as there may be pages."""
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

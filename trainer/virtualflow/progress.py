"""How far something is that takes a while: a bar with the time that is left on a terminal, else a line now and then.

It is on standard error, since standard output belongs to the answer. Of what is over soon nothing is seen.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

SHOWN_AFTER = 2.0
"""Seconds that pass before a bar appears."""

LINE_EVERY = 15.0
"""Seconds before the first line where there is no terminal, and between two at least:"""

LINE_SHARE = 0.1
"""a log of what takes hours has a line for each such share of the time that has passed."""

FRAME = 0.1
"""Seconds between two pictures of a bar, at least."""


def seconds_left(share: float, passed: float) -> float | None:
    """How long the rest takes if it goes on as it did; ``None``: nothing is done that one could tell it by.

    Args:
        share: that is done, between 0 and 1.
        passed: seconds that this took.
    """
    return passed * (1 - share) / share if share > 0 else None


def describe_rest(share: float | None, passed: float, idle: float = 0.0) -> str:
    """The rest in words, such as ``42 %, 1:10 left``; without a ``share`` the seconds that have passed.

    Args:
        share: that is done, between 0 and 1; ``None``: nobody knows.
        passed: seconds since the beginning.
        idle: seconds since ``share`` was another one, which count down.
    """
    left = None if share is None else seconds_left(share, passed - idle)
    if share is None or left is None:
        return clock(passed)
    return f"{share:.0%}".replace("%", " %") + f", {clock(max(0.0, left - idle))} left"


def clock(seconds: float) -> str:
    """Seconds as ``0:07``, ``12:30`` or ``1:02:03``."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class ProgressBar:
    """The progress of one thing, in a ``with`` block that ends when it is through.

    No thread redraws it: call :meth:`reach` often, also with what was reached before.

    Args:
        what: is being done, in a few words.
        total: at which it is done; ``None``: not known, or not yet.
        stream: standard error, unless a test says otherwise.
        now: seconds of a monotonic clock.
    """

    def __init__(
        self,
        what: str,
        total: float | None = None,
        *,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self._what, self._now = what, now
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._began = self._shown_at = self._moved_at = now()
        self._share: float | None = None
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def reach(self, done: float) -> None:
        """So much of the total is done."""
        moment = self._now()
        share = min(1.0, max(0.0, done / self.total)) if self.total else None
        if share != self._share:
            self._share, self._moved_at = share, moment
        passed = moment - self._began
        rest = describe_rest(share, passed, moment - self._moved_at)
        if self._terminal:
            if passed >= SHOWN_AFTER and (self._bar is None or moment - self._shown_at >= FRAME):
                self._shown_at = moment
                self._draw(share, rest)
        elif moment - self._shown_at >= max(LINE_EVERY, LINE_SHARE * passed):
            self._shown_at = moment
            self._stream.write(f"virtualflow: {self._what}: {rest}\n")
            self._stream.flush()

    def _draw(self, share: float | None, rest: str) -> None:
        if self._bar is None:
            self._bar = self._start()
        self._bar.update(self._bar.task_ids[0], total=None if share is None else 1.0, completed=share or 0.0, rest=rest)
        self._bar.refresh()

    def _start(self) -> Bar:
        # Imported by those who wait anyway.
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[rest]}", markup=False),
            console=Console(file=self._stream, highlight=False, markup=False, emoji=False),
            auto_refresh=False,  # a thread would hold locks while children are forked
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # what is printed meanwhile goes above the bar
            redirect_stderr=True,
        )
        bar.add_task(self._what, total=None, rest="")
        bar.start()
        return bar

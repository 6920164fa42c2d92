"""What the script prints, once: every worker runs the same script, so only one worker's lines are shown while
it runs.

That worker is the leader, since scripts may print on the leader alone. When another one takes over, its
latest lines are caught up on, without those that were shown already. Tracebacks on standard error, and the
sentences of the library's own errors, are withheld for a moment: one that ends the job is shown at the end,
once, however many workers raised it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from virtualflow.launcher.supervisor import Stream

Show = Callable[[Stream, str], None]

_OPENING = re.compile(
    r"Traceback \(most recent call last\):|\s*(\+ )?Exception Group Traceback|  File \".*\", line \d+$|virtualflow: "
)
_REMEMBERED = 500


@dataclass
class _Source:
    backlog: deque[tuple[float, Stream, str]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    withheld: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    withheld_since: float = 0.0


class LogRelay:
    """Passes on the lines of one source at a time.

    Args:
        replay: seconds of another source's lines that are caught up on.
        grace: seconds for which a traceback is withheld.
    """

    def __init__(self, show: Show, clock: Callable[[], float], *, replay: float, grace: float) -> None:
        self._show, self._replay, self._grace, self._clock = show, replay, grace, clock
        self._sources: dict[object, _Source] = {}
        self.chosen: object | None = None
        self._shown: deque[str] = deque(maxlen=_REMEMBERED)
        self._said_before: set[str] = set()
        self._said_before_until = 0.0
        self.withholding = False
        """Set when the job is failing: tracebacks are no longer released."""

    def line(self, source: object, stream: Stream, text: str) -> None:
        state = self._sources.setdefault(source, _Source())
        if stream == "stderr" and (state.withheld or _OPENING.match(text)):
            if not state.withheld:
                state.withheld_since = self._clock()
            state.withheld.append(text)
            return
        self._pass(source, state, stream, text)

    def choose(self, source: object | None) -> None:
        if source is None or source == self.chosen:
            return
        self.chosen = source
        state = self._sources.setdefault(source, _Source())
        now = self._clock()
        # Scripts that print on every worker print the same: what the last one said is not said again.
        self._said_before, self._said_before_until = set(self._shown), now + self._replay
        for time, stream, text in state.backlog:
            if time >= now - self._replay:
                self._emit(stream, text)
        state.backlog.clear()

    def tick(self) -> None:
        """Release tracebacks whose writers live on: they were printed on purpose."""
        if self.withholding:
            return
        for source, state in self._sources.items():
            if state.withheld and self._clock() - state.withheld_since >= self._grace:
                self._release(source, state)

    def ended(self, source: object, with_error: bool) -> None:
        """A source has ended; after an error, or when the job is failing and it was killed because it took too long to
        end, its last traceback is somebody else's to show.
        """
        state = self._sources.get(source)
        if state is None:
            return
        if state.withheld and not with_error and not self.withholding:
            self._release(source, state)
        state.withheld.clear()

    def has_shown(self, text: str) -> bool:
        return text in self._shown

    def _release(self, source: object, state: _Source) -> None:
        lines = list(state.withheld)
        state.withheld.clear()
        for text in lines:
            self._pass(source, state, "stderr", text)

    def _pass(self, source: object, state: _Source, stream: Stream, text: str) -> None:
        if source == self.chosen:
            self._emit(stream, text)
        else:
            state.backlog.append((self._clock(), stream, text))

    def _emit(self, stream: Stream, text: str) -> None:
        if text in self._said_before and self._clock() < self._said_before_until:
            return
        self._shown.append(text)
        self._show(stream, text)


def last_traceback(tail: list[str]) -> str:
    """The last traceback in the lines of a standard error, or its last lines when there is none."""
    openings = [index for index, line in enumerate(tail) if _OPENING.match(line) and not line.startswith("  File")]
    if not openings:
        syntax = [index for index, line in enumerate(tail) if _OPENING.match(line)]
        return "\n".join(tail[syntax[0] if syntax else -20 :])
    first = openings[-1]
    # A chain ("During handling of …", "… the direct cause of …") belongs together.
    for index in reversed(openings[:-1]):
        between = tail[index:first]
        if not any(line.startswith(("During handling of the above", "The above exception was")) for line in between):
            break
        first = index
    return "\n".join(tail[first:])


def last_exception(tail: list[str]) -> str:
    """The first line of the exception that the last traceback ends with; empty: there is none."""
    lines = last_traceback(tail).split("\n")
    frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
    behind = lines[frames[-1] :] if frames else []
    return next((line for line in behind if not line.startswith(" ")), "")

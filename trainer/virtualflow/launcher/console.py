"""What a person sees of a running job: a live panel on a terminal, one line an event elsewhere.

The job's own story goes to standard error; what the script prints keeps its stream, so that redirecting it
works as with plain ``python train.py``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from virtualflow.launcher.supervisor import Stream
from virtualflow.protocol.http_api import Status
from virtualflow.protocol.job_view import JobView, ViewNow, WorkerView, describe_pace, view_job
from virtualflow.protocol.wording import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

_PROGRESS_INTERVAL = 2.0
"""Without a terminal: the least time between two lines about the progress."""
_REFRESH = 8.0
"""On a terminal: frames per second."""
_EVENTS_SHOWN = 6
"""The latest events of the live view."""
_CELLS_SHOWN = 64
"""A job of more virtual nodes than this shows them as ranges."""


@dataclass(frozen=True)
class Snapshot:
    """The job at one moment, as far as it is shown."""

    job: str
    status: Status | None
    processes: Mapping[str, int]
    """Living worker processes: name to pid."""
    note: str
    """What the runner waits for; empty when the status says it all."""


class PlainConsole:
    """Lines for logs and pipes."""

    def __init__(self) -> None:
        self._started = self._progress_at = time.monotonic()
        self._step = 0

    def line(self, stream: Stream, text: str) -> None:
        _write(stream, text)

    def event(self, text: str) -> None:
        _write("stderr", f"[virtualflow {time.monotonic() - self._started:7.2f} s] {text}")

    def update(self, snapshot: Snapshot) -> None:
        status, now = snapshot.status, time.monotonic()
        if (
            status is None
            or status.phase == "waiting"
            or status.job_step == self._step
            or now - self._progress_at < _PROGRESS_INTERVAL
        ):
            return
        self._progress_at, self._step = now, status.job_step
        seen = view_job(status, time.time()).now
        workers = [] if seen.over else [f"{seen.training} of {counted(status.wanted, 'worker')}"]
        self.event(", ".join([seen.progress, *describe_pace(seen), *workers]))

    def close(self) -> None:
        """Nothing is kept open."""


class LiveConsole:
    """A panel that redraws itself at the bottom of a terminal; what the script prints scrolls by above it."""

    COLOURS = (
        "cyan",
        "magenta",
        "green",
        "yellow",
        "blue",
        "red",
        "bright_cyan",
        "bright_magenta",
        "bright_green",
    )

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console: Console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        # Refreshed from the event loop alone: a thread would hold locks while children are forked.
        self._live: Live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self._events: list[tuple[str, str]] = []
        self._known: set[int] = set()
        """Processes that the coordinator has listed: one that it lists no longer is about to end."""
        self._drawn_at = 0.0
        self._started = time.monotonic()
        self._colours: dict[str, str] = {}
        self._snapshot: Snapshot | None = None
        self._closed = False
        self._stdout_here = _same_terminal()
        self._terminal = _quiet_terminal()
        self._live.start()

    def line(self, stream: Stream, text: str) -> None:
        """Above the panel; but a standard output that leads elsewhere is written as it is."""
        from rich.text import Text

        if self._closed or (stream == "stdout" and not self._stdout_here):
            _write(stream, text)
        else:
            self._console.print(Text.from_ansi(text), soft_wrap=True)

    def event(self, text: str) -> None:
        """Kept in the panel; the latest few are shown."""
        elapsed = time.monotonic() - self._started
        self._events = [*self._events, (f"{elapsed:6.1f} s", text)][-_EVENTS_SHOWN:]

    def update(self, snapshot: Snapshot) -> None:
        """Redraw, unless it was redrawn a moment ago."""
        self._snapshot = snapshot
        now = time.monotonic()
        if not self._closed and now - self._drawn_at >= 1 / _REFRESH:
            self._drawn_at = now
            self._live.update(self._draw(snapshot), refresh=True)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._live.stop()
        _restore_terminal(self._terminal)
        if self._snapshot is not None:
            self._console.print(self._draw(self._snapshot))

    def _draw(self, snapshot: Snapshot) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        view = None if snapshot.status is None else view_job(snapshot.status, time.time())
        phase = snapshot.note or (view.now.phase if view is not None else "starting")
        body: list[RenderableType] = []
        if view is not None:
            body += [*self._progress(view.now), self._table(snapshot, view)]
            told = [str(fact) for fact in (*view.job.facts, *view.now.facts) if fact.name in ("Workers", "Checkpoint")]
            body += [Text(one, "dim") for one in told]
            if view.log.latest:
                body.append(Text(f"last change: {view.log.latest}", "dim"))
        for when, text in self._events:
            body.append(Text.assemble((f"{when}  ", "dim"), text, overflow="ellipsis", no_wrap=True))
        title = Text.assemble((snapshot.job, "bold"), f"  {phase}")
        return Panel(Group(*body), title=title, title_align="left", border_style=_border(phase))

    def _progress(self, now: ViewNow) -> list[RenderableType]:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(expand=True, padding=(0, 2))
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=now.total_steps or 1, completed=now.step if now.total_steps else 0)
        grid.add_row(bar, Text(now.progress))
        return [grid, Text("   ".join(describe_pace(now)), overflow="ellipsis", no_wrap=True)]

    def _table(self, snapshot: Snapshot, view: JobView) -> Table:
        from rich.table import Table
        from rich.text import Text

        total = view.job.virtual_nodes or 0
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        nodes = counted(total, "virtual node") if total else "virtual nodes"
        for name in ("worker", nodes, "ms each", "state", "pid"):
            table.add_column(name, justify="right" if name in ("ms each", "pid") else "left", no_wrap=True)
        for worker in view.job.workers:
            colour = self._colour(worker.worker)
            table.add_row(
                Text(worker.worker, colour),
                self._cells(worker, total, colour),
                worker.pace,
                Text(worker.state, "yellow" if worker.slow else _style(worker.state)),
                str(worker.pid or "?"),
            )
        pids = {worker.pid for worker in view.job.workers}
        self._known |= pids
        for name, pid in sorted(snapshot.processes.items()):
            if pid not in pids:
                state = Text("ending" if pid in self._known else "starting", "dim")
                table.add_row(Text(name, self._colour(name)), "", "", state, str(pid))
        return table

    def _cells(self, worker: WorkerView, total: int, colour: str) -> Text:
        from rich.text import Text

        if total > _CELLS_SHOWN or total + 50 > self._console.width or ", " in worker.nodes:
            return Text(worker.nodes, colour)
        cells = Text()
        cells.append("·" * worker.first, "bright_black")
        cells.append("■" * worker.count, colour)
        cells.append("·" * (total - worker.first - worker.count), "bright_black")
        return cells

    def _colour(self, worker: str) -> str:
        return self._colours.setdefault(worker, self.COLOURS[len(self._colours) % len(self.COLOURS)])


JobConsole = PlainConsole | LiveConsole
"""Shows a job to somebody; it is told of the job at any rate, and closed when nothing more will be shown."""


def open_console(plain: bool) -> JobConsole:
    """The console that suits standard error: live on a terminal that can be redrawn, unless lines are asked
    for.
    """
    if plain or not sys.stderr.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return PlainConsole()
    return LiveConsole()


def _write(stream: Stream, text: str) -> None:
    file = sys.stdout if stream == "stdout" else sys.stderr
    # Whoever read it may be gone (a closed pipe): the training goes on.
    with contextlib.suppress(BrokenPipeError, ValueError):
        print(text, file=file, flush=True)


def _same_terminal() -> bool:
    try:
        return os.ttyname(sys.stdout.fileno()) == os.ttyname(sys.stderr.fileno())
    except (OSError, ValueError):
        return False


def _quiet_terminal() -> list[int | list[bytes | int]] | None:
    """Keep the terminal from writing ``^C`` into the panel; what it did before, ``None`` where it is none."""
    try:
        before = termios.tcgetattr(sys.stdin.fileno())
        now = termios.tcgetattr(sys.stdin.fileno())
        now[3] &= ~termios.ECHOCTL
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, now)
    except (termios.error, OSError, ValueError):
        return None
    return before


def _restore_terminal(before: list[int | list[bytes | int]] | None) -> None:
    if before is not None:
        with contextlib.suppress(termios.error, OSError, ValueError):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, before)


def _style(state: str) -> str:
    styles = {"training": "green", "draining": "yellow", "silent": "red", "crashed": "red", "done": "bold green"}
    return styles.get(state, "dim")


def _border(phase: str) -> str:
    return {"failed": "red", "done": "green", "stopped": "yellow"}.get(phase, "blue")

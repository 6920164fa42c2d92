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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from virtualflow.calls import Status, WorkerStatus
from virtualflow.local.processes import Stream
from virtualflow.messages import Change
from virtualflow.settings import LocalSettings

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text


@dataclass(frozen=True)
class Snapshot:
    """The job at one moment, as far as it is shown."""

    job: str
    status: Status | None
    processes: Mapping[str, int]
    """Living worker processes: name to pid."""
    wanted: int
    note: str
    """What the runner waits for; empty when the status says it all."""


class View(Protocol):
    """Shows a job to somebody."""

    def line(self, stream: Stream, text: str) -> None:
        """A line that the script printed."""

    def event(self, text: str) -> None:
        """Something happened."""

    def update(self, snapshot: Snapshot) -> None:
        """The job is now like this; called at any rate."""

    def close(self) -> None:
        """Nothing more will be shown."""


def describe_change(change: Change) -> str:
    """A membership change in one line."""
    pause = "no survivor" if change.pause_ms is None else f"pause {change.pause_ms:.0f} ms"
    repeated = f"{change.repeated_steps} step{'s' * (change.repeated_steps != 1)} repeated"
    size = f"{_workers(change.from_)} → {_workers(change.to)}"
    if change.cause == "rebalance":
        size = "virtual nodes moved"
    return f"{size} at step {change.step} ({change.reason}): {pause}, {repeated}{describe_transfer(change)}"


def describe_transfer(change: Change) -> str:
    """How much state joiners were given, in which time and by how many, as a clause; empty if none needed it."""
    if change.state_bytes is None or change.state_ms is None or not change.state_donors:
        return ""
    donors = f"{change.state_donors} donor{'s' * (change.state_donors != 1)}"
    return f", {_megabytes(change.state_bytes)} of state in {change.state_ms / 1_000:.2g} s from {donors}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 10_000_000 else f"{size / 1e6:.2g} MB"


def describe_progress(status: Status) -> str:
    """Where the training is, in one line."""
    total = f"/{status.total_steps}" if status.total_steps is not None else ""
    members = sum(worker.first < worker.last for worker in status.workers)
    parts = [f"step {status.step}{total}", f"epoch {status.epoch}"]
    parts += [f"{name} {value:.4g}" for name, value in sorted(status.metrics.items())]
    parts += [f"{status.steps_per_second:.1f} steps/s", *_step_times(status), _workers(members)]
    return ", ".join(parts)


def describe_status(job: str, status: Status) -> str:
    """What ``virtualflow status`` prints."""
    facts = f"{status.wanted} wanted, generation {status.generation}"
    if status.reproducibility is not None:
        facts += f", {status.reproducibility}"
    lines = [f"{job}: {status.phase}, {describe_progress(status)}, {facts}"]
    if status.reason:
        lines.append(f"  {status.reason}")
    if status.error:
        lines.append(f"  error: {status.error}")
    if status.workers:
        width = max(len("worker"), *(len(worker.worker) for worker in status.workers))
        lines.append(f"  {'worker':<{width}}  {'virtual nodes':<13}  {'ms each':>7}  {'state':<8}  pid")
        lines += [
            f"  {one.worker:<{width}}  {describe_range(one):<13}  {_pace(one):>7}  {one.state:<8}  {one.pid}"
            for one in sorted(status.workers, key=_order)
        ]
    if status.last_change is not None:
        lines.append(f"  last change: {describe_change(status.last_change)}")
    return "\n".join(lines)


def describe_range(worker: WorkerStatus) -> str:
    """The virtual nodes of a worker as ``3-5``; a dash for none."""
    if worker.first >= worker.last:
        return "-"
    return str(worker.first) if worker.last - worker.first == 1 else f"{worker.first}-{worker.last - 1}"


def _step_times(status: Status) -> list[str]:
    """How long a step takes and should take, as far as that is known."""
    measured, predicted = status.step_ms, status.predicted_step_ms
    if measured is None:
        return []
    return [f"step {measured:.3g} ms" + ("" if predicted is None else f" (predicted {predicted:.3g})")]


def _pace(worker: WorkerStatus) -> str:
    """Milliseconds per virtual node; a dash as long as that is not known."""
    return "-" if worker.pace_ms is None else f"{worker.pace_ms:.3g}"


class PlainView:
    """Lines for logs and pipes."""

    def __init__(self, settings: LocalSettings) -> None:
        self._settings = settings
        self._started = self._progress_at = time.monotonic()
        self._step = 0

    def line(self, stream: Stream, text: str) -> None:
        """A line that the script printed, on the stream on which it printed it."""
        _write(stream, text)

    def event(self, text: str) -> None:
        """One line with the time since the start."""
        _write("stderr", f"[virtualflow {time.monotonic() - self._started:7.2f} s] {text}")

    def update(self, snapshot: Snapshot) -> None:
        """A line about the progress, now and then."""
        status, now = snapshot.status, time.monotonic()
        if (
            status is None
            or status.phase == "waiting"
            or status.step == self._step
            or now - self._progress_at < self._settings.progress_interval
        ):
            return
        self._progress_at, self._step = now, status.step
        self.event(describe_progress(status))

    def close(self) -> None:
        """Nothing is kept open."""


class LiveView:
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

    def __init__(self, settings: LocalSettings) -> None:
        from rich.console import Console
        from rich.live import Live

        self._settings = settings
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
        self._events = [*self._events, (f"{elapsed:6.1f} s", text)][-self._settings.events_shown :]

    def update(self, snapshot: Snapshot) -> None:
        """Redraw, unless it was redrawn a moment ago."""
        self._snapshot = snapshot
        now = time.monotonic()
        if not self._closed and now - self._drawn_at >= 1 / self._settings.refresh:
            self._drawn_at = now
            self._live.update(self._draw(snapshot), refresh=True)

    def close(self) -> None:
        """Leave the last picture standing."""
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

        status = snapshot.status
        phase = snapshot.note or (status.phase if status is not None else "starting")
        body: list[RenderableType] = []
        if status is not None:
            body += [self._progress(status), self._table(snapshot, status)]
            if status.last_change is not None:
                body.append(
                    Text(
                        f"last change: {describe_change(status.last_change)}",
                        "dim",
                        overflow="ellipsis",
                        no_wrap=True,
                    )
                )
        for when, text in self._events:
            body.append(Text.assemble((f"{when}  ", "dim"), text, overflow="ellipsis", no_wrap=True))
        title = Text.assemble((snapshot.job, "bold"), f"  {phase}")
        return Panel(Group(*body), title=title, title_align="left", border_style=_border(phase))

    def _progress(self, status: Status) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        total = "" if status.total_steps is None else f"/{status.total_steps}"
        facts = [f"step {status.step}{total}", f"epoch {status.epoch}"]
        facts += [f"{name} {value:.4g}" for name, value in sorted(status.metrics.items())[:4]]
        facts += [f"{status.steps_per_second:.1f} steps/s", *_step_times(status)]
        grid = Table.grid(expand=True, padding=(0, 2))
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=status.total_steps or 1, completed=status.step if status.total_steps else 0)
        grid.add_row(bar, Text("   ".join(facts)))
        return grid

    def _table(self, snapshot: Snapshot, status: Status) -> Table:
        from rich.table import Table
        from rich.text import Text

        total = status.virtual_nodes or 0
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("worker", no_wrap=True)
        table.add_column(f"{total} virtual nodes" if total else "virtual nodes", no_wrap=True)
        table.add_column("ms each", justify="right", no_wrap=True)
        table.add_column("state", no_wrap=True)
        table.add_column("pid", justify="right", no_wrap=True)
        listed = sorted(status.workers, key=_order)
        for worker in listed:
            colour = self._colour(worker.worker)
            carried = self._cells(worker, total, colour)
            table.add_row(
                Text(worker.worker, colour),
                carried,
                _pace(worker),
                Text(worker.state, _style(worker.state)),
                str(worker.pid or "?"),
            )
        pids = {worker.pid for worker in listed}
        self._known |= pids
        for name, pid in sorted(snapshot.processes.items()):
            if pid not in pids:
                state = Text("ending" if pid in self._known else "booting", "dim")
                table.add_row(Text(name, self._colour(name)), "", "", state, str(pid))
        return table

    def _cells(self, worker: WorkerStatus, total: int, colour: str) -> Text:
        from rich.text import Text

        if total > self._settings.cells_shown or total + 50 > self._console.width:
            return Text(describe_range(worker), colour)
        cells = Text()
        cells.append("·" * worker.first, "bright_black")
        cells.append("■" * (worker.last - worker.first), colour)
        cells.append("·" * (total - worker.last), "bright_black")
        return cells

    def _colour(self, worker: str) -> str:
        return self._colours.setdefault(worker, self.COLOURS[len(self._colours) % len(self.COLOURS)])


def open_view(plain: bool, settings: LocalSettings) -> View:
    """The view that suits standard error: live on a terminal that can be redrawn, unless lines are asked
    for.
    """
    if plain or not sys.stderr.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return PlainView(settings)
    return LiveView(settings)


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


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"


def _order(worker: WorkerStatus) -> tuple[bool, int, Sequence[object]]:
    return worker.first >= worker.last, worker.first, (len(worker.worker), worker.worker)


def _style(state: str) -> str:
    return {"training": "green", "draining": "yellow", "silent": "red", "done": "bold green"}.get(state, "dim")


def _border(phase: str) -> str:
    return {"failed": "red", "done": "green", "stopped": "yellow"}.get(phase, "blue")

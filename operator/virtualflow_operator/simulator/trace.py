"""Traces: which jobs come when, how fast each is, and which capacity comes and goes. Files are CSV or JSON.

One row, or one object of the list ``events``, is one event. ``event`` says which columns count:

- ``job``: ``name`` comes at ``time`` and needs ``steps`` steps. ``throughput`` is its speed, ``workers:steps per
  second`` pairs (``1:2.0 4:6.5``); in between it is interpolated, beyond the last pair it stays. ``min`` (1), ``max``
  (the last pair's), ``requested`` (the maximum; what policies with fixed sizes give), ``weight`` (1), ``priority`` (0),
  ``units`` of capacity for each worker (1), ``namespace`` (``default``), ``on_demand`` (``true``: the minimum must not
  be on spot capacity), ``join`` (seconds until a new worker counts: as for all jobs). Where there are kinds of device,
  ``throughput`` is that of each (``V100=1:2.0 4:6.5; K80=1:0.4``), and ``mobility`` what a job may do that has begun:
  ``mixes`` (the default), ``moves`` or ``stays``. Where backward passes end early, ``backward`` has the fractions of
  their classes, which rotate (``1 0.75 0.5 0.25``), and ``virtual_nodes`` says how many there are (one a worker). A
  job that is ``statistical`` (``true``) may have its batch chosen: ``batch`` is the one that ``steps`` and
  ``throughput`` are of, ``min_batch`` and ``max_batch`` are the bounds.
- ``node``: ``units`` of capacity join; ``spot`` (``true``) if they may be withdrawn. Where there are kinds of device,
  ``kind``, ``price`` of a unit for a second (1) and ``rating``: how fast it is thought to be beside the others (1).
- ``gone``: the node ``name`` leaves.

Empty cells mean the default; lines that begin with ``#`` are comments. Times are seconds.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.settings import cost_of
from virtualflow_operator.scheduling import Demand, Mobility, RotatingPasses, ScalingCurve
from virtualflow_operator.scheduling.batch_choice import BatchBounds, choose_batch, speedup
from virtualflow_operator.scheduling.packing import Phases

COLUMNS = (
    "event",
    "time",
    "name",
    "steps",
    "throughput",
    "min",
    "max",
    "requested",
    "weight",
    "priority",
    "units",
    "namespace",
    "on_demand",
    "spot",
    "join",
    "kind",
    "price",
    "rating",
    "mobility",
    "backward",
    "virtual_nodes",
    "statistical",
    "batch",
    "min_batch",
    "max_batch",
)
"""Of a CSV file, in the order in which they are written; a file may leave out those that it does not need."""


class JobEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event", tag="job"):
    time: float
    name: str
    steps: int
    throughput: dict[int, float] = {}
    """Steps per second by number of workers, ascending."""
    kinds: dict[str, dict[int, float]] = {}
    """The same by kind of device, in place of it."""
    mobility: Mobility = "mixes"
    min: int = 1
    max: int = 0
    """0: the largest number of workers with a known speed."""
    requested: int = 0
    """0: the maximum."""
    weight: float = 1.0
    priority: int = 0
    units: int = 1
    namespace: str = "default"
    on_demand: bool = False
    join: float | None = None
    """Seconds until a new worker counts; ``None``: as for all jobs."""
    backward: tuple[float, ...] = ()
    """How far backward passes go, by class (``spec.backward.fractions``); empty: all are whole."""
    virtual_nodes: int = 0
    """0: the maximum of workers."""
    statistical: bool = False
    """Whether its result need not be equal; only then may its batch be chosen."""
    batch: int = 0
    """Samples of one of its steps; 0: nobody says, and it stays what it is."""
    min_batch: int = 0
    max_batch: int = 0
    """Bounds of what may be chosen; 0: ``batch``."""

    @property
    def batches(self) -> BatchBounds:
        return BatchBounds(self.min_batch or self.batch, self.batch, self.max_batch or self.batch)

    @property
    def with_chosen_batches(self) -> JobEvent:
        """The job whose speeds are those of the batch that is best for each number of workers.

        Its steps stay those of ``batch`` samples: so many samples are trained, whatever the batch.
        """
        if not self.statistical or not self.batch or self.kinds:
            return self
        curve, speeds = ScalingCurve.of(self.throughput.items()), {}
        for workers, speed in self.throughput.items():
            phases = Phases.at(curve, workers, self.passes)
            speeds[workers] = speed * speedup(phases, choose_batch(phases, self.batches), self.batch)
        return msgspec.structs.replace(self, throughput=speeds)

    @property
    def passes(self) -> RotatingPasses | None:
        if not self.backward:
            return None
        return RotatingPasses(tuple(map(cost_of, self.backward)), self.virtual_nodes or self.maximum)

    @property
    def maximum(self) -> int:
        return self.max or max(workers for speeds in (self.throughput, *self.kinds.values()) for workers in speeds)

    def speed(self, workers: int, kind: str = "") -> float:
        """Steps per second: as given, in between on the line from one given number to the next, from (0, 0) on."""
        known = self.kinds[kind] if kind else self.throughput
        if workers in known or workers <= 0:
            return known.get(workers, 0.0)
        numbers = list(known)
        index = bisect_left(numbers, workers)
        if index == len(numbers):
            return known[numbers[-1]]
        left, right = numbers[index - 1] if index else 0, numbers[index]
        low = known.get(left, 0.0)
        return low + (known[right] - low) * (workers - left) / (right - left)

    def demand(self, curve: ScalingCurve, steps_left: int | None) -> Demand:
        """The job as a policy sees it when it comes, with what is known of its speed and its length."""
        return Demand(
            self.name,
            self.namespace,
            submitted=self.time,
            maximum=self.maximum,
            minimum=self.min,
            requested=self.requested,
            units=self.units,
            priority=self.priority,
            weight=self.weight,
            steps_left=steps_left,
            curve=curve,
            minimum_on_demand=self.on_demand,
            passes=self.passes,
        )


class NodeEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event", tag="node"):
    time: float
    name: str
    units: int
    spot: bool = False
    kind: str = ""
    price: float = 1.0
    rating: float = 1.0


class GoneEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event", tag="gone"):
    time: float
    name: str


Event = JobEvent | NodeEvent | GoneEvent


class JobTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file says, by time; events of one time are in the order of the file."""

    events: tuple[Event, ...]
    comment: str | list[str] = ""
    """Where it comes from. Nothing reads it."""

    @property
    def jobs(self) -> tuple[JobEvent, ...]:
        return tuple(event for event in self.events if isinstance(event, JobEvent))

    @property
    def has_kinds(self) -> bool:
        """Whether its devices have kinds; if one has, all have."""
        return any(job.kinds for job in self.jobs)

    def on(self, units: int) -> JobTrace:
        """The same jobs on ``units`` of steady on-demand capacity, in place of the nodes of the trace."""
        first = min((job.time for job in self.jobs), default=0.0)
        return JobTrace((NodeEvent(first, "all", units), *self.jobs), self.comment)

    @property
    def with_chosen_batches(self) -> JobTrace:
        """The same with the best batch that each job allows; see :attr:`.JobEvent.with_chosen_batches`."""
        events = (event.with_chosen_batches if isinstance(event, JobEvent) else event for event in self.events)
        return JobTrace(tuple(events), self.comment)


def read(path: Path) -> JobTrace:
    """Read a trace from a CSV file, or from JSON if the file's name ends like that.

    Raises:
        ConfigurationError: the file is not there or makes no sense; the sentence names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigurationError(f"{path}: cannot be read ({reason}); give a trace in CSV or JSON") from None
    events = _json(path, text) if path.suffix == ".json" else _csv(path, text)
    return check(events, str(path))


def check(events: Iterable[tuple[str, Event]], origin: str) -> JobTrace:
    """A trace of these events, if it makes sense.

    Args:
        events: each with where it stands, for the sentence that complains of it.
        origin: of them all.
    """
    names: set[str] = set()
    nodes: set[str] = set()
    kept: list[Event] = []
    for where, event in sorted(events, key=lambda located: located[1].time):
        wrong = _wrong(event)
        if wrong is None and isinstance(event, JobEvent):
            wrong = f"there are two jobs {event.name}; give each its own name" if event.name in names else None
            names.add(event.name)
        elif wrong is None and isinstance(event, NodeEvent):
            wrong = f"node {event.name} is already there; let it be gone first" if event.name in nodes else None
            nodes.add(event.name)
        elif wrong is None:
            wrong = f"there is no node {event.name} then; name one that has joined" if event.name not in nodes else None
            nodes.discard(event.name)
        if wrong is not None:
            raise ConfigurationError(f"{where}: {wrong}")
        kept.append(event)
    if not names:
        raise ConfigurationError(f"{origin}: there are no jobs in it; add rows with event=job")
    kinds = {bool(event.kinds) for event in kept if isinstance(event, JobEvent)}
    kinds |= {bool(event.kind) for event in kept if isinstance(event, NodeEvent)}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"{origin}: some devices have kinds and others have none; give each node a kind, and each job its "
            "throughput by kind"
        )
    return JobTrace(tuple(kept))


def _wrong(event: Event) -> str | None:
    if not (math.isfinite(event.time) and event.time >= 0):
        return f"time={event.time:g}: give seconds from 0"
    if not event.name:
        return "name: give one"
    if isinstance(event, GoneEvent):
        return None
    if event.units < 1:
        return f"units={event.units}: give 1 or more"
    if isinstance(event, NodeEvent):
        if not all(math.isfinite(number) and number > 0 for number in (event.price, event.rating)):
            return f"price={event.price:g}, rating={event.rating:g}: give numbers above 0"
        return None
    if event.steps < 1:
        return f"steps={event.steps}: give 1 or more"
    if event.kinds and event.throughput:
        return "throughput: give it for all devices, or for each of their kinds, not both"
    for speeds in event.kinds.values() if event.kinds else (event.throughput,):
        if (
            not speeds
            or any(w < 1 or not math.isfinite(s) or s <= 0 for w, s in speeds.items())
            or sorted(speeds) != list(speeds)
        ):
            return "throughput: give ascending numbers of workers with steps per second above 0, such as 1:2.0 4:6.5"
    if not 1 <= event.min <= event.maximum:
        return f"min={event.min}, max={event.maximum}: give 1 <= min <= max"
    if event.requested and not event.min <= event.requested <= event.maximum:
        return f"requested={event.requested}: give a number from min={event.min} to max={event.maximum}"
    if not (math.isfinite(event.weight) and event.weight > 0):
        return f"weight={event.weight:g}: give a number above 0"
    if not all(0 < fraction <= 1 for fraction in event.backward):
        return "backward: give fractions above 0, at most 1, such as 1 0.75 0.5 0.25"
    if (event.min_batch or event.max_batch) and not event.statistical:
        return "min_batch, max_batch: a bitwise job never changes its batch; give statistical=true, or leave them out"
    least, most = event.min_batch or event.batch, event.max_batch or event.batch
    if not (0 < least <= event.batch <= most or least == event.batch == most == 0):
        return f"batch={event.batch}: give 1 <= min_batch={least} <= batch <= max_batch={most}"
    if event.virtual_nodes and event.virtual_nodes < event.maximum:
        return f"virtual_nodes={event.virtual_nodes}: give one or more for each of {event.maximum} workers"
    if event.join is not None and not (math.isfinite(event.join) and event.join >= 0):
        return f"join={event.join:g}: give seconds from 0"
    return None


def _json(path: Path, text: str) -> Iterator[tuple[str, Event]]:
    try:
        trace = msgspec.json.decode(text, type=JobTrace)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path}: {error}; see docs/explanation/simulator.md for the format") from None
    for index, event in enumerate(trace.events):
        yield f"{path}, events[{index}]", event


def _csv(path: Path, text: str) -> Iterator[tuple[str, Event]]:
    lines = ((number, line) for number, line in enumerate(text.splitlines(), 1))
    rows = [(number, line) for number, line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not rows:
        raise ConfigurationError(f"{path}: it is empty; begin with a line of column names: {','.join(COLUMNS)}")
    (first, heading), *rest = rows
    columns = [column.strip() for column in next(csv.reader([heading]))]
    strange = [column for column in columns if column not in COLUMNS]
    if strange or len(set(columns)) < len(columns) or not {"event", "time", "name"} <= set(columns):
        problem = f"there is no column {strange[0]!r}" if strange else "event, time and name must be there, once"
        raise ConfigurationError(f"{path}, line {first}: {problem}; choose column names from {','.join(COLUMNS)}")
    for number, line in rest:
        where = f"{path}, line {number}"
        cells = next(csv.reader([line]))
        if len(cells) != len(columns):
            raise ConfigurationError(f"{where}: {len(cells)} cells; give {len(columns)}, as in the first line")
        row = {column: cell.strip() for column, cell in zip(columns, cells, strict=True) if cell.strip()}
        try:
            yield where, _event(row)
        except ValueError as error:
            raise ConfigurationError(f"{where}: {error}") from None


_KINDS: dict[str, type[Event]] = {"job": JobEvent, "node": NodeEvent, "gone": GoneEvent}
_CELLS = {
    "time": "give a number",
    "weight": "give a number",
    "join": "give a number",
    "on_demand": "give true or false",
    "spot": "give true or false",
    "statistical": "give true or false",
    "throughput": "write workers:steps per second, such as 1:2.0 4:6.5",
    "price": "give a number",
    "rating": "give a number",
    "mobility": "give mixes, moves or stays",
    "backward": "give fractions above 0, at most 1, such as 1 0.75 0.5 0.25",
}
"""What to do about a cell that makes no sense; the others that are not text take whole numbers."""


def _event(row: Mapping[str, str]) -> Event:
    event = row.get("event", "")
    kind = _KINDS.get(event)
    if kind is None:
        raise ValueError(f"event={event}: give job, node or gone")
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for column, cell in row.items():
        if column == "throughput" and kind is JobEvent and "=" in cell:
            values["kinds"] = _by_kind(cell)
        elif column in fields and (column, kind) != ("kinds", JobEvent):
            values[column] = _value(column, cell, fields[column].type)
        elif column != "event":
            raise ValueError(f"{column}={cell}: a {event} has no {column}; leave the cell empty")
    for name, field in fields.items():
        if (field.required or (name == "throughput" and "kinds" not in values)) and name not in values:
            raise ValueError(f"{name} is empty; a {event} needs it")
    return kind(**values)


def _by_kind(cell: str) -> dict[str, dict[int, float]]:
    """The throughputs of each kind of device in a cell."""
    found: dict[str, dict[int, float]] = {}
    for part in cell.split(";"):
        kind, _, speeds = part.partition("=")
        if not kind.strip() or kind.strip() in found:
            raise ValueError(f"throughput={cell}: name each kind of device once, such as V100=1:2.0 4:6.5; K80=1:0.4")
        found[kind.strip()] = _value("throughput", speeds, dict[int, float])
    return found


def _value(column: str, cell: str, kind: Any) -> Any:
    raw: object = cell
    if column == "throughput":
        pairs = [pair.partition(":") for pair in cell.split()]
        raw = {workers: speed for workers, _, speed in pairs}
        if len({workers for workers, _, _ in pairs}) < len(pairs):
            raise ValueError(f"throughput={cell}: give each number of workers once")
    if column == "backward":
        raw = cell.split()
    try:
        return msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError:
        raise ValueError(f"{column}={cell}: {_CELLS.get(column, 'give a whole number')}") from None


def write(trace: JobTrace, path: Path, comment: Iterable[str] = ()) -> None:
    """Write a trace as CSV, leaving out what has its default.

    Args:
        comment: lines for the top of the file: where it comes from.
    """
    rows = [_row(event) for event in trace.events]
    used = [column for column in COLUMNS if any(row.get(column) for row in rows)]
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {line}".rstrip() + "\n" for line in comment)
        writer = csv.DictWriter(file, used, lineterminator="\n", extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(rows)


def _row(event: Event) -> dict[str, str]:
    defaults = {f.name: f.default for f in msgspec.structs.fields(event)}
    given = msgspec.structs.asdict(event)
    kinds = given.pop("kinds", {})
    row = {name: _cell(value) for name, value in given.items() if value != defaults[name]}
    if kinds:
        row["throughput"] = "; ".join(f"{kind}={_cell(speeds)}" for kind, speeds in kinds.items())
    row.setdefault("time", _cell(event.time))
    return {"event": str(event.__struct_config__.tag), **row}


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, tuple):
        return " ".join(map(_cell, value))
    if isinstance(value, dict):
        return " ".join(f"{workers}:{speed:.6g}" for workers, speed in value.items())
    return str(value)

"""Figures of a job over its steps, in constant memory: the longer it trains, the more steps share a point. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from virtualflow.coordinator.settings import SERIES_BREAKS, SERIES_METRICS, SERIES_POINTS
from virtualflow.protocol.job_record import Break, Column, SeriesRecord, Total
from virtualflow.protocol.live_view import ViewSeries
from virtualflow.protocol.wording import Metric

_DIGITS = 5
"""Significant ones of a figure: a picture shows fewer."""

_IDLE, _IDLE_STEPS = 1.0, 3.0
"""Seconds in which no step was completed, and how many usual steps that must be, to count as a break."""

_UNHEARD, _UNHEARD_STEPS = 5.0, 5.0
"""Seconds in which steps were completed and nobody told, and usual steps, to count as one."""


@dataclass
class _Mean:
    total: float = 0.0
    count: int = 0

    def take(self, other: _Mean) -> None:
        self.total += other.total
        self.count += other.count

    @property
    def value(self) -> float | None:
        return float(f"{self.total / self.count:.{_DIGITS}g}") if self.count else None


@dataclass
class _Point:
    """What was told between two steps."""

    step: int
    """The last of them."""
    time: float | None
    """Unix time at which that one was first told; ``None``: a coordinator of an earlier version has not kept it."""
    speed: _Mean
    workers: _Mean
    """Those that made the last step: between two numbers of workers there is none."""
    metrics: dict[str, _Mean] = field(default_factory=dict)

    def take(self, later: _Point) -> None:
        if later.step > self.step:
            self.step, self.time, self.workers = later.step, later.time, later.workers
        self.speed.take(later.speed)
        for name, mean in later.metrics.items():
            self.metrics.setdefault(name, _Mean()).take(mean)


class Series:
    """The speed, the number of workers and the first few metrics over the steps.

    Args:
        most: points that are kept; when there are more, twice as many steps share one.
        metrics: how many of them are kept, those that were told first.
    """

    def __init__(self, most: int = SERIES_POINTS, metrics: int = SERIES_METRICS) -> None:
        self._most, self._metrics = most, metrics
        self._names: list[str] = []
        self._points: list[_Point] = []
        self._breaks: list[Break] = []
        self._usual = 0.0
        """Seconds of a step, as last told; 0: not known."""
        self._unheard = False
        self.began: float | None = None
        """Unix time at which the first figures were told."""
        self.width = 1
        """Steps that share a point."""

    def __len__(self) -> int:
        return len(self._points)

    @property
    def last_step(self) -> int:
        """The last step that was told of; -1: none."""
        return self._points[-1].step if self._points else -1

    @property
    def latest(self) -> float | None:
        """Unix time at which the last step was first told."""
        return self._points[-1].time if self._points else None

    def add(self, step: int, speed: float, workers: int, metrics: Mapping[str, Metric], time: float) -> None:
        """Take what was told at a step; what was told of later ones is repeated, and forgotten.

        Args:
            speed: steps a second; 0: not known.
            metrics: those that are not finite leave a gap.
        """
        self.began = time if self.began is None else self.began
        while self._points and self._points[-1].step > step:
            self._points.pop()
        self._breaks = [known for known in self._breaks if known.step <= step]
        point = _Point(step, time, _mean(speed or None), _mean(workers), self._chosen(metrics))
        self._usual = 1 / speed if speed > 0 else self._usual
        if self._points:
            self._note_break(self._points[-1], point)
        self._append(point)
        while len(self._points) > self._most:
            self._gather(2 * self.width)

    def miss(self) -> None:
        """Until now nobody was heard: the workers may have made steps all the while."""
        self._unheard = bool(self._points)

    def columns(self, whole: bool = False) -> ViewSeries:
        """All points; but not the last one, to which more may be added, unless all are to be told."""
        done = self._points if whole else self._points[:-1]
        return ViewSeries(
            steps=tuple(point.step for point in done),
            speed=_column(point.speed for point in done),
            workers=_column(point.workers for point in done),
            metrics={name: _column(point.metrics.get(name) for point in done) for name in self._names},
            times=tuple(None if point.time is None else round(point.time, 2) for point in done),
            breaks=tuple(self._breaks),
            began=self.began,
            width=self.width,
        )

    def record(self) -> SeriesRecord:
        """All points, for :meth:`resume` of another one."""
        return SeriesRecord(
            self.width,
            tuple(point.step for point in self._points),
            _totals(point.speed for point in self._points),
            _totals(point.workers for point in self._points),
            {name: _totals(point.metrics.get(name) for point in self._points) for name in self._names},
            tuple(point.time for point in self._points),
            tuple(self._breaks),
            self.began,
        )

    def resume(self, record: SeriesRecord) -> None:
        """Put what was recorded elsewhere before what was told here."""
        names = [*record.metrics, *(name for name in self._names if name not in record.metrics)]
        self._names = names[: self._metrics]
        columns = {name: record.metrics[name] for name in self._names if name in record.metrics}
        before = [
            _Point(
                step,
                record.times[place] if record.times else None,
                _from_total(record.speed[place]),
                _from_total(record.workers[place]),
                {name: _from_total(column[place]) for name, column in columns.items()},
            )
            for place, step in enumerate(record.steps)
        ]
        last = before[-1].step if before else -1
        after = [point for point in self._points if point.step > last]
        self._breaks = [*record.breaks, *(known for known in self._breaks if known.before >= last)]
        self._unheard = bool(before)
        if before and after:
            self._note_break(before[-1], after[0])
        self._points = before + after
        self.began = self.began if record.began is None else record.began
        self._gather(max(self.width, record.width))
        while len(self._points) > self._most:
            self._gather(2 * self.width)

    def _note_break(self, last: _Point, point: _Point) -> None:
        """Between the two nobody may have completed a step, or nobody heard of any; the longest such times are kept."""
        steps = point.step - last.step
        if steps <= 0:
            return
        unheard, self._unheard = self._unheard, False
        if last.time is None or point.time is None:
            return
        passed, usual = point.time - last.time, self._usual
        idle = passed if unheard else passed - steps * usual
        if idle < max(_IDLE, _IDLE_STEPS * usual):
            if passed < max(_UNHEARD, _UNHEARD_STEPS * usual) or steps == 1:
                return
            unheard = True
        self._breaks.append(Break(last.step, point.step, last.time, point.time, unheard))
        if len(self._breaks) > SERIES_BREAKS:
            self._breaks.remove(min(self._breaks, key=lambda known: known.until - known.since))

    def _gather(self, width: int) -> None:
        """Let so many steps share a point."""
        self.width = width
        points, self._points = self._points, []
        for point in points:
            self._append(point)

    def _append(self, point: _Point) -> None:
        last = self._points[-1] if self._points else None
        if last is not None and last.step // self.width == point.step // self.width:
            last.take(point)
        else:
            self._points.append(point)

    def _chosen(self, metrics: Mapping[str, Metric]) -> dict[str, _Mean]:
        for name in sorted(metrics, key=lambda name: name != "loss"):
            if len(self._names) >= self._metrics:
                break
            if name not in self._names:
                self._names.append(name)
        told = ((name, metrics.get(name)) for name in self._names)
        return {name: _mean(value) for name, value in told if isinstance(value, (int, float))}


def fault_in_series(record: SeriesRecord) -> str | None:
    """What is wrong with figures that somebody hands over, if anything."""
    steps = record.steps
    if any(one >= other for one, other in pairwise(steps)):
        return "its steps do not go forward"
    columns = (record.speed, record.workers, record.times or steps, *record.metrics.values())
    if any(len(column) != len(steps) for column in columns):
        return "its columns differ in length"
    return None


def _mean(value: float | None) -> _Mean:
    return _Mean() if value is None else _Mean(value, 1)


def _column(means: Iterable[_Mean | None]) -> tuple[float | None, ...]:
    return tuple(None if mean is None else mean.value for mean in means)


def _totals(means: Iterable[_Mean | None]) -> Column:
    return tuple((0.0, 0) if mean is None else (mean.total, mean.count) for mean in means)


def _from_total(told: Total) -> _Mean:
    total, count = told
    return _Mean() if total is None else _Mean(total, count)

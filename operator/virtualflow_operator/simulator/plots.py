"""Two pictures: who had how many units when, and how long the jobs took. Needs matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from virtualflow.errors import ConfigurationError
from virtualflow_operator.simulator.outcome import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 20
"""With more jobs than that, a legend and edges would hide the picture."""
POINTS = 2_000
"""In time, across the picture of the allocation: more than it has pixels."""


def draw(results: Mapping[str, Result], directory: Path) -> list[Path]:
    """Write ``allocation.png`` and ``completion.png``.

    Raises:
        ConfigurationError: matplotlib is missing, or the directory cannot be written.
    """
    try:
        from matplotlib.figure import Figure as _Figure
    except ModuleNotFoundError:
        raise ConfigurationError(
            "the plots need matplotlib, not installed here; run: pip install 'virtualflow[plots]', or leave out --plots"
        ) from None
    pictures = {
        "allocation.png": _allocation(results, _Figure(figsize=(9, 2.6 * len(results)), layout="constrained")),
        "completion.png": _completion(results, _Figure(figsize=(7, 4), layout="constrained")),
    }
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, figure in pictures.items():
            figure.savefig(directory / name, dpi=120)
            written.append(directory / name)
    except OSError as error:
        raise ConfigurationError(f"--plots {directory}: {error.strerror}; give a directory to write to") from None
    return written


def _allocation(results: Mapping[str, Result], figure: Figure) -> Figure:
    last = max((outcome.finished or 0.0 for result in results.values() for outcome in result.outcomes), default=0.0)
    from matplotlib import colormaps

    colours = colormaps["tab20"](range(20))
    axes_of_all = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, result) in zip(axes_of_all, results.items(), strict=True):
        first = min(outcome.job.time for outcome in result.outcomes)
        times = _times(result, first, last)
        rows = [_at(times, outcome.changes, outcome.job.units) for outcome in result.outcomes]
        hours = [time / 3_600 for time in times]
        edges = {"linewidth": 0.3, "edgecolor": "white"} if len(rows) <= NAMED else {"linewidth": 0}
        axes.stackplot(hours, rows, step="post", colors=colours, **edges)
        axes.plot(hours, _at(times, result.capacity, 1), drawstyle="steps-post", color="black", linewidth=1)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylabel("units")
    axes_of_all[-1].set_xlabel("hours (one colour a job; the line is the capacity)")
    return figure


def _times(result: Result, first: float, last: float) -> list[float]:
    """All at which something changes, or evenly spread ones if these are too many to be seen."""
    changed = {time for outcome in result.outcomes for time, _ in outcome.changes} | {t for t, _ in result.capacity}
    changed |= {first, last}
    if len(changed) <= POINTS:
        return sorted(changed)
    return [first + (last - first) * index / POINTS for index in range(POINTS + 1)]


def _at(times: list[float], changes: tuple[tuple[float, int], ...], units: int) -> list[int]:
    values, current, index = [], 0, 0
    for time in times:
        while index < len(changes) and changes[index][0] <= time:
            current = changes[index][1] * units
            index += 1
        values.append(current)
    return values


def _completion(results: Mapping[str, Result], figure: Figure) -> Figure:
    axes = figure.subplots()
    for name, result in results.items():
        ended = sorted(outcome.completion for outcome in result.outcomes if outcome.completion is not None)
        share = [(index + 1) / len(result.outcomes) for index in range(len(ended))]
        axes.step([0.0, *(seconds / 60 for seconds in ended)], [0.0, *share], where="post", label=name)
    axes.set_xlabel("completion time, minutes (arrival to end)")
    axes.set_ylabel("part of the jobs")
    axes.set_ylim(0, 1)
    if len(ended) > NAMED:
        axes.set_xscale("symlog", linthresh=1)
    axes.legend(frameon=False)
    return figure

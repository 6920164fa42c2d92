"""``virtualflow simulate``: a trace, some policies, a table and pictures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from virtualflow.errors import ConfigurationError
from virtualflow.launcher import EXIT_FAILED, Number, Parser, ProgressBar
from virtualflow_operator.scheduling import (
    FIXED_SIZES,
    POLICIES,
    Allocation,
    Capacity,
    Demand,
    Policy,
    policy,
)
from virtualflow_operator.settings import SchedulingSettings, SimulationSettings
from virtualflow_operator.simulator.device_simulation import Aware, Unaware, simulate_devices
from virtualflow_operator.simulator.outcome import Measures, Result, measure
from virtualflow_operator.simulator.power_of_two import power_of_two_share
from virtualflow_operator.simulator.simulation import Knowledge, ResizeCost, simulate
from virtualflow_operator.simulator.trace import JobTrace, read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINES: Mapping[str, Policy] = MappingProxyType({"PowerOfTwoShare": power_of_two_share})
"""Policies that no queue can have."""


def main(arguments: Sequence[str]) -> int:
    """Simulate, print the table, and draw; the exit code: 1 if a job never ended.

    Raises:
        ConfigurationError: the request makes no sense; one sentence says what to do.
    """
    defaults = SimulationSettings()
    given = parser(defaults).parse_args(arguments)
    cost = _cost(given, defaults)
    trace = read(given.trace)
    _check_kinds(given, trace)
    if given.capacity is not None:
        trace = trace.on(given.capacity)
    trace = trace if given.fixed_batches else trace.with_chosen_batches
    chosen = {name: BASELINES.get(name) or policy(name) for name in given.policy or POLICIES}
    results: dict[str, Result] = {}
    with ProgressBar("simulating", len(chosen) * len(trace.jobs)) as progress:
        for name, decide in chosen.items():
            seen = _seen(decide, progress, len(results) * len(trace.jobs))
            results[name] = _play(given, trace, name, seen, cost, defaults)
    measured = {name: measure(result) for name, result in results.items()}
    print(f"{given.trace}: {len(trace.jobs)} jobs; {_describe(cost)}")
    print(table(measured))
    for name, result in results.items():
        _tell_unfinished(name, result)
    if given.json is not None:
        _write(given.json, measured)
    if given.plots is not None:
        for picture in draw(results, given.plots):
            print(picture)
    return EXIT_FAILED if any(result.unfinished for result in results.values()) else 0


def parser(defaults: SimulationSettings) -> Parser:
    parser = Parser(
        prog="virtualflow simulate",
        description="Play a trace of jobs against scheduling policies, the ones that the operator runs.",
        epilog="docs/explanation/simulator.md says what a trace looks like and what the columns of the table mean.",
        examples=(
            "virtualflow simulate trace.csv",
            "virtualflow simulate trace.csv --policy PowerOfTwoShare --capacity 16",
        ),
        allow_abbrev=False,
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a CSV or JSON file")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="P",
        help=f"one of {', '.join(POLICIES)} (default: all of these), or {', '.join(BASELINES)}; repeatable",
    )
    parser.add_argument(
        "--capacity",
        metavar="N",
        help="units, in place of the nodes of the trace (default: those)",
        type=int,
        action=Number,
        least=1,
        most=sys.maxsize,
        must="give 1 or more units",
    )
    parser.add_argument(
        "--join",
        type=float,
        metavar="S",
        help=f"seconds until a new worker counts (default {defaults.join:g}; a restart's {defaults.restart:g})",
    )
    parser.add_argument(
        "--pause", type=float, metavar="S", help=f"seconds that a change stops a job for (default {defaults.pause:g})"
    )
    parser.add_argument(
        "--restart", action="store_true", help="for comparison: each change stops the whole job for the S of --join"
    )
    parser.add_argument(
        "--release",
        type=float,
        metavar="S",
        help="for comparison: carry out one decision after the other, and let units that are given up rest for S "
        "seconds (default: at once)",
    )
    parser.add_argument(
        "--knowledge",
        choices=get_args(Knowledge),
        default="all",
        help="what policies know of a job: its steps and all speeds of the trace; its steps, and the speeds it has run "
        "at; no steps, but what jobs like it needed; or no steps (default all)",
    )
    parser.add_argument(
        "--packing",
        metavar="N",
        help="let jobs that wait compute on devices of others, in turns with them, up to N jobs on a device (default: "
        "no job does)",
        type=int,
        action=Number,
        least=2,
        most=sys.maxsize,
        must="give 2 or more jobs",
    )
    parser.add_argument(
        "--one-pool", action="store_true", help="for comparison: policies that take all kinds of device for one"
    )
    parser.add_argument(
        "--fixed-batches",
        action="store_true",
        help="for comparison: leave also those jobs their batch that allow another one",
    )
    parser.add_argument("--every", type=float, metavar="S", help="decide at least every S seconds (default: at events)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the measures there")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write PNG pictures there")
    return parser


def _check_kinds(given: argparse.Namespace, trace: JobTrace) -> None:
    """Refuse what a trace with or without kinds of device cannot be asked."""
    if given.one_pool and not trace.has_kinds:
        raise ConfigurationError(f"{given.trace} has no kinds of device; leave out --one-pool")
    options = {
        "--capacity": given.capacity is not None,
        "--every": given.every is not None,
        "--restart": given.restart,
        "--release": given.release is not None,
        "--packing": given.packing is not None,
        f"--knowledge {given.knowledge}": given.knowledge in ("past", "none"),
        **{f"--policy {name}": name in (given.policy or ()) for name in BASELINES},
    }
    wrong = [option for option, asked in options.items() if asked]
    if trace.has_kinds and wrong:
        raise ConfigurationError(f"{given.trace} has kinds of device; leave out {' and '.join(wrong)}")


def _seen(decide: Policy, progress: ProgressBar, before: int) -> Policy:
    """The policy, and how far the trace is by the jobs that it has been asked about, ``before`` it and by itself."""
    known: set[str] = set()

    def decide_and_tell(
        now: float, jobs: Sequence[Demand], capacity: Capacity, settings: SchedulingSettings
    ) -> dict[str, Allocation]:
        known.update(job.name for job in jobs)
        progress.reach(before + len(known))
        return decide(now, jobs, capacity, settings)

    return decide_and_tell


def _play(
    given: argparse.Namespace,
    trace: JobTrace,
    name: str,
    decide: Policy,
    cost: ResizeCost,
    defaults: SimulationSettings,
) -> Result:
    if not trace.has_kinds:
        return simulate(
            trace,
            decide,
            cost,
            defaults.scheduling,
            knowledge=given.knowledge,
            every=given.every,
            jobs_per_device=given.packing or 1,
            fixed_sizes=name in FIXED_SIZES,
        )
    decider = Unaware(decide) if given.one_pool else Aware(decide, elastic=name not in FIXED_SIZES)
    return simulate_devices(trace, decider, cost, defaults.scheduling, knowledge=given.knowledge).result


def _cost(given: argparse.Namespace, defaults: SimulationSettings) -> ResizeCost:
    if given.restart and given.pause is not None:
        raise ConfigurationError("--restart stops the whole job already; leave out --pause beside it")
    join = defaults.restart if given.restart else defaults.join
    pause = 0.0 if given.restart else defaults.pause
    return ResizeCost(
        join if given.join is None else given.join,
        pause if given.pause is None else given.pause,
        stop=given.restart,
        release=given.release,
    )


def _describe(cost: ResizeCost) -> str:
    turns = "" if cost.release is None else f"; decisions in turn, units rest for {cost.release:g} s"
    if cost.stop:
        return f"each change restarts the job, which takes {cost.join:g} s{turns}"
    return f"a change pauses the job for {cost.pause:g} s, a new worker counts after {cost.join:g} s{turns}"


_HEADING: tuple[str, ...] = (
    "policy",
    "makespan",
    "completion: mean",
    "median",
    "p95",
    "queueing: mean",
    "median",
    "p95",
    "utilisation",
    "fairness",
    "resizes",
    "suspended",
)


def table(measured: Mapping[str, Measures]) -> str:
    """The measures of some policies as lines of text, a policy each."""
    foreseen = any(of.expected for of in measured.values())
    packed = any(of.lodgers for of in measured.values())
    rows = [_HEADING + ("foreseen", "off by") * foreseen + ("computing", "lodgers", "slowest step") * packed]
    for name, of in measured.items():
        times = (
            of.makespan,
            of.mean_completion,
            of.median_completion,
            of.p95_completion,
            of.mean_queueing,
            of.median_queueing,
            of.p95_queueing,
        )
        counts = (f"{of.utilisation:.0%}", f"{of.fairness:.2f}", f"{of.resizes:,}", f"{of.suspensions:,}")
        errors = (f"{of.expected / max(1, of.jobs - of.unfinished):.0%}", f"{of.expected_factor:.1f} x") * foreseen
        sharing = (f"{of.computing:.0%}", f"{of.lodgers:,}", f"{of.longest_slowdown:.2f} x") * packed
        rows.append((name, *(f"{seconds:,.0f} s" for seconds in times), *counts, *errors, *sharing))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def _tell_unfinished(name: str, result: Result) -> None:
    left = result.unfinished
    for outcome in left[:3]:
        print(f"{name}: {outcome.job.name} never ended: {outcome.reason}")
    if len(left) > 3:
        print(f"{name}: {len(left) - 3} more never ended")


def _write(path: Path, measured: Mapping[str, Measures]) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(dict(measured)), indent=2) + b"\n")
    except OSError as error:
        raise ConfigurationError(f"--json {path}: {error.strerror}; give a file to write to") from None


# --- pictures: who had how many units when, and how long the jobs took ------------------------------------------------
#
# They need matplotlib, which is an extra. All plots of the project have their style.

BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f81f7", "#d4742c", "#2da44e", "#a371f7", "#8b949e"
INK = "#7d8590"
"""Of all that is written: grey enough for both backgrounds."""
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "savefig.transparent": True,
    "savefig.dpi": 110,
}
"""``rcParams`` of matplotlib."""
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
        from matplotlib import rc_context
        from matplotlib.figure import Figure as _Figure
    except ModuleNotFoundError:
        raise ConfigurationError(
            "the plots need matplotlib, not installed here; run: pip install 'virtualflow[plots]', or leave out --plots"
        ) from None
    written = []
    with rc_context(STYLE):
        pictures = {
            "allocation.png": _allocation(results, _Figure(figsize=(9, 2.6 * len(results)), layout="constrained")),
            "completion.png": _completion(results, _Figure(figsize=(7, 4), layout="constrained")),
        }
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, figure in pictures.items():
                figure.savefig(directory / name)
                written.append(directory / name)
        except OSError as error:
            sentence = f"--plots {directory}: {error.strerror}; give a directory to write to"
            raise ConfigurationError(sentence) from None
    return written


def _allocation(results: Mapping[str, Result], figure: Figure) -> Figure:
    last = max((outcome.finished or 0.0 for result in results.values() for outcome in result.outcomes), default=0.0)
    from matplotlib import colormaps

    colours = colormaps["tab20"]([*range(0, 20, 2), *range(1, 20, 2)])  # strong ones first: neighbours differ
    axes_of_all = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, result) in zip(axes_of_all, results.items(), strict=True):
        first = min(outcome.job.time for outcome in result.outcomes)
        times = _times(result, first, last)
        rows = [_at(times, outcome.changes, outcome.job.units) for outcome in result.outcomes]
        hours = [time / 3_600 for time in times]
        edges = {"linewidth": 0.3, "edgecolor": "white"} if len(rows) <= NAMED else {"linewidth": 0}
        axes.stackplot(hours, rows, step="post", colors=colours, **edges)
        capacity = _at(times, result.capacity, 1)
        axes.plot(hours, capacity, drawstyle="steps-post", color=INK, linewidth=1.2, linestyle="--")
        axes.annotate("capacity", (hours[-1], capacity[-1]), (0, 3), textcoords="offset points", ha="right", fontsize=8)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylabel("units in use")
    axes_of_all[-1].set_xlabel("hours; one colour a job")
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
    axes.set_prop_cycle(color=(BLUE, ORANGE, GREEN, PURPLE, GREY))
    for name, result in results.items():
        ended = sorted(outcome.completion for outcome in result.outcomes if outcome.completion is not None)
        share = [(index + 1) / len(result.outcomes) for index in range(len(ended))]
        axes.step([0.0, *(seconds / 60 for seconds in ended)], [0.0, *share], where="post", label=name)
    axes.set_xlabel("completion time in minutes, from arrival to end: further left is better")
    axes.set_ylabel("share of the jobs that have ended")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    if len(ended) > NAMED:
        axes.set_xscale("symlog", linthresh=1)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend()
    return figure

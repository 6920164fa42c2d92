"""``virtualflow simulate``: a trace, some policies, a table and pictures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import msgspec

from virtualflow.errors import ConfigurationError
from virtualflow.launcher import EXIT_FAILED, EXIT_USAGE, Number, Parser, ProgressBar, complain
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
from virtualflow_operator.simulator.plots import draw
from virtualflow_operator.simulator.power_of_two import power_of_two_share
from virtualflow_operator.simulator.simulation import Knowledge, ResizeCost, simulate
from virtualflow_operator.simulator.trace import JobTrace, read

BASELINES: Mapping[str, Policy] = MappingProxyType({"PowerOfTwoShare": power_of_two_share})
"""Policies that no queue can have."""


def run(arguments: Sequence[str] | None = None) -> int:
    """As :func:`main`, as a program of its own: what is wrong is said in one line on standard error."""
    try:
        return main(sys.argv[1:] if arguments is None else arguments)
    except ConfigurationError as error:
        complain(str(error))
        return EXIT_USAGE


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
        "--one-pool", action="store_true", help="for comparison: policies that take all kinds of device for one"
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
        return simulate(trace, decide, cost, defaults.scheduling, knowledge=given.knowledge, every=given.every)
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
    rows = [_HEADING + ("foreseen", "off by") * foreseen]
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
        rows.append((name, *(f"{seconds:,.0f} s" for seconds in times), *counts, *errors))
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

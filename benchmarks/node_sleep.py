"""Nodes that sleep while nobody needs them, with a forecast of how many will be needed and without; waits are counted.

Two recorded traces (``traces/README.md``): how many nodes of Microsoft's Philly cluster had jobs, and the jobs of one
of its virtual clusters. On the first, nodes are counted. On the second, the nodes that are awake are the capacity of a
simulation, so that jobs wait until a node is up. ``--demand FILE`` counts on another trace: nodes needed, every ten
minutes. The energy service of Hu et al. ("Characterization and Prediction of Deep Learning Workloads in Large-Scale GPU
Datacenters", SC 2021, section 4.3) decides every ten minutes, too.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.traces.generate import DIRECTORY, philly
from virtualflow_operator.scheduling import POLICIES
from virtualflow_operator.settings import SimulationSettings
from virtualflow_operator.simulator.outcome import Result, measure
from virtualflow_operator.simulator.simulation import ResizeCost, simulate
from virtualflow_operator.simulator.trace import GoneEvent, JobTrace, NodeEvent

SLOT = 600.0
"""Seconds between decisions."""
DAY = 144
"""Slots of it."""
AHEAD = 18
"""Slots that a forecast looks ahead: the paper's three hours."""
REMEMBERED = 14
"""Days that it goes by."""
AROUND = 3
"""Slots before and after the same time of these days."""
BOOT = 300.0
"""Seconds until a node is up: an assumption."""
UNITS, FLEET = 8, 10
"""GPUs of a node, and nodes, of the virtual cluster."""
CLUSTER = 420
"""Nodes of the Philly cluster, of which up to 450 had jobs for some minutes."""
HISTORY = 14 * DAY
"""Slots of the Philly cluster that only teach."""
WINDOW = (59 * DAY, 73 * DAY)
"""1 to 14 December, which the paper's artifact evaluates."""

TEXT = """\
Simulated, on two recorded traces, one decision every ten minutes. *Cluster*: how many of the 420 nodes of Microsoft's
Philly cluster had jobs, 59 days (and the two weeks in December that the paper's artifact evaluates). *Virtual cluster*:
986 of its jobs on ten nodes, where jobs wait until a node is up, five minutes. Percentages are of nodes (node hours)
beside all awake, of which 74 % are needed (69 % in December).

| plan | meaning |
| --- | --- |
| 10 minutes, 3 hours idle | a node sleeps after that time |
| and a reserve | 10 nodes (the virtual cluster: 1) stay awake besides, chosen in hindsight |
| the paper's rule | nodes beyond a reserve of 20 (1) sleep when the need falls and is not foreseen to rise |
| forecast | a node sleeps if it was not needed for 3 hours and, with that probability, will not be for the next 3 |

Forecasts go by the same time of the last 14 days; the paper's is by gradient-boosted trees, and its rule has ours here.
The paper (Hu et al., SC 2021) reports up to 13 % more utilisation, on SenseTime's clusters (Helios). On these traces
most of the gain is the sleep itself. A forecast by the time of day finds the reserve that avoids waits, but a timer
with a fixed reserve is as good."""

Plan = Callable[[Sequence[int], int], int]
"""Nodes to be awake from now on, given those needed in each slot so far, the present one last, and those awake."""


def _starts(needed: Sequence[int], ahead: int) -> list[int]:
    """Slots at about this time of earlier days, of which it is known how the need went on."""
    now = len(needed) - 1
    starts = (now - day * DAY + off for day in range(1, REMEMBERED + 1) for off in range(-AROUND, AROUND + 1))
    return [at for at in starts if AHEAD <= at <= now - ahead]


def reserve(needed: Sequence[int], confidence: float) -> int:
    """Nodes beyond the most of the last three hours that will be enough for the next three, with that probability.

    Without any earlier day, as many as were ever needed.
    """
    rises = sorted(
        max(0, max(needed[at + 1 : at + 1 + AHEAD]) - max(needed[at + 1 - AHEAD : at + 1]))
        for at in _starts(needed, AHEAD)
    )
    if not rises:
        return max(needed) - max(needed[-AHEAD:])
    return rises[min(len(rises) - 1, math.floor(confidence * len(rises)))]


def idle(slots: int, buffer: int = 0) -> Plan:
    """A node sleeps when it has not been needed for so many slots, but for so many in reserve."""
    return lambda needed, awake: max(needed[-slots:]) + buffer


def forecast(confidence: float) -> Plan:
    """A node sleeps when it was not needed for three hours and will not be for three more, and wakes when it will."""
    return lambda needed, awake: max(needed[-AHEAD:]) + reserve(needed, confidence)


class PaperRule:
    """The paper's algorithm 2, with the constants of its artifact for the Philly trace and this module's forecast.

    Nodes beyond a reserve sleep once the need has fallen and is not foreseen to rise, but none within some time of a
    waking; too few are woken together with the reserve.
    """

    def __init__(self, buffer: int = 20, past: int = 2, ahead: int = 30, rest: int = 10) -> None:
        self._buffer, self._past, self._ahead, self._rest = buffer, past, ahead, rest
        self._until = 0

    def __call__(self, needed: Sequence[int], awake: int) -> int:
        now = needed[-1]
        if awake < now:
            self._until = len(needed) + self._rest
            return now + self._buffer
        falls = len(needed) > self._past and fmean(needed[-self._past - 1 : -1]) - now >= 0.1
        courses = [
            [needed[at + n] - needed[at] for n in range(1, 2 * self._ahead + 1)]
            for at in _starts(needed, 2 * self._ahead)
        ]
        if len(needed) < self._until or not falls or not courses:
            return awake
        near = fmean(change for course in courses for change in course[: self._ahead])
        far = fmean(change for course in courses for change in course)
        return min(awake, now + self._buffer) if near <= 0 and far <= near else awake


@dataclass(frozen=True)
class Score:
    """Of a plan, from the first day that counts on."""

    awake: float
    """Nodes, on average."""
    used: float
    """The part of them that is needed, on average: the paper's utilisation."""
    wakings: float
    """Times a day that somebody had to wait for nodes."""
    waited: float
    """Nodes that somebody had to wait for, as a part of all that came into use."""


def score(needed: Sequence[int], plan: Plan, total: int, first: int = 0) -> Score:
    """Follow a plan over a recorded need; slots before ``first`` are history."""
    awake = needed[0]
    kept, lacks = [], []
    for at in range(len(needed)):
        lacks.append(max(0, needed[at] - awake))
        awake = max(needed[at], min(total, plan(needed[: at + 1], awake)))
        kept.append(awake)
    counted = range(first, len(needed))
    rises = sum(max(0, needed[at] - needed[at - 1]) for at in counted if at)
    return Score(
        awake=fmean(kept[at] for at in counted),
        used=fmean(needed[at] / kept[at] if kept[at] else 1.0 for at in counted),
        wakings=sum(lacks[at] > 0 for at in counted) * DAY / len(counted),
        waited=sum(lacks[at] for at in counted) / rises if rises else 0.0,
    )


# --- the virtual cluster, whose jobs wait -----------------------------------------------------------------------------


def need_of(result: Result) -> list[tuple[float, int]]:
    """From when on a simulation's workers need how many nodes, if they are gathered without a gap."""
    moves = sorted(
        (time, (workers - before) * outcome.job.units)
        for outcome in result.outcomes
        for (_, before), (time, workers) in pairwise(((0.0, 0), *outcome.changes))
    )
    units, found = 0, [(0.0, 0)]
    for time, more in moves:
        units += more
        found.append((time, math.ceil(units / UNITS)))
    return found


def up_nodes(need: Sequence[tuple[float, int]], plan: Plan, total: int) -> list[NodeEvent | GoneEvent]:
    """When which node is up, under a plan that follows this need: nodes that somebody needs, and its own, are woken."""
    up: list[float] = []
    events: list[NodeEvent | GoneEvent] = []

    def keep(count: int, now: float) -> None:
        while len(up) < count:
            up.append(now + BOOT)
            events.append(NodeEvent(up[-1], f"node-{len(up)}", UNITS))
        while len(up) > count:
            events.append(GoneEvent(max(now, up[-1]), f"node-{len(up)}"))
            up.pop()

    needed: list[int] = []
    present, coming = 0, iter([*need, (math.inf, 0)])
    time, nodes = next(coming)
    while time < math.inf:
        end, most = SLOT * (len(needed) + 1), present
        while time < end:
            present = nodes
            most = max(most, present)
            keep(max(len(up), min(total, present)), time)
            time, nodes = next(coming)
        needed.append(most)
        keep(max(present, min(total, plan(needed, len(up)))), end)
    return sorted(events, key=lambda event: event.time)


def play(need: Sequence[tuple[float, int]], plan: Plan) -> dict[str, Any]:
    """The virtual cluster's jobs on the nodes that a plan keeps awake."""
    events = sorted((*up_nodes(need, plan, FLEET), *philly().jobs), key=lambda event: event.time)
    result = _simulate(JobTrace(tuple(events)))
    spans = pairwise((*result.capacity, (need[-1][0], 0)))
    hours = sum(units / UNITS * max(0.0, end - begin) for (begin, units), (end, _) in spans) / 3_600
    measured = measure(result)
    waited = [outcome.queued for outcome in result.outcomes if outcome.queued > 1.0]
    return {
        "hours": hours,
        "completion": measured.mean_completion,
        "waited": len(waited),
        "wait": fmean(waited or [0.0]),
    }


def _simulate(trace: JobTrace) -> Result:
    defaults = SimulationSettings()
    cost = ResizeCost(defaults.join, defaults.pause)
    return simulate(trace, POLICIES["WeightedFairShare"], cost, defaults.scheduling)


def plans(buffer: int, reserve_of_paper: int) -> dict[str, Callable[[], Plan]]:
    """All plans, made anew for each trace."""
    return {
        "10 minutes idle": lambda: idle(2),
        "3 hours idle": lambda: idle(AHEAD),
        "3 hours idle and a reserve": lambda: idle(AHEAD, buffer),
        "the paper's rule": lambda: PaperRule(reserve_of_paper),
        "forecast, 80 %": lambda: forecast(0.8),
        "forecast, 90 %": lambda: forecast(0.9),
    }


def read_demand(path: Path) -> list[int]:
    """Nodes needed, slot by slot: whole numbers between spaces, on lines that do not begin with ``#``."""
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    return [int(number) for line in lines for number in line.split()]


def rows(needed: Sequence[int], total: int, jobs: bool) -> list[dict[str, str]]:
    """A line for each plan."""
    alone = _simulate(philly().on(UNITS * FLEET)) if jobs else None
    need = need_of(alone) if alone is not None else []
    always = FLEET * need[-1][0] / 3_600 if need else 0.0
    small = plans(1, 1)
    found = []
    for name, make in plans(10, 20).items():
        whole = score(needed, make(), total, min(HISTORY, len(needed) // 2))
        row = {"plan": name, **_cells(whole, total)}
        if alone is not None:
            window = score(needed[: WINDOW[1]], make(), total, WINDOW[0])
            row["in December"] = f"{window.used:.0%}, {window.waited:.1%}"
            played = play(need, small[name]())
            longer = played["completion"] / measure(alone).mean_completion - 1
            row["virtual cluster: node hours"] = f"{played['hours']:,.0f} (-{1 - played['hours'] / always:.0%})"
            row["jobs that waited"] = f"{played['waited']}, {played['wait']:.0f} s"
            row["completion"] = f"{longer:+.2%}"
        found.append(row)
        print("; ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
    return found


def _cells(of: Score, total: int) -> dict[str, str]:
    return {
        "cluster: nodes awake": f"{of.awake:.0f} (-{1 - of.awake / total:.0%})",
        "utilisation": f"{of.used:.1%}",
        "waits a day": f"{of.wakings:.1f}",
        "waited for, of all nodes that came into use": f"{of.waited:.1%}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write the figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    parser.add_argument("--demand", type=Path, metavar="FILE", help="nodes needed, every ten minutes, of another trace")
    given = parser.parse_args(arguments)
    needed = read_demand(given.demand or DIRECTORY / "philly-nodes.txt")
    found = rows(needed, max(needed) if given.demand else CLUSTER, jobs=given.demand is None)
    if given.json is not None:
        given.json.write_text(json.dumps({"simulated": True, "text": TEXT, "rows": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Uneven workers: two, each on a core of its own; one is slowed to a third for a while by stopping and continuing it.

Side by side, in turn: virtual nodes moved by speed, an even split, and the uneven ones about the best, from the first
step on. The fastest of all these is what is *possible*: a worker that is stopped most of the time exchanges and updates
slowly too, which no split changes. In theory, without that, two workers that need a and b seconds for a virtual node
are through with V of them in V / (1/a + 1/b); a and b are measured in the same stretch of the same run.

Then the same pair for longer, with nothing done to it: no virtual node should move.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import given_split
from benchmarks.jobs import LIMIT, ROOT, environment, run_job

VIRTUAL_NODES = 16
SCRIPT = "benchmarks/uneven_worker.py"
KEPT = ((4, 12), (5, 11), (3, 13))
"""Virtual nodes of the slowed worker and of the other one, in splits that stay: the one for a third of the speed, and
its neighbours."""
SLOW_AT, FAST_AT, STEPS, STEADY_STEPS = 50, 140, 200, 500
SETTLED = 20
"""Steps after which the new split should be there."""


@dataclass(frozen=True)
class Step:
    """A step at one worker: when it was through, and how long it computed for how many virtual nodes."""

    number: int
    end: float
    carried: int
    computed: float


@dataclass(frozen=True)
class Run:
    """What one run came to."""

    split: str
    slowdown: float
    """How many times as long the slowed worker took for a virtual node."""
    theory: float
    """The share of the throughput that the two speeds allow, from ``SETTLED`` steps after the slowing to its end."""
    steps_until_moved: int | None
    """From the first slow step to the first with another split."""
    steps_until_back: int | None
    """From the first fast step to the first with an even split again."""
    slow_ms: float
    """A step in that time."""
    fast_ms: float
    """A step before that."""
    rebalances: int
    digest: str


def read(directory: Path, workers: int = 2) -> list[list[Step]]:
    """The steps of each worker."""
    files = [directory / f"worker-{number}.json" for number in range(workers)]
    return [[Step(*values) for values in json.loads(file.read_text())] for file in files]


def pace(steps: Sequence[Step]) -> float:
    """Seconds per virtual node."""
    return sum(step.computed for step in steps) / sum(step.carried for step in steps)


def profile(path: Path) -> None:
    """Measure a worker, for splits that stay."""
    command = [sys.executable, "-m", "virtualflow", "profile", "--sizes", "1", "--virtual-nodes", str(VIRTUAL_NODES)]
    command += ["--out", str(path), SCRIPT, "--times", str(path.parent)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL, timeout=LIMIT)


def train(steps: int, *options: str | int, profiles: Path | None = None) -> tuple[dict[str, Any], list[list[Step]]]:
    """Run the pair; its report and its steps."""
    with tempfile.TemporaryDirectory() as directory:
        script = [SCRIPT, "--steps", steps, "--times", directory]
        script += [] if profiles is None else ["--profiles", profiles.as_posix()]
        report, _ = run_job("--workers", 2, "--virtual-nodes", VIRTUAL_NODES, *options, *script)
        return report, read(Path(directory))


def moved(report: dict[str, Any]) -> int:
    """How often virtual nodes were moved."""
    return sum(change["cause"] == "rebalance" for change in report["changes"])


def slowed(split: str, *options: str | int, profiles: Path | None = None) -> Run:
    """One run with a worker that is slow for a while."""
    schedule = f"{SLOW_AT}:slow:3,{FAST_AT}:fast"
    report, workers = train(STEPS, "--schedule", schedule, *options, profiles=profiles)
    before = [pace([step for step in steps if 20 <= step.number < SLOW_AT]) for steps in workers]

    def paces(number: int) -> list[float]:
        return [pace(steps[number - 1 : number + 2]) / usual for steps, usual in zip(workers, before, strict=True)]

    numbers = range(SLOW_AT, STEPS - 3)
    began = next(number for number in numbers if max(paces(number)) > 2)
    ended = next(number for number in numbers if number >= FAST_AT and max(paces(number)) < 1.6)
    carried = {step.number: step.carried for step in workers[0]}
    even = VIRTUAL_NODES // 2
    first_moved = next((number for number in range(began, ended) if carried[number] != even), None)
    first_back = next((number for number in range(ended, STEPS + 1) if carried[number] == even), None)
    stretch = [steps[began + SETTLED : FAST_AT] for steps in workers]
    present = [pace(steps) for steps in stretch]
    passed = stretch[0][-1].end - stretch[0][0].end
    measured = passed / (len(stretch[0]) - 1)
    theory = VIRTUAL_NODES / sum(1 / seconds for seconds in present)
    return Run(
        split,
        max(present) / min(present),
        theory / measured,
        None if first_moved is None else first_moved - began,
        None if first_back is None else first_back - ended,
        1_000 * measured,
        1_000 * (workers[0][SLOW_AT - 1].end - workers[0][20].end) / (SLOW_AT - 21),
        moved(report),
        report["digest"],
    )


def kept(counts: Sequence[int], profile: Path) -> Run:
    """One such run with a split that stays."""
    with tempfile.TemporaryDirectory() as directory:
        given_split.write_profiles(profile, counts, Path(directory))
        return slowed("/".join(map(str, counts)), profiles=Path(directory))


def measure(runs: int) -> dict[str, Any]:
    """All of it; figures of the JSON file."""
    found: list[Run] = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "profile.json"
        profile(path)
        for _ in range(runs):
            found.append(slowed("by speed"))
            found.append(slowed("even", "--rebalance-gain", 1))
            found += [kept(counts, path) for counts in KEPT]
    report, steady = train(STEADY_STEPS)
    splits = dict.fromkeys(run.split for run in found)
    slow_ms = {split: statistics.median(run.slow_ms for run in found if run.split == split) for split in splits}
    rows = [
        {
            "split": split,
            "step_ms": slow_ms[split],
            "possible": min(slow_ms.values()) / slow_ms[split],
            "theory": statistics.median(run.theory for run in found if run.split == split),
            "moves": ", ".join(str(run.rebalances) for run in found if run.split == split),
        }
        for split in splits
    ]
    return {
        "virtual_nodes": VIRTUAL_NODES,
        "runs": [asdict(run) for run in found],
        "digests_equal": len({run.digest for run in found}) == 1,
        "steady": {
            "steps": STEADY_STEPS,
            "rebalances": moved(report),
            "pace_ratio": pace(steady[0][20:]) / pace(steady[1][20:]),
        },
        "rows": [*rows, {"split": "by speed, nobody is slowed", "moves": f"{moved(report)} in {STEADY_STEPS} steps"}],
    }


def main() -> None:
    """Measure, print a table, and write the figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2, help="of each split (default 2)")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    figures = measure(args.runs)
    print("one of two workers slowed to a third; of the throughput that the two speeds allow (theory)")
    print("  split     theory  slowdown  step before  step slowed  moved after  back after  rebalances")
    for run in figures["runs"]:
        after, back = (
            "-" if steps is None else f"{steps} steps" for steps in (run["steps_until_moved"], run["steps_until_back"])
        )
        print(
            f"  {run['split']:9}  {run['theory']:5.2f}  {run['slowdown']:8.2f}  {run['fast_ms']:8.0f} ms  "
            f"{run['slow_ms']:8.0f} ms  {after:>11}  {back if run['split'] == 'by speed' else '-':>10}  "
            f"{run['rebalances']:10}"
        )
    for row in figures["rows"][:-1]:
        print(f"  {row['split']:9}  {row['step_ms']:.0f} ms, {row['possible']:.2f} of the possible")
    print(f"  the same weights in all runs: {'yes' if figures['digests_equal'] else 'NO'}")
    steady = figures["steady"]
    print(f"  a steady pair, {steady['steps']} steps: {steady['rebalances']} rebalances", end="")
    print(f" (mean paces apart by a factor of {steady['pace_ratio']:.2f})")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

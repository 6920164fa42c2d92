"""Devices of unequal speed in one job: its steps a second, beside the best split that there is.

Two to five workers share 16 virtual nodes; one or two of them are two or three times slower. Devices are played: a
worker waits a fixed time for each virtual node, which needs no core, and computes a small model besides. Three runs of
each mix, in turn:

- *by speed*: virtual nodes move as measured, from an even split on;
- *even*: they stay;
- *possible*: they stay, and each worker waits in a step as long as it would with its part of the best whole-number
  split, which is found by trying all. This has the same exchange, update and noise as the other two.

The shares are throughput beside *possible*, by the median of the last 40 % of the steps: what else a machine does comes
and goes. The weights of all three must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from pathlib import Path

from benchmarks.jobs import run_job
from benchmarks.uneven import moved, read

VIRTUAL_NODES = 16
WAIT = 0.03
"""Seconds that a virtual node takes the fastest devices."""
MIXES = ((1, 3), (1, 2), (1, 1, 3), (1, 3, 1, 2), (1, 2, 1, 3, 1))
"""How many times as long each worker takes."""


@dataclass(frozen=True)
class Mix:
    """What one set of devices came to."""

    devices: str
    best: str
    """The best split."""
    got: str
    """The split at the end."""
    share: float
    """Of what is possible, by speed."""
    share_even: float
    steps_per_second: float
    moves: int
    digests_equal: bool


@dataclass(frozen=True)
class _Run:
    step: float
    """Seconds of one."""
    split: list[int]
    moves: int
    digest: str


def best_split(factors: Sequence[float]) -> list[int]:
    """How many virtual nodes each worker should have, by trying all."""
    cuts = combinations(range(1, VIRTUAL_NODES), len(factors) - 1)
    splits = ([stop - start for start, stop in pairwise((0, *cut, VIRTUAL_NODES))] for cut in cuts)
    return min(splits, key=lambda counts: max(count * factor for count, factor in zip(counts, factors, strict=True)))


def _train(waits: Sequence[float], of: str, steps: int, *options: str | int) -> _Run:
    with tempfile.TemporaryDirectory() as directory:
        script = ["benchmarks/uneven_worker.py", "--steps", steps, "--times", directory, "--of", of]
        script += ["--waits", ",".join(map(str, waits)), "--batch-size", 4 * VIRTUAL_NODES, "--width", 16]
        report, _ = run_job("--workers", len(waits), "--virtual-nodes", VIRTUAL_NODES, *options, *script)
        workers = read(Path(directory), len(waits))
    late = workers[0][-(2 * steps // 5) :]
    step = statistics.median(after.end - before.end for before, after in pairwise(late))
    return _Run(step, [each[-1].carried for each in workers], moved(report), report["digest"])


def compare(factors: Sequence[float], seconds: float) -> Mix:
    """Make the three runs of about that many seconds each."""
    waits, best = [WAIT * factor for factor in factors], best_split(factors)
    ideal = [wait * count for wait, count in zip(waits, best, strict=True)]
    steps = max(20, round(seconds / max(ideal)))
    free = _train(waits, "node", steps)
    possible = _train(ideal, "step", steps, "--rebalance-gain", 1)
    even = _train(waits, "node", steps, "--rebalance-gain", 1)
    return Mix(
        ", ".join(f"{factor:g}" for factor in factors),
        "/".join(map(str, best)),
        "/".join(map(str, free.split)),
        possible.step / free.step,
        possible.step / even.step,
        1 / free.step,
        free.moves,
        len({run.digest for run in (free, possible, even)}) == 1,
    )


def main() -> None:
    """Measure, print a table, and write the figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=16.0, help="that each run trains (default 16)")
    parser.add_argument("--quick", action="store_true", help="one mix, for 6 s a run")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    print(f"{'times as long':14}  {'best':10}  {'got':10}  share  even  steps/s  moves  weights")
    found = []
    for factors in MIXES[:1] if args.quick else MIXES:
        mix = compare(factors, 6.0 if args.quick else args.seconds)
        found.append(mix)
        print(
            f"{mix.devices:14}  {mix.best:10}  {mix.got:10}  {mix.share:5.2f}  {mix.share_even:4.2f}  "
            f"{mix.steps_per_second:7.2f}  {mix.moves:5}  {'equal' if mix.digests_equal else 'NOT EQUAL'}",
            flush=True,
        )
    if args.json is not None:
        content = {"virtual_nodes": VIRTUAL_NODES, "wait_ms": 1e3 * WAIT, "rows": [asdict(mix) for mix in found]}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

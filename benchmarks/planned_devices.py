"""What ``virtualflow plan --devices`` says of groups of unequal devices, beside the same groups as they train.

Kinds of device are processes with a CPU quota of a core (a cgroup each, so root is needed). ``virtualflow profile``
measures each kind. For random mixes, the plan gives the split and the time of a step. Each mix then trains with that
split, and with its best neighbours: those that one virtual node more on one worker and one less on another make, and
of which the profiles expect most.

A quota is granted anew each ``PERIOD``; the kernel looks every 4 ms whether it is used up. So a device runs for some 4
ms and then stands still until what it had too much is made up for. The 100 ms of a container's quota would make that
25 times as coarse, and a step of a few hundred milliseconds a matter of luck.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, permutations
from pathlib import Path

from benchmarks import given_split
from benchmarks.jobs import LIMIT, ROOT, environment, run_job
from virtualflow.protocol.device_profile import read_profile

KINDS = (0.8, 0.5, 0.3, 0.2)
"""Cores of each kind of device."""
LEAST, MOST = 0.9, 1.6
"""Cores of all devices of a mix: of two cores, something is left to the coordinator."""
WORKERS = (2, 3, 4, 5)
MIXES, SEED = 20, 1
VIRTUAL_NODES, SAMPLES = 16, 64
"""And samples of each."""
STEPS, SKIPPED = 24, 4
"""Steps that are measured, and those before them, in which workers get their quotas."""
GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD = 10_000
"""Microseconds."""


@dataclass(frozen=True)
class Row:
    """What one mix came to."""

    devices: str
    """Cores of each."""
    split: str
    """Virtual nodes of each, as planned."""
    planned: float
    """Samples a second."""
    measured: float
    """Samples a second."""
    ratio: float
    """Measured over planned."""
    neighbour: str
    """The best one, by the profiles."""
    neighbour_planned: float
    """Its throughput over that of the split, by the profiles."""
    neighbour_measured: float
    """And measured."""


def train(args: argparse.Namespace) -> None:
    """One device: train, with the quota of its number, and note when each step was through."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import virtualflow as vf

    torch.set_num_threads(1)
    torch.manual_seed(0)
    name = os.environ.get("VIRTUALFLOW_WORKER", "device-0")
    number = int(name.rsplit("-", 1)[-1])
    group = args.groups / f"{name}-{os.getpid()}"
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text(str(PERIOD))
    (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD * args.quotas[number])))

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(8 * 7 * 7, 10),
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.randn(2_048, 1, 28, 28), torch.randint(10, (2_048,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if args.profiles is None:
        enter()
    else:
        given_split.take(args.profiles, number)
    ends: list[float] = []
    batch = VIRTUAL_NODES * SAMPLES
    with vf.elastic(
        model, optimizer, data, batch_size=batch, virtual_nodes=VIRTUAL_NODES, steps=SKIPPED + STEPS
    ) as run:
        for step in run:
            if args.profiles is not None and step.number == 1:
                enter()  # all that comes before a training takes no part of it
            carried = 0
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
                carried += 1
            ends.append(time.monotonic())
    (args.times / f"{number}.json").write_text(json.dumps({"carried": carried, "ends": ends}))


def profile(groups: Path, quota: float, path: Path) -> None:
    """Measure a kind of device."""
    command = [sys.executable, "-m", "virtualflow", "profile", "--sizes", "1", "--out", str(path)]
    command += ["-m", "benchmarks.planned_devices", "--groups", str(groups), "--quotas", str(quota)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=LIMIT
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")


def plan(devices: Sequence[float], profiles: Path) -> tuple[list[int], float]:
    """The split over all these, fastest first, and the seconds that a step computes."""
    counts = Counter(devices)
    asked = ",".join(f"{file_of(kind)}:{counts[kind]}" for kind in sorted(counts, reverse=True))
    command = [sys.executable, "-m", "virtualflow", "plan", "--json", "--devices", asked]
    command += [str(profiles / file_of(kind)) for kind in KINDS]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True, timeout=LIMIT
    )
    everything = json.loads(done.stdout)["advice"]["everything"]
    return [count for share in everything["shares"] for count in share["virtual_nodes"]], everything["seconds"]


def file_of(kind: float) -> str:
    """Its profile, by which it is named: all of them have the same processor."""
    return f"{kind:.2f}-of-a-core.json"


def mixes(number: int) -> Iterator[tuple[float, ...]]:
    """Random mixes of at least two kinds, each once, the fastest devices first."""
    draw, seen = random.Random(SEED), set()
    while len(seen) < number:
        mix = tuple(sorted(draw.choices(KINDS, k=draw.choice(WORKERS)), reverse=True))
        if LEAST <= sum(mix) <= MOST + 1e-9 and len(set(mix)) > 1 and mix not in seen:
            seen.add(mix)
            yield mix


def neighbours(counts: Sequence[int], seconds: Sequence[float]) -> list[tuple[list[int], float]]:
    """All splits that one virtual node elsewhere makes, with the seconds of a step, the shortest first.

    Args:
        counts: virtual nodes of each worker.
        seconds: of a virtual node, for each worker.
    """
    found = []
    for giver, taker in permutations(range(len(counts)), 2):
        # Between two workers that are alike and have one more and one less, it is the same split.
        if counts[giver] == 1 or (seconds[giver] == seconds[taker] and counts[giver] == counts[taker] + 1):
            continue
        other = [count - (each == giver) + (each == taker) for each, count in enumerate(counts)]
        found.append((other, max(count * one for count, one in zip(other, seconds, strict=True))))
    return sorted(found, key=lambda each: each[1])


def run(groups: Path, devices: Sequence[float], counts: Sequence[int], profiles: Path) -> float:
    """Train with that split; the median seconds of a step."""
    with tempfile.TemporaryDirectory() as directory:
        given_split.write_profiles(profiles / file_of(KINDS[0]), counts, Path(directory))
        times = Path(directory) / "times"
        times.mkdir()
        script = ["-m", "benchmarks.planned_devices", "--groups", groups, "--quotas", ",".join(map(str, devices))]
        script += ["--profiles", directory, "--times", times]
        run_job("--workers", len(devices), "--virtual-nodes", VIRTUAL_NODES, *map(str, script))
        found = [json.loads((times / f"{number}.json").read_text()) for number in range(len(devices))]
    if [each["carried"] for each in found] != [*counts]:
        sys.exit(f"the split is {[each['carried'] for each in found]}, not {counts}")
    ends = found[0]["ends"][SKIPPED - 1 :]
    return statistics.median(after - before for before, after in pairwise(ends))


def compare(groups: Path, devices: Sequence[float], profiles: Path) -> Row:
    """Measure one mix."""
    counts, seconds = plan(devices, profiles)
    each = [read_profile(profiles / file_of(kind)).sizes[0].seconds for kind in devices]
    other, expected = neighbours(counts, each)[0]
    measured, neighbour = (run(groups, devices, one, profiles) for one in (counts, other))
    return Row(
        ", ".join(f"{kind:g}" for kind in devices),
        "/".join(map(str, counts)),
        VIRTUAL_NODES * SAMPLES / seconds,
        VIRTUAL_NODES * SAMPLES / measured,
        seconds / measured,
        "/".join(map(str, other)),
        seconds / expected,
        measured / neighbour,
    )


def measure(groups: Path, profiles: Path, number: int) -> list[Row]:
    """All mixes."""
    for kind in KINDS:
        profile(groups, kind, profiles / file_of(kind))
        seconds = read_profile(profiles / file_of(kind)).sizes[0].seconds
        print(f"{kind:g} of a core: {1e3 * seconds:.1f} ms for a virtual node", flush=True)
    print(f"{'cores':24}  {'split':10}  planned  measured  ratio  {'neighbour':10}  planned  measured")
    rows = []
    for devices in mixes(number):
        rows.append(row := compare(groups, devices, profiles))
        print(
            f"{row.devices:24}  {row.split:10}  {row.planned:7.0f}  {row.measured:8.0f}  {row.ratio:5.2f}  "
            f"{row.neighbour:10}  {row.neighbour_planned:7.2f}  {row.neighbour_measured:8.2f}",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure, print a table, and write the figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two mixes")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--groups", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--quotas", type=lambda text: [*map(float, text.split(","))], help=argparse.SUPPRESS)
    parser.add_argument("--profiles", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--times", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.groups is not None:
        train(args)
        return
    if not os.access(GROUPS, os.W_OK):
        content: dict[str, object] = {"rows": [], "skipped": f"{GROUPS} cannot be written to"}
    else:
        groups = GROUPS / f"virtualflow-{os.getpid()}"
        groups.mkdir()
        try:
            with tempfile.TemporaryDirectory() as directory:
                rows = measure(groups, Path(directory), 2 if args.quick else MIXES)
        finally:
            for group in groups.iterdir():
                if group.is_dir():
                    group.rmdir()
            groups.rmdir()
        content = {"virtual_nodes": VIRTUAL_NODES, "rows": [asdict(row) for row in rows]}
    if args.json is not None:
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

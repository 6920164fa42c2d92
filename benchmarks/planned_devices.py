"""What ``virtualflow plan --devices`` says of groups of unequal devices, beside the same groups as they train.

Kinds of device are processes with a CPU quota of a core (a cgroup each, so root is needed). ``virtualflow profile``
measures the kinds of a random mix together, just before it trains. The plan gives the split and the time of a step. The
mix then trains with that split, and with its best neighbour: of those that one virtual node more on one worker and one
less on another make, the one of which the profiles expect most.

A quota is granted anew each ``PERIOD``. A worker that has used it up when a message comes answers in the next one, so
an exchange takes some periods, which no plan knows. The 100 ms of a container's quota would make that 20 times as long.

A core of a shared machine is not as fast now as in a minute. So the same mixes are also *played*: a device waits a
fixed time for each virtual node and computes next to nothing. This shows the plan without the machine's moods.
"""

from __future__ import annotations

import argparse
import contextlib
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
from benchmarks.jobs import LIMIT, ROOT, environment, run_job, running
from virtualflow.protocol.device_profile import read_profile

KINDS = (0.8, 0.5, 0.3, 0.2)
"""Cores of each kind of device."""
LEAST, MOST = 0.9, 1.6
"""Cores of all devices of a mix: of two cores, something is left to the coordinator."""
WORKERS = (2, 3, 4, 5)
MIXES, SEED = 20, 1
VIRTUAL_NODES, SAMPLES = 16, 128
"""And samples of each."""
STEPS, SKIPPED = 15, 3
"""Steps that are measured, and those before them, in which workers get their quotas."""
GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD = 5_000
"""Microseconds; the kernel grants at least 1,000 of them."""
WAIT, PLAYED_SAMPLES = 0.03, 2
"""Seconds that a played device as fast as a whole core waits for a virtual node, and samples of that."""


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
    number = args.number
    if number is None:
        number = int(os.environ["VIRTUALFLOW_WORKER"].rsplit("-", 1)[-1])
    groups = [args.groups / str(each) for each in range(len(args.devices))] if args.groups is not None else None
    wait = WAIT / args.devices[number] if groups is None else 0.0
    size = PLAYED_SAMPLES if groups is None else SAMPLES
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(8 * 7 * 7, 10),
    )  # fmt: skip
    batch = VIRTUAL_NODES * size
    samples = 2 * batch  # of which no step is shorter
    data = torch.utils.data.TensorDataset(torch.randn(samples, 1, 28, 28), torch.randint(10, (samples,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if args.profiles is not None:
        given_split.take(args.profiles, number)
    ends: list[float] = []
    with (
        contextlib.ExitStack() as stack,
        vf.elastic(model, optimizer, data, batch_size=batch, virtual_nodes=VIRTUAL_NODES, steps=SKIPPED + STEPS) as run,
    ):
        for step in run:
            if step.number == 1 and groups is not None:  # all that comes before takes no part of it
                stack.callback(enter, GROUPS)
                restrict(groups[number], args.devices[number])
                meet(groups)
            carried = 0
            for x, y in step:
                time.sleep(wait)
                F.cross_entropy(model(x), y).backward()
                carried += 1
            ends.append(time.monotonic())
        (args.times / f"{number}.json").write_text(json.dumps({"carried": carried, "ends": ends}))


def restrict(group: Path, cores: float) -> None:
    """Give this process a part of a core from now on."""
    group.mkdir(exist_ok=True)
    (group / "cpu.cfs_period_us").write_text(str(PERIOD))
    (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD * cores)))
    enter(group)


def enter(group: Path) -> None:
    """Count this process there."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def meet(groups: Sequence[Path]) -> None:
    """Wait until a process is in each: one that still imports modules takes more than its part."""
    limit = time.monotonic() + LIMIT
    while not all(group.is_dir() and (group / "cgroup.procs").read_text() for group in groups):
        if time.monotonic() > limit:
            sys.exit("another device did not start")
        time.sleep(0.01)


def script_of(groups: Path | None, devices: Sequence[float]) -> list[str]:
    """What each device runs."""
    of_groups = [] if groups is None else ["--groups", str(groups)]
    return ["-m", "benchmarks.planned_devices", *of_groups, "--devices", ",".join(map(str, devices))]


def profile(groups: Path | None, devices: Sequence[float], profiles: Path) -> None:
    """Measure the kinds of a mix, with as many processes as it has devices: cores are as busy as in the training.

    A core that stands still in between is slower when it goes on: alone, a tenth of a core took 8 ms of CPU time for
    what took it 5.5 ms in a mix.
    """
    with contextlib.ExitStack() as stack:
        measuring = []
        for number, kind in enumerate(devices):
            alike = devices.index(kind) != number
            path = profiles / (f"{number}.json" if alike else file_of(kind))
            command = [sys.executable, "-m", "virtualflow", "profile", "--sizes", "1", "--out", str(path)]
            command += [*script_of(groups, devices), "--number", str(number)]
            log = stack.enter_context(path.with_suffix(".log").open("w+"))
            measuring.append((subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log), log))
        with running(*(process for process, _ in measuring)):
            for process, log in measuring:
                if process.wait(LIMIT):
                    log.seek(0)
                    sys.exit(f"a device was not measured:\n{log.read()}")


def plan(devices: Sequence[float], profiles: Path) -> tuple[list[int], float]:
    """The split over all these, fastest first, and the seconds that a step computes."""
    counts = Counter(devices)
    asked = ",".join(f"{file_of(kind)}:{counts[kind]}" for kind in sorted(counts, reverse=True))
    command = [sys.executable, "-m", "virtualflow", "plan", "--json", "--devices", asked]
    command += [str(profiles / file_of(kind)) for kind in counts]
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


def neighbours(
    counts: Sequence[int], seconds: Sequence[float], beside: Sequence[float]
) -> list[tuple[list[int], float]]:
    """All splits that one virtual node elsewhere makes, with the seconds of a step, the shortest first.

    Args:
        counts: virtual nodes of each worker.
        seconds: of a virtual node, for each worker.
        beside: what a step takes beside them.
    """
    found = []
    for giver, taker in permutations(range(len(counts)), 2):
        # Between two workers that are alike and have one more and one less, it is the same split.
        if counts[giver] == 1 or (seconds[giver] == seconds[taker] and counts[giver] == counts[taker] + 1):
            continue
        other = [count - (each == giver) + (each == taker) for each, count in enumerate(counts)]
        steps = (once + count * one for once, count, one in zip(beside, other, seconds, strict=True))
        found.append((other, max(steps)))
    return sorted(found, key=lambda each: each[1])


def run(groups: Path | None, devices: Sequence[float], counts: Sequence[int], profiles: Path) -> float:
    """Train with that split; the median seconds of a step."""
    with tempfile.TemporaryDirectory() as directory:
        given_split.write_profiles(profiles / file_of(devices[0]), counts, Path(directory))
        times = Path(directory) / "times"
        times.mkdir()
        script = [*script_of(groups, devices), "--profiles", directory, "--times", str(times)]
        run_job("--workers", len(devices), "--virtual-nodes", VIRTUAL_NODES, *script)
        found = [json.loads((times / f"{number}.json").read_text()) for number in range(len(devices))]
    if [each["carried"] for each in found] != [*counts]:
        sys.exit(f"the split is {[each['carried'] for each in found]}, not {counts}")
    ends = found[0]["ends"][SKIPPED - 1 :]
    return statistics.median(after - before for before, after in pairwise(ends))


def compare(groups: Path | None, devices: Sequence[float], profiles: Path) -> Row:
    """Measure one mix; without ``groups``, of played devices."""
    profile(groups, devices, profiles)
    counts, seconds = plan(devices, profiles)
    known = [read_profile(profiles / file_of(kind)) for kind in devices]
    each, beside = [one.sizes[0].seconds for one in known], [one.step_seconds or 0.0 for one in known]
    other, expected = neighbours(counts, each, beside)[0]
    measured, neighbour = (run(groups, devices, one, profiles) for one in (counts, other))
    samples = VIRTUAL_NODES * (PLAYED_SAMPLES if groups is None else SAMPLES)
    return Row(
        ", ".join(f"{kind:g}" for kind in devices),
        "/".join(map(str, counts)),
        samples / seconds,
        samples / measured,
        seconds / measured,
        "/".join(map(str, other)),
        seconds / expected,
        measured / neighbour,
    )


def measure(groups: Path | None, number: int) -> list[Row]:
    """So many mixes; without ``groups``, of played devices."""
    print(f"{'cores':24}  {'split':10}  planned  measured  ratio  {'neighbour':10}  planned  measured")
    rows = []
    for devices in mixes(number):
        with tempfile.TemporaryDirectory() as profiles:
            rows.append(row := compare(groups, devices, Path(profiles)))
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
    parser.add_argument("--devices", type=lambda text: [*map(float, text.split(","))], help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--profiles", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--times", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.devices is not None:
        train(args)
        return
    if not os.access(GROUPS, os.W_OK):
        content: dict[str, object] = {"rows": [], "skipped": f"{GROUPS} cannot be written to"}
    else:
        groups = GROUPS / f"virtualflow-{os.getpid()}"
        groups.mkdir()
        try:
            number = 2 if args.quick else MIXES
            rows, played = (measure(place, number) for place in (groups, None))
        finally:
            for group in groups.iterdir():
                if group.is_dir():
                    group.rmdir()
            groups.rmdir()
        content = {
            "virtual_nodes": VIRTUAL_NODES,
            "rows": [asdict(row) | {"played": asdict(other)} for row, other in zip(rows, played, strict=True)],
        }
    if args.json is not None:
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

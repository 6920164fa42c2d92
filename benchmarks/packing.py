"""Two jobs on one device whose exchanges are slow: in turns, sharing it as it comes, and one after the other.

Each job has two workers, its coordinator and a network namespace of its own, whose loopback is limited. The device is
one core, to which all of them and the turn server are pinned. While a job's gradients are on their way its workers
leave the core, and the question is how much of that the other job gets.

Two cases ask for what a core and enough memory do not: memory that holds one job at its most beside another one at
rest, and not both at their most (a memory cgroup of both jobs, so root is needed); and a device that does not
interrupt a kernel (``played_kernels``), beside which the jobs have two cores for all else.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import truediv
from pathlib import Path
from typing import Any

from benchmarks.jobs import LIMIT, ROOT, environment, running
from benchmarks.overlap import in_namespace
from benchmarks.tasks import TASKS, VIRTUAL_NODES

TEXT = """\
One core runs both jobs: each has two workers, a coordinator and a network namespace with a limited loopback.
*Computing* is the share of a core that a job alone uses. *Throughput* sums the jobs' speeds, each relative to its speed
alone, while both are warm; median and range of three rounds. One after the other is 1. *Without turns* the kernel
shares the core. *Digests* counts different digests: 1 is right."""
LIMITS = """\
Jobs as above. *Computing* is the share of a core that a job alone uses; one after the other is a throughput of 1.
*Memory for one peak*: the limit of both jobs together (a memory cgroup, no swap) lies midway between one job's peak
beside the other's rest, and two peaks. *Killed* workers went over it, in turns and without, in all rounds. Their jobs
go on with the other worker until a new one has started. *No preemption*: a played device runs one kernel at a time to
its end, first come, first served. The jobs have two cores for all else. No real one was tried."""
OWN_LOAD = 6
"""Processes of a measurement that may be ready at a time."""
BUSY = """

Other programs ran (load {load:.0f})."""

WORKERS = 2
WARM_UP = 8
"""The first of so many parts of a job's steps does not count."""
LEAST = 5
"""Steps of a job from which its speed is told."""
GROUPS = Path("/sys/fs/cgroup/memory")
PAUSE = 0.01
"""Seconds between two looks at the memory of jobs."""
UNMAPPED = 1 << 20
"""Bytes from which the C library gives a freed tensor back to the kernel at once, as it does by default up to the first
one that is freed."""


@dataclass(frozen=True)
class Job:
    """One of two."""

    task: str
    steps: int
    """So many that both take about as long."""
    megabits: int
    """A second, that its loopback carries."""
    virtual_nodes: int = VIRTUAL_NODES


@dataclass(frozen=True)
class Case:
    """Two jobs, and what they share."""

    title: str
    jobs: tuple[Job, Job]
    memory: bool = False
    """Whether their memory has a limit that both together go over, and one beside the other at rest does not."""
    kernels: bool = False
    """Whether their device runs one kernel at a time to its end; else it is a core."""


CHARACTERS = Job("charlm", 64, 250)
SENDING, COMPUTING = Job("digits", 48, 8), Job("charlm", 64, 2_000)
LARGE = Job("activations", 24, 8, WORKERS)
SHORT, LONG = Job("digits", 40, 8), Job("activations", 32, 2_000, WORKERS)
CASES = (
    Case("alike", (CHARACTERS, CHARACTERS)),
    Case("exchange-bound beside compute-bound", (SENDING, COMPUTING)),
)
LIMITED = (
    Case("memory for one peak", (LARGE, LARGE), memory=True),
    Case("no preemption, short kernels beside long ones", (SHORT, LONG), kernels=True),
)


@dataclass(frozen=True)
class Ran:
    """A job that has ended."""

    digest: str
    times: tuple[float, ...]
    """When each of its steps was done, on a clock that jobs share."""
    busy: float
    """The share of a core that its workers use."""


@dataclass
class Memory:
    """What the jobs of one run have together: a memory cgroup.

    Args:
        limit: in bytes; ``None``: there is none.
    """

    limit: int | None = None
    used: list[tuple[float, int]] = field(default_factory=list)
    """When, and how many bytes, without files that could be dropped."""
    killed: int = 0
    """Processes that the kernel has killed for want of memory."""

    @contextlib.contextmanager
    def group(self) -> Iterator[Path]:
        """The group, as long as the block lasts."""
        group = GROUPS / f"virtualflow-{os.getpid()}"
        group.mkdir()
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(group, ended))
        watch.start()
        try:
            if self.limit is not None:
                (group / "memory.limit_in_bytes").write_text(str(self.limit))
            yield group
        finally:
            ended.set()
            watch.join()
            self.killed = _entry(group / "memory.oom_control", "oom_kill")
            group.rmdir()

    def _watch(self, group: Path, ended: threading.Event) -> None:
        while not ended.wait(PAUSE):
            self.used.append((time.monotonic(), _entry(group / "memory.stat", "rss")))


def _entry(path: Path, name: str) -> int:
    """A number of one of the kernel's files of ``name number`` lines."""
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == name)


def shaping(megabits: int) -> str:
    """What limits the loopback of the namespace that it is run in, and lets it save up next to nothing."""
    limit = f"tc qdisc add dev lo root tbf rate {megabits}mbit burst 16kb limit 64mb"
    return f"ip link set lo mtu 9000 && {limit}"  # a packet is not to be larger than the burst


def pinned(cores: int, *command: str) -> list[str]:
    """A command on so many cores, the first ones that this process may use."""
    return ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores])), *command]


@contextlib.contextmanager
def turn_server(directory: Path, cores: int) -> Iterator[Path]:
    """One that serves as long as the block lasts: its socket."""
    path = directory / "turns"
    server = subprocess.Popen(
        pinned(cores, sys.executable, "-m", "virtualflow", "turns", str(path)),
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.DEVNULL,
    )
    with running(server):
        limit = time.monotonic() + LIMIT
        while not path.is_socket():
            if server.poll() is not None or time.monotonic() > limit:
                sys.exit("the turn server did not start")
            time.sleep(0.05)
        yield path


def run_jobs(wanted: Sequence[Job], *, turns: bool, kernels: bool = False, memory: Memory | None = None) -> list[Ran]:
    """Run jobs at the same time to their ends.

    Args:
        turns: whether they take turns.
        kernels: whether their device runs one kernel at a time; it is a core otherwise.
        memory: what they have together.
    """
    cores = 2 if kernels else 1
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = ["--turns", str(stack.enter_context(turn_server(directory, cores)))] if turns else []
        device = ["--device", str(directory / "device")] if kernels else []
        group = stack.enter_context(memory.group()) if memory is not None else None
        processes = []
        for n, job in enumerate(wanted):
            sizes = map(str, (job.steps, job.virtual_nodes))
            script = ("benchmarks/packed_job.py", job.task, *sizes, str(directory / f"{n}.times"), *device)
            report = ("--report", str(directory / f"{n}.report"), "--rebalance-gain", "1", "--name", f"packed-{n}")
            command = [sys.executable, "-m", "virtualflow", "run", "--plain", "--workers", str(WORKERS), *report]
            whole = in_namespace(shaping(job.megabits), *pinned(cores, *command, *options, *script))
            more = {}
            if group is not None:
                whole = ["sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh", *whole]
                more = {"MALLOC_MMAP_THRESHOLD_": UNMAPPED}
            log = stack.enter_context((directory / f"{n}.log").open("w"))
            processes.append(subprocess.Popen(whole, cwd=ROOT, env=environment(**more), stdout=log, stderr=log))
        with running(*processes):
            codes = [process.wait(LIMIT) for process in processes]
        if any(codes):
            sys.exit("\n".join((directory / f"{n}.log").read_text()[-4_000:] for n in range(len(wanted))))
        return [read_ran(directory, n) for n in range(len(wanted))]


def read_ran(directory: Path, n: int) -> Ran:
    """What the ``n``-th job has left there."""
    lines = [line.split() for line in (directory / f"{n}.times").read_text().splitlines()]
    times, computed = ([float(each) for each in column] for column in zip(*lines, strict=True))
    warm = len(times) // WARM_UP
    return Ran(
        json.loads((directory / f"{n}.report").read_text())["digest"],
        tuple(times),
        WORKERS * (computed[-1] - computed[warm]) / (times[-1] - times[warm]),
    )


def rates(jobs: Sequence[Ran]) -> list[float]:
    """Steps per second of each, from when all are warm until the first of them ends."""
    begin = max(job.times[len(job.times) // WARM_UP] for job in jobs)
    end = min(job.times[-1] for job in jobs)
    found = []
    for job in jobs:
        there = [at for at in job.times if begin <= at <= end]
        if len(there) < LEAST:
            sys.exit(f"two jobs were warm together for {len(there)} steps only; let the one that ended first make more")
        found.append((len(there) - 1) / (there[-1] - there[0]))
    return found


def peak_and_rest(job: Ran, memory: Memory) -> tuple[int, int]:
    """The most that a job alone had, and what it has between the peaks of its steps, in bytes."""
    warm = sorted(used for at, used in memory.used if job.times[len(job.times) // WARM_UP] <= at <= job.times[-1])
    return max(used for _, used in memory.used), warm[len(warm) // 10]


def measure_case(case: Case, rounds: int) -> dict[str, Any]:
    """The row of a case."""
    alone: list[list[Ran]] = []
    together: dict[str, list[list[Ran]]] = {"shared": [], "turns": []}
    killed = dict.fromkeys(together, 0)
    limits: dict[str, int] = {}
    for number in range(rounds):
        single: dict[Job, Ran] = {}
        for job in dict.fromkeys(case.jobs):
            memory = Memory() if case.memory else None
            single[job] = run_jobs([job], turns=False, kernels=case.kernels, memory=memory)[0]
            if memory is not None and not limits:
                peak, rest = peak_and_rest(single[job], memory)
                limits = {"peak": peak, "rest": rest, "limit": (3 * peak + rest) // 2}
        alone.append([single[job] for job in case.jobs])
        for side in list(together) if number % 2 == 0 else list(together)[::-1]:
            memory = Memory(limits["limit"]) if case.memory else None
            together[side].append(run_jobs(case.jobs, turns=side == "turns", kernels=case.kernels, memory=memory))
            killed[side] += memory.killed if memory is not None else 0
    row = {"jobs": f"{case.title}: " + " and ".join(TASKS[job.task].title for job in case.jobs)}
    row |= summarize([job.megabits for job in case.jobs], alone, together)
    return row | ({"memory": limits, "killed": killed} if case.memory else {})


def summarize(
    megabits: Sequence[int], alone: Sequence[Sequence[Ran]], together: Mapping[str, Sequence[Sequence[Ran]]]
) -> dict[str, Any]:
    """What rounds of a case come to: medians, and each round's sum of relative speeds."""
    single = [[rates([job])[0] for job in jobs] for jobs in alone]
    found = {side: [rates(jobs) for jobs in ran] for side, ran in together.items()}
    ran = [*alone, *(jobs for side in together.values() for jobs in side)]
    row: dict[str, Any] = {
        "megabits": list(megabits),
        "computing": [statistics.median(job.busy for job in jobs) for jobs in zip(*alone, strict=True)],
        "alone_ms": [1_000 / statistics.median(rate) for rate in zip(*single, strict=True)],
        "rounds": {"alone": single, **found},
        "digests": [len({job.digest for job in jobs}) for jobs in zip(*ran, strict=True)],
    }
    for side, rate in found.items():
        sums = [sum(map(truediv, both, own)) for both, own in zip(rate, single, strict=True)]
        row[f"{side}_ratio"], row[f"{side}_range"] = statistics.median(sums), [min(sums), max(sums)]
        row[f"{side}_ms"] = [1_000 / statistics.median(each) for each in zip(*rate, strict=True)]
    return row


def measure(cases: Sequence[Case], text: str, quick: bool) -> dict[str, Any]:
    """Each case; nothing but the reason where the machine cannot do it."""
    try:
        done = subprocess.run(
            in_namespace(shaping(500), "true"), capture_output=True, text=True, check=False, timeout=30
        )
    except FileNotFoundError as error:
        return {"skipped": f"{error.filename} is missing; install util-linux, iproute2", "rows": []}
    if done.returncode != 0:
        return {
            "skipped": f"no network namespace with a limited loopback can be made here ({done.stderr.strip()})",
            "rows": [],
        }
    if any(case.memory for case in cases) and not os.access(GROUPS, os.W_OK):
        return {"skipped": f"no memory cgroup can be made in {GROUPS}; run it as root", "rows": []}
    rounds, rows = 1 if quick else 3, []
    for case in cases:
        row = measure_case(case, rounds)
        told = f", {row['memory']}, killed: {row['killed']}" if case.memory else ""
        print(
            f"  {row['jobs']}: shared x {row['shared_ratio']:.2f}, turns x {row['turns_ratio']:.2f}, "
            f"digests {row['digests']}{told}",
            flush=True,
        )
        rows.append(row)
    load = os.getloadavg()[2]
    return {
        "settings": {"rounds": rounds, "workers": WORKERS},
        "text": text + (BUSY.format(load=load) if load > OWN_LOAD else ""),
        "rows": rows,
    }

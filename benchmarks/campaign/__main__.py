"""``make campaign``: ``python -m benchmarks.campaign --faults 2000``."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.campaign.checker import Commit, check
from benchmarks.campaign.faults import HANGS, KINDS, draw
from benchmarks.campaign.hosts import make_bridge
from benchmarks.campaign.job import ROOT, TRAINEE, Job

INSIDE = "CAMPAIGN_INSIDE"
PATIENCE = 180.0
"""Seconds after a fault within which the training must have gone on."""


def main() -> int:
    """Run jobs until so many faults are done; the exit code is 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__)
    parser.add_argument("--faults", type=int, default=60, help="how many (60)")
    parser.add_argument("--per-job", type=int, default=12, help="faults of one job (12)")
    parser.add_argument("--workers", type=int, default=3, help="of each job (3)")
    parser.add_argument("--seed", type=int, default=0, help="of the first job; the next one has the next (0)")
    parser.add_argument("--kinds", default="", help=f"some of {','.join(KINDS)}; by default all but {HANGS}")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "campaign.json", help="the report")
    options = parser.parse_args()
    missing = why_not()
    if missing is not None:
        sys.stderr.write(f"the campaign parts network namespaces, and {missing}\n")
        return 2
    if INSIDE not in os.environ:
        return enter()
    kinds = tuple(options.kinds.split(",")) if options.kinds else tuple(kind for kind in KINDS if kind != HANGS)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        parser.error(f"there is no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    subprocess.run(["mount", "-t", "tmpfs", "campaign", "/run/netns"], check=True)
    make_bridge()
    report = Report(options.out)
    done = 0
    while done < options.faults:
        count = min(options.per_job, options.faults - done)
        with tempfile.TemporaryDirectory(prefix="vf-campaign-") as directory:
            run_job(Path(directory), options.workers, options.seed + report.jobs, count, kinds, report)
        done += count
        report.write()
    sys.stdout.write(report.table())
    return 1 if report.faults else 0


def why_not() -> str | None:
    """What is missing here, in a few words."""
    if os.geteuid() != 0:
        return "that takes root: run make campaign as root"
    tools = [tool for tool in ("ip", "iptables", "tc", "unshare", "mount") if shutil.which(tool) is None]
    return f"{', '.join(tools)} cannot be found: install iproute2, iptables and util-linux" if tools else None


def enter() -> int:
    """Go on in namespaces of this driver's own, with which all that it starts ends."""
    Path("/run/netns").mkdir(exist_ok=True)
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    again = [*words, sys.executable, "-m", "benchmarks.campaign", *sys.argv[1:]]

    def die_together() -> None:
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: unshare then kills its child

    process = subprocess.Popen(again, env={**os.environ, INSIDE: "1"}, preexec_fn=die_together)  # noqa: PLW1509
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.kill()
        return 130


class Report:
    """What the jobs so far have shown."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs = self.steps = self.digests = self.repeated = self.lineages = self.anew = 0
        self.kinds: dict[str, list[float]] = defaultdict(list)
        """The pauses of each kind, in seconds."""
        self.faults: list[str] = []

    def write(self) -> None:
        """JSON, for whoever reads it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kinds = {kind: {"faults": len(pauses), "longest_pause": max(pauses)} for kind, pauses in self.kinds.items()}
        values = {key: value for key, value in vars(self).items() if key not in {"path", "kinds"}}
        self.path.write_text(json.dumps({**values, "kinds": kinds}, indent=1) + "\n")

    def table(self) -> str:
        """Markdown."""
        lines = ["| fault | times | longest pause (s) |", "| --- | --- | --- |"]
        lines += [f"| {KINDS[kind]} | {len(p)} | {max(p):.1f} |" for kind, p in sorted(self.kinds.items())]
        faults = sum(map(len, self.kinds.values()))
        lines += [
            "",
            f"{faults} faults in {self.jobs} jobs with {self.steps} steps: {self.digests} digests compared, "
            f"{self.repeated} steps repeated, {self.anew} jobs begun anew, {len(self.faults)} things wrong",
            *self.faults,
        ]
        return "\n".join(lines) + "\n"


def run_job(directory: Path, workers: int, seed: int, count: int, kinds: tuple[str, ...], report: Report) -> None:
    """One job with its faults, one after the other, each undone and recovered from before the next."""
    job = Job(directory / "job", workers)
    report.jobs += 1
    wrong: list[str] = []
    try:
        if not goes_on(job, 0):
            wrong.append("the job does not begin")
        else:
            for fault in draw(seed, count, kinds):
                before, at = job.newest()
                job.inject(fault)
                reached = job.newest()[0]
                if not goes_on(job, max(before, reached) + 1):
                    reason = job.ask(job.hosts[job.leading], "status").get("reason")
                    wrong.append(f"nobody goes on after {asdict(fault)}: {reason}")
                    break
                pause = longest_pause(job.log(), at)
                report.kinds[fault.kind].append(pause)
                sys.stderr.write(f"seed {seed}: {fault.kind} ({fault.seconds:.1f} s): a pause of {pause:.1f} s\n")
        judge(job, directory, report, wrong)
    finally:
        if wrong:
            kept = report.path.parent / f"campaign-seed-{seed}"
            shutil.copytree(directory, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("volume"))
        job.close()
    report.faults += [f"seed {seed}: {sentence}" for sentence in wrong]


def goes_on(job: Job, beyond: int) -> bool:
    """Wait until a step after that one is committed, and as many workers train as the job is to have."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        status = job.look_after()
        training = [one for one in status.get("workers", []) if one["state"] == "training"]
        if job.newest()[0] > beyond and len(training) == job.wanted:
            return True
        time.sleep(0.5)
    return False


def longest_pause(log: list[dict[str, Any]], since: float) -> float:
    """Seconds between two steps that anybody has committed, from then on."""
    times = sorted(line["at"] for line in log if line["at"] >= since)
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def judge(job: Job, directory: Path, report: Report, wrong: list[str]) -> None:
    """Compare what was written down with what must hold."""
    log = job.log()
    lines = [
        Commit(line["process"], tuple(line["generation"]), line["step"], line["leader"], line["digest"]) for line in log
    ]
    steps = max((line.step for line in lines), default=0)
    verdict = check(job.audit(), lines, undisturbed(directory, steps), frozenset(job.anew))
    report.steps += verdict.steps
    report.digests += verdict.digests
    report.repeated += verdict.repeated
    report.lineages = max(report.lineages, verdict.lineages)
    report.anew += len(job.anew)
    wrong += verdict.faults


def undisturbed(directory: Path, steps: int) -> list[str]:
    """The digests of one worker that nothing happens to."""
    log = directory / "alone"
    log.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "trainer"), "CAMPAIGN_LOG": str(log), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(TRAINEE), str(steps), "0"]
    subprocess.run(words, env=environment, check=True, capture_output=True, timeout=600)
    return [json.loads(line)["digest"] for line in (log / "alone.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())

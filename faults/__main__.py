"""``make campaign``: ``python -m faults --faults 2000``."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.results import commit

from faults.kinds import KINDS
from faults.report import CampaignReport, JobFindings
from virtualflow.progress import ProgressBar

ROOT = Path(__file__).parents[1]
TRAINEE = Path(__file__).parent / "trainee.py"
STEPS_PER_FAULT = 300
"""Of the undisturbed run: more than a job makes between two faults."""
JOB_LIMIT = 1_800.0
"""Seconds after which a job's driver is taken to hang."""
LAST_WORDS = 10.0
"""Seconds that what a job has said may take after its end: all that could speak ends with it."""


def main() -> int:
    """Run jobs until so many faults are done, with those of earlier calls; the exit code is 1 if anything was wrong."""
    options = parse()
    missing = why_not()
    if missing is not None:
        sys.stderr.write(f"the campaign parts network namespaces, and {missing}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = CampaignReport(options.out)
    campaign = Campaign(options, report, undisturbed(options.out.parent, options.per_job * STEPS_PER_FAULT))
    try:
        campaign.run()
    except KeyboardInterrupt:
        return 130
    finally:
        campaign.end()
        sys.stdout.write(report.table())
    return 1 if report.wrong else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=60, help="how many in all, with those in the report (60)")
    parser.add_argument("--per-job", type=int, default=24, help="faults of one job (24)")
    parser.add_argument("--jobs", type=int, default=2, help="jobs side by side (2)")
    parser.add_argument("--workers", type=int, default=3, help="of each job (3)")
    parser.add_argument(
        "--pairs", type=float, default=0.2, help="how likely another fault comes at the same time (0.2)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first job; the next one has the next (0)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"some of {','.join(KINDS)}; by default all")
    out = ROOT / "build" / "campaign.json"
    parser.add_argument("--out", type=Path, default=out, help="the report; what is there already counts")
    options = parser.parse_args()
    options.kinds = options.kinds.split(",")
    unknown = [kind for kind in options.kinds if kind not in KINDS]
    if unknown:
        parser.error(f"there is no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    options.out = options.out.absolute()
    return options


def why_not() -> str | None:
    """What is missing here, in a few words."""
    if os.geteuid() != 0:
        return "that takes root: run make campaign as root"
    tools = [
        tool for tool in ("ip", "iptables", "iptables-restore", "tc", "unshare", "mount") if not shutil.which(tool)
    ]
    if tools:
        return f"{', '.join(tools)} cannot be found: install iproute2, iptables and util-linux"
    tried = subprocess.run([*ALONE, "iptables", "-S"], capture_output=True, check=False, text=True, timeout=60)
    return f"that is not allowed here: {tried.stderr.strip()}" if tried.returncode else None


ALONE = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""In namespaces of its own, with which all that it starts ends."""


def environment() -> dict[str, str]:
    """Of all processes: one thread, one hash seed, this tree's library."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "trainer")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def undisturbed(directory: Path, steps: int) -> Path:
    """A file with the digests of one worker that nothing happens to; made if there is none of this library yet."""
    code = b"".join(path.read_bytes() for path in sorted((ROOT / "trainer").rglob("*.py"))) + TRAINEE.read_bytes()
    key = hashlib.sha256(code + importlib.metadata.version("torch").encode()).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"campaign-digests-{key}-{steps}.json"
    if not path.exists():
        with tempfile.TemporaryDirectory(prefix="vf-campaign-") as log:
            words = [sys.executable, str(TRAINEE), str(steps), "0"]
            variables = {**environment(), "CAMPAIGN_LOG": log}
            subprocess.run(words, env=variables, check=True, stdout=sys.stderr, timeout=900)
            lines = (Path(log) / "alone.jsonl").read_text().splitlines()
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps([json.loads(line)["digest"] for line in lines]))
        fresh.replace(path)
    return path


class Campaign:
    """Jobs side by side, one process each, until there are enough faults."""

    def __init__(self, options: argparse.Namespace, report: CampaignReport, digests: Path) -> None:
        self._options, self._report, self._digests = options, report, digests
        self._next_seed = max([options.seed - 1, *(job.seed for job in report.jobs)]) + 1
        self._underway: dict[int, int] = {}
        """Faults that are still to come, by the seed of the job."""
        self._processes: set[subprocess.Popen[str]] = set()
        self._ended = False
        self._lock = threading.Lock()
        self._commit = commit()
        self._began, self._had = time.monotonic(), report.faults

    def run(self) -> None:
        """Until all is done."""
        lanes = [threading.Thread(target=self._lane, daemon=True) for _ in range(self._options.jobs)]
        for lane in lanes:
            lane.start()
        with ProgressBar("the campaign", self._options.faults - self._had) as progress:
            for lane in lanes:
                while lane.is_alive():
                    lane.join(0.5)
                    progress.reach(self._report.faults - self._had)

    def end(self) -> None:
        """Stop all that runs; what is complete is in the report."""
        with self._lock:
            self._ended = True
            for process in self._processes:
                process.kill()

    def _lane(self) -> None:
        fruitless = 0
        while fruitless < 3 and (job := self._take()) is not None:
            found = self._run(*job)
            fruitless = 0 if found is not None and found.faults else fruitless + 1
            with self._lock:
                self._underway.pop(job[0])
                if found is not None and not self._ended:
                    self._report.add(found)
                    self._tell()

    def _take(self) -> tuple[int, int] | None:
        """The seed and the faults of the next job."""
        with self._lock:
            missing = self._options.faults - self._report.faults - sum(self._underway.values())
            if missing <= 0 or self._ended:
                return None
            seed = self._next_seed
            self._next_seed += 1
            self._underway[seed] = min(self._options.per_job, missing)
            return seed, self._underway[seed]

    def _run(self, seed: int, count: int) -> JobFindings | None:
        """One job; ``None``: the campaign was ended."""
        options = self._options
        wanted = {
            "seed": seed,
            "count": count,
            "kinds": options.kinds,
            "workers": options.workers,
            "pairs": options.pairs,
            "digests": str(self._digests),
            "keep": str(options.out.parent),
        }
        words = [*ALONE, sys.executable, "-m", "faults.lane", json.dumps(wanted)]
        with self._lock:
            if self._ended:
                return None
            told, telling = os.pipe()
            process = subprocess.Popen(
                words,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=telling,
                text=True,
                cwd=ROOT,
                preexec_fn=_die_together,  # noqa: PLW1509
            )
            os.close(telling)
            relay = threading.Thread(target=_relay, args=(told,), daemon=True)
            relay.start()
            self._processes.add(process)
        try:
            said, _ = process.communicate(timeout=JOB_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        relay.join(LAST_WORDS)
        with self._lock:
            self._processes.discard(process)
            if self._ended:
                return None
        found = JobFindings(seed, wrong=[f"the driver of the job ended with code {process.returncode}"])
        if process.returncode == 0:
            found = JobFindings(**json.loads(said.splitlines()[-1]))
        found.commit = self._commit
        return found

    def _tell(self) -> None:
        minutes = (time.monotonic() - self._began) / 60
        rate = (self._report.faults - self._had) / minutes
        wrong = len(self._report.wrong)
        sys.stderr.write(f"{self._report.faults} faults, {rate:.0f} a minute; {wrong} things wrong\n")


def _relay(told: int) -> None:
    """Say what a job says, line by line: what it wrote to the terminal itself would tear the bar apart."""
    with open(told, errors="replace") as lines:
        for line in lines:
            sys.stderr.write(line)


def _die_together() -> None:
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: unshare then kills its child


if __name__ == "__main__":
    sys.exit(main())

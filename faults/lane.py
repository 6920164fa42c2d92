"""One job of a campaign, in namespaces of its own: ``python -m faults.lane '{"seed": 0, ...}'``.

``__main__`` starts it, several side by side. What the job has shown goes to standard output as one line of JSON.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
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

import torch

from faults.checker import Commit, Number, check
from faults.checkpoints import check_moves
from faults.hosts import make_bridge
from faults.injection import strike
from faults.job import HEARTBEAT_LIMIT, Job
from faults.kinds import draw
from faults.report import Found
from virtualflow.errors import ConfigurationError
from virtualflow.state.checkpoint_format import find_newest, load

PATIENCE = 90.0
"""Seconds after a fault within which the training must have gone on."""
SPARE = 200
"""Steps of the undisturbed run that are left when no more faults come."""


def main() -> None:
    """Run the job that the argument asks for."""
    wanted = json.loads(sys.argv[1])
    Path("/run/netns").mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "campaign", "/run/netns"], check=True)
    make_bridge()
    torch.set_num_threads(1)
    gc.freeze()  # what all processes share
    undisturbed: list[str] = json.loads(Path(wanted["digests"]).read_text())
    with tempfile.TemporaryDirectory(prefix="vf-campaign-") as directory:
        found = run_job(Path(directory), wanted, undisturbed)
    sys.stdout.write(json.dumps(asdict(found)) + "\n")


def run_job(directory: Path, wanted: dict[str, Any], undisturbed: list[str]) -> Found:
    """A job with its faults, one strike after the other, each undone and recovered from before the next."""
    seed = wanted["seed"]
    found = Found(seed)
    job = Job(directory / "job", wanted["workers"])
    try:
        if not goes_on(job, 0):
            found.wrong.append(f"the job does not begin: {job.status.get('reason')}")
        else:
            for faults in draw(seed, wanted["count"], tuple(wanted["kinds"]), wanted["pairs"]):
                if job.newest[0] > len(undisturbed) - SPARE:
                    break
                before, at = job.newest
                strike(job, faults)
                kinds = " + ".join(fault.kind for fault in faults)
                if not goes_on(job, max(before, job.newest[0]) + 1):
                    described = [asdict(fault) for fault in faults]
                    found.wrong.append(f"nobody goes on after {described}: {job.status.get('reason')}")
                    break
                pause = longest_pause(job.log(), at)
                found.strikes.append(([fault.kind for fault in faults], round(pause, 3)))
                lasted = ", ".join(f"{fault.seconds:.1f} s" for fault in faults)
                sys.stderr.write(f"seed {seed}: {kinds} ({lasted}): a pause of {pause:.1f} s\n")
        for worker in job.living:
            worker.end()  # so that all has been written down
        judge(job, undisturbed, found)
    finally:
        if found.wrong:
            kept = Path(wanted["keep"]) / f"campaign-seed-{seed}"
            with contextlib.suppress(shutil.Error):
                shutil.copytree(directory, kept, dirs_exist_ok=True)
        job.close()
    return found


def goes_on(job: Job, beyond: int) -> bool:
    """Wait until a step after that one is committed, and as many workers train as the job is to have."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        job.wait(0.1)
        if job.newest[0] > beyond and job.complete:
            return True
        if job.status.get("phase") == "failed":
            return False
    return False


def longest_pause(log: list[dict[str, Any]], since: float) -> float:
    """Seconds between two steps that anybody has committed, from then on."""
    times = sorted(line["at"] for line in log if line.get("at", 0.0) >= since)
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def judge(job: Job, undisturbed: list[str], found: Found) -> None:
    """Compare what was written down with what must hold."""
    lines = [
        Commit(
            line["process"],
            tuple(line["generation"]),
            line["step"],
            line["leader"],
            line.get("digest", ""),
            line["asked"],
        )
        for line in job.log()
    ]
    audit = job.audit()
    committed: dict[Number, list[int]] = defaultdict(list)
    for line in audit:
        committed[line.generation].append(line.step)
    storage = check_moves(job.moves(), committed)
    allowed = set(job.anew)
    for moment in job.ended_all:
        after = [number for number, at in storage.begun_at.items() if at > moment]
        allowed.update(sorted(after)[:1])
    anew = {number: storage.begun.get(number, 0) for number in allowed}
    verdict = check(audit, lines, undisturbed, anew, HEARTBEAT_LIMIT)
    found.steps, found.digests, found.repeated = verdict.steps, verdict.digests, verdict.repeated
    found.lineages, found.anew = verdict.lineages, len(anew)
    found.generations = len(committed)
    found.checkpoints, found.begun_from, found.late = storage.appeared, len(storage.begun), storage.late
    said = job.said()
    found.left_behind = job.left_behind()
    found.wrong += [*verdict.faults, *storage.faults, *_restored(job, undisturbed, found)]
    found.wrong += [f"{name} has printed a traceback" for name, text in said.items() if "Traceback" in text]


def _restored(job: Job, undisturbed: list[str], found: Found) -> list[str]:
    """What is wrong with the newest checkpoint: it must be sound, and have the weights of the undisturbed run."""
    problems: list[str] = []
    try:
        newest = find_newest(job.volume, problems.append)
        if newest is None:
            return problems
        weights = b"".join(value.numpy().tobytes() for value in load(newest)["parameters"].values())
    except (ConfigurationError, ValueError) as error:
        return [*problems, f"the newest checkpoint cannot be read: {error}"]
    found.digests += 1
    if hashlib.sha256(weights).hexdigest() != undisturbed[newest.step - 1]:
        problems.append(f"the checkpoint {newest.path.name} has other weights than step {newest.step}")
    return problems


if __name__ == "__main__":
    main()

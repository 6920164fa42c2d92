"""One job of a campaign, in namespaces of its own: ``python -m faults.lane '{"seed": 0, ...}'``.

``__main__`` starts it, several side by side. What the job has shown goes to standard output as one line of JSON.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from faults.checker import Commit, Number, check, check_moves
from faults.injected import STALL
from faults.job import HEARTBEAT_LIMIT, LATE, Job
from faults.kinds import CLOCK_JUMP, Fault, Strike, draw
from faults.processes import Running, make_bridge
from faults.report import JobFindings
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


def run_job(directory: Path, wanted: dict[str, Any], undisturbed: list[str]) -> JobFindings:
    """A job with its faults, one strike after the other, each undone and recovered from before the next."""
    seed = wanted["seed"]
    found = JobFindings(seed)
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


def judge(job: Job, undisturbed: list[str], found: JobFindings) -> None:
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


def _restored(job: Job, undisturbed: list[str], found: JobFindings) -> list[str]:
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


# How a fault begins, goes on and ends.

FLAP = 0.4
"""Seconds after which a line that flaps is cut or whole again."""
STORAGE = {"storage-stalls": STALL, "storage-eio": errno.EIO, "storage-estale": errno.ESTALE}
MID_CHECKPOINT = 3.0
"""Seconds that the leader has to begin a checkpoint. Without one (it has no storage) it is cut off all the same."""


class Injection:
    """A fault of a job; begins when it is made."""

    def __init__(self, job: Job, fault: Fault) -> None:
        self.fault, self._job = fault, job
        self._mend = ExitStack()
        self._flapped = time.monotonic()
        self._flapping: Running | None = None
        self._cut = False
        self._begin(fault)
        seconds = fault.seconds + (2 * HEARTBEAT_LIMIT if fault.kind == "late-checkpoint" else 0.0)
        self.until = time.monotonic() + seconds

    def _begin(self, fault: Fault) -> None:
        job, living = self._job, self._job.living
        if not living:
            return
        worker, coordinator = living[fault.victim % len(living)], job.coordinators[-1]
        if fault.leader or fault.kind == "late-checkpoint":
            worker = next((one for one in living if one.name == job.leader), worker)
        match fault.kind:
            case "cut":
                self._isolate(worker)
            case "flapping":
                self._isolate(worker)
                self._flapping, self._cut = worker, True
            case "one-way":
                worker.host.drop(["INPUT" if fault.forward else "OUTPUT"])
                self._finally(worker.host.heal)
            case "loss":
                worker.host.drop(share=0.3)
                self._finally(worker.host.heal)
            case "slow":
                worker.host.slow()
                self._finally(worker.host.heal)
            case "clock":
                target = coordinator if fault.victim % 3 == 0 else worker
                target.control.ahead += CLOCK_JUMP if fault.forward else -CLOCK_JUMP
            case "stop-worker" | "stop-coordinator":
                target = worker if fault.kind == "stop-worker" else coordinator
                job.await_step()  # to stop a worker in the script's own code, which is where it asks whether it leads
                target.send(signal.SIGSTOP)
                self._finally(lambda: target.send(signal.SIGCONT))
            case "kill-worker":
                worker.end()
            case "kill-all":
                for one in living:
                    one.end()
                job.ended_all.append(time.monotonic())
            case "kill-coordinator":
                coordinator.end()
                self._finally(lambda: job.start_coordinator(job.leading))
            case "two-coordinators":
                self._part(worker)
            case "storage-full":
                self._fill()
            case "storage-read-only":
                self._remount("ro")
                self._finally(lambda: self._remount("rw"))
            case "late-checkpoint":
                self._interrupt_checkpoint(worker)
            case "hang":
                worker.control.hangs = True
            case kind:
                job.strike_storage(STORAGE[kind])
                self._finally(lambda: job.strike_storage(0))
        if fault.part in ("line", "process") and fault.kind != "hang" and not fault.in_reach:
            self._keep_out_of_reach(worker)

    def go_on(self) -> None:
        """Do what is to be done while it lasts."""
        if self._flapping is not None and time.monotonic() > self._flapped + FLAP:
            self._flapped, self._cut = time.monotonic(), not self._cut
            host = self._flapping.host
            host.drop() if self._cut else host.reconnect()

    def end(self) -> None:
        """Undo it."""
        self._mend.close()

    def _finally(self, undo: Callable[[], None]) -> None:
        self._mend.callback(undo)

    def _isolate(self, worker: Running) -> None:
        worker.host.drop()
        self._finally(worker.host.heal)

    def _keep_out_of_reach(self, worker: Running) -> None:
        """The authority cannot end it before the fault is over, and for a while it does not come to it."""
        reach = self._job.out_of_reach
        reach[worker.name] = float("inf")
        self._finally(lambda: reach.update({worker.name: time.monotonic() + LATE}))

    def _part(self, worker: Running) -> None:
        """A worker stays with the coordinator that there is; the others get a new one, which the authority obeys."""
        job = self._job
        here, there = job.leading, 1 - job.leading
        for stale in job.coordinators:
            if stale.host is job.hosts[there]:
                stale.end()
        away = [host for host in job.homes if host is not worker.host]
        for host in (worker.host, job.hosts[here]):
            host.part_from([*away, job.hosts[there]])
        for host in away:
            host.lead(job.hosts[there])
        job.start_coordinator(there)
        job.leading, job.status = there, {}

        def unite() -> None:
            for host in job.hosts:
                host.reconnect()
            for host in job.homes:
                host.lead(job.hosts[job.leading])

        self._finally(unite)
        if not self.fault.in_reach:
            self._keep_out_of_reach(worker)

    def _interrupt_checkpoint(self, leader: Running) -> None:
        """Cut the leader off while it writes one, so that it wants to complete it when others have gone on."""
        job = self._job
        leader.control.storage = STALL
        limit = time.monotonic() + MID_CHECKPOINT
        while not leader.control.stalls and time.monotonic() < limit:
            job.wait(0.02)
        self._keep_out_of_reach(leader)
        self._isolate(leader)

        def go_on() -> None:
            leader.control.storage = job.storage
            for _ in range(3):
                job.wait(0.1)

        self._finally(go_on)  # while it does not hear yet that others have gone on: its storage says so

    def _fill(self) -> None:
        filler = self._job.volume / "filler"
        try:
            with filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(65_536))
        except OSError:
            self._finally(lambda: filler.unlink(missing_ok=True))

    def _remount(self, how: str) -> None:
        words = ["mount", "-o", f"remount,{how}", str(self._job.volume)]
        for _ in range(50):  # busy while a file is open for writing
            if subprocess.run(words, check=False, capture_output=True, timeout=30).returncode == 0:
                return
            time.sleep(0.05)


def strike(job: Job, faults: Strike) -> None:
    """Let these faults come at once, last, and be over."""
    running = [Injection(job, fault) for fault in faults]
    while running:
        job.wait(0.05)
        for injection in list(running):
            if time.monotonic() >= injection.until:
                injection.end()
                running.remove(injection)
            else:
                injection.go_on()


if __name__ == "__main__":
    main()

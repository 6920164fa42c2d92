"""How a fault begins, goes on and ends."""

from __future__ import annotations

import errno
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack

from faults.injected import STALL
from faults.job import HEARTBEAT_LIMIT, LATE, Job
from faults.kinds import CLOCK_JUMP, Fault, Strike
from faults.processes import Running

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

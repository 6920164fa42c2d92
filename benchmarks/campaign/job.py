"""A job of real processes on the hosts of a campaign, and the authority over its processes."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.campaign.checker import Commit
from benchmarks.campaign.faults import CLOCK_JUMP, Fault
from benchmarks.campaign.hosts import PORT, SERVICE, Host

ROOT = Path(__file__).parents[2]
INJECTED = Path(__file__).parent / "injected"
TRAINEE = Path(__file__).parent / "trainee.py"
STEPS, PAUSE = 1_000_000, 0.05
ERRORS = {"storage-stalls": "stall", "storage-eio": "5", "storage-estale": "116"}


@dataclass
class Running:
    """A process, and where it runs."""

    name: str
    host: Host
    process: subprocess.Popen[bytes]
    confirmed: set[str] = field(default_factory=set)
    """Addresses of the coordinators that know of its end."""

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None


class Job:
    """Workers, coordinators, and the driver as the authority that sees to it that processes end, and confirms it."""

    def __init__(self, directory: Path, workers: int) -> None:
        self.directory = directory
        for name in ("log", "audit", "out", "state"):
            (directory / name).mkdir(parents=True)
        self.volume = directory / "volume"
        self.volume.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "campaign", str(self.volume)]
        subprocess.run(mount, check=True, timeout=30)
        self.storage = directory / "state" / "storage"
        self.storage.write_text("")
        self.hosts = [Host(n + 1) for n in range(workers + 2)]
        self.homes = self.hosts[2:]
        for host in self.hosts[:2]:
            host.serve()
        self.wanted = workers
        self.workers: list[Running] = []
        self.coordinators: list[Running] = []
        self.leading = 0
        """The host of the coordinator that the authority obeys and speaks to."""
        self.started = 0
        self.anew: set[tuple[int, int]] = set()
        for host in self.homes:
            host.lead(self.hosts[0])
        self.start_coordinator(0)
        for host in self.homes:
            self.start_worker(host)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start(self, name: str, host: Host, words: list[str], **environment: str) -> Running:
        clock = self.directory / "state" / f"{name}.clock"
        clock.write_bytes(bytes(8))
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(INJECTED), str(ROOT / "trainer")]),
            "VIRTUALFLOW_TOKEN": "secret",
            "OMP_NUM_THREADS": "1",
            "CAMPAIGN_CLOCK": str(clock),
            "CAMPAIGN_STORAGE": str(self.storage),
            "CAMPAIGN_LOG": str(self.directory / "log"),
            **environment,
        }
        with (self.directory / "out" / name).open("wb") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", host.name, sys.executable, *words],
                env=variables,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        return Running(name, host, process)

    def start_coordinator(self, which: int) -> None:
        """A new process on one of the two hosts for it."""
        self.started += 1
        host = self.hosts[which]
        words = ["-m", "virtualflow", "coordinator", "--host", "0.0.0.0", "--port", str(PORT)]
        words += ["--wanted", str(self.wanted), "--minimum", str(self.wanted), "--heartbeat-limit", "2"]
        self.coordinators.append(self._start(f"coordinator-{self.started}", host, words))

    def start_worker(self, host: Host) -> None:
        """A new process; no two bear one name."""
        self.started += 1
        name = f"worker-{self.started}"
        self.workers.append(
            self._start(
                name, host, [str(TRAINEE), str(STEPS), str(PAUSE)],
                VIRTUALFLOW_COORDINATOR=f"http://{SERVICE}:{PORT}",
                VIRTUALFLOW_WORKER=name,
                VIRTUALFLOW_ADDRESS=host.address,
                VIRTUALFLOW_VIRTUAL_NODES="4",
                VIRTUALFLOW_CHECKPOINT_DIR=str(self.volume),
                VIRTUALFLOW_CHECKPOINT_STEPS="20",
                VIRTUALFLOW_AUDIT_DIR=str(self.directory / "audit"),
                CAMPAIGN_HANG=str(self.directory / "state" / f"{name}.hang"),
            )
        )  # fmt: skip

    @property
    def living(self) -> list[Running]:
        """The workers that run."""
        return [worker for worker in self.workers if worker.lives]

    # --- the authority ------------------------------------------------------------------------------------------------

    def ask(self, host: Host, path: str, body: object = None) -> dict[str, Any]:
        """What the coordinator there answers; empty while none does."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{host.address}:{PORT}/v1/{path}", data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=1.0) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except (OSError, ValueError):
            return {}

    def look_after(self) -> dict[str, Any]:
        """End whom the leading coordinator has declared lost, replace who has ended, and confirm the ends.

        Returns:
            The status of the leading coordinator.
        """
        host = self.hosts[self.leading]
        status = self.ask(host, "status")
        for change in status.get("changes", []):
            if change.get("cause") == "restart":
                number = change["generation"]
                self.anew.add((number["incarnation"], number["counter"]))
        by_name = {worker.name: worker for worker in self.workers}
        for lost in status.get("lost", []):
            worker = by_name.get(lost["worker"])
            if worker is None or lost["ended"]:
                continue
            if worker.lives:
                worker.process.kill()
                worker.process.wait()
            self.ask(host, "gone", {"worker": worker.name, "incarnation": lost["incarnation"], "reason": "ended"})
        known = {one["worker"]: one["incarnation"] for one in status.get("workers", [])}
        for worker in self.workers:
            if not worker.lives and worker.name in known:
                self.ask(host, "gone", {"worker": worker.name, "incarnation": known[worker.name], "reason": "ended"})
        if status:
            taken = {worker.host.name for worker in self.living}
            for home in self.homes:
                if home.name not in taken:
                    self.start_worker(home)
        return status

    # --- what is written down -----------------------------------------------------------------------------------------

    def newest(self) -> tuple[int, float]:
        """The highest step of any line, and when it was written (seconds of the monotonic clock)."""
        best = (0, 0.0)
        for path in (self.directory / "log").iterdir():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 600))
                lines = file.read().split(b"\n")
            if len(lines) > 1 and lines[-2]:
                line = json.loads(lines[-2])
                best = max(best, (line["step"], line["at"]))
        return best

    def log(self) -> list[dict[str, Any]]:
        """All lines of the scripts."""
        found = []
        for path in sorted((self.directory / "log").iterdir()):
            for text in path.read_text().splitlines():
                found.append({"process": path.stem, **json.loads(text)})
        return found

    def audit(self) -> list[Commit]:
        """The attempts that counted."""
        found = []
        for path in sorted((self.directory / "audit").iterdir()):
            for text in path.read_text().splitlines():
                line = json.loads(text)
                if "committed" in line:
                    fact = line["committed"]
                    found.append(Commit(path.stem, tuple(fact["generation"]), fact["step"]))
        return found

    # --- faults -------------------------------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        """Do it, let it last, and undo it; the authority works all the while."""
        worker = self.living[fault.victim % len(self.living)] if self.living else None
        coordinator = self.coordinators[-1]
        others = [host for host in self.hosts if worker is None or host is not worker.host]
        if worker is None:
            return
        match fault.kind:
            case "cut" | "flapping":
                worker.host.drop(others)
            case "one-way":
                worker.host.drop(others, ["INPUT" if fault.forward else "OUTPUT"])
            case "loss":
                worker.host.drop(others, share=0.3)
            case "slow":
                worker.host.slow()
            case "clock":
                target = coordinator if fault.victim % 3 == 0 else worker
                jump = CLOCK_JUMP if fault.forward else -CLOCK_JUMP
                (self.directory / "state" / f"{target.name}.clock").open("r+b").write(struct.pack("d", jump))
            case "stop-worker":
                worker.process.send_signal(signal.SIGSTOP)
            case "stop-coordinator":
                coordinator.process.send_signal(signal.SIGSTOP)
            case "kill-worker":
                worker.process.kill()
            case "kill-coordinator":
                coordinator.process.kill()
                coordinator.process.wait()
                self.start_coordinator(self.leading)
            case "two-coordinators":
                self._part(worker, fault)
            case "storage-full":
                self._fill()
            case "storage-read-only":
                self._remount("ro")
            case "hang":
                (self.directory / "state" / f"{worker.name}.hang").touch()
            case kind:
                self.storage.write_text(ERRORS[kind])
        until, on = time.monotonic() + fault.seconds, True
        while time.monotonic() < until:
            self.look_after()
            time.sleep(0.5)
            if fault.kind == "flapping":
                on = not on
                worker.host.heal() if not on else worker.host.drop(others)
        self._undo(fault, worker, coordinator)

    def _part(self, worker: Running, fault: Fault) -> None:
        """A worker stays with the coordinator that there is; the others get a new one, which the authority obeys."""
        here, there = self.leading, 1 - self.leading
        stale = [one for one in self.coordinators if one.host is self.hosts[there] and one.lives]
        for one in stale:
            one.process.kill()
            one.process.wait()
        away = [host for host in self.homes if host is not worker.host]
        for host in (worker.host, self.hosts[here]):
            host.drop_service_only_of([*away, self.hosts[there]])
        for host in away:
            host.lead(self.hosts[there])
        self.start_coordinator(there)
        self.leading = there

    def _fill(self) -> None:
        with (self.volume / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(65_536))
            except OSError:
                pass

    def _remount(self, how: str) -> None:
        words = ["mount", "-o", f"remount,{how}", str(self.volume)]
        for _ in range(50):  # busy while a file is open for writing
            if subprocess.run(words, check=False, capture_output=True, timeout=30).returncode == 0:
                return
            time.sleep(0.1)

    def _undo(self, fault: Fault, worker: Running, coordinator: Running) -> None:
        match fault.kind:
            case "cut" | "one-way" | "flapping" | "loss" | "slow":
                worker.host.heal()
            case "stop-worker" | "stop-coordinator":
                target = worker if fault.kind == "stop-worker" else coordinator
                if target.lives:
                    target.process.send_signal(signal.SIGCONT)
            case "two-coordinators":
                for host in self.hosts:
                    host.heal()
                for host in self.homes:
                    host.lead(self.hosts[self.leading])
            case "storage-full":
                (self.volume / "filler").unlink(missing_ok=True)
            case "storage-read-only":
                self._remount("rw")
            case _:
                self.storage.write_text("")

    def close(self) -> None:
        """End all processes, and take the hosts away."""
        for running in (*self.workers, *self.coordinators):
            running.process.kill()
            running.process.wait()
        self._remount("rw")
        subprocess.run(["umount", str(self.volume)], check=False, timeout=30)
        for host in self.hosts:
            host.close()

"""A job of a campaign: its processes, the authority over them, and what they have written down."""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from faults.checker import Commit, Number, Rename
from faults.processes import PORT, SERVICE, Host, Running, fork, run_command, run_script

TRAINEE = Path(__file__).parent / "trainee.py"
STEPS, PAUSE = 1_000_000, 0.03
HEARTBEAT_LIMIT, HANG_LIMIT = 1.0, 1.5
"""Seconds: shorter than the library's own, so that a campaign has many faults in an hour."""
LOOK = 0.15
"""Seconds between two looks of the authority at the job."""
LATE = 3.0
"""Seconds for which a worker that was out of reach may go on after that, before the authority ends it."""
_NEWS = struct.Struct("=qd")


class Job:
    """Workers, coordinators, and the driver as the authority that sees to it that processes end, and confirms it."""

    def __init__(self, directory: Path, workers: int) -> None:
        self.directory = directory
        for name in ("log", "audit", "out", "moves"):
            (directory / name).mkdir(parents=True)
        self.volume = directory / "volume"
        self.volume.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "campaign", str(self.volume)]
        subprocess.run(mount, check=True, timeout=30)
        self.news, self._told = os.pipe()
        self.newest = 0, 0.0
        """The highest step that anybody has told of, and when it was complete (seconds of the monotonic clock)."""
        self.storage = 0
        """What the storage of all workers does; see ``injected``."""
        self.out_of_reach: dict[str, float] = {}
        """Workers that the authority cannot end, and until when."""
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
        self.status: dict[str, Any] = {}
        """The latest that this coordinator has told."""
        self.anew: set[Number] = set()
        """Generations that have begun anew, as nobody who had the state was left."""
        self.ended_all: list[float] = []
        """When all workers were ended at once; no coordinator need know of it, as it may be new."""
        self._looked = 0.0
        for host in self.homes:
            host.lead(self.hosts[0])
        self.start_coordinator(0)
        for host in self.homes:
            self.start_worker(host)

    # --- processes ----------------------------------------------------------------------------------------------------

    def start_coordinator(self, which: int) -> None:
        """A new process on one of the two hosts for it."""
        words = ["coordinator", "--host", "0.0.0.0", "--port", str(PORT)]
        words += ["--wanted", str(self.wanted), "--minimum", str(self.wanted)]
        words += ["--heartbeat-limit", str(HEARTBEAT_LIMIT), "--hang-seconds", str(HANG_LIMIT)]
        self.coordinators.append(self._start("coordinator", self.hosts[which], run_command(*words)))

    def start_worker(self, host: Host) -> None:
        """A new process; no two bear one name."""
        worker = self._start(
            "worker", host, run_script(TRAINEE, str(STEPS), str(PAUSE)),
            VIRTUALFLOW_COORDINATOR=f"http://{SERVICE}:{PORT}",
            VIRTUALFLOW_WORKER=f"worker-{self.started + 1}",
            VIRTUALFLOW_ADDRESS=host.address,
            VIRTUALFLOW_VIRTUAL_NODES="4",
            VIRTUALFLOW_CHECKPOINT_DIR=str(self.volume),
            VIRTUALFLOW_CHECKPOINT_STEPS="5",
            VIRTUALFLOW_AUDIT_DIR=str(self.directory / "audit"),
            CAMPAIGN_NEWS=str(self._told),
        )  # fmt: skip
        worker.control.storage = self.storage
        self.workers.append(worker)

    def _start(self, what: str, host: Host, work: Any, **environment: str) -> Running:
        self.started += 1
        name = f"{what}-{self.started}"
        return fork(
            name,
            host,
            work,
            environment={"VIRTUALFLOW_TOKEN": "secret", "CAMPAIGN_LOG": str(self.directory / "log"), **environment},
            out=self.directory / "out" / name,
            volume=self.volume,
            journal=self.directory / "moves" / f"{name}.jsonl",
        )

    @property
    def living(self) -> list[Running]:
        """The workers that run."""
        return [worker for worker in self.workers if worker.lives]

    def strike_storage(self, number: int) -> None:
        """From now on the storage of all workers does that; 0: what it should."""
        self.storage = number
        for worker in self.workers:
            worker.control.storage = number

    # --- the authority ------------------------------------------------------------------------------------------------

    def ask(self, path: str, body: object = None) -> dict[str, Any]:
        """What the leading coordinator answers; empty while it does not."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
        address = self.hosts[self.leading].address
        request = urllib.request.Request(f"http://{address}:{PORT}/v1/{path}", data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=0.5) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except (OSError, ValueError):
            return {}

    def wait(self, seconds: float) -> None:
        """Let so much time pass, or less if a worker tells of a step; the authority works all the while."""
        if select.select([self.news], [], [], max(0.0, min(seconds, LOOK)))[0]:
            raw = os.read(self.news, 64 * _NEWS.size)
            for place in range(0, len(raw), _NEWS.size):
                self.newest = max(self.newest, _NEWS.unpack_from(raw, place))
        if time.monotonic() >= self._looked + LOOK:
            self.look_after()
            self._looked = time.monotonic()

    def await_step(self) -> None:
        """Return right when a worker has told of a step, if that does not take too long."""
        before, limit = self.newest, time.monotonic() + 2.0
        while self.newest == before and time.monotonic() < limit:
            self.wait(0.1)

    def look_after(self) -> None:
        """End whom the leading coordinator has declared lost, replace who has ended, and confirm the ends."""
        self.status = status = self.ask("status?brief=1")
        for change in status.get("changes", []):
            if change.get("cause") == "restart":
                number = change["generation"]
                self.anew.add((number["incarnation"], number["counter"]))
        by_name = {worker.name: worker for worker in self.workers}
        now = time.monotonic()
        for lost in status.get("lost", []):
            worker = by_name.get(lost["worker"])
            if worker is None or lost["ended"] or (worker.lives and self.out_of_reach.get(worker.name, 0.0) > now):
                continue
            worker.end()
            self.ask("gone", {"worker": worker.name, "incarnation": lost["incarnation"], "reason": "ended"})
        known = {one["worker"]: one["incarnation"] for one in status.get("workers", [])}
        for worker in self.workers:
            if worker.name in known and not worker.lives:
                self.ask("gone", {"worker": worker.name, "incarnation": known[worker.name], "reason": "ended"})
        if status:
            taken = {worker.host.name for worker in self.living}
            for home in self.homes:
                if home.name not in taken:
                    self.start_worker(home)

    @property
    def leader(self) -> str:
        """The name of the worker that virtual node 0 is assigned to; empty: that is not known."""
        return next(
            (str(one["worker"]) for one in self.status.get("workers", []) if 0 == one["first"] < one["last"]), ""
        )

    @property
    def complete(self) -> bool:
        """Whether as many workers train as the job is to have."""
        training = [one for one in self.status.get("workers", []) if one["state"] == "training"]
        return len(training) == self.wanted

    # --- what is written down -----------------------------------------------------------------------------------------

    def log(self) -> list[dict[str, Any]]:
        """All lines of the scripts."""
        return _lines(self.directory / "log")

    def audit(self) -> list[Commit]:
        """The attempts that counted."""
        found = []
        for line in _lines(self.directory / "audit"):
            if "committed" in line:
                fact = line["committed"]
                process = "-".join(line["process"].split("-")[:2])  # without its incarnation
                found.append(Commit(process, tuple(fact["generation"]), fact["step"]))
        return found

    def moves(self) -> list[Rename]:
        """The renames on the volume that have happened; of one that was cut short nobody knows."""
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for line in _lines(self.directory / "moves"):
            found.setdefault((line["process"], line.pop("number")), {}).update(line)
        return [Rename(**values) for values in found.values() if "done" in values]

    def left_behind(self) -> int:
        """How often a worker was about to let a checkpoint appear, and a newer generation had gone on."""
        return sum("left_behind" in line for line in _lines(self.directory / "moves"))

    def said(self) -> dict[str, str]:
        """What each process has printed."""
        return {path.name: path.read_text(errors="replace") for path in sorted((self.directory / "out").iterdir())}

    def close(self) -> None:
        """End all processes, and take the volume away; the hosts go with the namespaces."""
        for running in (*self.workers, *self.coordinators):
            running.end()
            running.control.close()
        os.close(self.news)
        os.close(self._told)
        subprocess.run(["umount", "-l", str(self.volume)], check=False, timeout=30)


def _lines(directory: Path) -> list[dict[str, Any]]:
    """Of all files there, each with the name of the process."""
    return [
        {"process": path.stem, **json.loads(text)}
        for path in sorted(directory.iterdir())
        for text in path.read_text().splitlines()
    ]

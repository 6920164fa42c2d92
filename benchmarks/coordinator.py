"""One coordinator and a crowd of simulated workers: what a generation, a heartbeat and a step cost it.

The coordinator is the real process (``virtualflow coordinator``); the workers are WebSocket connections of this process
that speak the real messages, with a key of a rendezvous each as workers publish it, and train nothing. Times are from
the last message that calls for a generation to its plan at the last worker. Both processes share the machine, and the
crowd costs more than the coordinator, so the coordinator's own CPU seconds stand beside each time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.crowd import PATIENCE, Crowd
from benchmarks.jobs import ROOT, environment
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.protocol import messages as m
from virtualflow.protocol.certificates import Authority, Party, Role, make_key
from virtualflow.protocol.identity import PAGE_TOKEN, Identity, write_identity
from virtualflow.protocol.settings import ENV_IDENTITY, ENV_TOKEN

TOKEN = secrets.token_hex(16)
"""Of the job in plaintext, and of the sealed one's page."""
LIFETIME = 3_600.0
IN_PLAINTEXT = ("connecting", "restart: all known again")
"""What the job in plaintext is measured for: where sealed connections are made."""


class Identities:
    """The job's parties: each has an identity in a folder, or the job's token where the job is in plaintext."""

    def __init__(self, folder: Path, *, sealed: bool) -> None:
        self._folder, self.sealed = folder, sealed
        self._authority = Authority.make("a crowd", time.time())

    def variables(self) -> dict[str, str]:
        """Of the coordinator's environment."""
        if not self.sealed:
            return {ENV_TOKEN: TOKEN}
        own = self._issue("coordinator", "coordinator")
        (own / PAGE_TOKEN).write_text(TOKEN)
        return {ENV_IDENTITY: str(own)}

    def context(self, role: Role, name: str) -> ssl.SSLContext | bool:
        """By which a party connects."""
        return Identity(self._issue(role, name)).client_context() if self.sealed else True

    def _issue(self, role: Role, name: str) -> Path:
        folder, key = self._folder / name, make_key()
        certificate = self._authority.issue(key.public_key(), Party("crowd", role, name), time.time(), LIFETIME)
        write_identity(folder, key, certificate, [self._authority.certificate])
        return folder


class Meter:
    """The figures of one coordinator process."""

    def __init__(self, server: Server, crowd: Crowd) -> None:
        self._server, self._crowd = server, crowd
        self.figures: dict[str, Any] = {}

    @property
    def _process(self) -> psutil.Process:
        assert self._server.process is not None
        return psutil.Process(self._server.process.pid)

    @contextlib.asynccontextmanager
    async def measure(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """Time, the coordinator's CPU, and messages both ways within the block."""
        crowd, before, began = self._crowd, self._process.cpu_times(), time.monotonic()
        sent, heard, size = crowd.sent.copy(), crowd.heard.copy(), crowd.heard_bytes
        figure: dict[str, Any] = {}
        yield figure
        after = self._process.cpu_times()
        figure.setdefault("seconds", round(time.monotonic() - began, 3))
        figure["cpu_seconds"] = round(after.user + after.system - before.user - before.system, 3)
        figure["from_workers"] = dict(crowd.sent - sent)
        figure["to_workers"] = dict(crowd.heard - heard)
        figure["to_workers_bytes"] = crowd.heard_bytes - size
        figure["resident_mb"] = round(self._process.memory_info().rss / 2**20)
        self.figures[name] = figure
        print(f"{name:26} {figure['seconds']:8.3f} s  {figure['cpu_seconds']:7.3f} CPU s  {_brief(figure)}", flush=True)

    @contextlib.asynccontextmanager
    async def generation(self, name: str) -> AsyncIterator[None]:
        """From the end of the block to a new plan at everyone who is told; then until all have entered it."""
        crowd = self._crowd
        known = max((worker.newest.generation for worker in crowd.living() if worker.newest), default=m.NO_GENERATION)

        def told() -> bool:
            return all(worker.newest and worker.newest.generation > known for worker in crowd.living())

        async with self.measure(f"{name}: decided and sent") as figure:
            yield
            began = time.monotonic()
            await crowd.until(told)
            figure["seconds"] = round(max(worker.newest_at for worker in crowd.living()) - began, 3)
        plan = max((worker.newest for worker in crowd.living() if worker.newest), key=lambda plan: plan.generation)
        inside = [crowd.workers[member.incarnation] for member in plan.members]
        leavers = [worker for worker in crowd.living() if worker not in inside]
        async with self.measure(f"{name}: all have entered"):
            await crowd.until(lambda: all(worker.plan is plan or worker.plan == plan for worker in inside))
            await crowd.until(lambda: all(worker.released for worker in leavers))
        for worker in leavers:
            worker.vanish()
        # What follows (Entered, Resumed) is part of no other figure.
        async with self.measure(f"{name}: settled"):
            while await unsettled(crowd, plan):  # noqa: ASYNC110 - it asks another process
                await asyncio.sleep(0.05)


async def unsettled(crowd: Crowd, plan: m.Plan) -> bool:
    """Whether the coordinator is still to hear who has entered ``plan``, and of the first step after it."""
    now = (await status(crowd, True))[0]
    change = now["lastChange"]
    heard = change is not None and change["generation"]["counter"] == plan.generation.counter
    return bool(now["generation"] != plan.generation.counter or not (heard or plan.cause == "start"))


def _brief(figure: dict[str, Any]) -> str:
    parts = [f"{sum(figure['from_workers'].values())} in", f"{sum(figure['to_workers'].values())} out"]
    return ", ".join([*parts, f"{figure['to_workers_bytes'] / 2**20:.1f} MiB out", f"{figure['resident_mb']} MiB"])


async def status(crowd: Crowd, brief: bool) -> tuple[dict[str, Any], int]:
    """The status, and its size in bytes."""
    async with crowd.session.get(f"{crowd.url}/v1/status?brief={int(brief)}") as answer:
        body = await answer.read()
    return json.loads(body), len(body)


async def call(crowd: Crowd, path: str, body: dict[str, Any]) -> None:
    """Make a call."""
    async with crowd.session.post(f"{crowd.url}/v1/{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()


class Server:
    """The coordinator process; it may be killed and started again."""

    def __init__(self, directory: Path, workers: int, identities: Identities) -> None:
        self._directory, self._workers, self._identities = directory, workers, identities
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    async def start(self) -> None:
        """Start it, at the former address if there was one, and wait until it listens."""
        ready, log = self._directory / "ready", self._directory / "log"
        process = self.process = self._launch(ready, log)
        async with asyncio.timeout(PATIENCE):
            while not ready.exists():
                if process.poll() is not None:
                    sys.exit(log.read_text())
                await asyncio.sleep(0.01)
        self.url = ready.read_text().strip()

    def _launch(self, ready: Path, log: Path) -> subprocess.Popen[bytes]:
        ready.unlink(missing_ok=True)
        port = self.url.rpartition(":")[2] or "0"
        command = [sys.executable, "-m", "virtualflow", "coordinator", "--host", "127.0.0.1", "--port", port]
        command += ["--wanted", str(self._workers), "--minimum", str(self._workers), "--ready-file", str(ready)]
        variables = environment() | self._identities.variables()
        with log.open("ab") as output:
            return subprocess.Popen(command, env=variables, stdout=output, stderr=output, cwd=ROOT)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


async def story(directory: Path, workers: int, seconds: float, *, sealed: bool) -> dict[str, Any]:
    """All that is measured, in the order in which it happens to a job."""
    identities = Identities(directory / "identities", sealed=sealed)
    server = Server(directory, workers, identities)
    headers = {} if sealed else {"Authorization": f"Bearer {TOKEN}"}
    connector = aiohttp.TCPConnector(limit=0, ssl=identities.context("control", "control"))
    try:
        await server.start()
        async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
            crowd = Crowd(server.url, session, 2 * workers, partial(identities.context, "worker"))
            meter = Meter(server, crowd)
            await found(crowd, meter, workers)
            await train(crowd, meter, seconds)
            await change(crowd, meter, workers)
            await restart(crowd, meter, server)
            for worker in crowd.living():
                worker.vanish()
            return meter.figures
    finally:
        server.kill()


async def found(crowd: Crowd, meter: Meter, workers: int) -> None:
    """The first generation: all become ready at once."""
    first = crowd.workers_of([f"worker-{number}" for number in range(workers)])
    async with meter.measure("connecting"):
        assert await crowd.connect(first) == workers
    await asyncio.sleep(1.5 * MembershipSettings.restart_grace)  # it listens for workers of a running job
    async with meter.generation("founding"):
        for worker in crowd.living():
            worker.say(m.Ready())


async def train(crowd: Crowd, meter: Meter, seconds: float) -> None:
    """Signs of life, then a hundred steps a second, then looks at the status."""
    async with meter.measure("heartbeats"):
        await asyncio.sleep(seconds)
    crowd.training, began = True, crowd.step
    async with meter.measure("steps") as figure:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            crowd.step += 1
            await asyncio.sleep(0.01)
        figure["steps"] = crowd.step - began
    crowd.training = False
    for brief in (True, False):
        async with meter.measure("brief status" if brief else "status") as figure:
            figure["bytes"] = (await status(crowd, brief))[1]


async def change(crowd: Crowd, meter: Meter, workers: int) -> None:
    """A loss, joins and a drain."""
    several = max(1, workers // 10)
    async with meter.generation("loss of one"):
        crowd.living()[workers // 2].vanish()
        for worker in crowd.living():
            assert worker.plan is not None
            worker.say(m.Broken(worker.plan.generation, crowd.step, "Connection closed by peer"))
    (joiner,) = await crowd.start([f"worker-{workers}"])
    async with meter.generation("join of one"):
        joiner.say(m.Ready())
    await call(crowd, "scale", {"workers": workers + several})
    joiners = await crowd.start([f"worker-{workers + 1 + number}" for number in range(several)])
    async with meter.generation(f"join of {several}"):
        for joiner in joiners:
            joiner.say(m.Ready())
    async with meter.generation("drain of one"):
        await call(crowd, "drain", {"workers": [crowd.living()[1].name]})


async def restart(crowd: Crowd, meter: Meter, server: Server) -> None:
    """The coordinator is killed, and all come to the next one."""
    workers = crowd.living()
    server.kill()
    await crowd.until(lambda: not crowd.living())
    for worker in workers:
        worker.hello = worker.pack_hello()
    await server.start()
    async with meter.measure("restart: all known again") as figure:
        # On a busy machine the crowd may be too slow for the heartbeat limit.
        figure["lost"] = len(workers) - await crowd.connect(workers)


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of heartbeats, and of steps")
    parser.add_argument("--quick", action="store_true", help="100 workers, 3 seconds")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    workers, seconds = (100, 3.0) if args.quick else (args.workers, args.seconds)
    with tempfile.TemporaryDirectory() as sealed, tempfile.TemporaryDirectory() as other:
        plaintext = asyncio.run(story(Path(other), workers, 1.0, sealed=False))
        figures = asyncio.run(story(Path(sealed), workers, seconds, sealed=True))
    for name in IN_PLAINTEXT:
        event, colon, part = name.partition(":")
        figures[f"{event}, in plaintext{colon}{part}"] = plaintext[name]
    if args.json is not None:
        args.json.write_text(json.dumps({"workers": workers, "seconds": seconds, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()

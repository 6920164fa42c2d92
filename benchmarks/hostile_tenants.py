"""The operator beside hundreds of hostile coordinators of one namespace, on a real API server with etcd.

One process plays all hostile coordinators, each with the identity of its job. Each sends statuses as fast as they are
read, and each contradicts the one before it: a third have 872 kB, which the protocol allows, a third as much as is read
of any coordinator, and a third are small. Another namespace has an honest job. Measured are the operator's memory and
CPU, what it writes, and how long a scale-up of the honest job takes until its new pod is there.

It needs ``kube-apiserver`` and ``etcd`` on the PATH.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
from aiohttp import web
from tests import kube_apiserver, statuses
from tests.operator_metrics import requests, scrape

from benchmarks import operator_scale
from benchmarks.jobs import environment
from benchmarks.operator_scale import (
    ADDRESS,
    NAMESPACE,
    Doors,
    Identities,
    coordinators,
    following,
    insisting,
    operated,
)
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.versions import PROTOCOL
from virtualflow_operator.constants import COORDINATOR_PORT
from virtualflow_operator.k8s.client import JOBS, PODS, KubeApi, Object, Resource

SIZES = (60, 500)
"""Hostile jobs."""
HOSTILE = "hostile"
HOSTILE_ADDRESS = "127.77.0.3"
LIMIT = 512 << 20
"""Bytes of memory that the chart gives the operator."""
SCALE_UPS = 10
PATIENCE = 900.0
TEXT = """\
The hostile jobs share a namespace. Their coordinators contradict themselves as fast as they are read, with 1, 65 or 872
kB at a time. A job of another namespace is scaled up ten times: the slowest new pod counts. The chart gives the
operator 512 MiB."""
_NAMESPACES = Resource("", "v1", "namespaces", namespaced=False)


def hostile_statuses() -> list[list[bytes]]:
    """What hostile coordinators say, over and over, each kind a list of what takes turns."""
    found = []
    for workers, changes, size in ((7_000, 1, 872_000), (60, 60, 65_000), (1, 1, 0)):
        kind = []
        for turn in range(2):
            listed = [
                http_api.WorkerStatus(f"x{n}", f"p{n}-{turn}", "1.1.1.1", 1, "training", n, n + 1)
                for n in range(workers)
            ]
            known = tuple(
                m.Change(m.Generation(turn + 1, n), n, 1, 2, "join", "a" * 400, 1.0, 0) for n in range(changes)
            )
            phase, last = ("training", "waiting")[turn], known[-1]
            status = statuses.coordinator_status(
                phase, *listed, step=turn, protocol=PROTOCOL, last_change=last, changes=known
            )
            kind.append(msgspec.json.encode(status).ljust(size))
        found.append(kind)
    return found


async def be_hostile(identities: Path, *, quiet: bool) -> None:
    """Answer for all hostile coordinators, until this process is killed; ``quiet``: each has one word to say."""
    said, doors = itertools.cycle(hostile_statuses()), Doors(identities)

    async def watch(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        mine = next(said)
        if quiet:
            await socket.send_bytes(m.encode(statuses.coordinator_status("waiting", protocol=PROTOCOL)))
            async for _ in socket:
                pass
        with suppress(ConnectionError):
            while not socket.closed:
                for content in mine:
                    await socket.send_bytes(content)
        return socket

    async def call(_: web.Request) -> web.Response:
        return web.Response(body=m.encode(http_api.Answer("noted")), content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/watch", watch)
    app.router.add_post("/v1/{call}", call)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, HOSTILE_ADDRESS, COORDINATOR_PORT, ssl_context=doors.context).start()
    await asyncio.Event().wait()


def job(namespace: str, name: str) -> Object:
    """A job of one worker that no queue admits."""
    container = {"name": "trainer", "image": "trainer:1"}
    spec = {
        "virtualNodes": 64,
        "replicas": 1,
        "workerGroups": [{"name": "workers", "template": {"spec": {"containers": [container]}}}],
    }
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": JOBS.api_version, "kind": "VirtualFlowJob", "metadata": metadata, "spec": spec}


async def run_pods(api: KubeApi, namespace: str, address: str, running: dict[str, float]) -> None:
    """Let each new pod of a namespace run at once, until cancelled; ``running``: when each that does was first seen."""
    seen: set[str] = set()
    async with asyncio.TaskGroup() as group:

        async def begin(pod: Object, now: float) -> None:
            runs = {"status": {"phase": "Running", "podIP": address}}
            await insisting(lambda: api.patch(PODS, namespace, pod["metadata"]["name"], runs, "status"))
            running[pod["metadata"]["name"]] = now

        async with aclosing(following(api, PODS, namespace)) as pods:
            async for pod in pods:
                if pod["metadata"]["uid"] not in seen:
                    seen.add(pod["metadata"]["uid"])
                    group.create_task(begin(pod, time.monotonic()))


class Gauge:
    """The operator's memory, seen ten times a second."""

    def __init__(self, process: psutil.Process) -> None:
        self.process, self.most = process, 0

    async def run(self) -> None:
        """Until it is cancelled, or the process is dead."""
        while True:
            self.most = max(self.most, self.process.memory_info().rss)
            if self.most > LIMIT:
                self.process.kill()  # as the kernel would
                raise MemoryError(f"the operator has more than {LIMIT >> 20} MiB")
            await asyncio.sleep(0.1)

    def spent(self) -> float:
        """Seconds of CPU."""
        times = self.process.cpu_times()
        return times.user + times.system


async def scale_up(api: KubeApi, workers: int, running: dict[str, float]) -> float:
    """Seconds until a pod more is seen."""
    began = time.monotonic()
    await api.patch(JOBS, NAMESPACE, "honest", {"spec": {"replicas": workers}})
    async with asyncio.timeout(60.0):
        while (seen := running.get(f"honest-workers-{workers - 1}")) is None:  # noqa: ASYNC110 - another task fills it
            await asyncio.sleep(0.01)
    return seen - began


async def attack(
    api: KubeApi, process: psutil.Process, port: int, identities: Identities, count: int, role: str
) -> dict[str, Any]:
    """The figures of an operator beside so many hostile jobs."""
    operator_scale.WORKERS = 1
    gauge, running = Gauge(process), {HOSTILE: dict[str, float](), NAMESPACE: dict[str, float]()}
    await api.create(_NAMESPACES, None, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": HOSTILE}})
    hostile = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.hostile_tenants", role, str(identities.folder), env=environment()
    )
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            name = f"hostile-{number}"
            identities.make(await insisting(lambda name=name: api.create(JOBS, HOSTILE, job(HOSTILE, name))))

    try:
        async with coordinators(identities), asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(gauge.run()),
                group.create_task(run_pods(api, HOSTILE, HOSTILE_ADDRESS, running[HOSTILE])),
                group.create_task(run_pods(api, NAMESPACE, ADDRESS, running[NAMESPACE])),
            ]
            identities.make(await api.create(JOBS, NAMESPACE, job(NAMESPACE, "honest")))
            while len(running[NAMESPACE]) < 2:  # noqa: ASYNC110 - another task fills it
                await asyncio.sleep(0.1)
            alone = [await scale_up(api, 2 + n, running[NAMESPACE]) for n in range(SCALE_UPS)]
            begun = time.monotonic()
            async with asyncio.TaskGroup() as makers:
                for _ in range(8):
                    makers.create_task(some())
            while len(running[HOSTILE]) < 2 * count:  # noqa: ASYNC110 - another task fills it
                await asyncio.sleep(0.1)
            settled = time.monotonic() - begun
            await asyncio.sleep(10.0)
            early = await asyncio.to_thread(scrape, port)
            before, cpu, since = requests(early), gauge.spent(), time.monotonic()
            reactions = [await scale_up(api, 2 + SCALE_UPS + n, running[NAMESPACE]) for n in range(SCALE_UPS)]
            await asyncio.sleep(max(0.0, 20.0 - (time.monotonic() - since)))
            late = await asyncio.to_thread(scrape, port)
            after, seconds = requests(late), time.monotonic() - since
            cores = (gauge.spent() - cpu) / seconds
            later = process.memory_info().rss
            for task in tasks:
                task.cancel()
    finally:
        hostile.kill()
        await hostile.wait()
    asked: Counter[str] = after - before
    return {
        "hostile": count,
        "memory_mb": round(gauge.most / 2**20),
        "memory_later_mb": round(later / 2**20),
        "cores": round(cores, 2),
        "settled_seconds": round(settled, 1),
        "alone_seconds": round(max(alone), 3),
        "reaction_seconds": round(max(reactions), 3),
        "reaction_median": round(sorted(reactions)[len(reactions) // 2], 3),
        "requests_per_second": {kind: round(n / seconds, 2) for kind, n in asked.most_common(4)},
    }


async def measure(folder: Path, kubeconfig: Path, count: int, role: str) -> dict[str, Any]:
    """Start an operator, and attack it."""
    async with operated(folder, kubeconfig, 1) as (api, identities, process, port):
        return await attack(api, process, port, identities, count, role)


def _row(found: dict[str, Any]) -> dict[str, Any]:
    asked = ", ".join(f"{rate} {kind}" for kind, rate in found["requests_per_second"].items()) or "none"
    return {
        "hostile jobs": found["hostile"],
        "memory, MiB": found["memory_mb"],
        "CPU, cores": str(found["cores"]),
        "honest scale-up, s": str(found["reaction_seconds"]),
        "alone, s": str(found["alone_seconds"]),
        "requests a second": asked,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="benchmarks.hostile_tenants"
    )
    parser.add_argument("--jobs", type=int, action="append", help=f"hostile jobs (default: {SIZES})")
    parser.add_argument("--quick", action="store_true", help=f"{SIZES[0]} jobs only")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument("--quiet", action="store_true", help="for comparison: no coordinator is hostile")
    for role in ("--be-hostile", "--be-quiet"):
        parser.add_argument(role, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.be_hostile or given.be_quiet:
        asyncio.run(be_hostile(given.be_hostile or given.be_quiet, quiet=given.be_quiet is not None))
    role = "--be-quiet" if given.quiet else "--be-hostile"
    found: dict[str, Any] = {"runs": [], "rows": [], "text": TEXT}
    if not kube_apiserver.at_hand():
        found["skipped"] = kube_apiserver.HOW
    for count in given.jobs or SIZES[: 1 if given.quick else None] if kube_apiserver.at_hand() else ():
        with tempfile.TemporaryDirectory(prefix="vf-tenants-", ignore_cleanup_errors=True) as directory:
            folder = Path(directory)
            with kube_apiserver.api_server(folder) as kubeconfig:
                try:
                    found["runs"].append(asyncio.run(measure(folder, kubeconfig, count, role)))
                except BaseException:
                    print((folder / "operator.log").read_text()[-4_000:], file=sys.stderr)
                    raise
        found["rows"].append(_row(found["runs"][-1]))
        print(json.dumps(found["runs"][-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

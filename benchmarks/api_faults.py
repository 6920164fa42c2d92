"""The operator while its API server is in trouble: a real one with etcd, behind a proxy that plays the trouble.

A hundred jobs train. Each fault lasts 80 s, and a further job is scaled up twice: in the middle of the fault,
and at the moment in which it ends. Measured are the requests that reach the proxy meanwhile, the operator's memory, and
how long it takes until the pods of both are there. At the end nothing may be missing, and nothing made twice.

It needs ``kube-apiserver`` and ``etcd`` on the PATH.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml
from aiohttp import web
from tests import kube_apiserver

from benchmarks import operator_scale
from benchmarks.hostile_tenants import job, run_pods
from benchmarks.operator_scale import ADDRESS, NAMESPACE, coordinators, insisting, operated
from virtualflow.launcher.supervisor import die_with
from virtualflow_operator.k8s.client import JOBS, PODS, KubeApi

JOBS_MADE = 100
SECONDS = 80.0
"""How long each fault lasts."""
QUICK_SECONDS = 20.0
PATIENCE = 300.0
WISH = 5
"""Seconds of ``Retry-After``."""
LATENCY = (30.0, 60.0)
FAULTS = {
    "none": "nothing",
    "gone": "each watch ends with 410 Gone",
    "ended": "each watch ends at once",
    "stalled": "watches stay open, and nothing comes",
    "late": f"each request takes {LATENCY[0]:.0f} to {LATENCY[1]:.0f} s",
    "refused": f"429 with Retry-After: {WISH}",
}
TEXT = f"""\
{JOBS_MADE} jobs train while a proxy before the API server plays a fault for 80 s. A job is scaled up in the middle of
the fault and at its end. Stalled watches stay stalled. An operator that cannot renew its lease for 7 s ends and
restarts."""
GONE = json.dumps({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}).encode() + b"\n"
_OWN = {"host", "authorization", "content-length", "transfer-encoding", "connection", "content-encoding"}


class Proxy:
    """Between the operator and its API server.

    Args:
        server: the API server's address.
        token: what it is asked with.
        session: the connections to it.
    """

    def __init__(self, server: str, token: str, session: aiohttp.ClientSession) -> None:
        self._server, self._token, self._session = server, token, session
        self._turn = asyncio.Event()
        self.fault = "none"
        self.asked: Counter[str] = Counter()
        """Requests so far: verb and resource."""

    def play(self, fault: str) -> None:
        """Begin with a fault, or end it by ``none``."""
        self.fault = fault
        self._turn.set()
        self._turn = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on, or play the fault."""
        watches = request.query.get("watch") == "true"
        parts = [part for part in request.path.split("/") if part]
        at = parts.index("namespaces") + 2 if "namespaces" in parts[:-2] else 2 + (parts[0] == "apis")
        self.asked[f"{'WATCH' if watches else request.method} {parts[at] if at < len(parts) else request.path}"] += 1
        if self.fault == "refused":
            status = {"kind": "Status", "code": 429, "reason": "TooManyRequests", "message": "too many requests"}
            return web.json_response(status, status=429, headers={"Retry-After": str(WISH)})
        if self.fault == "late":
            await asyncio.sleep(random.uniform(*LATENCY))
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OWN}
        headers["Authorization"] = f"Bearer {self._token}"
        body = await request.read()
        url = self._server + request.raw_path
        async with self._session.request(request.method, url, headers=headers, data=body or None) as found:
            kept = {name: value for name, value in found.headers.items() if name.lower() not in _OWN}
            if not watches or found.status >= 300:
                return web.Response(status=found.status, headers=kept, body=await found.read())
            answer = web.StreamResponse(headers=kept)
            await answer.prepare(request)
            await self._stream(found, answer)
            return answer

    async def _stream(self, found: aiohttp.ClientResponse, answer: web.StreamResponse) -> None:
        """Pass whole lines on, until the watch or its luck ends."""
        rest, chunk = b"", None
        broken = asyncio.ensure_future(self._turn.wait())
        try:
            while True:
                if self.fault == "gone":
                    await answer.write(GONE)
                if self.fault in ("gone", "ended", "refused"):
                    return
                if self.fault == "stalled":
                    await asyncio.Event().wait()
                chunk = asyncio.ensure_future(found.content.readany())
                await asyncio.wait({chunk, broken}, return_when=asyncio.FIRST_COMPLETED)
                if not chunk.done():
                    chunk.cancel()
                    broken = asyncio.ensure_future(self._turn.wait())
                    continue
                if not chunk.result():
                    return
                whole, ends, rest = (rest + chunk.result()).rpartition(b"\n")
                await answer.write(whole + ends)
        finally:
            broken.cancel()
            if chunk is not None:
                chunk.cancel()


@asynccontextmanager
async def between(config: dict[str, Any], path: Path) -> AsyncIterator[Proxy]:
    """A proxy before the API server of a kubeconfig; the one that leads to the proxy is written to ``path``."""
    cluster, token = config["clusters"][0]["cluster"], config["users"][0]["user"]["token"]
    connector = aiohttp.TCPConnector(ssl=False, limit=0)
    limits = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=limits, auto_decompress=True) as session:
        proxy = Proxy(cluster["server"], token, session)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", proxy.answer)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        port = kube_apiserver.free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        await asyncio.to_thread(path.write_text, json.dumps(config))
        try:
            yield proxy
        finally:
            await runner.cleanup()


class Container:
    """The operator's process as a kubelet has it: begun again a second after it has ended; its memory, too."""

    def __init__(self, process: psutil.Process) -> None:
        self._process: psutil.Process = process
        self._words, self._surroundings = process.cmdline(), process.environ()
        self.restarts, self.most = 0, 0

    async def run(self) -> None:
        """Until it is cancelled; a process that was begun again ends with it."""
        try:
            while True:
                if not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE:
                    self.restarts += 1
                    await asyncio.sleep(1.0)
                    self._process = psutil.Popen(
                        self._words, env=self._surroundings, stdout=subprocess.DEVNULL, preexec_fn=die_with(os.getpid())
                    )
                self.most = max(self.most, self._process.memory_info().rss)
                await asyncio.sleep(0.1)
        finally:
            if isinstance(self._process, psutil.Popen):
                self._process.kill()


async def measure(folder: Path, kubeconfig: Path, seconds: float, faults: Sequence[str]) -> list[dict[str, Any]]:
    """Let jobs train, and play one fault after the other; a row each."""
    config = yaml.safe_load(await asyncio.to_thread(kubeconfig.read_text))
    operator_scale.WORKERS = 1
    running: dict[str, float] = {}
    async with (
        between(config, folder / "through") as proxy,
        operated(folder, kubeconfig, 1, folder / "through") as (api, identities, process, _),
        coordinators(identities),
        asyncio.TaskGroup() as group,
    ):
        container = Container(process)
        tasks = [
            group.create_task(container.run()),
            group.create_task(run_pods(api, NAMESPACE, ADDRESS, running)),
        ]
        for name in ("honest", *(f"job-{number}" for number in range(JOBS_MADE))):
            identities.make(await insisting(lambda name=name: api.create(JOBS, NAMESPACE, job(NAMESPACE, name))))
        async with asyncio.timeout(PATIENCE):
            while len(running) < 2 * (JOBS_MADE + 1):  # noqa: ASYNC110 - another task fills it
                await asyncio.sleep(0.1)
        rows, workers = [], 1
        made = {pod["metadata"]["uid"] for pod in await api.list(PODS, NAMESPACE)}
        for fault in faults:
            await asyncio.sleep(10.0)
            rows.append(await _suffer(api, proxy, container, running, fault, seconds, workers))
            workers += 2
            pods = await api.list(PODS, NAMESPACE)
            assert made < {pod["metadata"]["uid"] for pod in pods}, "a pod is gone"
            made = {pod["metadata"]["uid"] for pod in pods}
            assert len(made) == 2 * (JOBS_MADE + 1) + workers - 1, f"{len(made)} pods with {workers} workers"
            print(json.dumps(rows[-1]), flush=True)
        for task in tasks:
            task.cancel()
    return rows


async def _suffer(
    api: KubeApi,
    proxy: Proxy,
    container: Container,
    running: dict[str, float],
    fault: str,
    seconds: float,
    workers: int,
) -> dict[str, Any]:
    """The figures of one fault; the job has so many workers before it."""

    async def scale(wanted: int) -> float:
        began = time.monotonic()
        await api.patch(JOBS, NAMESPACE, "honest", {"spec": {"replicas": wanted}})
        return began

    async def seen(wanted: int) -> float:
        async with asyncio.timeout(PATIENCE):
            while (found := running.get(f"honest-workers-{wanted - 1}")) is None:  # noqa: ASYNC110 - another task fills it
                await asyncio.sleep(0.01)
        return found

    container.most, restarts, before = 0, container.restarts, proxy.asked.copy()
    proxy.play(fault)
    await asyncio.sleep(seconds / 2)
    meanwhile = await scale(workers + 1)
    await asyncio.sleep(seconds / 2)
    asked = proxy.asked - before
    proxy.play("none")
    ended = await scale(workers + 2)
    first, second = await seen(workers + 1), await seen(workers + 2)
    return {
        "fault": fault,
        "requests_per_second": round(asked.total() / seconds, 2),
        "most_asked": {kind: round(count / seconds, 2) for kind, count in asked.most_common(5)},
        "memory_mb": round(container.most / 2**20),
        "restarts": container.restarts - restarts,
        "meanwhile_seconds": round(first - meanwhile, 1) if first < ended else None,
        "after_seconds": round(max(first, second) - ended, 1),
    }


def _row(found: dict[str, Any]) -> dict[str, Any]:
    during = found["meanwhile_seconds"]
    return {
        "fault": FAULTS[found["fault"]],
        "requests a second": found["requests_per_second"],
        "memory, MiB": found["memory_mb"],
        "restarts": str(found["restarts"]),
        "scale-up during it, s": "after its end" if during is None else str(during),
        "scale-up at its end, s": str(found["after_seconds"]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="benchmarks.api_faults"
    )
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only that one (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS:.0f} s each, only to see that it works")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {"runs": [], "rows": [], "text": TEXT}
    if not kube_apiserver.at_hand():
        found["skipped"] = kube_apiserver.HOW
    else:
        with tempfile.TemporaryDirectory(prefix="vf-faults-", ignore_cleanup_errors=True) as directory:
            folder, seconds = Path(directory), QUICK_SECONDS if given.quick else SECONDS
            with kube_apiserver.api_server(folder) as kubeconfig:
                try:
                    found["runs"] = asyncio.run(measure(folder, kubeconfig, seconds, given.fault or list(FAULTS)))
                except BaseException:
                    print((folder / "operator.log").read_text()[-4_000:], file=sys.stderr)
                    raise
        found["rows"] = [_row(run) for run in found["runs"]]
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

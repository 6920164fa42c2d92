"""The operator with a thousand jobs and eight thousand pods in one queue, on a real API server with etcd.

This program is kubelet and coordinators: it lets every pod run as soon as it is there, and answers for all coordinators
that their jobs train with all that they want, each by the identity of its job. So what is measured is the operator, the
API server and what lies between them. The queue has four kinds of device with room for all. Measured are

- the *burst*: from the first job made until every job has its workers, trains, and its status says so;
- a minute in which nothing happens;
- one *more* job: until its first pod is there.

What the operator costs is read from ``/proc``, what it asked for and how long its decisions took from its own metrics.
It needs ``kube-apiserver`` and ``etcd`` on the PATH.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import ssl
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from aiohttp import WSMsgType, web
from tests import kube_apiserver, statuses
from tests.operator_metrics import requests, scrape

from benchmarks.jobs import ROOT, environment
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.certificates import Party, server_name
from virtualflow.protocol.identity import Identity
from virtualflow_operator.constants import COORDINATOR_PORT, LABEL_JOB
from virtualflow_operator.controllers.issuer import Issuer
from virtualflow_operator.k8s.client import JOBS, NODES, PODS, QUEUES, ApiError, KubeApi, Object, Resource, Unavailable
from virtualflow_operator.observability.metrics import CALLS
from virtualflow_operator.settings import ApiSettings, CertificateSettings

JOBS_MADE = 1_000
WORKERS = 7
KINDS = ("a", "b", "c", "d")
NAMESPACE = "default"
DEVICE = "example.com/device"
SLOT = "example.com/slot"
A_NODE = 32
"""Workers for which a node has room."""
ADDRESS = "127.77.0.2"
"""Of all pods: a loopback address, where the stand-in for the coordinators listens."""
PATIENCE = 3_000.0
IDLE_SECONDS = 60.0
AT_ONCE = 16
"""Jobs that are being created at a time."""
DECISIONS = "virtualflow_shared_decision_seconds"
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)


def job(name: str) -> Object:
    """A job whose workers each take a slot."""
    container = {"name": "trainer", "image": "trainer:1", "resources": {"limits": {SLOT: "1"}}}
    spec = {
        "queue": "shared",
        "virtualNodes": WORKERS,
        "maxReplicas": WORKERS,
        "workerGroups": [{"name": "workers", "template": {"spec": {"containers": [container]}}}],
    }
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": JOBS.api_version, "kind": "VirtualFlowJob", "metadata": metadata, "spec": spec}


def training(name: str) -> http_api.Status:
    """The status of a job in whose training all its workers take part."""
    workers = tuple(
        http_api.WorkerStatus(
            f"{name}-workers-{n}", f"process-{n}", ADDRESS, 1, "training", n, n + 1 + (n == WORKERS - 1)
        )
        for n in range(WORKERS)
    )
    facts: dict[str, Any] = {"step": 7, "total_steps": 600, "metrics": {"loss": 0.5}, "steps_per_second": 30.0}
    return statuses.coordinator_status("training", *workers, wanted=WORKERS, step_ms=33.0, **facts)


class Identities:
    """The coordinators' identities, each in a folder by the name under which it is asked for.

    Args:
        folder: for them; another process that serves coordinators finds them there.
        key: the operator's.
    """

    def __init__(self, folder: Path, key: bytes) -> None:
        self.folder = folder
        self.names: dict[str, str] = {}
        """Names of jobs by their coordinators' names."""
        self._issuer = Issuer([key], CertificateSettings())

    def make(self, body: Object) -> None:
        """Give a job's coordinator one."""
        uid, name = body["metadata"]["uid"], body["metadata"]["name"]
        self.names[server_name(uid)] = name
        files = self._issuer.files_of(Party(uid, "coordinator", f"{name}-coordinator"), time.time())
        ready, made = self.folder / server_name(uid), self.folder / f"{uid}.new"
        made.mkdir(parents=True)
        for file, content in files.items():
            (made / file).write_bytes(content)
        made.rename(ready)


class Doors:
    """Mutual TLS for one server that stands for the coordinators in ``folder``: clients say which one they ask."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, ssl.SSLContext] = {}
        self._asked: dict[ssl.SSLContext, str] = {}
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.verify_mode = ssl.CERT_REQUIRED
        self.context.sni_callback = self._choose

    def asked(self, request: web.Request) -> str:
        """The name of the coordinator that a request is for."""
        assert request.transport is not None
        return self._asked[request.transport.get_extra_info("ssl_object").context]

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        if name is None or not (self._folder / name).is_dir():  # the client tries again
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        if name not in self._known:
            context = Identity(self._folder / name).newest().server
            assert context is not None
            self._known[name], self._asked[context] = context, name
        connection.context = self._known[name]
        return None


@asynccontextmanager
async def coordinators(identities: Identities) -> AsyncIterator[None]:
    """One server for all coordinators."""
    doors = Doors(identities.folder)

    async def watch(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_bytes(m.encode(training(identities.names[doors.asked(request)])))
        async for message in socket:
            if message.type is WSMsgType.ERROR:
                break
        return socket

    async def call(_: web.Request) -> web.Response:
        return web.Response(body=m.encode(http_api.Answer("noted")), content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/watch", watch)
    app.router.add_post("/v1/{call}", call)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, ADDRESS, COORDINATOR_PORT, ssl_context=doors.context).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def following(api: KubeApi, resource: Resource, namespace: str = NAMESPACE) -> AsyncIterator[Object]:
    """Yield all objects there are, and each one that has changed; a watch may end at any time."""
    while True:
        with suppress(ApiError):  # it begins anew
            async with aclosing(api.watch(resource, namespace, "", "", 300.0)) as events:
                async for _, body in events:
                    yield body
        await asyncio.sleep(0.1)


async def make_cluster(api: KubeApi, nodes: int) -> None:
    """The resources, as many nodes of each kind, and the queue that covers them."""
    for name in ("virtualflowjobs", "virtualflowqueues"):
        await api.create(CRDS, None, yaml.safe_load((ROOT / "crds" / f"{name}.yaml").read_text()))
    for resource in (JOBS, QUEUES):
        await served(api, resource)
    for kind in KINDS:
        for number in range(nodes):
            name = f"node-{kind}-{number}"
            metadata = {"name": name, "labels": {DEVICE: kind}}
            await api.create(NODES, None, {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
            # Nobody here takes away the taint with which a node begins.
            await api.patch(NODES, None, name, {"spec": {"taints": None}})
            await api.patch(NODES, None, name, {"status": {"allocatable": {SLOT: str(A_NODE)}}}, "status")
    kinds = [{"name": kind, "nodeSelector": {"matchLabels": {DEVICE: kind}}} for kind in KINDS]
    spec = {"resource": SLOT, "kinds": kinds}
    body = {"apiVersion": QUEUES.api_version, "kind": "VirtualFlowQueue", "metadata": {"name": "shared"}, "spec": spec}
    await api.create(QUEUES, None, body)


async def served(api: KubeApi, resource: Resource) -> None:
    """Wait until the API server serves a kind of object."""
    async with asyncio.timeout(60):
        while True:
            try:
                await api.list(resource)
            except ApiError:
                await asyncio.sleep(0.1)
            else:
                return


class Kubelets:
    """Each new pod runs at once."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._seen: set[str] = set()
        self._first: dict[str, asyncio.Future[float]] = {}

    async def first_pod(self, job_name: str) -> float:
        """When a pod of the job was first seen (``time.monotonic``)."""
        return await self._noted(job_name)

    def _noted(self, job_name: str) -> asyncio.Future[float]:
        return self._first.setdefault(job_name, asyncio.get_running_loop().create_future())

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            async for pod in following(self._api, PODS):
                name = pod["metadata"]["name"]
                if name not in self._seen:
                    self._seen.add(name)
                    first = self._noted(pod["metadata"]["labels"][LABEL_JOB])
                    if not first.done():
                        first.set_result(time.monotonic())
                    group.create_task(self._begin(name))

    async def _begin(self, name: str) -> None:
        runs = {"status": {"phase": "Running", "podIP": ADDRESS}}
        await insisting(lambda: self._api.patch(PODS, NAMESPACE, name, runs, "status"))


async def insisting(request: Callable[[], Awaitable[Object]]) -> Object:
    """The answer to a request, which a busy API server may take some time for."""
    while True:
        try:
            return await request()
        except Unavailable:
            await asyncio.sleep(0.5)


async def all_train(api: KubeApi, count: int) -> None:
    """Wait until so many jobs' statuses say that all their workers train."""
    ready: set[str] = set()
    async for body in following(api, JOBS):
        status = body.get("status") or {}
        if status.get("readyReplicas") == WORKERS == (status.get("allocation") or {}).get("workers"):
            ready.add(body["metadata"]["name"])
            if len(ready) == count:
                return


def quantile(sample: dict[str, float], histogram: str, part: float) -> float:
    """Seconds that so large a part did not exceed, on a line within the bucket, as Prometheus reckons it."""
    found = re.compile(rf'{histogram}_bucket{{le="([^"]+)"}}')
    buckets = sorted((float(hit[1]), value) for name, value in sample.items() if (hit := found.match(name)))
    wanted, below, low = part * buckets[-1][1], 0.0, 0.0
    for high, count in buckets:
        if count >= wanted:
            return low + (high - low) * (wanted - below) / (count - below) if high != float("inf") else low
        below, low = count, high
    return low


def mean(sample: dict[str, float], histogram: str) -> float:
    """Seconds on average."""
    return sample[f"{histogram}_sum"] / sample[f"{histogram}_count"]


def leads(port: int) -> bool:
    """Whether the operator has begun."""
    try:
        return scrape(port).get("virtualflow_leader") == 1.0
    except OSError:
        return False


@asynccontextmanager
async def operated(
    folder: Path, kubeconfig: Path, nodes: int, through: Path | None = None
) -> AsyncIterator[tuple[KubeApi, Identities, psutil.Process, int]]:
    """A cluster of so many nodes and an operator that leads: its API, identities, the operator's process, its metrics.

    ``through``: another kubeconfig, by which the operator reaches it.
    """
    key = folder / "key"
    key.write_text(secrets.token_hex(32))
    os.environ["KUBECONFIG"] = str(kubeconfig)
    async with await KubeApi.connect(ApiSettings(request_timeout=120.0)) as api:
        await make_cluster(api, nodes)
        health, port = kube_apiserver.free_port(), kube_apiserver.free_port()
        variables = {"PYTHONPATH": environment()["PYTHONPATH"], "KUBECONFIG": str(through or kubeconfig)}
        arguments = [
            *("env", *(f"{name}={value}" for name, value in variables.items())),
            *(sys.executable, "-m", "virtualflow_operator", "--image=operator:test"),
            *(f"--key-file={key}", f"--lease-namespace={NAMESPACE}"),
            *(f"--health-port={health}", f"--metrics-port={port}"),
        ]
        with kube_apiserver.running(arguments, folder / "operator.log") as process:
            async with asyncio.timeout(120):
                while not await asyncio.to_thread(leads, port):  # noqa: ASYNC110 - another process begins to answer
                    await asyncio.sleep(0.2)
            yield api, Identities(folder / "identities", key.read_bytes()), psutil.Process(process.pid), port


async def measure(folder: Path, kubeconfig: Path, jobs: int) -> dict[str, Any]:
    """All of it; the figures."""
    nodes = -(-jobs * WORKERS // (len(KINDS) * A_NODE)) * 2  # twice the room that is needed: kinds need not be even
    async with operated(folder, kubeconfig, nodes) as (api, identities, process, port):
        return await _burst(api, identities, process, port, jobs)


async def _burst(api: KubeApi, identities: Identities, process: psutil.Process, port: int, jobs: int) -> dict[str, Any]:
    kubelets = Kubelets(api)
    numbers = iter(range(jobs))

    async def make(name: str) -> None:
        identities.make(await insisting(lambda: api.create(JOBS, NAMESPACE, job(name))))

    async def some() -> None:
        for number in numbers:
            await make(f"job-{number}")

    def spent() -> float:
        times = process.cpu_times()
        return times.user + times.system

    async with coordinators(identities), asyncio.timeout(PATIENCE), asyncio.TaskGroup() as cluster:
        running = cluster.create_task(kubelets.run())
        before, began = spent(), time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(all_train(api, jobs))
            for _ in range(AT_ONCE):
                group.create_task(some())
        took, cpu = time.monotonic() - began, spent() - before
        after = await asyncio.to_thread(scrape, port)
        pods = await api.list(PODS, NAMESPACE)
        queue = await api.get(QUEUES, None, "shared")
        print(f"{len(pods)} pods; the operator's requests: {dict(requests(after).most_common())}", flush=True)

        while True:  # the last of the burst's echoes
            settled = await asyncio.to_thread(scrape, port)
            await asyncio.sleep(5.0)
            now = await asyncio.to_thread(scrape, port)
            if requests(now) - requests(settled) <= Counter({"GET leases": 5, "PUT leases": 5}):
                break
        idle_cpu, idle_since, quiet = spent(), time.monotonic(), requests(now)
        await asyncio.sleep(IDLE_SECONDS)
        idle = (spent() - idle_cpu) / (time.monotonic() - idle_since)
        asked = requests(await asyncio.to_thread(scrape, port)) - quiet

        more_since = time.monotonic()
        await make("one-more")
        more = await kubelets.first_pod("one-more") - more_since
        end = await asyncio.to_thread(scrape, port)
        running.cancel()
        return {
            "jobs": jobs,
            "pods": len(pods),
            "allocated": {kind["name"]: kind["allocated"] for kind in queue["status"]["kinds"]},
            "converged_seconds": round(took, 1),
            "cpu_seconds": round(cpu, 1),
            "requests": requests(after).total(),
            "requests_by_kind": dict(requests(after).most_common()),
            "memory_mb": round(process.memory_info().rss / 2**20),
            "idle_cores": round(idle, 4),
            "idle_requests": dict(asked),
            "decisions": int(end[f"{DECISIONS}_count"]),
            "decision_mean_ms": round(
                1e3 * end["virtualflow_shared_decision_seconds_sum"] / end["virtualflow_shared_decision_seconds_count"],
                1,
            ),
            "decision_p99_ms": round(1e3 * quantile(end, DECISIONS, 0.99), 1),
            "reconcile_p99_ms": round(1e3 * quantile(end, "virtualflow_reconcile_duration_seconds", 0.99), 1),
            "one_more_seconds": round(more, 2),
        }


def _within(milliseconds: float) -> str:
    """A quantile; the histogram says nothing beyond its last bound."""
    last = 1e3 * CALLS[-1]
    return f"beyond {last:,.0f} ms" if milliseconds >= last else f"within {milliseconds} ms"


def _rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The table."""
    idle = ", ".join(f"{count} {kind}" for kind, count in found["idle_requests"].items()) or "none"
    told = {
        "jobs; pods": f"{found['jobs']:,}; {found['pods']:,}",
        "until all train": f"{found['converged_seconds']:,} s",
        "CPU time": f"{found['cpu_seconds']:,} s",
        "requests": f"{found['requests']:,}, {found['requests'] / found['jobs']:.1f} a job",
        "memory": f"{found['memory_mb']:,} MiB",
        f"{found['decisions']:,} decisions about the queue": f"mean {found['decision_mean_ms']} ms, "
        f"99 % within {found['decision_p99_ms']} ms",
        "reconciling a job": f"99 %: {_within(found['reconcile_p99_ms'])}",
        "a minute of rest": f"{found['idle_cores']:.1%} of a core; requests: {idle}",
        "one job more": f"its first pod after {found['one_more_seconds']} s",
    }
    return [{"what": what, "measured": value} for what, value in told.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="benchmarks.operator_scale"
    )
    parser.add_argument("--quick", action="store_true", help="a twentieth of the jobs, only to see that it works")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    given = parser.parse_args(arguments)
    found: dict[str, Any]
    if not kube_apiserver.at_hand():
        found = {"skipped": kube_apiserver.HOW, "rows": []}
    else:
        with tempfile.TemporaryDirectory(prefix="vf-scale-", ignore_cleanup_errors=True) as directory:
            folder = Path(directory)
            with kube_apiserver.api_server(folder) as kubeconfig:
                try:
                    found = asyncio.run(measure(folder, kubeconfig, JOBS_MADE // 20 if given.quick else JOBS_MADE))
                except BaseException:
                    print((folder / "operator.log").read_text()[-4_000:], file=sys.stderr)
                    raise
        found["rows"] = _rows(found)
        found["text"] = (
            "One queue with four kinds of device, jobs of seven workers, a real `kube-apiserver` with etcd. The same\n"
            "cores play kubelets and coordinators, so clock times are upper bounds."
        )
    for row in found["rows"]:
        print(f"{row['what']:34} {row['measured']}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

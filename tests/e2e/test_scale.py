"""Three hundred jobs with three workers each, against a real API server without nodes.

The test is the kubelet: it lets pods run as soon as they exist. One stand-in answers for all three hundred coordinators
that the training goes on. What the operator costs is read from /proc, what it asks for from its own metrics.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import WSMsgType, web
from cluster import until

from kube_apiserver import HOW, api_server, at_hand, free_port, running
from operator_metrics import requests, scrape
from statuses import coordinator_status
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow_operator.constants import COORDINATOR_PORT, LABEL_JOB, LABEL_ROLE, PLURAL, WORKER
from virtualflow_operator.controllers.issuer import derive_token
from virtualflow_operator.k8s.client import JOBS, PODS, ApiError, KubeApi, Resource, Unavailable
from virtualflow_operator.settings import ApiSettings

ROOT = Path(__file__).parents[2]
NAMESPACE = "default"
JOBS_MADE = 300
WORKERS = 3
ADDRESS = "127.77.0.1"
"""Of all pods: a loopback address, where the stand-in for the coordinators listens."""
MOST_PROCESSOR_SECONDS = 60.0
"""Of the operator for all jobs: how long it takes by the clock is the API server's and the machine's affair as well."""
PER_JOB = {
    "POST pods": 2 + 1 + WORKERS,  # both templates tried in a dry run; the coordinator; the workers
    "POST services": 1,
    "POST secrets": 1,
    "POST poddisruptionbudgets": 1,  # where policy/v1 is served, which is from Kubernetes 1.21 on
    "POST events": 3,  # Plaintext, WorkersCreated, Training
    "PATCH virtualflowjobs": 3,  # taken up; pods made; training
}
"""What a job of so many workers takes: 15 requests, of which none can be left out or shared with another job."""
MOST_AGAIN = 1.05
"""A status is written once more where news of workers come in two parts."""
MOST_OTHERS = 15
"""Lists of what there is, and what is asked before the lease is had."""
WATCH_SECONDS = 300.0
IDLE_SECONDS = 60.0
MOST_CORES = 0.2
MOST_BYTES = 300e6

CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)

pytestmark = [pytest.mark.timeout(600)]


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    if not at_hand():
        pytest.skip(HOW)
    with api_server(tmp_path) as path:
        yield path


def job(number: int) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load((ROOT / "examples/digits.yaml").read_text())
    body["metadata"]["name"] = f"job-{number:03d}"
    body["spec"] |= {"replicas": WORKERS, "security": {"plaintext": True}}  # its coordinators are stand-ins
    return body


def training(name: str) -> http_api.Status:
    """The status of a job in whose training all three workers take part."""
    workers = tuple(
        http_api.WorkerStatus(f"{name}-workers-{n}", f"process-{n}", ADDRESS, 1, "training", 2 * n, 2 * n + 2)
        for n in range(WORKERS)
    )
    facts = {"step": 7, "total_steps": 600, "metrics": {"loss": 0.5}, "steps_per_second": 30.0}
    return coordinator_status("training", *workers, wanted=WORKERS, reason="3 workers training", **facts)


@asynccontextmanager
async def coordinators(names: dict[str, str]) -> AsyncIterator[Counter[str]]:
    """One server for all coordinators; ``names``: jobs by their tokens. Counts what is asked."""
    asked: Counter[str] = Counter()

    async def watch(request: web.Request) -> web.WebSocketResponse:
        asked["watch"] += 1
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        token = request.headers["Authorization"].removeprefix("Bearer ")
        await socket.send_bytes(m.encode(training(names[token])))
        async for message in socket:
            if message.type is WSMsgType.ERROR:
                break
        return socket

    async def call(request: web.Request) -> web.Response:
        asked[request.path] += 1
        return web.Response(body=m.encode(http_api.Answer("noted")), content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/watch", watch)
    app.router.add_post("/v1/{call}", call)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, ADDRESS, COORDINATOR_PORT).start()
    try:
        yield asked
    finally:
        await runner.cleanup()


async def following(api: KubeApi, resource: Resource) -> AsyncIterator[dict[str, Any]]:
    """Yield all objects there are, and each one that has changed; a watch may end at any time.

    A busy API server refuses to watch from a version that its cache has not come to yet: "Too large resource version".
    """
    while True:
        with suppress(Unavailable):
            async for _, body in api.watch(resource, NAMESPACE, "", "", WATCH_SECONDS):
                yield body
        await asyncio.sleep(0.1)


async def let_run(api: KubeApi) -> None:
    """Let every pod run as soon as it is made, until all are: what scheduler and kubelet do."""
    status = {"status": {"phase": "Running", "podIP": ADDRESS}}
    seen: set[str] = set()
    async with asyncio.TaskGroup() as patches:
        async for pod in following(api, PODS):
            name = pod["metadata"]["name"]
            if name not in seen:
                seen.add(name)
                patches.create_task(api.patch(PODS, NAMESPACE, name, status, "status"))
            if len(seen) == JOBS_MADE * (WORKERS + 1):
                return


async def all_ready(api: KubeApi) -> None:
    """Wait until every job's status says that all its workers are ready."""
    ready: set[str] = set()
    async for body in following(api, JOBS):
        status = body.get("status") or {}
        if status.get("readyReplicas") == WORKERS == status.get("replicas"):
            ready.add(body["metadata"]["name"])
            if len(ready) == JOBS_MADE:
                return


def check_requests(made: Counter[str], seconds: float) -> None:
    """Hold what was asked against what so many jobs take; the lease is renewed by the clock, whoever is there."""
    for kind, count in PER_JOB.items():
        assert JOBS_MADE * count <= made[kind] <= JOBS_MADE * count * MOST_AGAIN, f"{kind}: {made}"
    leases = {kind for kind in made if kind.endswith(" leases")}
    assert sum(made[kind] for kind in leases) <= seconds, made
    assert sum(count for kind, count in made.items() if kind not in leases | PER_JOB.keys()) <= MOST_OTHERS, made


def lists(sample: dict[str, float]) -> float:
    """GET requests for what the operator lists; the lease is the only object that it reads one by one."""
    pattern = re.compile(rf'virtualflow_api_requests_total{{.*method="GET",resource="({PLURAL}|pods|services|nodes)"')
    return sum(value for name, value in sample.items() if pattern.match(name))


def writes(sample: dict[str, float]) -> float:
    pattern = re.compile(r'virtualflow_api_requests_total{.*method="(POST|PATCH|DELETE)"')
    return sum(value for name, value in sample.items() if pattern.match(name))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_three_hundred_jobs_take_less_than_a_minute_of_a_core_and_nearly_nothing_after(
    kubeconfig: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = asyncio.run(burst(kubeconfig, tmp_path))
    with capsys.disabled():
        print("\n300 jobs of 3 workers: " + ", ".join(f"{name} {value}" for name, value in figures.items()))
    assert figures["burst_processor_seconds"] <= MOST_PROCESSOR_SECONDS
    assert figures["list_calls"] == 0
    assert figures["writes"] == 0
    assert figures["cores"] < MOST_CORES
    assert figures["megabytes"] < MOST_BYTES / 1e6


async def burst(kubeconfig: Path, folder: Path) -> dict[str, float]:
    key = folder / "key"
    key.write_text(secrets.token_hex(32))
    os.environ["KUBECONFIG"] = str(kubeconfig)  # for the client; pytest's own environment is put back below
    try:
        api = await KubeApi.connect(ApiSettings(request_timeout=30.0))
    finally:
        del os.environ["KUBECONFIG"]
    async with api:
        crd = yaml.safe_load((ROOT / "crds/virtualflowjobs.yaml").read_text())
        await api.create(CRDS, None, crd)
        await served(api)
        health, port = free_port(), free_port()
        arguments = [
            *("env", f"KUBECONFIG={kubeconfig}"),
            *(
                sys.executable,
                "-m",
                "virtualflow_operator",
                "--image",
                "operator:test",
                "--allow-plaintext",
                "--key-file",
                str(key),
            ),
            *("--lease-namespace", NAMESPACE),
            *("--health-port", str(health), "--metrics-port", str(port)),
        ]
        with running(arguments, folder / "operator.log") as process:
            await asyncio.to_thread(until, "the operator leads", lambda: leads(port), 60.0)
            try:
                return await measure(api, key.read_bytes(), process.pid, port)
            except AssertionError as error:
                error.add_note((folder / "operator.log").read_text()[-4_000:])
                raise


def leads(port: int) -> bool:
    try:
        return scrape(port).get("virtualflow_leader") == 1.0
    except OSError:
        return False


async def served(api: KubeApi) -> None:
    for _ in range(300):
        try:
            await api.list(JOBS, NAMESPACE)
        except ApiError:
            await asyncio.sleep(0.1)
        else:
            return
    pytest.fail("the API server does not serve the CRD")


async def measure(api: KubeApi, key: bytes, pid: int, port: int) -> dict[str, float]:
    begun, begun_processor = time.monotonic(), cpu_seconds(pid)
    made = await asyncio.gather(*(api.create(JOBS, NAMESPACE, job(n)) for n in range(JOBS_MADE)))
    names = {derive_token(key, body["metadata"]["uid"]): body["metadata"]["name"] for body in made}
    async with coordinators(names) as asked:
        async with asyncio.timeout(WATCH_SECONDS), asyncio.TaskGroup() as watches:
            watches.create_task(let_run(api))
            watches.create_task(all_ready(api))
        took, spent = time.monotonic() - begun, cpu_seconds(pid) - begun_processor
        pods = await api.list(PODS, NAMESPACE)
        per_job = Counter(pod["metadata"]["labels"][LABEL_JOB] for pod in pods)
        assert set(per_job.values()) == {WORKERS + 1}
        assert sum(pod["metadata"]["labels"][LABEL_ROLE] == WORKER for pod in pods) == JOBS_MADE * WORKERS
        before = scrape(port)
        while True:  # the last of the burst's echoes: nothing has been written for some seconds
            await asyncio.sleep(5.0)
            after = scrape(port)
            if writes(after) == writes(before):
                break
            before = after
        processor, idle_since = cpu_seconds(pid), time.monotonic()
        await asyncio.sleep(IDLE_SECONDS)
        seconds = time.monotonic() - idle_since
        end = scrape(port)
        assert asked["watch"] == JOBS_MADE, asked
        sent = requests(after)
        print(f"requests of the burst: {dict(sent.most_common())}")
        check_requests(sent, idle_since - begun)
        return {
            "burst_seconds": round(took, 1),
            "burst_processor_seconds": round(spent, 1),
            "burst_requests": sent.total(),
            "cores": round((cpu_seconds(pid) - processor) / seconds, 4),
            "megabytes": round(resident(pid) / 1e6, 1),
            "list_calls": lists(end) - lists(after),
            "writes": writes(end) - writes(after),
        }

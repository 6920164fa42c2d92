"""A fake cluster with the operator in it: what the tests of the whole process share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from fake_api import FakeApi
from fake_api.store import Change
from kubelet import Kubelet
from resource_rules import CRD_FILE, QUEUE_CRD_FILE, read_yaml
from rights import WITH_KUEUE, documented
from running import OperatorProcess, write_kubeconfig

from virtualflow.coordinator.status_view import describe
from virtualflow_operator.constants import COORDINATOR, LABEL_JOB, LABEL_ROLE, TOKEN_KEY, WORKER
from virtualflow_operator.k8s.client import EVENTS, JOBS, LEASES, PDBS, PODS, SECRETS, SERVICES, Object

T = TypeVar("T")
DEFINITION = read_yaml(CRD_FILE)
QUEUE_DEFINITION = read_yaml(QUEUE_CRD_FILE)
KEY = "k" * 64
TOKEN = "of-the-operator"
NAMESPACE = "default"
SECONDS = 180.0
"""How long a test waits for a condition that is usually true within one."""

QUICK: dict[str, Any] = {
    "queue__backoff_first": 0.1,
    "queue__backoff_most": 1.0,
    "relist_jitter": 0.0,
    "finish_grace": 5.0,
}
FLAGS = ["--image=operator:test", "--health-port=0", "--metrics-port=0", "--lease-seconds=60"]

RIGHTS = {
    (resource, verb)
    for where in ("where its jobs are", "everywhere", "own namespace", "kube-public, with namespaces: all", *WITH_KUEUE)
    for _, resource, verb, _ in documented(where)
}
"""What the operator may do with what."""
WRITES = ("create", "update", "patch", "delete")


def job(name: str, **spec: Any) -> Object:
    """A job of two workers that nothing but the operator takes care of."""
    container = {"name": "worker", "image": "trainer:test"}
    usual: Object = {
        "workerGroups": [{"name": "w", "template": {"spec": {"containers": [container]}}}],
        "virtualNodes": 8,
        "replicas": 2,
        # Losses reach a coordinator by the operator alone.
        "elasticity": {"startupGraceSeconds": 1, "heartbeatLimitSeconds": 600, "drainGraceSeconds": 20},
    }
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": JOBS.api_version, "kind": "VirtualFlowJob", "metadata": metadata, "spec": usual | spec}


class Stage:
    """The cluster, and the operator's processes in it."""

    def __init__(self, server: FakeApi, directory: Path) -> None:
        self.server = server
        self.kubelet = Kubelet(server)
        self.operators: list[OperatorProcess] = []
        self.made: Counter[tuple[str, str, str]] = Counter()
        """How often a pod was made: role, job, name."""
        self.most: dict[tuple[str, str], int] = {}
        """The most pods that a job ever had at once: role and job; pods that are ending do not count."""
        self._directory = directory
        (directory / "key").write_text(KEY)
        server.store.listeners.append(self._count)

    def _count(self, change: Change) -> None:
        labels = change.item["metadata"].get("labels") or {}
        if change.kind.plural != "pods" or LABEL_JOB not in labels or change.type != "ADDED":
            return
        role, name, owner = labels[LABEL_ROLE], labels[LABEL_JOB], change.item["metadata"]["ownerReferences"][0]["uid"]
        self.made[role, name, change.item["metadata"]["name"]] += 1
        here = [p for p in self.pods(name, role) if p["metadata"]["ownerReferences"][0]["uid"] == owner and running(p)]
        self.most[role, name] = max(self.most.get((role, name), 0), len(here))

    # --- the operator ------------------------------------------------------------------------------------------------

    def start(self, *flags: str, url: str | None = None, **changes: Any) -> OperatorProcess:
        """Start a replica; ``changes``: fields of its settings, those of a group as ``queue__backoff_first``."""
        number = len(self.operators)
        kubeconfig = write_kubeconfig(self._directory / f"kubeconfig-{number}", url or self.server.url, TOKEN)
        arguments = [*FLAGS, f"--key-file={self._directory / 'key'}", f"--identity=replica-{number}", *flags]
        process = OperatorProcess(kubeconfig, self._directory / f"log-{number}", arguments, QUICK | changes)
        self.operators.append(process)
        return process

    async def watching(self) -> None:
        """Wait until the operator sees what happens."""
        kinds = (JOBS, PODS, SERVICES)
        await self.until(lambda: all(self.server.watches(kind) for kind in kinds))

    async def replace(self, process: OperatorProcess, *flags: str, **changes: Any) -> OperatorProcess:
        """Start a successor of a process that was killed, whose lease nobody waits for."""
        await process.ended()
        if self.server.find(LEASES, NAMESPACE, "virtualflow-operator") is not None:
            self.server.remove(LEASES, NAMESPACE, "virtualflow-operator")
        return self.start(*flags, **changes)

    # --- what a user does --------------------------------------------------------------------------------------------

    def apply(self, name: str, **spec: Any) -> Object:
        """Create a job."""
        return self.server.add(job(name, **spec))

    def change(self, name: str, **spec: Any) -> Object:
        """Change fields of a job's spec."""
        return self.server.modify(JOBS, NAMESPACE, name, {"spec": spec})

    def delete(self, name: str) -> None:
        """Delete a job; what it owns goes by itself."""
        self.server.remove(JOBS, NAMESPACE, name)

    # --- what one sees -----------------------------------------------------------------------------------------------

    def job(self, name: str) -> Object | None:
        return self.server.find(JOBS, NAMESPACE, name)

    def secret(self, name: str) -> Object:
        """The Secret with a job's token."""
        found = self.server.all(SECRETS, NAMESPACE, f"{LABEL_JOB}={name}")
        (secret,) = (each for each in found if TOKEN_KEY in each["data"])
        return secret

    def status(self, name: str) -> Object:
        """The job's status; empty if there is none."""
        found: Object = (self.job(name) or {}).get("status") or {}
        return found

    def condition(self, name: str, kind: str) -> Object:
        found = [c for c in self.status(name).get("conditions") or [] if c["type"] == kind]
        return found[0] if found else {}

    def pods(self, name: str, role: str | None = None) -> list[Object]:
        selector = f"{LABEL_JOB}={name}" + (f",{LABEL_ROLE}={role}" if role else "")
        return self.server.all(PODS, NAMESPACE, selector)

    def workers(self, name: str) -> list[str]:
        """Names of the worker pods that run and may go on."""
        return [pod["metadata"]["name"] for pod in self.pods(name, WORKER) if running(pod)]

    def told(self, name: str, kind: type) -> list[Any]:
        """Calls of a kind that the job's coordinators got."""
        return [call for _, key, call in self.kubelet.told if key[1] == name and isinstance(call, kind)]

    def trains(self, name: str, workers: int = 2) -> bool:
        """Whether exactly so many workers train and the status says so."""
        status = self.status(name)
        job = self.job(name)
        return (
            job is not None
            and status.get("phase") == "Running"
            and status.get("readyReplicas") == workers == len(self.workers(name))
            and status.get("observedGeneration") == job["metadata"]["generation"]
            and status.get("replicas") == workers
            and len([pod for pod in self.pods(name, COORDINATOR) if running(pod)]) == 1
        )

    def made_twice(self) -> set[tuple[str, str, str]]:
        """Pods that were made again after they were gone: role, job, name. Some pods must have been made at all."""
        assert self.made
        return {pod for pod, times in self.made.items() if times > 1}

    def nothing_left(self, name: str) -> bool:
        """Whether no object of that job is there (events tell of it for an hour)."""
        kinds = (PODS, SERVICES, SECRETS, PDBS)
        return not any(self.server.all(kind, NAMESPACE, f"{LABEL_JOB}={name}") for kind in kinds)

    def writes(self, since: int = 0) -> list[str]:
        """What was written after the first ``since`` requests, the lease left out: verb and resource."""
        requests = self.server.requests[since:]
        return [f"{r.verb} {r.resource}" for r in requests if r.verb in WRITES and r.resource != "leases"]

    def events(self, name: str) -> list[str]:
        """Reasons of the job's events."""
        found = [e for e in self.server.all(EVENTS, NAMESPACE) if e["involvedObject"]["name"] == name]
        return [event["reason"] for event in found]

    async def until(self, condition: Callable[[], T], seconds: float = SECONDS) -> T:
        """Wait for something in the cluster; a replica that ends by itself meanwhile fails the test."""
        return await self.server.wait_for(condition, seconds)

    async def quiet(self, seconds: float = 1.0) -> None:
        """Wait until the last request is so long ago, leases left out."""
        begin = time.monotonic()
        # Nothing tells of what does not happen.
        while time.monotonic() - max(r.time for r in self.server.requests if r.resource != "leases") < seconds:
            assert time.monotonic() - begin < SECONDS, "it never comes to rest"
            await asyncio.sleep(0.05)

    def report(self) -> str:
        """For a test that has failed."""
        lines = [f"--- {r.method} {r.path} -> {r.code}" for r in self.server.requests[-15:]]
        for entry in self.server.all(JOBS)[:5]:
            lines.append(f"--- {entry['metadata']['name']}: {entry.get('status')}")
        for pod in self.server.all(PODS)[:10]:
            status = pod["status"]
            lines.append(
                f"--- {pod['metadata']['name']}: {status.get('phase')} {pod['metadata'].get('deletionTimestamp')}"
            )
        for pod in self.kubelet.coordinators.values():
            lines.append(f"--- a coordinator: {describe(pod.coordinator.state)}")
        for process in self.operators[-2:]:
            lines.append(f"=== {process.log.name}, exit code {process.exit_code}:\n{process.output()[-6_000:]}")
        return "\n".join(lines)


def running(pod: Object) -> bool:
    """Whether a pod is not over and nobody has asked it to go."""
    return pod["status"]["phase"] in {"Pending", "Running"} and not pod["metadata"].get("deletionTimestamp")


@contextlib.asynccontextmanager
async def staged(directory: Path) -> AsyncIterator[Stage]:
    """A cluster without an operator; what a test starts in it is killed at the end."""
    async with FakeApi(DEFINITION, QUEUE_DEFINITION, token=TOKEN) as server:
        stage = Stage(server, directory)
        try:
            yield stage
        except (AssertionError, TimeoutError) as error:
            error.add_note(stage.report())
            raise
        finally:
            for process in stage.operators:
                if process.exit_code is None:
                    process.kill()
            for process in stage.operators:
                await process.ended()
            await stage.kubelet.close()
    for process in stage.operators:
        assert "Traceback (most recent" not in process.output(), f"a defect:\n{process.output()[-4_000:]}"
    resources = {resource for resource, _ in RIGHTS}
    used = {(request.resource, request.verb) for request in server.requests if request.resource in resources}
    assert used <= RIGHTS, f"docs/how-to/security.md gives no right to {used - RIGHTS}"


def play(directory: Path, story: Callable[[Stage], Awaitable[None]], seconds: float = 2 * SECONDS) -> None:
    """Run a test in a cluster of its own."""

    async def within() -> None:
        async with staged(directory) as stage, asyncio.timeout(seconds):
            await story(stage)

    asyncio.run(within())

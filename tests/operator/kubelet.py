"""Scheduler, kubelets and service proxy of the fake cluster: pods get a node and run, as asyncio tasks of this process.

A coordinator's pod is the real coordinator, listening on an address of its own in 127.0.0.0/8; a worker's pod is a
``Trainer``. What happens to a pod is decided by looking at it, as a kubelet does, after every change.
"""

from __future__ import annotations

import asyncio
import base64
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from aiohttp import web
from fake_api import FakeApi
from trainers import Trainer, Training

from virtualflow.atomic_file import PRIVATE, write_whole
from virtualflow.coordinator.server import CoordinatorServer
from virtualflow.coordinator.settings import CoordinatorSettings, MembershipSettings
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.identity import PAGE_TOKEN, Credential, Identity
from virtualflow.protocol.settings import ENV_CONFIRMED_START
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator.constants import COORDINATOR, COORDINATOR_PORT, IDENTITY_VOLUME, LABEL_JOB, LABEL_ROLE
from virtualflow_operator.k8s.client import NODES as NODE_OBJECTS
from virtualflow_operator.k8s.client import PODS, SECRETS, SERVICES, Object

NODES = ("node-a", "node-b", "node-c")
Key = tuple[str, str]


def _addresses() -> Iterator[str]:
    """Loopback addresses that no other process of these tests uses at the same time, most likely."""
    own = os.getpid() % 62_500
    for number in range(62_500):
        # Two processes share the second and third number only if theirs are 62,500 apart.
        yield f"127.{1 + own // 250}.{1 + (own + number // 250) % 250}.{1 + number % 250}"


ADDRESSES = _addresses()


class _ToldCoordinator(CoordinatorServer):
    """A coordinator that repeats what it was told."""

    told: Callable[[object], None]

    def call(self, call: http_api.Call) -> str:
        if isinstance(call, http_api.GoneCall | http_api.DrainCall | http_api.StopCall | http_api.BeginCall):
            self.told(call)
        return super().call(call)


class CoordinatorPod:
    """A coordinator that listens, and what it was told."""

    def __init__(self, address: str, credential: Credential, container: Object, told: Callable[[object], None]) -> None:
        arguments, variables = container["args"], {x["name"]: x.get("value") for x in container["env"]}
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        membership = MembershipSettings(
            startup_grace=float(options["--startup-grace"]),
            heartbeat_limit=float(options["--heartbeat-limit"]),
            restart_grace=0.2,
            admission_window=0.2,
        )
        settings = CoordinatorSettings(
            membership=membership, goodbye=0.05, confirmed_start=variables.get(ENV_CONFIRMED_START) == "1"
        )
        identity = None if isinstance(credential, str) else credential
        token = credential if isinstance(credential, str) else credential.read_beside(PAGE_TOKEN)
        wanted, minimum = int(options["--wanted"]), int(options["--minimum"])
        self.coordinator = _ToldCoordinator(token, wanted, settings, minimum, identity)
        self.coordinator.state.plaintext = identity is None
        self.coordinator.told = told
        self._address, self._runner = (
            address,
            web.AppRunner(self.coordinator.application(), access_log=None, shutdown_timeout=0.05),
        )
        self.again = lambda: CoordinatorPod(address, credential, container, told)
        """The next process in its place."""

    async def start(self) -> None:
        await self._runner.setup()
        assert self._runner.server is not None
        self._listening = await self.coordinator.door.open(self._runner.server, self._address, COORDINATOR_PORT)

    async def stop(self) -> None:
        self._listening.close()
        await self.coordinator.close()
        await self._runner.cleanup()


class Kubelet:
    """All nodes of the cluster.

    ``mute``: names of jobs whose coordinators never answer. ``unschedulable``: says which pods get no node.
    """

    def __init__(self, server: FakeApi) -> None:
        self.server = server
        self.told: list[tuple[float, Key, Any]] = []
        """Calls that coordinators got: loop time, job, call."""
        self.trainings: dict[str, Training] = {}
        """By the uid of the job."""
        self.trainers: dict[str, Trainer] = {}
        """By the uid of the pod."""
        self.coordinators: dict[str, CoordinatorPod] = {}
        self.mute: set[str] = set()
        self.unmounted: set[str] = set()
        """Jobs whose workers' volumes are not mounted."""
        self.unschedulable: Callable[[Object], bool] = lambda _: False
        self.undelivered = False
        """Whether Secrets that change do not reach pods that run: a kubelet takes a minute for that."""
        self.dead_nodes: set[str] = set()
        self.cut_off: set[str] = set()
        """Pods that reach no coordinator any more."""
        self.avoided: set[str] = set()
        """Nodes that the scheduler gives no more pods."""
        self._starting: set[str] = set()
        self._mounts = tempfile.TemporaryDirectory(prefix="volumes-")
        """A directory for each pod, named by its uid."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._turn = 0
        for node in NODES:
            server.add_node(node)
        server.store.listeners.append(lambda change: self._noted(change.kind.plural, change.item))

    async def close(self) -> None:
        for training in self.trainings.values():
            training.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for coordinator in list(self.coordinators.values()):
            await coordinator.stop()
        await asyncio.gather(*(trainer._task for trainer in self.trainers.values()), return_exceptions=True)
        self._mounts.cleanup()

    # --- what a test does to the cluster -----------------------------------------------------------------------------

    def training(self, namespace: str, name: str) -> Training:
        """The training of the job of that name that has pods."""
        pods = self.server.all(PODS, namespace, f"{LABEL_JOB}={name}")
        return self.trainings[next(_owner(pod) for pod in pods if _owner(pod) in self.trainings)]

    def fail(self, namespace: str, name: str) -> None:
        """A pod is over without notice, as the pod garbage collector says it; no connection is seen to close."""
        pod = self.server.find(PODS, namespace, name)
        assert pod is not None
        self.trainers[pod["metadata"]["uid"]].hung = True
        self.server.set_pod(namespace, name, ready=False, phase="Failed", message="its node is gone")

    def crash(self, namespace: str, name: str, error: str = "ValueError: no") -> None:
        """Let the user's code of a worker raise."""
        pod = self.server.find(PODS, namespace, name)
        assert pod is not None
        word = TerminationMessage("failed", 1, error=error, traceback=f"Traceback\n{error}")
        self._kill(pod["metadata"]["uid"])
        self._ended((namespace, name), 1, word)

    def cut_power(self, node: str) -> None:
        """A node dies: its processes say nothing more, and after a while (here at once) it is seen not to be ready."""
        self.dead_nodes.add(node)
        for pod in self.server.all(PODS):
            if pod["spec"].get("nodeName") == node and pod["metadata"]["uid"] in self.trainers:
                self.trainers[pod["metadata"]["uid"]].hung = True
        self.server.set_node(node, ready="Unknown")

    async def stop_coordinator(self, uid: str) -> None:
        """The coordinator's process ends, and its pod does not."""
        await self.coordinators.pop(uid).stop()

    async def restart_coordinator(self, uid: str) -> None:
        """Its container ends, and starts again in the same pod."""
        former = self.coordinators.pop(uid)
        await former.stop()
        self.coordinators[uid] = former.again()
        await self.coordinators[uid].start()

    # --- what kubelets do --------------------------------------------------------------------------------------------

    def _noted(self, plural: str, item: Object) -> None:
        metadata = item["metadata"]
        if plural == "pods":
            asyncio.get_running_loop().call_soon(self._look, metadata["namespace"], metadata["name"], metadata["uid"])
        elif plural == "secrets":
            for pod in self.server.all(PODS, metadata["namespace"]):
                own = pod["metadata"]
                asyncio.get_running_loop().call_soon(self._look, own["namespace"], own["name"], own["uid"])

    def deliver(self) -> None:
        """Let pods that run have the Secrets that have changed meanwhile, and will change."""
        self.undelivered = False
        for pod in self.server.all(PODS):
            own = pod["metadata"]
            self._look(own["namespace"], own["name"], own["uid"])

    def _look(self, namespace: str, name: str, uid: str) -> None:
        pod = self.server.find(PODS, namespace, name)
        if pod is None or pod["metadata"]["uid"] != uid:
            self._kill(uid)
            return
        if LABEL_JOB not in (pod["metadata"].get("labels") or {}):
            return  # others' pods do what the test says
        node = pod["spec"].get("nodeName")
        if pod["metadata"].get("deletionTimestamp"):
            if node not in self.dead_nodes:
                self._finish(pod)
        elif node is None:
            if not self.unschedulable(pod):
                alive = [node for node in NODES if node not in self.dead_nodes | self.avoided]
                fit = [node for node in alive if self._demanded(pod, node) and self._in_company(pod, node)]
                self._turn += 1
                if fit:
                    self.server.set_pod(namespace, name, node=fit[self._turn % len(fit)])
        elif pod["status"]["phase"] == "Pending" and uid not in self._starting:
            stuck = pod["metadata"]["labels"][LABEL_ROLE] != COORDINATOR and _owner_name(pod) in self.unmounted
            credential = None if stuck else self._credential(pod)
            if credential is not None:
                self._starting.add(uid)
                self._spawn(self._begin(pod, credential))
        elif uid in self._starting and _volumes(pod) and not self.undelivered:
            self._mount(pod)  # its Secret may be another one by now

    def _demanded(self, pod: Object, name: str) -> bool:
        """Whether a node has the labels that a pod's node affinity demands, if it does."""
        affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
        node = self.server.find(NODE_OBJECTS, None, name) or {"metadata": {}}
        labels = node["metadata"].get("labels") or {}

        def holds(demand: Object) -> bool:
            value = labels.get(demand["key"])
            wanted = {"In": value in demand.get("values", []), "Exists": value is not None}
            opposite = {"NotIn": "In", "DoesNotExist": "Exists"}.get(demand["operator"])
            return not wanted[opposite] if opposite else wanted[demand["operator"]]

        terms = required.get("nodeSelectorTerms") or [{}]
        return any(all(holds(demand) for demand in term.get("matchExpressions") or []) for term in terms)

    def _in_company(self, pod: Object, name: str) -> bool:
        """Whether pods are on a node that the pod's affinity demands, and none that its anti-affinity excludes."""
        affinity = pod["spec"].get("affinity") or {}
        here = [other for other in self.server.all(PODS) if other["spec"].get("nodeName") == name]

        def met(kind: str) -> list[bool]:
            terms = (affinity.get(kind) or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or []
            return [any(self._meant(term, other) for other in here) for term in terms]

        return all(met("podAffinity")) and not any(met("podAntiAffinity"))

    @staticmethod
    def _meant(term: Object, other: Object) -> bool:
        labels, selector = other["metadata"].get("labels") or {}, term["labelSelector"]
        there = "namespaceSelector" in term or other["metadata"]["namespace"] in term["namespaces"]
        equal = (selector.get("matchLabels") or {}).items() <= labels.items()
        holds = {"Exists": lambda e: e["key"] in labels, "NotIn": lambda e: labels.get(e["key"]) not in e["values"]}
        return there and equal and all(holds[e["operator"]](e) for e in selector.get("matchExpressions") or [])

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _token(self, pod: Object) -> str | None:
        """The value that the pod's environment takes from the job's Secret; a kubelet waits until it is there."""
        environment = pod["spec"]["containers"][0]["env"]
        reference = next(entry["valueFrom"]["secretKeyRef"] for entry in environment if "TOKEN" in entry["name"])
        secret = self.server.find(SECRETS, pod["metadata"]["namespace"], reference["name"])
        return None if secret is None else base64.b64decode(secret["data"][reference["key"]]).decode()

    def _credential(self, pod: Object) -> Credential | None:
        """How a pod is known; ``None``: what it says so by is not there yet."""
        if not _volumes(pod):
            return self._token(pod)
        folder = self._mount(pod)
        return Identity(folder) if folder is not None else None

    def folder_of(self, pod: Object) -> Path:
        """Where the identity of a pod is."""
        return Path(self._mounts.name, pod["metadata"]["uid"])

    def _mount(self, pod: Object) -> Path | None:
        """Write the volume of a pod's identity, as a kubelet does; ``None``: a Secret of it is missing."""
        folder = self.folder_of(pod)
        for volume in _volumes(pod):
            for source in volume["projected"]["sources"]:
                secret = self.server.find(SECRETS, pod["metadata"]["namespace"], source["secret"]["name"])
                if secret is None:
                    return None
                names = {item["key"]: item["path"] for item in source["secret"].get("items", ())}
                folder.mkdir(exist_ok=True)
                for key, content in secret["data"].items():
                    write_whole(folder / names.get(key, key), base64.b64decode(content), PRIVATE)
        return folder

    async def _begin(self, pod: Object, credential: Credential) -> None:
        metadata, address = pod["metadata"], next(ADDRESSES)
        key, uid, job = (metadata["namespace"], metadata["name"]), metadata["uid"], metadata["labels"][LABEL_JOB]
        if metadata["labels"][LABEL_ROLE] == COORDINATOR:
            if job not in self.mute:
                place = (metadata["namespace"], job)
                loop = asyncio.get_running_loop()
                container = pod["spec"]["containers"][0]
                coordinator = CoordinatorPod(
                    address, credential, container, lambda call: self.told.append((loop.time(), place, call))
                )
                await coordinator.start()
                self.coordinators[uid] = coordinator
        else:
            self._start_trainer(pod, address, credential)
        here = self.server.find(PODS, *key)
        if here is not None and here["metadata"]["uid"] == uid:
            started = {"name": pod["spec"]["containers"][0]["name"], "state": {"running": {}}}
            fields: Object = {"phase": "Running", "podIP": address, "containerStatuses": [started]}
            self.server.set_pod(*key, ready=True, **fields)
        self._look(*key, uid)

    def _start_trainer(self, pod: Object, address: str, credential: Credential) -> None:
        metadata = pod["metadata"]
        values = {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}
        virtual_nodes = int(values["VIRTUALFLOW_VIRTUAL_NODES"] or 0)
        owner = _owner(pod)
        if owner not in self.trainings:
            self.trainings[owner] = Training(virtual_nodes)
        key = (metadata["namespace"], metadata["name"])
        self.trainers[metadata["uid"]] = Trainer(
            self.trainings[owner],
            metadata["name"],
            metadata["uid"],
            address,
            credential,
            lambda: self._route(key, values["VIRTUALFLOW_COORDINATOR"] or ""),
            lambda code, word: self._ended(key, code, word),
        )

    def _route(self, pod: Key, url: str) -> str | None:
        """Where the address of a service leads, as kube-proxy on that pod's node has it."""
        namespace, name = pod
        if name in self.cut_off:
            return None
        scheme, _, place = url.partition("://")
        host = place.rpartition(":")[0]
        for service in self.server.all(SERVICES, namespace):
            if service["spec"]["clusterIP"] == host:
                labels = ",".join(f"{key}={value}" for key, value in service["spec"]["selector"].items())
                pods = [pod for pod in self.server.all(PODS, namespace, labels) if pod["status"].get("podIP")]
                return f"{scheme}://{pods[0]['status']['podIP']}:{COORDINATOR_PORT}" if pods else None
        return None

    def _finish(self, pod: Object) -> None:
        """A pod is being deleted: its worker asks to be relieved until its grace is over, all else ends at once."""
        metadata = pod["metadata"]
        trainer = self.trainers.get(metadata["uid"])
        if trainer is not None and trainer.alive:
            trainer.terminate()
            left = (
                datetime.fromisoformat(metadata["deletionTimestamp"]).timestamp() - self.server.store.now().timestamp()
            )
            asyncio.get_running_loop().call_later(max(left, 0.05), self._let_go, pod)
        else:
            self._let_go(pod)

    def _let_go(self, pod: Object) -> None:
        metadata = pod["metadata"]
        here = self.server.find(PODS, metadata["namespace"], metadata["name"])
        if here is not None and here["metadata"]["uid"] == metadata["uid"]:
            self._kill(metadata["uid"])
            self.server.finish_deletion(metadata["namespace"], metadata["name"])

    def _kill(self, uid: str) -> None:
        trainer = self.trainers.pop(uid, None)
        if trainer is not None and trainer.alive:
            trainer.kill()
        coordinator = self.coordinators.pop(uid, None)
        if coordinator is not None:
            self._spawn(coordinator.stop())

    def _ended(self, key: Key, code: int, word: TerminationMessage | None) -> None:
        """A worker's process has ended."""
        pod = self.server.find(PODS, *key)
        if pod is None:
            return
        message = "" if word is None else m.encode(word).decode()
        now = self.server.store.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": message, "finishedAt": now}
        status = {"name": pod["spec"]["containers"][0]["name"], "state": {"terminated": ended}}
        self.server.set_pod(*key, ready=False, phase="Failed" if code else "Succeeded", containerStatuses=[status])


def _volumes(pod: Object) -> list[Object]:
    """That of its identity, if it has one."""
    return [volume for volume in pod["spec"].get("volumes") or () if volume["name"] == IDENTITY_VOLUME]


def _owner_name(pod: Object) -> str:
    return str(pod["metadata"]["labels"][LABEL_JOB])


def _owner(pod: Object) -> str:
    owners = pod["metadata"].get("ownerReferences") or [{"uid": ""}]
    return str(owners[0]["uid"])

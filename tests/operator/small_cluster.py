"""A small cluster in memory, for lives of a job in which anything may happen in any order.

Pods are placed, start, run and end; nodes come, go and are tainted; a coordinator sees the workers that run.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

from scenes import NOW, body, given_up, remote, seen

from virtualflow.protocol.http_api import LostWorker, Status
from virtualflow.protocol.messages import encode
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator.api.objects import Pod, format_time, read_pod
from virtualflow_operator.constants import COORDINATOR, LABEL_ATTEMPT, LABEL_ORDINAL, LABEL_ROLE, WORKER

Body = dict[str, Any]
KEY = ("ml", "digits")


class Process:
    """A coordinator's process: it knows the workers that have reached it, and dies with its pod."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.phase = "waiting"
        self.wanted, self.minimum, self.wanted_reason = 2, 1, ""
        self.known: dict[str, Pod] = {}
        self.states: dict[str, str] = {}
        self.lost: list[LostWorker] = []
        self.stop = False
        self.error: str | None = None

    def status(self, step: int) -> Status:
        workers = [seen(self.known[uid], state, 0, 1) for uid, state in self.states.items()]
        facts: Body = {"incarnation": self.incarnation, "wanted": self.wanted, "minimum": self.minimum}
        facts["wanted_reason"] = self.wanted_reason
        if self.phase == "done":
            facts["digest"] = "abc"
        if self.phase != "waiting":
            facts |= {"generation": 1, "step": step}
        return remote(self.phase, *workers, lost=tuple(self.lost), error=self.error, **facts)


class Cluster:
    """What the API server, the scheduler, the kubelets and the trainers do."""

    def __init__(self) -> None:
        self.now = NOW
        self.version = 1
        self.job = body(backoffLimit=1_000)
        self.pods: dict[str, Body] = {}
        self.rooms: dict[str, int] = {"node-0": 3, "node-1": 2}
        self.nodes: dict[str, Body] = {}
        for name in self.rooms:
            self.add_node(name)
        self.service: Body | None = None
        self.processes: dict[str, Process] = {}
        self.news: deque[tuple[str, Body]] = deque()
        self.step = 0
        self.still = False  # the step says nothing new any more
        self.born = 0
        self.made: list[str] = []

    # --- objects ---

    def bump(self) -> str:
        self.version += 1
        return str(self.version)

    def add_node(self, name: str) -> None:
        self.nodes[name] = {"metadata": {"name": name, "uid": name, "resourceVersion": self.bump()}, "spec": {}}

    def change_node(self, name: str, **spec: Any) -> None:
        node = self.nodes[name] = copy.deepcopy(self.nodes[name])
        ready = spec.pop("ready", None)
        if ready is not None:
            node["status"] = {"conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}]}
        node["spec"] |= spec
        node["metadata"]["resourceVersion"] = self.bump()

    def up(self, name: str) -> bool:
        node = self.nodes.get(name)
        conditions = (node or {}).get("status", {}).get("conditions", [])
        return node is not None and all(c["status"] == "True" for c in conditions)

    def open(self, name: str) -> bool:
        spec = self.nodes[name]["spec"]
        return self.up(name) and not spec.get("unschedulable") and not spec.get("taints")

    def put(self, pod: Body) -> None:
        pod["metadata"]["resourceVersion"] = self.bump()
        self.pods[pod["metadata"]["name"]] = pod
        self.news.append(("put", copy.deepcopy(pod)))

    def change_pod(self, name: str, **status: Any) -> None:
        pod = copy.deepcopy(self.pods[name])
        pod["status"] |= status
        self.put(pod)

    def create(self, manifest: Body) -> Body | None:
        name = manifest["metadata"]["name"]
        if name in self.pods:
            return None
        self.born += 1
        pod = copy.deepcopy(manifest)
        pod["metadata"] |= {"uid": f"pod-{self.born}", "creationTimestamp": format_time(self.now)}
        pod["status"] = {"phase": "Pending"}
        self.made.append(name)
        self.put(pod)
        return copy.deepcopy(pod)

    def vanish(self, name: str) -> None:
        pod = self.pods.pop(name)
        pod["metadata"]["resourceVersion"] = self.bump()
        self.news.append(("gone", pod))

    def delete(self, name: str, uid: str, grace: float = 30.0) -> None:
        pod = self.pods.get(name)
        if pod is None or pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]:
            return
        if "nodeName" not in pod["spec"]:
            self.vanish(name)
            return
        pod = copy.deepcopy(pod)
        pod["metadata"]["deletionTimestamp"] = format_time(self.now + grace)
        self.put(pod)
        for process in self.processes.values():
            if process.states.get(uid) in ("training", "ready"):
                process.states[uid] = "draining"  # SIGTERM: it asks to be relieved

    def end(self, name: str, code: int, word: TerminationMessage | None = None) -> None:
        message = encode(word).decode() if word is not None else ""
        state = {"terminated": {"exitCode": code, "message": message, "finishedAt": format_time(self.now)}}
        phase = "Failed" if code else "Succeeded"
        self.change_pod(name, phase=phase, containerStatuses=[{"name": "trainer", "state": state}])

    # --- what goes by itself ---

    def live(self, role: str) -> list[Pod]:
        """Pods that run or will, of the present attempt."""
        attempt = str(self.job["status"].get("attempt", 0))
        bodies = [
            pod
            for pod in self.pods.values()
            if pod["metadata"]["labels"][LABEL_ROLE] == role and pod["metadata"]["labels"][LABEL_ATTEMPT] == attempt
        ]
        return [pod for pod in map(read_pod, bodies) if pod.live]

    def settle_pods(self) -> None:
        """Scheduler, kubelets and the garbage collection of nodes."""
        used = dict.fromkeys(self.nodes, 0)
        for pod in map(read_pod, self.pods.values()):
            if pod.node in used and not pod.finished and pod.role == WORKER:
                used[pod.node] += 1
        for pod in [read_pod(b) for b in self.pods.values()]:
            orphaned = pod.node and pod.node not in self.nodes
            if orphaned or (pod.terminating and self.up(pod.node)):
                self.vanish(pod.name)
            elif pod.phase == "Pending" and not pod.node and not pod.terminating:
                free = [n for n in sorted(self.nodes) if self.open(n)]
                if pod.role == WORKER:
                    free = [n for n in free if used[n] < self.rooms[n]]
                if free:
                    used[free[0]] += pod.role == WORKER
                    placed = copy.deepcopy(self.pods[pod.name])
                    placed["spec"]["nodeName"] = free[0]
                    placed["status"] = {"phase": "Pending"}
                    self.put(placed)
                elif not pod.unschedulable:
                    why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full"}
                    self.change_pod(pod.name, conditions=[why | {"lastTransitionTime": format_time(self.now)}])
            elif pod.phase == "Pending" and pod.node and self.up(pod.node) and not pod.terminating:
                self.change_pod(pod.name, phase="Running", podIP=f"10.2.{pod.uid[4:]}")

    def serving(self) -> Process | None:
        """The coordinator that the service leads to, while it runs."""
        if self.service is None:
            return None
        ordinal = self.service["spec"]["selector"][LABEL_ORDINAL]
        for b in self.pods.values():
            pod = read_pod(b)
            if pod.role == COORDINATOR and str(pod.ordinal) == ordinal and pod.phase == "Running" and self.up(pod.node):
                return self.processes.setdefault(pod.uid, Process(len(self.processes) + 1))
        return None

    def settle_processes(self) -> None:
        """Workers reach their coordinator, train, hand over, and are missed when they are gone."""
        present = {b["metadata"]["uid"]: read_pod(b) for b in self.pods.values()}
        self.processes = {uid: p for uid, p in self.processes.items() if uid in present}
        process = self.serving()
        if process is None:
            return
        for uid in list(process.states):
            pod = present.get(uid)
            if pod is None or pod.finished or not self.up(pod.node):
                if process.states[uid] == "silent":
                    process.lost.append(given_up(process.known[uid]))
                    del process.states[uid]
                elif process.states[uid] != "done":
                    process.states[uid] = "silent"
        if process.phase in ("done", "failed", "stopped"):
            return
        refused = {lost.incarnation for lost in process.lost}
        for uid, pod in present.items():
            if pod.role == WORKER and pod.phase == "Running" and self.up(pod.node) and uid not in process.states:
                if f"process-of-{uid}" in refused:
                    self.end(pod.name, 75)
                elif not pod.terminating and pod.attempt == self.job["status"].get("attempt", 0):
                    process.known[uid], process.states[uid] = pod, "starting"
        self._train(process, present)

    def _train(self, process: Process, present: dict[str, Pod]) -> None:
        for uid, state in list(process.states.items()):
            process.states[uid] = {"starting": "ready", "ready": "training"}.get(state, state)
            back = present.get(uid)
            if state == "silent" and back is not None and back.phase == "Running" and self.up(back.node):
                process.states[uid] = "ready"
        at_it = [uid for uid, state in process.states.items() if state == "training"]
        if process.phase == "waiting" and len(at_it) >= process.minimum:
            process.phase = "training"
        self.step += bool(at_it) and not self.still
        for uid, state in list(process.states.items()):
            if (state == "draining" and at_it) or (process.stop and state != "silent"):
                del process.states[uid]
                if uid in present and not present[uid].finished:
                    self.end(present[uid].name, 0, TerminationMessage("left", step=self.step))
        if process.stop:
            process.phase = "stopped"

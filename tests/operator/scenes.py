"""What the tests of the reconciler are made of: a job, its pods, nodes and coordinator, in as few words as possible."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from statuses import coordinator_status
from virtualflow.protocol.http_api import Call, DrainCall, GoneCall, LostWorker, Status, WorkerStatus
from virtualflow.protocol.messages import Change, Generation, encode
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator.api.job import merge_patch, write_status
from virtualflow_operator.api.objects import CoordinatorLink, Job, Node, Pod, Service, format_time, read_job, read_pod
from virtualflow_operator.jobs import manifests
from virtualflow_operator.jobs.actions import Action, CreatePod, DeletePod, JobPlan
from virtualflow_operator.jobs.reconcile import reconcile
from virtualflow_operator.jobs.scene import PodEvent, Scene, TemplateVerdict
from virtualflow_operator.settings import OperatorSettings

NOW = 1_700_000_000.0
SETTINGS = OperatorSettings(image="virtualflow-operator:test", key_id="0123abcd")
Spec = dict[str, Any]
RAISED = TerminationMessage(
    "failed", step=40, error="ValueError: odd batch", traceback="Traceback\n  train.py\nValueError: odd"
)


def container(**fields: Any) -> Spec:
    return {"name": "trainer", "image": "trainer:1"} | fields


def group(name: str = "workers", *, image: str = "trainer:1", pod: Spec | None = None, **fields: Any) -> Spec:
    return {"name": name, "template": {"spec": {"containers": [container(image=image)]} | (pod or {})}} | fields


def body(status: Spec | None = None, *, name: str = "digits", uid: str = "uid-1", **spec: Any) -> Spec:
    """A ``VirtualFlowJob`` as JSON has it."""
    return {
        "metadata": {"namespace": "ml", "name": name, "uid": uid, "generation": 1, "resourceVersion": "1"},
        "spec": {"replicas": 2, "workerGroups": [group()]} | spec,
        "status": status or {},
    }


def accepted(raw: Spec, **status: Any) -> Spec:
    """The same job once its templates were accepted and it has begun."""
    job = read_job(raw)
    known = {
        "phase": "Running",
        "templateHash": manifests.hash_templates(job).all,
        "coordinator": "digits-coordinator-0",
        "startTime": format_time(NOW - 100),
        "virtualNodes": job.spec.virtual_nodes,
        "reproducibility": job.spec.reproducibility,
        "selector": manifests.selector(job),
    }
    return raw | {"status": known | status}


def worker(job: Job, ordinal: int = 0, *, group: str = "workers", **facts: Any) -> Pod:
    """A running worker's pod, made from the present template."""
    chosen = next((g for g in job.spec.worker_groups if g.name == group), None)
    manifest: Spec = {"metadata": {"name": f"{job.name}-{group}-{ordinal}"}}
    if chosen is not None:
        manifest = manifests.worker_pod(job, chosen, ordinal, "10.0.0.1", SETTINGS)
    made = read_pod(manifest | {"metadata": manifest["metadata"] | {"uid": f"{group}-{ordinal}"}})
    running = dataclasses.replace(
        made,
        owner=job.uid,
        group=group,
        ordinal=ordinal,
        phase="Running",
        node=f"node-{ordinal}",
        ip=f"10.1.0.{10 + ordinal}",
        created=NOW - 90,
    )
    return dataclasses.replace(running, **facts)


def coordinator(job: Job, ordinal: int = 0, **facts: Any) -> Pod:
    """A running coordinator's pod."""
    manifest = manifests.coordinator_pod(job, ordinal, SETTINGS)
    made = read_pod(manifest | {"metadata": manifest["metadata"] | {"uid": f"coordinator-{ordinal}"}})
    running = dataclasses.replace(made, phase="Running", node="node-c", ip="10.1.0.1", created=NOW - 95)
    return dataclasses.replace(running, **facts)


def pending(pod: Pod, **facts: Any) -> Pod:
    """The same pod before it was given a node."""
    return dataclasses.replace(pod, **({"phase": "Pending", "node": "", "ip": ""} | facts))


def homeless(pod: Pod, since: float = NOW - 60) -> Pod:
    """The same pod when no node takes it."""
    return pending(pod, unschedulable="0/3 nodes are available: 3 Insufficient cpu.", unschedulable_since=since)


def ended(
    pod: Pod,
    code: int = 1,
    *,
    reason: str = "Error",
    message: str = "",
    word: TerminationMessage | None = None,
    **facts: Any,
) -> Pod:
    """The same pod once its program has ended; read from JSON, as the last word is."""
    text = encode(word).decode() if word is not None else message
    state = {"terminated": {"exitCode": code, "reason": reason, "message": text, "finishedAt": format_time(NOW - 1)}}
    raw = {
        "metadata": {"name": pod.name, "uid": pod.uid},
        "spec": {"containers": [container()]},
        "status": {"containerStatuses": [{"name": "trainer", "state": state}]},
    }
    read = read_pod(raw)
    phase = "Failed" if code else "Succeeded"
    return dataclasses.replace(pod, **({"phase": phase, "exit": read.exit, "finished_at": read.finished_at} | facts))


def nodes(*pods: Pod, **changed: Node | None) -> dict[str, Node]:
    """Healthy nodes for these pods; a keyword (``_`` for ``-``) replaces or, with ``None``, deletes one."""
    known = {pod.node: Node(pod.node) for pod in pods if pod.node}
    for name, node in changed.items():
        key = name.replace("_", "-")
        known[key] = Node(key, gone=True) if node is None else dataclasses.replace(node, name=key)
    return known


def seen(pod: Pod, state: str = "training", first: int = 0, last: int = 4) -> WorkerStatus:
    """How the coordinator sees the worker in that pod."""
    return WorkerStatus(pod.name, f"process-of-{pod.uid}", pod.ip, 7, state, first, last)  # type: ignore[arg-type]


def given_up(pod: Pod, reason: str = "silent for 5 s") -> LostWorker:
    return LostWorker(pod.name, f"process-of-{pod.uid}", pod.ip, reason)


remote = coordinator_status


def change(counter: int, cause: str = "join", **facts: Any) -> Change:
    values: dict[str, Any] = {"step": 10 * counter, "from_": 1, "to": 2, "pause_ms": 12.0, "repeated_steps": 0}
    return Change(
        generation=Generation(1, counter),
        cause=cause,  # type: ignore[arg-type]
        reason=facts.pop("reason", "digits-workers-1 joins"),
        **(values | facts),
    )


def verdict_of(raw: Spec, error: str = "", at: float = NOW - 1) -> TemplateVerdict:
    return TemplateVerdict(manifests.hash_templates(read_job(raw)).all, at, error)


def link(
    status: Status | None, *, connected: bool = True, since: float = NOW - 50, pod: str = "coordinator-0"
) -> CoordinatorLink:
    return CoordinatorLink(pod, connected, since, status)


@dataclasses.dataclass
class Stage:
    """A job with everything that a decision about it is made of; the default trains undisturbed on two workers."""

    raw: Spec
    pods: list[Pod]
    service: Service | None
    nodes: dict[str, Node] | None
    link: CoordinatorLink | None
    verdict: TemplateVerdict | None = None
    trouble: str = ""
    failure: str = ""
    settings: OperatorSettings = SETTINGS
    former: list[Pod] = dataclasses.field(default_factory=list)
    events: dict[str, PodEvent] = dataclasses.field(default_factory=dict)
    issued: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def job(self) -> Job:
        return read_job(self.raw)

    @property
    def scene(self) -> Scene:
        pods, former = tuple(self.pods), tuple(self.former)
        return Scene(
            job=self.job,
            pods=pods,
            former=former,
            service=self.service,
            nodes=self.nodes,
            link=self.link,
            verdict=self.verdict,
            trouble=self.trouble,
            failure=self.failure,
            events=self.events,
            issued=self.issued,
        )

    def decide(self, now: float = NOW) -> JobPlan:
        """The plan; deciding twice about the same gives the same."""
        plan = reconcile(self.scene, now, self.settings)
        assert plan == reconcile(self.scene, now, self.settings)
        return plan

    def write(self, plan: JobPlan) -> Spec:
        """Keep the plan's status, as the API server would; the patch that it took."""
        patch = merge_patch(self.raw.get("status") or {}, write_status(plan.status))
        self.raw = self.raw | {"status": write_status(plan.status)}
        return patch

    def settle(self, now: float = NOW) -> Stage:
        """Write the status until it stays the same, with nothing else happening."""
        for _ in range(5):
            if not self.write(self.decide(now)):
                return self
        raise AssertionError("the status does not come to rest")


def training(count: int = 2, *, attempt: int = 0, states: Mapping[int, str] | None = None, **spec: Any) -> Stage:
    """A job that trains on ``count`` workers."""
    raw = accepted(body(**({"replicas": count} | spec)), **({"attempt": attempt} if attempt else {}))
    job = read_job(raw)
    workers = [worker(job, n) for n in range(count)]
    share = max(job.spec.virtual_nodes // max(count, 1), 1)
    states = states or {}
    known = [seen(p, states.get(n, "training"), n * share, (n + 1) * share) for n, p in enumerate(workers)]
    status = remote("training", *known, wanted=job.spec.desired, minimum=min(job.spec.min_replicas, job.spec.most))
    made = coordinator(job)
    pods = [made, *workers]
    return Stage(raw, pods, Service("10.0.0.1", 0), nodes(*pods), link(status)).settle()


def edit(stage: Stage, **spec: Any) -> Stage:
    """The user changes the specification."""
    raw = copy.deepcopy(stage.raw)
    raw["spec"] |= spec
    raw["metadata"]["generation"] += 1
    stage.raw = raw
    return stage


def swap(stage: Stage, pod: Pod) -> Stage:
    """That pod has changed."""
    stage.pods = [pod if known.name == pod.name else known for known in stage.pods]
    return stage


def created(plan: JobPlan) -> list[str]:
    return [action.name for action in plan.actions if isinstance(action, CreatePod)]


def deleted(plan: JobPlan) -> list[str]:
    return [action.name for action in plan.actions if isinstance(action, DeletePod)]


def drained(plan: JobPlan) -> list[str]:
    return [name for call in plan.calls if isinstance(call, DrainCall) for name in call.workers]


def gone(plan: JobPlan) -> list[str]:
    return [call.worker for call in plan.calls if isinstance(call, GoneCall)]


def kinds(things: Sequence[Action | Call]) -> list[str]:
    return [type(thing).__name__ for thing in things]


def reason_of(plan: JobPlan, kind: str) -> tuple[str, str]:
    """Status and reason of a condition."""
    condition = next(c for c in plan.status.conditions if c.type == kind)
    return condition.status, condition.reason


def message_of(plan: JobPlan, kind: str) -> str:
    return next(c.message for c in plan.status.conditions if c.type == kind)


def noticed(plan: JobPlan) -> list[str]:
    return [event.reason for event in plan.events]

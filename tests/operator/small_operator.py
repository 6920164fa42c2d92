"""An operator for the small cluster: the real store and reconciler, and what must hold for every plan of theirs."""

from __future__ import annotations

import copy

from msgspec import structs
from scenes import NOW, SETTINGS, given_up
from small_cluster import KEY, Cluster

from virtualflow.protocol.http_api import Call, DrainCall, GoneCall, ScaleCall
from virtualflow_operator.api.job import merge_patch, write_status
from virtualflow_operator.api.objects import CoordinatorLink, read_job
from virtualflow_operator.constants import WORKER
from virtualflow_operator.jobs.actions import (
    Action,
    CheckTemplates,
    CreatePod,
    CreateService,
    DeletePod,
    IssueIdentity,
    JobPlan,
    PointService,
)
from virtualflow_operator.jobs.admission import AT_ONCE, Admission
from virtualflow_operator.jobs.manifests import hash_templates
from virtualflow_operator.jobs.pod_classification import classify_pods
from virtualflow_operator.jobs.reconcile import reconcile
from virtualflow_operator.jobs.scene import Scene, TemplateVerdict
from virtualflow_operator.k8s.cache import Store


class Operator:
    """One process of the operator: the real store and reconciler, and a plain controller."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.store = Store()
        self.verdict: TemplateVerdict | None = None
        self.lost_sight_at: float | None = None
        self.link: CoordinatorLink | None = None
        self.issued: dict[str, float] = {}
        for pod in cluster.pods.values():
            self.store.put_pod(copy.deepcopy(pod))
        cluster.news.clear()
        self.sync()

    def sync(self) -> None:
        for name in {entry.value.name for entry in self.store.nodes.entries.values()} - set(self.cluster.nodes):
            self.store.remove_node(name)
        for node in self.cluster.nodes.values():
            self.store.nodes.deleted.clear()
            self.store.put_node(node)

    def hear(self, count: int) -> None:
        """Take in so many events."""
        for _ in range(min(count, len(self.cluster.news))):
            kind, pod = self.cluster.news.popleft()
            metadata = pod["metadata"]
            if kind == "put":
                self.store.put_pod(pod)
            else:
                self.store.remove_pod(metadata["namespace"], metadata["name"], metadata["uid"])

    def look(self) -> CoordinatorLink | None:
        """The connection to the coordinator that the status names."""
        cluster, name = self.cluster, self.cluster.job["status"].get("coordinator")
        pod = next((p for p in self.store.pods_of(KEY) if p.name == name and p.live), None)
        if pod is None or not (pod.ip and pod.phase == "Running"):
            return None
        real = cluster.pods.get(pod.name)
        process = cluster.processes.get(pod.uid)
        if real is not None and real["metadata"]["uid"] == pod.uid and process is not None and cluster.up(pod.node):
            self.lost_sight_at = None
            return CoordinatorLink(pod.uid, True, NOW, process.status(cluster.step))
        self.lost_sight_at = self.lost_sight_at or cluster.now
        status = self.link.status if self.link is not None and self.link.pod == pod.uid else None
        return CoordinatorLink(pod.uid, False, self.lost_sight_at, status)

    def admission(self) -> Admission:
        """Who admits the job: nobody."""
        return AT_ONCE

    def plan(self) -> tuple[Scene, JobPlan]:
        cluster = self.cluster
        self.link = self.look()
        service = cluster.service
        if service is not None:
            self.store.services.put(service)
        scene = Scene(
            job=read_job(copy.deepcopy(cluster.job)),
            pods=self.store.pods_of(KEY),
            former=self.store.former_of(KEY),
            service=self.store.service_of(KEY, "digits-coordinator"),
            nodes=self.store.node_map(),
            link=self.link,
            verdict=self.verdict,
            admission=self.admission(),
            issued=self.issued,
        )
        plan = reconcile(scene, cluster.now, SETTINGS)
        assert plan == reconcile(scene, cluster.now, SETTINGS), "the same makes the same plan"
        return scene, plan

    def reconcile(self) -> bool:
        """One pass; whether anything was done."""
        scene, plan = self.plan()
        fresh = not self.cluster.news
        check(scene, plan, self.cluster.now)
        for call in plan.calls:
            self.call(call)
        for action in plan.actions:
            self.carry_out(action, fresh)
        patch = merge_patch(self.cluster.job["status"], write_status(plan.status))
        self.cluster.job = self.cluster.job | {"status": write_status(plan.status)}
        return bool(plan.calls or plan.actions or patch)

    def call(self, call: Call) -> None:
        process = self.cluster.processes.get(self.link.pod) if self.link is not None else None
        if process is None:
            return
        match call:
            case DrainCall(workers=names):
                for uid, pod in process.known.items():
                    if pod.name in names and process.states.get(uid) in ("starting", "ready", "training"):
                        process.states[uid] = "draining"
            case GoneCall(incarnation=incarnation):
                for uid in list(process.states):
                    if f"process-of-{uid}" == incarnation:
                        del process.states[uid]
                        process.lost.append(given_up(process.known[uid]))
                process.lost = [
                    structs.replace(lost, ended=True) if lost.incarnation == incarnation else lost
                    for lost in process.lost
                ]
            case ScaleCall(workers=wanted, minimum=minimum, reason=reason):
                process.wanted, process.minimum, process.wanted_reason = wanted, minimum, reason
            case _:
                process.stop = True
                if process.phase == "waiting":
                    process.phase = "stopped"

    def carry_out(self, action: Action, fresh: bool) -> None:
        cluster = self.cluster
        match action:
            case CheckTemplates(template_hash=wanted):
                self.verdict = TemplateVerdict(wanted, cluster.now)
            case CreateService(manifest):
                if cluster.service is None:
                    cluster.service = copy.deepcopy(manifest)
                    cluster.service["spec"]["clusterIP"] = "10.0.0.1"
                    cluster.service["metadata"] |= {"uid": "service", "resourceVersion": cluster.bump()}
            case PointService(selector=selector):
                assert cluster.service is not None
                cluster.service = copy.deepcopy(cluster.service)
                cluster.service["spec"]["selector"] = selector
                cluster.service["metadata"]["resourceVersion"] = cluster.bump()
            case CreatePod():
                pod = cluster.create(action.manifest)
                assert pod is not None or not fresh, f"{action.name} exists, and that was known"
                if pod is not None:
                    self.store.put_pod(pod)
            case IssueIdentity(pod):
                self.issued[pod.uid] = cluster.now
            case DeletePod():
                cluster.delete(action.name, action.uid, 30.0 if action.grace is None else action.grace)


def check(scene: Scene, plan: JobPlan, now: float) -> None:
    """What holds for every plan."""
    job, link = scene.job, scene.link
    made = [action.name for action in plan.actions if isinstance(action, CreatePod)]
    assert len(made) == len(set(made)), "no name is made twice"
    assert not {pod.name for pod in scene.pods} & set(made), "no name that is taken is made"
    uids = [action.uid for action in plan.actions if isinstance(action, DeletePod)]
    assert len(uids) == len(set(uids)), f"nothing is deleted twice: {plan.actions}"
    pods = classify_pods(
        job, scene.pods, nodes=scene.nodes, link=link, now=now, settings=SETTINGS, templates=hash_templates(job).groups
    )
    new = sum(1 for a in plan.actions if isinstance(a, CreatePod) and a.role == WORKER)
    if new:
        counted = [p for p in pods.of("healthy", "planned") if p.pod.uid not in uids]
        target = job.spec.desired + (1 if pods.of("planned") else 0)
        assert len(counted) + new <= target, "no more are made than there are to be"
        assert len(counted) + new <= job.spec.most + 1
    told = {name for call in plan.calls if isinstance(call, DrainCall) for name in call.workers}
    busy = link is not None and link.connected and link.status is not None and link.status.phase == "training"
    deleted = [placed for placed in pods.workers if placed.pod.uid in uids]
    for placed in deleted:
        if busy and placed.standing == "training" and placed.fate not in ("lost", "left", "crashed", "disrupted"):
            assert placed.pod.name in told or job.status.finished, f"{placed.pod.name} is deleted without a word"
    kept = [p for p in pods.workers if p.pod.live and p.pod.uid not in uids and p.ready]
    if busy and not (job.spec.suspend or job.status.finished) and any(p.fate == "planned" and p.ready for p in deleted):
        assert kept, "somebody keeps the state while the others are replaced"

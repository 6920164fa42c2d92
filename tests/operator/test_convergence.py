"""Whatever happens, in whatever order: no pod is made twice, nobody is lost without a word, and it comes to rest.

A small cluster in memory: pods are placed, start, run and end; nodes come, go and are tainted; a coordinator sees the
workers that run; users edit; the operator forgets everything or sees the world as it was some events ago. The store and
the reconciler are the real ones.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scenes import NOW, SETTINGS, body, given_up, group, remote, seen

from virtualflow.messages import LastWord, LostWorker, Status, encode
from virtualflow_operator import resources
from virtualflow_operator.constants import COORDINATOR, LABEL_ATTEMPT, LABEL_ORDINAL, LABEL_ROLE, WORKER
from virtualflow_operator.decision import Scene, Verdict
from virtualflow_operator.job_status import merge_patch, write_status
from virtualflow_operator.plan import (
    Action,
    Call,
    CheckTemplates,
    CreatePod,
    CreateService,
    DeletePod,
    Plan,
    PointService,
    TellDrain,
    TellGone,
    TellScale,
)
from virtualflow_operator.reconcile import reconcile
from virtualflow_operator.store import Store
from virtualflow_operator.survey import take_survey
from virtualflow_operator.view import Link, Pod, format_time, read_job, read_pod

Body = dict[str, Any]
KEY = ("ml", "digits")


class Process:
    """A coordinator's process: it knows the workers that have reached it, and dies with its pod."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.phase = "waiting"
        self.wanted, self.minimum = 2, 1
        self.known: dict[str, Pod] = {}
        self.states: dict[str, str] = {}
        self.lost: list[LostWorker] = []
        self.stop = False
        self.error: str | None = None

    def status(self, step: int) -> Status:
        workers = [seen(self.known[uid], state, 0, 1) for uid, state in self.states.items()]
        facts: Body = {"incarnation": self.incarnation, "wanted": self.wanted, "minimum": self.minimum}
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

    def end(self, name: str, code: int, word: LastWord | None = None) -> None:
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
                    self.end(present[uid].name, 0, LastWord("left", step=self.step))
        if process.stop:
            process.phase = "stopped"


class Operator:
    """One process of the operator: the real store and reconciler, and a plain controller."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.store = Store()
        self.verdict: Verdict | None = None
        self.lost_sight_at: float | None = None
        self.link: Link | None = None
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

    def look(self) -> Link | None:
        """The connection to the coordinator that the status names."""
        cluster, name = self.cluster, self.cluster.job["status"].get("coordinator")
        pod = next((p for p in self.store.pods_of(KEY) if p.name == name and p.live), None)
        if pod is None or not (pod.ip and pod.phase == "Running"):
            return None
        real = cluster.pods.get(pod.name)
        process = cluster.processes.get(pod.uid)
        if real is not None and real["metadata"]["uid"] == pod.uid and process is not None and cluster.up(pod.node):
            self.lost_sight_at = None
            return Link(pod.uid, True, NOW, process.status(cluster.step))
        self.lost_sight_at = self.lost_sight_at or cluster.now
        status = self.link.status if self.link is not None and self.link.pod == pod.uid else None
        return Link(pod.uid, False, self.lost_sight_at, status)

    def plan(self) -> tuple[Scene, Plan]:
        cluster = self.cluster
        self.link = self.look()
        service = cluster.service
        if service is not None:
            self.store.services.put(service)
        scene = Scene(
            read_job(copy.deepcopy(cluster.job)),
            self.store.pods_of(KEY),
            self.store.service_of(KEY, "digits-coordinator"),
            self.store.node_map(),
            self.link,
            self.verdict,
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
            case TellDrain(workers=names):
                for uid, pod in process.known.items():
                    if pod.name in names and process.states.get(uid) in ("starting", "ready", "training"):
                        process.states[uid] = "draining"
            case TellGone(incarnation=incarnation):
                for uid in list(process.states):
                    if f"process-of-{uid}" == incarnation:
                        del process.states[uid]
                        process.lost.append(given_up(process.known[uid]))
            case TellScale(workers=wanted, minimum=minimum):
                process.wanted, process.minimum = wanted, minimum
            case _:
                process.stop = True
                if process.phase == "waiting":
                    process.phase = "stopped"

    def carry_out(self, action: Action, fresh: bool) -> None:
        cluster = self.cluster
        match action:
            case CheckTemplates(template_hash=wanted):
                self.verdict = Verdict(wanted, cluster.now)
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
            case DeletePod():
                cluster.delete(action.name, action.uid, 30.0 if action.grace is None else action.grace)


def check(scene: Scene, plan: Plan, now: float) -> None:
    """What holds for every plan."""
    job, link = scene.job, scene.link
    made = [action.name for action in plan.actions if isinstance(action, CreatePod)]
    assert len(made) == len(set(made)), "no name is made twice"
    assert not {pod.name for pod in scene.pods} & set(made), "no name that is taken is made"
    uids = [action.uid for action in plan.actions if isinstance(action, DeletePod)]
    assert len(uids) == len(set(uids)), f"nothing is deleted twice: {plan.actions}"
    survey = take_survey(job, scene.pods, scene.nodes, link, now, SETTINGS)
    new = sum(1 for a in plan.actions if isinstance(a, CreatePod) and a.role == WORKER)
    if new:
        counted = [p for p in survey.of("healthy", "planned") if p.pod.uid not in uids]
        target = job.spec.desired + (1 if survey.of("planned") else 0)
        assert len(counted) + new <= target, "no more are made than there are to be"
        assert len(counted) + new <= job.spec.most + 1
    told = {name for call in plan.calls if isinstance(call, TellDrain) for name in call.workers}
    busy = link is not None and link.connected and link.status is not None and link.status.phase == "training"
    deleted = [placed for placed in survey.workers if placed.pod.uid in uids]
    for placed in deleted:
        if busy and placed.standing == "training" and placed.fate not in ("lost", "left", "crashed", "disrupted"):
            assert placed.pod.name in told or job.status.finished, f"{placed.pod.name} is deleted without a word"
    keepers = [p for p in survey.workers if p.pod.live and p.pod.uid not in uids and p.ready]
    if busy and not (job.spec.suspend or job.status.finished) and any(p.fate == "planned" and p.ready for p in deleted):
        assert keepers, "somebody keeps the state while the others are replaced"


class Life(RuleBasedStateMachine):
    """A job's life among disturbances; at its end the world stands still and the job must come to rest."""

    @initialize(rounds=st.sampled_from([0, 8]))
    def begin(self, rounds: int) -> None:
        self.cluster = Cluster()
        self.operator = Operator(self.cluster)
        for _ in range(rounds):
            self.round()

    # --- the operator ---

    @rule(events=st.integers(0, 6))
    def reconcile(self, events: int) -> None:
        self.operator.hear(events)
        self.operator.sync()
        self.operator.reconcile()

    @rule(rounds=st.integers(1, 6))
    def go_on(self, rounds: int) -> None:
        """Everything does its part, as on most days."""
        for _ in range(rounds):
            self.cluster.now += 1.0
            self.round()

    @rule(events=st.integers(0, 6))
    def lag_behind(self, events: int) -> None:
        """Everything does its part, but the operator sees little of it."""
        self.cluster.settle_pods()
        self.cluster.settle_processes()
        self.operator.hear(events)
        self.operator.reconcile()

    @rule()
    def restart_operator(self) -> None:
        self.operator = Operator(self.cluster)

    # --- time, scheduler, kubelets, trainers ---

    @rule()
    def settle_pods(self) -> None:
        self.cluster.settle_pods()

    @rule()
    def settle_processes(self) -> None:
        self.cluster.settle_processes()

    @rule(seconds=st.sampled_from([1.0, 15.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.cluster.now += seconds

    # --- users ---

    @rule(
        replicas=st.integers(1, 5),
        least=st.integers(1, 2),
        most=st.sampled_from([None, 3, 6]),
        image=st.sampled_from(["trainer:1", "trainer:2"]),
        groups=st.sampled_from([("workers",), ("workers", "spare"), ("spare",)]),
        delay=st.sampled_from([0, 20]),
    )
    def edit(
        self, replicas: int, least: int, most: int | None, image: str, groups: tuple[str, ...], delay: int
    ) -> None:
        made = [group(name, image=image) for name in groups]
        self.change_spec(replicas=replicas, minReplicas=least, maxReplicas=most, workerGroups=made)
        self.change_spec(elasticity={"scaleDownDelaySeconds": delay})

    @rule(suspended=st.booleans())
    def suspend(self, suspended: bool) -> None:
        self.change_spec(suspend=suspended)

    @rule(key=st.sampled_from(["a", "b"]))
    def edit_coordinator(self, key: str) -> None:
        self.change_spec(coordinator={"template": {"spec": {"nodeSelector": {"pool": key}}}})

    def change_spec(self, **spec: Any) -> None:
        job = copy.deepcopy(self.cluster.job)
        job["spec"] |= spec
        job["metadata"]["generation"] += 1
        self.cluster.job = job

    @rule(pick=st.integers(0, 9), evicted=st.booleans())
    def delete_pod(self, pick: int, evicted: bool) -> None:
        names = sorted(self.cluster.pods)
        if names:
            pod = self.cluster.pods[names[pick % len(names)]]
            if evicted:
                why = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
                self.cluster.change_pod(pod["metadata"]["name"], conditions=[why])
            self.cluster.delete(pod["metadata"]["name"], pod["metadata"]["uid"])

    # --- what goes wrong ---

    @rule(pick=st.integers(0, 9), code=st.sampled_from([0, 1, 75, 137]))
    def end_worker(self, pick: int, code: int) -> None:
        running = [p for p in self.cluster.live(WORKER) if p.phase == "Running"]
        if running:
            self.cluster.end(running[pick % len(running)].name, code)

    @rule(node=st.sampled_from(["node-0", "node-1"]))
    def drop_node(self, node: str) -> None:
        self.cluster.nodes.pop(node, None)

    @rule(node=st.sampled_from(["node-0", "node-1"]), what=st.sampled_from(["down", "cordon", "taint", "fine"]))
    def change_node(self, node: str, what: str) -> None:
        if node not in self.cluster.nodes:
            self.cluster.add_node(node)
        taints = [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}] if what == "taint" else []
        self.cluster.change_node(node, ready=what != "down", unschedulable=what == "cordon", taints=taints)

    @rule(kind=st.sampled_from(["failed", "failed", "done"]))
    @precondition(lambda self: self.cluster.step > 3)
    def end_training(self, kind: str) -> None:
        process = self.cluster.serving()
        if process is not None and process.phase == "training":
            process.phase, process.error = kind, "ValueError: odd batch" if kind == "failed" else None
            for uid, state in list(process.states.items()):
                pod = next((p for p in map(read_pod, self.cluster.pods.values()) if p.uid == uid), None)
                if state == "training" and pod is not None and pod.phase == "Running":
                    word = LastWord("done", digest="abc", step=9) if kind == "done" else LastWord("ended", step=9)
                    process.states[uid] = "done"
                    self.cluster.end(pod.name, 0 if kind == "done" else 1, word)

    # --- what holds ---

    @invariant()
    def pods_are_bounded(self) -> None:
        if hasattr(self, "cluster"):
            scheduled = [pod for pod in self.cluster.live(WORKER) if pod.node]
            most = 2 * (8 + 1)
            assert len(scheduled) <= most

    # --- the end ---

    def round(self) -> bool:
        """Everything does its part once; whether anything happened."""
        before = self.cluster.version
        self.cluster.settle_pods()
        self.cluster.settle_processes()
        self.operator.hear(10_000)
        self.operator.sync()
        done = self.operator.reconcile()
        return done or self.cluster.version != before

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.come_to_rest()

    def come_to_rest(self) -> None:
        cluster = self.cluster
        cluster.still = True
        for node in cluster.nodes:  # whoever cordons or switches off a node brings it back some day
            cluster.change_node(node, ready=True, unschedulable=False, taints=[])
        if not cluster.nodes:
            cluster.add_node("node-1")
        quiet = 0
        for _ in range(300):
            cluster.now += 1.0
            if self.round():
                quiet = 0
                continue
            _, plan = self.operator.plan()
            quiet += 1
            if plan.wake_at is not None and plan.wake_at < cluster.now + 7_200:
                cluster.now = max(cluster.now, plan.wake_at)
            elif quiet > 2:
                break
        else:
            raise AssertionError(f"it does not come to rest: {self.operator.plan()[1]}")
        self.check_rest()

    def check_rest(self) -> None:
        cluster, job = self.cluster, read_job(self.cluster.job)
        workers, coordinators = cluster.live(WORKER), cluster.live(COORDINATOR)
        self.cluster.now += 86_400
        _, plan = self.operator.plan()
        assert (plan.actions, plan.calls, plan.notices) == ((), (), ()), "a day later there is still nothing to do"
        assert merge_patch(cluster.job["status"], write_status(plan.status)) == {}
        if job.status.finished or job.status.phase == "Suspended":
            assert (workers, coordinators) == ([], [])
            return
        assert not (job.spec.suspend and not self.operator.plan()[1].status.condition("Progressing"))
        condition = job.status.condition("Progressing")
        assert condition is not None
        if condition.reason == "InvalidSpec":
            return
        assert not job.spec.suspend
        assert [pod.name for pod in coordinators] == [job.status.coordinator]
        assert cluster.service is not None
        assert cluster.service["spec"]["selector"] == resources.service_selector(job, coordinators[0].ordinal)
        room = sum(cluster.rooms[name] for name in cluster.nodes)
        running = [pod for pod in workers if pod.phase == "Running"]
        assert len(running) == min(job.spec.desired, room)
        assert len(workers) - len(running) == 0 or room < job.spec.desired + 1
        assert job.status.ready_replicas == len(running)
        hashes = {g.name: resources.template_hash(job, g) for g in job.spec.worker_groups}
        if len(running) > 1:
            assert all(pod.template == hashes.get(pod.group) for pod in workers), "the new template is everywhere"
        assert job.status.phase == "Running"


Life.TestCase.settings = settings(
    derandomize=True,
    max_examples=120,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLife = pytest.mark.timeout(120)(Life.TestCase)

"""Whatever Kueue and people do, in whatever order: no pod without quota, and no quota back while there are pods.

In the small cluster in memory, with a Kueue that refuses what the real one refuses. The reconciler is the real one; the
operator forgets everything, or sees pods and Workloads as they were some time ago.
"""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scenes import SETTINGS, container, group
from small_cluster import Cluster
from small_kueue import KueueOperator, SmallKueue, holds, small_job

from tiers import examples
from virtualflow_operator.api.job_status import merge_patch, write_status
from virtualflow_operator.api.objects import read_job, read_pod
from virtualflow_operator.constants import LABEL_GROUP, WORKER
from virtualflow_operator.jobs.actions import CreatePod, DeletePod, Plan
from virtualflow_operator.jobs.pod_classification import classify_pods
from virtualflow_operator.jobs.scene import Scene
from virtualflow_operator.queues import admitted_counts, chain_of

PLENTY = 100


def check_pods(scene: Scene, plan: Plan, now: float) -> None:
    """No worker is made beyond what is admitted, by all that is known."""
    made: dict[str, int] = {}
    for action in plan.actions:
        if isinstance(action, CreatePod):
            spec = action.manifest["spec"]
            assert spec["nodeSelector"]["pool"] == "reserved", "it runs where Kueue has quota for it"
            assert {"key": "reserved", "operator": "Exists"} in spec["tolerations"]
            if action.role == WORKER:
                name = action.manifest["metadata"]["labels"][LABEL_GROUP]
                made[name] = made.get(name, 0) + 1
    if not made:
        return
    assert scene.kueue is not None
    granting = chain_of(scene.kueue.workloads, scene.job.uid).granting
    assert granting is not None, "nothing is made before it is admitted"
    caps = admitted_counts(granting)
    doomed = {action.uid for action in plan.actions if isinstance(action, DeletePod)}
    pods = classify_pods(scene.job, scene.pods, nodes=scene.nodes, link=scene.link, now=now, settings=SETTINGS)
    for name, count in made.items():
        here = [p for p in pods.of("healthy", "planned", "stuck") if p.pod.group == name and p.pod.uid not in doomed]
        alone = min(scene.job.spec.desired, sum(caps.values()) - caps["coordinator"]) == 1
        assert len(here) + count <= caps[name] + alone, "no more are made than were admitted"


class Life(RuleBasedStateMachine):
    """A job's life with Kueue; at its end there is quota for all, and the job must come to rest."""

    @initialize(elastic=st.booleans(), quota=st.integers(0, 5), rounds=st.sampled_from([0, 8]))
    def begin(self, elastic: bool, quota: int, rounds: int) -> None:
        self.cluster = Cluster()
        self.kueue = SmallKueue(self.cluster, quota)
        small_job(self.cluster, elastic=elastic)
        self.operator = KueueOperator(self.cluster, self.kueue)
        for _ in range(rounds):
            self.round()

    # --- the operator, its eyes and its memory ---

    @rule(rounds=st.integers(1, 6))
    def go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.cluster.now += 1.0
            self.round()

    @rule(events=st.integers(0, 6), looks=st.booleans())
    def lag_behind(self, events: int, looks: bool) -> None:
        self.cluster.settle_pods()
        self.cluster.settle_processes()
        self.kueue.schedule()
        self.operator.hear(events)
        if looks:
            self.operator.sync()
        self.reconcile()

    @rule()
    def restart_operator(self) -> None:
        self.operator = KueueOperator(self.cluster, self.kueue)

    @rule(trouble=st.sampled_from(["", "", "the Workloads have not been listed yet"]))
    def bar(self, trouble: str) -> None:
        self.operator.trouble = trouble

    @rule(seconds=st.sampled_from([1.0, 15.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.cluster.now += seconds

    # --- Kueue and whoever runs it ---

    @rule()
    def schedule(self) -> None:
        self.kueue.schedule()

    @rule(quota=st.integers(0, 6))
    def set_quota(self, quota: int) -> None:
        self.kueue.quota = quota

    @rule(checked=st.booleans())
    def set_checks(self, checked: bool) -> None:
        self.kueue.checked = checked

    @rule(reason=st.sampled_from(["Preempted", "PodsReadyTimeout"]))
    def evict(self, reason: str) -> None:
        self.kueue.evict(reason)

    @rule(active=st.booleans())
    def activate(self, active: bool) -> None:
        self.kueue.activate(active)

    @rule()
    def requeue(self) -> None:
        self.kueue.requeue()

    # --- users ---

    @rule(replicas=st.integers(1, 5), least=st.integers(1, 3), groups=st.sampled_from(["one", "two", "limited"]))
    def edit(self, replicas: int, least: int, groups: str) -> None:
        made = [group("workers", maxReplicas=2 if groups == "limited" else None)]
        if groups != "one":
            made.append(group("spare"))
        self.change(replicas=replicas, minReplicas=least, workerGroups=made)

    @rule(replicas=st.integers(1, 5))
    def scale(self, replicas: int) -> None:
        self.change(replicas=replicas)

    @rule(cpu=st.sampled_from(["1", "2"]), image=st.sampled_from(["trainer:1", "trainer:2"]))
    def edit_template(self, cpu: str, image: str) -> None:
        made = container(image=image, resources={"requests": {"cpu": cpu}})
        self.change(workerGroups=[{"name": "workers", "template": {"spec": {"containers": [made]}}}])

    @rule(weight=st.sampled_from([1, 1, -1]))
    def make_sense(self, weight: int) -> None:
        self.change(weight=weight)

    @rule(suspended=st.booleans())
    def suspend(self, suspended: bool) -> None:
        self.change(suspend=suspended)

    @rule(queue=st.sampled_from(["team", "other"]), elastic=st.booleans())
    def label(self, queue: str, elastic: bool) -> None:
        small_job(self.cluster, queue=queue, elastic=elastic)

    def change(self, **spec: object) -> None:
        job = copy.deepcopy(self.cluster.job)
        job["spec"] |= spec
        job["metadata"]["generation"] += 1
        self.cluster.job = job

    # --- what goes wrong ---

    @rule(pick=st.integers(0, 9))
    def delete_pod(self, pick: int) -> None:
        names = sorted(self.cluster.pods)
        if names:
            pod = self.cluster.pods[names[pick % len(names)]]
            self.cluster.delete(pod["metadata"]["name"], pod["metadata"]["uid"])

    @rule(pick=st.integers(0, 9), code=st.sampled_from([1, 137]))
    def end_worker(self, pick: int, code: int) -> None:
        running = [p for p in self.cluster.live(WORKER) if p.phase == "Running"]
        if running:
            self.cluster.end(running[pick % len(running)].name, code)

    @rule(node=st.sampled_from(["node-0", "node-1"]), cordoned=st.booleans())
    def cordon(self, node: str, cordoned: bool) -> None:
        self.cluster.change_node(node, unschedulable=cordoned)

    @rule()
    @precondition(lambda self: self.cluster.step > 3)
    def end_training(self) -> None:
        process = self.cluster.serving()
        if process is not None and process.phase == "training":
            process.phase = "done"
            for uid, state in list(process.states.items()):
                pod = next((p for p in map(read_pod, self.cluster.pods.values()) if p.uid == uid), None)
                if state == "training" and pod is not None and pod.phase == "Running":
                    process.states[uid] = "done"
                    self.cluster.end(pod.name, 0)

    # --- what holds ---

    def reconcile(self) -> bool:
        scene, plan = self.operator.plan()
        check_pods(scene, plan, self.cluster.now)
        return self.operator.reconcile()

    def round(self) -> bool:
        """Everything does its part once; whether anything happened."""
        before = self.cluster.version
        self.cluster.settle_pods()
        self.cluster.settle_processes()
        self.kueue.schedule()
        self.operator.hear(10_000)
        self.operator.sync()
        done = self.reconcile()
        return done or self.cluster.version != before

    # --- the end ---

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        cluster, kueue = self.cluster, self.kueue
        cluster.still, kueue.quota, kueue.checked, self.operator.trouble = True, PLENTY, False, ""
        self.change(weight=1)
        for node in cluster.nodes:
            cluster.change_node(node, unschedulable=False)
            cluster.rooms[node] = PLENTY
        quiet = 0
        for _ in range(400):
            cluster.now += 1.0
            kueue.activate(True)
            kueue.requeue()
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
        _, plan = self.operator.plan()
        assert (plan.actions, plan.calls) == ((), ()), "there is nothing to do"
        assert merge_patch(cluster.job["status"], write_status(plan.status)) == {}
        workloads = list(self.kueue.workloads.values())
        open_ones = [body for body in workloads if not holds(body, "Finished")]
        allocated = job.status.condition("Allocated")
        assert allocated is not None
        if job.status.finished:
            assert (open_ones, allocated.reason) == ([], "Finished"), "its quota is given back"
        elif job.spec.suspend:
            assert (workloads, allocated.reason) == ([], "Suspended")
        else:
            (workload,) = open_ones
            assert allocated.reason == "AdmittedByKueue"
            assert holds(workload, "PodsReady")
            (known,) = self.operator.known
            caps = admitted_counts(known)
            admitted = sum(caps.values()) - caps["coordinator"]
            running = [pod for pod in cluster.live(WORKER) if pod.phase == "Running"]
            assert len(running) == job.status.ready_replicas == min(admitted, job.spec.desired)
            assert admitted <= job.spec.desired, "what is left over is handed back"
            if known.elastic:
                assert admitted == job.spec.desired, "an elastic job grows"


Life.TestCase.settings = settings(
    derandomize=True,
    max_examples=examples(120),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestKueueLife = pytest.mark.timeout(120)(Life.TestCase)

"""Whatever Kueue and people do, in whatever order: no pod without quota, and no quota back while there are pods.

In the small cluster in memory, with a Kueue that refuses what the real one refuses. The reconciler is the real one; the
operator forgets everything, or sees pods and Workloads as they were some time ago.
"""

from __future__ import annotations

import copy
from random import Random

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from scenes import SETTINGS, container, group
from small_cluster import Cluster
from small_kueue import KueueOperator, SmallKueue, holds, small_job

from tiers import examples
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator.api.job import merge_patch, write_status
from virtualflow_operator.api.objects import read_job, read_pod
from virtualflow_operator.constants import LABEL_GROUP, WORKER
from virtualflow_operator.jobs.actions import CreatePod, DeletePod, JobPlan
from virtualflow_operator.jobs.manifests import hash_templates
from virtualflow_operator.jobs.pod_classification import classify_pods
from virtualflow_operator.jobs.scene import Scene
from virtualflow_operator.kueue import KueueAdmission, admitted_counts, follows_kueue

PLENTY = 100


def check_pods(scene: Scene, plan: JobPlan, now: float) -> None:
    """No worker is made beyond what is admitted, by all that is known."""
    kueue = scene.admission.kueue if isinstance(scene.admission, KueueAdmission) else None
    if not follows_kueue(scene.job, kueue):
        return
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
    assert kueue is not None
    known = [w for w in kueue.workloads if w.condition("Admitted").true and w.assignments and not w.evicted]
    assert known, "nothing is made before it is admitted"
    caps = max((admitted_counts(workload) for workload in known), key=lambda counts: sum(counts.values()))
    doomed = {action.uid for action in plan.actions if isinstance(action, DeletePod)}
    templates = hash_templates(scene.job).groups
    pods = classify_pods(
        scene.job, scene.pods, nodes=scene.nodes, link=scene.link, now=now, settings=SETTINGS, templates=templates
    )
    for name, count in made.items():
        here = [p for p in pods.of("healthy", "planned", "stuck") if p.pod.group == name and p.pod.uid not in doomed]
        alone = min(scene.job.spec.desired, sum(caps.values()) - caps["coordinator"]) == 1
        assert len(here) + count <= caps[name] + alone, "no more are made than were admitted"


class Life:
    """A job's life with Kueue; at its end there is quota for all, and the job must come to rest."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.cluster = Cluster()
        self.kueue = SmallKueue(self.cluster, chance.randint(1, 6))
        small_job(self.cluster, elastic=chance.random() < 0.5, replicas=chance.randint(1, 5))
        self.operator = KueueOperator(self.cluster, self.kueue)
        self.go_on()

    def play(self, moves: int) -> None:
        for _ in range(moves):
            move = self.chance.choice(MOVES)
            note(f"{self.cluster.now % 1_000}: {move.__name__}")
            move(self)
            self.go_on(self.chance.choice([0, 1, 2, 12, 12]))
        self.come_to_rest()

    def go_on(self, rounds: int = 8) -> None:
        """Everything does its part, as on most days."""
        for _ in range(rounds):
            self.cluster.now += 1.0
            self.round()

    # --- the operator, its eyes and its memory ---

    def lag_behind(self) -> None:
        for _ in range(self.chance.randint(1, 5)):
            self.cluster.settle_pods()
            self.cluster.settle_processes()
            self.kueue.schedule()
            self.operator.hear(self.chance.randint(0, 3))
            if self.chance.random() < 0.3:
                self.operator.sync()
            self.reconcile()

    def restart_operator(self) -> None:
        self.operator = KueueOperator(self.cluster, self.kueue)

    def wait(self) -> None:
        self.cluster.now += 40.0

    # --- Kueue and whoever runs it ---

    def set_quota(self) -> None:
        self.kueue.quota, self.kueue.checked = self.chance.randint(0, 8), self.chance.random() < 0.2

    def evict(self) -> None:
        self.kueue.evict(self.chance.choice(["Preempted", "PodsReadyTimeout"]))
        self.go_on(self.chance.choice([0, 3, 12]))
        self.kueue.requeue()

    def switch_off(self) -> None:
        self.kueue.activate(False)
        self.go_on(self.chance.choice([0, 3, 12]))
        self.kueue.activate(True)
        self.kueue.requeue()

    def bar(self) -> None:
        self.operator.trouble = "the Workloads have not been listed yet"
        self.go_on(2)
        self.end_worker()
        self.go_on(2)
        self.operator.trouble = ""

    # --- users ---

    def scale(self) -> None:
        self.change(replicas=self.chance.randint(1, 5), minReplicas=self.chance.randint(1, 3))

    def edit(self) -> None:
        """Another image, other requests, a second group."""
        requests = {"cpu": self.chance.choice(["1", "1", "2"])}
        image = self.chance.choice(["trainer:1", "trainer:2"])
        pod = {"containers": [container(image=image, resources={"requests": requests})]}
        groups = [group("workers", pod=pod), group("spare", pod=pod)]
        if self.chance.random() < 0.5:
            groups[0]["maxReplicas"] = 2
        self.change(workerGroups=groups)

    def make_no_sense(self) -> None:
        self.change(weight=-1)
        self.go_on(self.chance.choice([1, 3]))
        self.change(weight=1)

    def suspend(self) -> None:
        self.change(suspend=True)
        self.go_on(self.chance.choice([0, 1, 12]))
        self.change(suspend=self.chance.random() < 0.1)

    def label(self) -> None:
        elastic = self.chance.random() < 0.5
        small_job(self.cluster, queue=self.chance.choice([None, "other"]), elastic=elastic)
        self.go_on(self.chance.choice([0, 1, 12]))
        small_job(self.cluster, queue="team", elastic=elastic)

    def change(self, **spec: object) -> None:
        job = copy.deepcopy(self.cluster.job)
        job["spec"] |= spec
        job["metadata"]["generation"] += 1
        self.cluster.job = job

    # --- what goes wrong ---

    def delete_pod(self) -> None:
        if self.cluster.pods:
            pod = self.cluster.pods[self.chance.choice(sorted(self.cluster.pods))]
            self.cluster.delete(pod["metadata"]["name"], pod["metadata"]["uid"])

    def end_worker(self) -> None:
        running = [p for p in self.cluster.live(WORKER) if p.phase == "Running"]
        if running:
            self.cluster.end(self.chance.choice(running).name, 137)

    def cordon(self) -> None:
        self.cluster.change_node("node-0", unschedulable=self.chance.random() < 0.5)

    def end_training(self) -> None:
        process = self.cluster.serving()
        if process is None or process.phase != "training" or self.chance.random() < 0.7:
            return
        process.phase = "done"
        for uid, state in list(process.states.items()):
            pod = next((p for p in map(read_pod, self.cluster.pods.values()) if p.uid == uid), None)
            if state == "training" and pod is not None and pod.phase == "Running":
                process.states[uid] = "done"
                self.cluster.end(pod.name, 0, TerminationMessage("done", digest="abc", step=9))

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

    def come_to_rest(self) -> None:
        cluster, kueue = self.cluster, self.kueue
        cluster.still, kueue.quota, kueue.checked = True, PLENTY, False
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


MOVES = (
    Life.lag_behind, Life.restart_operator, Life.wait, Life.set_quota, Life.evict, Life.switch_off, Life.bar,
    Life.scale, Life.scale, Life.edit, Life.make_no_sense, Life.suspend, Life.label, Life.delete_pod, Life.end_worker,
    Life.cordon, Life.end_training,
)  # fmt: skip


@pytest.mark.slow
@settings(derandomize=True, max_examples=examples(28), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1))
def test_no_pod_is_without_quota_and_it_comes_to_rest(seed: int) -> None:
    Life(Random(seed)).play(12)

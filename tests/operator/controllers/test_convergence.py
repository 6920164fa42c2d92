"""Whatever happens, in whatever order: no pod is made twice, nobody is lost without a word, and it comes to rest.

In a small cluster in memory users edit; the operator forgets everything or sees the world as it was some events ago.
The store and the reconciler are the real ones.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scenes import group
from small_cluster import Cluster
from small_operator import Operator

from tiers import examples
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow_operator.api.job import merge_patch, write_status
from virtualflow_operator.api.objects import read_job, read_pod
from virtualflow_operator.constants import COORDINATOR, WORKER
from virtualflow_operator.jobs import manifests


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
                    word = (
                        TerminationMessage("done", digest="abc", step=9)
                        if kind == "done"
                        else TerminationMessage("ended", step=9)
                    )
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
        self.cluster.now += 3_600  # before certificates are replaced
        _, plan = self.operator.plan()
        assert (plan.actions, plan.calls, plan.events) == ((), (), ()), "an hour later there is still nothing to do"
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
        assert cluster.service["spec"]["selector"] == manifests.service_selector(job, coordinators[0].ordinal)
        room = sum(cluster.rooms[name] for name in cluster.nodes)
        running = [pod for pod in workers if pod.phase == "Running"]
        assert len(running) == min(job.spec.desired, room)
        assert len(workers) - len(running) == 0 or room < job.spec.desired + 1
        assert job.status.ready_replicas == len(running)
        hashes = {g.name: manifests.template_hash(job, g) for g in job.spec.worker_groups}
        if len(running) > 1:
            assert all(pod.template == hashes.get(pod.group) for pod in workers), "the new template is everywhere"
        assert job.status.phase == "Running"


Life.TestCase.settings = settings(
    derandomize=True,
    max_examples=examples(120),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLife = pytest.mark.timeout(120)(Life.TestCase)

"""What a job makes of its queue's grant: as kubectl scale and suspend would, without a change of its spec."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scenes import NOW, accepted, body, container, coordinator, edit, group, nodes, training, verdict_of, worker

from virtualflow.protocol.http_api import StopCall
from virtualflow_operator import reasons
from virtualflow_operator.api.job import merge_patch, write_status
from virtualflow_operator.api.objects import Job, Pod, Service, read_job
from virtualflow_operator.api.queue import QueueSpec
from virtualflow_operator.constants import LABEL_CAPACITY, LABEL_ROLE, ON_DEMAND, SPOT, WORKER
from virtualflow_operator.jobs import manifests
from virtualflow_operator.jobs.actions import CheckTemplates, CreatePod, DeletePod, JobPlan
from virtualflow_operator.jobs.admission import AT_ONCE, Admitted
from virtualflow_operator.jobs.pod_classification import ClassifiedPod
from virtualflow_operator.jobs.reconcile import reconcile
from virtualflow_operator.jobs.scene import Scene
from virtualflow_operator.queues.admission import QueueAdmission
from virtualflow_operator.queues.members import Grant
from virtualflow_operator.queues.worker_pods import choose_grounds, confine
from virtualflow_operator.settings import OperatorSettings

SETTINGS = OperatorSettings(image="virtualflow-operator:test")
Spec = dict[str, Any]


def queued(status: Spec | None = None, **spec: Any) -> Spec:
    return body(status, **({"queue": "shared", "maxReplicas": 8} | spec))


def grant(workers: int, reason: str = "its share", code: str = reasons.ALLOCATED) -> Grant:
    code = code if workers else reasons.QUEUED
    return Grant("uid-1", "shared", workers, reason, code=code, since=NOW - 9, resized=NOW - 5, waited=3.0)


def decide(raw: Spec, *pods: Pod, given: Grant | None = None, **facts: Any) -> JobPlan:
    service, job = Service("10.0.0.1", 0), read_job(raw)
    admission = QueueAdmission(given) if job.spec.queue else AT_ONCE
    scene = Scene(job=job, pods=pods, service=service, nodes=nodes(*pods), admission=admission, **facts)
    return reconcile(scene, NOW, SETTINGS)


def admit(raw: Spec, given: Grant | None = None) -> Admitted:
    job = read_job(raw)
    return (QueueAdmission(given) if job.spec.queue else AT_ONCE).admit(job, sound=True, now=NOW)


def made(plan: JobPlan) -> int:
    return sum(1 for action in plan.actions if isinstance(action, CreatePod) and action.role == WORKER)


def told(plan: JobPlan) -> list[str]:
    return [event.reason for event in plan.events]


def allocated(plan: JobPlan) -> tuple[str, str, str]:
    condition = plan.status.condition("Allocated")
    assert condition is not None
    return condition.status, condition.reason, condition.message


@pytest.mark.parametrize(
    ("replicas", "workers", "wanted"), [(2, 5, 5), (2, 1, 1), (2, 9, 8)], ids=["more", "fewer", "never beyond its most"]
)
def test_a_grant_is_the_number_of_workers(replicas: int, workers: int, wanted: int) -> None:
    raw = accepted(queued(replicas=replicas))
    plan = decide(raw, coordinator(read_job(raw)), given=grant(workers))
    assert made(plan) == wanted
    assert plan.status.allocation is not None
    assert (plan.status.allocation.workers, plan.status.allocation.queue) == (workers, "shared")
    assert allocated(plan)[:2] == ("True", "Allocated")
    assert "its share" in allocated(plan)[2]
    assert told(plan).count("Allocated") == 1


def test_what_was_decided_is_told_once() -> None:
    raw = accepted(queued())
    first = decide(raw, given=grant(3))
    again = decide(raw | {"status": write_status(first.status)}, given=grant(3))
    assert "Allocated" not in told(again)
    assert merge_patch(write_status(first.status), write_status(again.status)) == {}


def test_after_a_restart_of_the_operator_a_job_goes_by_its_status() -> None:
    raw = accepted(queued())
    first = decide(raw, given=grant(3))
    admitted = admit(raw | {"status": write_status(first.status)})
    assert admitted.job.spec.desired == 3
    assert admitted.allocation == first.status.allocation


def test_a_new_job_waits_until_its_queue_has_decided() -> None:
    plan = decide(queued(), verdict=verdict_of(queued()))
    assert (plan.status.phase, made(plan), plan.actions) == ("Pending", 0, ())
    assert allocated(plan)[:2] == ("False", "Queued")
    progressing = plan.status.condition("Progressing")
    assert progressing is not None
    assert (progressing.reason, plan.status.workers) == ("Queued", "0/0")
    assert plan.status.start_time is None, "the time limit of a job that waits does not run"


def test_a_job_that_waits_for_its_queue_is_told_of_a_template_that_is_refused() -> None:
    raw = queued()
    (action,) = decide(raw).actions
    assert isinstance(action, CheckTemplates)
    plan = decide(raw, verdict=verdict_of(raw, 'unknown field "spec.nodeSelectr"', NOW))
    progressing = plan.status.condition("Progressing")
    assert progressing is not None
    assert (plan.status.phase, progressing.reason) == ("Pending", reasons.TEMPLATE_REJECTED)
    assert "nodeSelectr" in progressing.message
    assert allocated(plan)[:2] == ("False", "Queued"), "it keeps its place"


def test_a_job_that_runs_already_goes_on_until_its_queue_has_decided() -> None:
    raw = accepted(queued(), replicas=2)
    job = read_job(raw)
    plan = decide(raw, coordinator(job), worker(job, 0), worker(job, 1))
    assert not any(isinstance(action, DeletePod) for action in plan.actions)


def test_no_workers_any_more_is_a_suspension_with_a_checkpoint() -> None:
    raw = accepted(queued({"step": 7}, checkpoint={"volume": {"emptyDir": {}}}), step=7)
    job = read_job(raw)
    from scenes import remote, seen

    from virtualflow_operator.api.objects import CoordinatorLink

    pods = (coordinator(job), worker(job, 0))
    link = CoordinatorLink(pods[0].uid, True, NOW - 50, remote("training", seen(pods[1])))
    plan = decide(raw, *pods, given=grant(0, "others are more entitled"), link=link)
    assert any(isinstance(call, StopCall) for call in plan.calls)
    assert plan.status.phase == "Suspending"
    assert "Queued" in told(plan)
    rest = decide(raw | {"status": write_status(plan.status)}, given=grant(0, "others are more entitled"))
    assert rest.status.phase == "Suspended"
    suspended = rest.status.condition("Suspended")
    assert suspended is not None
    assert (suspended.status, suspended.reason) == ("True", "Queued")
    assert "others are more entitled" in allocated(rest)[2]


def test_a_job_suspended_by_its_user_stays_so_whatever_it_was_given() -> None:
    plan = decide(queued(suspend=True), given=grant(3))
    assert plan.status.phase == "Suspended"
    condition = plan.status.condition("Suspended")
    assert condition is not None
    assert condition.reason == "Suspended"


def test_a_grant_of_a_namesake_that_was_deleted_does_not_count() -> None:
    other = Grant("uid-0", "shared", 4, "x")
    admitted = admit(queued(), other)
    assert admitted.wait is not None
    assert admitted.wait.why == "the queue shared has no workers for it: its queue has not decided yet"


def test_out_of_its_queue_a_job_has_what_it_asks_for() -> None:
    first = decide(accepted(queued()), given=grant(5))
    raw = body(write_status(first.status), replicas=2)
    plan = decide(raw, given=grant(5))
    assert plan.status.allocation is None
    assert plan.status.condition("Allocated") is None
    assert admit(raw, grant(5)).job.spec.desired == 2


def test_a_job_without_a_queue_grows_no_further_than_it_is_efficient() -> None:
    points = [{"workers": 3, "stepsPerSecond": "10.5"}, {"workers": 2, "stepsPerSecond": "10"}]
    raw = body({"scaling": points}, replicas=4, elasticity={"minEfficiency": 50})
    assert admit(raw).job.spec.desired == 2
    raw["spec"]["elasticity"] = {}
    assert admit(raw).job.spec.desired == 4


def test_efficiency_takes_nothing_of_the_minimum() -> None:
    points = [{"workers": 3, "stepsPerSecond": "10.5"}, {"workers": 2, "stepsPerSecond": "10"}]
    raw = body({"scaling": points}, replicas=4, minReplicas=3, elasticity={"minEfficiency": 50})
    assert admit(raw).job.spec.desired == 3, "with fewer it could not begin again"


def test_a_job_says_that_it_is_its_efficiency_that_keeps_it_small_and_tells_it_once() -> None:
    stage = training(2)
    points = [{"workers": 3, "stepsPerSecond": "10.5"}, {"workers": 2, "stepsPerSecond": "10"}]
    stage.raw["status"]["scaling"] = points
    edit(stage, replicas=4, elasticity={"minEfficiency": 50})
    plan = stage.decide()
    condition = plan.status.condition("Progressing")
    assert condition is not None
    assert (condition.status, condition.reason) == ("True", reasons.EFFICIENT)
    assert "It has 2 of the 4 workers that replicas asks for" in condition.message
    assert "less than minEfficiency (50 %)" in condition.message
    assert [event.warning for event in plan.events if event.reason == reasons.EFFICIENT] == [False]
    stage.write(plan)
    assert told(stage.decide()) == []
    edit(stage, elasticity={"minEfficiency": 1})
    after = stage.decide().status.condition("Progressing")
    assert after is not None
    assert after.reason == reasons.SCALING


# --- where its workers run --------------------------------------------------------------------------------------------

POOL = {"matchLabels": {"pool": "ml"}}
CHEAP = {"matchLabels": {"capacity": "spot"}, "matchExpressions": [{"key": "zone", "operator": "Exists"}]}


def terms(pod: Spec) -> list[set[tuple[str, str]]]:
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return [{(e["key"], e["operator"]) for e in term["matchExpressions"]} for term in required["nodeSelectorTerms"]]


def placed(ground: str, *, own: Spec | None = None, **spec: Any) -> Spec:
    """A worker's pod, confined to its queue's nodes."""
    raw = body(workerGroups=[group(pod={"containers": [container()]} | ({"affinity": own} if own else {}))])
    job: Job = read_job(raw)
    pod = manifests.worker_pod(job, job.spec.worker_groups[0], 0, "10.0.0.1", SETTINGS)
    confine(pod, msgspec.convert(spec, QueueSpec), ground)
    return pod


def test_a_worker_runs_on_its_queues_nodes_only() -> None:
    assert terms(placed("", nodeSelector=POOL)) == [{("pool", "In")}]
    assert "nodeAffinity" not in placed("")["spec"]["affinity"]


def test_what_the_template_demands_stays_demanded_in_every_alternative() -> None:
    mine = [{"matchExpressions": [{"key": k, "operator": "Exists"}]} for k in ("a", "b")]
    own = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": mine}}}
    pod = placed(ON_DEMAND, own=own, nodeSelector=POOL, spotSelector=CHEAP)
    assert terms(pod) == [
        {(key, "Exists"), ("pool", "In"), negated}
        for key in ("a", "b")
        for negated in (("capacity", "NotIn"), ("zone", "DoesNotExist"))
    ]


@pytest.mark.parametrize(
    "own",
    [
        {"nodeAffinity": None},
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": None}},
        {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": None}},
    ],
    ids=["no affinity to nodes", "no demands", "no preferences"],
)
def test_what_a_template_says_is_nothing_is_nothing(own: Spec) -> None:
    pod = placed(SPOT, own=own, nodeSelector=POOL, spotSelector=CHEAP)
    assert terms(pod) == [{("pool", "In")}]


def test_on_demand_keeps_off_spot_nodes_and_spot_prefers_them() -> None:
    on_demand, spot = placed(ON_DEMAND, spotSelector=CHEAP), placed(SPOT, nodeSelector=POOL, spotSelector=CHEAP)
    assert terms(on_demand) == [{("capacity", "NotIn")}, {("zone", "DoesNotExist")}]
    assert terms(spot) == [{("pool", "In")}]
    (preferred,) = spot["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [e["key"] for e in preferred["preference"]["matchExpressions"]] == ["capacity", "zone"]
    assert on_demand["metadata"]["labels"][LABEL_CAPACITY] == ON_DEMAND


def test_where_nodes_are_to_fall_idle_a_worker_prefers_those_with_workers_of_any_job() -> None:
    own = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}}
    packed = placed("", own=own, placement="BinPack")["spec"]["affinity"]["podAffinity"]
    mine, term = packed["preferredDuringSchedulingIgnoredDuringExecution"]
    assert (mine, term["weight"]) == ({"weight": 1}, 100)
    assert term["podAffinityTerm"] == {
        "labelSelector": {"matchLabels": {LABEL_ROLE: WORKER}},
        "namespaceSelector": {},
        "topologyKey": "kubernetes.io/hostname",
    }
    assert "podAffinity" not in placed("")["spec"]["affinity"]


def test_as_many_are_made_for_on_demand_nodes_as_the_minimum_lacks() -> None:
    job = read_job(body(replicas=6, minReplicas=3))

    def have(*grounds: str) -> list[ClassifiedPod]:
        return [ClassifiedPod(worker(job, i, ground=g), "training", "healthy") for i, g in enumerate(grounds)]

    assert choose_grounds(4, job.spec, []) == [ON_DEMAND] * 3 + [SPOT]
    assert choose_grounds(2, job.spec, have(ON_DEMAND, ON_DEMAND, SPOT)) == [ON_DEMAND, SPOT]
    lost = [*have(ON_DEMAND), ClassifiedPod(worker(job, 5, ground=ON_DEMAND), "training", "lost")]
    assert choose_grounds(2, job.spec, lost) == [ON_DEMAND, ON_DEMAND]

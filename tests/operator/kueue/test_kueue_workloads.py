"""Which Workloads a job has in each situation, what they ask for, and when quota goes back."""

from __future__ import annotations

from typing import Any

import pytest
from kueue_cases import (
    admitted,
    asked,
    asks_for,
    created,
    decide,
    deleted,
    kueue_job,
    named,
    patched,
    reserved,
    stored,
    told,
)
from scenes import NOW, Spec, Stage, container, ended, group, homeless, training, verdict_of, worker

from virtualflow.protocol.http_api import DrainCall
from virtualflow_operator.api.job import write_status
from virtualflow_operator.constants import (
    ANNOTATION_KUEUE_REPLACES,
    LABEL_KUEUE_PRIORITY,
    LABEL_KUEUE_QUEUE,
)
from virtualflow_operator.jobs.actions import CreatePod, JobPlan
from virtualflow_operator.kueue import PatchWorkload

EVICTED = ("Evicted", "True", "Preempted")


def runs(count: int = 2, *, elastic: bool = False, **spec: Any) -> Stage:
    """A job that trains on so many workers, with the label of a queue of Kueue's."""
    stage = training(count, **spec)
    stage.raw = named(stage.raw, elastic=elastic)
    return stage


def workload_of(raw: Spec) -> Spec:
    """The Workload with which that job asked, before it had pods."""
    return asked(raw | {"status": {}})


def conditions(patch: PatchWorkload) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in patch.body["status"]["conditions"]}


def made(plan: JobPlan) -> list[str]:
    return [action.name for action in plan.actions if isinstance(action, CreatePod)]


# --- asking -----------------------------------------------------------------------------------------------------------


def test_a_job_asks_for_its_coordinator_and_its_workers_and_makes_no_pod() -> None:
    raw = kueue_job(replicas=4, minReplicas=2, priority=7)
    plan = decide(raw)
    workload = created(plan)
    assert made(plan) == []
    metadata, spec = workload["metadata"], workload["spec"]
    assert metadata["ownerReferences"][0]["uid"] == metadata["labels"]["kueue.x-k8s.io/job-uid"] == "uid-1"
    assert (spec["queueName"], spec["priority"]) == ("team", 7)
    (coordinator, workers) = spec["podSets"]
    assert (coordinator["name"], coordinator["count"], workers["name"], workers["count"]) == (
        "coordinator",
        1,
        "workers",
        4,
    )
    assert workers["minCount"] == 2
    assert "minCount" not in coordinator
    assert workers["template"]["spec"]["containers"] == [{"name": "trainer", "image": "trainer:1"}]
    assert coordinator["template"]["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "20m", "memory": "64Mi"}


@pytest.mark.parametrize(
    ("groups", "wanted", "least"),
    [
        ([group("a", maxReplicas=3), group("b")], {"a": 3, "b": 2}, {"a": 1}),
        ([group("a", maxReplicas=1), group("b")], {"a": 1, "b": 4}, {"b": 1}),
        ([group("a"), group("b")], {"a": 5, "b": 0}, {"a": 2}),
    ],
    ids=["the first is full", "the second is larger", "the second is in reserve"],
)
def test_groups_are_filled_in_their_order_and_one_of_them_may_be_admitted_in_part(
    groups: list[Spec], wanted: dict[str, int], least: dict[str, int]
) -> None:
    workload = asked(kueue_job(replicas=5, minReplicas=2, workerGroups=groups))
    assert asks_for(workload) == {"coordinator": 1, **wanted}
    assert {e["name"]: e["minCount"] for e in workload["spec"]["podSets"] if "minCount" in e} == least


def test_only_what_kueue_looks_at_is_in_the_template() -> None:
    pod = {"nodeSelector": {"gpu": "a100"}, "volumes": [{"name": "data", "emptyDir": {}}], "hostNetwork": True}
    trainer = container(command=["train"], env=[{"name": "SECRET", "value": "x"}], resources={"limits": {"gpu": "1"}})
    workers = group(pod=pod | {"containers": [trainer]})
    template = asked(kueue_job(workerGroups=[workers]))["spec"]["podSets"][1]["template"]
    assert template["spec"]["nodeSelector"] == {"gpu": "a100"}
    assert template["spec"]["containers"] == [
        {"name": "trainer", "image": "trainer:1", "resources": {"limits": {"gpu": "1"}}}
    ]
    assert set(template["spec"]) == {"affinity", "containers", "nodeSelector", "restartPolicy"}


def test_a_priority_class_gives_its_value_and_one_that_is_missing_is_waited_for() -> None:
    raw = kueue_job(priority=7)
    raw["metadata"]["labels"][LABEL_KUEUE_PRIORITY] = "urgent"
    spec = created(decide(raw, priority=900))["spec"]
    assert (spec["priority"], spec["priorityClassRef"]["name"]) == (900, "urgent")
    plan = decide(raw, verdict=verdict_of(raw))
    assert plan.actions == ()
    assert plan.wake_at is not None, "it is looked for again"
    condition = plan.status.condition("Progressing")
    assert condition is not None
    assert "there is no WorkloadPriorityClass urgent" in condition.message


@pytest.mark.parametrize(
    "spec",
    [{"suspend": True}, {"weight": 0}, {"queue": "shared"}],
    ids=["suspended by its user", "makes no sense", "in a queue of ours, too"],
)
def test_a_job_that_is_not_to_run_asks_for_nothing(spec: Spec) -> None:
    job = kueue_job(**spec)
    assert decide(job, verdict=verdict_of(job)).actions == ()


def test_a_job_that_runs_and_is_given_the_label_leaves_before_it_asks() -> None:
    stage = runs()
    plan = decide(stage.raw, stage=stage)
    assert plan.status.phase == "Suspending"
    assert not any("Workload" in type(action).__name__ for action in plan.actions)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"replicas": 6}, {"coordinator": 1, "workers": 6}),
        ({"workerGroups": [group("gpus")]}, {"coordinator": 1, "gpus": 2}),
        ({"minReplicas": 2}, {"coordinator": 1, "workers": 2}),
    ],
    ids=["replicas", "groups", "minReplicas"],
)
def test_what_is_asked_for_follows_the_job_while_it_has_no_quota(change: Spec, wanted: dict[str, int]) -> None:
    before = kueue_job(replicas=2)
    workload = asked(before)
    (patch,) = patched(decide(before | {"spec": before["spec"] | change}, workload))
    assert {e["name"]: e["count"] for e in patch.body["spec"]["podSets"]} == wanted
    assert patch.body["metadata"]["resourceVersion"] == "1", "unless Kueue was faster"
    assert decide(before, workload, verdict=verdict_of(before)).actions == (), "nothing has changed"


def test_another_queue_and_what_was_reclaimed_count_once_it_has_no_quota() -> None:
    raw = kueue_job()
    workload = asked(raw)
    other = named(raw, "other")
    (patch,) = patched(decide(other, workload))
    assert patch.body["spec"]["queueName"] == "other"
    assert not [p for p in patched(decide(other, admitted(workload))) if "spec" in p.body]
    leftover = workload | {"status": {"reclaimablePods": [{"name": "workers", "count": 1}]}}
    (patch,) = patched(decide(raw, leftover))
    assert (patch.subresource, patch.body["status"]) == ("status", {"reclaimablePods": None})


# --- handing back -----------------------------------------------------------------------------------------------------


def test_pods_that_are_gone_are_reclaimable_and_those_that_are_there_are_not() -> None:
    stage = runs(4, replicas=4)
    workload = admitted(workload_of(stage.raw))
    smaller = stage.raw | {"spec": stage.raw["spec"] | {"replicas": 2}}

    def reclaimed(plan: JobPlan) -> Any:
        return [p.body["status"]["reclaimablePods"] for p in patched(plan) if "reclaimablePods" in p.body["status"]]

    assert reclaimed(decide(smaller, workload, stage=stage)) == [], "they are yet to leave"
    stage.pods[-1] = ended(stage.pods[-1], 0)
    assert reclaimed(decide(smaller, workload, stage=stage)) == [[{"name": "workers", "count": 1}]]
    stage.pods = stage.pods[:-2]
    assert reclaimed(decide(smaller, workload, stage=stage)) == [[{"name": "workers", "count": 2}]]


def test_of_a_partial_admission_the_pods_that_never_came_are_reclaimable_too() -> None:
    stage = runs(2, replicas=5)
    workload = admitted(workload_of(stage.raw), workers=3)
    (patch,) = patched(decide(stage.raw | {"spec": stage.raw["spec"] | {"replicas": 2}}, workload, stage=stage))
    assert patch.body["status"]["reclaimablePods"] == [{"name": "workers", "count": 3}]
    again = workload | {"status": workload["status"] | patch.body["status"]}
    plan = decide(stage.raw, again, stage=stage)
    assert patched(plan) == [], "what was handed back is not taken again"
    assert plan.workers_wanted == 2


def test_a_worker_that_crashed_keeps_its_quota() -> None:
    stage = runs(3, replicas=3)
    workload = admitted(workload_of(stage.raw))
    stage.pods.pop()
    plan = decide(stage.raw, workload, stage=stage)
    assert not [p for p in patched(plan) if "reclaimablePods" in p.body["status"]]
    assert made(plan) == ["digits-workers-2"]


def test_quota_is_not_handed_back_for_a_worker_that_is_just_being_made() -> None:
    groups = [group("workers", maxReplicas=2), group("spare")]
    stage = runs(1, replicas=4, workerGroups=groups)
    workload = admitted(workload_of(stage.raw))
    assert asks_for(workload) == {"coordinator": 1, "workers": 2, "spare": 2}
    stage.pods = [stage.pods[0], homeless(stage.pods[1]), worker(stage.job, group="spare")]
    plan = decide(stage.raw | {"spec": stage.raw["spec"] | {"replicas": 2}}, workload, stage=stage)
    assert made(plan) == ["digits-spare-1"], "no node takes one of the other group"
    (reclaimed,) = [p.body["status"]["reclaimablePods"] for p in patched(plan)]
    assert reclaimed == [{"name": "workers", "count": 1}]


def test_an_elastic_job_hands_back_by_a_lower_count() -> None:
    stage = runs(2, elastic=True, replicas=4)
    four = stage.raw | {"spec": stage.raw["spec"] | {"minReplicas": 4}, "status": {}}
    workload = admitted(asked(four))
    plan = decide(stage.raw | {"spec": stage.raw["spec"] | {"replicas": 2}}, workload, stage=stage)
    counts = [p.body["spec"]["podSets"][1]["count"] for p in patched(plan) if "spec" in p.body]
    assert counts == [2]


def test_a_suspended_job_gives_its_quota_back_with_its_last_pod() -> None:
    stage = runs()
    workload = admitted(workload_of(stage.raw))
    resting = stage.raw | {"spec": stage.raw["spec"] | {"suspend": True}}
    assert deleted(decide(resting, workload, stage=stage)) == []
    assert deleted(decide(resting, workload)) == [workload["metadata"]["name"]]


@pytest.mark.parametrize(("phase", "reason"), [("Complete", "Succeeded"), ("Failed", "Failed")])
def test_a_job_that_is_over_says_so_once_its_pods_have_ended(phase: str, reason: str) -> None:
    stage = runs()
    workload = admitted(workload_of(stage.raw))
    over = stage.raw | {"status": stage.raw["status"] | {"phase": phase, "conditions": []}}
    assert patched(decide(over, workload, stage=stage)) == []
    stage.pods = [ended(pod, 0) for pod in stage.pods]
    (patch,) = patched(decide(over, workload, stage=stage))
    assert conditions(patch)["Finished"] == ("True", reason)
    finished = told(workload, ("Finished", "True", reason))
    assert decide(over, finished).actions == ()


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_an_evicted_job_leaves_with_a_checkpoint_and_then_gives_its_quota_back() -> None:
    stage = runs()
    workload = told(admitted(workload_of(stage.raw)), EVICTED, message="preempted by team-b")
    leaving = decide(stage.raw, workload, stage=stage)
    assert [type(call).__name__ for call in leaving.calls] == ["StopCall"]
    assert patched(leaving) == []
    plan = decide(stage.raw, workload)
    (patch,) = patched(plan)
    found = conditions(patch)
    assert (patch.body["status"]["admission"], patch.body["status"]["reclaimablePods"]) == (None, None)
    assert (found["QuotaReserved"][0], found["Admitted"][0]) == ("False", "False")
    assert found["Requeued"] == ("True", "Preempted"), "Kueue queues it again"
    condition = plan.status.condition("Allocated")
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "EvictedByKueue")
    assert "Preempted" in condition.message
    assert "preempted by team-b" in condition.message


@pytest.mark.parametrize(
    ("reason", "again"),
    [("Preempted", "True"), ("NodeFailures", "True"), ("PodsReadyTimeout", "False"), ("Deactivated", "False")],
)
def test_after_an_eviction_kueue_queues_it_at_once_or_for_a_cause(reason: str, again: str) -> None:
    workload = told(admitted(asked(kueue_job())), ("Evicted", "True", reason))
    (patch,) = patched(decide(kueue_job(), workload))
    assert conditions(patch)["Requeued"] == (again, reason)


def test_one_that_is_switched_off_leaves_and_kueue_itself_evicts_it() -> None:
    stage = runs()
    workload = admitted(workload_of(stage.raw))
    off = workload | {"spec": workload["spec"] | {"active": False}}
    assert decide(stage.raw, off, stage=stage).status.phase == "Suspending"
    assert decide(stage.raw, off).actions == ()


def test_pods_that_ask_for_more_are_admitted_anew_and_another_image_is_not() -> None:
    stage = runs()
    workload = admitted(workload_of(stage.raw))
    larger = group(pod={"containers": [container(resources={"requests": {"cpu": "64"}})]})
    changed = stage.raw | {"spec": stage.raw["spec"] | {"workerGroups": [larger]}}
    assert decide(changed, workload, stage=stage).status.phase == "Suspending"
    assert deleted(decide(changed, workload)) == [workload["metadata"]["name"]]
    image = stage.raw | {"spec": stage.raw["spec"] | {"workerGroups": [group(image="trainer:2")]}}
    assert decide(image, workload, stage=stage).status.phase == "Running"


# --- growing ----------------------------------------------------------------------------------------------------------


def test_a_job_that_is_not_elastic_says_why_it_does_not_grow() -> None:
    stage = runs(2, replicas=2)
    workload = admitted(workload_of(stage.raw))
    stage.raw = stage.raw | {"spec": stage.raw["spec"] | {"replicas": 4}}
    plan = decide(stage.raw, workload, stage=stage)
    assert (made(plan), plan.workers_wanted) == ([], 2)
    assert not any(type(action).__name__ == "CreateWorkload" for action in plan.actions)
    condition = plan.status.condition("Progressing")
    assert condition is not None
    assert condition.reason == "LimitedByKueue"
    assert "elastic-job" in condition.message


def test_an_elastic_job_asks_for_its_minimum_first_and_then_for_the_rest_in_its_place() -> None:
    raw = kueue_job(replicas=8, minReplicas=2, elastic=True)
    first = asked(raw)
    assert asks_for(first) == {"coordinator": 1, "workers": 2}
    assert not any("minCount" in entry for entry in first["spec"]["podSets"]), "Kueue takes no minCount of elastic jobs"
    second = created(decide(raw, admitted(first)))
    assert asks_for(second) == {"coordinator": 1, "workers": 8}
    annotations = second["metadata"]["annotations"]
    assert annotations[ANNOTATION_KUEUE_REPLACES] == f"ml/{first['metadata']['name']}"
    assert annotations["kueue.x-k8s.io/elastic-job"] == "true"
    assert annotations["kueue.x-k8s.io/workload-slice-name"] == first["metadata"]["name"]
    assert second["metadata"]["name"] != first["metadata"]["name"]


@pytest.mark.parametrize(
    ("waited", "workers", "again"), [(0, 10, 30), (31, 6, 60), (61, 4, 90), (91, 3, None), (10_000, 3, None)]
)
def test_what_is_missing_is_asked_for_in_halves_while_there_is_no_quota(
    waited: int, workers: int, again: int | None
) -> None:
    raw = kueue_job(replicas=10, minReplicas=2, virtualNodes=16, elastic=True)
    first = admitted(asked(raw))
    second = stored(created(decide(raw, first)), 2)
    born = NOW - 58
    plan = decide(raw, first, second, now=born + waited)
    counts = [p.body["spec"]["podSets"][1]["count"] for p in patched(plan) if "spec" in p.body]
    assert counts == ([] if workers == 10 else [workers])
    assert plan.wake_at == (None if again is None else born + again)


def test_a_larger_admission_takes_over_and_the_former_one_goes() -> None:
    raw = kueue_job(replicas=4, elastic=True)
    first = admitted(asked(raw))
    second = stored(created(decide(raw, first)), 2)
    assert decide(raw, first, second).workers_wanted == 1
    unchecked = decide(raw, told(first, ("Finished", "True", "WorkloadSliceReplaced")), reserved(second))
    assert unchecked.workers_wanted == 1, "until the checks let the larger one through"
    assert deleted(unchecked) == []
    after = decide(raw, first, admitted(second))
    assert (after.workers_wanted, deleted(after)) == (4, [first["metadata"]["name"]])


def test_nothing_more_is_asked_for_once_the_job_is_to_be_smaller_or_is_evicted() -> None:
    raw = kueue_job(replicas=4, elastic=True)
    first = admitted(asked(raw))
    second = stored(created(decide(raw, first)), 2)
    name = second["metadata"]["name"]
    assert name in deleted(decide(raw | {"spec": raw["spec"] | {"replicas": 1}}, first, second))
    assert name in deleted(decide(raw, told(first, EVICTED), second))


# --- readiness, and the label -----------------------------------------------------------------------------------------


def test_kueue_is_told_when_the_job_trains_and_when_it_does_not_any_more() -> None:
    stage = runs()
    workload = admitted(workload_of(stage.raw))
    (patch,) = patched(decide(stage.raw, workload, stage=stage))
    assert conditions(patch)["PodsReady"] == ("True", "Started")
    ready = told(workload, ("PodsReady", "True", "Started"))
    assert patched(decide(stage.raw, ready, stage=stage)) == []
    waiting = stage.raw | {"status": {}}
    (patch,) = patched(decide(waiting, ready))
    assert conditions(patch)["PodsReady"] == ("False", "WaitForRecovery")
    (patch,) = patched(decide(waiting, workload))
    assert conditions(patch)["PodsReady"] == ("False", "WaitForStart")


def test_without_its_label_a_job_stays_kueues_until_its_quota_is_given_back() -> None:
    stage = runs()
    workload = admitted(workload_of(stage.raw))
    metadata = {key: value for key, value in stage.raw["metadata"].items() if key != "labels"}
    assert LABEL_KUEUE_QUEUE in stage.raw["metadata"]["labels"]
    free = stage.raw | {"metadata": metadata}
    plan = decide(free, workload, stage=stage)
    assert (plan.workers_wanted, deleted(plan)) == (2, [])
    evicted = decide(free, told(workload, EVICTED), stage=stage)
    assert evicted.status.phase == "Suspending"
    after = decide(free | {"status": write_status(evicted.status)}, workload_of(stage.raw))
    assert deleted(after) == [workload["metadata"]["name"]]
    assert after.workers_wanted == 2, "it is nobody's now"


def test_workers_are_replaced_one_by_one_in_their_own_place() -> None:
    stage = runs(2)
    workload = told(admitted(workload_of(stage.raw)), ("PodsReady", "True", "Started"))
    image = stage.raw | {"spec": stage.raw["spec"] | {"workerGroups": [group(image="trainer:2")]}}
    plan = decide(image, workload, stage=stage, verdict=verdict_of(image))
    assert made(plan) == [], "one more is not admitted"
    assert sum(isinstance(call, DrainCall) for call in plan.calls) == 1

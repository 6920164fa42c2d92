"""What a job makes of what Kueue says: so many workers on these nodes, or none, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from kueue_cases import admitted, asked, created, decide, kueue_job, named, reserved, stored, told, view
from scenes import NOW, SETTINGS, Spec, body, group

from virtualflow_operator.api import PodAdditions, read_job, read_workload
from virtualflow_operator.api.job import merge_patch, write_status
from virtualflow_operator.jobs.actions import JobPlan
from virtualflow_operator.jobs.admission import AT_ONCE, Admitted
from virtualflow_operator.kueue import Kueue, KueueAdmission, chain_of, follows_kueue
from virtualflow_operator.kueue.admission import KueuePlacement


def admit(raw: Spec, *workloads: Spec, **facts: Any) -> Admitted:
    return KueueAdmission(view(*workloads, **facts), SETTINGS).admit(read_job(raw), sound=True, now=NOW)


def waits(admitted: Admitted) -> str:
    return "" if admitted.wait is None else admitted.wait.leave


def additions(admitted: Admitted) -> Mapping[str, PodAdditions]:
    assert isinstance(admitted.placement, KueuePlacement)
    return admitted.placement.additions


def allocated(plan: JobPlan) -> tuple[str, str, str]:
    condition = plan.status.condition("Allocated")
    assert condition is not None
    return condition.status, condition.reason, condition.message


def checks(workload: Spec, *states: Spec) -> Spec:
    return workload | {"status": workload["status"] | {"admissionChecks": list(states)}}


# --- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(lambda w: [], "its Workload is not made yet", id="nothing was asked"),
        pytest.param(lambda w: [w], "is in the LocalQueue team", id="nothing was said"),
        pytest.param(
            lambda w: [told(w, ("QuotaReserved", "False", "Pending"), message="insufficient unused quota for cpu")],
            "insufficient unused quota for cpu",
            id="there is no quota",
        ),
        pytest.param(lambda w: [w | {"spec": w["spec"] | {"active": False}}], "switched off", id="it is switched off"),
        pytest.param(
            lambda w: [checks(reserved(w), {"name": "budget", "state": "Pending", "message": "ask finance"})],
            "these admission checks are not ready: budget (ask finance)",
            id="a check is not ready",
        ),
        pytest.param(lambda w: [admitted(w, "gone")], "there is no ResourceFlavor gone", id="a flavor is missing"),
    ],
)
def test_a_job_waits_for_admission_and_says_what_for(make: Any, says: str) -> None:
    raw = kueue_job()
    plan = decide(raw, *make(asked(raw)))
    truth, reason, message = allocated(plan)
    assert (truth, reason) == ("False", "WaitsForKueue")
    assert message.startswith("It waits for admission by Kueue: ")
    assert says in message
    assert (plan.status.phase, plan.workers_wanted) == ("Pending", 0)
    condition = plan.status.condition("Progressing")
    assert condition is not None
    assert condition.reason == "WaitsForKueue"
    assert plan.status.start_time is None, "the time limit of a job that waits does not run"


def test_topology_and_checks_that_contradict_one_another_are_waited_for() -> None:
    raw = kueue_job()
    placed = admitted(asked(raw))
    placed["status"]["admission"]["podSetAssignments"][1]["topologyAssignment"] = {"levels": ["rack"]}
    assert "topology-aware" in waits(admit(raw, placed))
    update = {"name": "workers", "nodeSelector": {"pool": "other"}}
    check = {"name": "provision", "state": "Ready", "podSetUpdates": [update]}
    assert "the admission check provision wants another value of pool" in waits(
        admit(raw, checks(admitted(asked(raw)), check))
    )


# --- admitted ---------------------------------------------------------------------------------------------------------


def test_an_admission_is_the_number_of_workers_of_each_group_and_where_they_run() -> None:
    groups = [group("a", maxReplicas=3), group("b")]
    raw = kueue_job(replicas=5, minReplicas=2, workerGroups=groups)
    granted = admit(raw, admitted(asked(raw), a=1))
    spec = granted.job.spec
    assert [(g.name, g.max_replicas) for g in spec.worker_groups] == [("a", 1), ("b", 2)]
    assert (spec.desired, spec.most) == (3, 3)
    assert set(additions(granted)) == {"coordinator", "a", "b"}
    assert additions(granted)["a"].node_selector == {"pool": "reserved"}
    assert granted.limit_reason == "LimitedByKueue"


def test_what_admission_checks_demand_comes_on_top_of_the_flavors() -> None:
    raw = kueue_job()
    toleration = {"key": "reserved", "operator": "Exists"}
    update = {
        "name": "workers",
        "nodeSelector": {"zone": "a"},
        "tolerations": [toleration, {"key": "other"}],
        "labels": {"l": "1"},
        "annotations": {"consume": "request-1"},
    }
    check = {"name": "provision", "state": "Ready", "podSetUpdates": [update]}
    placements = additions(admit(raw, checks(admitted(asked(raw)), check)))
    assert placements["workers"] == PodAdditions(
        {"pool": "reserved", "zone": "a"}, (toleration, {"key": "other"}), {"l": "1"}, {"consume": "request-1"}
    )
    assert placements["coordinator"].node_selector == {"pool": "reserved"}


def test_the_allocation_is_written_once_and_says_since_when() -> None:
    raw = kueue_job(replicas=2)
    workload = asked(raw)
    waiting = decide(raw, workload)
    assert waiting.status.allocation is not None
    assert waiting.status.allocation.workers == 0
    ready = admitted(workload)
    later = raw | {"status": write_status(waiting.status)}
    plan = decide(later, ready, now=NOW + 60)
    allocation = plan.status.allocation
    assert allocation is not None
    assert (allocation.queue, allocation.workers, allocation.waited_seconds) == ("team", 2, 60)
    assert allocated(plan)[1] == "AdmittedByKueue"
    assert "all-gpus" in allocated(plan)[2]
    assert [event.reason for event in plan.events].count("Allocated") == 1
    again = decide(raw | {"status": write_status(plan.status)}, ready, now=NOW + 90)
    assert merge_patch(write_status(plan.status), write_status(again.status)) == {}
    assert "Allocated" not in [event.reason for event in again.events]


# --- what is not known ------------------------------------------------------------------------------------------------


def test_while_nothing_is_known_what_runs_goes_on_and_nothing_is_made() -> None:
    raw = kueue_job({"replicas": 3, "phase": "Running"}, replicas=5)
    granted = admit(raw, trouble="the Workloads have not been listed yet")
    assert (waits(granted), granted.still, granted.job.spec.desired) == ("", True, 3)
    fresh = admit(kueue_job(replicas=5), trouble="the Workloads have not been listed yet")
    assert waits(fresh) == "the Workloads have not been listed yet"
    assert (fresh.reason, fresh.job.spec.suspend) == ("KueueNotReady", True)
    plan = decide(raw, trouble="the Workloads have not been listed yet")
    assert plan.actions == ()
    assert plan.status.phase != "Suspending"


def test_a_flavor_that_cannot_be_read_any_more_stops_nothing() -> None:
    raw = kueue_job(replicas=2)
    workload = admitted(asked(raw))
    runs = raw | {"status": write_status(decide(raw, workload).status)}
    granted = admit(runs, workload, flavors={"gpus": None})
    assert (granted.still, waits(granted), granted.job.spec.desired) == (True, "", 2)


def test_a_specification_that_makes_no_sense_stops_nothing_but_an_eviction_does() -> None:
    raw = kueue_job({"replicas": 2, "phase": "Running"})
    held = admitted(asked(kueue_job()))
    job = read_job(raw)
    known = Kueue((read_workload(held),))
    granted = KueueAdmission(known, SETTINGS).admit(job, sound=False, now=NOW)
    assert (granted.still, waits(granted)) == (True, "")
    evicted = Kueue((read_workload(told(held, ("Evicted", "True", "Preempted"))),))
    assert KueueAdmission(evicted, SETTINGS).admit(job, sound=False, now=NOW).reason == "EvictedByKueue"


def test_a_job_without_the_label_is_not_kueues() -> None:
    job = read_job(body())
    assert not follows_kueue(job, Kueue())
    at_once = AT_ONCE.admit(job, sound=True, now=NOW)
    assert KueueAdmission(Kueue(), SETTINGS).admit(job, sound=True, now=NOW) == at_once


def test_a_job_is_in_one_queue() -> None:
    job = read_job(named(body(queue="shared")))
    assert job.faults == (
        "a job waits in one queue: remove spec.queue, or the label kueue.x-k8s.io/queue-name of Kueue.",
    )
    plan = decide(named(body(queue="shared")))
    condition = plan.status.condition("Progressing")
    assert condition is not None
    assert condition.reason == "InvalidSpec"


# --- several Workloads ------------------------------------------------------------------------------------------------


def test_of_two_with_quota_that_were_made_in_one_second_the_one_that_replaces_counts() -> None:
    raw = kueue_job(replicas=4, elastic=True)
    first = admitted(asked(raw))
    second = admitted(stored(created(decide(raw, first)), 1))
    for order in ((first, second), (second, first)):
        chain = chain_of([read_workload(w) for w in order], "uid-1")
        assert chain.holding is not None
        assert chain.holding.name == second["metadata"]["name"]


def test_those_of_a_namesake_and_those_that_are_deleted_do_not_count() -> None:
    raw = kueue_job()
    workload = admitted(asked(raw))
    gone = workload | {"metadata": workload["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert chain_of([read_workload(gone)], "uid-1").holding is None
    assert chain_of([read_workload(workload)], "another").holding is None
    assert waits(admit(raw, gone))

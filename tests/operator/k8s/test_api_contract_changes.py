"""The fake API server lists, selects and changes objects as a real one does."""

from __future__ import annotations

from typing import Any

import pytest
from contract import Cluster, job, names, on_both

from virtualflow_operator.k8s.client import JOBS, LEASES, PODS, SECRETS, Conflict, Invalid, Object

# Lists


@on_both
async def test_a_list_is_of_one_namespace_or_of_all(cluster: Cluster) -> None:
    for name in ("b", "a"):
        await cluster.job(name)
    assert names(await cluster.api.list(JOBS, cluster.namespace)) == ["a", "b"]
    everywhere = await cluster.api.list(JOBS)
    assert {"a", "b"} <= {item["metadata"]["name"] for item in everywhere}


SELECTORS = {
    "role=worker": ["w0", "w1"],
    "role==worker,ordinal=1": ["w1"],
    "role!=worker": ["bare", "c"],
    "role in (worker, coordinator)": ["c", "w0", "w1"],
    "role notin (worker)": ["bare", "c"],
    "role": ["c", "w0", "w1"],
    "!role": ["bare"],
    "role in (worker),ordinal notin (0)": ["w1"],
    "role=nobody": [],
}


@on_both
async def test_labels_select(cluster: Cluster) -> None:
    own = {"w0": {"role": "worker", "ordinal": "0"}, "w1": {"role": "worker", "ordinal": "1"}}
    for name, labels in {**own, "c": {"role": "coordinator"}, "bare": {}}.items():
        await cluster.job(name, metadata={"name": name, "labels": labels})
    found = {selector: names(await cluster.api.list(JOBS, cluster.namespace, selector)) for selector in SELECTORS}
    assert found == SELECTORS
    with pytest.raises(Invalid):
        await cluster.api.list(JOBS, cluster.namespace, "role=(")


@on_both
async def test_the_name_is_a_field_to_select_by(cluster: Cluster) -> None:
    for name in ("a", "b"):
        await cluster.job(name)
    _, answer = await cluster.send("GET", JOBS.path(cluster.namespace), fieldSelector="metadata.name=b")
    assert names(answer["items"]) == ["b"]


@on_both
async def test_pages_show_one_moment(cluster: Cluster) -> None:
    for name in "abcde":
        await cluster.job(name)
    path = JOBS.path(cluster.namespace)
    _, first = await cluster.send("GET", path, limit="2")
    assert (names(first["items"]), first["metadata"]["remainingItemCount"]) == (["a", "b"], 3)
    await cluster.job("cc")
    await cluster.api.delete(JOBS, cluster.namespace, "e")
    _, second = await cluster.send("GET", path, limit="2", **{"continue": first["metadata"]["continue"]})
    _, third = await cluster.send("GET", path, limit="2", **{"continue": second["metadata"]["continue"]})
    assert (names(second["items"]), names(third["items"])) == (["c", "d"], ["e"])
    assert {page["metadata"]["resourceVersion"] for page in (second, third)} == {first["metadata"]["resourceVersion"]}
    assert not third["metadata"].get("continue")
    assert names(await cluster.api.list(JOBS, cluster.namespace, page=2)) == ["a", "b", "c", "cc", "d"]


@on_both
async def test_a_made_up_continue_token_is_a_bad_request(cluster: Cluster) -> None:
    code, answer = await cluster.send("GET", SECRETS.path(cluster.namespace), limit="1", **{"continue": "x"})
    assert (code, answer["reason"]) == (400, "BadRequest")


@on_both
async def test_a_list_names_the_kind_once(cluster: Cluster) -> None:
    await cluster.pod("a")
    _, pods = await cluster.send("GET", PODS.path(cluster.namespace))
    assert (pods["kind"], pods["apiVersion"]) == ("PodList", "v1")
    assert not pods["items"][0].keys() & {"kind", "apiVersion"}
    await cluster.job()
    _, jobs = await cluster.send("GET", JOBS.path(cluster.namespace))
    assert (jobs["kind"], jobs["apiVersion"]) == ("VirtualFlowJobList", JOBS.api_version)
    assert jobs["items"][0]["kind"] == "VirtualFlowJob"


# Changes


@on_both
async def test_a_merge_patch_merges_objects_and_replaces_lists(cluster: Cluster) -> None:
    metadata = {"name": "digits", "labels": {"a": "1", "b": "2"}, "finalizers": ["example.com/a", "example.com/b"]}
    await cluster.job(metadata=metadata)
    patch = {"metadata": {"labels": {"a": None, "c": "3"}, "finalizers": ["example.com/b"]}}
    changed = await cluster.api.patch(JOBS, cluster.namespace, "digits", patch)
    assert changed["metadata"]["labels"] == {"b": "2", "c": "3"}
    assert changed["metadata"]["finalizers"] == ["example.com/b"]
    await cluster.api.patch(JOBS, cluster.namespace, "digits", {"metadata": {"finalizers": None}})


@on_both
async def test_a_patch_that_changes_nothing_makes_no_version(cluster: Cluster) -> None:
    created = await cluster.secret("a", labels={"a": "1"})
    same = await cluster.api.patch(SECRETS, cluster.namespace, "a", {"metadata": {"labels": {"a": "1"}}})
    assert same["metadata"]["resourceVersion"] == created["metadata"]["resourceVersion"]


@on_both
async def test_a_patch_of_an_older_version_conflicts(cluster: Cluster) -> None:
    created = await cluster.job()
    old = {"resourceVersion": created["metadata"]["resourceVersion"]}
    await cluster.api.patch(JOBS, cluster.namespace, "digits", {"metadata": {**old, "labels": {"a": "1"}}})
    words = r'Operation cannot be fulfilled on virtualflowjobs\.virtualflow\.dev "digits": the object has been modified'
    with pytest.raises(Conflict, match=words):
        await cluster.api.patch(JOBS, cluster.namespace, "digits", {"metadata": {**old, "labels": {"a": "2"}}})
    body = {"metadata": old, "status": {"phase": "Running"}}
    with pytest.raises(Conflict):
        await cluster.api.patch(JOBS, cluster.namespace, "digits", body, "status")


def lease(**metadata: Any) -> Object:
    spec = {"holderIdentity": "a", "leaseDurationSeconds": 10}
    name = {"name": "operator", **metadata}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": name, "spec": spec}


@on_both
async def test_of_two_who_replace_a_lease_one_wins(cluster: Cluster) -> None:
    first = await cluster.api.create(LEASES, cluster.namespace, lease())
    mine = first | {"spec": first["spec"] | {"holderIdentity": "b"}}
    second = await cluster.api.replace(LEASES, cluster.namespace, "operator", mine)
    assert second["spec"]["holderIdentity"] == "b"
    assert second["metadata"]["uid"] == first["metadata"]["uid"]
    theirs = first | {"spec": first["spec"] | {"holderIdentity": "c"}}
    with pytest.raises(Conflict, match="the object has been modified"):
        await cluster.api.replace(LEASES, cluster.namespace, "operator", theirs)
    with pytest.raises(Invalid, match="must be specified for an update"):
        await cluster.api.replace(LEASES, cluster.namespace, "operator", lease())
    with pytest.raises(Invalid, match="does not match the name on the URL"):
        await cluster.api.replace(LEASES, cluster.namespace, "other", second)


@on_both
async def test_a_job_is_pruned_and_filled_with_defaults(cluster: Cluster) -> None:
    wanted = job()["spec"] | {"elasticity": {}, "unknown": 1}
    wanted["workerGroups"][0]["template"]["spec"]["unknown"] = {"kept": [1]}
    created = await cluster.job(spec=wanted, unknown=2)
    spec = created["spec"]
    assert (spec["virtualNodes"], spec["replicas"], spec["minReplicas"]) == (8, 2, 1)
    assert spec["elasticity"]["drainGraceSeconds"] == 30
    assert spec["workerGroups"][0]["template"]["spec"]["unknown"] == {"kept": [1]}
    assert "unknown" not in spec
    assert "unknown" not in created


@on_both
async def test_spec_and_status_are_written_apart(cluster: Cluster) -> None:
    created = await cluster.job(status={"phase": "Running"})
    assert created["status"] == {"observedGeneration": 0}, "its default"
    assert created["metadata"]["generation"] == 1
    body = {"spec": {"replicas": 3}, "status": {"phase": "Pending"}, "metadata": {"labels": {"a": "b"}}}
    told = await cluster.api.patch(JOBS, cluster.namespace, "digits", body, "status")
    assert (told["status"], told["spec"]["replicas"]) == ({"observedGeneration": 0, "phase": "Pending"}, 2)
    assert told["metadata"]["generation"] == 1
    wanted = await cluster.api.patch(JOBS, cluster.namespace, "digits", body | {"status": {"phase": "Failed"}})
    assert (wanted["status"], wanted["spec"]["replicas"]) == ({"observedGeneration": 0, "phase": "Pending"}, 3)
    assert wanted["metadata"]["generation"] == 2
    labelled = await cluster.api.patch(JOBS, cluster.namespace, "digits", {"metadata": {"labels": {"a": "c"}}})
    assert labelled["metadata"]["generation"] == 2
    cleared = await cluster.api.patch(JOBS, cluster.namespace, "digits", {"status": None}, "status")
    assert cleared["status"] == {"observedGeneration": 0}


@on_both
async def test_a_status_that_breaks_the_schema_is_invalid(cluster: Cluster) -> None:
    await cluster.job()
    with pytest.raises(Invalid, match=r"status.step"):
        await cluster.api.patch(JOBS, cluster.namespace, "digits", {"status": {"step": "many"}}, "status")


@on_both
async def test_scaling_changes_what_is_wanted(cluster: Cluster) -> None:
    await cluster.job()
    status = {"replicas": 1, "selector": "role=worker"}
    await cluster.api.patch(JOBS, cluster.namespace, "digits", {"status": status}, "status")
    path = JOBS.path(cluster.namespace, "digits", "scale")
    _, scale = await cluster.send("GET", path)
    assert (scale["kind"], scale["apiVersion"]) == ("Scale", "autoscaling/v1")
    assert (scale["spec"], scale["status"]) == ({"replicas": 2}, {"replicas": 1, "selector": "role=worker"})
    _, scale = await cluster.send("PATCH", path, {"spec": {"replicas": 4}}, "application/merge-patch+json")
    assert scale["spec"] == {"replicas": 4}
    changed = await cluster.api.get(JOBS, cluster.namespace, "digits")
    assert (changed["spec"]["replicas"], changed["metadata"]["generation"]) == (4, 2)
    code, scale = await cluster.send("PUT", path, scale | {"spec": {"replicas": 5}})
    assert (code, scale["spec"]) == (200, {"replicas": 5})
    code, _ = await cluster.send("PATCH", path, {"spec": {"replicas": 100_000}}, "application/merge-patch+json")
    assert code == 422

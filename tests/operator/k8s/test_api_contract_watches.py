"""The fake API server deletes objects, tells of changes and says what it offers as a real one does."""

from __future__ import annotations

import pytest
from contract import NAMESPACES, Cluster, begin, eventually, job, on_both, owner, pod

from virtualflow_operator.k8s.client import JOBS, PODS, SECRETS, Conflict, NotFound, Object
from virtualflow_operator.k8s.following import NOT_OURS, TAKING

# Deletion


@on_both
async def test_a_precondition_protects_a_namesake(cluster: Cluster) -> None:
    former = (await cluster.secret("a"))["metadata"]["uid"]
    await cluster.api.delete(SECRETS, cluster.namespace, "a", uid=former)
    own = (await cluster.secret("a"))["metadata"]["uid"]
    with pytest.raises(Conflict) as error:
        await cluster.api.delete(SECRETS, cluster.namespace, "a", uid=former)
    assert error.value.message.startswith('Operation cannot be fulfilled on Secret "a": the UID in the precondition')
    await cluster.api.delete(SECRETS, cluster.namespace, "a", uid=own)
    with pytest.raises(NotFound):
        await cluster.api.delete(SECRETS, cluster.namespace, "a", uid=own)


@on_both
async def test_a_pod_with_a_node_gets_its_grace(cluster: Cluster) -> None:
    await cluster.pod("a", node="no-such-node")
    await cluster.api.delete(PODS, cluster.namespace, "a", grace_seconds=40)
    going = (await cluster.api.get(PODS, cluster.namespace, "a"))["metadata"]
    assert going["deletionGracePeriodSeconds"] == 40
    await cluster.api.delete(PODS, cluster.namespace, "a", grace_seconds=50)
    await cluster.api.delete(PODS, cluster.namespace, "a")
    assert (await cluster.api.get(PODS, cluster.namespace, "a"))["metadata"] == going
    await cluster.api.delete(PODS, cluster.namespace, "a", grace_seconds=20)
    sooner = (await cluster.api.get(PODS, cluster.namespace, "a"))["metadata"]
    assert sooner["deletionGracePeriodSeconds"] == 20
    assert sooner["deletionTimestamp"] < going["deletionTimestamp"]
    await cluster.api.delete(PODS, cluster.namespace, "a", grace_seconds=0)
    with pytest.raises(NotFound):
        await cluster.api.get(PODS, cluster.namespace, "a")


@on_both
async def test_a_pod_without_a_node_or_with_an_end_goes_at_once(cluster: Cluster) -> None:
    await cluster.pod("a")
    await cluster.pod("b", node="no-such-node")
    await cluster.api.patch(PODS, cluster.namespace, "b", {"status": {"phase": "Failed"}}, "status")
    for name in ("a", "b"):
        await cluster.api.delete(PODS, cluster.namespace, name, grace_seconds=30)
        with pytest.raises(NotFound):
            await cluster.api.get(PODS, cluster.namespace, name)


@on_both
async def test_a_finalizer_puts_the_end_off(cluster: Cluster) -> None:
    await cluster.job(metadata={"name": "digits", "finalizers": ["example.com/a"]})
    await cluster.api.delete(JOBS, cluster.namespace, "digits")
    going = await cluster.api.get(JOBS, cluster.namespace, "digits")
    assert going["metadata"]["deletionTimestamp"]
    assert going["metadata"]["generation"] == 2
    await cluster.api.patch(JOBS, cluster.namespace, "digits", {"metadata": {"finalizers": None}})
    with pytest.raises(NotFound):
        await cluster.api.get(JOBS, cluster.namespace, "digits")


@on_both
async def test_children_go_with_their_owner(cluster: Cluster) -> None:
    created = await cluster.job()
    await cluster.secret("child", ownerReferences=[owner(created)])
    child = pod("worker")
    child["metadata"]["ownerReferences"] = [owner(created)]
    await cluster.api.create(PODS, cluster.namespace, child)
    await cluster.secret("stranger")
    await cluster.api.delete(JOBS, cluster.namespace, "digits")
    await cluster.gone(SECRETS, "child")
    await cluster.gone(PODS, "worker")
    await cluster.secret("late", ownerReferences=[owner(created)])
    await cluster.gone(SECRETS, "late")
    assert await cluster.api.get(SECRETS, cluster.namespace, "stranger")


@pytest.mark.slow
@on_both
async def test_a_namespace_takes_its_objects_along(cluster: Cluster) -> None:
    name = f"{cluster.namespace}-inner"
    await cluster.api.create(NAMESPACES, None, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    await cluster.api.create(JOBS, name, job())
    await cluster.api.delete(NAMESPACES, None, name)

    async def is_empty() -> bool:
        return not await cluster.api.list(JOBS, name)

    await eventually(is_empty)


# Watches


def seen(events: list[Object]) -> list[tuple[str, str]]:
    return [(event["type"], event["object"]["metadata"]["name"]) for event in events]


@on_both
async def test_a_watch_tells_all_changes_in_their_order(cluster: Cluster) -> None:
    since = await cluster.version(JOBS)
    await cluster.job("a")
    await cluster.job("b")
    await cluster.api.patch(JOBS, cluster.namespace, "a", {"spec": {"replicas": 1}})
    await cluster.api.patch(JOBS, cluster.namespace, "a", {"status": {"phase": "Running"}}, "status")
    await cluster.api.delete(JOBS, cluster.namespace, "a")
    events = await cluster.events(5, JOBS, resourceVersion=since)
    wanted = [("ADDED", "a"), ("ADDED", "b"), ("MODIFIED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]
    assert seen(events) == wanted
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(set(versions))
    assert events[4]["object"]["status"]["phase"] == "Running"
    assert events[0]["object"]["kind"] == "VirtualFlowJob"
    resumed = await cluster.events(2, JOBS, resourceVersion=str(versions[2]))
    assert resumed == events[3:]


@on_both
async def test_a_watch_without_a_version_begins_with_what_is_there(cluster: Cluster) -> None:
    for name in ("a", "b"):
        await cluster.job(name)
    assert sorted(seen(await cluster.events(2, JOBS))) == [("ADDED", "a"), ("ADDED", "b")]


@on_both
async def test_who_watches_by_label_sees_objects_come_and_go(cluster: Cluster) -> None:
    since = await cluster.version(PODS)
    await cluster.pod("a")
    for role in ("worker", "worker", "nobody"):
        labels = {"metadata": {"labels": {"role": role, "again": "yes" if role == "worker" else "no"}}}
        await cluster.api.patch(PODS, cluster.namespace, "a", labels)
    await cluster.api.patch(PODS, cluster.namespace, "a", {"metadata": {"labels": {"role": "worker"}}})
    await cluster.api.patch(PODS, cluster.namespace, "a", {"metadata": {"labels": {"again": "more"}}})
    await cluster.api.delete(PODS, cluster.namespace, "a")
    query = {"resourceVersion": since, "labelSelector": "role=worker"}
    events = await cluster.events(6, PODS, **query)
    assert [event["type"] for event in events] == ["ADDED", "DELETED", "ADDED", "MODIFIED", "MODIFIED", "DELETED"]
    left = events[1]["object"]["metadata"]
    assert left["labels"]["role"] == "worker"
    assert int(left["resourceVersion"]) > int(events[0]["object"]["metadata"]["resourceVersion"])


@on_both
async def test_the_client_follows_pods_that_take_something_of_a_node(cluster: Cluster) -> None:
    await cluster.pod("there", node="no-such-node")
    await cluster.pod("homeless")
    (_, first), watch = await begin(lambda: cluster.api.watch(PODS, cluster.namespace, NOT_OURS, TAKING, 30))
    assert first["metadata"]["name"] == "there"
    await cluster.pod("later", node="no-such-node")
    kind, body = await anext(watch)
    assert (kind, body["metadata"]["name"]) == ("ADDED", "later")
    await cluster.api.patch(PODS, cluster.namespace, "there", {"status": {"phase": "Succeeded"}}, "status")
    assert (await anext(watch))[0] == "DELETED", "what has ended is out of the selection"
    await watch.aclose()
    listed = await cluster.api.list(PODS, cluster.namespace, NOT_OURS, field_selector=TAKING)
    assert [item["metadata"]["name"] for item in listed] == ["later"]


@on_both
async def test_a_graceful_deletion_is_a_change_before_it_is_the_end(cluster: Cluster) -> None:
    await cluster.pod("a", node="no-such-node")
    since = await cluster.version(PODS)
    await cluster.api.delete(PODS, cluster.namespace, "a", grace_seconds=30)
    await cluster.api.delete(PODS, cluster.namespace, "a", grace_seconds=0)
    events = await cluster.events(3, PODS, resourceVersion=since)
    assert seen(events) == [("MODIFIED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]
    assert [event["object"]["metadata"]["deletionGracePeriodSeconds"] for event in events] == [30, 0, 0]


@on_both
async def test_a_watch_ends_in_time(cluster: Cluster) -> None:
    await cluster.job("a")
    query = {"resourceVersion": await cluster.version(JOBS), "timeoutSeconds": "1"}
    assert [event async for event in cluster.watch(JOBS, **query)] == []


@on_both
async def test_a_watch_from_a_forgotten_version_is_told_so(cluster: Cluster) -> None:
    await cluster.job("a")
    events = await cluster.events(1, JOBS, resourceVersion="1")
    assert events[0]["type"] == "ERROR"
    error = events[0]["object"]
    assert (error["kind"], error["code"], error["reason"], error["status"]) == ("Status", 410, "Expired", "Failure")


@on_both
async def test_discovery_describes_the_job(cluster: Cluster) -> None:
    _, groups = await cluster.send("GET", "/apis")
    group = next(group for group in groups["groups"] if group["name"] == "virtualflow.dev")
    own = {"groupVersion": "virtualflow.dev/v1alpha1", "version": "v1alpha1"}
    assert (group["versions"], group["preferredVersion"]) == ([own], own)
    _, listed = await cluster.send("GET", "/apis/virtualflow.dev/v1alpha1")
    entries = {entry["name"]: entry for entry in listed["resources"] if "queue" not in entry["name"]}
    assert entries.keys() == {"virtualflowjobs", "virtualflowjobs/status", "virtualflowjobs/scale"}
    main = entries["virtualflowjobs"]
    assert (main["kind"], main["singularName"], main["namespaced"]) == ("VirtualFlowJob", "virtualflowjob", True)
    assert (main["shortNames"], sorted(main["categories"])) == (["vfj"], ["all", "virtualflow"])
    assert {"get", "list", "watch", "create", "update", "patch", "delete"} <= set(main["verbs"])
    assert entries["virtualflowjobs/scale"]["kind"] == "Scale"
    _, versions = await cluster.send("GET", "/api")
    assert "v1" in versions["versions"]

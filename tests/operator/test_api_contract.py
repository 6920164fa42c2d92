"""The fake API server behaves as a real one: the same tests run against both.

The real one is that of KUBECONFIG; the account must be allowed to create namespaces and CustomResourceDefinitions.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import pytest
import yaml
from fake_api import FakeApi, Fault

from virtualflow_operator.kube import (
    JOBS,
    LEASES,
    NETWORK_POLICIES,
    NODES,
    PODS,
    SECRETS,
    SERVICES,
    AlreadyExists,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    KubeApi,
    NotFound,
    Object,
    Resource,
    Unavailable,
)

DEFINITION = yaml.safe_load((Path(__file__).parents[2] / "crds" / "virtualflowjobs.yaml").read_text())
DEFINITIONS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)
NAMESPACES = Resource("", "v1", "namespaces", namespaced=False)
HOW = "set KUBECONFIG to a cluster where you may create namespaces and definitions (kind create cluster makes one)"
LIMIT = 60.0
"""Seconds for one test."""


class Cluster:
    """One API server, real or fake, and a namespace in it that is this test's own."""

    def __init__(self, api: KubeApi, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self.client = api._client

    async def send(
        self, method: str, path: str, body: Object | None = None, kind: str = "application/json", **query: str
    ) -> tuple[int, Object]:
        """Return the status code and the JSON body of the answer."""
        response = await self._call(method, path, body, kind, query)
        return response.status, json.loads(await response.read())

    async def watch(self, resource: Resource, **query: str) -> AsyncIterator[Object]:
        """Yield the events of a watch of this test's namespace."""
        query = {"watch": "true", "timeoutSeconds": "20", **query}
        response = await self._call("GET", resource.path(self.namespace), None, "application/json", query)
        assert response.status == 200
        try:
            async for line in response.response.content:
                yield json.loads(line)
        finally:
            response.response.close()

    async def events(self, count: int, resource: Resource, **query: str) -> list[Object]:
        """Return the next events of a watch."""
        found: list[Object] = []
        async with aclosing(self.watch(resource, **query)) as stream:
            async for event in stream:
                found.append(event)
                if len(found) == count:
                    break
        return found

    async def version(self, resource: Resource) -> str:
        """Return the version that a list is of."""
        _, answer = await self.send("GET", resource.path(self.namespace))
        return str(answer["metadata"]["resourceVersion"])

    async def secret(self, name: str, **metadata: Any) -> Object:
        return await self.api.create(SECRETS, self.namespace, secret(name, **metadata))

    async def job(self, name: str = "digits", **fields: Any) -> Object:
        return await self.api.create(JOBS, self.namespace, job(name, **fields))

    async def pod(self, name: str = "digits-0", node: str | None = None) -> Object:
        return await self.api.create(PODS, self.namespace, pod(name, node))

    async def gone(self, resource: Resource, name: str) -> None:
        """Wait until an object is gone."""

        async def is_gone() -> bool:
            try:
                await self.api.get(resource, self.namespace, name)
            except NotFound:
                return True
            return False

        await eventually(is_gone)

    async def _call(self, method: str, path: str, body: Object | None, kind: str, query: dict[str, str]) -> Any:
        request = await self.client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": kind},
            body=body,
            auth_settings=["BearerToken"],
        )
        return await self.client.call_api(*request, _request_timeout=aiohttp.ClientTimeout(total=LIMIT))


def secret(name: str, **metadata: Any) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, **metadata}, "stringData": {"token": "a"}}


def pod(name: str, node: str | None = None) -> Object:
    spec: Object = {"containers": [{"name": "worker", "image": "example.com/none"}], "restartPolicy": "Never"}
    spec["schedulerName"] = "none"  # so that nobody else writes the pod
    if node:
        spec["nodeName"] = node
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def job(name: str = "digits", **fields: Any) -> Object:
    container = {"name": "worker", "image": "example.com/none", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    groups = [{"name": "workers", "template": {"spec": {"containers": [container]}}}]
    body: Object = {"apiVersion": JOBS.api_version, "kind": "VirtualFlowJob", "metadata": {"name": name}}
    # Left to another controller: an operator in the cluster must not touch it.
    return body | {"spec": {"workerGroups": groups, "managedBy": "example.com/contract"}} | fields


def owner(item: Object) -> Object:
    own = {"apiVersion": item["apiVersion"], "kind": item["kind"], "controller": True}
    return own | {key: item["metadata"][key] for key in ("name", "uid")}


def names(items: list[Object]) -> list[str]:
    return [item["metadata"]["name"] for item in items]


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask until it is so; a real cluster has no other way to tell."""
    while not await condition():  # noqa: ASYNC110 it is no event of this process
        await asyncio.sleep(0.05)


@functools.cache
def unreachable() -> str:
    """Return why there is no real API server; empty when there is one."""
    if not os.environ.get("KUBECONFIG"):
        return f"no cluster: {HOW}"

    async def ask() -> str:
        async with await KubeApi.connect(request_timeout=3) as api:
            try:
                await api.list(NAMESPACES)
            except ApiError as error:
                return f"the cluster of KUBECONFIG does not answer ({error}): {HOW}"
        return ""

    return asyncio.run(ask())


@asynccontextmanager
async def cluster_of(where: str) -> AsyncIterator[Cluster]:
    """Give a namespace on the fake or the real API server, and take it away again."""
    async with AsyncExitStack() as stack:
        if where == "fake":
            server = await stack.enter_async_context(FakeApi(token="secret"))
            api = await stack.enter_async_context(KubeApi.at(server.url, token="secret"))
        else:
            api = await stack.enter_async_context(await KubeApi.connect())
        with suppress(AlreadyExists):
            await api.create(DEFINITIONS, None, DEFINITION)

        async def is_established() -> bool:
            definition = await api.get(DEFINITIONS, None, DEFINITION["metadata"]["name"])
            conditions = definition.get("status", {}).get("conditions") or []
            return any((c["type"], c["status"]) == ("Established", "True") for c in conditions) and await api.offers(
                JOBS
            )

        await eventually(is_established)
        namespace = f"contract-{uuid.uuid4().hex[:8]}"
        await api.create(NAMESPACES, None, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        try:

            async def admits_pods() -> bool:
                try:
                    await api.create(PODS, namespace, pod("first"), dry_run=True)
                except ApiError:  # no pod is admitted before the namespace's service account is there
                    return False
                return True

            await eventually(admits_pods)
            yield Cluster(api, namespace)
        finally:
            await api.delete(NAMESPACES, None, namespace)


def on_both(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test with a cluster on the fake API server and one on the real one."""

    async def within(where: str, others: dict[str, Any]) -> None:
        async with asyncio.timeout(LIMIT), cluster_of(where) as cluster:
            await test(cluster, **others)

    @functools.wraps(test)
    def run(where: str, **others: Any) -> None:
        if where == "real" and (reason := unreachable()):
            pytest.skip(reason)
        asyncio.run(within(where, others))

    asked = [parameter for name, parameter in inspect.signature(test).parameters.items() if name != "cluster"]
    where = inspect.Parameter("where", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([where, *asked])  # type: ignore[attr-defined]
    return pytest.mark.parametrize("where", ["fake", "real"])(run)


# Objects


@on_both
async def test_a_created_object_is_stored_with_identity_version_and_time(cluster: Cluster) -> None:
    created = await cluster.secret("a")
    metadata = created["metadata"]
    assert metadata["namespace"] == cluster.namespace
    assert uuid.UUID(metadata["uid"])
    assert int(metadata["resourceVersion"]) > 0
    assert metadata["creationTimestamp"].endswith("Z")
    assert created["data"] == {"token": "YQ=="}
    assert await cluster.api.get(SECRETS, cluster.namespace, "a") == created


@on_both
async def test_a_generated_name_begins_as_wanted(cluster: Cluster) -> None:
    body = secret("x")
    body["metadata"] = {"generateName": "token-"}
    name = (await cluster.api.create(SECRETS, cluster.namespace, body))["metadata"]["name"]
    assert name.startswith("token-")
    assert len(name) == len("token-") + 5


@on_both
async def test_a_second_object_of_the_same_name_already_exists(cluster: Cluster) -> None:
    await cluster.secret("a")
    with pytest.raises(AlreadyExists, match='secrets "a" already exists'):
        await cluster.secret("a")
    await cluster.job()
    with pytest.raises(AlreadyExists, match=r'virtualflowjobs\.virtualflow\.dev "digits" already exists'):
        await cluster.job()


@on_both
async def test_what_is_not_there_is_not_found(cluster: Cluster) -> None:
    with pytest.raises(NotFound, match='pods "none" not found'):
        await cluster.api.get(PODS, cluster.namespace, "none")
    with pytest.raises(NotFound, match=r'virtualflowjobs\.virtualflow\.dev "none" not found'):
        await cluster.api.patch(JOBS, cluster.namespace, "none", {"status": {}}, "status")
    with pytest.raises(NotFound, match='pods "none" not found'):
        await cluster.api.delete(PODS, cluster.namespace, "none")
    with pytest.raises(NotFound, match='namespaces "no-such-namespace" not found'):
        await cluster.api.create(SECRETS, "no-such-namespace", secret("a"))
    with pytest.raises(NotFound):
        await cluster.api.list(Resource("virtualflow.dev", "v1alpha1", "nothings", namespaced=True))
    with pytest.raises(NotFound):
        await cluster.api.list(Resource("nothing.example.com", "v1", "nothings", namespaced=True))


@on_both
async def test_a_refusal_is_a_status_object(cluster: Cluster) -> None:
    code, answer = await cluster.send("GET", SECRETS.path(cluster.namespace, "none"))
    assert code == 404
    assert answer == {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": 'secrets "none" not found',
        "reason": "NotFound",
        "details": {"name": "none", "kind": "secrets"},
        "code": 404,
    }
    _, answer = await cluster.send("GET", JOBS.path(cluster.namespace, "none"))
    assert answer["details"] == {"name": "none", "kind": "virtualflowjobs", "group": "virtualflow.dev"}


INVALID: dict[str, tuple[Resource, Object, str]] = {
    "a pod without containers": (PODS, pod("a") | {"spec": {}}, r"spec.containers: Required value"),
    "a container without a name": (
        PODS,
        pod("a") | {"spec": {"containers": [{"image": "a"}]}},
        r"\[0\].name: Required",
    ),
    "an upper-case name": (SECRETS, secret("A"), r"metadata.name: Invalid value"),
    "a label of 64 characters": (SECRETS, secret("a", labels={"a": "b" * 64}), r"metadata.labels: Invalid value"),
    "an owner without a uid": (
        SECRETS,
        secret("a", ownerReferences=[{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": ""}]),
        r"ownerReferences",
    ),
    "a job with words for numbers": (JOBS, job(spec=job()["spec"] | {"virtualNodes": "eight"}), r"spec.virtualNodes"),
    "a job with too many virtual nodes": (
        JOBS,
        job(spec=job()["spec"] | {"virtualNodes": 2**31}),
        r"spec.virtualNodes",
    ),
    "a job with an unknown guarantee": (JOBS, job(spec=job()["spec"] | {"reproducibility": "No"}), r"reproducibility"),
    "a job of another kind": (JOBS, job(kind="Job"), r"kind: Invalid value"),
    "a job without groups": (JOBS, job(spec={}), r"spec.workerGroups: Required value"),
    "a job with two groups of one name": (
        JOBS,
        job(spec={"workerGroups": job()["spec"]["workerGroups"] * 2}),
        r"spec.workerGroups\[1\]: Duplicate value",
    ),
}


@pytest.mark.parametrize("case", INVALID)
@on_both
async def test_what_can_never_be_accepted_is_invalid(cluster: Cluster, case: str) -> None:
    resource, body, words = INVALID[case]
    with pytest.raises(Invalid, match=words) as error:
        await cluster.api.create(resource, cluster.namespace, body)
    assert (error.value.code, error.value.reason) == (422, "Invalid")
    with pytest.raises(NotFound):
        await cluster.api.get(resource, cluster.namespace, body["metadata"]["name"])


MALFORMED: dict[str, Object] = {
    "another version": job(apiVersion="virtualflow.dev/v1"),
    "another namespace": job(metadata={"name": "digits", "namespace": "default"}),
    "no kind": {key: value for key, value in job().items() if key != "kind"},
}


@pytest.mark.parametrize("case", MALFORMED)
@on_both
async def test_what_does_not_belong_to_its_path_is_a_bad_request(cluster: Cluster, case: str) -> None:
    with pytest.raises(Invalid) as error:
        await cluster.api.create(JOBS, cluster.namespace, MALFORMED[case])
    assert (error.value.code, error.value.reason) == (400, "BadRequest")


@on_both
async def test_a_dry_run_checks_and_stores_nothing(cluster: Cluster) -> None:
    outcome = await cluster.api.create(PODS, cluster.namespace, pod("a"), dry_run=True)
    assert outcome["spec"]["terminationGracePeriodSeconds"] == 30
    assert outcome["status"]["phase"] == "Pending"
    assert await cluster.api.list(PODS, cluster.namespace) == []
    with pytest.raises(Invalid, match=r"spec.containers: Required value"):
        await cluster.api.create(PODS, cluster.namespace, pod("a") | {"spec": {}}, dry_run=True)
    await cluster.pod("a")
    with pytest.raises(AlreadyExists):
        await cluster.api.create(PODS, cluster.namespace, pod("a"), dry_run=True)


@on_both
async def test_a_wrong_token_opens_nothing(cluster: Cluster) -> None:
    host = cluster.client.configuration.host
    async with KubeApi.at(host, token="wrong", verify=False) as stranger:
        with pytest.raises(Forbidden) as error:
            await stranger.list(PODS, cluster.namespace)
    assert (error.value.code, error.value.reason, error.value.message) == (401, "Unauthorized", "Unauthorized")


@on_both
async def test_a_service_gets_an_address_for_good(cluster: Cluster) -> None:
    spec = {"ports": [{"port": 7700}], "selector": {"a": "b"}}
    body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": spec}
    created = await cluster.api.create(SERVICES, cluster.namespace, body)
    assert created["spec"]["clusterIP"].count(".") == 3
    assert created["spec"]["ports"] == [{"port": 7700, "protocol": "TCP", "targetPort": 7700}]
    changed = await cluster.api.patch(SERVICES, cluster.namespace, "a", {"spec": {"selector": {"a": "c"}}})
    assert changed["spec"]["clusterIP"] == created["spec"]["clusterIP"]
    with pytest.raises(Invalid, match="may not change once set"):
        await cluster.api.patch(SERVICES, cluster.namespace, "a", {"spec": {"clusterIP": "10.9.8.7"}})


@on_both
async def test_a_pod_stays_what_it_was_created_as(cluster: Cluster) -> None:
    await cluster.pod("a")
    with pytest.raises(Invalid, match="spec: Forbidden"):
        await cluster.api.patch(PODS, cluster.namespace, "a", {"spec": {"restartPolicy": "Always"}})
    changed = await cluster.api.patch(PODS, cluster.namespace, "a", {"metadata": {"labels": {"b": "c"}}})
    assert changed["metadata"]["labels"] == {"b": "c"}


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
    assert "status" not in created
    assert created["metadata"]["generation"] == 1
    body = {"spec": {"replicas": 3}, "status": {"phase": "Pending"}, "metadata": {"labels": {"a": "b"}}}
    told = await cluster.api.patch(JOBS, cluster.namespace, "digits", body, "status")
    assert (told["status"], told["spec"]["replicas"]) == ({"phase": "Pending"}, 2)
    assert told["metadata"]["generation"] == 1
    wanted = await cluster.api.patch(JOBS, cluster.namespace, "digits", body | {"status": {"phase": "Failed"}})
    assert (wanted["status"], wanted["spec"]["replicas"]) == ({"phase": "Pending"}, 3)
    assert wanted["metadata"]["generation"] == 2
    labelled = await cluster.api.patch(JOBS, cluster.namespace, "digits", {"metadata": {"labels": {"a": "c"}}})
    assert labelled["metadata"]["generation"] == 2
    cleared = await cluster.api.patch(JOBS, cluster.namespace, "digits", {"status": None}, "status")
    assert not cleared.get("status")


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
    assert events[4]["object"]["status"] == {"phase": "Running"}
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
async def test_a_graceful_deletion_is_a_change_before_it_is_the_end(cluster: Cluster) -> None:
    await cluster.pod("a", node="no-such-node")
    since = await cluster.version(PODS)
    await cluster.api.delete(PODS, cluster.namespace, "a", grace_seconds=30)
    await cluster.api.delete(PODS, cluster.namespace, "a", grace_seconds=0)
    events = await cluster.events(3, PODS, resourceVersion=since)
    assert seen(events) == [("MODIFIED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]
    assert [event["object"]["metadata"]["deletionGracePeriodSeconds"] for event in events] == [30, 0, 0]


@on_both
async def test_a_watch_ends_in_time_and_says_before_how_far_it_has_come(cluster: Cluster) -> None:
    await cluster.job("a")
    since = await cluster.version(JOBS)

    async def watched(seconds: int) -> list[Object]:
        query = {"resourceVersion": since, "timeoutSeconds": str(seconds), "allowWatchBookmarks": "true"}
        return [event async for event in cluster.watch(JOBS, **query)]

    # The real one forgets a bookmark now and then, and promises none.
    streams = await asyncio.gather(*(watched(seconds) for seconds in (4, 5, 6)))
    events = [event for stream in streams for event in stream]
    assert {event["type"] for event in events} == {"BOOKMARK"}
    mark = events[-1]["object"]
    assert (mark["kind"], mark["apiVersion"]) == ("VirtualFlowJob", JOBS.api_version)
    assert int(mark["metadata"]["resourceVersion"]) >= int(since)


@on_both
async def test_a_watch_from_a_forgotten_version_is_told_so(cluster: Cluster) -> None:
    await cluster.job("a")
    events = await cluster.events(1, JOBS, resourceVersion="1")
    assert events[0]["type"] == "ERROR"
    error = events[0]["object"]
    assert (error["kind"], error["code"], error["reason"], error["status"]) == ("Status", 410, "Expired", "Failure")


# Discovery


@on_both
async def test_discovery_tells_what_is_offered(cluster: Cluster) -> None:
    for resource in (JOBS, PODS, SERVICES, SECRETS, NODES, LEASES, NETWORK_POLICIES):
        assert await cluster.api.offers(resource)
    assert not await cluster.api.offers(Resource("virtualflow.dev", "v1alpha1", "nothings", namespaced=True))
    assert not await cluster.api.offers(Resource("virtualflow.dev", "v9", "virtualflowjobs", namespaced=True))
    assert not await cluster.api.offers(Resource("nothing.example.com", "v1", "nothings", namespaced=True))


@on_both
async def test_discovery_describes_the_job(cluster: Cluster) -> None:
    _, groups = await cluster.send("GET", "/apis")
    group = next(group for group in groups["groups"] if group["name"] == "virtualflow.dev")
    own = {"groupVersion": "virtualflow.dev/v1alpha1", "version": "v1alpha1"}
    assert (group["versions"], group["preferredVersion"]) == ([own], own)
    _, listed = await cluster.send("GET", "/apis/virtualflow.dev/v1alpha1")
    entries = {entry["name"]: entry for entry in listed["resources"]}
    assert entries.keys() == {"virtualflowjobs", "virtualflowjobs/status", "virtualflowjobs/scale"}
    main = entries["virtualflowjobs"]
    assert (main["kind"], main["singularName"], main["namespaced"]) == ("VirtualFlowJob", "virtualflowjob", True)
    assert (main["shortNames"], sorted(main["categories"])) == (["vfj"], ["all", "virtualflow"])
    assert {"get", "list", "watch", "create", "update", "patch", "delete"} <= set(main["verbs"])
    assert entries["virtualflowjobs/scale"]["kind"] == "Scale"
    _, versions = await cluster.send("GET", "/api")
    assert "v1" in versions["versions"]


# Faults, which only the fake one has


def test_kopf_follows_through_every_interruption() -> None:
    """A dropped watch, a forgotten version and an outage: whoever lists and watches as kopf does misses no job."""
    registry, own = kopf.OperatorRegistry(), kopf.OperatorSettings()
    own.posting.enabled = False
    own.watching.reconnect_backoff = 0.01
    own.networking.error_backoffs = [0.05] * 100
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def scenario(server: FakeApi, ready: asyncio.Event) -> None:
        async def arrives(name: str) -> None:
            while await seen.get() != name:
                pass

        async with asyncio.timeout(LIMIT):
            await ready.wait()
            await server.wait_for(lambda: server.watches(JOBS))
            server.add(job("plain"))
            await arrives("plain")
            assert server.drop_watches(JOBS) == 1
            server.add(job("dropped"))
            await arrives("dropped")
            await server.wait_for(lambda: server.watches(JOBS))
            server.add(job("before"))
            server.expire()
            server.add(job("expired"))
            await arrives("expired")
            assert server.count("watch", "virtualflowjobs", 410) == 1
            await server.stop()
            server.add(job("outage"))
            await server.start()
            await arrives("outage")

    async def run() -> None:
        async with FakeApi(DEFINITION, token="secret") as server:

            @kopf.on.login(registry=registry)
            def log_in(**_: Any) -> kopf.ConnectionInfo:
                return kopf.ConnectionInfo(server=server.url, token="secret")

            @kopf.on.event(JOBS.group, JOBS.version, JOBS.plural, registry=registry)
            def note(name: str, **_: Any) -> None:
                seen.put_nowait(name)

            ready, stop = asyncio.Event(), asyncio.Event()
            operating = kopf.operator(
                registry=registry, settings=own, ready_flag=ready, stop_flag=stop, clusterwide=True, standalone=True
            )
            task = asyncio.create_task(operating)
            try:
                await scenario(server, ready)
                assert server.count("patch") == 0
            finally:
                stop.set()
                await task

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "hit"),
    [
        (Fault(code=500), [0]),
        (Fault(code=500, times=2), [0, 1]),
        (Fault(code=500, times=None, verb="list"), [2]),
        (Fault(code=500, times=None, method="GET"), [1, 2]),
        (Fault(code=500, times=None, resource="secrets"), [0, 1, 2]),
        (Fault(code=500, times=None, resource="pods"), []),
        (Fault(code=500, times=None, name="b"), [1]),
        (Fault(code=500, times=None, name="[ab]"), [0, 1]),
        (Fault(code=500, times=None, namespace="kube-system"), []),
        (Fault(code=500, times=None, seconds=-1), []),
        (Fault(cut=True, times=None, verb="create"), [0]),
    ],
)
def test_a_fault_hits_what_it_is_meant_for(fault: Fault, hit: list[int]) -> None:
    async def run() -> None:
        async with FakeApi() as server, KubeApi.at(server.url) as api:
            server.inject(fault)
            calls = [
                api.create(SECRETS, "default", secret("a")),
                api.get(SECRETS, "default", "b"),
                api.list(SECRETS, "default"),
            ]
            outcomes = [await asyncio.gather(call, return_exceptions=True) for call in calls]
            assert [number for number, (outcome,) in enumerate(outcomes) if isinstance(outcome, Unavailable)] == hit

    asyncio.run(run())


def test_a_test_moves_pods_and_nodes() -> None:
    async def run() -> None:
        async with FakeApi() as server, KubeApi.at(server.url) as api:
            server.add_node("node-1", cpu="4")
            server.add(pod("a"))
            server.set_pod("default", "a", node="node-1", ready=True, phase="Running", podIP="10.1.2.3")
            running = await api.get(PODS, "default", "a")
            assert running["spec"]["nodeName"] == "node-1"
            assert running["status"]["podIP"] == "10.1.2.3"
            assert running["status"]["conditions"] == [{"type": "Ready", "status": "True"}]
            server.remove(PODS, "default", "a")
            assert (await api.get(PODS, "default", "a"))["metadata"]["deletionGracePeriodSeconds"] == 30
            server.finish_deletion("default", "a")
            assert await api.list(PODS) == []
            server.set_node("node-1", ready="Unknown", unschedulable=True)
            (node,) = await api.list(NODES)
            assert node["status"]["allocatable"]["cpu"] == "4"
            assert node["spec"] == {"unschedulable": True}
            assert node["status"]["conditions"] == [{"type": "Ready", "status": "Unknown"}]

    asyncio.run(run())

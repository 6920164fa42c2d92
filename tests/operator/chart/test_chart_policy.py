"""What the operator's account may not do although its roles allow it, asked of a real API server as that account."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from contract import NAMESPACES, Cluster, eventually, on_the_real
from rendering import DEFAULTS, NAMESPACE, only, render, with_helm
from scenes import SETTINGS

from virtualflow_operator.api.objects import Job, Pod, read_job
from virtualflow_operator.constants import WORKER
from virtualflow_operator.jobs import manifests
from virtualflow_operator.k8s.client import NETWORK_POLICIES, PDBS, PODS, SECRETS, SERVICES, Object, Resource

PATHS = {
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
}
TOKEN = {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
HOST = {"name": "host", "hostPath": {"path": "/"}}
OWNED, LABELLED = "touches only what a VirtualFlowJob owns", "touches only what bears its label"
ITS_NODE = "share no namespaces of their node"

Change = Callable[[Object], Any]


def first(pod: Object) -> Object:
    container: Object = pod["spec"]["containers"][0]
    return container


REFUSED: dict[str, tuple[str, Change, str]] = {
    "a pod of nobody": ("pod", lambda it: it["metadata"].pop("ownerReferences"), OWNED),
    "a pod of a Deployment": ("pod", lambda it: it["metadata"]["ownerReferences"][0].update(kind="ReplicaSet"), OWNED),
    "a pod that no controller owns": (
        "pod",
        lambda it: it["metadata"]["ownerReferences"][0].pop("controller"),
        OWNED,
    ),
    "a pod of another name": ("pod", lambda it: it["metadata"].update(name="database-0"), OWNED),
    "a pod of another job by its label": (
        "pod",
        lambda it: it["metadata"]["labels"].update({"virtualflow.dev/job": "other"}),
        OWNED,
    ),
    "a pod without the label": (
        "pod",
        lambda it: it["metadata"]["labels"].pop("app.kubernetes.io/managed-by"),
        LABELLED,
    ),
    "the network of the node": ("pod", lambda it: it["spec"].update(hostNetwork=True), ITS_NODE),
    "the processes of the node": ("pod", lambda it: it["spec"].update(hostPID=True), ITS_NODE),
    "the shared memory of the node": ("pod", lambda it: it["spec"].update(hostIPC=True), ITS_NODE),
    "a directory of the node": ("pod", lambda it: it["spec"].update(volumes=[HOST]), "mount no directory"),
    "a privileged container": (
        "pod",
        lambda it: first(it).update(securityContext={"privileged": True}),
        "run no privileged container",
    ),
    "a privileged init container": (
        "pod",
        lambda it: it["spec"].update(
            initContainers=[{"name": "i", "image": "i", "securityContext": {"privileged": True}}]
        ),
        "run no privileged container",
    ),
    "the token of another account": (
        "pod",
        lambda it: it["spec"].update(serviceAccountName="admin", volumes=[TOKEN]),
        "No token of this service account",
    ),
    "a Secret of an account": (
        "secret",
        lambda it: (
            it.update(type="kubernetes.io/service-account-token", stringData={}),
            it["metadata"]["annotations"].update({"kubernetes.io/service-account.name": "admin"}),
        ),
        "no Secret that holds the token",
    ),
    "an identity of a pod that is no job's": (
        "identity",
        lambda it: (
            it["metadata"].update(name="database-0-identity-00000000"),
            it["metadata"]["ownerReferences"][0].update(name="database-0"),
        ),
        OWNED,
    ),
    "an identity of another pod than its owner": (
        "identity",
        lambda it: it["metadata"].update(name="digits-workers-1-identity-00000000"),
        OWNED,
    ),
    "an identity that a ReplicaSet owns": (
        "identity",
        lambda it: it["metadata"]["ownerReferences"][0].update(kind="ReplicaSet", apiVersion="apps/v1"),
        OWNED,
    ),
    "a Secret of another name": ("secret", lambda it: it["metadata"].update(name="tls"), OWNED),
    "a Service to the outside": ("service", lambda it: it["spec"].update(type="NodePort"), "lead from inside"),
    "a Service at a foreign address": (
        "service",
        lambda it: it["spec"].update(externalIPs=["192.0.2.1"]),
        "lead from inside",
    ),
    "a Service to others' pods": (
        "service",
        lambda it: it["spec"].update(selector={"app": "database"}),
        "lead from inside",
    ),
    "a budget of nobody": ("budget", lambda it: it["metadata"].pop("ownerReferences"), OWNED),
    "a network policy of nobody": ("network policy", lambda it: it["metadata"].pop("ownerReferences"), OWNED),
}


async def install(cluster: Cluster, values: Object) -> None:
    """Let the chart's roles and policies hold for the operator's account, which the following requests are made as."""
    for found in render(values):
        if (path := PATHS.get(found["kind"])) is not None:
            status, answer = await cluster.send("POST", path, found)
            if status == 409:
                _, before = await cluster.send("GET", f"{path}/{found['metadata']['name']}")
                found["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
                status, answer = await cluster.send("PUT", f"{path}/{found['metadata']['name']}", found)
            assert status < 300, answer
    account = only(render(values), "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
    cluster.client.default_headers["Impersonate-User"] = f"system:serviceaccount:{NAMESPACE}:{account}"


async def remove(cluster: Cluster) -> None:
    cluster.client.default_headers.pop("Impersonate-User", None)
    for found in render(DEFAULTS):
        if (path := PATHS.get(found["kind"])) is not None:
            await cluster.send("DELETE", f"{path}/{found['metadata']['name']}")


async def made(cluster: Cluster) -> dict[str, tuple[Resource, Object]]:
    """What the operator makes for a job of this cluster."""
    body = await cluster.job(spec={"workerGroups": [_group()]})
    job = read_job(body)
    return {
        "coordinator": (PODS, manifests.coordinator_pod(job, 0, SETTINGS)),
        "pod": (PODS, manifests.worker_pod(job, job.spec.worker_groups[0], 0, "10.0.0.1", SETTINGS)),
        "service": (SERVICES, manifests.service(job, 0)),
        "secret": (SECRETS, manifests.secret(job, "0" * 64, SETTINGS)),
        "identity": (SECRETS, manifests.identity_secret(job, _worker(job), {"identity.pem": b"key"})),
        "budget": (PDBS, manifests.disruption_budget(job)),
        "network policy": (NETWORK_POLICIES, manifests.network_policy(job, SETTINGS)),
    }


def _worker(job: Job) -> Pod:
    name = f"{job.name}-workers-0"
    return Pod(name, "its-uid", job.uid, WORKER, identity=f"{name}-identity-00000000")


def _group() -> Object:
    return {"name": "workers", "template": {"spec": {"containers": [{"name": "worker", "image": "none"}]}}}


async def attempt(cluster: Cluster, resource: Resource, body: Object) -> tuple[int, str]:
    status, answer = await cluster.send("POST", resource.path(cluster.namespace), body, dryRun="All")
    return status, answer.get("message", "")


@pytest.mark.slow
@with_helm
@on_the_real
async def test_the_policy_lets_the_operator_do_its_work_and_nothing_beside_it(cluster: Cluster) -> None:
    objects = await made(cluster)
    await install(cluster, DEFAULTS)
    try:

        async def holds() -> bool:
            """The API server has learnt of the roles and of both policies."""
            tried = [copy.deepcopy(objects["pod"][1]) for _ in range(3)]
            tried[1]["metadata"].pop("ownerReferences")
            tried[2]["spec"]["hostNetwork"] = True
            return [(await attempt(cluster, PODS, pod))[0] for pod in tried] == [201, 422, 422]

        await eventually(holds)
        for resource, body in objects.values():
            assert await attempt(cluster, resource, body) == (201, "")
        outcomes = {}
        for what, (kind, change, _) in REFUSED.items():
            resource, body = objects[kind]
            change(changed := copy.deepcopy(body))
            outcomes[what] = await attempt(cluster, resource, changed)
        for what, (_, _, sentence) in REFUSED.items():
            status, message = outcomes[what]
            assert status == 422, (what, message)
            assert sentence in message, what
        without_token = copy.deepcopy(objects["pod"][1])
        without_token["spec"]["serviceAccountName"] = "admin"
        assert await attempt(cluster, PODS, without_token) == (201, ""), "its name alone opens nothing"
        elsewhere = copy.deepcopy(objects["pod"][1]) | {}
        elsewhere["metadata"]["namespace"] = "kube-system"
        status, answer = await cluster.send("POST", PODS.path("kube-system"), elsewhere, dryRun="All")
        assert (status, "Kubernetes' own namespaces" in answer["message"]) == (422, True)
    finally:
        await remove(cluster)


@pytest.mark.slow
@with_helm
@on_the_real
async def test_what_others_have_made_is_not_the_operators_to_change_or_delete(cluster: Cluster) -> None:
    objects = await made(cluster)
    service = copy.deepcopy(objects["service"][1])
    service["metadata"] |= {"name": "database", "ownerReferences": []}
    await cluster.api.create(SERVICES, cluster.namespace, service)
    await cluster.api.create(SERVICES, cluster.namespace, objects["service"][1])
    await cluster.pod("database-0")
    pod = await cluster.api.create(PODS, cluster.namespace, objects["pod"][1])
    objects["identity"][1]["metadata"]["ownerReferences"][0]["uid"] = pod["metadata"]["uid"]
    patch = {"spec": {"selector": objects["service"][1]["spec"]["selector"]}}
    secrets = {kind: copy.deepcopy(objects[kind][1]) for kind in ("secret", "identity")}
    secrets["others"] = {"metadata": {"name": "database"}, "stringData": {"password": "secret"}}
    for secret in secrets.values():
        await cluster.api.create(SECRETS, cluster.namespace, secret)
    await install(cluster, DEFAULTS)
    try:

        async def send(method: str, path: str, body: Object | None = None) -> int:
            return (await cluster.send(method, path, body, "application/merge-patch+json", dryRun="All"))[0]

        async def is_refused() -> bool:
            return await send("DELETE", PODS.path(cluster.namespace, "database-0")) == 422

        await eventually(is_refused)
        assert await send("PATCH", SERVICES.path(cluster.namespace, "database"), patch) == 422
        own, worker = objects["service"][1]["metadata"]["name"], objects["pod"][1]["metadata"]["name"]
        assert await send("PATCH", SERVICES.path(cluster.namespace, own), patch) == 200
        assert await send("DELETE", PODS.path(cluster.namespace, worker)) == 200
        changed = {}
        for kind, secret in secrets.items():
            name = secret["metadata"]["name"]
            path = SECRETS.path(cluster.namespace, name)
            body = copy.deepcopy(secrets["identity"] if kind == "others" else secret)
            body["metadata"]["name"] = name
            changed[kind] = (await cluster.send("PUT", path, body, dryRun="All"))[0]
            assert (await cluster.send("GET", path))[0] == 403, "it reads none"
        assert changed == {"secret": 422, "identity": 200, "others": 422}
    finally:
        await remove(cluster)


@with_helm
@on_the_real
async def test_a_namespace_that_allows_privileged_pods_has_them(cluster: Cluster) -> None:
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "privileged"}}}
    await cluster.api.patch(NAMESPACES, None, cluster.namespace, label)
    _, pod = (await made(cluster))["pod"]
    pod["spec"] |= {"hostNetwork": True, "hostIPC": True, "volumes": [HOST]}
    first(pod)["securityContext"] = {"privileged": True}
    await install(cluster, DEFAULTS)
    try:

        async def is_allowed() -> bool:
            pod["metadata"]["name"] = "digits-workers-0"
            good = await attempt(cluster, PODS, pod)
            pod["metadata"]["name"] = "database"
            return good == (201, "") and (await attempt(cluster, PODS, pod))[0] == 422

        await eventually(is_allowed)
    finally:
        await remove(cluster)


@with_helm
@pytest.mark.parametrize("enabled", [True, False])
def test_the_policy_is_a_value_of_the_chart(enabled: bool) -> None:
    kinds = [found["kind"] for found in render({"policy": {"enabled": enabled}})]
    assert kinds.count("ValidatingAdmissionPolicy") == kinds.count("ValidatingAdmissionPolicyBinding") == 2 * enabled

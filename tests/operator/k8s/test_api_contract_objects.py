"""The fake API server takes, refuses and keeps objects as a real one does."""

from __future__ import annotations

import uuid

import pytest
from api_clients import client_of
from contract import Cluster, job, on_both, pod, secret

from kstatus import kstatus
from virtualflow_operator.k8s.client import (
    JOBS,
    PODS,
    SECRETS,
    SERVICES,
    AlreadyExists,
    Forbidden,
    Invalid,
    NotFound,
    Object,
    Resource,
)


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
async def test_a_dry_run_refuses_fields_that_a_pod_has_not(cluster: Cluster) -> None:
    wrong = pod("a")
    wrong["spec"] |= {"nodeSelectr": {"gpu": "yes"}}
    wrong["spec"]["containers"][0] |= {"resourcess": {"limits": {"nvidia.com/gpu": 1}}}
    wrong["metadata"] |= {"lables": {"a": "b"}}
    with pytest.raises(Invalid) as error:
        await cluster.api.create(PODS, cluster.namespace, wrong, dry_run=True)
    assert 'Pod in version "v1" cannot be handled as a Pod: strict decoding error: ' in error.value.message
    for field in ("spec.nodeSelectr", "spec.containers[0].resourcess", "metadata.lables"):
        assert f'unknown field "{field}"' in error.value.message
    await cluster.api.create(PODS, cluster.namespace, wrong)


@on_both
async def test_a_wrong_token_opens_nothing(cluster: Cluster) -> None:
    host = cluster.client.configuration.host
    async with client_of(host, token="wrong", verify=False) as stranger:
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


@on_both
async def test_a_job_that_nobody_has_seen_is_not_current_by_its_default_status(cluster: Cluster) -> None:
    created = await cluster.job()
    assert created["status"] == {"observedGeneration": 0}
    assert kstatus(await cluster.api.get(JOBS, cluster.namespace, "digits")) == "InProgress"
    whole = {"observedGeneration": 1, "phase": "Pending"}
    seen = await cluster.api.patch(JOBS, cluster.namespace, "digits", {"status": whole}, "status")
    assert seen["status"] == whole

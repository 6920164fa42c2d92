"""A real API server takes the rules of the schema, and refuses what breaks them with their sentences."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
from contract import DEFINITION, DEFINITIONS, Cluster, eventually, job, on_the_real
from resource_rules import QUEUE_CRD_FILE, crd

from virtualflow_operator.api.job import read_spec
from virtualflow_operator.api.validation import OPERATOR_VARIABLES, find_problems
from virtualflow_operator.k8s.client import JOBS, QUEUES, AlreadyExists, Invalid, NotFound, Object

FIXED = "optimizerPlacement cannot be changed, because the result depends on it; create a new job"


def groups(**fields: Any) -> list[Object]:
    (group,) = job()["spec"]["workerGroups"]
    return [group | fields]


@on_the_real
async def test_the_place_of_the_optimizer_is_fixed(cluster: Cluster) -> None:
    async def place(name: str, value: str | None) -> Object:
        return await cluster.api.patch(JOBS, cluster.namespace, name, {"spec": {"optimizerPlacement": value}})

    await cluster.job("without")
    await cluster.job("host", spec=job()["spec"] | {"optimizerPlacement": "Host"})
    for name, value in (("host", "Device"), ("host", None), ("without", "Device")):
        with pytest.raises(Invalid, match=FIXED):
            await place(name, value)
    assert (await place("host", "Host"))["spec"]["optimizerPlacement"] == "Host"


@on_the_real
async def test_how_far_backward_passes_go_is_fixed(cluster: Cluster) -> None:
    async def say(name: str, value: Object | None) -> Object:
        return await cluster.api.patch(JOBS, cluster.namespace, name, {"spec": {"backward": value}})

    await cluster.job("without")
    await cluster.job("halves", spec=job()["spec"] | {"backward": {"fractions": [1, 0.5]}})
    for name, value in (("halves", {"fractions": [1, 0.25]}), ("halves", None), ("without", {"fractions": [1, 0.5]})):
        with pytest.raises(Invalid, match="backward cannot be changed, because the result depends on it"):
            await say(name, value)
    told = await say("halves", {"fractions": [1.0, 0.5], "rotate": True})
    assert told["spec"]["backward"] == {"fractions": [1, 0.5], "rotate": True, "scale": "Mean"}
    with pytest.raises(Invalid, match="A fraction must be 1, or the first blocks are never trained"):
        await cluster.job("short", spec=job()["spec"] | {"backward": {"fractions": [0.5]}})


@on_the_real
async def test_memory_may_change(cluster: Cluster) -> None:
    await cluster.job()
    for memory in ({"device": "24Gi"}, {"device": "1.5G", "host": "96Gi", "activations": "Swap"}):
        changed = {"spec": {"workerGroups": groups(memory=memory)}}
        told = await cluster.api.patch(JOBS, cluster.namespace, "digits", changed)
        assert told["spec"]["workerGroups"][0]["memory"] == memory, "nothing is filled in: the script may say it"


@on_the_real
async def test_memory_of_no_size_is_invalid(cluster: Cluster) -> None:
    for memory, where in (
        ({"device": "24GB"}, r"memory\.device"),
        ({"device": "0Gi"}, r"memory\.device"),
        ({"host": "96Gi"}, r"memory\.device: Required"),
        ({"device": "24Gi", "activations": "swap"}, r"memory\.activations: Unsupported"),
    ):
        with pytest.raises(Invalid, match=where):
            await cluster.job(spec=job()["spec"] | {"workerGroups": groups(memory=memory)})


@on_the_real
async def test_the_operators_variables_are_refused(cluster: Cluster) -> None:
    (group,) = groups()
    (container,) = group["template"]["spec"]["containers"]
    for name in OPERATOR_VARIABLES:
        spec = {"containers": [container | {"env": [{"name": name, "value": "1"}]}]}
        with pytest.raises(Invalid, match="The operator sets this environment variable"):
            await cluster.job(spec=job()["spec"] | {"workerGroups": groups(template={"spec": spec})})


@on_the_real
async def test_a_stored_job_whose_coordinators_template_was_allowed_once_goes_on_and_is_told_the_field(
    cluster: Cluster,
) -> None:
    def template(**fields: Any) -> Object:
        return {"spec": {"coordinator": {"template": {"spec": {"containers": [fields]}}}}}

    async def define(rules: bool) -> None:
        """Let jobs be read by a definition with or without the rules for a coordinator's template."""
        former = copy.deepcopy(DEFINITION)
        schema = former["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        if not rules:
            del schema["properties"]["spec"]["properties"]["coordinator"]["properties"]["template"]["properties"]
        found = await cluster.api.get(DEFINITIONS, None, former["metadata"]["name"])
        await cluster.api.replace(DEFINITIONS, None, former["metadata"]["name"], found | {"spec": former["spec"]})
        probe = job("probe", spec=job()["spec"] | template(env=[])["spec"])

        async def is_applied() -> bool:
            try:
                await cluster.api.create(JOBS, cluster.namespace, probe, dry_run=True)
            except Invalid:
                return rules
            return not rules

        await eventually(is_applied)

    fields = {"env": [{"name": "PYTHONWARNINGS", "value": "all"}], "resources": {"limits": {"memory": "1Gi"}}}
    await define(rules=False)
    try:
        await cluster.job(spec=job()["spec"] | template(**fields)["spec"])
    finally:
        await define(rules=True)
    kept = await cluster.api.patch(
        JOBS, cluster.namespace, "digits", {"status": {"phase": "Running"}}, subresource="status"
    )
    assert kept["spec"]["coordinator"] == template(**fields)["spec"]["coordinator"], "nothing of it is lost"
    (problem,) = find_problems(read_spec(kept["spec"]))
    assert problem.startswith("coordinator.template.spec.containers[0].env: A coordinator's template sets only")
    scaled = await cluster.api.patch(JOBS, cluster.namespace, "digits", {"spec": {"replicas": 1}})
    assert scaled["spec"]["replicas"] == 1
    with pytest.raises(Invalid, match=r"containers\[0\]\.env"):
        await cluster.api.patch(JOBS, cluster.namespace, "digits", template(env=[]))
    mended = await cluster.api.patch(
        JOBS, cluster.namespace, "digits", template(resources={"limits": {"memory": "2Gi"}})
    )
    assert find_problems(read_spec(mended["spec"])) == []


@on_the_real
async def test_kinds_of_device_are_told_apart_and_their_rules_kept(cluster: Cluster) -> None:
    with suppress(AlreadyExists):
        await cluster.api.create(DEFINITIONS, None, crd(QUEUE_CRD_FILE))

    async def make(**spec: Any) -> Object:
        metadata = {"name": f"{cluster.namespace}-queue"}
        body = {"apiVersion": QUEUES.api_version, "kind": "VirtualFlowQueue", "metadata": metadata, "spec": spec}
        return await cluster.api.create(QUEUES, None, body, dry_run=True)

    async def is_served() -> bool:
        try:
            await make(resource="nvidia.com/gpu")
        except NotFound:
            return False
        return True

    await eventually(is_served)
    fast, slow = ({"name": name, "nodeSelector": {"matchLabels": {"device": name}}} for name in ("fast", "slow"))
    for spec, sentence in (
        ({"kinds": [fast], "capacity": 4}, "A queue with kinds gives out what its nodes have"),
        ({"kinds": [fast], "limits": [{"namespace": "a", "capacity": 1}]}, "A limit is of one of the kinds"),
        ({"kinds": [fast | {"price": 2}, slow]}, "Prices are compared; give every kind one, or none"),
        ({"kinds": [fast], "thrift": 1}, "thrift weighs the prices of kinds"),
        ({"kinds": [fast, fast]}, "Duplicate value"),
        ({"kinds": [fast | {"rating": 0}]}, "Ratings and prices are above 0"),
    ):
        with pytest.raises(Invalid, match=sentence):
            await make(resource="nvidia.com/gpu", **spec)
    limits = [{"namespace": "a", "capacity": 1, "kind": name} for name in ("fast", "slow")]
    made = await make(resource="nvidia.com/gpu", kinds=[fast | {"rating": 2.5}, slow], limits=limits)
    assert [kind["rating"] for kind in made["spec"]["kinds"]] == [2.5, 1]


@on_the_real
async def test_a_bitwise_job_goes_to_no_other_kind_of_device(cluster: Cluster) -> None:
    elasticity = {"acrossKinds": "Move"}
    with pytest.raises(Invalid, match="Other kinds of device compute other bits than a Bitwise job promises"):
        await cluster.job("bits", spec=job()["spec"] | {"elasticity": elasticity})
    made = await cluster.job("loose", spec=job()["spec"] | {"elasticity": elasticity, "reproducibility": "Statistical"})
    assert made["spec"]["elasticity"]["acrossKinds"] == "Move"

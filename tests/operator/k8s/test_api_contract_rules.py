"""A real API server takes the rules of the schema, and refuses what breaks them with their sentences."""

from __future__ import annotations

from typing import Any

import pytest
from contract import Cluster, job, on_the_real

from virtualflow_operator.api.validation import OPERATOR_VARIABLES
from virtualflow_operator.k8s.client import Object
from virtualflow_operator.k8s.errors import Invalid
from virtualflow_operator.k8s.resources import JOBS

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

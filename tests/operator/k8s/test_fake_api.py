"""What only the fake API server has: faults, and tests that play scheduler and kubelet."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf
import pytest
from api_clients import client_of
from contract import DEFINITION, LIMIT, job, pod, secret
from fake_api import FakeApi, Fault

from virtualflow_operator.k8s.client import JOBS, NODES, PODS, SECRETS, Unavailable


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
        async with FakeApi() as server, client_of(server.url) as api:
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
        async with FakeApi() as server, client_of(server.url) as api:
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

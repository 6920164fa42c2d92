"""What holds the fake API server equal to a real one: the same test runs against both.

The real one is that of KUBECONFIG, where the account must be allowed to create namespaces and
CustomResourceDefinitions, or else one of the tests' own, where its programs are at hand.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import json
import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import pytest
from api_clients import client_of
from fake_api import FakeApi
from resource_rules import CRD_FILE, read_yaml

import kube_apiserver
from virtualflow_operator.k8s.client import (
    JOBS,
    PODS,
    SECRETS,
    AlreadyExists,
    ApiError,
    KubeApi,
    NotFound,
    Object,
    Resource,
    TooManyRequests,
    Unavailable,
)
from virtualflow_operator.settings import ApiSettings

Change = tuple[str, Object]
DEFINITION = read_yaml(CRD_FILE)
DEFINITIONS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)
NAMESPACES = Resource("", "v1", "namespaces", namespaced=False)
HOW = (
    f"{kube_apiserver.HOW}, or set KUBECONFIG to a cluster where you may create namespaces and definitions "
    "(kind create cluster makes one)"
)
LIMIT = 180.0
"""Seconds for one test: on two busy processors the garbage collector takes forty to begin."""


class Cluster:
    """One API server, real or fake, and a namespace in it that is this test's own."""

    def __init__(self, api: KubeApi, namespace: str, own: bool = False) -> None:
        self.api = api
        self.namespace = namespace
        self.own = own
        """It is a real API server of the tests' own."""
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
            rest = b""
            async for chunk in response.response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield json.loads(line)
        finally:
            response.response.close()

    async def events(self, count: int, resource: Resource, **query: str) -> list[Object]:
        """Return the next events of a watch, as a client sees them; one that is refused begins anew."""
        found: list[Object] = []
        async with aclosing(self.watch(resource, **query)) as stream:
            async for event in stream:
                if event["type"] == "ERROR" and event["object"]["code"] == HTTPStatus.GATEWAY_TIMEOUT and not found:
                    return await self.events(count, resource, **query)
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


async def begin(watch: Callable[[], AsyncIterator[Change]]) -> tuple[Change, AsyncIterator[Change]]:
    """Return the first change that a client's watch yields, and the watch, which goes on.

    A busy API server may refuse to begin: it is filling its cache anew (429), or that has not come to the version yet
    (504, "Too large resource version").
    """
    while True:
        changes = watch()
        try:
            return await anext(changes), changes
        except TooManyRequests as error:
            await asyncio.sleep(error.retry_after or 1)
        except Unavailable as error:
            if error.code != HTTPStatus.GATEWAY_TIMEOUT:
                raise


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


async def connected(**options: Any) -> KubeApi:
    """Connect to the real one."""
    path = os.environ.get("KUBECONFIG") or _own_server()
    with mock.patch.dict(os.environ, KUBECONFIG=path):
        return await KubeApi.connect(ApiSettings(**options))


@functools.cache
def _own_server() -> str:
    """Start a server that ends with this process; the path of its kubeconfig."""
    stack = ExitStack()
    atexit.register(stack.close)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vf-api-", ignore_cleanup_errors=True))
    return str(stack.enter_context(kube_apiserver.api_server(Path(folder))))


@functools.cache
def unreachable() -> str:
    """Return why there is no real API server; empty when there is one."""
    if not os.environ.get("KUBECONFIG") and not kube_apiserver.at_hand():
        return HOW

    async def ask() -> str:
        async with await connected(request_timeout=30) as api:
            try:
                await api.list(NAMESPACES)
            except ApiError as error:
                return f"needs an API server that answers: this one says {error}"
        return ""

    return asyncio.run(ask())


async def define(api: KubeApi) -> None:
    """Let an API server know jobs."""
    with suppress(AlreadyExists):
        await api.create(DEFINITIONS, None, DEFINITION)

    async def is_established() -> bool:
        definition = await api.get(DEFINITIONS, None, DEFINITION["metadata"]["name"])
        conditions = definition.get("status", {}).get("conditions") or []
        if not any((c["type"], c["status"]) == ("Established", "True") for c in conditions):
            return False
        try:
            await api.list(JOBS)
        except NotFound:  # established, and not served yet
            return False
        return True

    await eventually(is_established)


@asynccontextmanager
async def cluster_of(where: str) -> AsyncIterator[Cluster]:
    """Give a namespace on the fake or the real API server, and take it away again."""
    async with AsyncExitStack() as stack:
        if where == "fake":
            server = await stack.enter_async_context(FakeApi(token="secret"))
            api = await stack.enter_async_context(client_of(server.url, token="secret"))
        else:
            api = await stack.enter_async_context(await connected())
        await define(api)
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
            yield Cluster(api, namespace, own=where == "real" and not os.environ.get("KUBECONFIG"))
        finally:
            await api.delete(NAMESPACES, None, namespace)


def on_both(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test with a cluster on the fake API server and one on the real one."""
    return _on(test, "fake", "real")


def on_the_real(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test of what the fake API server does not do with a cluster on the real one."""
    return _on(test, "real")


def _on(test: Callable[..., Awaitable[None]], *places: str) -> Callable[..., None]:

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
    return pytest.mark.parametrize("where", places)(run)

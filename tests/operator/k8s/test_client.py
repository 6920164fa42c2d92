"""The API client: what an answer means, what it sends, and what happens without an answer."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import types
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from api_clients import client_of
from fake_api import FakeApi, Fault
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.aio.config import ConfigException, incluster_config

from tiers import examples
from virtualflow_operator.k8s.client import (
    JOBS,
    LEASES,
    LIST_ATTEMPTS,
    NODES,
    PODS,
    SECRETS,
    AlreadyExists,
    ApiError,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubeApi,
    NotFound,
    Object,
    TooManyRequests,
    Unavailable,
)
from virtualflow_operator.settings import ApiSettings

Test = Callable[[FakeApi, KubeApi], Coroutine[Any, Any, None]]


def run(test: Test, *, request_timeout: float = 10.0) -> None:
    """Run a test with a fake API server and a client of it."""

    async def within() -> None:
        async with (
            asyncio.timeout(30),
            FakeApi(token="secret") as server,
            client_of(server.url, token="secret", settings=ApiSettings(request_timeout=request_timeout)) as api,
        ):
            await test(server, api)

    asyncio.run(within())


def secret(name: str) -> Object:
    return {"metadata": {"name": name}, "stringData": {"token": "a"}}


async def answered(status: int, body: bytes, headers: dict[str, str] | None = None) -> ApiError | None:
    """Return what the client makes of an answer to a GET; None: no error."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers=headers)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with client_of(f"http://127.0.0.1:{runner.addresses[0][1]}") as api:
            await api.get(PODS, "default", "a")
    except ApiError as error:
        return error
    finally:
        await runner.cleanup()
    return None


# What an answer means


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (400, "BadRequest", Invalid),
        (401, "Unauthorized", Forbidden),
        (403, "Forbidden", Forbidden),
        (404, "NotFound", NotFound),
        (405, "MethodNotAllowed", ApiError),
        (409, "AlreadyExists", AlreadyExists),
        (409, "Conflict", Conflict),
        (410, "Expired", Gone),
        (413, "RequestEntityTooLarge", Invalid),
        (422, "Invalid", Invalid),
        (429, "TooManyRequests", TooManyRequests),
        (500, "InternalError", Unavailable),
        (503, "ServiceUnavailable", Unavailable),
        (504, "Timeout", Unavailable),
    ],
)
def test_a_refusal_becomes_the_error_of_its_code(code: int, reason: str, kind: type[ApiError]) -> None:
    async def test(server: FakeApi, api: KubeApi) -> None:
        server.inject(Fault(code=code, reason=reason, message="This is why."))
        with pytest.raises(ApiError) as caught:
            await api.get(PODS, "default", "a")
        assert type(caught.value) is kind
        assert (caught.value.code, caught.value.reason, caught.value.message) == (code, reason, "This is why.")
        assert str(caught.value) == "This is why."
        assert len(server.requests) == 1

    run(test)


@pytest.mark.parametrize(
    ("headers", "details", "seconds"),
    [
        ({"Retry-After": "7"}, {"retryAfterSeconds": 9}, 7.0),
        ({}, {"retryAfterSeconds": 9}, 9.0),
        ({"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}, {}, None),
        ({}, None, None),
    ],
    ids=["header", "details", "date", "nothing"],
)
def test_an_overloaded_server_says_how_long_to_wait(
    headers: dict[str, str], details: object, seconds: float | None
) -> None:
    body = json.dumps({"kind": "Status", "message": "slow down", "details": details}).encode()
    error = asyncio.run(answered(429, body, headers))
    assert isinstance(error, TooManyRequests)
    assert (error.retry_after, error.message) == (seconds, "slow down")


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (502, b"<html>Bad gateway</html>", Unavailable, "<html>Bad gateway</html>"),
        (404, b"404 page not found\n", NotFound, "404 page not found"),
        (403, b"", Forbidden, "HTTP 403"),
        (500, b"\xff" * 9000, Unavailable, "\ufffd" * 2000),
        (422, b'["no", "status"]', Invalid, '["no", "status"]'),
        (200, b"<html>Log in</html>", Unavailable, "The API server's answer is no JSON."),
        (200, b"[]", Unavailable, "The API server's answer is no JSON object."),
        (200, b"", Unavailable, "The API server's answer is no JSON."),
        (304, b"", Unavailable, "HTTP 304"),
    ],
    ids=["gateway", "unknown path", "empty", "huge", "list", "login page", "array", "nothing", "redirect"],
)
def test_what_is_no_status_object_is_still_told(status: int, body: bytes, kind: type[ApiError], message: str) -> None:
    error = asyncio.run(answered(status, body))
    assert type(error) is kind
    assert (error.code, error.message) == (status, message)


# Without an answer


def test_a_slow_server_is_given_up_after_the_time_limit() -> None:
    async def test(server: FakeApi, api: KubeApi) -> None:
        fault = server.inject(Fault(gate=asyncio.Event()))
        with pytest.raises(Unavailable, match=r"did not answer within 0\.5 s") as caught:
            await api.create(SECRETS, "default", secret("a"))
        assert (caught.value.code, caught.value.reason, fault.hits) == (0, "Timeout", 1)
        server.heal()
        await api.create(SECRETS, "default", secret("b"))

    run(test, request_timeout=0.5)


def test_an_unreachable_server_is_unavailable_until_it_is_back() -> None:
    async def test(server: FakeApi, api: KubeApi) -> None:
        await api.create(SECRETS, "default", secret("a"))
        await server.stop()
        with pytest.raises(Unavailable, match="cannot be reached") as caught:
            await api.get(SECRETS, "default", "a")
        assert caught.value.code == 0
        await server.start()
        assert (await api.get(SECRETS, "default", "a"))["metadata"]["name"] == "a"

    run(test)


def test_a_creation_whose_answer_is_lost_may_have_been_carried_out() -> None:
    async def test(server: FakeApi, api: KubeApi) -> None:
        server.inject(Fault(verb="create", cut=True, after=True))
        with pytest.raises(Unavailable) as caught:
            await api.create(SECRETS, "default", secret("a"))
        assert caught.value.code == 0
        with pytest.raises(AlreadyExists):
            await api.create(SECRETS, "default", secret("a"))
        assert server.count("create") == 2

    run(test)


def test_a_storm_passes_request_by_request() -> None:
    async def test(server: FakeApi, api: KubeApi) -> None:
        server.inject(Fault(code=500, times=3, resource="secrets"))
        for _ in range(3):
            with pytest.raises(Unavailable):
                await api.list(SECRETS)
        assert await api.list(SECRETS) == []
        assert await api.list(PODS) == []
        assert server.count("list", "secrets", 500) == 3

    run(test)


# What it sends


def test_more_requests_than_connections_wait_for_one() -> None:
    async def test(server: FakeApi, api: KubeApi) -> None:
        gate = server.inject(Fault(times=None, resource="pods", gate=asyncio.Event()))
        waiting = [asyncio.create_task(api.list(PODS)) for _ in range(ApiSettings.connections + 5)]
        async with client_of(server.url, token="secret") as other:
            while gate.hits < ApiSettings.connections:
                await other.list(SECRETS)
            await other.list(SECRETS)
        assert gate.hits == ApiSettings.connections
        server.heal()
        await asyncio.gather(*waiting)
        assert server.count("list", "pods", 200) == ApiSettings.connections + 5

    run(test)


def test_a_list_comes_in_pages() -> None:
    async def test(server: FakeApi, api: KubeApi) -> None:
        for number in range(5):
            server.add({"apiVersion": "v1", "kind": "Secret"} | secret(f"s{number}"))
        found = await api.list(SECRETS, "default", page=2)
        assert [item["metadata"]["name"] for item in found] == [f"s{number}" for number in range(5)]
        assert server.count("list", "secrets", 200) == 3

    run(test)


@settings(max_examples=examples(10), deadline=None)
@given(count=st.integers(0, 12), page=st.integers(1, 13))
def test_pages_of_any_size_make_the_whole_list(count: int, page: int) -> None:
    async def test(server: FakeApi, api: KubeApi) -> None:
        wanted = sorted(f"s{number}" for number in range(count))
        for name in wanted:
            server.add({"apiVersion": "v1", "kind": "Secret"} | secret(name))
        found = await api.list(SECRETS, page=page)
        assert [item["metadata"]["name"] for item in found] == wanted
        assert len(server.requests) == max(1, -(-count // page))

    run(test)


def test_a_list_that_expires_on_the_way_begins_again() -> None:
    async def test(server: FakeApi, api: KubeApi) -> None:
        for name in ("a", "b", "c"):
            server.add({"apiVersion": "v1", "kind": "Secret"} | secret(name))
        gate = asyncio.Event()
        held = server.inject(Fault(verb="list", gate=gate))
        task = asyncio.create_task(api.list(SECRETS, "default", page=2))
        await server.wait_for(lambda: held.hits)
        server.inject(Fault(verb="list", code=410))  # for the second page
        gate.set()
        found = await task
        assert [item["metadata"]["name"] for item in found] == ["a", "b", "c"]
        assert server.count("list", code=410) == 1

    run(test)


def test_a_list_that_always_expires_is_given_up() -> None:
    async def test(server: FakeApi, api: KubeApi) -> None:
        server.inject(Fault(verb="list", code=410, times=None))
        with pytest.raises(Gone):
            await api.list(SECRETS, "default")
        assert server.count("list", code=410) == LIST_ATTEMPTS

    run(test)


def test_every_request_is_observed() -> None:
    seen: list[tuple[str, str, int]] = []

    def observe(method: str, resource: str, code: int, seconds: float) -> None:
        assert 0 <= seconds < 10
        seen.append((method, resource, code))

    async def test(server: FakeApi, api: KubeApi) -> None:
        api.observe = observe
        await api.create(SECRETS, "default", secret("a"))
        with pytest.raises(NotFound):
            await api.get(PODS, "default", "a")
        await api.list(NODES)
        server.inject(Fault(cut=True))
        with pytest.raises(Unavailable):
            await api.patch(SECRETS, "default", "a", {"metadata": {"labels": {"a": "b"}}})
        await api.delete(SECRETS, "default", "a")

    run(test)
    assert seen == [
        ("POST", "secrets", 201),
        ("GET", "pods", 404),
        ("GET", "nodes", 200),
        ("PATCH", "secrets", 0),
        ("DELETE", "secrets", 200),
    ]


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_no_name_leads_to_the_whole_collection(name: str) -> None:
    async def test(server: FakeApi, api: KubeApi) -> None:
        with pytest.raises(ValueError, match="cannot be the name"):
            await api.delete(SECRETS, "default", name)
        with pytest.raises(ValueError, match="cannot be the name"):
            await api.delete(SECRETS, name, "a")
        with pytest.raises(ValueError, match="needs a namespace"):
            await api.delete(SECRETS, None, "a")
        assert server.requests == []

    run(test)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name not in {".", ".."}))
def test_a_name_stays_one_part_of_the_path(name: str) -> None:
    path = LEASES.path("default", name, "status")
    assert path.startswith("/apis/coordination.k8s.io/v1/namespaces/default/leases/")
    assert path.endswith("/status")
    assert path.count("/") == 8
    assert not set(path) & set("?#& ")


def test_a_resource_knows_its_place() -> None:
    assert PODS.path() == "/api/v1/pods"
    assert PODS.path("a", "b") == "/api/v1/namespaces/a/pods/b"
    assert NODES.path("ignored", "b") == "/api/v1/nodes/b"
    assert JOBS.path("a") == "/apis/virtualflow.dev/v1alpha1/namespaces/a/virtualflowjobs"
    assert (PODS.api_version, JOBS.api_version) == ("v1", "virtualflow.dev/v1alpha1")


# Who it is


def kubeconfig(path: Path, url: str, token: str) -> None:
    context = {"name": "a", "context": {"cluster": "a", "user": "a"}}
    content = {
        "clusters": [{"name": "a", "cluster": {"server": url}}],
        "users": [{"name": "a", "user": {"token": token}}],
        "contexts": [context],
        "current-context": "a",
    }
    path.write_text(json.dumps(content))


def test_outside_of_a_cluster_it_is_who_kubeconfig_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(path))

    async def test(server: FakeApi, _: KubeApi) -> None:
        kubeconfig(path, server.url, "secret")
        async with await KubeApi.connect(ApiSettings()) as api:
            assert await api.list(PODS) == []
        kubeconfig(path, server.url, "wrong")
        async with await KubeApi.connect(ApiSettings()) as api:
            with pytest.raises(Forbidden):
                await api.list(PODS)

    run(test)


def test_without_any_configuration_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigException):
        asyncio.run(KubeApi.connect(ApiSettings()))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and a certificate of 127.0.0.1 that vouches for itself."""
    path = tmp_path_factory.mktemp("tls") / "ca.crt"
    wanted = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command = ["openssl", "req", "-x509", *key, *wanted, "-keyout", str(path), "-out", str(path.with_suffix(".pem"))]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    path.write_text(path.read_text() + path.with_suffix(".pem").read_text())
    return path


def test_in_a_cluster_a_renewed_token_is_read_again(
    tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime(2030, 1, 1)  # noqa: DTZ001 as the client has it
    clock = types.SimpleNamespace(datetime=types.SimpleNamespace(now=lambda: now), timedelta=timedelta)
    monkeypatch.setattr(incluster_config, "datetime", clock)
    token = tmp_path / "token"
    token.write_text("first")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(certificate))
    encryption = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    encryption.load_cert_chain(certificate)

    async def test() -> None:
        nonlocal now
        async with asyncio.timeout(30), FakeApi(token="first", encryption=encryption) as server:
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
            async with await KubeApi.connect(ApiSettings()) as api:
                assert await api.list(PODS) == []
                token.write_text("second")
                server.token = "second"
                now += timedelta(minutes=2)
                assert await api.list(PODS) == []
                token.unlink()
                now += timedelta(minutes=2)
                with pytest.raises(Unavailable, match="token"):
                    await api.list(PODS)

    asyncio.run(test())


def test_an_api_server_that_wants_no_request_for_a_while_gets_none() -> None:
    async def story(server: FakeApi, api: KubeApi) -> None:
        server.inject(Fault(code=429, retry_after=1, verb="get", resource="secrets"))
        with pytest.raises(TooManyRequests):
            await api.get(SECRETS, "default", "a")
        refused = server.requests[-1].time
        with pytest.raises(NotFound):
            await api.get(PODS, "default", "a")
        assert server.requests[-1].time - refused > 0.9

    run(story)

"""The coordinator as a server: who may speak to it, and what nobody can do to it. Real sockets, real websockets."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import aiohttp
import pytest
from coordinator_server import RIGHT, SETTINGS, TOKEN, Server, hello, told, until, with_server
from msgspec import structs

from virtualflow.coordinator.decisions import decide
from virtualflow.coordinator.server import CoordinatorServer
from virtualflow.coordinator.settings import CoordinatorSettings, MembershipSettings
from virtualflow.coordinator.status_view import describe
from virtualflow.errors import ConfigurationError
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_MESSAGE

# --- who may speak ----------------------------------------------------------------------------------------------------

STRANGERS = [
    pytest.param({}, id="no token"),
    pytest.param({"Authorization": "Bearer another"}, id="a wrong token"),
    pytest.param({"Authorization": f"Bearer {TOKEN}x"}, id="a token that begins like the right one"),
    pytest.param({"Authorization": "Bearer "}, id="an empty token"),
    pytest.param({"Authorization": "Bearer"}, id="only the scheme"),
    pytest.param({"Authorization": TOKEN}, id="a token without a scheme"),
    pytest.param({"Authorization": f"Basic {TOKEN}"}, id="the token in another scheme"),
    pytest.param({"Authorization": "Bearer \udcff\udcfe"}, id="bytes that are no text"),
    pytest.param({"X-Token": TOKEN}, id="the token in another header"),
]


@pytest.mark.parametrize("headers", STRANGERS)
def test_a_stranger_learns_and_changes_nothing(headers: dict[str, str]) -> None:
    async def story(server: Server) -> None:
        await server.worker("worker-0")
        before = structs.replace(describe(server.state), worker_seconds=None, goodput=None)  # which grow
        for path in ("status", "watch", "worker", "nowhere"):
            async with server.client.get(f"{server.url}/v1/{path}", headers=headers) as answer:
                assert answer.status == 401
                assert "token" in (await answer.json())["message"]
        for path in ("drain", "gone", "scale", "hold", "stop", "fail"):
            body = json.dumps({"workers": 3, "worker": "worker-0", "reason": "x", "step": 3})
            async with server.client.post(f"{server.url}/v1/{path}", headers=headers, data=body) as answer:
                assert answer.status == 401
        for path in ("watch", "worker"):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
                await server.client.ws_connect(f"{server.url}/v1/{path}", headers=headers)
            assert refusal.value.status == 401
        assert structs.replace(describe(server.state), worker_seconds=None, goodput=None) == before

    with_server(story)


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr("virtualflow.coordinator.server.hmac.compare_digest", compare)

    async def story(server: Server) -> None:
        for token in ("x", TOKEN, "y" * 1_000):
            async with server.client.get(f"{server.url}/v1/status", headers={"Authorization": f"Bearer {token}"}):
                pass
        assert compared == [(32, 32)] * 6, "with each of the two tokens"

    with_server(story)


def test_anybody_may_ask_whether_it_lives() -> None:
    async def story(server: Server) -> None:
        async with server.client.get(f"{server.url}/healthz") as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n")

    with_server(story)


def test_a_coordinator_without_a_token_is_none() -> None:
    with pytest.raises(ConfigurationError, match="token"):
        CoordinatorServer("", 1, SETTINGS)


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        pytest.param("scale", b"", 400, id="nothing"),
        pytest.param("scale", b"{", 400, id="half a document"),
        pytest.param("scale", b"\xff\xfe\x00", 400, id="binary"),
        pytest.param("scale", b'{"workers":"3"}', 400, id="a wrong type"),
        pytest.param("scale", b'{"workers":0}', 400, id="too few"),
        pytest.param("scale", b'{"workers":' + b"9" * 500 + b"}", 400, id="a huge number"),
        pytest.param("scale", b'{"workers":NaN}', 400, id="NaN"),
        pytest.param("scale", b'{"workers":' + b"[" * 50_000, 400, id="deep nesting"),
        pytest.param("scale", b'{"workers":3}' + b" " * MAX_MESSAGE, 413, id="an oversized body"),
        pytest.param("scale", b'{"workers":3,"minimum":0}', 400, id="a minimum of none"),
        pytest.param("drain", b'{"workers":[]}', 400, id="a drain of nobody"),
        pytest.param("drain", b'{"workers":["worker-0"],"deadline":-1}', 400, id="a deadline in the past"),
        pytest.param("drain", b'{"workers":["worker-9"]}', 404, id="a drain of an unknown worker"),
        pytest.param("drain", b'{"workers":["worker-0","worker-9"]}', 404, id="a drain of one known of two"),
        pytest.param("gone", b'{"worker":"worker-9"}', 404, id="the loss of an unknown worker"),
        pytest.param("gone", b'{"worker":"worker-0","incarnation":"z"}', 404, id="the loss of another process"),
        pytest.param("gone", b'{"worker":"worker-9","incarnation":"worker-0.0"}', 404, id="with another name"),
        pytest.param("hold", b"{}", 400, id="a hold at no step"),
        pytest.param("fail", b'{"reason":"' + b"x" * 5_000 + b'"}', 400, id="too long a reason"),
    ],
)
def test_a_call_that_makes_no_sense_changes_nothing(path: str, body: bytes, code: int) -> None:
    async def story(server: Server) -> None:
        await server.worker("worker-0")
        before = structs.replace(describe(server.state), worker_seconds=None, goodput=None)  # which grow
        async with server.client.post(f"{server.url}/v1/{path}", headers=RIGHT, data=body) as answer:
            assert answer.status == code
            assert (await answer.json())["message"]
        assert structs.replace(describe(server.state), worker_seconds=None, goodput=None) == before

    with_server(story)


def test_calls_are_answered_with_a_sentence_and_reach_the_workers() -> None:
    async def story(server: Server) -> None:
        stream = await server.worker("worker-0")
        async with server.client.post(f"{server.url}/v1/hold", headers=RIGHT, json={"step": 7}) as answer:
            assert (await answer.json())["message"] == "no step after 7 starts"
        assert await told(stream) == m.Hold(7)
        async with server.client.post(
            f"{server.url}/v1/gone", headers=RIGHT, json={"worker": "worker-0", "reason": "its node is lost"}
        ) as answer:
            assert answer.status == 200
        assert await told(stream) == m.Refuse("declared lost: its node is lost")
        assert await told(stream) is None

    with_server(story)


def test_the_minimum_is_set_with_the_number_of_workers() -> None:
    async def story(server: Server) -> None:
        for body, expected in (
            ({"workers": 3, "minimum": 2}, 2),
            ({"workers": 4}, 2),
            ({"workers": 4, "minimum": 1}, 1),
        ):
            async with server.client.post(f"{server.url}/v1/scale", headers=RIGHT, json=body) as answer:
                assert answer.status == 200
            assert describe(server.state).minimum == expected

    with_server(story)


# --- workers ----------------------------------------------------------------------------------------------------------


HANDSHAKE = {
    "Connection": b"Upgrade",
    "Upgrade": b"websocket",
    "Sec-WebSocket-Version": b"13",
    "Sec-WebSocket-Key": b"MDEyMzQ1Njc4OWFiY2RlZg==",
}


@pytest.mark.parametrize("path", ["/v1/worker", "/v1/watch"])
@pytest.mark.parametrize("header", HANDSHAKE)
def test_a_handshake_with_bytes_that_are_no_text_is_refused(
    path: str, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(server: Server) -> None:
        headers = {"Host": b"here", "Authorization": b"Bearer " + TOKEN.encode(), **HANDSHAKE, header: b"\xff\xfe"}
        said = b"".join(name.encode() + b": " + value + b"\r\n" for name, value in headers.items())
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(f"GET {path} HTTP/1.1\r\n".encode() + said + b"\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        writer.close()

    with_server(story)
    assert caplog.messages == []


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(b"\x00\x01\xff", id="binary garbage"),
        pytest.param(b"{", id="malformed JSON"),
        pytest.param(b'{"type":"heartbeat"}', id="no Hello"),
        pytest.param(b'{"type":"hello"}', id="an empty Hello"),
        pytest.param(b"[" * 100_000, id="deep nesting"),
        pytest.param(b" " * (MAX_MESSAGE + 1), id="an oversized frame"),
        pytest.param(None, id="silence"),
    ],
)
def test_who_does_not_say_hello_is_shown_out(first: bytes | None) -> None:
    async def story(server: Server) -> None:
        before = structs.replace(describe(server.state), worker_seconds=None, goodput=None)  # which grow
        stream = await server.client.ws_connect(f"{server.url}/v1/worker", headers=RIGHT)
        if first is not None:
            await stream.send_bytes(first)
        assert await told(stream) is None
        assert stream.close_code in (1007, 1009)
        assert structs.replace(describe(server.state), worker_seconds=None, goodput=None) == before

    with_server(story, replace(SETTINGS, first_message=0.2))


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(b"\x00\x01\xff", id="binary garbage"),
        pytest.param(b'{"type":"note","kind":"info"}', id="a missing field"),
        pytest.param(b"[" * 100_000, id="deep nesting"),
        pytest.param(b" " * (MAX_MESSAGE + 1), id="an oversized frame"),
    ],
)
def test_a_worker_that_talks_nonsense_only_loses_its_connection(later: bytes) -> None:
    async def story(server: Server) -> None:
        stream, other = await server.worker("worker-0"), await server.worker("worker-1")
        await stream.send_bytes(later)
        assert await told(stream) is None
        await until(lambda: not server.state.roster.workers["worker-0.0"].connected)
        assert server.state.phase == "waiting"
        await (await server.worker("worker-0")).close()
        await other.send_bytes(m.encode(m.Ready()))
        await until(lambda: server.state.roster.workers["worker-1.0"].ready_at is not None)

    with_server(story)


def test_a_worker_that_is_refused_is_told_why() -> None:
    async def story(server: Server) -> None:
        await server.worker("worker-0")
        stream = await server.client.ws_connect(f"{server.url}/v1/worker", headers=RIGHT)
        await stream.send_bytes(m.encode(hello("worker-1", virtual_nodes=4)))
        refusal = await told(stream)
        assert isinstance(refusal, m.Refuse)
        assert "4 virtual nodes" in refusal.reason
        assert await told(stream) is None

    with_server(story)


def test_a_worker_that_comes_back_takes_over_from_its_half_open_connection() -> None:
    async def story(server: Server) -> None:
        old = await server.worker("worker-0")
        new = await server.worker("worker-0")
        assert await told(old) is None
        server.coordinator.call(http_api.HoldCall(3))
        server.coordinator._turn()
        assert await told(new) == m.Hold(3)
        assert server.state.roster.workers["worker-0.0"].connected
        assert len(server.coordinator._lines) == 1

    with_server(story)


def test_a_new_process_takes_the_name_of_an_old_one() -> None:
    async def story(server: Server) -> None:
        old = await server.worker("worker-0", "first")
        await server.worker("worker-0", "second")
        refusal = await told(old)
        assert isinstance(refusal, m.Refuse)
        assert "taken its name" in refusal.reason
        assert await told(old) is None
        await until(lambda: list(server.state.roster.workers) == ["second"])

    with_server(story)


def test_a_worker_that_does_not_read_is_disconnected_and_the_others_go_on() -> None:
    async def story(server: Server) -> None:
        reader = await server.worker("reader")
        deaf = await server.worker("deaf")
        connection = deaf._conn
        assert connection is not None
        assert connection.transport is not None
        connection.transport.pause_reading()  # type: ignore[attr-defined]
        text = "x" * 4_000
        heard = 0
        while server.state.roster.workers["deaf.0"].connected:
            for number in range(40):
                server.state.send("deaf.0", m.Drain(float(number), text))
            server.state.send("reader.0", m.Hold(1))
            server.coordinator._turn()
            assert await told(reader) == m.Hold(1)
            heard += 1
            assert heard < 2_000
        server.state.send("reader.0", m.Hold(2))
        server.coordinator._turn()
        assert await told(reader) == m.Hold(2)

    with_server(story)


def test_two_workers_start_a_generation_and_hear_each_others_keys() -> None:
    async def story(server: Server) -> None:
        first = await server.worker("worker-0", ready=True)
        second = await server.worker("worker-1", ready=True)
        plan = await told(first)
        assert isinstance(plan, m.Plan)
        assert await told(second) == plan
        assert [member.worker for member in plan.members] == ["worker-0", "worker-1"]
        key = m.Publish(plan.generation, "0", b"\x00address")
        await first.send_bytes(m.encode(key))
        assert await told(second) == await told(first) == m.Keys(plan.generation, {"0": b"\x00address"})
        again = await server.client.ws_connect(f"{server.url}/v1/worker", headers=RIGHT)
        await again.send_bytes(m.encode(hello("worker-1", ready=True)))
        assert [await told(again) for _ in range(3)][1:] == [plan, m.Keys(plan.generation, {key.key: key.value})]

    with_server(story)


@pytest.mark.parametrize("busy", [False, True], ids=["it does not run", "it does not keep up"])
def test_the_coordinators_own_pause_costs_nobody_his_place(busy: bool) -> None:
    async def story(server: Server) -> None:
        streams = [await server.worker(f"worker-{number}") for number in range(3)]
        await asyncio.sleep(0.05)
        for _ in range(20):
            time.sleep(0.05)  # noqa: ASYNC251 - this is what is tested
            if busy:
                server.coordinator._tick()  # as with each message of others
        if busy:
            # Its own clock comes too late, and before what the workers have sent.
            server.coordinator._beat()
            decide(server.state, server.coordinator._tick())
        for stream in streams:
            await stream.send_bytes(m.encode(m.Heartbeat()))
        await asyncio.sleep(0.2)
        assert not server.state.roster.lost
        assert len(server.state.roster.workers) == 3

    quick = MembershipSettings(heartbeat_limit=0.6, restart_grace=0.0)
    with_server(story, CoordinatorSettings(membership=quick, stall=0.2))

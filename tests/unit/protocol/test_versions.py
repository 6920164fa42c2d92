"""Versions age apart: what another one says is understood as far as it can be, and else refused in a sentence."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from aiohttp import web
from coordinator_server import RIGHT, TOKEN, Server, hello, told, with_server

from other_version import ADDED, UNHEARD, encode_newer, encode_older
from statuses import coordinator_status
from virtualflow.protocol import http_api, versions
from virtualflow.protocol import messages as m
from virtualflow.protocol.http_api import CopyHeader
from virtualflow.protocol.http_client import CallRefused, CoordinatorClient, ProtocolMismatch
from virtualflow.protocol.job_record import JobRecord
from virtualflow.protocol.settings import SignalSettings
from virtualflow.protocol.termination_message import TerminationMessage, decode_termination_message
from virtualflow.protocol.versions import Speaker, explain_mismatch, negotiate

WIRE = Path(__file__).parent / "wire"
KINDS = {
    kind.__name__: kind
    for kind in (
        *get_args(m.FromWorker),
        *get_args(m.ToWorker),
        *http_api.PATHS,
        http_api.Answer,
        http_api.Status,
        CopyHeader,
        JobRecord,
        TerminationMessage,
    )
}

# --- what versions have said -----------------------------------------------------------------------------------------


EVERY_PROTOCOL = pytest.mark.parametrize("protocol", range(versions.OLDEST_PROTOCOL, versions.PROTOCOL + 1))


def recorded(protocol: int) -> list[tuple[str, dict[str, Any]]]:
    """The least that a party of a protocol says: what came with a default later is not in it."""
    entries = json.loads((WIRE / f"protocol-{protocol}.json").read_text())
    return [(entry["name"], entry["said"]) for entry in entries]


@EVERY_PROTOCOL
def test_what_an_older_version_says_is_understood(protocol: int) -> None:
    for name, said in recorded(protocol):
        read = msgspec.json.decode(json.dumps(said), type=KINDS[name])
        assert missing(said, json.loads(m.encode(read))) == [], f"an older version needs these fields of {name}"


def missing(least: Any, said: Any) -> list[str]:
    """Fields that are not said any more."""
    if isinstance(least, dict):
        return [key for key in least if key not in said or missing(least[key], said[key])]
    if isinstance(least, list):
        return [key for one, other in zip(least, said, strict=False) for key in missing(one, other)]
    return []


def test_every_message_is_recorded() -> None:
    assert {name for name, _ in recorded(versions.PROTOCOL)} == KINDS.keys()


@EVERY_PROTOCOL
def test_what_a_newer_version_adds_is_ignored(protocol: int) -> None:
    for name, said in recorded(protocol):
        newer = encode_newer(msgspec.json.decode(json.dumps(said), type=KINDS[name]))
        assert b"addedLater" in newer, name
        again = msgspec.json.decode(newer, type=KINDS[name])
        assert missing(said, json.loads(m.encode(again))) == [], name


def test_a_termination_message_of_a_newer_version_is_read() -> None:
    word = TerminationMessage("left", 7, reason="drained")
    assert decode_termination_message(encode_newer(word)) == word


# --- agreeing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "agreed"),
    [
        pytest.param((3, 3), (3, 3), 3, id="the same"),
        pytest.param((2, 5), (3, 4), 4, id="one within the other"),
        pytest.param((2, 3), (3, 6), 3, id="just about"),
        pytest.param((1, 2), (3, 6), None, id="too old"),
        pytest.param((5, 6), (3, 4), None, id="too new"),
        pytest.param((6, 5), (1, 9), None, id="a range that is none"),
    ],
)
def test_the_newest_protocol_that_both_speak_is_agreed_on(
    one: tuple[int, int], other: tuple[int, int], agreed: int | None
) -> None:
    parties = Speaker("a", *one), Speaker("b", *other)
    assert negotiate(*parties) == negotiate(*reversed(parties)) == agreed
    assert (explain_mismatch(*parties) is None) is (agreed is not None)


def test_who_does_not_fit_is_told_both_versions_and_what_to_do() -> None:
    worker, coordinator = Speaker("worker-3", 2, 2, "0.0.9"), Speaker("the coordinator", 3, 4, "0.2.0")
    assert explain_mismatch(worker, coordinator) == (
        "worker-3 speaks protocol 2 (virtualflow 0.0.9) and the coordinator protocols 3 to 4 (virtualflow 0.2.0), "
        "which have none in common; give worker-3 a newer virtualflow, or the coordinator an older one"
    )


# --- a worker and a coordinator, over a socket ------------------------------------------------------------------------

THIS = str(versions.this_speaker("this"))
FAR = versions.PROTOCOL + 4


async def answer_to(server: Server, said: bytes) -> m.ToWorker | None:
    stream = await server.client.ws_connect(f"{server.url}/v1/worker", headers=RIGHT)
    await stream.send_bytes(said)
    return await told(stream)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(encode_newer(hello("worker-0")), id="a newer one"),
        pytest.param(encode_older(hello("worker-0")), id="an older one"),
        pytest.param(m.encode(hello("worker-0", protocol=FAR, oldest_protocol=1)), id="one of many protocols"),
    ],
)
def test_a_worker_of_another_version_is_welcome_and_told_the_protocol(said: bytes) -> None:
    async def story(server: Server) -> None:
        welcome = await answer_to(server, said)
        assert isinstance(welcome, m.Welcome)
        assert welcome.protocol == versions.PROTOCOL

    with_server(story)


def unreadable(protocol: int) -> bytes:
    """The Hello of a version that has changed all but what never changes."""
    known = {"type": "hello", "worker": "worker-0", "protocol": protocol, "version": "8.8.8", "incarnation": {"id": 1}}
    return json.dumps(known | ADDED).encode()


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        pytest.param(
            m.encode(hello("worker-0", protocol=2, version="0.0.9")),
            f"worker-0 speaks protocol 2 (virtualflow 0.0.9) and the coordinator {THIS}",
            id="too old",
        ),
        pytest.param(
            m.encode(hello("worker-0", protocol=FAR, oldest_protocol=FAR - 1, version="9.9.9")),
            f"worker-0 speaks protocols {FAR - 1} to {FAR} (virtualflow 9.9.9) and the coordinator {THIS}",
            id="too new",
        ),
        pytest.param(
            unreadable(FAR),
            f"worker-0 speaks protocol {FAR} (virtualflow 8.8.8) and the coordinator {THIS}",
            id="too new to be read",
        ),
    ],
)
def test_a_worker_of_a_version_too_far_away_is_refused_in_a_sentence(said: bytes, refused: str) -> None:
    async def story(server: Server) -> None:
        answer = await answer_to(server, said)
        assert isinstance(answer, m.Refuse)
        assert answer.reason.startswith(refused)
        event = server.state.history.events[-1]
        assert (event.kind, event.refusal) == ("refused", http_api.Refusal("worker-0", answer.reason))
        await server.worker("worker-1")

    with_server(story)


def test_a_hello_that_cannot_be_read_for_another_reason_is_no_hello() -> None:
    async def story(server: Server) -> None:
        assert await answer_to(server, unreadable(versions.PROTOCOL)) is None
        assert not server.state.history.events

    with_server(story)


def test_a_note_of_a_newer_worker_is_shown() -> None:
    async def story(server: Server) -> None:
        stream = await server.worker("worker-0")
        await stream.send_bytes(encode_newer(m.Note("info", "what is new")))
        await stream.send_bytes(m.encode(m.Note("checkpoint", "written")))
        while len(server.state.history.events) < 3:  # noqa: ASYNC110 - it looks at the state of another task
            await asyncio.sleep(0.005)
        said = [(event.kind, event.text) for event in server.state.history.events][1:]
        assert said == [("info", "what is new"), ("checkpoint", "written")]

    with_server(story)


# --- a client and a coordinator ---------------------------------------------------------------------------------------

STATUS = coordinator_status(
    events=(http_api.Event(1, 1.0, "refused", "no", http_api.Refusal("worker-1", "no")),),
    protocol=versions.PROTOCOL,
    oldest_protocol=versions.OLDEST_PROTOCOL,
    version="0.3.0",
)


def read(content: bytes) -> http_api.Status:
    """What the client says of a coordinator that answers this, to a question and to a watcher."""

    async def question(_: web.Request) -> web.Response:
        return web.Response(body=content, content_type="application/json")

    async def watch(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_bytes(content)
        await socket.close()
        return socket

    async def ask() -> http_api.Status:
        app = web.Application()
        app.router.add_get("/v1/status", question)
        app.router.add_get("/v1/watch", watch)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with CoordinatorClient(url, TOKEN, SignalSettings()) as client:
                watched = await one_of(client)
                try:
                    asked: http_api.Status | CallRefused = await client.status()
                except CallRefused as error:
                    asked = error
                assert str(asked) == str(watched)
                if isinstance(asked, CallRefused):
                    raise asked
                return asked
        finally:
            await runner.cleanup()

    return asyncio.run(ask())


async def one_of(client: CoordinatorClient) -> http_api.Status | CallRefused:
    stream = client.watch()
    try:
        return await anext(stream)
    except CallRefused as error:
        return error
    finally:
        await stream.aclose()


def test_a_client_reads_the_status_of_a_newer_coordinator() -> None:
    status = read(encode_newer(STATUS))
    assert status.events[0] == STATUS.events[0]
    assert status.events[-1].kind == UNHEARD
    assert msgspec.structs.replace(status, events=STATUS.events) == STATUS


def test_a_client_reads_the_status_of_an_older_coordinator() -> None:
    status = read(encode_older(STATUS))
    assert (status.step, status.protocol, status.version) == (STATUS.step, None, "")
    assert status.events[0].refusal is None


@pytest.mark.parametrize(
    "facts", [pytest.param({}, id="readable"), pytest.param({"step": "the seventh"}, id="unreadable")]
)
def test_a_client_says_that_a_coordinator_is_of_a_version_too_far_away(facts: dict[str, Any]) -> None:
    far = {"protocol": FAR, "oldestProtocol": FAR - 1, "version": "9.9.9"}
    with pytest.raises(ProtocolMismatch) as refusal:
        read(json.dumps(json.loads(m.encode(STATUS)) | far | facts).encode())
    said = str(refusal.value)
    assert f"speaks protocols {FAR - 1} to {FAR} (virtualflow 9.9.9) and this client {THIS}" in said
    assert said.endswith(" an older one")


def test_what_is_no_status_is_not_taken_for_another_version() -> None:
    with pytest.raises(CallRefused, match="it sends is no status") as refusal:
        read(b'{"phase": 7}')
    assert not isinstance(refusal.value, ProtocolMismatch)


def test_a_coordinator_says_what_it_speaks() -> None:
    async def story(server: Server) -> None:
        async with CoordinatorClient(server.url, TOKEN, SignalSettings()) as client:
            status = await client.status()
        spoken = (status.protocol, status.oldest_protocol, status.version)
        assert spoken == (versions.PROTOCOL, versions.OLDEST_PROTOCOL, versions.__version__)

    with_server(story)


@pytest.mark.parametrize("path", ["scale", "hold", "stop"])
def test_a_call_of_a_newer_client_is_understood(path: str) -> None:
    calls: dict[str, http_api.Call] = {
        "scale": http_api.ScaleCall(4), "hold": http_api.HoldCall(7), "stop": http_api.StopCall()
    }  # fmt: skip

    async def story(server: Server) -> None:
        body = encode_newer(calls[path])
        async with server.client.post(f"{server.url}/v1/{path}", headers=RIGHT, data=body) as answer:
            assert answer.status == 200, await answer.text()

    with_server(story)

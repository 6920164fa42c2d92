"""Who watches a coordinator hears of every change, and of mere progress as often as asked for."""

from __future__ import annotations

import dataclasses
import time

import aiohttp
import msgspec
import pytest
from coordinator_server import RIGHT, SETTINGS, Server, until, with_server

from virtualflow.coordinator.settings import CoordinatorSettings
from virtualflow.coordinator.worker_messages import handle
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m

# --- watchers ---------------------------------------------------------------------------------------------------------


def test_a_watcher_hears_of_every_change_and_of_the_last_one_at_the_end() -> None:
    async def story(server: Server) -> None:
        stream = await server.client.ws_connect(f"{server.url}/v1/watch", headers=RIGHT)
        status = msgspec.json.Decoder(http_api.Status)
        assert status.decode((await stream.receive(timeout=30.0)).data).workers == ()
        await server.worker("worker-0")
        seen = status.decode((await stream.receive(timeout=30.0)).data)
        assert [worker.worker for worker in seen.workers] == ["worker-0"]
        server.state.tell("info", "the last one")
        await server.coordinator.close()
        last = status.decode((await stream.receive(timeout=30.0)).data)
        assert last.events[-1].text == "the last one"
        assert (await stream.receive(timeout=30.0)).type == aiohttp.WSMsgType.CLOSE

    with_server(story)


STATUS = msgspec.json.Decoder(http_api.Status)


async def seen(stream: aiohttp.ClientWebSocketResponse) -> http_api.Status:
    """The next status that a watcher gets."""
    return STATUS.decode((await stream.receive(timeout=30.0)).data)


async def silent(stream: aiohttp.ClientWebSocketResponse, seconds: float) -> None:
    with pytest.raises(TimeoutError):
        await stream.receive(timeout=seconds)


async def progress(server: Server, step: int) -> None:
    """A worker reports a step."""
    server.state.history.total_steps = 100
    progress = m.Progress(m.NO_GENERATION, step, 0, 100, {}, 1.0, "training")
    handle(server.state, "worker-0.0", progress, time.monotonic())
    server.coordinator._turn()


def test_a_quiet_watcher_hears_of_progress_rarely_and_of_everything_else_at_once() -> None:
    async def story(server: Server) -> None:
        await server.worker("worker-0")
        loud = await server.client.ws_connect(f"{server.url}/v1/watch", headers=RIGHT)
        quiet = await server.client.ws_connect(f"{server.url}/v1/watch?progress=3600", headers=RIGHT)
        assert (await seen(loud)).step == (await seen(quiet)).step == 0
        for step in (1, 2, 3):
            await progress(server, step)
            assert (await seen(loud)).step == step
        server.state.tell("info", "something else")
        server.coordinator._turn()
        told = await seen(quiet)
        assert (told.step, told.events[-1].text) == (3, "something else")
        await progress(server, 4)
        while (await seen(loud)).step < 4:  # what happens at nearly the same time comes in one message
            pass
        await silent(quiet, 0.3)

    with_server(story)


def test_progress_is_told_when_its_time_has_come() -> None:
    async def story(server: Server) -> None:
        await server.worker("worker-0")
        stream = await server.client.ws_connect(f"{server.url}/v1/watch?progress=0.4", headers=RIGHT)
        await seen(stream)
        began = time.monotonic()
        for step in range(1, 6):
            await progress(server, step)
        assert (await seen(stream)).step == 5
        assert time.monotonic() - began >= 0.3
        await progress(server, 6)
        assert (await seen(stream)).step == 6

    with_server(story)


def test_a_quiet_watcher_gets_the_last_progress_when_the_coordinator_ends() -> None:
    async def story(server: Server) -> None:
        await server.worker("worker-0")
        stream = await server.client.ws_connect(f"{server.url}/v1/watch?progress=3600", headers=RIGHT)
        await seen(stream)
        await progress(server, 7)
        await server.coordinator.close()
        assert (await seen(stream)).step == 7

    with_server(story)


def test_a_watcher_hears_how_long_workers_have_been_there_although_nothing_happens() -> None:
    async def story(server: Server) -> None:
        stream = await server.client.ws_connect(f"{server.url}/v1/watch", headers=RIGHT)
        assert (await seen(stream)).worker_seconds == http_api.WorkerSeconds(0.0, 0.0)
        await server.worker("worker-0")
        news, paid = server.state.news, 0.0
        while paid < 1.0:
            told = (await seen(stream)).worker_seconds
            assert told is not None
            assert told.paid >= paid
            paid = told.paid
        assert server.state.news == news, "nobody has to decide anything because of it"

    with_server(story, with_other(paid_interval=0.0))


def test_who_watches_a_coordinator_without_workers_hears_nothing() -> None:
    async def story(server: Server) -> None:
        stream = await server.client.ws_connect(f"{server.url}/v1/watch", headers=RIGHT)
        await seen(stream)
        await silent(stream, 1.2)

    with_server(story, with_other(paid_interval=0.0))


def test_a_brief_status_is_to_be_had_by_looking_and_by_watching() -> None:
    async def story(server: Server) -> None:
        for number in range(120):
            server.state.tell("info", str(number))
        server.coordinator._turn()
        stream = await server.client.ws_connect(f"{server.url}/v1/watch?brief=1", headers=RIGHT)
        assert len((await seen(stream)).events) == 0
        for query, events in (("", 120), ("?brief=0", 120), ("?brief=1", 0)):
            async with server.client.get(f"{server.url}/v1/status{query}", headers=RIGHT) as answer:
                assert len(STATUS.decode(await answer.read()).events) == events

    with_server(story)


@pytest.mark.parametrize(
    "query",
    [
        "watch?progress=-1",
        "watch?progress=3601",
        "watch?progress=nan",
        "watch?progress=inf",
        "watch?progress=soon",
        "watch?progress=",
        "watch?brief=yes",
        "status?brief=2",
    ],
)
def test_a_look_that_makes_no_sense_is_refused_with_a_sentence(query: str) -> None:
    async def story(server: Server) -> None:
        async with server.client.get(f"{server.url}/v1/{query}", headers=RIGHT) as answer:
            assert answer.status == 400
            assert "brief must be 0 or 1" in (await answer.json())["message"]

    with_server(story)


def test_a_watcher_that_does_not_read_holds_up_nobody() -> None:
    async def story(server: Server) -> None:
        deaf = await server.client.ws_connect(f"{server.url}/v1/watch", headers=RIGHT)
        assert deaf._conn is not None
        assert deaf._conn.transport is not None
        deaf._conn.transport.pause_reading()  # type: ignore[attr-defined]
        worker = await server.worker("worker-0")
        for number in range(300):
            await worker.send_bytes(m.encode(m.Note("info", f"{number} " + "x" * 4_000)))
        await until(lambda: server.state.history.events[-1].text.startswith("299 "))
        async with server.client.get(f"{server.url}/v1/status", headers=RIGHT) as answer:
            assert answer.status == 200

    with_server(story, with_other(watch_interval=0.001))


def with_other(**facts: float) -> CoordinatorSettings:
    """The settings of these tests with other values."""
    return dataclasses.replace(SETTINGS, **facts)  # type: ignore[arg-type]

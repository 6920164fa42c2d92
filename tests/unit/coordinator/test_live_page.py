"""The live page over real HTTP: who may look, what looking opens, and what it costs however large the job is."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from coordinator_server import RIGHT, SETTINGS, TOKEN, Server, hello, told, until, with_server
from large_job import fill, happen, train
from msgspec import structs

from virtualflow.coordinator.page.live_page import compose
from virtualflow.coordinator.settings import (
    SHOWN_CHANGES,
    SHOWN_EVENTS,
    SHOWN_METRICS,
    SHOWN_WORKERS,
    CoordinatorSettings,
    LivePageSettings,
)
from virtualflow.coordinator.status_view import describe
from virtualflow.protocol import http_api
from virtualflow.protocol.job_view import ViewJob, ViewLog, ViewNow
from virtualflow.protocol.live_view import View, ViewSeries, page_address, view_token
from virtualflow.protocol.messages import Heartbeat, Usage, Welcome, encode

LOOKS = {"Authorization": f"Bearer {view_token(TOKEN)}"}


def settings(**page: Any) -> CoordinatorSettings:
    return CoordinatorSettings(membership=SETTINGS.membership, live_page=LivePageSettings(**page))


async def look(server: Server, have: str = "", headers: dict[str, str] = LOOKS) -> View:
    """What the page is told."""
    async with server.client.get(f"{server.url}/v1/view", params={"have": have}, headers=headers) as answer:
        assert answer.status == 200
        return msgspec.json.decode(await answer.read(), type=View)


async def look_on(server: Server, have: str) -> View:
    """What the page is told once there is something new: what is put together takes its rest."""
    while (view := await look(server, have)).have == have:
        pass
    return view


# --- who may look -----------------------------------------------------------------------------------------------------


def test_the_view_token_follows_from_the_jobs_and_is_another_one() -> None:
    assert view_token("a") == view_token("a") != view_token("b")
    assert re.fullmatch("[0-9a-f]{64}", view_token(TOKEN))
    address = page_address("http://127.0.0.1:7", TOKEN, "team/the job&more")
    assert address == f"http://127.0.0.1:7/ui#token={view_token(TOKEN)}&job=team%2Fthe+job%26more"


def test_the_page_is_for_anybody_and_has_nothing_of_the_job_in_it() -> None:
    async def story(server: Server) -> None:
        fill(server.state, 2, 8, 3)
        async with server.client.get(f"{server.url}/ui") as answer:
            page = await answer.text()
            assert answer.status == 200
            assert answer.headers["Connection"] == "close", "a stranger keeps no connection"
            policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        assert "worker-0" not in page
        assert TOKEN not in page
        assert view_token(TOKEN) not in page
        assert not re.search(r"""<[^>]*(src|href)=["']?(https?:)?//|@import|url\(""", page), "it loads nothing"
        async with server.client.post(f"{server.url}/ui") as answer:
            assert answer.status == 405

    with_server(story)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("uPlot.iife.min.js", "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"),
        ("uPlot.min.css", "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"),
    ],
)
def test_the_drawing_library_is_as_its_authors_have_published_it(name: str, digest: str) -> None:
    """Version 1.6.32 of uPlot, as npm has it."""
    folder = files("virtualflow.coordinator.page") / "uplot"
    assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert "(v1.6.32)" in (folder / "uPlot.iife.min.js").read_text()
    assert "Permission is hereby granted, free of charge" in (folder / "LICENSE").read_text()


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({}, id="no token"),
        pytest.param({"Authorization": "Bearer another"}, id="a wrong token"),
        pytest.param({"Authorization": f"Bearer {view_token('other')}"}, id="another job's"),
        pytest.param({"Authorization": f"Basic {view_token(TOKEN)}"}, id="in another scheme"),
    ],
)
def test_without_its_token_nobody_looks(headers: dict[str, str]) -> None:
    async def story(server: Server) -> None:
        async with server.client.get(f"{server.url}/v1/view", headers=headers) as answer:
            assert answer.status == 401
        async with server.client.get(f"{server.url}/v1/view?token={view_token(TOKEN)}", headers=headers) as answer:
            assert answer.status == 401, "a token is in no address"

    with_server(story)


def test_the_jobs_own_token_may_look_too() -> None:
    async def story(server: Server) -> None:
        assert (await look(server, headers=RIGHT)).job

    with_server(story)


def test_who_may_look_may_do_nothing_else() -> None:
    async def story(server: Server) -> None:
        await server.worker("worker-0")
        before = structs.replace(describe(server.state), worker_seconds=None, goodput=None)  # which grow
        body = json.dumps({"workers": 3, "worker": "worker-0", "reason": "x", "step": 3, "ticket": 1})
        for path in http_api.PATHS.values():
            async with server.client.post(f"{server.url}{path}", headers=LOOKS, data=body) as answer:
                assert answer.status == 403
                assert "opens GET /v1/view and /v1/log, and nothing else" in (await answer.json())["message"]
                assert answer.headers["Connection"] == "close"
        for method in ("GET", "PUT"):
            async with server.client.request(method, f"{server.url}{http_api.COPY_PATH}", headers=LOOKS) as answer:
                assert answer.status == 403
        for path in ("/v1/status", "/v1/nowhere", "/"):
            async with server.client.get(f"{server.url}{path}", headers=LOOKS) as answer:
                assert answer.status == 403
        for path in ("/v1/worker", "/v1/watch"):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
                await server.client.ws_connect(f"{server.url}{path}", headers=LOOKS)
            assert refusal.value.status == 403
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            async with server.client.request(method, f"{server.url}/v1/view", headers=LOOKS, data=body) as answer:
                assert answer.status == 405
        assert structs.replace(describe(server.state), worker_seconds=None, goodput=None) == before

    with_server(story)


def test_who_only_looks_stays_a_stranger_to_the_door() -> None:
    async def story(server: Server) -> None:
        admitted: list[object] = []
        server.coordinator.door.admit = admitted.append  # type: ignore[method-assign]
        async with server.client.get(f"{server.url}/v1/view", headers=LOOKS) as answer:
            assert answer.headers["Connection"] == "close"
        assert admitted == []
        await look(server, headers=RIGHT)
        assert len(admitted) == 1

    with_server(story)


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_a_page_gets_everything_once_and_then_what_has_changed() -> None:
    async def story(server: Server) -> None:
        state = server.state
        fill(state, 2, 8, 3)
        train(state, 10)
        train(state, 11)
        state.wanted_reason = "2 workers of the queue research: its share"
        first = await look(server)
        now = msgspec.json.decode(first.now, type=ViewNow)
        job = msgspec.json.decode(first.job, type=ViewJob)
        log = msgspec.json.decode(first.log, type=ViewLog)
        assert (now.phase, now.step, now.total_steps) == ("training", 11, 100_000)
        assert [(worker.worker, worker.nodes) for worker in job.workers] == [
            ("worker-0", "0-3"),
            ("worker-1", "4-7"),
        ]
        assert job.decided == ("2 workers of the queue research: its share")
        assert (len(log.changes), log.changes_total) == (3, 3)
        assert msgspec.json.decode(first.series, type=ViewSeries).steps == (10,)
        same = await look(server, first.have)
        assert same.have == first.have
        assert not any(map(bytes, (same.job, same.log, same.series)))
        happen(state, 4, 50, 2)
        changed = await look_on(server, first.have)
        assert changed.log
        assert not any(map(bytes, (changed.job, changed.series)))
        train(state, 60)
        moved = await look_on(server, changed.have)
        assert moved.series
        assert not moved.log
        for foreign in ("1-1.1.1", "nonsense", f"{state.incarnation}-", "-", "💥"):
            assert (await look(server, foreign)).job, "another coordinator's numbers mean nothing here"

    with_server(story, settings(interval=0.01))


@pytest.mark.slow
def test_however_large_the_job_the_view_is_small() -> None:
    async def story(server: Server) -> None:
        fill(server.state, 64, 1_000, 10_000)
        for step in range(1, 20_000, 3):
            train(server.state, step, metrics=200)
        view = await look(server)
        log, job = msgspec.json.decode(view.log, type=ViewLog), msgspec.json.decode(view.job, type=ViewJob)
        now = msgspec.json.decode(view.now, type=ViewNow)
        assert (len(log.changes), log.changes_total, len(log.events)) == (SHOWN_CHANGES, 10_000, SHOWN_EVENTS)
        assert log.changes[-1].step == 100_000, "the latest"
        assert (len(job.workers), job.notes, len(now.metrics)) == (64, (), SHOWN_METRICS)
        assert len(encode(view)) < 128 * 1024

    with_server(story)


def test_of_very_many_workers_the_first_are_listed_and_the_others_counted() -> None:
    async def story(server: Server) -> None:
        fill(server.state, SHOWN_WORKERS + 100, 4_000, 0)
        job = compose(server.state).job
        assert (len(job.workers), job.notes) == (SHOWN_WORKERS, ("Not listed: 100 more workers.",))
        assert job.workers[0].first == 0

    with_server(story)


def test_what_a_worker_takes_of_its_machine_is_shown_in_the_full_status_alone() -> None:
    async def story(server: Server) -> None:
        stream = await server.worker("worker-0")
        usage = Usage(1.257, 412.0, 3 << 30, 20 << 30, 0.97)
        await stream.send_bytes(encode(Heartbeat(None, usage)))
        await until(lambda: compose(server.state).job.workers[0].usage[0] != "")
        shown = compose(server.state).job.workers[0].usage
        assert shown == ("412", "1.26 cores", "3.00 GiB", "20.0 GiB", "97 %")
        assert describe(server.state, brief=True).workers[0].usage is None
        assert [worker.usage for worker in describe(server.state).workers] == [usage]
        server.state.fail("it is over")
        assert compose(server.state).job.workers[0].usage == ("",) * 5

    with_server(story)


async def read_log(server: Server, worker: str) -> tuple[int, str]:
    async with server.client.get(f"{server.url}/v1/log", params={"worker": worker}, headers=LOOKS) as answer:
        text = await answer.text()
        return answer.status, text if answer.status == 200 else json.loads(text)["message"]


def test_the_end_of_a_workers_log_can_be_read_and_no_other_file(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "secret.log").write_text("secret")
    (logs / "worker-0.log").write_bytes(b"".join(b"line %d\n" % n for n in range(1_000)) + b"1 %\r2 %\r\n\x1b[2Jx\xff")
    (logs / "worker-1.log").write_bytes(b"a" * 100_000 + b"\nlast\n")
    (logs / "worker-2.log").symlink_to("/dev/zero")

    async def story(server: Server) -> None:
        code, text = await read_log(server, "worker-0")
        lines = text.split("\n")
        assert (code, len(lines), lines[0], lines[-3:]) == (200, 200, "line 802", ["line 999", "2 %", "\\x1b[2Jx�"])
        assert await read_log(server, "worker-1") == (200, "last")
        nothing = (404, "no worker of that name has printed anything here")
        for name in ("worker-2", "worker-3", "../secret", "/etc/passwd", "", "x\0y", "w" * 5_000):
            assert await read_log(server, name) == nothing
        codes = [(await read_log(server, "worker-1"))[0] for _ in range(12)]
        assert codes == [200] * 11 + [429], "they take no more time than pages may: 20 looks in ten minutes"

    with_server(story, settings(logs=logs, interval=600, viewers=20))


def test_where_there_are_no_logs_it_is_said_where_they_are() -> None:
    async def story(server: Server) -> None:
        assert await read_log(server, "worker-0") == (
            404,
            "logs are where the workers run: kubectl vf logs JOB prints those of a cluster",
        )

    with_server(story)


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_answers_wait_for_their_time_and_the_first_one_does_not() -> None:
    async def story(server: Server) -> None:
        first = await look(server)
        began = time.monotonic()
        await look(server, first.have)
        assert time.monotonic() - began >= 0.5

    with_server(story, settings(interval=0.5))


def test_many_pages_are_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def counted(state: object) -> object:
        calls.append(state)
        return compose(state)  # type: ignore[arg-type]

    monkeypatch.setattr("virtualflow.coordinator.page.live_page.compose", counted)

    async def story(server: Server) -> None:
        first = await look(server)
        await asyncio.gather(*(look(server, first.have) for _ in range(30)))
        assert 1 <= len(calls) <= 3

    with_server(story, settings(interval=0.5))


def test_nobody_looks_and_nothing_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("virtualflow.coordinator.page.live_page.compose", None)

    async def story(server: Server) -> None:
        await server.worker("worker-0")
        while server.state.history.goodput.paid == 0:  # noqa: ASYNC110 - a timer counts it
            await asyncio.sleep(0.01)

    with_server(story)


def test_too_many_pages_are_told_to_come_later_and_the_job_goes_on() -> None:
    async def story(server: Server) -> None:
        first = await look(server)
        asking = [asyncio.create_task(look(server, first.have)) for _ in range(4)]
        while server.coordinator._page._waiting < 4:  # noqa: ASYNC110 - the state of other tasks
            await asyncio.sleep(0.01)
        async with server.client.get(f"{server.url}/v1/view?have=x", headers=LOOKS) as answer:
            assert answer.status == 429
        stream = await server.client.ws_connect(f"{server.url}/v1/worker", headers=RIGHT)
        await stream.send_bytes(encode(hello("worker-0")))
        assert isinstance(await told(stream), Welcome)
        assert len(await asyncio.gather(*asking)) == 4

    with_server(story, settings(interval=2.0, viewers=4))


def test_a_flood_of_first_looks_gets_what_there_are_places_for() -> None:
    async def story(server: Server) -> None:
        async def ask() -> int:
            async with server.client.get(f"{server.url}/v1/view", headers=LOOKS) as answer:
                return answer.status

        asking = [asyncio.create_task(ask()) for _ in range(100)]
        while sum(each.done() for each in asking) < 92:  # noqa: ASYNC110 - the state of other tasks
            await asyncio.sleep(0.01)
        assert server.coordinator._page._waiting == 8, "some wait as the others do"
        await server.coordinator.close()  # answers those
        codes = await asyncio.gather(*asking)
        assert (codes.count(200), codes.count(429)) == (16, 84)

    with_server(story, settings(interval=3_600.0, viewers=8))


def test_a_page_that_waits_hears_of_a_lost_worker_before_its_time() -> None:
    async def story(server: Server) -> None:
        await server.worker("worker-0")
        first = await look(server)
        page = server.coordinator._page
        page._due = 0.0  # the view may be put together again
        asking = asyncio.create_task(look(server, first.have))
        while not page._waiting:  # noqa: ASYNC110 - the state of another task
            await asyncio.sleep(0.01)
        server.coordinator.call(http_api.GoneCall("worker-0", None, "killed"))
        assert "worker-0 (killed)" in str(msgspec.json.decode((await asking).job, type=ViewJob).notes)

    with_server(story, settings(interval=3_600.0))


def test_a_page_that_waits_hears_how_the_job_ended() -> None:
    async def story(server: Server) -> None:
        first = await look(server)
        asking = asyncio.create_task(look(server, first.have))
        while not server.coordinator._page._waiting:  # noqa: ASYNC110 - the state of another task
            await asyncio.sleep(0.01)
        server.state.fail("ValueError: no", "Traceback: no")
        await server.coordinator.close()
        last = await asking
        assert msgspec.json.decode(last.now, type=ViewNow).phase == "failed"
        assert last.job
        assert msgspec.json.decode(last.job, type=ViewJob).error == "ValueError: no"

    with_server(story, settings(interval=30.0))

"""A worker keeps the record of its job, whatever the coordinators at the other end say or do not say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from virtualflow.protocol.job_record import AGE, PATH
from virtualflow.protocol.settings import MAX_MESSAGE
from virtualflow.transport.link import RecordKeeper


class Coordinator:
    """Answers as it is told to, and remembers what was handed over."""

    def __init__(self) -> None:
        self.says: Callable[[], Awaitable[web.StreamResponse]] | None = None
        self.gives = b"first"
        self.asked = 0
        self.taken: list[tuple[bytes, float]] = []

    async def get(self, _: web.Request) -> web.StreamResponse:
        self.asked += 1
        return await self.says() if self.says is not None else web.Response(body=self.gives)

    async def put(self, request: web.Request) -> web.StreamResponse:
        self.taken.append((await request.read(), float(request.query[AGE])))
        return await self.says() if self.says is not None else web.Response()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():  # noqa: ASYNC110 - it looks at another task
            await asyncio.sleep(0.002)


async def serve(coordinator: Coordinator, knows_records: bool = True) -> web.AppRunner:
    app = web.Application()
    if knows_records:
        app.router.add_get(PATH, coordinator.get)
        app.router.add_put(PATH, coordinator.put)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


async def keep_until(keeper: RecordKeeper, condition: Callable[[], bool]) -> None:
    """Stay connected until something holds."""
    async with aiohttp.ClientSession() as session:
        keeping = asyncio.create_task(keeper.keep(session, 0.005))
        try:
            await until(condition)
            assert not keeping.done(), "nothing ends it but the end of the connection"
        finally:
            keeping.cancel()


def with_keeper(story: Callable[[RecordKeeper, Coordinator], Awaitable[None]], knows_records: bool = True) -> None:
    async def play() -> None:
        coordinator = Coordinator()
        runner = await serve(coordinator, knows_records)
        try:
            await story(RecordKeeper(f"http://127.0.0.1:{runner.addresses[0][1]}", 5.0), coordinator)
        finally:
            await runner.cleanup()

    asyncio.run(play())


def test_the_newest_record_is_handed_to_whoever_comes_next() -> None:
    async def story(keeper: RecordKeeper, coordinator: Coordinator) -> None:
        keeper.fetches = True
        await keep_until(keeper, lambda: coordinator.asked >= 2)
        assert coordinator.taken == [], "there was nothing to hand over"
        coordinator.gives, before = b"second", coordinator.asked
        await keep_until(keeper, lambda: coordinator.asked >= before + 2)
        await keep_until(keeper, lambda: len(coordinator.taken) == 2)
        assert [body for body, _ in coordinator.taken] == [b"first", b"second"]
        assert all(0 <= age < 30 for _, age in coordinator.taken)

    with_keeper(story)


def test_a_worker_that_is_none_of_the_first_fetches_nothing_but_hands_over_what_it_has() -> None:
    async def story(keeper: RecordKeeper, coordinator: Coordinator) -> None:
        keeper.fetches = True
        await keep_until(keeper, lambda: coordinator.asked >= 2)
        keeper.fetches, before = False, coordinator.asked
        await keep_until(keeper, lambda: len(coordinator.taken) == 1)
        assert coordinator.asked == before

    with_keeper(story)


def test_a_coordinator_that_knows_no_records_is_asked_in_vain() -> None:
    async def story(keeper: RecordKeeper, coordinator: Coordinator) -> None:
        keeper.fetches = True
        asked: list[str] = []
        tracing = aiohttp.TraceConfig()

        async def note(_: object, __: object, params: aiohttp.TraceRequestEndParams) -> None:
            asked.append(f"{params.method} {params.response.status}")

        tracing.on_request_end.append(note)
        async with aiohttp.ClientSession(trace_configs=[tracing]) as session:
            keeping = asyncio.create_task(keeper.keep(session, 0.005))
            await until(lambda: len(asked) >= 2)
            keeping.cancel()
        assert set(asked) == {"GET 404"}

    with_keeper(story, knows_records=False)


async def _fails() -> web.StreamResponse:
    return web.Response(status=500, text="no")


async def _says_too_much() -> web.StreamResponse:
    return web.Response(body=b"x" * (MAX_MESSAGE + 1))


async def _breaks_off() -> web.StreamResponse:
    raise web.HTTPException(headers={"Connection": "close"}, reason="gone")


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(_fails, id="it fails"),
        pytest.param(_says_too_much, id="it says more than a coordinator would take"),
        pytest.param(_breaks_off, id="it breaks off"),
    ],
)
def test_what_goes_wrong_costs_no_record_that_is_there(says: Callable[[], Awaitable[web.StreamResponse]]) -> None:
    async def story(keeper: RecordKeeper, coordinator: Coordinator) -> None:
        keeper.fetches = True
        await keep_until(keeper, lambda: coordinator.asked >= 2)
        coordinator.says, before = says, coordinator.asked
        await keep_until(keeper, lambda: coordinator.asked >= before + 2)
        coordinator.says = None
        taken = len(coordinator.taken)
        keeper.fetches = False
        await keep_until(keeper, lambda: len(coordinator.taken) > taken)
        assert coordinator.taken[-1][0] == b"first"

    with_keeper(story)

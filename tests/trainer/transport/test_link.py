"""A worker's link to its coordinator: what it tells, and that it comes back. Against a server on a real socket."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest
from aiohttp import WSMsgType, web
from coordinator_server import hello

from virtualflow.errors import ConfigurationError
from virtualflow.protocol import framing
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_CHANGES, MAX_MESSAGE
from virtualflow.protocol.wording import as_metrics
from virtualflow.transport.link import Link
from virtualflow.transport.settings import LinkSettings

TOKEN = "right"
PATIENCE = 60.0
"""Seconds until a wait fails."""
SETTINGS = LinkSettings(
    heartbeat=0.05, connect_timeout=PATIENCE, retry_first=0.01, retry_most=0.02, orphan_limit=PATIENCE, goodbye=0.5
)
GENERATION = m.Generation(1, 1)
HELLO = hello("worker-0")


class Coordinator:
    """Records what it is told, says what the test wants, and may be cut off or silent."""

    def __init__(self) -> None:
        self.told: list[m.FromWorker] = []
        self.connections: list[list[m.FromWorker]] = []
        """What each of them was told, but for heartbeats, which come when they come."""
        self.sockets: list[web.WebSocketResponse] = []
        self.news = threading.Condition()
        self.welcomes = True
        self.mute = False
        self.unanswered = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Coordinator:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/v1/worker", self._worker)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _worker(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401)
        if self.mute:
            with self.news:
                self.unanswered += 1
                self.news.notify_all()
            await asyncio.sleep(PATIENCE)
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE)
        await socket.prepare(request)
        heard: list[m.FromWorker] = []
        self.sockets.append(socket)
        self.connections.append(heard)
        async for frame in socket:
            if frame.type == WSMsgType.BINARY:
                message = framing.unpack_from_worker(frame.data)
                if isinstance(message, m.Hello) and self.welcomes:
                    await socket.send_bytes(m.encode(m.Welcome(False, 0, None, 1.0)))
                with self.news:
                    if not isinstance(message, m.Heartbeat):
                        heard.append(message)
                    self.told.append(message)
                    self.news.notify_all()
        return socket

    def say(self, message: m.ToWorker | bytes) -> None:
        data = message if isinstance(message, bytes) else framing.pack(message)
        asyncio.run_coroutine_threadsafe(self.sockets[-1].send_bytes(data), self._loop).result(PATIENCE)

    def cut(self) -> None:
        """Close the latest connection."""
        asyncio.run_coroutine_threadsafe(self.sockets[-1].close(), self._loop).result(PATIENCE)

    def hears(self, condition: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(condition, PATIENCE), self.told


@contextmanager
def link_to(
    url: str,
    hello: Callable[[], m.Hello] = lambda: HELLO,
    token: str = TOKEN,
    start: bool = True,
    settings: LinkSettings = SETTINGS,
) -> Iterator[Link]:
    plans: list[m.Plan] = []
    link = Link(url, token, hello, plans.append, settings)
    try:
        if start:
            link.start()
        yield link
    finally:
        link.close()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with Coordinator() as server:
        yield server


def plan(counter: int) -> m.Plan:
    return m.Plan(m.Generation(1, counter), "planned", (), (), "stop", "")


def test_a_link_says_hello_first_and_then_that_it_lives(coordinator: Coordinator) -> None:
    with link_to(coordinator.url) as link:
        assert link.welcome == m.Welcome(False, 0, None, 1.0)
        coordinator.hears(lambda: m.Heartbeat in map(type, coordinator.told))
        assert coordinator.told[0] == HELLO


def test_a_wrong_token_is_an_error_that_says_so(coordinator: Coordinator) -> None:
    with link_to(coordinator.url, token="wrong", start=False) as link, pytest.raises(ConfigurationError, match="token"):
        link.start()


def test_a_coordinator_that_is_not_there_is_an_error_in_the_end() -> None:
    with (
        link_to("http://127.0.0.1:9", start=False, settings=replace(SETTINGS, orphan_limit=0.5)) as link,
        pytest.raises(ConfigurationError, match="VIRTUALFLOW_COORDINATOR"),
    ):
        link.start()


def test_news_are_noted_and_stale_plans_are_not(coordinator: Coordinator) -> None:
    with link_to(coordinator.url) as link:
        coordinator.say(plan(5))
        coordinator.say(plan(4))
        coordinator.say(b"nonsense")
        coordinator.say(m.Hold(3))
        assert link.wait(lambda: link.hold == 3, PATIENCE)
        assert link.plan == plan(5)
        coordinator.say(m.Drain(30.0, "node goes"))
        coordinator.say(m.Keys(GENERATION, {"k": b"v"}))
        coordinator.say(m.Release())
        assert link.wait(lambda: link.released, PATIENCE)
        assert link.drain == m.Drain(30.0, "node goes")
        assert link.lookup(GENERATION, "k") == b"v"


def test_a_plan_is_not_told_back_to_the_coordinator_that_told_it(coordinator: Coordinator) -> None:
    with link_to(coordinator.url) as link:
        coordinator.say(plan(5))
        assert link.wait(lambda: link.plan == plan(5), PATIENCE)
        link.send(m.Entered(plan(5), 3, restored=False))
        short = m.EnteredTold(plan(5).generation, 3, restored=False)
        coordinator.hears(lambda: coordinator.connections[0][1:] == [short])
        coordinator.cut()
        coordinator.hears(lambda: len(coordinator.connections) == 2)
        # The next one has not told it, and may not know it.
        link.send(m.Entered(plan(5), 4, restored=False))
        coordinator.hears(lambda: coordinator.connections[1][1:] == [m.Entered(plan(5), 4, restored=False)])


def test_who_is_refused_does_not_come_back(coordinator: Coordinator) -> None:
    with link_to(coordinator.url) as link:
        coordinator.say(m.Refuse("given up"))
        assert link.wait(lambda: link.refused == "given up", PATIENCE)
        coordinator.cut()
        link._thread.join(PATIENCE)
        assert not link._thread.is_alive()
        assert len(coordinator.connections) == 1


def test_what_hello_does_not_say_is_said_again_to_the_next_coordinator(coordinator: Coordinator) -> None:
    with link_to(coordinator.url) as link:
        link.send(m.Prepared(GENERATION), keep=True)
        link.send(m.DrainRequest("SIGTERM"), keep=True)
        link.publish(GENERATION, "0", b"here I am")
        link.send(m.Ready())
        coordinator.hears(lambda: m.Ready() in coordinator.told)
        link.forget(m.Prepared)
        coordinator.cut()
        coordinator.hears(lambda: len(coordinator.connections) == 2 and len(coordinator.connections[1]) >= 3)
        assert coordinator.connections[1][:3] == [
            HELLO,
            m.DrainRequest("SIGTERM"),
            m.Publish(GENERATION, "0", b"here I am"),
        ]


def test_what_is_queued_while_hello_is_made_is_not_lost(coordinator: Coordinator) -> None:
    made: list[m.Hello] = []
    links: list[Link] = []

    def hello() -> m.Hello:
        made.append(HELLO)
        if len(made) == 2:
            links[0].send(m.Ready())  # the training thread, at the worst of moments
        return HELLO

    with link_to(coordinator.url, hello) as link:
        links.append(link)
        coordinator.cut()
        coordinator.hears(lambda: len(coordinator.connections) == 2 and m.Ready() in coordinator.connections[1])
        assert coordinator.connections[1][0] == HELLO


def test_notes_survive_a_lost_connection_and_old_progress_does_not(coordinator: Coordinator) -> None:
    link = Link(coordinator.url, TOKEN, lambda: HELLO, lambda plan: None, SETTINGS)
    link.send(m.Note("info", "written before there was a connection"))
    link.send(m.Progress(GENERATION, 3, 0, None, {}, 1.0, "training"))
    try:
        link.start()
        coordinator.hears(lambda: m.Heartbeat in map(type, coordinator.told))
        kinds = [type(message) for message in coordinator.told]
        assert kinds[:2] == [m.Hello, m.Note]
        assert m.Progress not in kinds
    finally:
        link.close()


@pytest.mark.parametrize(
    ("value", "word"), [(math.nan, "NaN"), (-math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")]
)
def test_a_loss_that_is_no_number_arrives_as_a_word(coordinator: Coordinator, value: float, word: str) -> None:
    with link_to(coordinator.url) as link:
        told = as_metrics({"loss": value, "accuracy": 0.5})
        link.send(m.Progress(GENERATION, 3, 0, None, told, 1.0, "training"))
        coordinator.hears(lambda: any(isinstance(message, m.Progress) for message in coordinator.told))
        [progress] = [message for message in coordinator.told if isinstance(message, m.Progress)]
        assert progress.metrics == {"loss": word, "accuracy": 0.5}
        assert len(coordinator.connections) == 1


def test_a_hello_with_a_long_history_fits_into_a_message(coordinator: Coordinator) -> None:
    changes = tuple(
        m.Change(m.Generation(1, number), number, 1, 2, "lost", "x" * 4_000, 1.0, 0) for number in range(MAX_CHANGES)
    )
    with link_to(coordinator.url, lambda: msgspec.structs.replace(HELLO, changes=changes)):
        coordinator.hears(lambda: bool(coordinator.told))
        hello = coordinator.told[0]
        assert isinstance(hello, m.Hello)
        assert hello.changes
        assert hello.changes[-1] == changes[-1]
        assert len(json.dumps(msgspec.to_builtins(hello))) < MAX_MESSAGE * 1.1


def test_a_coordinator_that_accepts_and_then_hangs_is_given_up_for_the_next(coordinator: Coordinator) -> None:
    coordinator.mute = True
    with link_to(coordinator.url, start=False, settings=replace(SETTINGS, connect_timeout=0.5)) as link:
        starting = threading.Thread(target=link.start)
        starting.start()
        coordinator.hears(lambda: coordinator.unanswered > 0)
        coordinator.mute = False
        starting.join(PATIENCE)
        assert link.welcome is not None


def test_all_that_was_queued_is_written_before_the_end(coordinator: Coordinator) -> None:
    with link_to(coordinator.url) as link:
        for number in range(100):
            link.send(m.Note("info", str(number)))
        assert link.flush(PATIENCE)
    coordinator.hears(lambda: m.Note("info", "99") in coordinator.told)
    notes = [message.text for message in coordinator.told if isinstance(message, m.Note)]
    assert notes == [str(number) for number in range(100)]


def test_closing_without_a_connection_is_quick() -> None:
    link = Link("http://127.0.0.1:9", TOKEN, lambda: HELLO, lambda plan: None, SETTINGS)
    threading.Thread(target=link._thread.start).start()
    began = time.monotonic()
    while not link.started:
        time.sleep(0.001)
    link.close()
    assert time.monotonic() - began < PATIENCE / 2, "it waits for no connection"
    assert not link.connected


# --- the training thread ----------------------------------------------------------------------------------------------


def test_a_heartbeat_says_what_the_training_thread_does(coordinator: Coordinator) -> None:
    with link_to(coordinator.url) as link:
        link.activity.mark("computing", 7)
        coordinator.hears(
            lambda: any(
                isinstance(told, m.Heartbeat) and told.doing is not None and told.doing.stage == "computing"
                for told in coordinator.told
            )
        )


def test_what_the_process_takes_of_its_machine_is_told_also_by_who_needs_no_heartbeat(coordinator: Coordinator) -> None:
    usage = m.Usage(0.5, 10.0, 1 << 20)
    with link_to(coordinator.url) as link:
        link.usage = lambda: usage

        def told() -> list[m.Usage | None]:
            link.send(m.Note("info", "so much is said that no heartbeat is due"))
            return [one.usage for one in coordinator.told if isinstance(one, m.Heartbeat)]

        coordinator.hears(lambda: usage in told())
        assert told().count(usage) == 1, "now and then"


def test_who_waits_for_news_of_the_coordinator_says_so(coordinator: Coordinator) -> None:
    with link_to(coordinator.url) as link:

        def told_so() -> bool:
            return any(isinstance(told, m.Heartbeat) and told.doing and told.doing.waits for told in coordinator.told)

        deadline = time.monotonic() + PATIENCE
        while not told_so():
            link.wait(told_so, 0.2)
            assert time.monotonic() < deadline


def test_a_coordinator_that_asks_is_told_where_the_threads_are(coordinator: Coordinator) -> None:
    with link_to(coordinator.url) as link:
        assert link.wait(lambda: link.connected, PATIENCE)
        coordinator.say(m.ShowStacks())
        coordinator.hears(lambda: any(isinstance(told, m.Stacks) for told in coordinator.told))
        told = next(told for told in coordinator.told if isinstance(told, m.Stacks))
        assert "thread" in told.text
        assert "test_a_coordinator_that_asks_is_told_where_the_threads_are" in told.text

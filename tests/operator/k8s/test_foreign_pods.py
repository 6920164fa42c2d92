"""Pods of others are followed through everything that an API server does, and only while somebody wants to know."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from api_clients import client_of
from fake_api import FakeApi, Fault

from virtualflow_operator.k8s.cache import Store
from virtualflow_operator.k8s.client import PODS, Forbidden, KubeApi, Object, Unavailable
from virtualflow_operator.k8s.following import ForeignPodWatch, WatchPace
from virtualflow_operator.settings import OperatorSettings, QueueSettings, SharingSettings

SETTINGS = OperatorSettings(image="operator:test", queue=QueueSettings(backoff_first=0.05, backoff_most=0.1))


def pod(name: str, phase: str = "Running", **labels: str) -> Object:
    container = {"name": "web", "image": "web:1", "resources": {"requests": {"cpu": "1"}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {"containers": [container], "nodeName": "node-a"},
        "status": {"phase": phase},
    }


class Following:
    """A watch, what it knows, and how often it said that something has changed."""

    def __init__(self, server: FakeApi, api: KubeApi, settings: OperatorSettings) -> None:
        self.server, self.store, self.wakes = server, Store(), 0
        self._news = asyncio.Event()
        self.watch = ForeignPodWatch(api, self.store, self._woken, settings)

    def _woken(self) -> None:
        self.wakes += 1
        self._news.set()

    async def knows(self, *names: str) -> None:
        def known() -> bool:
            return sorted(name for (_, name), e in self.store.foreign_pods.entries.items() if e.value.node) == sorted(
                names
            )

        while not known():
            self._news.clear()
            await self._news.wait()


@asynccontextmanager
async def following(settings: OperatorSettings = SETTINGS) -> AsyncIterator[Following]:
    async with asyncio.timeout(30), FakeApi() as server, client_of(server.url) as api:
        found = Following(server, api, settings)
        try:
            yield found
        finally:
            await found.watch.close()


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


def test_pods_come_go_and_end() -> None:
    async def story() -> None:
        async with following() as it:
            it.server.add(pod("first"))
            it.server.add(pod("ours", **{"virtualflow.dev/job": "digits"}))
            it.watch.want(True)
            await it.knows("first")
            it.server.add(pod("second"))
            await it.knows("first", "second")
            it.server.set_pod("default", "first", phase="Succeeded")
            await it.knows("second")
            it.server.remove(PODS, "default", "second", 0)
            await it.knows()

    run(story)


def test_nobody_is_followed_while_nobody_wants_to_know() -> None:
    async def story() -> None:
        async with following() as it:
            it.server.add(pod("first"))
            it.watch.want(False)
            assert not it.server.requests
            it.watch.want(True)
            it.watch.want(True)
            await it.knows("first")
            await it.server.wait_for(lambda: it.server.watches(PODS) == 1)
            it.watch.want(False)
            await it.server.wait_for(lambda: it.server.watches(PODS) == 0)
            assert it.store.foreign_pods.entries == {}

    run(story)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault(code=410, verb="watch"), Fault(code=500, verb="list"), Fault(cut=True)])
def test_what_a_broken_watch_has_missed_is_found(fault: Fault) -> None:
    async def story() -> None:
        async with following() as it:
            it.server.add(pod("first"))
            it.server.inject(dataclasses.replace(fault, times=2))
            it.watch.want(True)
            await it.knows("first")
            await it.server.wait_for(lambda: it.server.watches(PODS) == 1)
            it.server.drop_watches(PODS)
            it.server.remove(PODS, "default", "first", 0)
            it.server.add(pod("second"))
            await it.knows("second")

    run(story)


def test_who_may_not_look_says_so_and_asks_again() -> None:
    async def story() -> None:
        async with following() as it:
            it.server.add(pod("first"))
            it.server.inject(Fault(code=403, reason="Forbidden", verb="list", times=2))
            it.watch.want(True)
            await it.knows("first")

    run(story)


def test_a_watch_that_the_server_ends_is_begun_again() -> None:
    async def story() -> None:
        settings = dataclasses.replace(SETTINGS, sharing=SharingSettings(relist=1.0))
        async with following(settings) as it:
            it.watch.want(True)
            await it.server.wait_for(lambda: it.server.count("watch", "pods") >= 2, 20)
            assert it.wakes == 1, "nothing has changed since the first list"

    run(story)


@pytest.mark.parametrize(
    ("begins", "waits"),
    [
        pytest.param([0, 600, 611], [0, 0, 0], id="long ones"),
        pytest.param([0, 600, 600, 601, 610], [0, 0, 0.5, 1, 2], id="a doubled wait after each short one"),
        pytest.param([0, 0, 0, 1, 3, 7, 15, 23], [0, 0.5, 1, 2, 4, 8, 8, 8], id="up to a longest"),
        pytest.param([0, 1, 2, 14, 15], [0, 0.5, 1, 0, 0.5], id="a long one begins it anew"),
    ],
)
def test_a_watch_begins_anew_at_its_pace(begins: list[float], waits: list[float]) -> None:
    pace = WatchPace()
    assert [pace.wait(now) for now in begins] == waits


def test_the_answer_to_a_watch_may_be_a_refusal() -> None:
    async def story() -> None:
        async with FakeApi() as server, client_of(server.url) as api:
            server.inject(Fault(code=403, reason="Forbidden", verb="list"))
            with pytest.raises(Forbidden):
                await api.list(PODS, None)
            server.inject(Fault(cut=True, verb="watch", times=None))
            with pytest.raises(Unavailable):
                await anext(api.watch(PODS, None, "", "", 5))

    run(story)

"""The lease is renewed whatever the operator's event loop is busy with, and however long."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from api_clients import client_of
from fake_api import FakeApi

from virtualflow_operator.k8s.client import KubeApi
from virtualflow_operator.k8s.lease_thread import LeaseThread
from virtualflow_operator.k8s.nesting import cut
from virtualflow_operator.k8s.resources import LEASES
from virtualflow_operator.settings import LeaseSettings

SETTINGS = LeaseSettings(identity="operator-a", namespace="default", duration=4)
LIMIT = 60.0
"""Seconds after which nobody renews any more."""


@contextmanager
def api_server() -> Iterator[FakeApi]:
    """An API server with an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = FakeApi()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(LIMIT)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(LIMIT)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT)
        loop.close()


def large(_: int = 0) -> None:
    """Read what a user may store: one large object after the other."""
    json.loads(json.dumps({str(number): ["x" * 10] * 10 for number in range(4_000)}))


def deep(_: int = 0) -> None:
    """Cut what a user may nest."""
    cut(b'{"a":' * 60_000 + b"1" + b"}" * 60_000)


@pytest.mark.parametrize("read", [large, deep])
def test_reading_what_users_have_stored_does_not_keep_the_lease_from_being_renewed(read: Callable[[], None]) -> None:
    lost: list[str] = []

    async def story(server: FakeApi) -> None:
        def renewals() -> int:
            return sum(1 for request in server.requests if request.verb == "update")

        async def connect() -> KubeApi:
            return client_of(server.url)

        async with LeaseThread(connect, SETTINGS, lost.append) as election:
            await election.acquire()
            holding = asyncio.create_task(election.hold())
            await asyncio.sleep(0)
            begun, before = time.monotonic(), renewals()
            while time.monotonic() < begun + 1.5 * SETTINGS.deadline or renewals() < before + 3:
                read()  # and nothing else happens in this loop
                assert time.monotonic() < begun + LIMIT, "nobody renews the lease"
            assert election.leads()
            holding.cancel()
            await asyncio.wait({holding})
            await election.release()
            assert not election.leads()
        async with client_of(server.url) as api:
            assert (await api.get(LEASES, "default", SETTINGS.name))["spec"]["holderIdentity"] == ""

    with api_server() as server:
        asyncio.run(story(server))
    assert lost == []


def test_a_lease_that_is_anothers_is_told_to_the_process() -> None:
    lost = threading.Event()

    async def story(server: FakeApi) -> None:
        async def connect() -> KubeApi:
            return client_of(server.url)

        async with LeaseThread(connect, SETTINGS, lambda _: lost.set()) as election, client_of(server.url) as api:
            await election.acquire()
            holding = asyncio.create_task(election.hold())
            lease = await api.get(LEASES, "default", SETTINGS.name)
            lease["spec"] |= {"holderIdentity": "operator-b"}
            await api.replace(LEASES, "default", SETTINGS.name, lease)
            await holding
            assert lost.is_set()
            assert not election.leads()

    with api_server() as server:
        asyncio.run(story(server))

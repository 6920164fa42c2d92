"""The lease is renewed whatever the operator's event loop is busy with, and however long."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import PIPE

import pytest
from api_clients import client_of

from tiers import nightly
from virtualflow_operator.k8s.client import LEASES, KubeApi
from virtualflow_operator.k8s.leader_election import LeaseThread
from virtualflow_operator.k8s.nesting import cut
from virtualflow_operator.settings import LeaseSettings

LIMIT = 60.0
"""Seconds after which nobody renews any more."""


class Patient(LeaseSettings):
    """Renewals follow quickly, and a machine that stands still for seconds loses nothing."""

    deadline = call_timeout = LIMIT


SETTINGS = Patient(identity="operator-a", namespace="default", duration=4)
SERVER = """
import asyncio
from fake_api import FakeApi

async def serve():
    async with FakeApi() as server:
        print(server.url, flush=True)
        await asyncio.to_thread(input)

asyncio.run(serve())
"""
"""Ends when its input does."""


@contextmanager
def api_server() -> Iterator[str]:
    """An API server in a process of its own, as it is anywhere: what keeps this interpreter busy is not to slow it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.communicate("\n", LIMIT)


def renewed(url: str) -> str:
    """When the lease was renewed last, by its record."""
    path = f"{url}/apis/{LEASES.group}/{LEASES.version}/namespaces/default/leases/{SETTINGS.name}"
    with urllib.request.urlopen(path, timeout=LIMIT) as answer:
        return str(json.load(answer)["spec"]["renewTime"])


def large(_: int = 0) -> None:
    """Read what a user may store: one large object after the other."""
    json.loads(json.dumps({str(number): ["x" * 10] * 10 for number in range(4_000)}))


def deep(_: int = 0) -> None:
    """Cut what a user may nest."""
    cut(b'{"a":' * 60_000 + b"1" + b"}" * 60_000)


@pytest.mark.slow
@pytest.mark.parametrize("read", [large, nightly(deep, id="deep")])
def test_reading_what_users_have_stored_does_not_keep_the_lease_from_being_renewed(read: Callable[[], None]) -> None:
    lost: list[str] = []

    async def story(url: str) -> None:
        async def connect() -> KubeApi:
            return client_of(url)

        async with LeaseThread(connect, SETTINGS, lost.append) as election:
            await election.acquire()
            holding = asyncio.create_task(election.hold())
            await asyncio.sleep(0)
            begun, found = time.monotonic(), {renewed(url)}
            while len(found) <= 3:
                # Nothing else happens in this loop: also the look at the record holds it up.
                until = time.monotonic() + SETTINGS.renew_interval / 4
                while time.monotonic() < until:
                    read()
                found.add(renewed(url))
                assert time.monotonic() < begun + LIMIT, "nobody renews the lease"
            assert election.leads()
            holding.cancel()
            await asyncio.wait({holding})
            await election.release()
            assert not election.leads()
        async with client_of(url) as api:
            assert (await api.get(LEASES, "default", SETTINGS.name))["spec"]["holderIdentity"] == ""

    with api_server() as url:
        asyncio.run(story(url))
    assert lost == []


def test_a_lease_that_is_anothers_is_told_to_the_process() -> None:
    lost = threading.Event()

    async def story(url: str) -> None:
        async def connect() -> KubeApi:
            return client_of(url)

        async with LeaseThread(connect, SETTINGS, lambda _: lost.set()) as election, client_of(url) as api:
            await election.acquire()
            holding = asyncio.create_task(election.hold())
            lease = await api.get(LEASES, "default", SETTINGS.name)
            lease["spec"] |= {"holderIdentity": "operator-b"}
            await api.replace(LEASES, "default", SETTINGS.name, lease)
            await holding
            assert lost.is_set()
            assert not election.leads()

    with api_server() as url:
        asyncio.run(story(url))

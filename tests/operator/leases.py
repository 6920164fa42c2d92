"""Candidates for a lease in virtual time, on a small store with resourceVersions and faults."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from virtual_time import now

from virtualflow_operator.k8s.client import LEASES, AlreadyExists, Conflict, NotFound, Resource, Unavailable
from virtualflow_operator.k8s.leader_election import Elector
from virtualflow_operator.settings import LeaseSettings

A = LeaseSettings(namespace="system", identity="operator-a")
B = replace(A, identity="operator-b")


@dataclass
class Store:
    """The API server's leases with their resourceVersions, and its faults."""

    lease: dict[str, Any] | None = None
    versions: Any = field(default_factory=lambda: itertools.count(1))
    latency: Callable[[str], float] = lambda _: 0.01
    answer_latency: float = 0.0
    """Between a write and its answer."""
    writes: list[tuple[float, str]] = field(default_factory=list)

    def store(self, body: dict[str, Any]) -> dict[str, Any]:
        self.lease = copy.deepcopy(body)
        self.lease["metadata"] |= {"resourceVersion": str(next(self.versions)), "uid": "u"}
        self.writes.append((now(), body["spec"]["holderIdentity"]))
        return copy.deepcopy(self.lease)


class Client:
    """One candidate's way to the store; each has outages of its own."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.down = False
        self.answers_lost = False
        self.calls = 0

    async def _travel(self, method: str) -> None:
        self.calls += 1
        await asyncio.sleep(self.store.latency(method))
        if self.down:
            raise Unavailable(0, "ConnectionRefused", "The API server cannot be reached.")

    async def _arrive(self, answer: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(self.store.answer_latency)
        if self.answers_lost:
            raise Unavailable(0, "Timeout", "The API server did not answer.")
        return answer

    async def get(self, resource: Resource, namespace: str | None, name: str) -> dict[str, Any]:
        assert (resource, namespace, name) == (LEASES, A.namespace, A.name)
        await self._travel("GET")
        if self.store.lease is None:
            raise NotFound(404, "NotFound", "no such lease")
        return copy.deepcopy(self.store.lease)

    async def create(self, resource: Resource, namespace: str | None, body: dict[str, Any]) -> dict[str, Any]:
        await self._travel("POST")
        if self.store.lease is not None:
            raise AlreadyExists(409, "AlreadyExists", "the lease is there")
        return await self._arrive(self.store.store(body))

    async def replace(
        self, resource: Resource, namespace: str | None, name: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        await self._travel("PUT")
        if self.store.lease is None:
            raise NotFound(404, "NotFound", "no such lease")
        if body["metadata"].get("resourceVersion") != self.store.lease["metadata"]["resourceVersion"]:
            raise Conflict(409, "Conflict", "the lease was changed")
        return await self._arrive(self.store.store(body))


class Candidate:
    """A replica of the operator: leads when it may, and is gone when it has lost."""

    def __init__(self, store: Store, settings: LeaseSettings, shift: timedelta = timedelta()) -> None:
        self.client = Client(store)
        self.led: list[list[float]] = []
        """When it began and ceased to lead."""
        self.lost: str | None = None
        self.shift = shift
        self.elector = Elector(
            self.client,
            settings,
            on_lost=self._lose,
            clock=now,
            wall=lambda: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=now()) + self.shift,
            uniform=lambda: 0.5,
        )
        self.task = asyncio.create_task(self._live())

    def _lose(self, reason: str) -> None:
        self.lost = reason
        self.led[-1].append(now())

    async def _live(self) -> None:
        await self.elector.acquire()
        self.led.append([now()])
        await self.elector.hold()

    async def die(self) -> None:
        """End without a word."""
        self.task.cancel()
        await asyncio.wait([self.task])
        if self.led and len(self.led[-1]) == 1:
            self.led[-1].append(now())

    async def retire(self) -> None:
        """End as at SIGTERM."""
        await self.die()
        await self.elector.release()


async def first_leads(store: Store) -> tuple[Candidate, Candidate]:
    first = Candidate(store, A)
    await asyncio.sleep(1)
    second = Candidate(store, B)
    await asyncio.sleep(20)
    assert first.elector.leads()
    assert not second.elector.leads()
    return first, second


def never_two_at_once(*candidates: Candidate) -> bool:
    spans = sorted((*span, float("inf"))[:2] for candidate in candidates for span in candidate.led)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))

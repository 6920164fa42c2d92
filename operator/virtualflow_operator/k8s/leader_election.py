"""Leader election: of several operators one works, by a Lease object that all of them write with optimistic locking.

Nobody compares a time in the record with a clock of its own: a candidate sees when the record last *changed*, by its
own steady clock, and takes it over when it has not changed for the duration that its holder promised. The leader counts
from before it sent its last successful renewal, so that it gives up earlier than anybody can follow it. A process knows
its record by its identity and by the moment at which it took it, so that a second process under the same identity is
found out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, NoReturn, Self, TypeVar

from virtualflow_operator.k8s.client import LEASES, AlreadyExists, ApiError, Conflict, KubeApi, NotFound
from virtualflow_operator.settings import LeaseSettings

logger = logging.getLogger(__name__)

JITTER = 0.1
"""Waits are longer by up to this share, so that candidates do not stay in step."""
RETRY_SHARE = 0.25
"""After a failure the leader tries again in this share of the renewal interval."""
NAMESAKE_SHARE = 1.5
"""A record that bears our name but is not ours is a namesake's, unless it stands still for so many intervals."""
LEAST_WAIT = 0.05

Action = Literal["create", "take", "renew", "wait"]


@dataclass(frozen=True)
class Record:
    """The part of a Lease object that the election looks at; strings are compared, never read as times."""

    holder: str
    """Empty: free."""
    duration: float | None
    transitions: int
    acquired: str
    renewed: str

    @classmethod
    def of(cls, lease: dict[str, Any]) -> Record:
        """Read a Lease object; whatever is absent or of another type counts as empty."""
        spec = lease.get("spec")
        spec = spec if isinstance(spec, dict) else {}
        duration, transitions = spec.get("leaseDurationSeconds"), spec.get("leaseTransitions")
        return cls(
            holder=str(spec.get("holderIdentity") or ""),
            duration=float(duration) if isinstance(duration, int) and duration > 0 else None,
            transitions=transitions if isinstance(transitions, int) and transitions >= 0 else 0,
            acquired=str(spec.get("acquireTime") or ""),
            renewed=str(spec.get("renewTime") or ""),
        )


@dataclass(frozen=True)
class Observation:
    """A record and the local time at which it was first seen as it is now."""

    record: Record | None
    """``None``: there is no Lease object."""
    since: float
    """Minus infinity: there was no object when this process first looked."""


@dataclass(frozen=True)
class LeaseDecision:
    """What a candidate does next, and why."""

    action: Action
    wait: float
    """Seconds until the next look, when the action is to wait."""
    reason: str


def observe(former: Observation | None, lease: dict[str, Any] | None, now: float) -> Observation:
    """Note what was read at ``now``; a record that has not changed keeps the time of its first sight."""
    record = None if lease is None else Record.of(lease)
    if former is not None and former.record == record:
        return former
    return Observation(record, -math.inf if former is None and record is None else now)


def decide(seen: Observation, acquired: str | None, now: float, settings: LeaseSettings) -> LeaseDecision:
    """Decide what a candidate does about the record that it has just read.

    Args:
        acquired: the moment that this process wrote, or tried to write, when it last took the lease.
    """
    record = seen.record
    if record is None:
        # Somebody may have deleted the object under its holder, who finds out at its next renewal and makes it anew. At
        # the first look there is nothing to tell that from a new installation, which need not wait.
        left = seen.since + settings.duration - now
        if left <= 0:
            return LeaseDecision("create", 0.0, "there is no lease")
        return LeaseDecision("wait", min(left, settings.renew_interval), "the lease was deleted")
    if not record.holder:
        return LeaseDecision("take", 0.0, "the lease is free")
    if record.holder == settings.identity and acquired is not None and record.acquired == acquired:
        return LeaseDecision("renew", 0.0, "the lease is held by this process")
    limit = record.duration or float(settings.duration)
    if record.holder == settings.identity:
        # A container that was restarted finds its predecessor's record, and need not wait for it to run out; a
        # namesake that lives would renew it in this time.
        limit = min(limit, settings.renew_interval * NAMESAKE_SHARE) if settings.namesakes else 0.0
    left = seen.since + limit - now
    if left <= 0:
        return LeaseDecision("take", 0.0, f"{record.holder} has not renewed the lease for {limit:g} s")
    return LeaseDecision("wait", min(left, settings.renew_interval), f"the lease is held by {record.holder}")


def micro_time(moment: datetime) -> str:
    """Write a moment as the API's MicroTime: RFC 3339 with six digits, in UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def steady_clock() -> float:
    """Seconds that only go forward and count the time in which the machine slept, where the system can tell."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def leave_at_once(reason: str) -> NoReturn:
    """End this process without any clean-up: another may be the leader, and every further action could be a double."""
    logger.critical("%s; leaving at once", reason, exc_info=sys.exc_info()[0] is not None)
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(1)


def leave_the_lease(reason: str) -> NoReturn:
    leave_at_once(f"lost the lease: {reason}")


def stand_by(reason: str) -> None:
    """Another leads: there is nothing to do but to wait."""
    logger.info("standing by: %s", reason)


class Elector:
    """One candidate: :meth:`acquire`, then :meth:`hold` as long as it lasts, and :meth:`release` at shutdown.

    Args:
        api: of its own, so that no other request stands before the renewal.
        on_lost: called once with the reason when the lease could not be renewed in time or is another's;
            :func:`leave_the_lease` in the operator.
        on_wait: called with the reason each time that there is another one to wait.
        wall: for the record's times, which people read and programs only compare for being equal.
        uniform: a number from 0 to 1, for the jitter.
    """

    def __init__(
        self,
        api: KubeApi,
        settings: LeaseSettings,
        *,
        on_lost: Callable[[str], object] = leave_the_lease,
        on_wait: Callable[[str], object] = stand_by,
        clock: Callable[[], float] = steady_clock,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._api = api
        self._settings = settings
        self._on_lost = on_lost
        self._on_wait = on_wait
        self._clock = clock
        self._wall = wall
        self._uniform = uniform
        self._lease: dict[str, Any] | None = None
        self._seen: Observation | None = None
        self._acquired: str | None = None
        self._renewed = -math.inf
        self._leading = False
        self.problem: str | None = None
        """Why the lease could not be read or written at the last try; ``None`` when it could."""

    def leads(self) -> bool:
        """Whether this process holds the lease, and surely still does."""
        return self._leading and self._clock() - self._renewed < self._settings.deadline

    async def acquire(self) -> None:
        """Wait until this process holds the lease; API errors only lengthen that."""
        standing_by = ""
        while True:
            wait = self._settings.renew_interval
            sent = self._clock()
            try:
                async with asyncio.timeout(self._settings.call_timeout):
                    await self._read()
                decision = self._decide()
                if decision.action == "wait":
                    wait = decision.wait
                else:
                    sent = self._clock()
                    if decision.action != "renew":
                        self._acquired = micro_time(self._wall())
                    async with asyncio.timeout(self._settings.call_timeout):
                        await self._write(decision)
            except (Conflict, AlreadyExists) as error:
                self._note(None)
                logger.info("another candidate was quicker: %s", error)
            except (ApiError, TimeoutError) as error:
                self._note(_sentence(error))
            else:
                self._note(None)
                if decision.action != "wait":
                    self._renewed, self._leading = sent, True
                    logger.info("this process leads: %s", decision.reason)
                    return
                if decision.reason != standing_by:
                    self._on_wait(decision.reason)
                    standing_by = decision.reason
            await asyncio.sleep(max(LEAST_WAIT, self._jittered(wait)))

    async def hold(self) -> None:
        """Renew the lease until this call is cancelled; returns after ``on_lost`` when the lease is lost."""
        reason: str | None = "the renewal ended by a defect; please report it"
        try:
            reason = await self._renew_until_lost()
        except asyncio.CancelledError:
            reason = None
            raise
        finally:
            # Whatever ends the renewal, nobody may go on as a leader who does not renew.
            if reason is not None:
                self._leading = False
                self._on_lost(reason)

    async def _renew_until_lost(self) -> str:
        pause = self._renewed + self._jittered(self._settings.renew_interval) - self._clock()
        while True:
            await asyncio.sleep(max(0.0, min(pause, self._left())))
            left = self._left()
            if left <= 0:
                return f"it could not be renewed for {self._settings.deadline:g} s ({self.problem})"
            pause = self._jittered(self._settings.renew_interval)
            sent = self._clock()
            try:
                async with asyncio.timeout(min(self._settings.call_timeout, left)):
                    taken = await self._renew()
            except (ApiError, TimeoutError) as error:
                self._note(_sentence(error))
                pause = self._jittered(self._settings.renew_interval * RETRY_SHARE)
            else:
                self._note(None)
                if taken is not None:
                    return taken
                self._renewed = sent

    async def release(self) -> None:
        """Give the lease back, if this process holds it, so that another need not wait; errors are only logged.

        Call it when the work has ended and :meth:`hold` has been cancelled.
        """
        if not self._leading:
            return
        self._leading = False
        try:
            async with asyncio.timeout(self._settings.release_timeout):
                await self._read()
                if self._decide().action == "renew":
                    await self._write(LeaseDecision("renew", 0.0, "shutdown"), holder="")
                    logger.info("gave the lease back")
        except (ApiError, TimeoutError) as error:
            logger.warning("could not give the lease back, the next leader waits for it: %s", _sentence(error))

    async def _renew(self) -> str | None:
        """Write the record once more; return why it is no longer ours, if that is so."""
        if self._lease is not None:
            try:
                await self._write(LeaseDecision("renew", 0.0, "it is held"))
            except (Conflict, NotFound):
                pass  # somebody wrote it or removed it: see who
            else:
                return None
        # Also after a write whose answer was lost: it shows as a conflict with ourselves.
        await self._read()
        record = self._seen.record if self._seen is not None else None
        if record is not None and self._is_anothers(record):
            return f"the lease is held by {record.holder}"
        # Another candidate may be quicker with what is free for a moment: a conflict, and the next round sees.
        await self._write(
            self._decide() if record is not None else LeaseDecision("create", 0.0, "the lease was deleted")
        )
        return None

    def _is_anothers(self, record: Record) -> bool:
        return bool(record.holder) and not (
            record.holder == self._settings.identity and record.acquired == self._acquired
        )

    def _decide(self) -> LeaseDecision:
        assert self._seen is not None
        return decide(self._seen, self._acquired, self._clock(), self._settings)

    async def _read(self) -> None:
        try:
            self._lease = await self._api.get(LEASES, self._settings.namespace, self._settings.name)
        except NotFound:
            self._lease = None
        self._seen = observe(self._seen, self._lease, self._clock())

    async def _write(self, decision: LeaseDecision, holder: str | None = None) -> None:
        former = Record.of(self._lease or {})
        body = {
            "apiVersion": LEASES.api_version,
            "kind": "Lease",
            "metadata": (self._lease or {}).get("metadata")
            or {"name": self._settings.name, "namespace": self._settings.namespace},
            "spec": {
                "holderIdentity": self._settings.identity if holder is None else holder,
                "leaseDurationSeconds": self._settings.duration,
                "acquireTime": self._acquired,
                "renewTime": micro_time(self._wall()),
                "leaseTransitions": former.transitions + (decision.action == "take"),
            },
        }
        if decision.action == "create":
            self._lease = await self._api.create(LEASES, self._settings.namespace, body)
        else:
            self._lease = await self._api.replace(LEASES, self._settings.namespace, self._settings.name, body)
        self._seen = observe(self._seen, self._lease, self._clock())

    def _left(self) -> float:
        """Seconds in which the next renewal must have succeeded."""
        return self._renewed + self._settings.deadline - self._clock()

    def _note(self, problem: str | None) -> None:
        if problem is not None and problem != self.problem:
            logger.warning("the lease cannot be read or written: %s", problem)
        self.problem = problem

    def _jittered(self, seconds: float) -> float:
        return seconds * (1.0 + JITTER * self._uniform())


def _sentence(error: Exception) -> str:
    return str(error) or "the API server did not answer in time"


# The election in a thread of its own, with an event loop and a connection of its own.
#
# The lease says that this process is alive, not that its event loop is quick: reading ten thousand objects of one
# user, or deciding about them, may take longer than a lease lasts, and must not make another replica begin beside this
# one. Whether the loop still answers anybody is the liveness probe's question.

T = TypeVar("T")

JOIN_LIMIT = 5.0
"""Seconds that the thread gets to end; the process does not wait for it any longer."""


class LeaseThread:
    """An :class:`Elector` in a thread; use it with ``async with``. Its methods are those of the elector.

    Args:
        connect: makes the connection; awaited in the thread, and closed there.
        on_wait: likewise, as on_lost.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[KubeApi]],
        settings: LeaseSettings,
        on_lost: Callable[[str], object] = leave_the_lease,
        on_wait: Callable[[str], object] = stand_by,
    ) -> None:
        self._connect, self._settings, self._on_lost, self._on_wait = connect, settings, on_lost, on_wait
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._elector: Elector | None = None
        self._api: KubeApi | None = None

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            ConfigException: there is no saying where the API server is.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lease", daemon=True)
        self._thread.start()
        try:
            await self._there(self._open())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        loop, thread = self._loop, self._thread
        assert loop is not None, "use the lease's thread as an asynchronous context manager"
        assert thread is not None
        if self._api is not None:
            await self._there(self._api.close())
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join, JOIN_LIMIT)
        if not thread.is_alive():
            loop.close()

    @property
    def problem(self) -> str | None:
        return self._elector.problem if self._elector is not None else None

    def leads(self) -> bool:
        return self._elector is not None and self._elector.leads()

    async def acquire(self) -> None:
        await self._there(self._known().acquire())

    async def hold(self) -> None:
        await self._there(self._known().hold())

    async def release(self) -> None:
        await self._there(self._known().release())

    def _known(self) -> Elector:
        assert self._elector is not None, "use the lease's thread as an asynchronous context manager"
        return self._elector

    async def _open(self) -> None:
        self._api = await self._connect()
        self._elector = Elector(self._api, self._settings, on_lost=self._on_lost, on_wait=self._on_wait)

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """Have something done in the thread; if this is cancelled, so is that."""
        assert self._loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

"""The work-queue between the watches and the reconciler: events only name a key, the queue decides when it runs.

A key runs once at a time and never twice for the same news; one that fails waits longer every time, alone. Tenants take
turns for the places, and no single one takes them all, however many keys it has or however long they take. There is no
loop that polls: a timer stands at the earliest due time, and everything else happens when a key is added or a run ends.
All methods belong to the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from virtualflow_operator.settings import QueueSettings

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

CANCEL_LIMIT = 1.0
"""Seconds that cancelled runs get to end at shutdown."""
_EARLY = 1e-6
"""Seconds by which a timer may come early without being set again."""


class RetryLater(Exception):
    """A run cannot go on yet, through nobody's fault: the key runs again after ``after`` seconds, without back-off."""

    def __init__(self, after: float, reason: str) -> None:
        super().__init__(reason)
        self.after = after
        self.reason = reason


def _ignore(_: object) -> None:
    pass


def _itself(key: K) -> Hashable:
    return key


def _return(places: Tally[Hashable], tenant: Hashable) -> None:
    """Take one place of a tenant back."""
    places[tenant] -= 1
    if not places[tenant]:
        del places[tenant]


@dataclass(frozen=True)
class QueueHooks:
    """Who wants to know what the queue does; the metrics, usually."""

    depth: Callable[[int], None] = _ignore
    """Keys that are due and wait for a place, whenever that number changes."""
    waited: Callable[[float], None] = _ignore
    """Seconds between a key's due time and the beginning of its run."""
    ran: Callable[[float], None] = _ignore
    """Seconds that a run took, however it ended."""
    failed: Callable[[str], None] = _ignore
    """The error's class name, for every failed run."""


_NO_HOOKS = QueueHooks()


class WorkQueue(Generic[K]):
    """Keys and the times at which they are due; see the module for what is promised.

    Args:
        settings: places, back-off and limits.
        expected: errors that a run may well raise (an API server that is away): logged in one line, without a
            traceback. All others are defects and logged as such; neither kind stops the queue.
        hooks: told what happens.
        describe: how a key reads in the log.
        tenant_of: whose a key is; without it, each is a tenant of its own, and the first that is due goes first.
    """

    def __init__(
        self,
        settings: QueueSettings,
        *,
        expected: tuple[type[Exception], ...] = (),
        hooks: QueueHooks = _NO_HOOKS,
        describe: Callable[[K], str] = str,
        tenant_of: Callable[[K], Hashable] = _itself,
    ) -> None:
        self._settings = settings
        self._expected = expected
        self._hooks = hooks
        self._describe = describe
        self._tenant_of = tenant_of
        self._order = itertools.count()
        self._later: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []  # holds stale entries; _later says which ones count
        self._ready: TenantTurns[K] = TenantTurns(tenant_of)
        self._moved_at = 0.0  # when a place was last taken
        self._running: dict[K, asyncio.Task[float | None]] = {}
        self._again: dict[K, float] = {}  # added while running
        self._forgotten: set[K] = set()  # while running
        self._slow: set[K] = set()
        self._places: Tally[Hashable] = Tally()  # that each tenant has, without the slow ones
        self._lent: Tally[Hashable] = Tally()
        self._failures: dict[K, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._process: Callable[[K], Awaitable[float | None]] | None = None
        self._stopping = asyncio.Event()
        self._depth = 0

    def add(self, key: K, after: float = 0.0) -> None:
        """Have ``key`` run in ``after`` seconds, or earlier if it is due earlier already.

        One run answers for everything that was added before it began: a later due time of the same key is dropped,
        and the run says itself when it wants to be repeated. A key that runs just now runs again afterwards.
        """
        due = self._now() + max(after, 0.0)
        if key in self._running:
            self._again[key] = min(due, self._again.get(key, due))
        else:
            self._schedule(key, due)
        self._pump()

    def forget(self, key: K) -> None:
        """Drop a key that is gone: its back-off, its due time, and what its present run asks for when it ends.

        What is added while that run goes on is kept: it may be a successor of the same name.
        """
        self._failures.pop(key, None)
        if key in self._running:
            self._forgotten.add(key)
        else:
            self._later.pop(key, None)
            self._ready.drop(key)
            self._pump()

    def failures(self, key: K) -> int:
        """How many runs of ``key`` have failed in a row."""
        return self._failures.get(key, 0)

    def stalled(self) -> float:
        """For how many seconds keys have waited and none has got a place; 0 when none waits.

        Those of a tenant that has all the places it may have do not count: that is its own doing.
        """
        oldest = self._ready.oldest(self._may_begin)
        return 0.0 if oldest is None else max(0.0, self._now() - max(oldest, self._moved_at))

    def __len__(self) -> int:
        return len(self._later) + len(self._ready) + len(self._running)

    def stop(self) -> None:
        """Begin no more runs; :meth:`run` returns when those under way have ended or their time is up."""
        self._stopping.set()

    async def run(self, process: Callable[[K], Awaitable[float | None]]) -> None:
        """Run ``process`` for every key that is due, until :meth:`stop`; it returns the seconds until the next run.

        If this call is cancelled, the runs under way are cancelled too.
        """
        if self._process is not None:
            raise RuntimeError("the queue runs already")
        self._process = process
        limit = 0.0
        try:
            self._pump()
            await self._stopping.wait()
            limit = self._settings.stop_limit
        finally:
            self._stopping.set()
            self._disarm()
            await self._drain(limit)
            self._process = None

    async def _drain(self, limit: float) -> None:
        if limit > 0 and self._running:
            await asyncio.wait(self._running.values(), timeout=limit)
        rest = set(self._running.values())
        for task in rest:
            task.cancel()
        if rest:
            logger.warning("%d runs did not end in time and were cancelled", len(rest))
            await asyncio.wait(rest, timeout=CANCEL_LIMIT)

    def _schedule(self, key: K, due: float) -> None:
        """Let a key that does not run be due at ``due``, unless it is due earlier."""
        if key in self._ready or (key in self._later and self._later[key][0] <= due):
            return
        entry = (due, next(self._order))
        self._later[key] = entry
        heapq.heappush(self._heap, (*entry, key))
        if len(self._heap) > 2 * len(self._later) + 64:
            self._heap = [(*entry, key) for key, entry in self._later.items()]
            heapq.heapify(self._heap)

    def _pump(self) -> None:
        """Begin what is due as far as there are places, and set the timer to what comes next."""
        now = self._now()
        while (earliest := self._earliest()) is not None and earliest <= now + _EARLY:
            due, _, key = heapq.heappop(self._heap)
            del self._later[key]
            self._ready.put(key, due)
        while self._process is not None and not self._stopping.is_set() and self._ready:
            if len(self._running) - len(self._slow) >= self._settings.concurrency:
                break
            chosen = self._ready.take(self._may_begin)
            if chosen is None:
                break
            self._begin(*chosen, now)
        self._disarm()
        if self._process is not None and not self._stopping.is_set() and (earliest := self._earliest()) is not None:
            self._timer = asyncio.get_running_loop().call_at(earliest, self._pump)
        if len(self._ready) != self._depth:
            self._depth = len(self._ready)
            self._hooks.depth(self._depth)

    def _may_begin(self, tenant: Hashable) -> bool:
        """Whether a tenant may have a further place: some are kept for the others."""
        return self._places[tenant] < max(1, self._settings.concurrency - self._settings.reserved)

    def _begin(self, key: K, due: float, now: float) -> None:
        self._moved_at = now
        self._places[self._tenant_of(key)] += 1
        task = asyncio.get_running_loop().create_task(self._run_once(key), name=f"run {self._describe(key)}")
        self._running[key] = task
        lender = asyncio.get_running_loop().call_later(self._settings.slow_after, self._lend, key)
        task.add_done_callback(partial(self._finished, key, now, lender))
        self._hooks.waited(max(0.0, now - due))

    async def _run_once(self, key: K) -> float | None:
        assert self._process is not None
        async with asyncio.timeout(self._settings.run_limit):
            return await self._process(key)

    def _lend(self, key: K) -> None:
        """A run is slow: let another key have its place."""
        tenant, most = self._tenant_of(key), self._settings.slow_most
        if len(self._slow) < most and self._lent[tenant] < max(1, most // 2):
            self._slow.add(key)
            self._lent[tenant] += 1
            _return(self._places, tenant)
            self._pump()

    def _finished(self, key: K, begun: float, lender: asyncio.TimerHandle, task: asyncio.Task[float | None]) -> None:
        """A run has ended: see when the key is to run again. Its error is read here, so that none needs catching."""
        lender.cancel()
        del self._running[key]
        tenant = self._tenant_of(key)
        _return(self._lent if key in self._slow else self._places, tenant)
        self._slow.discard(key)
        forgotten = key in self._forgotten
        self._forgotten.discard(key)
        added = self._again.pop(key, None)
        error = None if task.cancelled() else task.exception()
        now = self._now()
        wait: float | None
        if isinstance(error, RetryLater):
            wait = max(error.after, 0.0)
        elif error is not None or task.cancelled():
            wait = self._backoff(key)
        else:
            wait = task.result()
            self._failures.pop(key, None)
        if forgotten:
            self._failures.pop(key, None)
        elif wait is not None:
            self._schedule(key, now + max(wait, 0.0))
        if added is not None:
            self._schedule(key, added)
        self._pump()
        self._hooks.ran(now - begun)
        self._report(key, task.cancelled(), error, wait)

    def _backoff(self, key: K) -> float:
        """Count a failure and return the wait that follows it, in seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        # 2.0 ** 1024 overflows, and a key may fail for weeks.
        return min(self._settings.backoff_first * 2.0 ** min(failures - 1, 64), self._settings.backoff_most)

    def _report(self, key: K, cancelled: bool, error: BaseException | None, wait: float | None) -> None:
        name, failures = self._describe(key), self._failures.get(key, 0)
        if isinstance(error, RetryLater):
            logger.info("%s waits %.3g s: %s", name, error.after, error.reason)
        elif error is not None and isinstance(error, self._expected):
            self._hooks.failed(type(error).__name__)
            logger.warning("%s failed (%d in a row), next try in %.3g s: %s", name, failures, wait, error)
        elif error is not None:
            self._hooks.failed(type(error).__name__)
            logger.error(
                "%s failed by a defect (%d in a row), next try in %.3g s; please report it",
                name,
                failures,
                wait,
                exc_info=error,
            )
        elif cancelled and not self._stopping.is_set():
            self._hooks.failed("CancelledError")
            logger.warning("%s was cancelled, next try in %.3g s", name, wait)

    def _earliest(self) -> float | None:
        """The earliest due time to come; stale entries before it are dropped."""
        while self._heap:
            due, order, key = self._heap[0]
            if self._later.get(key) == (due, order):
                return due
            heapq.heappop(self._heap)
        return None

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class TenantTurns(Generic[K]):
    """Whose turn it is: keys that wait for a place, by tenant, so that one with ten thousand of them delays no other.

    Tenants take turns, one key each; within a tenant the key that became due first goes first.
    """

    def __init__(self, tenant_of: Callable[[K], Hashable]) -> None:
        self._tenant_of = tenant_of
        self._tenants: dict[Hashable, dict[K, float]] = {}  # the next one first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: K) -> bool:
        return key in self._tenants.get(self._tenant_of(key), ())

    def put(self, key: K, due: float) -> None:
        """Have a key wait that does not wait yet."""
        self._tenants.setdefault(self._tenant_of(key), {})[key] = due
        self._count += 1

    def drop(self, key: K) -> None:
        """Let a key wait no longer, if it does."""
        tenant = self._tenant_of(key)
        waiting = self._tenants.get(tenant, {})
        if waiting.pop(key, None) is not None:
            self._count -= 1
            if not waiting:
                del self._tenants[tenant]

    def take(self, may: Callable[[Hashable], bool]) -> tuple[K, float] | None:
        """The next key of the next tenant that may have a place, with its due time; ``None``: there is none."""
        tenant = next((tenant for tenant in self._tenants if may(tenant)), None)
        if tenant is None:
            return None
        waiting = self._tenants.pop(tenant)
        key = next(iter(waiting))
        due = waiting.pop(key)
        self._count -= 1
        if waiting:
            self._tenants[tenant] = waiting  # behind all others
        return key, due

    def oldest(self, may: Callable[[Hashable], bool]) -> float | None:
        """The earliest due time of those that wait, of the tenants that may have a place."""
        firsts = (next(iter(waiting.values())) for tenant, waiting in self._tenants.items() if may(tenant))
        return min(firsts, default=None)

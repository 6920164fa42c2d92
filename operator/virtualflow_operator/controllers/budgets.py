"""What one job, one namespace and all together may cost the operator. Time comes in; nothing here looks at a clock.

A job that floods slows itself down (a token bucket). Where the sum of many is too much, namespaces share evenly: in
what is held in memory (:class:`Holdings`) and in what is read and decided (:class:`Turns`).
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections import deque

from virtualflow_operator.k8s import Key, TokenBucket


class Holdings:
    """Bytes that jobs hold of what all share."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held: dict[str, dict[Key, int]] = {}
        self._sums: Tally[str] = Tally()

    def hold(self, key: Key, size: int) -> list[Key]:
        """Let a job hold so much from now on; who holds nothing any more, so that all fits.

        It is the job with most, of the namespace with most, again and again.
        """
        self._set(key, size)
        losers = []
        while self._sums.total() > self._total:
            held = self._held[max(self._sums, key=self._sums.__getitem__)]
            losers.append(max(held, key=held.__getitem__))
            self._set(losers[-1], 0)
        return losers

    def _set(self, key: Key, size: int) -> None:
        namespace = key[0]
        held = self._held.setdefault(namespace, {})
        self._sums[namespace] += size - held.pop(key, 0)
        if size:
            held[key] = size
        if not held:
            del self._held[namespace], self._sums[namespace]


class Turns:
    """Units of work a second, shared evenly by the namespaces that want some; each serves its jobs as they come.

    Args:
        rate: units a second.
        burst: units that may be spent at once after a rest.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._bucket = TokenBucket(burst, rate)
        self._waiting: dict[str, deque[tuple[float, asyncio.Future[None]]]] = {}
        self._had: dict[str, float] = {}
        """Units that each namespace has had."""
        self._served = 0.0
        """Those of the one that was served last, before it was; a namespace that comes anew begins with as many."""
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, key: Key, units: float) -> None:
        """Wait until it is this job's turn to use so many units."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        namespace = key[0]
        if namespace not in self._waiting:
            self._waiting[namespace] = deque()
            self._had[namespace] = max(self._had.get(namespace, 0.0), self._served)
        self._waiting[namespace].append((units, turn))
        if self._timer is None:
            self._serve()
        await turn

    def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._waiting:
            wait = self._bucket.wait(loop.time())
            if wait > 0:
                self._timer = loop.call_later(wait, self._serve)
                return
            namespace = min(self._waiting, key=self._had.__getitem__)
            units, turn = self._waiting[namespace].popleft()
            if not self._waiting[namespace]:
                del self._waiting[namespace]
            if turn.done():
                continue  # it waits no longer
            self._served = self._had[namespace]
            self._had[namespace] += units
            self._bucket.spend(loop.time(), units)
            turn.set_result(None)
        # Who has had no more than the one served last begins like one that is new.
        self._had = {name: had for name, had in self._had.items() if had > self._served}

"""An event loop whose clock jumps to the next timer when nothing else is to be done: hours pass in a blink."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that never waits; its time begins at 1000 s."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "everything waits and no timer is set: this test would hang"
            self._loop.now += max(timeout, 0.0)
        return events


def run(main: Coroutine[Any, Any, T], limit: float = 100_000.0) -> T:
    """Run ``main`` in virtual time; fails when it takes longer than ``limit`` virtual seconds."""

    async def bounded() -> T:
        async with asyncio.timeout(limit):
            return await main

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(bounded())


def now() -> float:
    """The present virtual time in seconds."""
    return asyncio.get_running_loop().time()

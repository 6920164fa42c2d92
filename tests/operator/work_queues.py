"""A work-queue that runs while a test lasts, and keys that are remembered when they begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from virtual_time import now

from virtualflow_operator.controllers.workqueue import WorkQueue
from virtualflow_operator.settings import QueueSettings

SETTINGS = QueueSettings(concurrency=2, backoff_first=0.5, backoff_most=60.0, stop_limit=10.0)


class Away(Exception):
    """What a run may well raise."""


@asynccontextmanager
async def running(queue: WorkQueue[str], process: Callable[[str], Awaitable[float | None]]) -> AsyncIterator[None]:
    task = asyncio.create_task(queue.run(process))
    try:
        yield
    finally:
        queue.stop()
        await task


class Diary:
    """Processes keys and remembers when each began."""

    def __init__(self, takes: float = 0.0, answer: float | None = None) -> None:
        self.begun: list[tuple[str, float]] = []
        self.takes = takes
        self.answer = answer
        self.errors: dict[str, list[BaseException]] = {}

    async def __call__(self, key: str) -> float | None:
        self.begun.append((key, now()))
        await asyncio.sleep(self.takes)
        if self.errors.get(key):
            raise self.errors[key].pop(0)
        return self.answer

    def times(self, key: str) -> list[float]:
        return [at for other, at in self.begun if other == key]

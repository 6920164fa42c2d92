"""The same client for programs with an event loop: each request is made in a thread, and nothing blocks the loop.

Who stops waiting leaves a request to itself, which ends within :data:`virtualflow.cluster.api.REQUEST_SECONDS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from virtualflow.cluster.client import Client
from virtualflow.cluster.job import Job, deadline_after
from virtualflow.cluster.logs import Line


class AsyncClient:
    """The jobs of one namespace.

    Args:
        options: as of :class:`virtualflow.cluster.Client`.

    Raises:
        ConfigurationError: there is no cluster to talk to.
    """

    def __init__(self, **options: Any) -> None:
        self._client = Client(**options)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give the connections back."""
        await asyncio.to_thread(self._client.close)

    async def submit(self, train: Any, **options: Any) -> AsyncJob:
        """As :meth:`virtualflow.cluster.Client.submit`."""
        return AsyncJob(await asyncio.to_thread(self._client.submit, train, **options))

    async def job(self, name: str) -> AsyncJob:
        """The job of that name.

        Raises:
            ConfigurationError: there is none, or it may not be read.
        """
        return AsyncJob(await asyncio.to_thread(self._client.job, name))

    async def jobs(self, *, everywhere: bool = False) -> list[AsyncJob]:
        """All jobs, by name; ``everywhere``: of all namespaces."""
        return [AsyncJob(job) for job in await asyncio.to_thread(self._client.jobs, everywhere=everywhere)]


class AsyncJob:
    """One job.

    Args:
        seen: as it was last seen: its name, status and phase.
    """

    def __init__(self, seen: Job) -> None:
        self.seen = seen

    async def refresh(self) -> AsyncJob:
        """Look again; this object."""
        await asyncio.to_thread(self.seen.refresh)
        return self

    async def scale(self, workers: int) -> None:
        """Ask for that many workers."""
        await asyncio.to_thread(self.seen.scale, workers)

    async def suspend(self) -> None:
        """Stop behind a step, with a checkpoint, and give all pods back."""
        await asyncio.to_thread(self.seen.suspend)

    async def resume(self) -> None:
        """Go on after a suspension."""
        await asyncio.to_thread(self.seen.resume)

    async def drain(self, worker: str) -> None:
        """Let a worker hand over and leave."""
        await asyncio.to_thread(self.seen.drain, worker)

    async def delete(self) -> None:
        """Delete it, with all that belongs to it."""
        await asyncio.to_thread(self.seen.delete)

    async def workers(self) -> list[str]:
        """Names of the worker pods that are there."""
        return await asyncio.to_thread(self.seen.workers)

    async def wait(self, seconds: float | None = None) -> AsyncJob:
        """Wait until it is over; this object.

        Raises:
            TimeoutError: it is not over after so many seconds.
            VirtualFlowError: it has failed, or was deleted.
        """
        deadline = deadline_after(seconds)
        while not await asyncio.to_thread(self.seen.wait_a_while, deadline):
            pass
        return self

    async def logs(self, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[Line]:
        """The lines of all workers, by time; see :meth:`virtualflow.cluster.job.Job.logs`."""
        lines = self.seen.logs(follow=follow, tail=tail)
        while (line := await asyncio.to_thread(next, lines, None)) is not None:
            yield line

"""The election in a thread of its own, with an event loop and a connection of its own.

The lease says that this process is alive, not that its event loop is quick: reading ten thousand objects of one user,
or deciding about them, may take longer than a lease lasts, and must not make another replica begin beside this one.
Whether the loop still answers anybody is the liveness probe's question.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar

from virtualflow_operator.k8s.client import KubeApi
from virtualflow_operator.k8s.leader_election import Elector, leave_the_lease
from virtualflow_operator.settings import LeaseSettings

T = TypeVar("T")

JOIN_LIMIT = 5.0
"""Seconds that the thread gets to end; the process does not wait for it any longer."""


class LeaseThread:
    """An :class:`Elector` in a thread; use it with ``async with``. Its methods are those of the elector.

    Args:
        connect: makes the connection; awaited in the thread, and closed there.
        settings: names and durations.
        on_lost: as the elector's; called in the thread.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[KubeApi]],
        settings: LeaseSettings,
        on_lost: Callable[[str], object] = leave_the_lease,
    ) -> None:
        self._connect, self._settings, self._on_lost = connect, settings, on_lost
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
        """Why the lease could not be read or written at the last try; ``None`` when it could."""
        return self._elector.problem if self._elector is not None else None

    def leads(self) -> bool:
        """Whether this process holds the lease, and surely still does."""
        return self._elector is not None and self._elector.leads()

    async def acquire(self) -> None:
        """Wait until this process holds the lease."""
        await self._there(self._known().acquire())

    async def hold(self) -> None:
        """Renew the lease until this call is cancelled."""
        await self._there(self._known().hold())

    async def release(self) -> None:
        """Give the lease back, if this process holds it."""
        await self._there(self._known().release())

    def _known(self) -> Elector:
        assert self._elector is not None, "use the lease's thread as an asynchronous context manager"
        return self._elector

    async def _open(self) -> None:
        self._api = await self._connect()
        self._elector = Elector(self._api, self._settings, on_lost=self._on_lost)

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """Have something done in the thread; if this is cancelled, so is that."""
        assert self._loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

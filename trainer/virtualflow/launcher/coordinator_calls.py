"""Calls of the coordinator's API in the background, each made once in each of its lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from virtualflow.protocol.http_api import Call, Status
from virtualflow.protocol.http_client import CallRefused, CoordinatorClient, CoordinatorUnreachable


class CoordinatorCalls:
    """Makes calls without waiting for their answers.

    Args:
        refused: told the sentence of a call that was refused.
        answered: told that some call has come to an end.
    """

    client: CoordinatorClient
    """Of the coordinator; set once its address is known."""

    def __init__(self, refused: Callable[[str], None], answered: Callable[[], None]) -> None:
        self._refused, self._answered = refused, answered
        self._made: dict[object, tuple[int, Call]] = {}
        self._under_way: dict[object, asyncio.Task[None]] = {}

    def ensure(self, key: object, call: Call, status: Status | None) -> None:
        """Make a call, unless the coordinator whose status this is was told the same under this key."""
        if status is None or key in self._under_way:
            return
        content = (status.incarnation, call)
        if self._made.get(key) != content:
            self._made[key] = content
            self.make(key, call)

    def make(self, key: object, call: Call, patience: float | None = None) -> None:
        """Make a call now, unless one of that key is under way."""
        if key in self._under_way:
            return
        task = asyncio.create_task(self._send(key, call, patience))
        self._under_way[key] = task
        task.add_done_callback(lambda _: self._ended(key))

    def close(self) -> None:
        """Cancel what is under way."""
        for task in list(self._under_way.values()):
            task.cancel()

    def _ended(self, key: object) -> None:
        self._under_way.pop(key, None)
        self._answered()

    async def _send(self, key: object, call: Call, patience: float | None) -> None:
        try:
            await self.client.send(call, patience)
        except CallRefused as error:
            # A worker may have left by itself meanwhile (404): what was to be told is true already.
            if error.code != 404:
                self._refused(str(error))
        except CoordinatorUnreachable:
            self._made.pop(key, None)

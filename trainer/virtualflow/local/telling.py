"""Tells the coordinator things in the background, once for each of its lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from virtualflow.calls import Status
from virtualflow.signals import Call, CallRefused, CoordinatorClient, CoordinatorUnreachable


class Teller:
    """Makes calls without waiting for their answers.

    Args:
        client: of the coordinator.
        refused: told the sentence of a call that was refused.
        answered: told that some call has come to an end.
    """

    def __init__(self, client: CoordinatorClient, refused: Callable[[str], None], answered: Callable[[], None]) -> None:
        self._client, self._refused, self._answered = client, refused, answered
        self._told: dict[object, tuple[int, Call]] = {}
        self._posts: dict[object, asyncio.Task[None]] = {}

    def tell(self, key: object, call: Call, status: Status | None) -> None:
        """Make a call, unless the coordinator whose status this is was told the same under this key."""
        if status is None or key in self._posts:
            return
        content = (status.incarnation, call)
        if self._told.get(key) != content:
            self._told[key] = content
            self.post(key, call, None)

    def post(self, key: object, call: Call, patience: float | None) -> None:
        """Make a call now, unless one of that key is under way."""
        if key in self._posts:
            return
        task = asyncio.create_task(self._send(key, call, patience))
        self._posts[key] = task
        task.add_done_callback(lambda _: self._posted(key))

    def close(self) -> None:
        """Give up what is under way."""
        for task in list(self._posts.values()):
            task.cancel()

    def _posted(self, key: object) -> None:
        self._posts.pop(key, None)
        self._answered()

    async def _send(self, key: object, call: Call, patience: float | None) -> None:
        try:
            await self._client.send(call, patience)
        except CallRefused as error:
            # A worker may have left by itself meanwhile (404): what was to be told is true already.
            if error.code != 404:
                self._refused(str(error))
        except CoordinatorUnreachable:
            self._told.pop(key, None)

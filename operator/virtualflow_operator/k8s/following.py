"""A list and a watch of the operator's own, for kinds that it follows only while somebody wants to know.

kopf keeps one watch a kind, from the start to the end, and complains of kinds that are not there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from virtualflow_operator.api import Object
from virtualflow_operator.k8s.cache import Key
from virtualflow_operator.k8s.client import KubeApi
from virtualflow_operator.k8s.errors import ApiError, Forbidden, NotFound
from virtualflow_operator.k8s.leader_election import leave_at_once
from virtualflow_operator.k8s.resources import Resource
from virtualflow_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)


class Following(ABC):
    """Keeps a part of the store as the cluster is, as long as somebody wants to know."""

    what: str
    """The objects, in words."""
    without: str
    """What is the matter when they may not be looked at, in words."""
    resource: Resource
    labels: str
    fields: str = ""
    """Selectors of those that count."""

    def __init__(self, api: KubeApi, settings: OperatorSettings, relist: float) -> None:
        self._api, self._settings, self._relist = api, settings, relist
        self._tasks: list[asyncio.Task[None]] = []
        self._unlisted: set[str | None] = set()
        """Namespaces of which no list has come yet; ``None`` stands for all."""

    @abstractmethod
    def take(self, body: Object) -> None:
        """An object was made or changed."""

    @abstractmethod
    def lose(self, namespace: str, name: str, uid: str) -> None:
        """An object is gone, or counts no longer."""

    @abstractmethod
    def replace(self, bodies: Collection[Object], begun: float, within: Callable[[Key], bool]) -> None:
        """These are all that there are."""

    @abstractmethod
    def note_known(self) -> None:
        """All have been listed since they were wanted."""

    @abstractmethod
    def note_barred(self, error: ApiError) -> None:
        """They may not be looked at, or there is no such kind."""

    @abstractmethod
    def forget(self) -> None:
        """They are not followed any more."""

    def want(self, wanted: bool) -> None:
        """Begin or end to follow them."""
        if wanted and not self._tasks:
            namespaces: tuple[str | None, ...] = self._settings.namespaces or (None,)
            self._unlisted = set(namespaces)
            for namespace in namespaces:
                name = f"{self.what} in {namespace or 'all namespaces'}"
                self._tasks.append(asyncio.create_task(self._follow(namespace), name=name))
                self._tasks[-1].add_done_callback(_report)
        elif not wanted and self._tasks:
            for task in self._tasks:
                task.cancel()
            self._tasks = []
            self.forget()

    async def close(self) -> None:
        """Follow no more."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, namespace: str | None) -> None:
        delay = self._settings.queue.backoff_first
        while True:
            try:
                await self._list(namespace)
                delay = self._settings.queue.backoff_first
                async for kind, body in self._api.watch(
                    self.resource, namespace, self.labels, self.fields, self._relist
                ):
                    metadata = body["metadata"]
                    if kind == "DELETED":  # also one that the selectors do not select any more
                        self.lose(metadata.get("namespace") or "", metadata["name"], metadata.get("uid") or "")
                    else:
                        self.take(body)
                await asyncio.sleep(delay)  # a server that ends each watch at once is not asked all the time
            except (Forbidden, NotFound) as error:
                logger.warning("%s may not be looked at, so %s: %s", self.what, self.without, error)
                self.note_barred(error)
                self._note_listed(namespace)
                delay = self._settings.queue.backoff_most
                await asyncio.sleep(delay)
            except ApiError as error:
                logger.warning("%s are not followed, next try in %.1f s: %s", self.what, delay, error)
                await asyncio.sleep(delay)
                delay = min(2 * delay, self._settings.queue.backoff_most)

    async def _list(self, namespace: str | None) -> None:
        begun = time.monotonic()
        bodies = await self._api.list(self.resource, namespace, self.labels, field_selector=self.fields)
        self.replace(bodies, begun, lambda key: namespace is None or key[0] == namespace)
        self._note_listed(namespace)

    def _note_listed(self, namespace: str | None) -> None:
        """What there is to know of a namespace is known; others wait for that of all."""
        self._unlisted.discard(namespace)
        if not self._unlisted:
            self.note_known()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("%s are not followed any more; please report it", task.get_name(), exc_info=task.exception())
        leave_at_once(f"the watch of {task.get_name()} ended")

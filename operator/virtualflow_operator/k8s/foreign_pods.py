"""Pods of others: what they request on the nodes of queues, followed by a watch of their own.

kopf keeps one watch a kind, and that one sees the jobs' own pods only, so that a cluster with many thousands of others
costs nothing. This one runs while there is a queue that counts a resource.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from virtualflow_operator.constants import LABEL_JOB
from virtualflow_operator.k8s.cache import Store
from virtualflow_operator.k8s.client import KubeApi
from virtualflow_operator.k8s.errors import ApiError, Forbidden, NotFound
from virtualflow_operator.k8s.leader_election import leave_at_once
from virtualflow_operator.k8s.resources import PODS
from virtualflow_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

NOT_OURS = f"!{LABEL_JOB}"
TAKING = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of pods that take something of a node."""


class ForeignPodWatch:
    """Keeps ``store.foreign_pods`` as the cluster is, as long as somebody wants to know.

    Args:
        api: the API server.
        store: where they go.
        wake: called when what others take has changed, or is known for the first time.
        settings: the operator's.
    """

    def __init__(self, api: KubeApi, store: Store, wake: Callable[[], None], settings: OperatorSettings) -> None:
        self._api, self._store, self._wake, self._settings = api, store, wake, settings
        self._tasks: list[asyncio.Task[None]] = []
        self._unlisted: set[str | None] = set()
        """Namespaces of which no list has come yet; ``None`` stands for all."""

    def want(self, wanted: bool) -> None:
        """Begin or end to follow them."""
        if wanted and not self._tasks:
            namespaces: tuple[str | None, ...] = self._settings.namespaces or (None,)
            self._unlisted = set(namespaces)
            for namespace in namespaces:
                name = f"pods of others in {namespace or 'all namespaces'}"
                self._tasks.append(asyncio.create_task(self._follow(namespace), name=name))
                self._tasks[-1].add_done_callback(_report)
        elif not wanted and self._tasks:
            for task in self._tasks:
                task.cancel()
            self._tasks = []
            self._store.foreign_pods_known = False
            self._store.foreign_pods.entries.clear()

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
                watch = self._api.watch(PODS, namespace, NOT_OURS, TAKING, self._settings.sharing.relist)
                async for kind, body in watch:
                    metadata = body["metadata"]
                    place = (metadata.get("namespace") or "", metadata["name"])
                    if kind == "DELETED":  # also one that the selector does not select any more: it has ended
                        changed = self._store.foreign_pods.remove(*place, metadata.get("uid") or "")
                    else:
                        before, after = self._store.foreign_pods.put(body)
                        changed = before != after
                    if changed:
                        self._wake()
                await asyncio.sleep(delay)  # a server that ends each watch at once is not asked all the time
            except (Forbidden, NotFound) as error:
                logger.warning("pods of others may not be looked at, so queues do not count them: %s", error)
                self._note_listed(namespace)
                delay = self._settings.queue.backoff_most
                await asyncio.sleep(delay)
            except ApiError as error:
                logger.warning("pods of others are not followed, next try in %.1f s: %s", delay, error)
                await asyncio.sleep(delay)
                delay = min(2 * delay, self._settings.queue.backoff_most)

    async def _list(self, namespace: str | None) -> None:
        begun = time.monotonic()
        bodies = await self._api.list(PODS, namespace, NOT_OURS, field_selector=TAKING)
        changed = self._store.foreign_pods.replace(bodies, begun, lambda key: namespace is None or key[0] == namespace)
        if changed:
            self._wake()
        self._note_listed(namespace)

    def _note_listed(self, namespace: str | None) -> None:
        """What there is to know of a namespace is known; queues wait for that of all."""
        self._unlisted.discard(namespace)
        if not self._unlisted and not self._store.foreign_pods_known:
            self._store.foreign_pods_known = True
            self._wake()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("%s are not followed any more; please report it", task.get_name(), exc_info=task.exception())
        leave_at_once("the watch of other pods ended")

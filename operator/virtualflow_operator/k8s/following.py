"""A list and a watch of the operator's own, for kinds that it follows only while somebody wants to know.

kopf keeps one watch a kind, from the start to the end, and complains of kinds that are not there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from virtualflow_operator.api import Object, Workload, read_workload
from virtualflow_operator.constants import LABEL_JOB
from virtualflow_operator.k8s.cache import Key, ObjectCache, Store, key_of
from virtualflow_operator.k8s.client import KubeApi
from virtualflow_operator.k8s.errors import ApiError, Forbidden, NotFound
from virtualflow_operator.k8s.leader_election import leave_at_once
from virtualflow_operator.k8s.relist import OURS
from virtualflow_operator.k8s.resources import PODS, WORKLOADS, Resource
from virtualflow_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)


_SHORT = 10.0
"""Seconds that a watch lasts at least if it begins anew at once."""
_WAITS = 0.5, 8.0
"""The wait after the first shorter one, and the longest: a bookmark, a minute later, is still in time for kopf."""


class WatchPace:
    """How soon a watch begins anew: at once, but after ever longer waits while each ends soon after it has begun.

    A server whose history is short (410), or a proxy that breaks every stream, would be asked all the time.
    """

    def __init__(self) -> None:
        self._begun, self._wait = -math.inf, 0.0

    def wait(self, now: float) -> float:
        """Seconds until the next one may begin, that ``now`` is about to."""
        first, most = _WAITS
        self._wait = min(max(2 * self._wait, first), most) if now - self._begun < _SHORT else 0.0
        self._begun = now + self._wait
        return self._wait


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
        delay, pace = self._settings.queue.backoff_first, WatchPace()
        while True:
            try:
                await asyncio.sleep(pace.wait(time.monotonic()))
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


# Pods of others: what they request on the nodes of queues, followed by a watch of their own.
#
# kopf keeps one watch a kind, and that one sees the jobs' own pods only, so that a cluster with many thousands of
# others costs nothing. This one runs while there is a queue that counts a resource.

NOT_OURS = f"!{LABEL_JOB}"
TAKING = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of pods that take something of a node."""


class ForeignPodWatch(Following):
    """Keeps ``store.foreign_pods`` as the cluster is, as long as somebody wants to know.

    Args:
        api: the API server.
        store: where they go.
        wake: called when what others take has changed, or is known for the first time.
        settings: the operator's.
    """

    what, without = "pods of others", "queues do not count them"
    resource, labels, fields = PODS, NOT_OURS, TAKING

    def __init__(self, api: KubeApi, store: Store, wake: Callable[[], None], settings: OperatorSettings) -> None:
        super().__init__(api, settings, settings.sharing.relist)
        self._store, self._wake = store, wake

    def take(self, body: Object) -> None:
        """A pod was made or changed."""
        before, after = self._store.foreign_pods.put(body)
        if before != after:
            self._wake()

    def lose(self, namespace: str, name: str, uid: str) -> None:
        """A pod is gone, or has ended."""
        if self._store.foreign_pods.remove(namespace, name, uid):
            self._wake()

    def replace(self, bodies: Collection[Object], begun: float, within: Callable[[Key], bool]) -> None:
        """These are all that there are."""
        if self._store.foreign_pods.replace(bodies, begun, within):
            self._wake()

    def note_known(self) -> None:
        """Queues may decide."""
        if not self._store.foreign_pods_known:
            self._store.foreign_pods_known = True
            self._wake()

    def note_barred(self, error: ApiError) -> None:
        """Who may not look at them does not count them."""

    def forget(self) -> None:
        """They are not followed any more."""
        self._store.foreign_pods_known = False
        self._store.foreign_pods.entries.clear()


# The jobs' Workloads, as Kueue sees them: followed by a watch of their own where the operator is to follow Kueue.
#
# The kind may not be there, or be installed later, so it is no business of kopf's.

_UNKNOWN = "the Workloads have not been listed yet"


class WorkloadWatch(Following):
    """Knows the Workloads of every job.

    Args:
        api: the API server.
        wake: called with each job of which a Workload has changed; ``None``: it is known now whether there are any.
        settings: the operator's.
    """

    what, without = "Workloads", "no job is admitted by Kueue"
    resource, labels = WORKLOADS, OURS

    def __init__(self, api: KubeApi, wake: Callable[[Key | None], None], settings: OperatorSettings) -> None:
        super().__init__(api, settings, settings.admission.relist)
        self._wake = wake
        self._cache: ObjectCache[Workload] = ObjectCache(read_workload)
        self._names: dict[Key, set[str]] = {}
        """Of each job's Workloads; some may be gone."""
        self.trouble = _UNKNOWN
        """Why they are not known, in words; empty: they are."""
        self._barred = ""

    def of(self, key: Key) -> tuple[Workload, ...]:
        """The Workloads of a job."""
        entries = self._cache.entries
        found = [entries[key[0], name].value for name in self._names.get(key, ()) if (key[0], name) in entries]
        return tuple(sorted(found, key=lambda workload: workload.name))

    def take(self, body: Object) -> None:
        """A Workload was made or changed, as the API server says."""
        key = key_of(body)
        if key is None:
            return
        before, after = self._cache.put(body)
        self._names.setdefault(key, set()).add(body["metadata"]["name"])
        if before != after:
            self._wake(key)

    def lose(self, namespace: str, name: str, uid: str) -> None:
        """A Workload is gone."""
        known = self._cache.entries.get((namespace, name))
        if self._cache.remove(namespace, name, uid) and known is not None:
            self._note_gone(known.value)

    def replace(self, bodies: Collection[Object], begun: float, within: Callable[[Key], bool]) -> None:
        """These are all that there are."""
        self._barred = ""
        before = {place: entry.value for place, entry in self._cache.entries.items()}
        for place in self._cache.replace(bodies, begun, within):
            entry = self._cache.entries.get(place)
            key = key_of(entry.value.raw) if entry is not None else None
            if key is not None:
                self._names.setdefault(key, set()).add(place[1])
                self._wake(key)
            elif place in before:
                self._note_gone(before[place])

    def _note_gone(self, workload: Workload) -> None:
        key = key_of(workload.raw)
        if key is None:
            return
        names = self._names.get(key, set())
        names.discard(workload.name)
        if not names:
            self._names.pop(key, None)
        self._wake(key)

    def note_known(self) -> None:
        """Jobs that wait for it may be decided about."""
        if self.trouble != self._barred:
            self.trouble = self._barred
            self._wake(None)

    def note_barred(self, error: ApiError) -> None:
        """There is no Kueue here, or the operator may not ask."""
        why = "this cluster has no Workloads of Kueue" if isinstance(error, NotFound) else str(error)
        self._barred = f"{why} ({WORKLOADS.api_version}); install Kueue and the operator's rights, or remove the label"

    def forget(self) -> None:
        """They are not followed any more."""
        self._cache.entries.clear()
        self._names.clear()
        self.trouble = _UNKNOWN

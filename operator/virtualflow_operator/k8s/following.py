"""Lists beside kopf's watches, and lists and watches of the operator's own.

Lists take the place of what the watches have told: they heal what a watch has missed, and say what is no more. They
come after each watch that began anew, and every now and then without a cause.

kopf keeps one watch a kind, from the start to the end, and complains of kinds that are not there. So kinds that are
followed only while somebody wants to know have a list and a watch here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from virtualflow_operator.api import ForeignPod, Object, Workload, queue_of, read_workload
from virtualflow_operator.constants import LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY
from virtualflow_operator.k8s.cache import Key, Listed, ObjectCache, Store, key_of, queue_key
from virtualflow_operator.k8s.client import (
    JOBS,
    NODES,
    PODS,
    QUEUES,
    SERVICES,
    WORKLOADS,
    ApiError,
    Forbidden,
    KubeApi,
    NotFound,
    Resource,
)
from virtualflow_operator.k8s.leader_election import leave_at_once
from virtualflow_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

V = TypeVar("V")

OURS = f"{LABEL_MANAGED_BY}={MANAGED_BY},{LABEL_JOB}"
"""Label selector of pods and services that belong to jobs."""


async def relist(
    api: KubeApi, store: Store, namespaces: Sequence[str], wake: Callable[[Key], None], visit: Callable[[Key], None]
) -> None:
    """Replace what the watches have told by lists, and see to it that every job is reconciled.

    Both are called as soon as a list is in, so that nothing is lost should a later one fail.

    Args:
        namespaces: which to look at; none: all.
        wake: called for jobs of which a list tells what no watch has told.
        visit: called for all jobs: nothing is known to be the matter with them.

    Raises:
        ApiError: a list could not be had.
    """
    for namespace in namespaces or (None,):
        try:
            await _relist_namespace(api, store, namespace, wake, visit)
        except Forbidden as error:
            logger.warning("the namespace %s is left out: %s", namespace or "*", error)
        except NotFound as error:
            message = "the cluster has no definition of VirtualFlowJob (any more); apply that of this version, in crds/"
            raise NotFound(error.code, error.reason, message) from error
    await _relist_queues(api, store, visit)
    begun = time.monotonic()
    try:
        concerned = store.replace_nodes(await api.list(NODES, read=store.nodes.listed), begun)
        store.nodes_known = True
    except Forbidden as error:
        store.nodes_known = False
        logger.warning("nodes may not be looked at, so their losses are not announced: %s", error)
    else:
        for key in concerned:
            wake(key)


async def _relist_queues(api: KubeApi, store: Store, visit: Callable[[Key], None]) -> None:
    begun = time.monotonic()
    try:
        for _, name in store.queues.replace(await api.list(QUEUES, read=store.queues.listed), begun, lambda _: True):
            visit(queue_key(name))  # one that is gone, too
    except (Forbidden, NotFound) as error:
        logger.warning("there are no queues here; install their definition and rights to have some: %s", error)
    for _, name in store.queues.entries:
        visit(queue_key(name))
    named = {queue_of(entry.value) for entry in store.jobs.entries.values()}
    for queue in named - {None}:
        visit(queue_key(queue or ""))


async def _relist_namespace(
    api: KubeApi, store: Store, namespace: str | None, wake: Callable[[Key], None], visit: Callable[[Key], None]
) -> None:
    def within(place: Key) -> bool:
        return namespace is None or place[0] == namespace

    begun = time.monotonic()
    services = await api.list(SERVICES, namespace, OURS, read=store.services.listed)
    for key in store.replace_services(services, begun, within):
        wake(key)
    begun = time.monotonic()
    pods = await api.list(PODS, namespace, OURS, read=store.pods.listed)
    for key in store.replace_pods(pods, begun, within):
        wake(key)
    # The jobs last: one that is deleted before its pods are listed would look like one that never had any.
    begun = time.monotonic()
    for key in store.jobs.replace(await api.list(JOBS, namespace, read=store.jobs.listed), begun, within):
        wake(key)
    for key in list(store.jobs.entries):
        if within(key):
            visit(key)


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


class Following(Generic[V]):
    """Keeps a cache as the cluster is, as long as somebody wants to know."""

    what: str
    """The objects, in words."""
    without: str
    """What is the matter when they may not be looked at, in words."""
    resource: Resource
    labels: str
    fields: str = ""
    """Selectors of those that count."""

    def __init__(self, api: KubeApi, settings: OperatorSettings, cache: ObjectCache[V], relist: float) -> None:
        self._api, self._settings, self._cache, self._relist = api, settings, cache, relist
        self._tasks: list[asyncio.Task[None]] = []
        self._unlisted: set[str | None] = set()
        """Namespaces of which no list has come yet; ``None`` stands for all."""

    def note(self, changes: Sequence[tuple[V | None, V | None]]) -> None:
        """Objects have changed: what each was and is; ``None``: it is not there."""

    def note_known(self) -> None:
        """All have been listed since they were wanted."""

    def note_barred(self, error: ApiError) -> None:
        """They may not be looked at, or there is no such kind."""

    def forget(self) -> None:
        """They are not followed any more."""
        self._cache.entries.clear()

    def take(self, body: Object) -> None:
        place = (body["metadata"].get("namespace") or "", body["metadata"]["name"])
        before = self._at(place)
        self._cache.put(body)
        if before != self._at(place):
            self.note([(before, self._at(place))])

    def lose(self, namespace: str, name: str, uid: str) -> None:
        before = self._at((namespace, name))
        if self._cache.remove(namespace, name, uid):
            self.note([(before, None)])

    def replace(self, objects: Iterable[Listed[V] | None], begun: float, within: Callable[[Key], bool]) -> None:
        """These are all that there are."""
        before = {place: entry.value for place, entry in self._cache.entries.items()}
        changed = self._cache.replace(objects, begun, within)
        if changed:
            self.note([(before.get(place), self._at(place)) for place in changed])

    def _at(self, place: Key) -> V | None:
        entry = self._cache.entries.get(place)
        return entry.value if entry is not None else None

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
        objects = await self._api.list(
            self.resource, namespace, self.labels, field_selector=self.fields, read=self._cache.listed
        )
        self.replace(objects, begun, lambda key: namespace is None or key[0] == namespace)
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


class ForeignPodWatch(Following[ForeignPod]):
    """Keeps ``store.foreign_pods`` as the cluster is, as long as somebody wants to know.

    Args:
        wake: called when what others take has changed, or is known for the first time.
    """

    what, without = "pods of others", "queues do not count them"
    resource, labels, fields = PODS, NOT_OURS, TAKING

    def __init__(self, api: KubeApi, store: Store, wake: Callable[[], None], settings: OperatorSettings) -> None:
        super().__init__(api, settings, store.foreign_pods, settings.sharing.relist)
        self._store, self._wake = store, wake

    def note(self, changes: Sequence[tuple[ForeignPod | None, ForeignPod | None]]) -> None:
        self._wake()

    def note_known(self) -> None:
        if not self._store.foreign_pods_known:
            self._store.foreign_pods_known = True
            self._wake()

    def forget(self) -> None:
        super().forget()
        self._store.foreign_pods_known = False


# The jobs' Workloads, as Kueue sees them: followed by a watch of their own where the operator is to follow Kueue.
#
# The kind may not be there, or be installed later, so it is no business of kopf's.

_UNKNOWN = "the Workloads have not been listed yet"
_RELIST = 300.0
"""Workloads are listed anew this often, to heal what their watch has missed."""


class WorkloadWatch(Following[Workload]):
    """Knows the Workloads of every job.

    Args:
        wake: called with each job of which a Workload has changed; ``None``: it is known now whether there are any.
    """

    what, without = "Workloads", "no job is admitted by Kueue"
    resource, labels = WORKLOADS, OURS

    def __init__(self, api: KubeApi, wake: Callable[[Key | None], None], settings: OperatorSettings) -> None:
        super().__init__(api, settings, ObjectCache(read_workload), _RELIST)
        self._wake = wake
        self._of_jobs: dict[Key, dict[str, Workload]] = {}
        self.trouble = _UNKNOWN
        """Why they are not known, in words; empty: they are."""
        self._barred = ""

    def of(self, key: Key) -> tuple[Workload, ...]:
        return tuple(sorted(self._of_jobs.get(key, {}).values(), key=lambda workload: workload.name))

    def note(self, changes: Sequence[tuple[Workload | None, Workload | None]]) -> None:
        for before, after in changes:
            concerned: dict[Key, None] = {}
            for known in filter(None, (before, after)):
                if (key := key_of(known.raw)) is not None:
                    concerned[key] = None
                    self._of_jobs.setdefault(key, {}).pop(known.name, None)
                    if known is after:
                        self._of_jobs[key][known.name] = known
                    elif not self._of_jobs[key]:
                        del self._of_jobs[key]
            for key in concerned:
                self._wake(key)

    def replace(self, objects: Iterable[Listed[Workload] | None], begun: float, within: Callable[[Key], bool]) -> None:
        self._barred = ""
        super().replace(objects, begun, within)

    def note_known(self) -> None:
        if self.trouble != self._barred:
            self.trouble = self._barred
            self._wake(None)

    def note_barred(self, error: ApiError) -> None:
        why = "this cluster has no Workloads of Kueue" if isinstance(error, NotFound) else str(error)
        self._barred = f"{why} ({WORKLOADS.api_version}); install Kueue and the operator's rights, or remove the label"

    def forget(self) -> None:
        super().forget()
        self._of_jobs.clear()
        self.trouble = _UNKNOWN

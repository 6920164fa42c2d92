"""Lists in place of what the watches have told: they heal what a watch has missed, and say what is no more.

After each watch that began anew, and every now and then without a cause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from virtualflow_operator.api import queue_of
from virtualflow_operator.constants import LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY
from virtualflow_operator.k8s.cache import Key, Store, queue_key
from virtualflow_operator.k8s.client import KubeApi
from virtualflow_operator.k8s.errors import Forbidden, NotFound
from virtualflow_operator.k8s.resources import JOBS, NODES, PODS, QUEUES, SERVICES

logger = logging.getLogger(__name__)

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
        except (Forbidden, NotFound) as error:
            logger.warning("the namespace %s is left out: %s", namespace or "*", error)
    await _relist_queues(api, store, visit)
    begun = time.monotonic()
    try:
        concerned = store.replace_nodes(await api.list(NODES), begun)
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
        for _, name in store.queues.replace(await api.list(QUEUES), begun, lambda _: True):
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
    for key in store.replace_services(await api.list(SERVICES, namespace, OURS), begun, within):
        wake(key)
    begun = time.monotonic()
    for key in store.replace_pods(await api.list(PODS, namespace, OURS), begun, within):
        wake(key)
    # The jobs last: one that is deleted before its pods are listed would look like one that never had any.
    begun = time.monotonic()
    for key in store.jobs.replace(await api.list(JOBS, namespace), begun, within):
        wake(key)
    for key in list(store.jobs.entries):
        if within(key):
            visit(key)

"""The pods of deleted jobs: the garbage collector takes them, but they need not train until their grace is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from virtualflow_operator.api import Job, Pod
from virtualflow_operator.constants import COORDINATOR, WORKER
from virtualflow_operator.controllers.coordinator_links import CoordinatorLinks
from virtualflow_operator.k8s import PODS, Conflict, Key, KubeApi, NotFound, Store
from virtualflow_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)


class JobCleanup:
    """Ends the pods of deleted jobs.

    Args:
        api: the API server.
        store: what the watches have told.
        links: the connections to the coordinators.
        settings: the operator's.
    """

    def __init__(self, api: KubeApi, store: Store, links: CoordinatorLinks, settings: OperatorSettings) -> None:
        self._api, self._store, self._links, self._settings = api, store, links, settings

    async def dismiss(self, key: Key, pods: Sequence[Pod]) -> bool:
        """End the pods of a deleted job; whether its workers are leaving together, for which they need the coordinator.

        The garbage collector deletes the coordinator as well, and may be faster: then each waits for its grace alone.
        """
        working = any(pod.role == WORKER and not pod.finished for pod in pods)
        leaving = working and await self._links.stop(key, "the job is deleted")
        await self._end(key, [pod for pod in pods if not (leaving and pod.role == COORDINATOR)])
        return leaving

    async def clear_predecessor(self, key: Key, job: Job) -> None:
        """End the pods of an earlier job of this name: they stand in the way of this one's."""
        await self._end(key, [pod for pod in self._store.pods_of(key) if pod.owner and pod.owner != job.uid])

    async def _end(self, key: Key, pods: Sequence[Pod]) -> None:
        grace = int(self._settings.orphan_grace)
        for pod in pods:
            if pod.deleting_at is not None and pod.deleting_at <= time.time() + grace + 1:
                continue
            logger.info("deleting the pod %s: its job is deleted", pod.name)
            try:
                await self._api.delete(PODS, key[0], pod.name, uid=pod.uid, grace_seconds=grace)
            except (NotFound, Conflict):
                self._store.remove_pod(key[0], pod.name, pod.uid)  # no watch has told of its end

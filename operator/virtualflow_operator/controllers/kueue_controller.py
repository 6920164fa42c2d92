"""Tells the reconciler what Kueue has decided, and carries out what is to become of a job's Workloads.

Flavors and priority classes have no watch: a cluster has few, and they hardly change. They are read when a Workload
names them, and again after a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from virtualflow_operator.api import Job, Object, PodAdditions, kueue_priority, kueue_queue, read_flavor
from virtualflow_operator.controllers.workqueue import RetryLater
from virtualflow_operator.jobs import Admission, AdmissionAction
from virtualflow_operator.k8s import (
    FLAVORS,
    PRIORITY_CLASSES,
    WORKLOADS,
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    Key,
    KubeApi,
    NotFound,
    Resource,
    WorkloadWatch,
)
from virtualflow_operator.kueue import CreateWorkload, DeleteWorkload, Kueue, KueueAdmission, PatchWorkload
from virtualflow_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

_OFF = "the operator does not follow Kueue; set kueue.enabled in its chart, or remove the label"


class KueueController:
    """The operator's dealings with Kueue.

    Args:
        wake: called with each job of which a Workload has changed; ``None``: with all that concerns.
    """

    def __init__(self, api: KubeApi, wake: Callable[[Key | None], None], settings: OperatorSettings) -> None:
        self._api, self._settings = api, settings
        self.workloads = WorkloadWatch(api, wake, settings)
        self._read: dict[tuple[Resource, str], tuple[float, Object | None]] = {}
        """Flavors and classes, and when they were read (monotonic); ``None``: there is no such object."""
        self._refused: dict[str, str] = {}
        """What the API server does not take of a job's, in its words; by the job's uid."""

    async def admission(self, key: Key, job: Job, otherwise: Admission) -> Admission:
        """Who admits a job: Kueue, where it has a say in it."""
        known = await self.view(key, job)
        return otherwise if known is None else KueueAdmission(known, self._settings, otherwise)

    async def view(self, key: Key, job: Job) -> Kueue | None:
        """What Kueue has decided about a job; ``None``: it has no say in it.

        Raises:
            ApiError: a flavor or class could not be read.
        """
        named = bool(kueue_queue(job))
        if not self._settings.kueue:
            return Kueue(trouble=_OFF) if named else None
        workloads = self.workloads.of(key)
        if not named and not workloads:
            return None
        if self.workloads.trouble:
            return Kueue(workloads, trouble=self.workloads.trouble)
        flavors: dict[str, PodAdditions | None] = {}
        for name in {name for w in workloads for given in w.assignments.values() for name in given.flavors}:
            body = await self._named(FLAVORS, name)
            flavors[name] = read_flavor(body) if body is not None else None
        name = kueue_priority(job)
        class_ = await self._named(PRIORITY_CLASSES, name) if name else None
        value: Any = class_.get("value") if class_ is not None else None
        refused = self._refused.get(job.uid, "")
        return Kueue(workloads, flavors, value if isinstance(value, int) else None, refused)

    async def _named(self, resource: Resource, name: str) -> Object | None:
        """An object of the cluster's, as it was lately; one that was not there is looked for again."""
        at, body = self._read.get((resource, name), (0.0, None))
        if body is None or time.monotonic() > at + self._settings.kueue_reread:
            try:
                body = await self._api.get(resource, None, name)
            except (NotFound, Forbidden) as error:
                logger.warning("%s %s cannot be read: %s", resource.plural, name, error)
                body = None
            self._read[resource, name] = time.monotonic(), body
        return body

    async def carry_out(self, job: Job, action: AdmissionAction) -> bool:
        """Make, change or delete a Workload; whether something new is to be told of it: it is refused.

        Raises:
            ApiError: it could not be done.
            RetryLater: it has changed meanwhile.
        """
        try:
            await self._carry_out(job, action)
        except (Invalid, Forbidden) as error:
            logger.warning("a Workload of the job is refused: %s", error)
            known, self._refused[job.uid] = self._refused.get(job.uid), error.message
            return known != error.message
        self._refused.pop(job.uid, None)
        return False

    async def _carry_out(self, job: Job, action: AdmissionAction) -> None:
        match action:
            case CreateWorkload(manifest):
                name = manifest["metadata"]["name"]
                try:
                    self.workloads.take(await self._api.create(WORKLOADS, job.namespace, manifest))
                    logger.info("created the Workload %s", name)
                except AlreadyExists:
                    # Most likely it is being deleted, which somebody's finalizer may hold up.
                    await self._reread(job, name, after=1.0)
            case PatchWorkload(name, body, subresource):
                try:
                    self.workloads.take(await self._api.patch(WORKLOADS, job.namespace, name, body, subresource))
                except (Conflict, NotFound):
                    await self._reread(job, name)
            case DeleteWorkload(name, uid):
                try:
                    await self._api.delete(WORKLOADS, job.namespace, name, uid=uid)
                    logger.info("deleted the Workload %s", name)
                except (Conflict, NotFound):
                    await self._reread(job, name)
                self.workloads.lose(job.namespace, name, uid)

    async def _reread(self, job: Job, name: str, *, after: float = 0.05) -> None:
        """What is decided next begins from what is there."""
        try:
            self.workloads.take(await self._api.get(WORKLOADS, job.namespace, name))
        except NotFound:
            self.workloads.lose(job.namespace, name, "")
        raise RetryLater(after, f"the Workload {name} has changed meanwhile")

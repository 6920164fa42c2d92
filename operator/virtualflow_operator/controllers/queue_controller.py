"""Carries out what is decided about queues: reads what there is, writes queues' statuses, wakes the jobs concerned.

A queue's key stands in the same work-queue as the jobs' keys, so one decision about a queue is made at a time, by the
operator that leads, and again whenever a job, a node or a pod that concerns it has changed. What was decided about a
job is kept here until the next decision, and in the job's status, which its own reconciliation writes.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from virtualflow_operator.api import (
    CoordinatorLink,
    Job,
    JobStatus,
    Object,
    Pod,
    Queue,
    QueueStatus,
    merge_patch,
    parse_time,
    queue_of,
    read_job,
    write_queue_status,
)
from virtualflow_operator.constants import WORKER
from virtualflow_operator.controllers.coordinator_links import CoordinatorLinks
from virtualflow_operator.controllers.workqueue import RetryLater
from virtualflow_operator.jobs import find_worker
from virtualflow_operator.k8s import QUEUES, Conflict, Key, KubeApi, NotFound, Store
from virtualflow_operator.observability import Metrics, QueueSample
from virtualflow_operator.queues import (
    Grant,
    QueueAdmission,
    QueueMember,
    QueueScene,
    allocate,
    known_grant,
    requested,
    worker_units,
)
from virtualflow_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

_REVIEW = 30.0
"""A queue with jobs is looked at this often without a cause: measured speeds and the steps that are left change
all the time."""
_HOMELESS_RETRY = 300.0
"""A job of which workers found no node is given no more for so long, unless nodes change: others can use it."""


class QueueController:
    """The operator's work on queues; ``decide`` is what the work-queue runs for a queue's key.

    Args:
        links: the connections to the coordinators, which know who is alive on a node that looks lost.
        wake: called with each job whose grant has changed.
        wake_queue: has a queue decided about.
    """

    def __init__(
        self,
        *,
        api: KubeApi,
        store: Store,
        links: CoordinatorLinks,
        metrics: Metrics,
        wake: Callable[[Key], None],
        wake_queue: Callable[[str | None], None],
        settings: OperatorSettings,
    ) -> None:
        self._api, self._store, self._links, self._wake, self._settings = api, store, links, wake, settings
        self._wake_queue, self._metrics = wake_queue, metrics
        self._grants: dict[Key, Grant] = {}
        self._ceilings: dict[Key, tuple[int, float]] = {}
        """How many workers found a node, of jobs of which others found none; until when (Unix seconds) that counts."""
        self._seatless: dict[Key, float] = {}
        """Jobs of which workers found no place on devices of others; until when (Unix seconds) that counts."""
        self._rests: dict[str, float] = {}
        """Until when (``time.monotonic``) a queue is left alone about which it takes long to decide."""

    def admission(self, key: Key, job: Job) -> QueueAdmission:
        """What was decided about a job, and what its pods must know of the queue."""
        queue = self._store.queue(job.spec.queue or "")
        gathers = queue is not None and queue.spec.placement == "BinPack"
        return QueueAdmission(
            self.grant(key, job),
            queue.spec if queue is not None else None,
            self._host_nodes(key, job),
            self._store.crowds_of(key) if gathers else {},
            self._settings.turns_directory,
        )

    def grant(self, key: Key, job: Job) -> Grant | None:
        """What was decided about a job last; ``None``: nothing, by this operator."""
        grant = self._grants.get(key)
        return grant if grant is not None and grant.uid == job.uid else None

    def _host_nodes(self, key: Key, job: Job) -> frozenset[str]:
        """Where workers are of the job on whose devices this one is to compute, if so."""
        grant = self.grant(key, job)
        if grant is None or not grant.host:
            return frozenset()
        namespace, _, name = grant.host.partition("/")
        return frozenset(pod.node for pod in self._workers((namespace, name)) if pod.node)

    def try_again(self) -> None:
        """Nodes have changed: workers that found none may find one now."""
        self._ceilings.clear()
        self._seatless.clear()

    def note_status(self, job: Job, status: JobStatus) -> None:
        """A job's status was written: a queue is to know when a job is over, and what was measured."""
        if job.status.finished != status.finished or job.status.scaling != status.scaling:
            self._wake_queue(job.spec.queue)

    async def decide(self, key: Key) -> float | None:
        """Decide about a queue; in how many seconds to do it again, if so.

        Raises:
            ApiError: the queue's status could not be written; the work-queue tries again.
            RetryLater: the queue had changed meanwhile.
        """
        name, now, began = key[1], time.time(), time.monotonic()
        if began < self._rests.get(name, 0.0):
            return self._rests[name] - began
        queue = self._store.queue(name)
        bodies = {
            place: entry.value for place, entry in self._store.jobs.entries.items() if queue_of(entry.value) == name
        }
        members = [self._member(place, body, now) for place, body in bodies.items() if not _over(body)]
        own = {member.key for member in members}
        resource = queue.spec.resource if queue is not None else None
        if resource and not self._store.foreign_pods_known:
            return None  # all keep what they have; the list of others' pods wakes the queue
        alive, asked_by = self._alive(members, resource, now) if resource else ({}, math.inf)
        scene = QueueScene(
            queue=queue,
            members=members,
            nodes=self._store.node_map(),
            others=self._others(own, resource) if resource else {},
            alive=alive,
            leaving=self._settings.extra_taints,
            completed=[read_job(body) for body in bodies.values() if _completed_after(body, queue)],
        )
        decision = allocate(scene, now=now, settings=self._settings.scheduling)
        took = time.monotonic() - began
        self._metrics.sharing.observe(took)
        self._rests.pop(name, None)
        if took * self._settings.sharing.rest > self._settings.sharing.debounce:
            self._rests[name] = began + took * (1 + self._settings.sharing.rest)
        for place, grant in decision.grants.items():
            before = self._grants.get(place)
            if grant != before:
                if before is None or _given(before) != _given(grant):
                    logger.info("%s/%s: %d workers of the queue %s: %s", *place, grant.workers, name, grant.reason)
                self._grants[place] = grant
                self._wake(place)
        for place in [place for place, grant in self._grants.items() if grant.queue == name and place not in own]:
            del self._grants[place]
            self._ceilings.pop(place, None)
            self._seatless.pop(place, None)
        if queue is None:
            self._metrics.queues.pop(name, None)
        elif decision.status is not None:
            self._metrics.queues[name] = _sample(decision.status)
            await self._write_status(queue, decision.status)
        if not members:
            return None
        wakes = [_REVIEW, asked_by - now]
        wakes += [max(until - now, 0.0) for place, (_, until) in self._ceilings.items() if place in own]
        wakes += [max(until - now, 0.0) for place, until in self._seatless.items() if place in own]
        wakes += [at - now for at in (self._stuck_at(self._workers(place)) for place in own) if at and at > now]
        if decision.wake_at is not None:
            wakes.append(max(decision.wake_at - time.time(), self._settings.sharing.debounce))
        return min(wakes)

    def _stuck_at(self, pods: Iterable[Pod]) -> float | None:
        """When a worker that has no node yet counts as one that finds none."""
        since = [pod.unschedulable_since for pod in pods if pod.live and pod.unschedulable_since]
        return min(since) + self._settings.unschedulable_patience if since else None

    def _ceiling(self, key: Key, pods: list[Pod], now: float) -> int | None:
        """Note that workers find no node: what they were given is of more use to others for a while."""
        stuck_at = self._stuck_at(pods)
        if stuck_at is not None and now >= stuck_at:
            found = sum(1 for pod in pods if pod.node and pod.live)
            self._ceilings[key] = found, now + _HOMELESS_RETRY
        ceiling, until = self._ceilings.get(key, (0, 0.0))
        if until > now:
            return ceiling
        self._ceilings.pop(key, None)
        return None

    def _is_seatless(self, key: Key, lodging: list[Pod], now: float) -> bool:
        """Note that workers find no place on devices of others: their nodes have no room for them beside the host."""
        stuck_at = self._stuck_at(lodging)
        if stuck_at is not None and now >= stuck_at:
            self._seatless[key] = now + _HOMELESS_RETRY
        if self._seatless.get(key, 0.0) > now:
            return True
        self._seatless.pop(key, None)
        return False

    def _member(self, key: Key, body: Object, now: float) -> QueueMember:
        job = read_job(body)
        created = parse_time(body["metadata"].get("creationTimestamp")) or 0.0
        grant = self.grant(key, job) or known_grant(job, created)
        if grant.queue != (job.spec.queue or ""):
            grant = replace(grant, queue=job.spec.queue or "")
        workers = [pod for pod in self._workers(key) if pod.owner == job.uid]
        pods, lodging = [pod for pod in workers if not pod.host], [pod for pod in workers if pod.host]
        return QueueMember(
            job,
            grant,
            created,
            [pod.node for pod in pods],
            self._ceiling(key, pods, now),
            [pod.kind for pod in pods],
            all(pod.takes_turns for pod in pods),
            len(lodging),
            self._is_seatless(key, lodging, now),
        )

    def _workers(self, key: Key) -> list[Pod]:
        return [pod for pod in self._store.pods_of(key) if pod.role == WORKER and not pod.finished]

    def _others(self, own: Iterable[Key], resource: str) -> dict[str, int]:
        """Units that are taken on each node by pods that are not workers of these jobs."""
        taken: Counter[str] = Counter()
        members = set(own)
        for pod in (entry.value for entry in self._store.foreign_pods.entries.values()):
            if pod.node:
                taken[pod.node] += requested(pod.requests, resource)
        for key, own_pod in (entry.value for entry in self._store.pods.entries.values()):
            if own_pod.node and own_pod.holds_devices and not (key in members and own_pod.role == WORKER):
                taken[own_pod.node] += requested(own_pod.requests, resource)
        return taken

    def _alive(self, members: Iterable[QueueMember], resource: str, now: float) -> tuple[dict[str, int], float]:
        """Units of workers that train, for all that is known, on nodes that do not say that they are ready.

        A coordinator that was not asked yet may hear all of its workers: right after an outage of the API server, all
        nodes look lost, and a new leader has no connections yet. In the end, until when (Unix seconds) that counts.
        """
        nodes = self._store.node_map() or {}
        lost = {name for name, node in nodes.items() if not node.ready and not node.gone}
        alive: Counter[str] = Counter()
        until = math.inf
        for member in members if lost else ():
            link = self._links.view(member.key)
            answered = link is not None and link.connected and link.status is not None
            asked_by = math.inf if answered else self._asked_by(member, link, now)
            for pod in self._workers(member.key):
                if pod.node not in lost or not pod.live or pod.host:
                    continue
                if answered:
                    worker = find_worker(link.status if link is not None else None, pod)
                    trains = worker is not None and worker.state in ("starting", "ready", "training")
                else:
                    trains = now < asked_by
                    until = min(until, asked_by) if trains else until
                if trains:
                    alive[pod.node] += worker_units(member.job.spec, resource)
        return alive, until

    def _asked_by(self, member: QueueMember, link: CoordinatorLink | None, now: float) -> float:
        """When the job's coordinator has answered if it ever does; Unix seconds, in the past if it does not."""
        patience = self._settings.coordinator_patience
        if link is not None:
            return link.since + patience
        pods, name = self._store.pods_of(member.key), member.job.status.coordinator
        usable = any(pod.name == name and pod.live and pod.ip and pod.phase == "Running" for pod in pods)
        return now + patience if usable else -math.inf

    async def _write_status(self, queue: Queue, status: QueueStatus) -> None:
        patch = merge_patch(queue.raw.get("status") or {}, write_queue_status(status))
        if not patch:
            return
        body = {"metadata": {"resourceVersion": queue.raw["metadata"].get("resourceVersion")}, "status": patch}
        try:
            self._store.queues.put(await self._api.patch(QUEUES, None, queue.name, body, "status"))
        except Conflict:
            self._store.queues.put(await self._api.get(QUEUES, None, queue.name))
            raise RetryLater(0.05, "the queue has changed meanwhile") from None
        except NotFound:
            self._store.queues.remove("", queue.name, queue.uid)
            raise RetryLater(0.0, "the queue is deleted") from None


def _given(grant: Grant) -> tuple[str, int, tuple[tuple[str, int], ...], str]:
    return grant.uid, grant.workers, grant.kinds, grant.host


def _sample(status: QueueStatus) -> QueueSample:
    ready, capacity = status.ready, status.capacity
    return QueueSample(
        ready is not None and ready.status == "True",
        float(capacity.total) if capacity is not None else 0.0,
        float(capacity.allocated) if capacity is not None else 0.0,
        status.jobs.running,
        status.jobs.waiting,
        {kind.name: (float(kind.total), float(kind.allocated)) for kind in status.kinds},
    )


def _completed_after(body: Object, queue: Queue | None) -> bool:
    """Whether a job has completed that the queue's status does not count yet."""
    status = body.get("status") or {}
    counted = (queue.status.past_until if queue is not None else None) or ""
    return status.get("phase") == "Complete" and (status.get("completionTime") or "") > counted


def _over(body: Object) -> bool:
    """Whether a job is over, or about to be deleted."""
    phase = (body.get("status") or {}).get("phase")
    return phase in ("Complete", "Failed") or bool(body["metadata"].get("deletionTimestamp"))

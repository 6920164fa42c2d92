"""The running operator: what the watches wake, and everything that has to be started and stopped with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from virtualflow.errors import ConfigurationError
from virtualflow_operator.api import Object, kueue_wishes, queue_of
from virtualflow_operator.controllers.admissions import Admissions, Wakes
from virtualflow_operator.controllers.coordinator_links import CoordinatorLinks
from virtualflow_operator.controllers.issuer import Issuer, fingerprint
from virtualflow_operator.controllers.job_controller import JobController
from virtualflow_operator.controllers.workqueue import QueueHooks, RetryLater, WorkQueue
from virtualflow_operator.k8s import (
    LEASES,
    ApiError,
    DeepObjects,
    EventRecorder,
    Forbidden,
    ForeignPodWatch,
    Key,
    KubeApi,
    LeaseThread,
    Readers,
    Store,
    key_of,
    leave_at_once,
    queue_key,
    relist,
)
from virtualflow_operator.observability import HealthServer, Metrics, queue_moves
from virtualflow_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

_RELIST_AFTER = 2.0
"""After a watch that began anew, what it missed is listed this much later;"""
_RELIST_REST = 30.0
"""twice as late each time, up to so many seconds, while watches begin anew all the time."""
_RELIST_SPREAD = 30.0
"""A relist looks at the jobs of which it tells nothing new over this time."""


class Manager:
    """One process of the operator, from the lease to the last event."""

    def __init__(
        self,
        settings: OperatorSettings,
        api: KubeApi,
        election: LeaseThread,
        keys: Sequence[bytes],
        metrics: Metrics,
        too_deep: DeepObjects,
    ) -> None:
        key_ids = tuple(map(fingerprint, keys))
        self.settings = settings = replace(settings, key_id=key_ids[0], key_ids=key_ids)
        issuer = Issuer(keys, settings.certificates)
        self.metrics = metrics
        self.too_deep = too_deep
        self.store = Store()
        self._api = api
        hooks = QueueHooks(
            depth=metrics.queue_depth.set,
            waited=metrics.queue_wait.observe,
            ran=metrics.reconciliation.observe,
            failed=lambda kind: metrics.errors.labels(kind).inc(),
        )
        self.queue: WorkQueue[Key] = WorkQueue(
            settings.queue,
            expected=(ApiError,),
            hooks=hooks,
            describe=lambda key: f"{key[0]}/{key[1]}" if key[0] else f"the queue {key[1]}",
            tenant_of=lambda key: key[0],
        )
        self.links = CoordinatorLinks(issuer, self.queue.add, settings, metrics)
        events = EventRecorder(api, instance=settings.lease.identity)
        self.admissions = Admissions(
            api=api,
            store=self.store,
            links=self.links,
            metrics=metrics,
            wakes=Wakes(self.wake, self.wake_queue, self.wake_admitted),
            settings=settings,
        )
        self.job_controller = JobController(
            api=api,
            store=self.store,
            links=self.links,
            events=events,
            metrics=metrics,
            issuer=issuer,
            settings=settings,
            admissions=self.admissions,
        )
        self.foreign_pods = ForeignPodWatch(api, self.store, self.wake_queues, settings)
        self.elector = election
        self._claim: LeaseThread | None = None
        self._waits_for: str | None = None
        """Why this release does nothing, if another one has its jobs."""
        self.health: HealthServer | None = None
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[Any]] = []
        self._relist_soon = asyncio.Event()
        self._started = False
        self._stopping = False

    @classmethod
    async def start(cls, settings: OperatorSettings) -> Self:
        """Serve health and metrics, wait for the lease, fill the caches and begin to reconcile.

        Raises:
            ConfigurationError: the key cannot be read, or a port is taken.
        """
        metrics = Metrics(job_metrics=settings.job_metrics)
        keys = read_keys(settings)
        too_deep = DeepObjects(lambda kind: metrics.objects_cut.labels(kind).inc())

        async def connect() -> KubeApi:
            return await KubeApi.connect(settings.api, observe=metrics.api_request, too_deep=too_deep)

        api = await connect()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(api.close)
            election = await stack.enter_async_context(LeaseThread(connect, settings.lease))
            manager = cls(settings, api, election, keys, metrics, too_deep)
            if not settings.namespaces:
                claim = LeaseThread(connect, settings.lease.claim, on_wait=manager.stand_back)
                manager._claim = await stack.enter_async_context(claim)
            manager.health = await stack.enter_async_context(
                HealthServer(
                    alive=queue_moves(manager.queue.stalled),
                    ready=manager.readiness,
                    metrics=metrics,
                    health_port=settings.health_port,
                    metrics_port=settings.metrics_port,
                    judge=Readers(api).judge if settings.metrics_authentication else None,
                )
            )
            try:
                await manager.lead()
            except BaseException:
                await manager.step_down()
                raise
            manager._stack = stack.pop_all()
        return manager

    async def lead(self) -> None:
        """Wait for the lease, and for the end of another release with the same jobs; then begin."""
        await self.elector.acquire()
        self._run("lease", self.elector.hold())
        if self._claim is not None and await self._may_claim():
            await self._claim.acquire()
            self._run("claim", self._claim.hold())
            self._waits_for = None
            self.metrics.other_release.set(0)
        self.metrics.leader.set(1)
        self._api.may_write = self.elector.leads
        await self._fill()
        self._follow_foreign_pods()
        self.admissions.start()
        self._run("queue", self.queue.run(self._process))
        self._run("relist", self._keep_listed())
        self._started = True

    async def _may_claim(self) -> bool:
        """Whether this operator's account may look at the Lease that releases for every namespace share."""
        claim = self.settings.lease.claim
        try:
            await self._api.get(LEASES, claim.namespace, claim.name)
        except Forbidden as error:
            logger.warning("whether another release takes care of every namespace cannot be seen: %s", error)
            return False
        except ApiError:
            pass  # there is none yet, or the API server is away: whoever asks for it finds out
        return True

    def stand_back(self, reason: str) -> None:
        """Another release takes care of every namespace: say so, and do nothing until it has ended."""
        claim = self.settings.lease.claim
        self._waits_for = (
            f"another release takes care of every namespace ({reason}), and this one waits for its end: uninstall one, "
            f"or give one of the two `namespaces`; kubectl -n {claim.namespace} get lease {claim.name}"
        )
        logger.warning("%s", self._waits_for)
        self.metrics.other_release.set(1)

    async def _process(self, key: Key) -> float | None:
        """Decide about a job or a queue; in how many seconds to do it again, if so."""
        if self._started and not self.elector.leads():
            # This process slept, and woke before the lease's own thread has ended it.
            raise RetryLater(0.1, "the lease is over")
        return await (self.job_controller.process(key) if key[0] else self.admissions.decide(key))

    def _run(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Have this done until :meth:`stop`; should it ever end by itself, so does the process, and starts again."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._notice_end)
        self._tasks.append(task)

    def _notice_end(self, task: asyncio.Task[Any]) -> None:
        if self._stopping or task.cancelled():
            return
        logger.critical("%s ended by itself; please report it", task.get_name(), exc_info=task.exception())
        leave_at_once(f"its part {task.get_name()} ended")

    async def stop(self) -> None:
        """Let running reconciliations end, close all connections, give the lease back."""
        logger.info("stopping")
        self._stopping = True
        self.queue.stop()
        for task in self._tasks:
            if task.get_name() == "queue":
                await asyncio.wait({task}, timeout=self.settings.queue.stop_limit + 2)
        await self._end_tasks()
        await self.foreign_pods.close()
        await self.admissions.close()
        await self.links.close()
        await self._release()
        await self._stack.aclose()

    async def step_down(self) -> None:
        """Give back what was won of leases: the start is cancelled, or has failed."""
        self._stopping = True
        await self._end_tasks()
        await self._release()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _release(self) -> None:
        if self._claim is not None:
            await self._claim.release()
        await self.elector.release()
        self.metrics.leader.set(0)

    def readiness(self) -> str | None:
        """``None`` when this process does its part: it leads and its caches are filled, or it stands by."""
        if self._waits_for is not None:
            return self._waits_for
        if self._started or not self.elector.leads():
            return self.elector.problem if not self._started else None
        return "the caches are being filled"

    # --- what the watches tell ---------------------------------------------------------------------------------------

    def see_job(self, kind: str | None, body: Object) -> None:
        """A job has changed; ``kind`` as in a watch event, ``None`` for one that was listed."""
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        if kind == "DELETED":
            self.store.jobs.remove(*key, uid=body["metadata"].get("uid") or "")
            self.queue.forget(key)
            self.wake(key)
            self.wake_queue(queue_of(body))
            return
        self._note_listing(kind)
        before, after = self.store.jobs.put(body)
        if after is None or (before is not None and _essence(before) == _essence(after)):
            return  # our own status, coming back
        self.wake(key)
        for name in {queue_of(after), queue_of(before) if before is not None else None}:
            self.wake_queue(name)

    def see_pod(self, kind: str | None, body: Object) -> None:
        metadata = body["metadata"]
        if kind == "DELETED":
            key = self.store.remove_pod(metadata["namespace"], metadata["name"], metadata.get("uid") or "")
        else:
            self._note_listing(kind)
            key = self.store.put_pod(body)
        if key is not None:
            self.wake(key)
            self.wake_queues()  # queues may share nodes, so a worker of one is a foreign pod to another

    def see_service(self, kind: str | None, body: Object) -> None:
        key = key_of(body)
        if key is None:
            return
        metadata = body["metadata"]
        if kind == "DELETED":
            self.store.remove_service(metadata["namespace"], metadata["name"], metadata.get("uid") or "")
            self.wake(key)
            return
        before, after = self.store.services.put(body)
        if before != after:
            self.wake(key)

    def see_node(self, kind: str | None, body: Object) -> None:
        metadata = body["metadata"]
        before = self.store.nodes.entries.get(("", metadata["name"]))
        if kind == "DELETED":
            keys = self.store.remove_node(metadata["name"], metadata.get("uid") or "")
        else:
            keys = self.store.put_node(body)
        for key in keys:
            self.wake(key)
        after = self.store.nodes.entries.get(("", metadata["name"]))
        if (before.value if before else None) != (after.value if after else None):
            self.admissions.note_nodes()
            self.wake_queues()

    def see_queue(self, kind: str | None, body: Object) -> None:
        name, uid = body["metadata"]["name"], body["metadata"].get("uid") or ""
        if kind == "DELETED":
            self.store.queues.remove("", name, uid)
        else:
            self._note_listing(kind)
            before, after = self.store.queues.put(body)
            if before is not None and after is not None and _essence(before.raw) == _essence(after.raw):
                return  # our own status, coming back
        self._follow_foreign_pods()
        self.wake_queue(name)

    def _follow_foreign_pods(self) -> None:
        """Follow the pods of others while a queue counts what they take."""
        self.foreign_pods.want(any(entry.value.spec.resource for entry in self.store.queues.entries.values()))

    def wake_queue(self, name: str | None) -> None:
        if name is not None:
            self.queue.add(queue_key(name), self.settings.sharing.debounce)

    def wake_queues(self) -> None:
        for _, name in self.store.queues.entries:
            self.wake_queue(name)

    def wake_admitted(self, key: Key | None) -> None:
        """Have a job reconciled of which a Workload has changed; ``None``: all that name a queue of Kueue's."""
        if key is not None:
            self.wake(key)
            return
        for place, entry in self.store.jobs.entries.items():
            if kueue_wishes(entry.value)[0]:
                self.wake(place)

    def wake(self, key: Key) -> None:
        self.job_controller.touched.setdefault(key, time.monotonic())
        self.queue.add(key, self.settings.queue.debounce)

    # --- lists -------------------------------------------------------------------------------------------------------

    def _note_listing(self, kind: str | None) -> None:
        """A watch that begins lists what there is, and does not say what is gone: our own list does."""
        if kind is None and self._started:
            self._relist_soon.set()

    async def _fill(self) -> None:
        """Fill the caches before the first decision, however long the API server takes."""
        delay = self.settings.queue.backoff_first
        while True:
            try:
                await self._list(self.wake)
                return
            except ApiError as error:
                logger.warning("the caches cannot be filled, next try in %.1f s: %s", delay, error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, self.settings.queue.backoff_most)

    async def _list(self, visit: Callable[[Key], None]) -> None:
        await relist(self._api, self.store, self.settings.namespaces, self.wake, visit)

    async def _keep_listed(self) -> None:
        """List everything now and then, and soon after a watch had to begin anew."""
        begun = tried = time.monotonic()
        delay = _RELIST_AFTER
        while True:
            jitter = 1 + self.settings.relist_jitter * (2 * random.random() - 1)
            try:
                async with asyncio.timeout(self.settings.relist * jitter):
                    await self._relist_soon.wait()
                # kopf opens its watches right after the start, from what was listed a moment ago.
                fresh = time.monotonic() - begun < _RELIST_AFTER
                if time.monotonic() - tried > _RELIST_REST:
                    delay = _RELIST_AFTER
                await asyncio.sleep(delay)
                self._relist_soon.clear()
                if fresh:
                    continue
            except TimeoutError:
                pass
            try:
                await self._list(lambda key: self.queue.add(key, random.random() * _RELIST_SPREAD))
                self._follow_foreign_pods()
                delay = min(2 * delay, _RELIST_REST)
            except ApiError as error:
                delay = min(2 * delay, self.settings.queue.backoff_most)
                logger.warning("the relist failed, next try in %.0f s: %s", delay, error)
                self._relist_soon.set()
            tried = time.monotonic()


def _essence(body: Object) -> tuple[Any, ...]:
    """What of a job or queue calls for a decision: not its status, which is our own word."""
    metadata = body["metadata"]
    identity = metadata.get("generation"), metadata.get("uid"), metadata.get("deletionTimestamp")
    return *identity, kueue_wishes(body), body.get("spec")


def read_keys(settings: OperatorSettings) -> list[bytes]:
    """The operator's keys: its own, and another one beside it where there is one.

    Raises:
        ConfigurationError: one cannot be read, or is too short to be one.
    """
    keys = [_read_key(settings.key_file)]
    if settings.other_key_file.exists():
        keys.append(_read_key(settings.other_key_file))
    return list(dict.fromkeys(keys))


def _read_key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(
            f"the operator's key {path} cannot be read ({error.strerror}); mount the chart's Secret or name another "
            "file with --key-file"
        ) from error
    if len(key) < 32:
        raise ConfigurationError(f"the operator's key {path} must have at least 32 characters")
    return key

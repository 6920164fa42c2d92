"""Carries out what the reconciler decides, one job at a time: calls, pods, status, events, in that order.

Everything may fail or be done twice. An error of the API server leaves the rest of the plan for the next try, which
begins from what is true then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass

from virtualflow_operator import resources
from virtualflow_operator.constants import LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY, MANAGER
from virtualflow_operator.events import EventRecorder
from virtualflow_operator.job_status import JobStatus, merge_patch, write_status
from virtualflow_operator.kube import (
    JOBS,
    NETWORK_POLICIES,
    NODES,
    PDBS,
    PODS,
    SECRETS,
    SERVICES,
    AlreadyExists,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    KubeApi,
    NotFound,
    Resource,
)
from virtualflow_operator.logs import job_context
from virtualflow_operator.metrics import JobSample, Metrics
from virtualflow_operator.plan import (
    Action,
    CheckTemplates,
    CreatePod,
    CreateService,
    DeleteJob,
    DeletePod,
    Plan,
    PointService,
    TellDrain,
    TellGone,
)
from virtualflow_operator.queue import RetryLater
from virtualflow_operator.reconcile import Scene, Verdict, reconcile
from virtualflow_operator.settings import OperatorSettings
from virtualflow_operator.signals import Links
from virtualflow_operator.spec import Object
from virtualflow_operator.store import Key, Store
from virtualflow_operator.view import Job, Pod, read_job

logger = logging.getLogger(__name__)

OURS = f"{LABEL_MANAGED_BY}={MANAGED_BY},{LABEL_JOB}"
"""Label selector of pods and services that belong to jobs."""


_REFUSED_FIRST = 5.0
"""Seconds after a first refusal until it is tried again; they double."""
_SETTLE = 0.05
"""Seconds between two reconciliations of a job that follow from one another."""


@dataclass
class _Memory:
    """What is remembered of a job between two reconciliations, and may be lost."""

    uid: str
    verdict: Verdict | None = None
    trouble: str = ""
    """Why the API server refused to create something."""
    troubles: int = 0
    retry_at: float = 0.0
    """Nothing is created before then (Unix seconds)."""
    supported: bool = False
    """Secret, budget and policy were seen to."""
    lost_at: float | None = None
    """Since when (monotonic) a loss is known that nobody has recovered from."""


class Controller:
    """The operator's work on jobs; ``process`` is what the work-queue runs.

    Args:
        api: the API server.
        store: what the watches have told.
        links: the connections to the coordinators.
        events: the recorder.
        metrics: what is counted.
        key: the operator's, from which the jobs' tokens are derived.
        settings: the operator's.
    """

    def __init__(
        self,
        api: KubeApi,
        store: Store,
        links: Links,
        events: EventRecorder,
        metrics: Metrics,
        key: bytes,
        settings: OperatorSettings,
    ) -> None:
        self._api, self._store, self._links = api, store, links
        self._events, self._metrics, self._key, self._settings = events, metrics, key, settings
        self._memories: dict[Key, _Memory] = {}
        self._offers: dict[Resource, bool] = {}
        self.touched: dict[Key, float] = {}
        """When (monotonic) the oldest news came that a job was not reconciled for."""

    async def process(self, key: Key) -> float | None:
        """Reconcile a job; in how many seconds to do it again, if so.

        Raises:
            ApiError: the API server could not be asked; the queue tries again.
            RetryLater: something had changed meanwhile.
        """
        with job_context(*key):
            body = self._store.job(key)
            if body is None:
                return await self._bury(key)
            job = read_job(body)
            if job.spec.managed_by not in (None, "", MANAGER):
                return None  # another controller's
            if body["metadata"].get("deletionTimestamp"):
                await self._end(key, [pod for pod in self._store.pods_of(key) if pod.owner == job.uid])
                self._links.drop(key)
                return None
            return await self._reconcile(key, job)

    async def _reconcile(self, key: Key, job: Job) -> float | None:
        memory = self._memories.get(key)
        if memory is None or memory.uid != job.uid:
            memory = self._memories[key] = _Memory(job.uid)
        touched = self.touched.pop(key, None)
        await self._clear_predecessor(key, job)
        self._follow(key, job)
        scene = Scene(
            job,
            self._store.pods_of(key),
            self._store.service_of(key, resources.coordinator_name(job)),
            self._store.node_map(),
            self._links.view(key),
            memory.verdict,
            memory.trouble,
        )
        now = time.time()
        plan = reconcile(scene, now, self._settings)
        if any(resources.secret_name(job) in pod.waiting for pod in scene.pods):
            memory.supported = False  # somebody has deleted it
            await self._support(job, memory)
        again = await self._tell(key, plan, memory, touched)
        again = await self._act(key, job, plan, memory) or again
        written = await self._write_status(key, job, plan)
        for notice in plan.notices:
            await self._events.record(job.raw, "Warning" if notice.warning else "Normal", notice.reason, notice.message)
        self._measure(key, plan, memory)
        if again:
            return 0.0
        wakes = [wake for wake in (plan.wake_at, memory.retry_at if memory.trouble else None) if wake]
        if written:
            # Some of what is decided waits until it is written down; mostly there is nothing more to do.
            wakes.append(now + _SETTLE)
        return max(_SETTLE, min(wakes) - time.time()) if wakes else None

    def _follow(self, key: Key, job: Job) -> None:
        """Keep the connection to the coordinator that the status names."""
        name = job.status.coordinator
        pods = self._store.pods_of(key)
        coordinator = next((p for p in pods if p.name == name and p.owner == job.uid and p.live), None)
        if job.status.finished and coordinator is None:
            self._links.drop(key)
        elif name is not None:
            known = self._links.view(key)
            if coordinator is None and known is not None and any(p.uid == known.pod for p in pods):
                return  # it is ending, and may still say how the training did
            self._links.follow(key, job.uid, coordinator)
        else:
            self._links.drop(key)

    async def _tell(self, key: Key, plan: Plan, memory: _Memory, touched: float | None) -> bool:
        for call in plan.calls:
            told = await self._links.send(key, call)
            if isinstance(call, TellDrain | TellGone):
                logger.info("%s: %s", call.workers if isinstance(call, TellDrain) else call.worker, call.reason)
                if told and touched is not None:
                    self._metrics.loss_told(time.monotonic() - touched)
                if isinstance(call, TellGone) and memory.lost_at is None:
                    memory.lost_at = touched if touched is not None else time.monotonic()
        return False

    # --- the API server ----------------------------------------------------------------------------------------------

    async def _act(self, key: Key, job: Job, plan: Plan, memory: _Memory) -> bool:
        """Carry out the actions; whether to reconcile again at once."""
        again = False
        creations = [action for action in plan.actions if isinstance(action, CreatePod)]
        for action in plan.actions:
            if not isinstance(action, CreatePod):
                again = await self._do(key, job, action, memory) or again
        if creations and time.time() >= memory.retry_at:
            refusal = await self._create(key, job, creations, memory)
            self._note_refusal(memory, refusal)
            again = again or bool(refusal)
        return again

    def _note_refusal(self, memory: _Memory, refusal: str) -> None:
        """Remember why something cannot be created, and until when it makes no sense to try again."""
        if not refusal:
            memory.trouble, memory.troubles, memory.retry_at = "", 0, 0.0
            return
        memory.trouble, memory.troubles = refusal, memory.troubles + 1
        delay = min(_REFUSED_FIRST * 2 ** min(memory.troubles - 1, 10), self._settings.crashes.backoff_most)
        memory.retry_at = time.time() + delay
        logger.warning("the API server refuses what the job needs, next try in %.0f s: %s", delay, refusal)

    async def _do(self, key: Key, job: Job, action: Action, memory: _Memory) -> bool:
        match action:
            case CheckTemplates():
                memory.verdict = await self._check(job, action)
                return True
            case CreateService(manifest):
                await self._create_service(key, job, manifest)
                return True
            case PointService(name, selector):
                body = await self._api.patch(SERVICES, job.namespace, name, {"spec": {"selector": selector}})
                self._store.services.put(body)
            case DeletePod():
                await self._delete_pod(key, job.namespace, action)
            case DeleteJob():
                logger.info("deleting the job: it was over for ttlSecondsAfterFinished")
                await _ignoring(self._api.delete(JOBS, job.namespace, job.name, uid=job.uid), NotFound, Conflict)
            case CreatePod():
                raise AssertionError("pods are created together")
        return False

    async def _check(self, job: Job, action: CheckTemplates) -> Verdict:
        """Have the API server look at the templates without storing anything."""
        for manifest in action.manifests:
            try:
                await self._api.create(PODS, job.namespace, manifest, dry_run=True)
            except (Invalid, Forbidden) as error:
                if "exceeded quota" in error.message:
                    continue  # which says nothing about the template
                logger.info("the API server refuses the worker template: %s", error)
                return Verdict(action.template_hash, time.time(), error.message)
        return Verdict(action.template_hash, time.time())

    async def _support(self, job: Job, memory: _Memory) -> None:
        """Secret, disruption budget, network policy. A Secret that exists may be a namesake's: it is made anew."""
        if memory.supported:
            return
        secret = resources.secret(job, resources.derive_token(self._key, job.uid))
        try:
            await self._api.create(SECRETS, job.namespace, secret)
        except AlreadyExists:
            await _ignoring(self._api.delete(SECRETS, job.namespace, secret["metadata"]["name"]), NotFound)
            await self._api.create(SECRETS, job.namespace, secret)
        if await self._is_offered(PDBS):
            await _ignoring(self._api.create(PDBS, job.namespace, resources.disruption_budget(job)), AlreadyExists)
        if self._settings.network_policies:
            policy = resources.network_policy(job, self._settings)
            await _ignoring(self._api.create(NETWORK_POLICIES, job.namespace, policy), AlreadyExists)
        memory.supported = True

    async def _is_offered(self, resource: Resource) -> bool:
        if resource not in self._offers:
            self._offers[resource] = await self._api.offers(resource)
        return self._offers[resource]

    async def _create_service(self, key: Key, job: Job, manifest: Object) -> None:
        name = manifest["metadata"]["name"]
        try:
            self._store.services.put(await self._api.create(SERVICES, job.namespace, manifest))
        except AlreadyExists:
            body = await self._api.get(SERVICES, job.namespace, name)
            owners = body["metadata"].get("ownerReferences") or []
            if not any(owner.get("uid") == job.uid for owner in owners):
                raise RetryLater(2.0, f"a service {name} of something else is in the way; delete it") from None
            self._store.services.put(body)

    async def _create(self, key: Key, job: Job, creations: list[CreatePod], memory: _Memory) -> str:
        """Create pods and what they need; why the API server refuses, empty if it does not."""
        try:
            await self._support(job, memory)
        except (Invalid, Forbidden) as error:
            return error.message
        results = await asyncio.gather(
            *(self._api.create(PODS, job.namespace, creation.manifest) for creation in creations),
            return_exceptions=True,
        )
        refusal, unexpected, stale = "", None, False
        for creation, result in zip(creations, results, strict=True):
            if isinstance(result, dict):
                logger.info("created the pod %s", creation.name)
                self._store.put_pod(result)
                self._metrics.pod_created(creation.role)
            elif isinstance(result, AlreadyExists):
                stale = True
            elif isinstance(result, Invalid | Forbidden):
                refusal = result.message
            else:
                unexpected = result
        if stale:
            await self._refresh(key)
            known = {pod.name for pod in self._store.pods_of(key)}
            taken = [c.name for c, r in zip(creations, results, strict=True) if isinstance(r, AlreadyExists)]
            strangers = [name for name in taken if name not in known]
            if strangers:
                refusal = f"a pod {strangers[0]} that is not this job's is in the way; delete it or rename the job"
        if unexpected is not None:
            raise unexpected
        return refusal

    async def _delete_pod(self, key: Key, namespace: str, action: DeletePod) -> None:
        pod = next((p for p in self._store.pods_of(key) if p.uid == action.uid), None)
        if pod is None or pod.terminating:
            return
        logger.info("deleting the pod %s: %s", action.name, action.reason)
        grace = None if action.grace is None else int(action.grace)
        try:
            await self._api.delete(PODS, namespace, action.name, uid=action.uid, grace_seconds=grace)
        except (NotFound, Conflict):
            self._store.remove_pod(namespace, action.name, action.uid)
        self._metrics.pod_deleted(action.cause)

    async def _write_status(self, key: Key, job: Job, plan: Plan) -> bool:
        """Write the status if it differs, on top of the version that the decision was made from; whether it did."""
        old = job.raw.get("status") or {}
        patch = merge_patch(old, write_status(plan.status))
        if not patch:
            return False
        version = job.raw["metadata"].get("resourceVersion")
        body = {"metadata": {"resourceVersion": version}, "status": patch}
        try:
            written = await self._api.patch(JOBS, job.namespace, job.name, body, "status")
        except Conflict:
            await self._reread(key)
            raise RetryLater(0.02, "the job has changed meanwhile") from None
        except NotFound:
            self._store.jobs.remove(job.namespace, job.name, job.uid)
            raise RetryLater(0.0, "the job is deleted") from None
        self._store.jobs.put(written)
        if written["metadata"].get("resourceVersion") == version:
            # The schema in the cluster is older and drops what is new: nothing to settle, and no reason to hurry.
            logger.warning("the API server does not keep %s of the status; upgrade the CRD", ", ".join(sorted(patch)))
            return False
        return True

    async def _reread(self, key: Key) -> None:
        try:
            self._store.jobs.put(await self._api.get(JOBS, *key))
        except NotFound:
            self._store.jobs.remove(*key)

    async def _refresh(self, key: Key) -> None:
        """The store has missed something of this job: list its pods."""
        begun = time.monotonic()
        bodies = await self._api.list(PODS, key[0], f"{LABEL_JOB}={key[1]}")
        names = {pod.name for pod in self._store.pods_of(key)}
        self._store.replace_pods(bodies, begun, lambda place: place[0] == key[0] and place[1] in names)

    # --- jobs that are no more ---------------------------------------------------------------------------------------

    async def _bury(self, key: Key) -> float | None:
        """A job was deleted: its pods go by themselves, but need not train until their grace is over."""
        pods = self._store.pods_of(key)
        if pods:
            try:
                self._store.jobs.put(await self._api.get(JOBS, *key))
                return 0.0  # it is there after all
            except NotFound:
                await self._end(key, [pod for pod in pods if pod.owner])
        self._links.drop(key)
        self._memories.pop(key, None)
        self._metrics.forget_job(*key)
        self._store.forget_job(key)
        return None

    async def _clear_predecessor(self, key: Key, job: Job) -> None:
        """Pods of an earlier job of this name stand in the way of this one's."""
        former = [pod for pod in self._store.pods_of(key) if pod.owner and pod.owner != job.uid]
        await self._end(key, former)

    async def _end(self, key: Key, pods: list[Pod]) -> None:
        grace = int(self._settings.orphan_grace)
        for pod in pods:
            if pod.deleting_at is not None and pod.deleting_at <= time.time() + grace + 1:
                continue
            logger.info("deleting the pod %s: its job is deleted", pod.name)
            deletion = self._api.delete(PODS, key[0], pod.name, uid=pod.uid, grace_seconds=grace)
            await _ignoring(deletion, NotFound, Conflict)

    # --- lists -------------------------------------------------------------------------------------------------------

    async def resync(self) -> set[Key]:
        """Replace what the watches have told by lists; all jobs, and those that have changed or vanished.

        Raises:
            ApiError: a list could not be had.
        """
        concerned: set[Key] = set()
        for namespace in self._settings.namespaces or (None,):

            def within(place: Key, here: str | None = namespace) -> bool:
                return here is None or place[0] == here

            begun = time.monotonic()
            concerned |= self._store.jobs.replace(await self._api.list(JOBS, namespace), begun, within)
            begun = time.monotonic()
            self._store.services.replace(await self._api.list(SERVICES, namespace, OURS), begun, within)
            begun = time.monotonic()
            concerned |= self._store.replace_pods(await self._api.list(PODS, namespace, OURS), begun, within)
        begun = time.monotonic()
        try:
            self._store.nodes.replace(await self._api.list(NODES), begun, lambda _: True)
            self._store.nodes_known = True
        except Forbidden as error:
            self._store.nodes_known = False
            logger.warning("nodes may not be looked at, so their losses are not announced: %s", error)
        return concerned | set(self._store.jobs.entries)

    # --- metrics -----------------------------------------------------------------------------------------------------

    def _measure(self, key: Key, plan: Plan, memory: _Memory) -> None:
        for change in plan.changes:
            seconds = None if change.pause_ms is None else change.pause_ms / 1000
            self._metrics.change(change.cause, seconds, change.repeated_steps)
            if change.cause in ("lost", "broken", "restart") and memory.lost_at is not None:
                self._metrics.recovered(time.monotonic() - memory.lost_at)
                memory.lost_at = None
        self._metrics.job(*key, _sample(plan.status))


def _sample(status: JobStatus) -> JobSample:
    wanted = status.workers.rpartition("/")[2]
    return JobSample(
        phase=status.phase,
        workers_wanted=0 if status.finished or not wanted else int(wanted),
        workers_ready=status.ready_replicas,
        step=status.step,
        total_steps=status.total_steps,
        steps_per_second=float(status.steps_per_second) if status.steps_per_second else None,
        loss=float(status.loss) if status.loss else None,
    )


async def _ignoring(call: Awaitable[object], *errors: type[ApiError]) -> None:
    """Await ``call``; these errors mean that there was nothing to do."""
    with contextlib.suppress(*errors):
        await call

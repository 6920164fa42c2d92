"""Carries out what the reconciler decides, one job at a time: calls, pods, status, events, in that order.

Everything may fail or be done twice. An error of the API server leaves the rest of the plan for the next try, which
begins from what is true then.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from virtualflow.protocol.http_api import Call, DrainCall, GoneCall, WorkerSeconds
from virtualflow_operator.api import (
    Job,
    Object,
    Pod,
    merge_patch,
    read_job,
    write_status,
)
from virtualflow_operator.constants import COORDINATOR, MANAGER, WORKER
from virtualflow_operator.controllers.admissions import Admissions
from virtualflow_operator.controllers.coordinator_links import CoordinatorLinks
from virtualflow_operator.controllers.issuer import Issuer
from virtualflow_operator.controllers.provisioner import CreationRefusal, Provisioner, ignoring, keeping, raise_first
from virtualflow_operator.controllers.workqueue import RetryLater
from virtualflow_operator.jobs import (
    AdmissionAction,
    CheckTemplates,
    CreatePod,
    CreateService,
    DeleteJob,
    DeletePod,
    EventMessage,
    IssueIdentity,
    JobPlan,
    PodEvent,
    PointService,
    ReadEvents,
    Scene,
    TemplateVerdict,
    is_progress,
    manifests,
    phases,
    reconcile,
)
from virtualflow_operator.k8s import (
    JOBS,
    PODS,
    SERVICES,
    ApiError,
    Conflict,
    EventRecorder,
    Key,
    KubeApi,
    NotFound,
    Store,
    TokenBucket,
)
from virtualflow_operator.observability import Metrics, job_context, sample
from virtualflow_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

_SETTLE = 0.05
"""The time between two reconciliations of a job that follow from one another."""
_CALL_RETRY = 1.0
"""A coordinator is told after this long what it could not be told."""
_WRITES_AT_ONCE = 10
"""A job's status is written once a second at most after so many times in a row, as they follow from a beginning."""
_FAILURES_TOLD = 3
"""What fails so many times in a row is said in the status: a hiccup of the API server is over by then."""
_ORPHAN_GRACE = 2.0
"""How long a pod may be without its job before it is taken for an orphan: caches may lag."""
ORPHAN = "orphan"
"""The finalizer of a job that is deleted with ``--cascade=orphan``, by the API server."""
SERVICE = "service"
_KINDS = (SERVICE, COORDINATOR, WORKER)
FOREGROUND = "foregroundDeletion"
"""The finalizer of the garbage collector, which takes it off once what the job owns is gone."""
_IDENTITY = ("uid", "generation", "deletionTimestamp")
"""What of a job's metadata says that it is the same and wants the same."""


@dataclass
class _Memory:
    """What is remembered of a job between two reconciliations, and may be lost."""

    uid: str
    verdict: TemplateVerdict | None = None
    refusals: dict[str, CreationRefusal] = field(default_factory=lambda: {kind: CreationRefusal() for kind in _KINDS})
    """By what was refused: the service, the coordinator, workers."""
    events: dict[str, PodEvent] = field(default_factory=dict)
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=_FAILURES_TOLD))
    """Errors of actions in a row that are no refusal: a webhook that does not answer, mostly."""
    lost_at: float | None = None
    """Since when (monotonic) a loss is known that nobody has recovered from."""
    worker_seconds: WorkerSeconds | None = None
    """The latest that a coordinator has told."""
    writes: TokenBucket = field(default_factory=lambda: TokenBucket(_WRITES_AT_ONCE, 1.0))
    """Times that the status may be written."""
    written_at: float = -math.inf
    """When it was (monotonic)."""

    @property
    def trouble(self) -> str:
        """What the API server refuses, in words."""
        return next((refusal.reason for refusal in self.refusals.values() if refusal.reason), "")

    @property
    def failure(self) -> str:
        """What fails again and again, in words."""
        return self.failures[-1] if len(self.failures) == _FAILURES_TOLD else ""


class JobController:
    """The operator's work on jobs; ``process`` is what the work-queue runs."""

    def __init__(
        self,
        *,
        api: KubeApi,
        store: Store,
        links: CoordinatorLinks,
        events: EventRecorder,
        metrics: Metrics,
        issuer: Issuer,
        settings: OperatorSettings,
        admissions: Admissions,
    ) -> None:
        self._api, self._store, self._links = api, store, links
        self._admissions = admissions
        self._events, self._metrics, self._settings = events, metrics, settings
        self._provisioner = Provisioner(api, store, metrics, issuer, settings)
        self._cleanup = JobCleanup(api, store, links, settings)
        self._memories: dict[Key, _Memory] = {}
        self.touched: dict[Key, float] = {}
        """When (monotonic) the oldest news came that a job was not reconciled for."""

    async def process(self, key: Key) -> float | None:
        """Reconcile a job; in how many seconds to do it again, if so.

        Raises:
            ApiError: the API server could not be asked; the queue tries again.
            RetryLater: something had changed meanwhile.
        """
        with job_context(*key):
            touched = self.touched.pop(key, None)
            body = self._store.job(key)
            if body is None:
                return await self._bury(key)
            job = read_job(body)
            if job.spec.managed_by not in (None, "", MANAGER):
                return None  # another controller's
            if body["metadata"].get("deletionTimestamp"):
                finalizers = set(body["metadata"].get("finalizers") or ())
                self._metrics.jobs.pop(key, None)
                if ORPHAN in finalizers:
                    self._links.drop(key)  # what it owns is to go on without it
                    return None
                own = [pod for pod in self._store.pods_of(key) if pod.owner == job.uid]
                if not await self._cleanup.dismiss(key, own):
                    self._links.drop(key)
                    if not own and finalizers - {FOREGROUND}:
                        old, new = body.get("status") or {}, write_status(phases.deleted(job, time.time()))
                        await self._write_status(key, job, merge_patch(old, new), _Memory(job.uid))
                return None
            return await self._reconcile(key, job, touched)

    async def _reconcile(self, key: Key, job: Job, touched: float | None) -> float | None:
        memory = self._memories.get(key)
        if memory is None or memory.uid != job.uid:
            memory = self._memories[key] = _Memory(job.uid)
        if any(pod.owner not in ("", job.uid) and not pod.terminating for pod in self._store.pods_of(key)):
            # The garbage collector took the owner from orphans before this job could be made: look at them as they are.
            await self._provisioner.refresh(key)
        await self._cleanup.clear_predecessor(key, job)
        if not job.faults and (missing := self._admissions.missing(job)):
            job = replace(job, faults=(missing,))
        admission = await self._admissions.of(key, job)
        self._follow(key, job)
        service = self._store.service_of(key, manifests.coordinator_name(job))
        scene = Scene(
            job=job,
            pods=self._store.pods_of(key),
            former=self._store.former_of(key),
            service=service if service is not None and service.owner == job.uid else None,
            orphaned_service=service is not None and not service.owner,
            nodes=self._store.node_map(),
            link=self._links.view(key),
            verdict=memory.verdict,
            trouble=memory.trouble,
            failure=memory.failure,
            events=memory.events,
            issued=self._provisioner.issued(job, self._store.pods_of(key)),
            admission=admission,
        )
        now = time.time()
        plan = reconcile(scene, now, self._settings)
        again = await self._tell(key, plan.calls, plan, memory, touched)
        failure: ApiError | None = None
        try:
            acted = await self._act(key, job, plan, memory)
            again = acted if acted is not None else again
            if memory.failures:
                memory.failures.clear()
                again = 0.0
        except ApiError as error:
            failure = error  # what is known is written down all the same
            memory.failures.append(error.message)
        patch = merge_patch(job.raw.get("status") or {}, write_status(plan.status))
        postponed = self._postponed(job, patch, memory)
        if postponed > 0:
            # What is to follow upon the status has to wait with it.
            written, plan = False, replace(plan, events=plan.action_events, changes=())
            retold = None
        else:
            written = await self._write_status(key, job, patch, memory)
            retold = await self._tell(key, plan.written_calls, plan, memory, touched)
        if written:
            self._admissions.note_status(job, plan.status)
        for event in plan.events:
            await self._record(job, event)
        self._measure(key, scene, plan, memory)
        if failure is not None:
            raise failure
        if again is not None or retold is not None:
            return again if again is not None else retold
        retries = [refusal.retry_at for refusal in memory.refusals.values() if refusal.reason]
        wakes = [wake for wake in (plan.wake_at, *retries) if wake is not None]
        if postponed > 0:
            wakes.append(now + postponed)
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
            workers = sum(pod.role == WORKER for pod in pods)
            self._links.follow(key, job.uid, coordinator, workers)
        else:
            self._links.drop(key)

    async def _tell(
        self, key: Key, calls: Iterable[Call], plan: JobPlan, memory: _Memory, touched: float | None
    ) -> float | None:
        """Make calls to the coordinator; in how many seconds to try again, if it was not to be reached."""
        for call in calls:
            outcome = await self._links.send(key, call)
            if isinstance(call, DrainCall | GoneCall):
                logger.info("%s: %s", call.workers if isinstance(call, DrainCall) else call.worker, call.reason)
                if outcome == "ok" and touched is not None:
                    self._metrics.loss_told.observe(time.monotonic() - touched)
            if isinstance(call, GoneCall) and call.incarnation in plan.recoveries:
                memory.lost_at = touched if touched is not None else time.monotonic()
            if outcome == "unreachable":
                return _CALL_RETRY  # the others would fare no better
        return None

    # --- the API server ----------------------------------------------------------------------------------------------

    async def _act(self, key: Key, job: Job, plan: JobPlan, memory: _Memory) -> float | None:
        """Carry out the actions; in how many seconds to reconcile again, if that is needed.

        Raises:
            ApiError: the first, when everything was tried that does not wait for what has failed.
        """
        errors: list[ApiError] = []
        again: float | None = None
        with keeping(errors):
            again = await self._change(key, job, plan, memory)
        # Nothing waits for these: a webhook that is down keeps no job from its queue, and no lost worker from being
        # replaced.
        missing = any(pod.lacks_config for pod in self._store.pods_of(key))
        # Of a volume that cannot be mounted, a pod's status says nothing.
        missing = missing or any(isinstance(action, ReadEvents) for action in plan.actions)
        if missing or (self._settings.network_policies and job.status.coordinator and not job.status.finished):
            with keeping(errors):
                await self._provisioner.support(job, missing=missing)
        if issues := [action for action in plan.actions if isinstance(action, IssueIdentity)]:
            again = 0.0
            with keeping(errors):
                await self._provisioner.issue_all(job, issues)
        for action in plan.actions:
            with keeping(errors):
                match action:
                    case CheckTemplates():
                        memory.verdict = await self._provisioner.check(job, action)
                        again = 0.0
                    case ReadEvents(uid=uid):
                        here = {pod.uid for pod in self._store.pods_of(key)}
                        kept = {pod: event for pod, event in memory.events.items() if pod in here}
                        memory.events = kept | {uid: await self._provisioner.latest_event(job, uid)}
                        again = 0.0
        raise_first(errors)
        return again

    async def _change(self, key: Key, job: Job, plan: JobPlan, memory: _Memory) -> float | None:
        """Make, change and delete what the plan says, and ask for quota; as ``_act``."""
        again: float | None = None
        answers = dict.fromkeys(_KINDS, "")
        making = [action for action in plan.actions if isinstance(action, CreateService | CreatePod)]
        kinds = {SERVICE if isinstance(action, CreateService) else action.role for action in making}
        if self._store.loses(key) and any(time.time() >= memory.refusals[kind].retry_at for kind in kinds):
            await self._confirm(key, job)
        for action in plan.actions:
            match action:
                case CreateService(manifest):
                    if time.time() < memory.refusals[SERVICE].retry_at:
                        answers[SERVICE] = memory.refusals[SERVICE].reason
                        continue
                    answers[SERVICE] = await self._provisioner.service(job, manifest)
                    memory.refusals[SERVICE].note(answers[SERVICE], self._settings)
                    again = 0.0
                case PointService(name, selector):
                    body = await self._api.patch(SERVICES, job.namespace, name, {"spec": {"selector": selector}})
                    self._store.services.put(body)
                case DeletePod():
                    await self._delete_pod(key, job.namespace, action)
                case DeleteJob():
                    logger.info("deleting the job: it was over for ttlSecondsAfterFinished")
                    await ignoring(self._api.delete(JOBS, job.namespace, job.name, uid=job.uid), NotFound, Conflict)
                case AdmissionAction():
                    if await self._admissions.carry_out(job, action):
                        again = 0.0
        for role in (COORDINATOR, WORKER):  # the coordinator first: a quota's last place is not for a worker
            creations = [a for a in plan.actions if isinstance(a, CreatePod) and a.role == role]
            refusal = memory.refusals[role]
            if not creations:
                continue
            if time.time() < refusal.retry_at:
                answers[role] = refusal.reason
                break
            made: list[str] = []
            try:
                answers[role] = await self._provisioner.pods(key, job, creations, made)
            finally:
                if role == WORKER and made:
                    await self._record(job, EventMessage.created(made))
            refusal.note(answers[role], self._settings)
            again = 0.0 if answers[role] else again
            if answers[role]:
                break
        for kind, reason in answers.items():
            if not reason and memory.refusals[kind].reason:
                memory.refusals[kind].note("", self._settings)  # nothing more is wanted of that kind, or it was granted
                again = 0.0
        return again

    async def _record(self, job: Job, event: EventMessage) -> None:
        await self._events.record(job.raw, "Warning" if event.warning else "Normal", event.reason, event.message)

    async def _confirm(self, key: Key, job: Job) -> None:
        """Ask whether the job is still wanted as it was: what goes because its job does must not be made anew.

        The watches of jobs and of pods are two, and that of the pods may be the faster one.

        Raises:
            RetryLater: it is deleted, or another by now.
        """
        await self._reread(key)
        metadata = (self._store.job(key) or {}).get("metadata") or {}
        if any(metadata.get(name) != job.raw["metadata"].get(name) for name in _IDENTITY):
            raise RetryLater(0.0, "the job has changed or is deleted meanwhile")

    async def _delete_pod(self, key: Key, namespace: str, action: DeletePod) -> None:
        pod = next((p for p in self._store.pods_of(key) if p.uid == action.uid), None)
        if pod is None or pod.terminating:
            return
        logger.info("deleting the pod %s: %s", action.name, action.reason)
        grace = None if action.grace is None else int(action.grace)
        try:
            rest = await self._api.delete(PODS, namespace, action.name, uid=action.uid, grace_seconds=grace)
            if (rest.get("metadata") or {}).get("deletionTimestamp"):
                self._store.put_pod(rest)  # before another decision is made from what was
        except (NotFound, Conflict):
            self._store.remove_pod(namespace, action.name, action.uid)
        self._metrics.pods_deleted.labels(action.cause).inc()

    def _postponed(self, job: Job, patch: Object, memory: _Memory) -> float:
        """For how many seconds the status is not to be written yet: a coordinator may say something else each time."""
        now = time.monotonic()
        rest = memory.writes.wait(now)
        if patch and is_progress(job.raw.get("status") or {}, patch):
            return max(rest, memory.written_at + self._settings.progress_interval - now)
        return rest if patch else 0.0

    async def _write_status(self, key: Key, job: Job, patch: Object, memory: _Memory) -> bool:
        """Write what differs of the status on top of the version that the decision was made from; whether any does."""
        if not patch:
            return False
        memory.written_at = time.monotonic()
        memory.writes.spend(memory.written_at)
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

    async def _bury(self, key: Key) -> float | None:
        """A job was deleted: end what is left of it, then forget it; in how many seconds to look again, if so."""
        pods = self._store.pods_of(key)
        if pods:
            try:
                self._store.jobs.put(await self._api.get(JOBS, *key))
                return 0.0  # it is there after all
            except NotFound:
                # Before an orphaning job is gone, its pods lose their owner; their watch may tell that later.
                if any(pod.owner and not pod.terminating for pod in pods):
                    await self._provisioner.refresh(key)
                    pods = self._store.pods_of(key)
                if await self._cleanup.dismiss(key, [pod for pod in pods if pod.owner]):
                    return None  # the end of a pod or of the coordinator wakes it again
        self._links.drop(key)
        memory = self._memories.pop(key, None)
        if memory is not None:
            self._provisioner.forget(memory.uid)
        self._metrics.jobs.pop(key, None)
        self._store.forget_job(key)
        return None

    # --- metrics -----------------------------------------------------------------------------------------------------

    def _measure(self, key: Key, scene: Scene, plan: JobPlan, memory: _Memory) -> None:
        for change in plan.changes:
            seconds = None if change.pause_ms is None else change.pause_ms / 1000
            self._metrics.change(change.cause, seconds, change.repeated_steps, change.repeated_virtual_nodes)
            if change.cause in ("lost", "broken", "restart") and memory.lost_at is not None:
                self._metrics.recovery.observe(time.monotonic() - memory.lost_at)
                memory.lost_at = None
        remote = scene.link.status if scene.link is not None else None
        if remote is not None and remote.worker_seconds is not None:
            memory.worker_seconds = remote.worker_seconds
        self._metrics.jobs[key] = sample(scene.job.spec, plan.status, plan.workers_wanted, memory.worker_seconds)


# --- the pods of deleted jobs: the garbage collector takes them, but they need not train until their grace is over ----


class JobCleanup:
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
        grace = int(_ORPHAN_GRACE)
        for pod in pods:
            if pod.deleting_at is not None and pod.deleting_at <= time.time() + grace + 1:
                continue
            logger.info("deleting the pod %s: its job is deleted", pod.name)
            try:
                await self._api.delete(PODS, key[0], pod.name, uid=pod.uid, grace_seconds=grace)
            except (NotFound, Conflict):
                self._store.remove_pod(key[0], pod.name, pod.uid)  # no watch has told of its end

"""Makes what a job needs: its Secrets, service, disruption budget, network policy and pods.

What the API server refuses is an answer, not an error: it goes into the job's status,
and is tried again after longer and longer waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from virtualflow.protocol.certificates import Party, Role
from virtualflow_operator.api import Job, Object, Pod, parse_time, read_pod, read_service
from virtualflow_operator.constants import COORDINATOR, LABEL_GROUP, LABEL_JOB
from virtualflow_operator.controllers.issuer import Issuer
from virtualflow_operator.controllers.workqueue import RetryLater
from virtualflow_operator.jobs import CheckTemplates, CreatePod, IssueIdentity, PodEvent, TemplateVerdict, manifests
from virtualflow_operator.k8s import (
    EVENTS,
    NETWORK_POLICIES,
    PDBS,
    PODS,
    SECRETS,
    SERVICES,
    AlreadyExists,
    ApiError,
    Forbidden,
    Invalid,
    Key,
    KubeApi,
    NotFound,
    Store,
)
from virtualflow_operator.observability import Metrics
from virtualflow_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

_POD_BATCH = 16
"""Pods made at once for one job: others wait for connections too."""
_REFUSAL_FIRST = 5.0
"""What the API server has refused is tried again after this long, then after twice as long."""
_EVENTS = 100
"""Of a pod's events, so many are read at most."""
_EVENT_CHARACTERS = 1_024
"""Of an event, what a status repeats."""
_PREDECESSOR = 0.5
"""What the garbage collector is about to take is looked for again after this long."""
_SECRET_RETRY = 10.0
"""A Secret that pods say is missing is looked at again after this long."""


@dataclass
class CreationRefusal:
    """What the API server refuses of one kind, and until when it makes no sense to ask again."""

    reason: str = ""
    count: int = 0
    retry_at: float = 0.0
    """Unix seconds."""

    def note(self, reason: str, settings: OperatorSettings) -> None:
        """Take note of an answer; an empty reason: it was granted, or is not needed any more."""
        if not reason:
            self.reason, self.count, self.retry_at = "", 0, 0.0
            return
        self.reason, self.count = reason, self.count + 1
        delay = min(_REFUSAL_FIRST * 2 ** min(self.count - 1, 10), settings.crashes.backoff_most)
        self.retry_at = time.time() + delay
        logger.warning("the API server refuses what the job needs, next try in %.0f s: %s", delay, reason)


class Provisioner:
    def __init__(
        self, api: KubeApi, store: Store, metrics: Metrics, issuer: Issuer, settings: OperatorSettings
    ) -> None:
        self._api, self._store, self._metrics = api, store, metrics
        self._issuer, self._settings = issuer, settings
        self._supported: dict[str, float] = {}
        self._issued: dict[str, dict[str, float]] = {}

    def forget(self, uid: str) -> None:
        self._supported.pop(uid, None)
        self._issued.pop(uid, None)

    def issued(self, job: Job, pods: Sequence[Pod]) -> Mapping[str, float]:
        """When (Unix seconds) this process has issued the identities of which of these pods, by uid."""
        here = {pod.uid for pod in pods}
        known = {uid: at for uid, at in self._issued.get(job.uid, {}).items() if uid in here}
        if known:
            self._issued[job.uid] = known
        return known

    async def issue_all(self, job: Job, issues: Sequence[IssueIdentity]) -> None:
        """Give pods the Secrets with their identities.

        Raises:
            ApiError: the first, when each pod's was tried.
        """
        errors: list[ApiError] = []
        for first in range(0, len(issues), _POD_BATCH):
            await asyncio.gather(
                *(self._issue(job, each.pod, each.renew, errors) for each in issues[first : first + _POD_BATCH])
            )
        raise_first(errors)

    async def _issue(self, job: Job, pod: Pod, renew: bool, errors: list[ApiError]) -> None:
        now = time.time()
        role: Role = "coordinator" if pod.role == COORDINATOR else "worker"
        files = self._issuer.files_of(Party(job.uid, role, pod.name, pod.uid), now)
        secret = manifests.identity_secret(job, pod, files)
        issued = self._issued.setdefault(job.uid, {})
        with keeping(errors):
            if renew:
                with contextlib.suppress(NotFound):
                    await self._api.replace(SECRETS, job.namespace, pod.identity, secret)
                    issued[pod.uid] = now
                    return
            try:
                await self._api.create(SECRETS, job.namespace, secret)
            except AlreadyExists:
                # It is this pod's, for no other has a Secret of that name, and may be as old as the last one issued.
                now = issued.get(pod.uid, now)
            issued[pod.uid] = now

    async def check(self, job: Job, action: CheckTemplates) -> TemplateVerdict:
        """Have the API server look at the templates without storing anything."""
        for manifest in action.manifests:
            try:
                await self._api.create(PODS, job.namespace, manifest, dry_run=True)
            except (Invalid, Forbidden) as error:
                if "exceeded quota" in error.message:
                    continue  # which says nothing about the template
                logger.info("the API server refuses a template: %s", error)
                labels = manifest["metadata"]["labels"]
                whose = f"worker group {labels[LABEL_GROUP]}" if LABEL_GROUP in labels else COORDINATOR
                return TemplateVerdict(action.template_hash, time.time(), f"{whose}: {error.message}")
        return TemplateVerdict(action.template_hash, time.time())

    async def latest_event(self, job: Job, uid: str) -> PodEvent:
        """The latest event of a pod that has a node."""
        now = time.time()
        try:
            events = await self._api.list(
                EVENTS, job.namespace, field_selector=f"involvedObject.uid={uid}", most=_EVENTS
            )
        except Forbidden as error:
            logger.info("why a pod does not start is not known: %s", error)
            return PodEvent(now)
        told = [event for event in events if event.get("reason") != "FailedScheduling"]
        if not told:
            return PodEvent(now)
        latest = max(told, key=lambda event: (_last_seen(event), event.get("type") == "Warning"))
        said = ": ".join(str(latest[key]) for key in ("reason", "message") if latest.get(key))
        return PodEvent(now, said[:_EVENT_CHARACTERS], latest.get("type") == "Warning")

    async def service(self, job: Job, manifest: Object) -> str:
        """Make the coordinator's service; why not, if it cannot be."""
        name = manifest["metadata"]["name"]
        try:
            self._store.services.put(await self._api.create(SERVICES, job.namespace, manifest))
        except AlreadyExists:
            body = await self._api.get(SERVICES, job.namespace, name)
            owner = read_service(body).owner
            if owner not in ("", job.uid):
                raise RetryLater(_PREDECESSOR, f"the Service {name} of an earlier job is going") from None
            if not owner:
                return f"a Service {name} that is not this job's is in the way; delete it or rename the job"
            self._store.services.put(body)
        except (Invalid, Forbidden) as error:
            spec = manifest["spec"]
            if "clusterIP" not in spec:
                return error.message
            logger.warning("the address of the former Service %s cannot be had: %s", name, error)
            return await self.service(job, manifest | {"spec": {key: spec[key] for key in spec if key != "clusterIP"}})
        return ""

    async def pods(self, key: Key, job: Job, creations: Sequence[CreatePod], made: list[str]) -> str:
        """Make pods and what they need; why the API server refuses, empty if it does not.

        ``made``: gets the names of those that were made, also if the call fails.
        """
        refusal = await self.support(job)
        size = _POD_BATCH
        for first in range(0, len(creations), size):
            if not refusal:
                refusal = await self._batch(key, job, creations[first : first + size], made)
        return refusal

    async def _batch(self, key: Key, job: Job, creations: Sequence[CreatePod], made: list[str]) -> str:
        results = await asyncio.gather(
            *(self._api.create(PODS, job.namespace, creation.manifest) for creation in creations),
            return_exceptions=True,
        )
        refusal, unexpected, taken, born = "", None, [], list[Pod]()
        for creation, result in zip(creations, results, strict=True):
            if isinstance(result, dict):
                logger.info("created the pod %s", creation.name)
                made.append(creation.name)
                self._store.put_pod(result)
                self._metrics.pods_created.labels(creation.role).inc()
                born.append(read_pod(result))
            elif isinstance(result, AlreadyExists):
                taken.append(creation.name)
            elif isinstance(result, Invalid | Forbidden):
                refusal = result.message
            else:
                unexpected = result
        errors: list[ApiError] = []
        with keeping(errors):
            await self.issue_all(job, [IssueIdentity(pod, renew=False) for pod in born if pod.identity])
        if taken:
            await self.refresh(key)
            strangers = set(taken) - {pod.name for pod in self._store.pods_of(key)}
            if strangers:
                refusal = f"a pod {min(strangers)} without this job's labels is in the way; delete it or rename the job"
        if unexpected is not None:
            raise unexpected
        raise_first(errors)
        return refusal

    async def refresh(self, key: Key) -> None:
        """The store has missed something of this job: list its pods."""
        begun = time.monotonic()
        pods = await self._api.list(PODS, key[0], f"{LABEL_JOB}={key[1]}", read=self._store.pods.listed)
        names = {pod.name for pod in self._store.pods_of(key)}
        self._store.replace_pods(pods, begun, lambda place: place[0] == key[0] and place[1] in names)

    async def support(self, job: Job, *, missing: bool = False) -> str:
        """See to Secret, disruption budget and network policy, once; why not, if one of them cannot be made.

        Args:
            missing: whether a pod may lack something that it names: the Secret, perhaps.
        """
        seen_to = self._supported.get(job.uid)
        if seen_to is not None and not (missing and time.monotonic() > seen_to + _SECRET_RETRY):
            return ""
        secret = manifests.secret(job, self._issuer.token(job.uid), self._settings)
        try:
            # It cannot be read, and need not be: one of that name has the token of this job by this key.
            await ignoring(self._api.create(SECRETS, job.namespace, secret), AlreadyExists)
            if self._settings.network_policies:
                policy = manifests.network_policy(job, self._settings)
                await ignoring(self._api.create(NETWORK_POLICIES, job.namespace, policy), AlreadyExists)
        except (Invalid, Forbidden) as error:
            return error.message
        try:
            await ignoring(self._api.create(PDBS, job.namespace, manifests.disruption_budget(job)), AlreadyExists)
        except (Invalid, Forbidden) as error:
            logger.warning("the job goes without a disruption budget: %s", error)
        self._supported[job.uid] = time.monotonic()
        return ""


def _last_seen(event: Object) -> float:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((seen for seen in map(parse_time, times) if seen is not None), 0.0)


@contextlib.contextmanager
def keeping(errors: list[ApiError]) -> Iterator[None]:
    """Put an error of the API server to the others: what follows does not wait for what has failed."""
    try:
        yield
    except ApiError as error:
        errors.append(error)


def raise_first(errors: Sequence[ApiError]) -> None:
    """Raise the first error, if there is any; the others are logged here, since nobody else hears of them."""
    for error in errors[1:]:
        logger.warning("beside another failure: %s", error)
    if errors:
        raise errors[0]


async def ignoring(call: Awaitable[object], *errors: type[ApiError]) -> None:
    """Await ``call``; these errors mean that there was nothing to do."""
    with contextlib.suppress(*errors):
        await call

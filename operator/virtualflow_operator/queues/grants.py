"""What a queue has given a job, and what the job makes of it. Pure.

A grant acts as ``kubectl scale`` and ``suspend`` would: the reconciler sees the job with that many ``replicas``, or
suspended. The user's own fields are never written, so what is under version control stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from virtualflow.protocol.wording import counted
from virtualflow_operator import reasons
from virtualflow_operator.api import (
    Allocation,
    Condition,
    Job,
    JobSpec,
    JobStatus,
    OfKind,
    Placement,
    Truth,
    format_time,
    parse_time,
)
from virtualflow_operator.queues.scaling_history import efficient_limit, no_further

MAX_MESSAGE = 4_096
"""Characters of a condition's message; the API takes 32,768, people less."""


@dataclass(frozen=True)
class Grant:
    """What a queue has decided about one job."""

    uid: str
    """Of the job."""
    queue: str
    workers: int
    reason: str
    """Why so many, in a sentence."""
    code: str = reasons.ALLOCATED
    """The reason of the condition ``Allocated``."""
    since: float = 0.0
    """When the job began to run, or to wait; Unix seconds, whole ones, as its status has them."""
    resized: float = 0.0
    """When its number of workers last changed."""
    waited: float = 0.0
    """Seconds of the wait that ended when it began to run."""
    kind: str = ""
    """The kind of device in whose share the job is, or for which it waits, if its queue ever told them apart."""
    kinds: tuple[tuple[str, int], ...] = ()
    """Its workers by kind, its own first, where its queue tells them apart."""
    host: str = ""
    """Namespace and name of the job on whose devices they compute; empty: they have their own."""
    lodgers: tuple[str, ...] = ()
    """Those of jobs that compute on its own devices."""

    @property
    def at_home(self) -> int:
        """Workers of the kind in whose share the job is: it runs, or waits, by these. On others' devices it waits."""
        if self.host:
            return 0
        return dict(self.kinds).get(self.kind, 0) if self.kinds else self.workers

    def changed(
        self,
        workers: int,
        reason: str,
        code: str,
        now: float,
        *,
        kind: str | None = None,
        kinds: Mapping[str, int] | None = None,
        partly: bool = False,
        host: str = "",
        lodgers: tuple[str, ...] = (),
    ) -> Grant:
        """The next grant of the same job.

        Args:
            workers: how many it has from now on.
            reason: why.
            code: the reason of the condition.
            now: Unix seconds.
            kind: in whose share it is; ``None``: the same as before.
            kinds: its workers by kind; ``None``: as before, as long as it has any.
            partly: more are to follow as soon as those of others have left; the change is over when they have.
            host: on whose devices they are.
            lodgers: who is on its own.
        """
        moment = float(int(now))
        home = self.kind if kind is None else kind
        split = self.kinds if kinds is None else tuple(sorted(kinds.items(), key=lambda p: (p[0] != home, p[0])))
        after = replace(self, workers=workers, reason=reason, code=code, kind=home, kinds=split if workers else ())
        after = replace(after, host=host, lodgers=lodgers)
        if (after.workers, dict(after.kinds), host) == (self.workers, dict(self.kinds), self.host):
            return after
        resized = self.resized if partly else moment
        if bool(after.at_home) == bool(self.at_home):
            return replace(after, resized=resized, waited=self.waited if home == self.kind else 0.0)
        waited = max(moment - self.since, 0.0) if after.at_home else 0.0
        return replace(after, since=moment, resized=resized, waited=waited)


def known_grant(job: Job, created: float) -> Grant:
    """What a job has by its status: what a queue gave it, or the workers that it had before it came to one.

    Args:
        job: the job.
        created: when it was created, Unix seconds.
    """
    given = job.status.allocation
    if given is None:
        workers = 0 if job.spec.suspend else job.status.replicas
        return Grant(job.uid, job.spec.queue or "", workers, "", reasons.QUEUED, created, created)
    since = parse_time(given.since) or created
    return Grant(
        job.uid,
        given.queue,
        given.workers,
        given.reason,
        reasons.IN_TURNS if given.host else reasons.ALLOCATED if given.workers else reasons.QUEUED,
        since,
        parse_time(given.resized_time) or since,
        float(given.waited_seconds),
        given.kind,
        tuple((share.kind, share.workers) for share in given.kinds),
        given.host,
        given.lodgers,
    )


@dataclass(frozen=True)
class Granted:
    """A job as its queue, or its own efficiency, lets it be."""

    job: Job
    """With the number of workers that it is to have, or suspended."""
    status: JobStatus
    """With the allocation as it is to be written."""
    waits: str = ""
    """Why its queue gives it nothing; empty: it runs, or is suspended by its user."""
    code: str = ""
    """The reason of its condition ``Allocated``; empty: it has none."""
    limit: str = ""
    """Why it has fewer workers than its user asks for, a sentence; empty: it has not."""
    limit_code: str = reasons.EFFICIENT
    """The reason of its condition ``Progressing`` in that case."""
    kueue: bool = False
    """Whether that is Kueue's word, and not that of a queue of ours."""
    placements: Mapping[str, Placement] = field(default_factory=dict)
    """What Kueue demands of the job's pods, by worker group, and under ``coordinator``."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Its workers by kind of device, its own first; empty where its queue tells none apart."""
    still: bool = False
    """Whether no pod may be made at present: it is not known where and how many."""

    @property
    def rest(self) -> str:
        """Why the job has no workers, as a sentence has it."""
        if self.kueue:
            if self.code == reasons.WAITS_FOR_KUEUE:
                return f"it waits for admission by Kueue: {self.waits}"
            return self.waits
        return f"the queue {self.job.spec.queue} has no workers for it: {self.waits}"


def settle_grant(job: Job, grant: Grant | None) -> Granted:
    """Say what a job is to have.

    Args:
        job: as its user has specified it.
        grant: the latest one of its queue, if this operator has made one.
    """
    spec, status = job.spec, job.status
    if not spec.queue:
        status = msgspec.structs.replace(status, allocation=None)
        if not spec.elasticity.min_efficiency:
            return Granted(job, status)
        efficient = efficient_limit(status.scaling, spec.elasticity.min_efficiency, spec.desired)
        most = max(efficient, min(spec.min_replicas, spec.desired))
        limit = ""
        if most < spec.desired:
            why = no_further(spec.elasticity.min_efficiency)
            limit = f"It has {most} of the {spec.desired} workers that replicas asks for: {why}; lower it to have more."
        limited = _with_spec(job, msgspec.structs.replace(spec, replicas=min(spec.replicas, most)))
        return Granted(limited, status, limit=limit)
    if status.finished:
        return Granted(job, msgspec.structs.replace(status, allocation=None), code=reasons.FINISHED)
    if grant is None or grant.uid != job.uid:
        if status.allocation is None:
            if status.replicas and not spec.suspend:
                return Granted(job, status, code=reasons.QUEUED)  # it goes on as it is until the queue has decided
            return Granted(_waiting(job), status, "its queue has not decided yet", reasons.QUEUED)
        grant = known_grant(job, 0.0)
    status = msgspec.structs.replace(
        status,
        allocation=Allocation(
            grant.queue,
            grant.workers,
            grant.reason,
            format_time(grant.since),
            format_time(grant.resized),
            int(grant.waited),
            grant.kind,
            tuple(OfKind(*share) for share in grant.kinds),
            grant.host,
            grant.lodgers,
        ),
    )
    if grant.workers:
        given = _with_spec(job, msgspec.structs.replace(spec, replicas=grant.workers))
        return Granted(given, status, "", grant.code, kinds=dict(grant.kinds))
    if spec.suspend:
        return Granted(job, status, "", grant.code)
    return Granted(_waiting(job), status, grant.reason, grant.code)


def _waiting(job: Job) -> Job:
    """The job without workers: suspended, as by its user."""
    return _with_spec(job, msgspec.structs.replace(job.spec, replicas=0, min_replicas=0, suspend=True))


def _with_spec(job: Job, spec: JobSpec) -> Job:
    return replace(job, spec=spec)


def with_allocation(status: JobStatus, job: Job, granted: Granted, now: float) -> JobStatus:
    """The status with the condition ``Allocated``, or without it for a job that has no queue."""
    if not granted.code:
        kept = tuple(condition for condition in status.conditions if condition.type != "Allocated")
        return msgspec.structs.replace(status, conditions=kept, allocation=None)
    allocation = None if status.finished else status.allocation
    truth: Truth = "True" if allocation is not None and allocation.workers else "False"
    code, message = granted.code or reasons.QUEUED, granted.waits or "Its queue has not decided yet."
    if status.finished:
        code, message = reasons.FINISHED, "The job is over."
    elif granted.kueue and granted.waits:
        message = f"{granted.rest[:1].upper()}{granted.rest[1:]}"
    elif allocation is not None:
        message = _in_words(allocation)
    before = job.status.condition("Allocated")
    since = before.last_transition_time if before is not None and before.status == truth else format_time(now)
    own = Condition("Allocated", truth, code, message[:MAX_MESSAGE], since, job.generation)
    others = tuple(condition for condition in status.conditions if condition.type != "Allocated")
    return msgspec.structs.replace(status, conditions=(*others, own), allocation=allocation)


def decision(granted: Granted) -> str:
    """Why a job has as many workers as it has, where a queue or its own efficiency decides that; empty: its user."""
    allocation = granted.status.allocation
    return _in_words(allocation) if allocation is not None else granted.limit


def _in_words(allocation: Allocation) -> str:
    return f"{_counted(allocation.workers)} of the queue {allocation.queue}: {allocation.reason}"


def _counted(workers: int) -> str:
    return counted(workers, "worker") if workers else "No workers"

"""What a queue has decided about a job, as the next decision goes by it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from virtualflow_operator import reasons
from virtualflow_operator.api import Job, parse_time


@dataclass(frozen=True)
class Grant:
    """What a queue has decided about one job."""

    uid: str
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
            kind: in whose share it is; ``None``: the same as before.
            kinds: its workers by kind; ``None``: as before, as long as it has any.
            partly: more are to follow as soon as those of others have left; the change is over when they have.
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
    """What a job has by its status: what a queue gave it, or the workers that it had before it came to one."""
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

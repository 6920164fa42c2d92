"""A job in a queue: what it was granted, what it has, and what a policy is to know of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from virtualflow.protocol.settings import cost_of
from virtualflow_operator import reasons
from virtualflow_operator.api import ANY_KIND, Job, Node, QueueSpec, parse_time
from virtualflow_operator.jobs.scaling_history import efficient_limit
from virtualflow_operator.queues.kinds import kind_of, where_they_run
from virtualflow_operator.queues.past_jobs import curve_of, least_workers, served
from virtualflow_operator.scheduling import Demand, KindDemand, Mobility, RotatingPasses
from virtualflow_operator.scheduling.service_time import Forecast


@dataclass(frozen=True)
class Grant:
    """What a queue has decided about one job. What ``AllocationStatus`` has too is described there."""

    uid: str
    queue: str
    workers: int
    reason: str
    _: KW_ONLY
    code: str = reasons.ALLOCATED
    """The reason of the condition ``Allocated``."""
    since: float = 0.0
    """When the job began to run, or to wait; Unix seconds, whole ones, as its status has them."""
    resized: float = 0.0
    waited: float = 0.0
    """Seconds of the wait that ended when it began to run."""
    kind: str = ""
    kinds: tuple[tuple[str, int], ...] = ()
    host: str = ""
    lodgers: tuple[str, ...] = ()

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
        queue = job.spec.queue or ""
        return Grant(job.uid, queue, workers, "", code=reasons.QUEUED, since=created, resized=created)
    since = parse_time(given.since) or created
    return Grant(
        job.uid,
        given.queue,
        given.workers,
        given.reason,
        code=reasons.IN_TURNS if given.host else reasons.ALLOCATED if given.workers else reasons.QUEUED,
        since=since,
        resized=parse_time(given.resized_time) or since,
        waited=float(given.waited_seconds),
        kind=given.kind,
        kinds=tuple((share.kind, share.workers) for share in given.kinds),
        host=given.host,
        lodgers=given.lodgers,
    )


Key = tuple[str, str]
_MOBILITY: Mapping[str, Mobility] = {"Stay": "stays", "Move": "moves", "Mix": "mixes"}


@dataclass(frozen=True)
class QueueMember:
    job: Job
    grant: Grant
    """What it has at the moment."""
    submitted: float
    """When it was created, Unix seconds."""
    pods: Sequence[str] = ()
    """The node of each of its worker pods, of those with devices of their own, that has not ended; empty for one
    without a node."""
    ceiling: int | None = None
    """Workers that found a node the last time, where others found none; ``None``: all did."""
    made_for: Sequence[str] = ()
    """The kind of device that each of its pods was made for, in the same order; empty: that is not said."""
    takes_turns: bool = False
    """Whether all of these know of their node's turn server."""
    lodging: int = 0
    """Further worker pods, on devices of another job."""
    seatless: bool = False
    """Whether such pods found no place the last time."""

    @property
    def key(self) -> Key:
        return self.job.namespace, self.job.name

    @property
    def name(self) -> str:
        """As the policy knows it."""
        return f"{self.job.namespace}/{self.job.name}"


@dataclass(frozen=True)
class JobHolding:
    """What a job of a queue has of each kind of device."""

    kind: str
    """The kind in whose share it is, or for which it waits; empty: not decided yet."""
    given: Mapping[str, int]
    """Workers that it was given, by kind."""
    held: Mapping[str, int]
    """Workers that are there, and take of what there is."""


def find_holding(member: QueueMember, spec: QueueSpec, nodes: Mapping[str, Node], fit: Mapping[str, str]) -> JobHolding:
    """What the job has.

    Its grant says so, unless it comes from a queue that told no kinds apart, or named them otherwise: then it is what
    its workers run on.

    Args:
        fit: the kind of each node that counts: workers on others take nothing.
    """
    grant = member.grant
    if not spec.kinds:
        counting = sum(1 for node in member.pods if spec.resource is None or not node or node in fit)
        return JobHolding(
            ANY_KIND, {ANY_KIND: grant.workers} if grant.workers and not grant.host else {}, {ANY_KIND: counting}
        )
    made_for = member.made_for or [ANY_KIND] * len(member.pods)
    pods = list(zip(member.pods, made_for, strict=True))
    held = Counter(fit.get(node) if node else kind for node, kind in pods)
    names = {kind.name for kind in spec.kinds}
    there = {kind: count for kind, count in held.items() if kind is not None and kind in names}
    given = {} if grant.host else dict(grant.kinds)
    if given and given.keys() <= names and grant.kind in names:
        return JobHolding(grant.kind, given, there)
    if not grant.workers or grant.host:
        return JobHolding(grant.kind, {}, there)
    on = (kind_of(spec, nodes[node].labels) if node in nodes else kind for node, kind in pods)
    kind, found = where_they_run((kind if kind in names else None for kind in on), grant.workers)
    return JobHolding(kind or grant.kind, found, there)


def build_demand(
    member: QueueMember, holding: JobHolding, units: int, queue: QueueSpec, forecast: Forecast, usable: frozenset[str]
) -> KindDemand:
    """The job as a policy sees it.

    Args:
        units: of a worker.
        forecast: what jobs are expected to need.
        usable: names of the kinds that its templates may be on.
    """
    spec, status, grant = member.job.spec, member.job.status, member.grant
    least = least_workers(member.job)
    limit = spec.most if member.ceiling is None else min(spec.most, member.ceiling)
    efficiency = spec.elasticity.min_efficiency
    most = max(least, efficient_limit(status.scaling, efficiency, limit, holding.kind))
    left = None
    if status.total_steps is not None:
        left = max(status.total_steps - (status.step or 0), 0)
    at_home = holding.given.get(holding.kind, 0)
    job = Demand(
        name=member.name,
        namespace=member.job.namespace,
        submitted=member.submitted,
        maximum=most,
        minimum=least,
        requested=min(max(spec.replicas, least), most),
        units=units,
        priority=spec.priority,
        weight=float(spec.weight if queue.max_weight is None else min(spec.weight, queue.max_weight)),
        allocated=at_home,
        since=grant.since,
        resized=grant.resized,
        waited=grant.waited,
        steps_left=left,
        expected_left=forecast.left(member.job.namespace, member.job.name, served(member.job, units) or 0.0),
        minimum_on_demand=spec.elasticity.min_replicas_on == "OnDemand" and queue.spot_selector is not None,
        passes=_passes_of(member.job),
    )
    if holding.kind not in usable and any(kind.name == holding.kind for kind in queue.kinds):
        usable |= {holding.kind}  # it runs there, whatever its templates say now
    return KindDemand(
        job,
        {kind: curve_of(status.scaling, kind) for kind in sorted(usable)},
        _MOBILITY[spec.across_kinds],
        holding.kind,
        {kind: count for kind, count in holding.given.items() if kind != holding.kind},
        # Once it was started it may have made a step that nobody has told of.
        bound=bool(queue.kinds) and bool(holding.kind) and bool(holding.given or status.start_time),
    )


def _passes_of(job: Job) -> RotatingPasses | None:
    """How far its backward passes go. Classes that do not rotate make nobody slower: the coordinator splits by cost."""
    backward = job.spec.backward
    if backward is None or not backward.rotate:
        return None
    return RotatingPasses(tuple(map(cost_of, backward.fractions)), job.status.virtual_nodes or job.spec.virtual_nodes)

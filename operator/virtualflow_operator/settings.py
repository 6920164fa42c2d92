"""Every default of the operator, once: limits, time-outs, and what the flags and the environment may change.

Durations are seconds unless a name says otherwise. The process reads its settings at start (``options``) and keeps
them. What belongs to a job's own life (heartbeats, drain grace) is in the library's ``virtualflow.settings`` or in the
resource's schema.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.crashes import CrashWaits
from virtualflow.protocol.settings import SignalSettings

ENV_PREFIX = "VIRTUALFLOW_OPERATOR_"
"""Each flag has an environment variable: ``--log-level`` is ``VIRTUALFLOW_OPERATOR_LOG_LEVEL``."""

DELIVERY = 180.0
"""Seconds within which a kubelet gives a pod a changed Secret, with all that may delay it."""
BACKOFF_MOST = 300.0
"""Seconds of the longest wait after a crash; no first wait is longer."""

CLAIM_NAMESPACE, CLAIM = "kube-public", "virtualflow-operator"
"""The Lease of whichever release takes care of every namespace: where all clusters have a place, and no user writes."""

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]


def _host() -> str:
    # In a pod the host name is the pod's and the process is always the same number, so that a restarted container is
    # its own successor at once; elsewhere two operators on one machine are told apart.
    return f"{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True)
class LeaseSettings:
    """Leader election. A leader that is gone is followed within the duration plus about one renewal: 15 seconds."""

    name: str = "virtualflow-operator"
    """Of the Lease object (``--lease-name``)."""
    namespace: str = "default"
    """Where the Lease lives (``--lease-namespace``); read from the pod's service account where there is one."""
    identity: str = field(default_factory=_host)
    """Who this candidate is (``--identity``); the name of its pod."""
    duration: int = 10
    """A record that nobody renewed for this long is free (``--lease-seconds``)."""
    namesakes: bool = True
    """Whether another process may live under this identity, so that its record is not taken over at once."""

    @property
    def claim(self) -> LeaseSettings:
        """Of the Lease that all releases for every namespace share, of which one works.

        Whoever asks for it leads its own release already, so a record of its release's is a dead predecessor's.
        """
        whose = f"{self.namespace}/{self.name}"
        return replace(
            self, name=CLAIM, namespace=CLAIM_NAMESPACE, identity=whose, duration=3 * self.duration, namesakes=False
        )

    @property
    def renew_interval(self) -> float:
        """How often the leader renews, and how often the others look: 2 seconds."""
        return self.duration * 0.2

    @property
    def deadline(self) -> float:
        """A leader that could not renew for this long must be gone, well before another may begin: 7 seconds."""
        return self.duration * 0.7

    @property
    def call_timeout(self) -> float:
        """How long one call for the lease may take: a hanging one leaves time for a second."""
        return self.duration * 0.25

    @property
    def release_timeout(self) -> float:
        """How long giving the lease back may take at shutdown: 2 seconds."""
        return self.duration * 0.2


@dataclass(frozen=True)
class QueueSettings:
    """The work-queue in front of the reconciler."""

    concurrency: int = 16
    """Jobs that are reconciled at the same time (``--concurrency``), those that are slow not counted."""
    reserved: int = 2
    """Places of these that no single namespace takes."""
    slow_after: float = 1.0
    """A run that takes longer lends its place to another key, so that slow keys delay nobody."""
    slow_most: int = 240
    """Places lent at the same time, half of them at most to the jobs of one namespace."""
    run_limit: float = 300.0
    """A run that takes longer is cancelled and counts as failed."""
    debounce: float = 0.02
    """How long an event waits for the others of its burst: what callers of ``WorkQueue.add`` give as ``after``."""
    backoff_first: float = 0.5
    """The wait after a first failed run of a key; it doubles with every further one."""
    backoff_most: float = 60.0
    """The longest such wait."""
    stop_limit: float = 10.0
    """How long running ones may take to end at shutdown before they are cancelled."""


@dataclass(frozen=True)
class CrashSettings:
    """Workers that end in the user's own code."""

    backoff_first: float = 10.0
    """The wait before a first restart (``--backoff-seconds``); it doubles with every crash without progress."""
    backoff_most: float = BACKOFF_MOST
    """The longest such wait."""
    reset: float = 600.0
    """Crashes that are further apart than this begin again with the first wait."""

    @property
    def waits(self) -> CrashWaits:
        """As the policy of crashes has them."""
        return CrashWaits(self.backoff_first, self.backoff_most, self.reset)


@dataclass(frozen=True)
class PackingSettings:
    """When jobs share devices in turns."""

    max_slowdown: float = 1.5
    """How many times as long as with its devices to itself a step may be predicted to take. Two jobs that are both
    slowed down by this much make a third more steps than one after the other."""
    least_gain: float = 0.1
    """A lodger must add so much to the progress of a device, in steps of each job alone: predictions are not exact."""
    tries: int = 4
    """Hosts that are tried for a lodger, of those into whose free time it may fit."""

    def __post_init__(self) -> None:
        if self.max_slowdown < 1 or not 0 <= self.least_gain < 1 or self.tries < 1:
            raise ConfigurationError("give a slowdown of 1 or more, a least gain from 0 to below 1, and 1 try or more")


@dataclass(frozen=True)
class SchedulingSettings:
    """How policies share a queue's capacity, beyond what each job says of itself."""

    starvation_bound: float = 3_600.0
    """A job that has waited for this long goes before all that have not, whatever the policy's order. Shorter ones turn
    every policy of a queue that is always full into turns."""
    turn: float = 600.0
    """A job that was let in for having waited that long keeps its minimum for this time: long enough to be worth the
    suspension of another."""
    turn_share: float = 0.5
    """The part of the capacity that such turns may have together; one job may always have a turn."""
    aging: float = 3_600.0
    """Under fixed sizes, waiting for this long counts as one priority more."""
    hold: float = 5.0
    """A running job does not grow within this time after its number of workers has changed: the next arrival of a burst
    may take the new pods away again. It always shrinks at once."""
    margin: float = 0.1
    """By which part another job must be the better choice before a running one is suspended, or a worker moved, for it:
    measured speeds are noisy."""
    efficiency: float = 0.5
    """``ShortestFirst`` gives the shortest job workers that each bring at least this part of what its first one did;
    those that bring less go to it last."""
    remembered: int = 64
    """Kinds of jobs whose service is remembered, to predict that of the next ones: a queue's status lists them."""
    latest: float = 0.25
    """The part that the latest job of a kind has in what the next one is expected to need: what is trained changes."""
    thrift: float = 0.0
    """Where a queue has kinds of device with prices: how much the price of a step counts beside the time when a job's
    kind is chosen, as the power of the one that the other is multiplied by. 0: not at all; 1: half the price is worth
    twice the time."""
    exact_work: int = 400_000
    """``MaxThroughput`` solves a queue of unequal workers exactly if that takes at most this many additions (about
    50 ms), else from the best gain per unit downward."""
    packing: PackingSettings = field(default_factory=PackingSettings)
    """Of a queue whose jobs share devices."""

    def __post_init__(self) -> None:
        if self.starvation_bound <= 0 or self.turn <= 0 or self.aging <= 0:
            raise ConfigurationError("the starvation bound, turn and aging of a queue are seconds above 0")
        if not 0 <= self.turn_share <= 1:
            raise ConfigurationError("the share of a queue that turns may have is a part of it, from 0 to 1")
        if self.hold < 0 or not 0 <= self.margin < 1 or not 0 <= self.efficiency <= 1:
            raise ConfigurationError("give a hold of 0 s or more, a margin below 1 and an efficiency from 0 to 1")
        if self.remembered < 1 or not 0 < self.latest <= 1:
            raise ConfigurationError("remember 1 kind of jobs or more, and give the latest a part above 0, up to 1")
        if self.thrift < 0:
            raise ConfigurationError("the weight of prices in a queue is 0 or more")


@dataclass(frozen=True)
class SharingSettings:
    """When a queue is decided about."""

    debounce: float = 0.3
    """How long an event waits for the others of its burst: a decision about a thousand jobs takes a tenth of a
    second."""
    rest: float = 4.0
    """After a decision a queue is left alone for so many times as long as it took, so that decisions about thousands of
    pods that come and go have a fifth of the operator's time at most, and its jobs the rest."""
    relist: float = 300.0
    """Pods of others are listed anew this often, to heal what their watch has missed."""


@dataclass(frozen=True)
class SimulationSettings:
    """What the simulator is set to: the policies, and what a change of a job's workers costs."""

    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)

    join: float = 6.0
    """Seconds until a new worker counts: ``kubectl scale`` to its first step took 5.7 s on a cluster, most of it the
    container's own start (docs/explanation/performance.md). The others train meanwhile."""
    pause: float = 0.5
    """Seconds that everyone loses at a change: 0.15 to 0.32 s measured for a small state, 0.42 s where a joiner is sent
    604 MB (docs/explanation/benchmarks.md and performance.md)."""
    restart: float = 30.0
    """Seconds that a restart takes the whole job, for comparison: ``torchrun`` took 25 to 39 s for the same changes
    (docs/explanation/benchmarks.md)."""


@dataclass(frozen=True)
class ApiSettings:
    """How the API server is asked."""

    request_timeout: float = 10.0
    """How long one request may take, waiting for a free connection included."""
    connections: int = 32
    """Requests under way at once; more wait for a free connection."""
    page: int = 100
    """Objects of a list that are read at once. Each may have 1.5 MB: Python reads 150 MB in two seconds, in which no
    other thread runs, the one that renews the lease among them."""


@dataclass(frozen=True)
class StatusSettings:
    """How much is taken in of what coordinators say, which may be anything."""

    least: int = 16 << 10
    """Bytes that each message and call counts at least: it costs time."""
    usual: int = 64 << 10
    """The largest status that any coordinator may send; what is beyond counts as held while it may send larger ones."""
    held: int = 48 << 20
    """Bytes that are held for all coordinators together. Where that is too little, the namespace that holds most has
    its coordinators left alone, those with most first."""
    rate: float = float(4 << 20)
    """Bytes a second that are read of all coordinators together, and said to them; namespaces share them evenly."""
    job_rate: float = float(1 << 20)
    """Bytes a second that are read of one coordinator."""
    flood: float = 10.0
    """A coordinator that sends more than that for so many seconds is left alone; no real one does."""
    news_burst: int = 20
    """Times that news of a coordinator has its job reconciled at once;"""
    news_refill: float = 2.0
    """further ones in a second."""


@dataclass(frozen=True)
class CertificateSettings:
    """The certificates of the pods of jobs."""

    lifetime: float = 43_200.0
    """How long one is valid (``--certificate-seconds``)."""
    renewal: float = 0.0
    """After how long it is replaced (``--renewal-seconds``); 0: half of its life."""

    def __post_init__(self) -> None:
        if not 0 < self.renew_after <= self.lifetime - DELIVERY:
            raise ConfigurationError(
                f"certificates that are valid for {self.lifetime:g} s are replaced after at most "
                f"{self.lifetime - DELIVERY:g} s, as kubelets take {DELIVERY:g} s to hand over the next ones, and not "
                f"after {self.renew_after:g}; correct --renewal-seconds or --certificate-seconds"
            )

    @property
    def renew_after(self) -> float:
        """Seconds after which one is replaced."""
        return self.renewal or self.lifetime / 2


@dataclass(frozen=True)
class OperatorSettings:
    """What the operator was told at start."""

    image: str = ""
    """Of coordinator pods (``--image``): the operator's own; ``options`` demands it."""
    image_pull_policy: PullPolicy = "IfNotPresent"
    """Of coordinator pods (``--image-pull-policy``)."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of secrets, in each job's namespace, for coordinator pods (``--image-pull-secrets``)."""
    namespaces: tuple[str, ...] = ()
    """Where jobs are taken care of (``--namespaces``); empty: everywhere."""
    key_file: Path = Path("/etc/virtualflow/key/key")
    """The operator's key, from which the jobs' authorities and tokens are derived (``--key-file``)."""
    other_key_file: Path = Path("/etc/virtualflow/key/other")
    """A second one whose authorities are believed as well, while one takes the other's place (``--other-key-file``); it
    need not be there."""
    key_id: str = ""
    """Which key the first one is: in the names of the Secrets that are made by it. Found out at the start."""
    key_ids: tuple[str, ...] = ()
    """Which keys there are, the first one first. Found out at the start."""
    certificates: CertificateSettings = field(default_factory=CertificateSettings)
    allow_plaintext: bool = False
    """Whether jobs may do without certificates (``--allow-plaintext``)."""
    health_port: int = 8081
    """Of ``/healthz`` and ``/readyz`` (``--health-port``); 0: any free one."""
    metrics_port: int = 8080
    """Of ``/metrics`` (``--metrics-port``); 0: any free one."""
    metrics_authentication: bool = False
    """Whether only those read the metrics whom the API server lets (``--metrics-authentication``)."""
    job_metrics: bool = True
    """Whether each job has series of its own (``--job-metrics``)."""
    network_policies: bool = False
    """Whether each job gets a NetworkPolicy (``--network-policies``)."""
    operator_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that select the operator's pods in those policies (``--operator-labels``)."""
    kueue: bool = False
    """Whether jobs with the label ``kueue.x-k8s.io/queue-name`` are admitted by Kueue (``--kueue``)."""
    extra_taints: tuple[str, ...] = ()
    """Keys of taints that announce a node's loss, beside the well-known ones (``--extra-taints``)."""
    log_format: LogFormat = "text"
    """``text`` or ``json`` (``--log-format``)."""
    log_level: LogLevel = "info"
    """The least that is logged (``--log-level``)."""

    lease: LeaseSettings = field(default_factory=LeaseSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    crashes: CrashSettings = field(default_factory=CrashSettings)
    api: ApiSettings = field(default_factory=ApiSettings)
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)
    sharing: SharingSettings = field(default_factory=SharingSettings)
    signals: SignalSettings = field(
        default_factory=lambda: SignalSettings(
            request_timeout=5.0,
            retry_first=0.1,
            retry_most=2.0,
            patience=2.0,
            max_answer=1 << 20,  # a brief status of 4,096 workers fits
        )
    )
    """Of calls to coordinators; what one would have said is said again by the next reconciliation."""
    statuses: StatusSettings = field(default_factory=StatusSettings)

    relist: float = 300.0
    """Every job is looked at this often even when nothing happens (``--resync-seconds``)."""
    relist_jitter: float = 0.1
    """By what share of itself a relist comes earlier or later, so that jobs made together drift apart."""
    progress_interval: float = 5.0
    """How often a running job's step, loss and speed are written to its status (``--progress-seconds``)."""
    coordinator_patience: float = 10.0
    """A coordinator that runs and does not answer for this long is replaced."""
    kueue_reread: float = 60.0
    """Flavors and priority classes of Kueue are read again after this long."""
    refused_retry: float = 30.0
    """A coordinator that refused the token is asked again after this long."""
    unschedulable_patience: float = 30.0
    """A group with a worker that no node takes counts as full after this long (``--unschedulable-seconds``): a node may
    be on its way."""
    startup_patience: float = 30.0
    """A pod that has a node and has not started, or not called its coordinator, for this long is looked into."""
    events_retry: float = 60.0
    """Its events are read again after this long."""
    template_retry: float = 60.0
    """A template that the API server has refused is tried again after this long."""
    finish_grace: float = 30.0
    """How long workers may take to end by themselves once the training is complete."""
    turns_directory: str = "/run/virtualflow/turns"
    """On each node, where its turn server listens (``--turns-directory``), for queues whose jobs share devices."""

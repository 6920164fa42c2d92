"""Every default of the operator, once: limits, time-outs, and what the flags and the environment may change.

Durations are seconds unless a name says otherwise. The process reads its settings at start and keeps them. A flag wins
over its environment variable; an empty value of either means the default. What belongs to a job's own life (heartbeats,
drain grace) is in the library's ``virtualflow.settings`` or in the resource's schema.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from virtualflow.errors import ConfigurationError

PodSecurity = Literal["privileged", "baseline", "restricted"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]

ENV_PREFIX = "VIRTUALFLOW_OPERATOR_"
SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where a pod reads its own namespace."""


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
    slow_after: float = 1.0
    """A run that takes longer lends its place to another key, so that slow keys delay nobody."""
    slow_most: int = 240
    """Places lent at the same time."""
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
    backoff_most: float = 300.0
    """The longest such wait."""
    reset: float = 600.0
    """Crashes that are further apart than this begin again with the first wait."""


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
    exact_work: int = 400_000
    """``MaxThroughput`` solves a queue of unequal workers exactly if that takes at most this many additions (about
    50 ms), else from the best gain per unit downward."""

    def __post_init__(self) -> None:
        if self.starvation_bound <= 0 or self.turn <= 0 or self.aging <= 0:
            raise ConfigurationError("the starvation bound, turn and aging of a queue are seconds above 0")
        if not 0 <= self.turn_share <= 1:
            raise ConfigurationError("the share of a queue that turns may have is a part of it, from 0 to 1")
        if self.hold < 0 or not 0 <= self.margin < 1 or not 0 <= self.efficiency <= 1:
            raise ConfigurationError("give a hold of 0 s or more, a margin below 1 and an efficiency from 0 to 1")


@dataclass(frozen=True)
class SharingSettings:
    """When a queue is decided about."""

    debounce: float = 0.3
    """How long an event waits for the others of its burst: a decision about a thousand jobs takes a tenth of a
    second."""
    review: float = 30.0
    """A queue with jobs is looked at this often without a cause: measured speeds and the steps that are left change
    all the time."""
    homeless_retry: float = 300.0
    """A job of which workers found no node is given no more for so long, unless nodes change: others can use it."""
    relist: float = 300.0
    """Pods of others are listed anew this often, to heal what their watch has missed."""


@dataclass(frozen=True)
class SimulationSettings:
    """What a change of a job's workers costs in the simulator."""

    join: float = 6.0
    """Seconds until a new worker counts: ``kubectl scale`` to its first step took 5.7 s on a cluster, most of it the
    container's own start (docs/performance.md). The others train meanwhile."""
    pause: float = 0.5
    """Seconds that everyone loses at a change: 0.15 to 0.32 s measured for a small state (docs/benchmarks.md), 0.42 s
    where a joiner is sent 604 MB (docs/performance.md)."""
    restart: float = 30.0
    """Seconds that a restart takes the whole job, for comparison: ``torchrun`` took 25 to 39 s for the same changes
    (docs/benchmarks.md)."""


@dataclass(frozen=True)
class EventSettings:
    """Events on jobs: enough for a person, never a flood."""

    repeat_window: float = 600.0
    """The same event within this time is counted up in the one that exists."""
    burst: int = 25
    """Events that one job may have at once."""
    refill: float = 30.0
    """After a burst, one job gets one event in this time."""
    objects: int = 4_096
    """Jobs and events that are remembered; the longest unused go first."""
    message_bytes: int = 1_024
    """What the API server takes in a message; a longer one is cut."""


@dataclass(frozen=True)
class OperatorSettings:
    """What the operator was told at start."""

    image: str = ""
    """Of coordinator pods (``--image``): the operator's own; :meth:`read` demands it."""
    image_pull_policy: PullPolicy = "IfNotPresent"
    """Of coordinator pods (``--image-pull-policy``)."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of secrets, in each job's namespace, for coordinator pods (``--image-pull-secrets``)."""
    namespaces: tuple[str, ...] = ()
    """Where jobs are taken care of (``--namespaces``); empty: everywhere."""
    key_file: Path = Path("/etc/virtualflow/key/key")
    """The operator's key, from which the jobs' tokens are derived (``--key-file``)."""
    health_port: int = 8081
    """Of ``/healthz`` and ``/readyz`` (``--health-port``); 0: any free one."""
    metrics_port: int = 8080
    """Of ``/metrics`` (``--metrics-port``); 0: any free one."""
    job_metrics: bool = True
    """Whether each job has series of its own (``--job-metrics``)."""
    network_policies: bool = False
    """Whether each job gets a NetworkPolicy (``--network-policies``)."""
    operator_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that select the operator's pods in those policies (``--operator-labels``)."""
    pod_security: PodSecurity = "baseline"
    """The Pod Security Standard that worker templates must keep to (``--pod-security``)."""
    extra_taints: tuple[str, ...] = ()
    """Keys of taints that announce a node's loss, beside the well-known ones (``--extra-taints``)."""
    log_format: LogFormat = "text"
    """``text`` or ``json`` (``--log-format``)."""
    log_level: LogLevel = "info"
    """The least that is logged (``--log-level``)."""

    lease: LeaseSettings = field(default_factory=LeaseSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    crashes: CrashSettings = field(default_factory=CrashSettings)
    events: EventSettings = field(default_factory=EventSettings)
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)
    sharing: SharingSettings = field(default_factory=SharingSettings)

    resync: float = 300.0
    """Every job is looked at this often even when nothing happens (``--resync-seconds``)."""
    resync_jitter: float = 0.1
    """By what share of itself a resync comes earlier or later, so that jobs made together drift apart."""
    request_timeout: float = 10.0
    """How long a call to the API server may take."""
    progress_interval: float = 5.0
    """How often a running job's step, loss and speed are written to its status (``--progress-seconds``)."""
    coordinator_patience: float = 10.0
    """A coordinator that runs and does not answer for this long is replaced."""
    unschedulable_patience: float = 30.0
    """A group with a worker that no node takes counts as full after this long (``--unschedulable-seconds``): a node may
    be on its way."""
    template_retry: float = 60.0
    """A template that the API server has refused is tried again after this long."""
    finish_grace: float = 30.0
    """How long workers may take to end by themselves once the training is complete."""
    orphan_grace: float = 2.0
    """How long a pod may be without its job before it is taken for an orphan: caches may lag."""

    @classmethod
    def read(
        cls, arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
    ) -> OperatorSettings:
        """Read the settings of this process.

        Args:
            arguments: flags without the program's name; ``None``: none, because they belong to another program.
            environment: the process's own when absent.

        Raises:
            ConfigurationError: a flag or variable is wrong or missing; one sentence that says what to do.
        """
        given = vars(_parser().parse_args(list(arguments or ())))
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for option in OPTIONS:
            text, source = given[option.name], option.flag
            if text is None:
                text, source = _from_environment(option, environment), option.variable
            if text is not None and text.strip():
                try:
                    values[option.name] = option.parse(text.strip())
                except ValueError as error:
                    raise ConfigurationError(f"{source} is {text.strip()[:100]!r}: {error}") from None
        return _settle(values)


def _settle(values: dict[str, Any]) -> OperatorSettings:
    """Put what was given into its places and check what spans several."""
    if "lease_namespace" not in values and SERVICE_ACCOUNT_NAMESPACE.is_file():
        values["lease_namespace"] = SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip()
    groups: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    places = {option.name: option.place for option in OPTIONS}
    for name, value in values.items():
        group, _, member = places[name].rpartition(".")
        (groups.setdefault(group, {}) if group else own)[member] = value
    settings = OperatorSettings(
        **own,
        lease=LeaseSettings(**groups.get("lease", {})),
        queue=QueueSettings(**groups.get("queue", {})),
        crashes=CrashSettings(**groups.get("crashes", {})),
    )
    if not settings.image:
        raise ConfigurationError(
            f"say which image coordinator pods run, with --image or {ENV_PREFIX}IMAGE; it is the operator's own"
        )
    if settings.health_port == settings.metrics_port != 0:
        raise ConfigurationError(
            f"--health-port and --metrics-port are both {settings.health_port}; give them two ports"
        )
    if settings.network_policies and not settings.operator_labels:
        raise ConfigurationError(
            f"--network-policies needs the labels of the operator's pods, with --operator-labels or "
            f"{ENV_PREFIX}OPERATOR_LABELS, as key=value,key=value"
        )
    return settings


class _Parser(argparse.ArgumentParser):
    """Says what is wrong by an error of ours, instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; virtualflow-operator --help lists the flags")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="virtualflow-operator",
        description="Takes care of VirtualFlowJob resources.",
        epilog=f"Each flag has an environment variable: --log-level is {ENV_PREFIX}LOG_LEVEL.",
        allow_abbrev=False,
    )
    for option in OPTIONS:
        alone: dict[str, Any] = {"nargs": "?", "const": "true"} if option.parse is _boolean else {}
        parser.add_argument(option.flag, dest=option.name, help=option.help, metavar="VALUE", **alone)
    return parser


def _from_environment(option: Option, environment: Mapping[str, str]) -> str | None:
    text = environment.get(option.variable)
    # Kubernetes tells every container where each service is: one called virtualflow-operator-metrics sets
    # VIRTUALFLOW_OPERATOR_METRICS_PORT to tcp://10.0.0.1:8080, which nobody meant for us.
    if text is not None and option.name.endswith("_port") and text.startswith(("tcp://", "udp://")):
        return None
    return text


def _word(text: str) -> str:
    if any(character.isspace() for character in text):
        raise ValueError("give one word without blanks")
    return text


def _boolean(text: str) -> bool:
    if text.lower() in {"true", "1", "yes", "on"}:
        return True
    if text.lower() in {"false", "0", "no", "off"}:
        return False
    raise ValueError("give true or false")


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise ValueError(f"give a whole number from {least} to {most}")
        return int(text)

    return parse


def _seconds(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise ValueError(f"give a number of seconds from {least:g} to {most:g}")
        return number

    return parse


def _choice(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        for choice in choices:
            if text.lower() == choice.lower():
                return choice
        raise ValueError(f"give one of {', '.join(choices)}")

    return parse


_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def _name(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"give {what}")
        return text

    return parse


def _list(pattern: re.Pattern[str], what: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not all(pattern.fullmatch(name) for name in names):
            raise ValueError(f"give {what}, separated by commas")
        return tuple(dict.fromkeys(names))

    return parse


def _labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not _QUALIFIED.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise ValueError("give labels as key=value, separated by commas")
        labels[key] = value
    return labels


class Option(NamedTuple):
    """A setting that the user may change."""

    name: str
    place: str
    """The field of :class:`OperatorSettings`, or of one of its groups after a dot."""
    parse: Callable[[str], Any]
    help: str

    @property
    def flag(self) -> str:
        """On the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """In the environment."""
        return ENV_PREFIX + self.name.upper()


_NAMES = "names of lower-case letters, digits and hyphens"

OPTIONS = (
    Option("namespaces", "namespaces", _list(_LABEL, _NAMES), "namespaces to take care of; all when absent"),
    Option("image", "image", _word, "image of coordinator pods; needed"),
    Option("image_pull_policy", "image_pull_policy", _choice(get_args(PullPolicy)), "of coordinator pods"),
    Option("image_pull_secrets", "image_pull_secrets", _list(_SUBDOMAIN, _NAMES), "of coordinator pods"),
    Option("key_file", "key_file", Path, "the key that the jobs' tokens are derived from"),
    Option("lease_namespace", "lease.namespace", _name(_LABEL, "a namespace"), "where the Lease is; the pod's own"),
    Option("lease_name", "lease.name", _name(_SUBDOMAIN, "a name of lower-case letters"), "of the Lease"),
    Option("lease_seconds", "lease.duration", _whole(3, 3_600), "after which the Lease of a dead leader is free"),
    Option("identity", "lease.identity", _word, "of this replica; the pod's name"),
    Option("health_port", "health_port", _whole(0, 65_535), "port of /healthz and /readyz"),
    Option("metrics_port", "metrics_port", _whole(0, 65_535), "port of /metrics"),
    Option("job_metrics", "job_metrics", _boolean, "whether each job has series of its own"),
    Option("network_policies", "network_policies", _boolean, "whether each job gets a NetworkPolicy"),
    Option("operator_labels", "operator_labels", _labels, "key=value,... of the operator's pods, for those policies"),
    Option("pod_security", "pod_security", _choice(get_args(PodSecurity)), "what worker templates may ask for"),
    Option("extra_taints", "extra_taints", _list(_QUALIFIED, "keys of taints"), "keys that announce a node's loss"),
    Option("log_format", "log_format", _choice(get_args(LogFormat)), "text or json"),
    Option("log_level", "log_level", _choice(get_args(LogLevel)), "debug, info, warning or error"),
    Option("resync_seconds", "resync", _seconds(1, 86_400), "each job is looked at this often without a cause"),
    Option("progress_seconds", "progress_interval", _seconds(0.1, 3_600), "between two writes of a job's progress"),
    Option(
        "unschedulable_seconds", "unschedulable_patience", _seconds(1, 3_600), "a node may be on its way for this long"
    ),
    Option("concurrency", "queue.concurrency", _whole(1, 1_000), "jobs reconciled at the same time"),
    Option(
        "backoff_seconds",
        "crashes.backoff_first",
        _seconds(0.1, CrashSettings.backoff_most),
        "before the first restart after a crash",
    ),
)

"""Every metric of the operator, once; the dashboard and the alerts of the chart use these names.

What is true of jobs just now (phases, workers, progress) is kept as one mapping and read when somebody scrapes, so that
the sums and the series of single jobs cannot drift apart, and a job's series vanish with it.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from virtualflow._version import __version__
from virtualflow.protocol.http_api import WorkerSeconds
from virtualflow.protocol.messages import Cause
from virtualflow_operator.api import ConditionType, JobSpec, JobStatus, parse_time

PHASES = ("Pending", "Running", "Suspending", "Suspended", "BackOff", "Complete", "Failed")
"""Phases that are exposed even when no job is in them."""

_CAUSES = get_args(Cause)

PAUSES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Buckets for pauses of the training and for recoveries, in seconds."""
CALLS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets for what takes one or a few calls, in seconds."""


@dataclass(frozen=True)
class JobSample:
    """What is true of one job just now; ``None`` is not known (yet), and has no series."""

    phase: str
    _: KW_ONLY
    workers_wanted: int = 0
    workers_ready: int = 0
    step: int | None = None
    total_steps: int | None = None
    steps_per_second: float | None = None
    loss: float | None = None
    """NaN and infinite ones too, which Prometheus knows."""
    non_finite: int = 0
    checkpoint_failed: int | None = None
    last_checkpoint_timestamp_seconds: float | None = None
    """Of a job that is to have checkpoints and has written none since it was started or resumed: when that was."""
    memory_copy_step: int | None = None
    memory_copy_timestamp_seconds: float | None = None
    memory_copy_bytes: int | None = None
    does_not_fit: int | None = None
    fits_with_offload: int | None = None
    paid_worker_seconds: float | None = None
    committed_worker_seconds: float | None = None
    """As the coordinator counts them; its successor begins at 0, as counters do."""


@dataclass(frozen=True)
class QueueSample:
    """What is true of one ``VirtualFlowQueue`` just now."""

    ready: bool = False
    capacity: float = 0.0
    """Of its resource, or in workers."""
    allocated: float = 0.0
    running: int = 0
    waiting: int = 0
    kinds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Capacity, and what is allocated of it, by kind of device."""


def sample(spec: JobSpec, status: JobStatus, wanted: int, counted: WorkerSeconds | None = None) -> JobSample:
    """What the metrics show of a job with that status, whose coordinator has ``counted`` so much."""
    saves = spec.checkpoint is not None
    times = (parse_time(status.checkpoint_time), parse_time(status.start_time))
    known = [time for time in times if time is not None]
    return JobSample(
        phase=status.phase,
        workers_wanted=wanted,
        workers_ready=status.ready_replicas,
        step=status.step,
        total_steps=status.total_steps,
        steps_per_second=float(status.steps_per_second) if status.steps_per_second else None,
        loss=float(status.loss) if status.loss else None,
        non_finite=int(_holds(status, "NonFinite")),
        checkpoint_failed=int(_holds(status, "CheckpointFailed")) if saves else None,
        last_checkpoint_timestamp_seconds=max(known, default=None) if saves else None,
        does_not_fit=_told(status, "DoesNotFit"),
        fits_with_offload=_told(status, "FitsWithOffload"),
        memory_copy_step=status.memory_copy_step,
        memory_copy_timestamp_seconds=parse_time(status.memory_copy_time),
        memory_copy_bytes=status.memory_copy_bytes,
        paid_worker_seconds=counted.paid if counted is not None else None,
        committed_worker_seconds=counted.committed if counted is not None else None,
    )


def _holds(status: JobStatus, kind: ConditionType) -> bool:
    condition = status.condition(kind)
    return condition is not None and condition.status == "True"


def _told(status: JobStatus, kind: ConditionType) -> int | None:
    """The same of a condition that is there once it has something to say."""
    return None if status.condition(kind) is None else int(_holds(status, kind))


class Metrics:
    """The operator's metrics, in a registry of their own."""

    def __init__(self, *, job_metrics: bool = True) -> None:
        # Otherwise every counter brings a second series with the time of its creation. It is the library's only switch.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.jobs: dict[tuple[str, str], JobSample] = {}
        """What is true of each job, by namespace and name; one that is taken out has no series any more."""
        self.queues: dict[str, QueueSample] = {}
        """Likewise of each queue."""
        registry.register(_Jobs(self.jobs, job_metrics))
        registry.register(_Queues(self.queues))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self._changes = counter("virtualflow_membership_changes_total", "Changes of the workers of jobs.", "cause")
        self._repeated = counter("virtualflow_repeated_steps_total", "Steps that were repeated after a loss.", "cause")
        self._recomputed = counter(
            "virtualflow_repeated_virtual_nodes_total",
            "Virtual nodes that were computed again after a loss, at most.",
            "cause",
        )
        self._pause = histogram(
            "virtualflow_change_pause_seconds", "How long a change held up the training.", PAUSES, "cause"
        )
        self.recovery = histogram(
            "virtualflow_recovery_seconds", "From a lost pod being seen to the training going on.", PAUSES
        )
        self.loss_told = histogram(
            "virtualflow_loss_told_seconds",
            "From the watch event of a lost pod, or of one about to be lost, to the coordinator having been told.",
            PAUSES,
        )
        self.reconciliation = histogram("virtualflow_reconcile_duration_seconds", "One reconciliation of a job.", CALLS)
        self.sharing = histogram("virtualflow_shared_decision_seconds", "One decision about a queue.", CALLS)
        self.errors = counter("virtualflow_reconcile_errors_total", "Reconciliations that failed.", "kind")
        self.queue_depth = Gauge(
            "virtualflow_queue_depth", "Jobs that are due and wait to be reconciled.", registry=registry
        )
        self.queue_wait = histogram(
            "virtualflow_queue_wait_seconds", "From a job being due to its reconciliation.", CALLS
        )
        self._requests = counter(
            "virtualflow_api_requests_total",
            "Requests to the API server; code 0: no answer.",
            "method",
            "resource",
            "code",
        )
        self._request_seconds = histogram(
            "virtualflow_api_request_duration_seconds", "Requests to the API server.", CALLS, "method"
        )
        self.objects_cut = counter(
            "virtualflow_objects_cut_total", "Objects that are nested too deep to be read as a whole.", "kind"
        )
        self._calls = counter("virtualflow_coordinator_calls_total", "Calls to coordinators.", "call", "outcome")
        self.misbehaved = counter(
            "virtualflow_coordinator_misbehaviors_total",
            "Times that what answered in a coordinator's place was left alone: a redirect, too much, or no status.",
        )
        self.shed = counter(
            "virtualflow_coordinators_shed_total",
            "Times that a coordinator was left alone because those of its namespace sent most and all sent too much.",
            "job_namespace",
        )
        self.pods_created = counter("virtualflow_pods_created_total", "Pods that were created.", "role")
        self.pods_deleted = counter("virtualflow_pods_deleted_total", "Pods that were deleted.", "reason")
        self.leader = Gauge("virtualflow_leader", "1: this replica leads; 0: it stands by.", registry=registry)
        self.other_release = Gauge(
            "virtualflow_other_release",
            "1: another release takes care of every namespace, and this replica waits for its end.",
            registry=registry,
        )
        Gauge("virtualflow_build_info", "The operator's version.", ("version",), registry=registry).labels(
            __version__
        ).set(1)

    def change(self, cause: str, pause_seconds: float | None, repeated: int, recomputed: int = 0) -> None:
        """Count a change of a job's workers: how long it held up the training, and the steps repeated for it.

        ``recomputed``: virtual nodes that were computed again.
        """
        # A newer coordinator may name others; a label is one of few all the same.
        cause = cause if cause in _CAUSES else "other"
        self._changes.labels(cause).inc()
        self._repeated.labels(cause).inc(max(repeated, 0))
        self._recomputed.labels(cause).inc(max(recomputed, 0))
        if pause_seconds is not None:
            self._pause.labels(cause).observe(pause_seconds)

    def api_request(self, method: str, resource: str, code: int, seconds: float) -> None:
        """Count a request to the API server; fits ``KubeApi``'s ``observe``."""
        self._requests.labels(method, resource, str(code)).inc()
        self._request_seconds.labels(method).observe(seconds)

    def coordinator_call(self, call: str, outcome: str) -> None:
        self._calls.labels(call, outcome).inc()

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class _Jobs(Collector):
    def __init__(self, samples: Mapping[tuple[str, str], JobSample], single: bool) -> None:
        self._samples, self._single = samples, single

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        samples = list(self._samples.items())
        phases = GaugeMetricFamily("virtualflow_jobs", "Jobs, by phase.", labels=("phase",))
        for phase, count in (dict.fromkeys(PHASES, 0) | Tally(sample.phase for _, sample in samples)).items():
            phases.add_metric((phase,), count)
        yield phases
        yield GaugeMetricFamily(
            "virtualflow_workers_wanted",
            "Workers that all jobs together want.",
            value=sum(sample.workers_wanted for _, sample in samples),
        )
        yield GaugeMetricFamily(
            "virtualflow_workers_ready",
            "Workers that train, of all jobs together.",
            value=sum(sample.workers_ready for _, sample in samples),
        )
        if self._single:
            families = {
                measure: kind(f"virtualflow_job_{measure}", text, labels=("job_namespace", "job_name"))
                for kind, measures in ((GaugeMetricFamily, _SINGLE), (CounterMetricFamily, _COUNTED))
                for measure, text in measures.items()
            }
            of_phase = GaugeMetricFamily(
                "virtualflow_job_phase", "1: the job is in that phase.", labels=("job_namespace", "job_name", "phase")
            )
            for key, sample in samples:
                of_phase.add_metric((*key, sample.phase), 1)
            yield of_phase
            for measure, family in families.items():
                for key, sample in samples:
                    value = getattr(sample, measure)
                    if value is not None:
                        family.add_metric(key, value)
                yield family


class _Queues(Collector):
    """The gauges of each ``VirtualFlowQueue``; there are few, and those who run the cluster make them."""

    def __init__(self, samples: Mapping[str, QueueSample]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[GaugeMetricFamily]:
        samples = sorted(self._samples.items())
        for measure, text in _OF_A_QUEUE.items():
            family = GaugeMetricFamily(f"virtualflow_shared_{measure}", text, labels=("queue",))
            for name, sample in samples:
                family.add_metric((name,), float(getattr(sample, measure)))
            yield family
        jobs = GaugeMetricFamily("virtualflow_shared_jobs", "Jobs of the queue.", labels=("queue", "state"))
        for name, sample in samples:
            jobs.add_metric((name, "running"), sample.running)
            jobs.add_metric((name, "waiting"), sample.waiting)
        yield jobs
        for place, (measure, text) in enumerate(_OF_A_KIND.items()):
            family = GaugeMetricFamily(f"virtualflow_shared_kind_{measure}", text, labels=("queue", "kind"))
            for name, sample in samples:
                for kind, amounts in sample.kinds.items():
                    family.add_metric((name, kind), amounts[place])
            yield family


_OF_A_KIND = {
    "capacity": "What the jobs of the queue may have together of a kind of device.",
    "allocated": "What they have been given of it.",
}
_OF_A_QUEUE = {
    "ready": "1: the queue gives out what it has; 0: its condition Ready says why not.",
    "capacity": "What the jobs of the queue may have together, of its resource or in workers.",
    "allocated": "What they have been given of it.",
}

_SINGLE = {
    "step": "Steps that the job has completed.",
    "total_steps": "Steps that the job takes in all.",
    "steps_per_second": "The job's present speed.",
    "loss": "The job's latest loss.",
    "non_finite": "1: a metric of the job's latest step is NaN or infinite, as its condition NonFinite says.",
    "checkpoint_failed": "1: the job's latest checkpoint could not be written, as its condition CheckpointFailed says.",
    "last_checkpoint_timestamp_seconds": (
        "Unix time at which the job's newest checkpoint was complete, or it was started or resumed if that was later."
    ),
    "does_not_fit": "1: nothing fits into a worker group's memory, as the job's condition DoesNotFit says.",
    "fits_with_offload": "1: the job's workers swap or recompute activations, as its condition FitsWithOffload says.",
    "memory_copy_step": "The step of the copy of the job's state in its coordinator's memory.",
    "memory_copy_timestamp_seconds": "Unix time at which that copy had arrived.",
    "memory_copy_bytes": "The size of that copy.",
    "workers_ready": "The job's workers that train.",
    "workers_wanted": "The workers that the job wants.",
}

_COUNTED = {
    "paid_worker_seconds": "Seconds that the job's workers were there, of all together.",
    "committed_worker_seconds": "Those of them that went into steps that count.",
}


def metric_names() -> frozenset[str]:
    """Return every metric's name; a histogram's series add ``_bucket``, ``_sum`` and ``_count`` to it."""
    return frozenset(
        f"{family.name}_total" if family.type == "counter" else family.name for family in Metrics().registry.collect()
    )

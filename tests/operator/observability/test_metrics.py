"""The operator's metrics: the names of the dashboard, and that each of them moves."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from virtualflow import __version__
from virtualflow_operator.observability.metrics import PHASES, JobSample, Metrics, QueueSample, metric_names

NAMES = {
    "virtualflow_jobs",
    "virtualflow_workers_wanted",
    "virtualflow_workers_ready",
    "virtualflow_membership_changes_total",
    "virtualflow_repeated_steps_total",
    "virtualflow_repeated_virtual_nodes_total",
    "virtualflow_change_pause_seconds",
    "virtualflow_recovery_seconds",
    "virtualflow_loss_told_seconds",
    "virtualflow_reconcile_duration_seconds",
    "virtualflow_reconcile_errors_total",
    "virtualflow_queue_depth",
    "virtualflow_queue_wait_seconds",
    "virtualflow_api_requests_total",
    "virtualflow_api_request_duration_seconds",
    "virtualflow_coordinator_calls_total",
    "virtualflow_coordinator_misbehaviors_total",
    "virtualflow_coordinators_shed_total",
    "virtualflow_pods_created_total",
    "virtualflow_pods_deleted_total",
    "virtualflow_objects_cut_total",
    "virtualflow_leader",
    "virtualflow_other_release",
    "virtualflow_build_info",
    "virtualflow_shared_ready",
    "virtualflow_shared_capacity",
    "virtualflow_shared_allocated",
    "virtualflow_shared_decision_seconds",
    "virtualflow_shared_kind_capacity",
    "virtualflow_shared_kind_allocated",
    "virtualflow_shared_jobs",
    "virtualflow_job_phase",
    "virtualflow_job_step",
    "virtualflow_job_total_steps",
    "virtualflow_job_steps_per_second",
    "virtualflow_job_loss",
    "virtualflow_job_non_finite",
    "virtualflow_job_checkpoint_failed",
    "virtualflow_job_last_checkpoint_timestamp_seconds",
    "virtualflow_job_does_not_fit",
    "virtualflow_job_fits_with_offload",
    "virtualflow_job_memory_copy_step",
    "virtualflow_job_memory_copy_timestamp_seconds",
    "virtualflow_job_memory_copy_bytes",
    "virtualflow_job_paid_worker_seconds_total",
    "virtualflow_job_committed_worker_seconds_total",
    "virtualflow_job_workers_ready",
    "virtualflow_job_workers_wanted",
}

RUNNING = JobSample(
    "Running", workers_wanted=3, workers_ready=2, step=70, total_steps=100, steps_per_second=1.5, loss=0.25
)

DIVERGED = JobSample("Running", loss=math.nan, non_finite=1)
UNFIT = JobSample("Running", does_not_fit=1, fits_with_offload=0)
UNSAVED = JobSample("Running", checkpoint_failed=1, last_checkpoint_timestamp_seconds=1e9)
COPIED = JobSample("Running", memory_copy_step=60, memory_copy_timestamp_seconds=1e9, memory_copy_bytes=4096)
COUNTED = JobSample("Running", paid_worker_seconds=40.5, committed_worker_seconds=30.25)

BUSY = QueueSample(ready=True, capacity=7.5, allocated=6, running=3, waiting=2, kinds={"fast": (4, 3)})


def samples(metrics: Metrics) -> dict[str, float]:
    """Every exposed sample, as Prometheus reads it."""
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
    }


def test_the_names_are_those_of_the_dashboard_and_no_others() -> None:
    assert metric_names() == NAMES


@pytest.mark.parametrize(
    ("act", "sample", "value"),
    [
        (lambda m: m.change("join", 0.2, 0), "virtualflow_membership_changes_total,cause=join", 1),
        (lambda m: m.change("of a newer version", 0.2, 0), "virtualflow_membership_changes_total,cause=other", 1),
        (
            lambda m: m.objects_cut.labels("VirtualFlowJob").inc(),
            "virtualflow_objects_cut_total,kind=VirtualFlowJob",
            1,
        ),
        (lambda m: m.change("lost", 0.2, 1), "virtualflow_repeated_steps_total,cause=lost", 1),
        (lambda m: m.change("lost", 0.2, 1, 3), "virtualflow_repeated_virtual_nodes_total,cause=lost", 3),
        (lambda m: m.change("lost", 0.2, 1), "virtualflow_change_pause_seconds_sum,cause=lost", 0.2),
        (lambda m: m.change("lost", 0.2, 1), "virtualflow_change_pause_seconds_bucket,cause=lost,le=0.25", 1),
        (lambda m: m.recovery.observe(3), "virtualflow_recovery_seconds_sum", 3),
        (lambda m: m.loss_told.observe(0.1), "virtualflow_loss_told_seconds_count", 1),
        (lambda m: m.reconciliation.observe(0.02), "virtualflow_reconcile_duration_seconds_sum", 0.02),
        (lambda m: m.errors.labels("Unavailable").inc(), "virtualflow_reconcile_errors_total,kind=Unavailable", 1),
        (lambda m: m.queue_depth.set(7), "virtualflow_queue_depth", 7),
        (lambda m: m.queue_wait.observe(0.5), "virtualflow_queue_wait_seconds_sum", 0.5),
        (
            lambda m: m.api_request("GET", "pods", 200, 0.01),
            "virtualflow_api_requests_total,code=200,method=GET,resource=pods",
            1,
        ),
        (
            lambda m: m.api_request("GET", "pods", 200, 0.01),
            "virtualflow_api_request_duration_seconds_sum,method=GET",
            0.01,
        ),
        (
            lambda m: m.coordinator_call("status", "ok"),
            "virtualflow_coordinator_calls_total,call=status,outcome=ok",
            1,
        ),
        (lambda m: m.misbehaved.inc(), "virtualflow_coordinator_misbehaviors_total", 1),
        (lambda m: m.shed.labels("ml").inc(), "virtualflow_coordinators_shed_total,job_namespace=ml", 1),
        (lambda m: m.pods_created.labels("worker").inc(), "virtualflow_pods_created_total,role=worker", 1),
        (lambda m: m.pods_deleted.labels("Orphan").inc(), "virtualflow_pods_deleted_total,reason=Orphan", 1),
        (lambda m: m.leader.set(1), "virtualflow_leader", 1),
        (lambda m: None, f"virtualflow_build_info,version={__version__}", 1),
        (lambda m: m.queues.update(gpus=BUSY), "virtualflow_shared_ready,queue=gpus", 1),
        (lambda m: m.queues.update(gpus=BUSY), "virtualflow_shared_capacity,queue=gpus", 7.5),
        (lambda m: m.queues.update(gpus=BUSY), "virtualflow_shared_allocated,queue=gpus", 6),
        (lambda m: m.queues.update(gpus=BUSY), "virtualflow_shared_kind_capacity,kind=fast,queue=gpus", 4),
        (lambda m: m.queues.update(gpus=BUSY), "virtualflow_shared_kind_allocated,kind=fast,queue=gpus", 3),
        (lambda m: m.queues.update(gpus=BUSY), "virtualflow_shared_jobs,queue=gpus,state=running", 3),
        (lambda m: m.queues.update(gpus=BUSY), "virtualflow_shared_jobs,queue=gpus,state=waiting", 2),
        (lambda m: m.jobs.update({("a", "b"): RUNNING}), "virtualflow_jobs,phase=Running", 1),
        (lambda m: m.jobs.update({("a", "b"): RUNNING}), "virtualflow_workers_wanted", 3),
        (lambda m: m.jobs.update({("a", "b"): RUNNING}), "virtualflow_workers_ready", 2),
        (lambda m: m.jobs.update({("a", "b"): RUNNING}), "virtualflow_job_step,job_name=b,job_namespace=a", 70),
        (lambda m: m.jobs.update({("a", "b"): RUNNING}), "virtualflow_job_total_steps,job_name=b,job_namespace=a", 100),
        (
            lambda m: m.jobs.update({("a", "b"): RUNNING}),
            "virtualflow_job_steps_per_second,job_name=b,job_namespace=a",
            1.5,
        ),
        (lambda m: m.jobs.update({("a", "b"): RUNNING}), "virtualflow_job_loss,job_name=b,job_namespace=a", 0.25),
        (lambda m: m.jobs.update({("a", "b"): DIVERGED}), "virtualflow_job_non_finite,job_name=b,job_namespace=a", 1),
        (lambda m: m.jobs.update({("a", "b"): UNFIT}), "virtualflow_job_does_not_fit,job_name=b,job_namespace=a", 1),
        (
            lambda m: m.jobs.update({("a", "b"): UNFIT}),
            "virtualflow_job_fits_with_offload,job_name=b,job_namespace=a",
            0,
        ),
        (
            lambda m: m.jobs.update({("a", "b"): UNSAVED}),
            "virtualflow_job_checkpoint_failed,job_name=b,job_namespace=a",
            1,
        ),
        (
            lambda m: m.jobs.update({("a", "b"): UNSAVED}),
            "virtualflow_job_last_checkpoint_timestamp_seconds,job_name=b,job_namespace=a",
            1e9,
        ),
        *(
            (lambda m: m.jobs.update({("a", "b"): COPIED}), f"virtualflow_job_{name},job_name=b,job_namespace=a", value)
            for name, value in (
                ("memory_copy_step", 60),
                ("memory_copy_timestamp_seconds", 1e9),
                ("memory_copy_bytes", 4096),
            )
        ),
        *(
            (
                lambda m: m.jobs.update({("a", "b"): COUNTED}),
                f"virtualflow_job_{name}_worker_seconds_total,job_name=b,job_namespace=a",
                value,
            )
            for name, value in (("paid", 40.5), ("committed", 30.25))
        ),
        (lambda m: m.jobs.update({("a", "b"): RUNNING}), "virtualflow_job_workers_ready,job_name=b,job_namespace=a", 2),
        (
            lambda m: m.jobs.update({("a", "b"): RUNNING}),
            "virtualflow_job_workers_wanted,job_name=b,job_namespace=a",
            3,
        ),
    ],
)
def test_every_metric_moves(act: Callable[[Metrics], None], sample: str, value: float) -> None:
    metrics = Metrics()
    act(metrics)
    assert samples(metrics)[sample] == value


def test_a_loss_of_nan_is_one_for_prometheus() -> None:
    metrics = Metrics()
    metrics.jobs["a", "b"] = DIVERGED
    assert math.isnan(samples(metrics)["virtualflow_job_loss,job_name=b,job_namespace=a"])


def test_the_series_of_a_queue_go_with_it() -> None:
    metrics = Metrics()
    metrics.queues["gpus"] = BUSY
    metrics.queues.pop("gpus", None)
    assert samples(metrics) == samples(Metrics())


def test_every_phase_has_a_series_from_the_beginning() -> None:
    found = samples(Metrics())
    assert [found[f"virtualflow_jobs,phase={phase}"] for phase in PHASES] == [0] * len(PHASES)


def test_sums_and_phases_follow_the_jobs() -> None:
    metrics = Metrics()
    metrics.jobs["a", "one"] = RUNNING
    metrics.jobs["b", "one"] = JobSample("Pending", workers_wanted=2)
    metrics.jobs["a", "one"] = JobSample("Complete", step=100)
    found = samples(metrics)
    assert found["virtualflow_jobs,phase=Running"] == 0
    assert found["virtualflow_jobs,phase=Complete"] == 1
    assert {name: found[name] for name in found if name.startswith("virtualflow_job_phase")} == {
        "virtualflow_job_phase,job_name=one,job_namespace=a,phase=Complete": 1,
        "virtualflow_job_phase,job_name=one,job_namespace=b,phase=Pending": 1,
    }
    assert found["virtualflow_jobs,phase=Pending"] == 1
    assert found["virtualflow_workers_wanted"] == 2
    assert "virtualflow_job_loss,job_name=one,job_namespace=a" not in found, "what is not known has no series"


def test_a_jobs_series_vanish_with_it() -> None:
    metrics = Metrics()
    metrics.jobs["a", "one"] = RUNNING
    metrics.jobs.pop(("a", "one"), None)
    metrics.jobs.pop(("a", "one"), None)
    assert samples(metrics) == samples(Metrics())


def test_series_of_single_jobs_can_be_switched_off() -> None:
    metrics = Metrics(job_metrics=False)
    metrics.jobs["a", "one"] = RUNNING
    found = samples(metrics)
    assert not [name for name in found if name.startswith("virtualflow_job_")]
    assert found["virtualflow_workers_wanted"] == 3


def test_a_change_without_a_known_pause_is_counted_without_one() -> None:
    metrics = Metrics()
    metrics.change("start", None, 0)
    found = samples(metrics)
    assert found["virtualflow_membership_changes_total,cause=start"] == 1
    assert "virtualflow_change_pause_seconds_count,cause=start" not in found


def test_nothing_else_is_exposed() -> None:
    metrics = Metrics()
    metrics.change("lost", 0.1, 1)
    suffixes = ("_bucket", "_sum", "_count")
    bases = {name.partition(",")[0] for name in samples(metrics)}
    assert {base for base in bases if base not in NAMES and not base.endswith(suffixes)} == set()

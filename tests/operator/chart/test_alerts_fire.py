"""The alerts in a real Prometheus: each fires where it should, with the sentence that it should, and is quiet else."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from rendering import EVERYTHING, NAMESPACE, TIME_LIMIT, Object, only, render, with_helm
from test_chart_metrics import exposition

PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")

pytestmark = [
    with_helm,
    pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: put Prometheus on the PATH, or name it by PROMTOOL"),
]

Series = dict[str, str]
JOB = 'job_namespace="team-a",job_name="digits"'


def of(name: str, labels: str = "") -> str:
    """A series of the operator, as a monitor of the chart adds its namespace."""
    return f'virtualflow_{name}{{namespace="{NAMESPACE}"{"," if labels else ""}{labels}}}'


def histogram(name: str, fast: str, slow: str) -> Series:
    """So many waits of up to a second, and of up to ten in all."""
    buckets = {"1": fast, "10": slow, "+Inf": slow}
    return {of(f"{name}_bucket", f'le="{limit}"'): values for limit, values in buckets.items()}


@dataclass(frozen=True)
class Story:
    """What happens in a cluster, a sample a minute, and what an alert makes of it."""

    alert: str
    fires: Series
    minute: int
    """When it fires."""
    summary: str
    quiet: Series
    """What is well, or not long enough."""
    labels: tuple[tuple[str, str], ...] = ()
    single: bool | None = None
    """Whether there are series of single jobs; ``None``: that is one."""


OF_THE_JOB = (("job_namespace", "team-a"), ("job_name", "digits"))
STORIES = (
    Story(
        "VirtualFlowOperatorDown",
        {},
        7,
        "No VirtualFlow operator answers Prometheus.",
        {of("build_info", 'version="0.1.0"'): "1x60"},
        (("namespace", NAMESPACE),),
    ),
    Story(
        "VirtualFlowNotOneLeader",
        {of("leader", 'pod="a"'): "1x60", of("leader", 'pod="b"'): "1x60"},
        4,
        "VirtualFlow operators that lead: 2. It should be one.",
        {of("leader", 'pod="a"'): "1x60", of("leader", 'pod="b"'): "0x60"},
    ),
    Story(
        "VirtualFlowReconcileErrors",
        {of("reconcile_errors_total", 'kind="ApiError"'): "0+1x60"},
        30,
        "Reconciling jobs has been failing for 20 minutes (ApiError).",
        {of("reconcile_errors_total", 'kind="ApiError"'): "7x60"},
        (("kind", "ApiError"),),
    ),
    Story(
        "VirtualFlowQueueSlow",
        histogram("queue_wait_seconds", "0x60", "0+10x60"),
        30,
        "One in ten jobs waits longer than 9.1s to be looked at.",
        histogram("queue_wait_seconds", "0+10x60", "0+10x60"),
    ),
    Story(
        "VirtualFlowLossToldLate",
        histogram("loss_told_seconds", "0x60", "0+10x60"),
        30,
        "One in ten lost workers is told to its coordinator later than 9.1s.",
        histogram("loss_told_seconds", "0+10x60", "0+10x60"),
    ),
    Story(
        "VirtualFlowWorkersMissing",
        {of("job_workers_wanted", JOB): "4x200", of("job_workers_ready", JOB): "3x200"},
        100,
        "Workers that team-a/digits has been missing for {minutes} minutes: 1.",
        {of("job_workers_wanted", JOB): "4x200", of("job_workers_ready", JOB): "4x200"},
        OF_THE_JOB,
        single=True,
    ),
    Story(
        "VirtualFlowWorkersMissing",
        {of("workers_wanted"): "4x200", of("workers_ready"): "3x200"},
        100,
        "Workers that jobs have been missing for {minutes} minutes: 1.",
        {of("workers_wanted"): "4x200", of("workers_ready"): "3x90 4x110"},
        single=False,
    ),
    Story(
        "VirtualFlowJobsBackingOff",
        {of("jobs", 'phase="BackOff"'): "2x60"},
        20,
        "Jobs that crash and are started again: 2.",
        {of("jobs", 'phase="Running"'): "2x60"},
    ),
    Story(
        "VirtualFlowMetricNotFinite",
        {of("job_non_finite", JOB): "0x5 1x60"},
        10,
        "A metric of team-a/digits is NaN or infinite.",
        {of("job_non_finite", JOB): "0x60"},
        OF_THE_JOB,
    ),
    Story(
        "VirtualFlowCheckpointFailed",
        {of("job_checkpoint_failed", JOB): "1x60"},
        10,
        "The checkpoints of team-a/digits cannot be written.",
        {of("job_checkpoint_failed", JOB): "1x3 0x60"},
        OF_THE_JOB,
    ),
    Story(
        "VirtualFlowCheckpointOld",
        {of("job_last_checkpoint_timestamp_seconds", JOB): "0x400", of("job_workers_ready", JOB): "1x400"},
        300,
        "The newest checkpoint of team-a/digits is 5h 0m 0s old.",
        {of("job_last_checkpoint_timestamp_seconds", JOB): "0x400", of("job_workers_ready", JOB): "0x400"},
        OF_THE_JOB,
    ),
    Story(
        "VirtualFlowGoodputLow",
        {
            of("job_paid_worker_seconds_total", JOB): "0+240x200",
            of("job_committed_worker_seconds_total", JOB): "0+60x200",
        },
        120,
        "Of the worker time of team-a/digits, 25 % went into steps that count in the last hour.",
        # 3 in 4 of them do, and the coordinator was replaced.
        {
            of("job_paid_worker_seconds_total", JOB): "0+240x60 0+240x140",
            of("job_committed_worker_seconds_total", JOB): "0+180x60 0+180x140",
        },
        OF_THE_JOB,
    ),
    Story(
        "VirtualFlowJobFailed",
        # The operator's pod is replaced meanwhile: an older failure is no news.
        {
            of("job_phase", JOB + ',phase="Failed",pod="a"'): "_x20 1x5 _x60",
            of("job_phase", JOB + ',phase="Failed",pod="b"'): "_x26 1x60",
        },
        30,
        "The job team-a/digits has failed.",
        {
            of("job_phase", JOB + ',phase="Failed",pod="a"'): "1x20 _x60",
            of("job_phase", JOB + ',phase="Failed",pod="b"'): "_x20 1x60",
            of("job_phase", 'job_namespace="team-a",job_name="other",phase="Complete"'): "_x20 1x60",
        },
        OF_THE_JOB,
        single=True,
    ),
    Story(
        "VirtualFlowJobFailed",
        {of("jobs", 'phase="Failed"'): "1x20 2x60"},
        25,
        "More jobs have failed than 15 minutes ago: 2.",
        {of("jobs", 'phase="Failed"'): "2x60"},
        single=False,
    ),
    Story(
        "VirtualFlowStepsRepeated",
        {of("repeated_steps_total"): "0+10x120"},
        90,
        "Steps that were repeated in the last hour: 600.",
        {of("repeated_steps_total"): "600x120"},
    ),
)


@functools.cache
def groups(single: bool) -> list[Object]:
    return list(only(render({**EVERYTHING, "jobs": {"metrics": single}}), "PrometheusRule")["spec"]["groups"])


def rules(single: bool) -> dict[str, Object]:
    (group,) = groups(single)
    return {rule["alert"]: rule for rule in group["rules"]}


def promtool(*arguments: str | Path, said: str = "") -> str:
    """Run it; what it says."""
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *map(str, arguments)],
        input=said,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def case(story: Story, rule: Object, *, fires: bool) -> Object:
    """A unit test of rules, as Prometheus has them."""
    minutes = re.sub(r"m$", "", rule["for"])
    annotations = {**rule["annotations"], "summary": story.summary.format(minutes=minutes)}
    told: list[Object] = [{"exp_labels": {**rule["labels"], **dict(story.labels)}, "exp_annotations": annotations}]
    series = story.fires if fires else story.quiet
    return {
        "name": f"{story.alert} {'fires' if fires else 'is quiet'}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{story.minute}m", "alertname": story.alert, "exp_alerts": told if fires else []},
        ],
    }


@pytest.mark.parametrize("single", [True, False], ids=["with series of jobs", "without"])
def test_prometheus_reads_the_rules_and_each_alert_fires_where_it_should(single: bool, tmp_path: Path) -> None:
    known = rules(single)
    stories = [story for story in STORIES if story.alert in known and story.single in (None, single)]
    assert {story.alert for story in stories} == known.keys(), "every alert has a story"
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups(single)}))
    assert "SUCCESS" in promtool("check", "rules", tmp_path / "rules.yaml")
    tests = [case(story, known[story.alert], fires=fires) for story in stories for fires in (True, False)]
    content = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(content))
    promtool("test", "rules", tmp_path / "tests.yaml")


def test_prometheus_reads_what_an_operator_exposes() -> None:
    promtool("check", "metrics", said=exposition())

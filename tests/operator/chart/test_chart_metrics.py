"""The dashboard and the alerts read what the operator exposes."""

from __future__ import annotations

import functools
import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rendering import (
    CHART,
    EVERYTHING,
    NAMESPACE,
    ROOT,
    Object,
    only,
    render,
    with_helm,
)

from virtualflow_operator.observability.metrics import JobSample, Metrics, QueueSample, metric_names

OPERATIONS = ROOT / "docs" / "how-to" / "operations.md"


@functools.cache
def exposition(paid: float = 8.0) -> str:
    """What an operator shows to Prometheus after something of everything has happened.

    ``paid``: worker-seconds of the job, of which a quarter went into steps that count.
    """
    metrics = Metrics()
    metrics.change("drain", 0.1, 1)
    metrics.recovery.observe(0.1)
    metrics.loss_told.observe(0.1)
    metrics.reconciliation.observe(0.1)
    metrics.errors.labels("ApiError").inc()
    metrics.queue_wait.observe(0.1)
    metrics.api_request("GET", "pods", 200, 0.1)
    metrics.objects_cut.labels("VirtualFlowJob").inc()
    metrics.coordinator_call("status", "ok")
    metrics.shed.labels("default").inc()
    metrics.pods_created.labels("worker").inc()
    metrics.pods_deleted.labels("drained").inc()
    metrics.jobs["default", "digits"] = JobSample(
        "Running",
        workers_wanted=2,
        workers_ready=2,
        step=1,
        total_steps=600,
        steps_per_second=3.0,
        loss=0.5,
        checkpoint_failed=0,
        last_checkpoint_timestamp_seconds=1e9,
        memory_copy_step=1,
        memory_copy_timestamp_seconds=1e9,
        memory_copy_bytes=4_096,
        does_not_fit=0,
        fits_with_offload=1,
        paid_worker_seconds=paid,
        committed_worker_seconds=paid / 4,
    )
    metrics.queues["gpus"] = QueueSample(True, 8, 6, 3, 2, {"fast": (4, 3)})
    return metrics.exposition().decode()


@functools.cache
def series() -> dict[str, frozenset[str]]:
    """Every series that an operator exposes, with its labels."""
    found: dict[str, frozenset[str]] = {}
    for family in text_string_to_metric_families(exposition()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, frozenset()) | sample.labels.keys()
    return found


def dashboard() -> Object:
    return dict(json.loads((CHART / "dashboards" / "virtualflow.json").read_text()))


def dashboard_expressions() -> list[str]:
    queries = [str(variable["query"]["query"]) for variable in dashboard()["templating"]["list"][1:]]
    return queries + [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def alerts() -> list[Object]:
    """The rules with series of single jobs, and those without."""
    found = []
    for single in (True, False):
        (group,) = only(render({**EVERYTHING, "jobs": {"metrics": single}}), "PrometheusRule")["spec"]["groups"]
        assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])
        found += group["rules"]
    return found


def names_in(expression: str) -> set[str]:
    """Return the series that an expression reads."""
    return set(re.findall(r"\bvirtualflow_\w+", expression))


def labels_in(expression: str) -> set[str]:
    """Return the labels that an expression groups and selects by."""
    grouped = [name.strip() for names in re.findall(r"\bby \(([^)]*)\)", expression) for name in names.split(",")]
    return {*grouped, *re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)}


def misread(expression: str) -> set[str]:
    """Return the series and labels of an expression that no operator exposes."""
    # The operator's namespace is a label that a scrape adds.
    known = {"namespace"}.union(*(series().get(name, ()) for name in names_in(expression)))
    return (names_in(expression) - series().keys()) | (labels_in(expression) - known)


def test_every_series_and_label_of_the_dashboard_exists() -> None:
    assert len(dashboard_expressions()) > 30
    assert {expression: misread(expression) for expression in dashboard_expressions() if misread(expression)} == {}


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {re.sub(r"_(bucket|count|sum)$", "", name) for text in dashboard_expressions() for name in names_in(text)}
    assert metric_names() == shown


def test_a_misspelt_series_or_label_is_found() -> None:
    assert misread('sum by (couse) (virtualflow_leaders{phase="x"})') == {"virtualflow_leaders", "couse", "phase"}


def test_the_dashboards_panels_are_described_and_do_not_cover_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}, panel["title"]


@with_helm
def test_the_dashboard_is_installed_as_it_is() -> None:
    found = only(render(EVERYTHING), "ConfigMap")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"]["virtualflow.json"]) == dashboard()


@with_helm
def test_every_series_and_label_of_the_alerts_exists() -> None:
    assert {rule["alert"]: misread(rule["expr"]) for rule in alerts() if misread(rule["expr"])} == {}


@with_helm
def test_every_alert_says_what_is_wrong_and_looks_at_its_own_release_only() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["labels"]["team"] == "ml"
        assert rule["annotations"]["summary"].endswith("."), rule["alert"]
        assert rule["annotations"]["description"].endswith("."), rule["alert"]
        assert rule["expr"].count(f'{{namespace="{NAMESPACE}"') == len(re.findall(r"virtualflow_\w+", rule["expr"]))


@with_helm
def test_every_threshold_on_a_quantile_can_be_reached() -> None:
    # Prometheus takes what is beyond the last bucket for its upper bound.
    bounds: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition()):
        for sample in family.samples:
            if (bound := sample.labels.get("le", "+Inf")) != "+Inf":
                bounds[sample.name] = max(bounds.get(sample.name, 0.0), float(bound))
    quantiles = [rule["expr"] for rule in alerts() if "histogram_quantile" in rule["expr"]]
    assert quantiles
    for expression in quantiles:
        (name,) = names_in(expression)
        assert float(expression.rpartition(">")[2]) < bounds[name], expression


@with_helm
@pytest.mark.parametrize(
    ("alert", "single", "summed"),
    [
        (
            "VirtualFlowWorkersMissing",
            {"virtualflow_job_workers_wanted", "virtualflow_job_workers_ready"},
            {"virtualflow_workers_wanted", "virtualflow_workers_ready"},
        ),
        ("VirtualFlowJobFailed", {"virtualflow_job_phase"}, {"virtualflow_jobs"}),
    ],
)
def test_an_alert_names_the_job_where_single_jobs_have_series_and_needs_none_where_not(
    alert: str, single: set[str], summed: set[str]
) -> None:
    one, other = (rule for rule in alerts() if rule["alert"] == alert)
    assert [names_in(one["expr"]), names_in(other["expr"])] == [single, summed]
    assert "{{ $labels.job_namespace }}/{{ $labels.job_name }}" in one["annotations"]["summary"]
    assert "$labels" not in other["annotations"]["summary"]


@with_helm
@pytest.mark.parametrize("percent", [0, 80])
def test_whoever_wants_no_goodput_in_particular_gets_no_alert_on_it(percent: int) -> None:
    values = {"metrics": {"rules": {"enabled": True, "goodputPercent": percent}}}
    (group,) = only(render(values), "PrometheusRule")["spec"]["groups"]
    limits = [rule["expr"].rpartition(" < ")[2] for rule in group["rules"] if rule["alert"] == "VirtualFlowGoodputLow"]
    assert limits == ([str(percent)] if percent else [])


@with_helm
@pytest.mark.skipif(
    not OPERATIONS.exists(), reason="there is no docs/how-to/operations.md: write it with a part for each alert"
)
def test_every_alert_has_its_part_in_the_operations_page() -> None:
    headings = {line.lstrip("# ").strip().lower() for line in OPERATIONS.read_text().splitlines() if line[:1] == "#"}
    for rule in alerts():
        page, anchor = rule["annotations"]["runbook_url"].split("#")
        assert page == "docs/how-to/operations.md"
        assert anchor in headings

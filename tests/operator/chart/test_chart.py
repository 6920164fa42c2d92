"""What the chart renders: accepted by Helm, restricted, complete. What needs a cluster is in the end-to-end tests."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml
from pod_standard import beyond_restricted
from rendering import (
    CHART,
    DEFAULTS,
    DEFINITION,
    EVERYTHING,
    QUEUE_DEFINITION,
    RELEASE,
    ROOT,
    SETS,
    Object,
    each_set,
    environment,
    helm,
    of_kind,
    only,
    parse,
    pod_templates,
    render,
    selects,
    with_helm,
)

from virtualflow_operator.controllers.flags import read_settings


@with_helm
@each_set
def test_the_chart_passes_a_strict_lint(values: Object) -> None:
    answer = helm("lint", "--strict", str(CHART), values=values)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@with_helm
@each_set
def test_every_object_bears_the_usual_labels_and_its_namespace(values: Object) -> None:
    cluster_wide = {
        *("ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"),
        *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
    }
    for found in render(values):
        if found["kind"] == "CustomResourceDefinition":
            continue
        wanted = {"name", "instance", "part-of", "version", "managed-by"}
        assert {f"app.kubernetes.io/{label}" for label in wanted} <= found["metadata"]["labels"].keys(), found
        assert ("namespace" in found["metadata"]) is (found["kind"] not in cluster_wide), found["metadata"]


@with_helm
def test_no_object_stands_twice() -> None:
    for values in SETS.values():
        names = [
            (found["kind"], found["metadata"].get("namespace"), found["metadata"]["name"]) for found in render(values)
        ]
        assert len(names) == len(set(names))


@with_helm
def test_the_longest_release_name_still_gives_valid_names() -> None:
    for found in render(EVERYTHING, release="a" * 53):
        long = ("Cluster", "CustomResourceDefinition", "Role", "ValidatingAdmissionPolicy")
        limit = 253 if found["kind"].startswith(long) else 63
        assert len(found["metadata"]["name"]) <= limit
        assert all(len(str(value)) <= 63 for value in found["metadata"].get("labels", {}).values())


@with_helm
@each_set
def test_every_pod_keeps_to_the_restricted_standard(values: Object) -> None:
    templates = list(pod_templates(render(values)))
    assert len(templates) == 2  # the operator and the test
    for template in templates:
        assert beyond_restricted(template["spec"]) == []
        for container in template["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


@with_helm
def test_turn_servers_ask_for_a_directory_of_their_node_and_for_root_and_no_more() -> None:
    assert not of_kind(render(DEFAULTS), "DaemonSet"), "nobody has them who does not ask for them"
    objects = render(EVERYTHING)
    daemon_set = only(objects, "DaemonSet")
    template = daemon_set["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    assert beyond_restricted(pod) == ["volumes: turns", "turns: runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["volumes"] == [{"name": "turns", "hostPath": {"path": "/var/run/turns", "type": "DirectoryOrCreate"}}]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/var/run/turns"]
    assert container["args"] == ["/var/run/turns/socket"]
    assert read_settings([], environment(objects)).turns_directory == "/var/run/turns", "where workers look for it"
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"gpu": "true"}, [{"operator": "Exists"}])
    seeing = only(render({"turns": {"enabled": True, "hostPID": True}}), "DaemonSet")["spec"]["template"]["spec"]
    assert beyond_restricted(seeing) == ["hostPID", "volumes: turns", "turns: runAsNonRoot"]
    selector = daemon_set["spec"]["selector"]["matchLabels"]
    assert selects(selector, template["metadata"]["labels"])
    assert not any(selects(selector, other["metadata"]["labels"]) for other in pod_templates(objects))
    assert not selects(only(objects, "Deployment")["spec"]["selector"]["matchLabels"], template["metadata"]["labels"])


@with_helm
def test_a_pod_that_asks_for_more_is_seen_as_such() -> None:
    values = {"securityContext": {"allowPrivilegeEscalation": True}}
    assert all(beyond_restricted(template["spec"]) for template in pod_templates(render(values)))


@with_helm
@each_set
def test_every_volume_that_is_mounted_is_there(values: Object) -> None:
    for template in pod_templates(render(values)):
        mounted = {
            mount["name"] for container in template["spec"]["containers"] for mount in container.get("volumeMounts", [])
        }
        assert mounted == {volume["name"] for volume in template["spec"].get("volumes", [])}


@with_helm
@each_set
def test_every_selector_finds_the_operator_and_no_pod_else(values: Object) -> None:
    objects = render(values)
    operator, test = (template["metadata"]["labels"] for template in pod_templates(objects))
    selectors = [
        only(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        only(objects, "Service")["spec"]["selector"],
        read_settings([], environment(objects)).operator_labels,
        *(found["spec"]["selector"]["matchLabels"] for found in of_kind(objects, "PodDisruptionBudget")),
        *(found["spec"]["selector"]["matchLabels"] for found in of_kind(objects, "PodMonitor")),
        *(found["spec"]["podSelector"]["matchLabels"] for found in of_kind(objects, "NetworkPolicy")),
    ]
    # A worker of a job that is called as the release.
    worker = {**operator, "app.kubernetes.io/component": "worker"}
    for selector in selectors:
        assert selects(selector, operator)
        assert not selects(selector, test)
        assert not selects(selector, worker)
    for monitor in of_kind(objects, "ServiceMonitor"):
        assert selects(monitor["spec"]["selector"]["matchLabels"], only(objects, "Service")["metadata"]["labels"])


@with_helm
@pytest.mark.parametrize(
    ("values", "budgets"),
    [({}, 1), ({"replicas": 1}, 0), ({"podDisruptionBudget": {"enabled": False}}, 0)],
    ids=["two replicas", "one replica", "switched off"],
)
def test_a_drain_leaves_one_of_several_operators(values: Object, budgets: int) -> None:
    found = of_kind(render(values), "PodDisruptionBudget")
    assert [budget["spec"]["maxUnavailable"] for budget in found] == [1] * budgets


@with_helm
def test_two_monitors_are_refused() -> None:
    both = {"metrics": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}}
    answer = helm("template", RELEASE, str(CHART), values=both)
    assert answer.returncode != 0
    assert "enable one of them" in answer.stderr


def test_chart_and_package_are_of_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]


# The definition and the key


each_definition = pytest.mark.parametrize(
    ("template", "definition"),
    [("templates/crd.yaml", DEFINITION), ("templates/crd-queues.yaml", QUEUE_DEFINITION)],
    ids=["jobs", "queues"],
)


@with_helm
@each_definition
def test_the_definition_is_the_file_of_the_repository_to_the_letter(template: str, definition: Path) -> None:
    answer = helm("template", RELEASE, str(CHART), "--show-only", template)
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert lines[:2] == ["---", f"# Source: virtualflow/{template}"]
    assert "\n".join(lines[2:]).strip() == definition.read_text().strip()
    assert (CHART / "files" / definition.name).resolve() == definition


@with_helm
@each_definition
def test_a_packed_chart_bears_the_definition_itself(tmp_path: Path, template: str, definition: Path) -> None:
    answer = helm("package", str(CHART), "--destination", str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    (archive,) = tmp_path.iterdir()
    answer = helm("template", RELEASE, str(archive), "--show-only", template)
    (packed,) = parse(answer.stdout)
    assert packed == parse(definition.read_text())[0]


@with_helm
def test_an_uninstall_keeps_what_cannot_be_made_again() -> None:
    objects = render(DEFAULTS)
    kept = {
        (found["kind"], found["metadata"]["name"])
        for found in objects
        if (found["metadata"].get("annotations") or {}).get("helm.sh/resource-policy") == "keep"
    }
    assert kept == {
        ("CustomResourceDefinition", "virtualflowjobs.virtualflow.dev"),
        ("CustomResourceDefinition", "virtualflowqueues.virtualflow.dev"),
        ("Secret", "virtualflow-operator-key"),
    }


@with_helm
def test_each_release_has_a_key_of_its_own_of_48_random_bytes() -> None:
    first, second = (only(render(DEFAULTS, release), "Secret")["data"]["key"] for release in ("one", "two"))
    assert first != second
    assert len(first) >= 48 * 4 // 3


@with_helm
@pytest.mark.parametrize(
    ("values", "name"), [(DEFAULTS, "virtualflow-operator-key"), (EVERYTHING, "my-key")], ids=["made", "given"]
)
def test_the_operator_finds_its_key_where_it_looks_for_it(values: Object, name: str) -> None:
    objects = render(values)
    assert [found["metadata"]["name"] for found in of_kind(objects, "Secret")] == [name] * (values is DEFAULTS)
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    (volume,) = (volume for volume in pod["volumes"] if "secret" in volume)
    assert volume["secret"]["secretName"] == name
    (mount,) = (mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == volume["name"])
    settings = read_settings([], environment(objects))
    paths = [str(settings.key_file), str(settings.other_key_file)]
    assert [f"{mount['mountPath']}/{entry}" for entry in ("key", "other")] == paths
    assert "items" not in volume["secret"], "the other one need not be there"


# Network


@with_helm
def test_the_operators_network_policy_lets_its_own_work_through() -> None:
    policy = only(render({"networkPolicy": {"enabled": True}}), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert [[port["port"] for port in rule["ports"]] for rule in policy["ingress"]] == [["metrics"], ["health"]]
    assert [[port["port"] for port in rule["ports"]] for rule in policy["egress"]] == [[443, 6443], [7700], [53, 53]]


@with_helm
def test_who_reads_the_metrics_can_be_limited_without_shutting_out_the_test() -> None:
    objects = render(EVERYTHING)
    metrics, health = only(objects, "NetworkPolicy")["spec"]["ingress"]
    test, prometheus = metrics["from"]
    assert selects(test["podSelector"]["matchLabels"], only(objects, "Pod")["metadata"]["labels"])
    assert prometheus == EVERYTHING["networkPolicy"]["metricsFrom"][0]
    assert "from" not in health

"""Whether a cluster is ready for a job, before the job is there: ``kubectl vf check``.

Each check is what one would look at by hand. What its user may not look at is said to be unknown, and is no failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from kubernetes import client as kubernetes
from kubernetes.utils.quantity import parse_quantity

from virtualflow.cluster.api import COORDINATOR, GROUP, PLURAL, REQUEST_SECONDS, VERSION, said, why
from virtualflow.cluster.client import Client

OPERATOR = "app.kubernetes.io/part-of=virtualflow,app.kubernetes.io/component=operator"
RIGHTS = (
    ("create", GROUP, PLURAL, "", "create jobs"),
    ("patch", GROUP, PLURAL, "", "suspend and resume jobs"),
    ("patch", GROUP, PLURAL, "scale", "scale jobs"),
    ("get", "", "pods", "log", "read logs"),
    ("create", "", "pods", "eviction", "drain workers"),
)
"""Verb, group, resource and subresource, and what it is for."""

Verdict = Literal["ok", "unknown", "no"]


class Check(NamedTuple):
    """What was found."""

    verdict: Verdict
    sentence: str


def check(client: Client, manifest: Mapping[str, Any] | None) -> Iterator[Check]:
    """Look at a cluster, and at a job that is to be created on it.

    Args:
        client: of the namespace of the job.
        manifest: a ``VirtualFlowJob``; without one, only the cluster is looked at.
    """
    with said("look at the cluster"):
        installed = _resource(client)
        yield installed
        if installed.verdict == "no":
            return
        yield _operator(client)
        yield _rights(client, client.namespace if manifest is None else client.namespace_for(manifest))
        if manifest is not None:
            yield _accepted(client, manifest)
            yield from _nodes(client, manifest)


def _resource(client: Client) -> Check:
    try:
        found = kubernetes.CustomObjectsApi(client.api).get_api_resources(
            GROUP, VERSION, _request_timeout=REQUEST_SECONDS
        )
    except kubernetes.ApiException as error:
        if error.status != 404:
            return Check("unknown", f"whether the cluster has jobs cannot be seen: {why(error)}")
        found = None
    if found is None or PLURAL not in {each.name for each in found.resources}:
        return Check("no", f"the cluster has no {PLURAL}.{GROUP}; install the chart")
    return Check("ok", f"the cluster has {PLURAL}.{GROUP}/{VERSION}")


def _operator(client: Client) -> Check:
    try:
        found = kubernetes.AppsV1Api(client.api).list_deployment_for_all_namespaces(
            label_selector=OPERATOR, _request_timeout=REQUEST_SECONDS
        )
    except kubernetes.ApiException as error:
        return Check("unknown", f"whether an operator runs cannot be seen: {why(error)}")
    ready = [each for each in found.items if each.status and each.status.ready_replicas]
    if ready:
        where = f"{ready[0].metadata.namespace}/{ready[0].metadata.name}"
        return Check("ok", f"the operator runs: {where}, {ready[0].spec.template.spec.containers[0].image}")
    if found.items:
        metadata = found.items[0].metadata
        return Check(
            "no", f"the operator is not ready: kubectl -n {metadata.namespace} describe deploy {metadata.name}"
        )
    return Check("no", "no operator runs; install the chart")


def _rights(client: Client, namespace: str) -> Check:
    reviews = kubernetes.AuthorizationV1Api(client.api)
    missing = []
    for verb, group, resource, subresource, purpose in RIGHTS:
        attributes = {"verb": verb, "group": group, "resource": resource, "subresource": subresource}
        body = {"spec": {"resourceAttributes": attributes | {"namespace": namespace}}}
        found = reviews.create_self_subject_access_review(body, _request_timeout=REQUEST_SECONDS)
        if not found.status.allowed:
            missing.append(purpose)
    if missing:
        return Check("no", f"in {namespace} you may not {', '.join(missing)}; ask for the role edit in that namespace")
    return Check("ok", f"in {namespace} you may do all that kubectl vf does")


def _accepted(client: Client, manifest: Mapping[str, Any]) -> Check:
    """Whether the API server would take the job, and pods of its templates: no field may be one that it would drop."""
    name = manifest["metadata"]["name"]
    try:
        kubernetes.CustomObjectsApi(client.api).create_namespaced_custom_object(
            GROUP,
            VERSION,
            client.namespace_for(manifest),
            PLURAL,
            dict(manifest),
            dry_run="All",
            field_validation="Strict",
            _request_timeout=REQUEST_SECONDS,
        )
    except kubernetes.ApiException as error:
        if error.status != 409:
            return Check("no", f"{name} would be refused: {why(error)}")
        verdict = f"{name} is there already"
    else:
        verdict = f"{name} would be accepted"
    for whose, pod in _pods(manifest):
        try:
            _dry_run(client, client.namespace_for(manifest), pod)
        except kubernetes.ApiException as error:
            said_why = why(error)
            if "cannot create resource" in said_why:
                return Check("unknown", f"whether pods of {name} would be accepted cannot be seen: {said_why}")
            if error.status != 409 and "exceeded quota" not in said_why:  # which says nothing about the template
                return Check("no", f"{name} would be refused: {whose}: {said_why}")
    return Check("ok", verdict)


def _dry_run(client: Client, namespace: str, pod: Mapping[str, Any]) -> None:
    """Ask for a pod as it is: the typed client would refuse a number as a quantity."""
    request = client.api.param_serialize(
        "POST",
        "/api/v1/namespaces/{namespace}/pods",
        path_params={"namespace": namespace},
        query_params=[("dryRun", "All"), ("fieldValidation", "Strict")],
        header_params={"Accept": "application/json", "Content-Type": "application/json"},
        body=dict(pod),
        auth_settings=["BearerToken"],
    )
    answer = client.api.call_api(*request, _request_timeout=REQUEST_SECONDS)
    answer.read()
    client.api.response_deserialize(answer, {"201": "object", "default": "object"})


def _pods(manifest: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A pod of each template, for a dry run, and whose it is."""
    spec = manifest.get("spec") or {}
    for group in spec.get("workerGroups") or ():
        yield f"worker group {group['name']}", _pod(manifest, group["template"], {})
    template = (spec.get("coordinator") or {}).get("template") or {}
    container = {"name": COORDINATOR, "image": COORDINATOR} | next(
        iter((template.get("spec") or {}).get("containers") or ()), {}
    )
    yield COORDINATOR, _pod(manifest, template, {"containers": [container]})


def _pod(manifest: Mapping[str, Any], template: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {**(template.get("metadata") or {}), "name": f"{manifest['metadata']['name']}-check"}
    spec = {**(template.get("spec") or {}), "restartPolicy": "Never", **fixed}
    return {**template, "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _nodes(client: Client, manifest: Mapping[str, Any]) -> Iterator[Check]:
    """Whether some node has, when it is empty, what a worker requests."""
    try:
        nodes = client.core.list_node(_request_timeout=REQUEST_SECONDS).items
    except kubernetes.ApiException as error:
        yield Check("unknown", f"whether workers fit on a node cannot be seen: {why(error)}")
        return
    for group in manifest.get("spec", {}).get("workerGroups", ()):
        pod = group.get("template", {}).get("spec", {})
        wanted, selector = _requests(pod), pod.get("nodeSelector") or {}
        chosen = [node for node in nodes if selector.items() <= (node.metadata.labels or {}).items()]
        labels = ", ".join(f"{key}={value}" for key, value in selector.items())
        if not chosen:
            yield Check("no", f"{group['name']}: no node has the labels {labels}" if labels else "there is no node")
            continue
        fitting = sum(all(_has(node, name) >= amount for name, amount in wanted.items()) for node in chosen)
        if fitting:
            yield Check("ok", f"{group['name']}: a worker fits on {fitting} of {len(nodes)} nodes when they are empty")
            continue
        for name, amount in wanted.items():
            most = max(_has(node, name) for node in chosen)
            if most < amount:
                where = f" of those with {labels}" if labels else ""
                yield Check(
                    "no",
                    f"{group['name']}: a worker requests {amount:f} {name}, and no node{where} has more than {most:f}",
                )
                break
        else:
            yield Check("no", f"{group['name']}: no node has all that a worker requests at once")


def _requests(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """What its containers request together; a limit is a request where there is none."""
    total: dict[str, Decimal] = {}
    for container in pod.get("containers", ()):
        resources = container.get("resources") or {}
        for name, amount in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            total[name] = total.get(name, Decimal(0)) + parse_quantity(amount)
    return total


def _has(node: Any, resource: str) -> Decimal:
    allocatable = (node.status.allocatable if node.status else None) or {}
    return Decimal(parse_quantity(allocatable.get(resource, 0)))

"""What each account and token opens, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable

import urllib3
from cluster import OPERATOR, ROOT, SYSTEM, Cluster, Object
from cluster_jobs import Job, digits
from installation import Installed

Start = Callable[[Object], Job]
Right = tuple[str, str, str, str]
"""Verb, API group, resource, and the name that it is limited to or nothing."""


def rights(cluster: Cluster, account: str, namespace: str) -> set[Right]:
    """Return what a service account may do in a namespace, as ``kubectl auth can-i --list`` asks for it."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    status = cluster.request("POST", path, review, impersonate=f"system:serviceaccount:{SYSTEM}:{account}")["status"]
    assert not status["incomplete"]
    return {
        (verb, group, resource, name)
        for rule in status["resourceRules"]
        for verb in rule["verbs"]
        for group in rule.get("apiGroups") or [""]
        for resource in rule.get("resources") or []
        for name in rule.get("resourceNames") or [""]
    }


def documented(*places: str) -> set[Right]:
    """Return the rights that the table of docs/how-to/security.md gives in these places.

    A row is: API group, resource (with ``named X`` where it is one object only), verbs, where, why.
    """
    found: set[Right] = set()
    text = (ROOT / "docs" / "how-to" / "security.md").read_text()
    for line in text.splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")]
        if len(cells) < 4 or cells[3] not in places:
            continue
        group = "" if cells[0] == "core" else cells[0]
        resource, _, name = cells[1].partition(" named ")
        for verb in re.split(r"[,\s]+", cells[2]):
            found |= {(verb, group, one.strip(), name.strip()) for one in resource.split(",")}
    return found


def test_the_operators_account_may_do_what_the_table_says_and_nothing_else(
    installed: Installed, namespace: str
) -> None:
    cluster = installed.cluster
    anybody = rights(cluster, "nobody", namespace)
    table = documented("where its jobs are", "everywhere")
    assert table, "docs/how-to/security.md has a table of the operator's rights"
    assert rights(cluster, OPERATOR, namespace) - anybody == table
    for place, where in ((SYSTEM, "own namespace"), ("kube-public", "kube-public, with namespaces: all")):
        further = documented(where)
        assert further, f"docs/how-to/security.md has the rights of the row {where!r}"
        assert rights(cluster, OPERATOR, place) - anybody == table | further


def test_an_identity_opens_what_is_its_roles_at_its_own_coordinator_and_nothing_else(
    installed: Installed, start: Start
) -> None:
    one, other = (start(digits(name, steps=100_000, pause=0.05, replicas=1)) for name in ("one", "other"))
    for job in (one, other):
        job.wait_training(1)
    worker = one.identity_of(one.workers()[0])
    assert one.ask_coordinator(one.control())[0] == 200
    assert other.ask_coordinator(one.control())[0] == 0
    assert one.ask_coordinator(worker)[0] == 403, "the status is not for workers"
    assert other.ask_coordinator(worker)[0] == 0
    assert one.ask_coordinator(one.identity_of(one.coordinator()))[0] == 0, "a coordinator calls nobody"
    assert one.ask_coordinator(None)[0] == 426, "without TLS the token opens nothing"
    host = installed.cluster.client.configuration.host
    authority = installed.cluster.client.configuration.ssl_ca_cert
    answer = urllib3.PoolManager(ca_certs=authority).request(
        "GET", f"{host}/api/v1/namespaces", headers={"Authorization": f"Bearer {one.token()}"}, timeout=5, retries=False
    )
    assert answer.status in (401, 403)


def test_pods_of_a_job_have_no_token_of_the_api_server(start: Start) -> None:
    job = start(digits("bare", steps=100_000, pause=0.05, replicas=1))
    job.wait_training(1)
    for pod in job.pods():
        assert pod["spec"]["automountServiceAccountToken"] is False
        mounts = [mount["mountPath"] for c in pod["spec"]["containers"] for mount in c.get("volumeMounts") or []]
        assert not any("serviceaccount" in path for path in mounts)
        code = "import os; print(os.path.exists('/var/run/secrets/kubernetes.io'))"
        assert job.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", code).strip() == "False"

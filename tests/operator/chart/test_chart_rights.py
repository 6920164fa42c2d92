"""The rights that the chart gives are the documented ones and no more."""

from __future__ import annotations

from rendering import (
    DEFAULTS,
    EVERYTHING,
    NAMESPACE,
    NAMESPACED,
    Object,
    each_set,
    of_kind,
    only,
    render,
    with_helm,
)
from rights import WITH_AUTHENTICATION, WITH_KUEUE, Rule, documented


def rights(table: str) -> set[Rule]:
    """Read lines of: group (- for the core), resources, verbs, and a name where only that may be touched."""
    rules = set()
    for line in table.strip().splitlines():
        group, resources, verbs, *name = line.split()
        for resource in resources.split(","):
            rules |= {("" if group == "-" else group, resource, verb, "".join(name)) for verb in verbs.split(",")}
    return rules


OVER_JOBS = documented("where its jobs are")
EVERYWHERE = documented("everywhere")
IN_ITS_OWN_NAMESPACE = documented("own namespace")
SHARED = documented("kube-public, with namespaces: all")
VIEWER = rights(
    """
    virtualflow.dev virtualflowjobs                                   get,list,watch
    virtualflow.dev virtualflowjobs/scale,virtualflowjobs/status      get
    virtualflow.dev virtualflowqueues                                 get,list,watch
    """
)
EDITOR = VIEWER | rights(
    """
    virtualflow.dev virtualflowjobs         create,update,patch,delete,deletecollection
    virtualflow.dev virtualflowjobs/scale   update,patch
    """
)


def granted(roles: list[Object]) -> set[Rule]:
    """Return what roles allow."""
    return {
        (group, resource, verb, name)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


@with_helm
def test_the_rights_over_the_cluster_are_the_documented_ones() -> None:
    objects = render({"rbac": {"userRoles": False}})
    assert granted(of_kind(objects, "ClusterRole")) == EVERYWHERE | OVER_JOBS
    roles = {role["metadata"]["namespace"]: granted([role]) for role in of_kind(objects, "Role")}
    assert roles == {NAMESPACE: IN_ITS_OWN_NAMESPACE, "kube-public": SHARED}


@with_helm
def test_the_rights_over_kueue_are_given_by_a_value_of_their_own() -> None:
    over_jobs, everywhere = map(documented, WITH_KUEUE)
    values = {"kueue": {"enabled": True}}
    roles = of_kind(render({"rbac": {"userRoles": False}} | values), "ClusterRole")
    assert granted(roles) == EVERYWHERE | OVER_JOBS | everywhere | over_jobs
    objects = render(NAMESPACED | values)
    assert granted(of_kind(objects, "ClusterRole")) == EVERYWHERE | everywhere
    in_team = [role for role in of_kind(objects, "Role") if role["metadata"]["namespace"] == "team-a"]
    assert granted(in_team) == OVER_JOBS | over_jobs


@with_helm
def test_the_operator_may_ask_who_reads_its_metrics_only_where_it_is_to_ask_and_the_reader_may_read_them_alone() -> (
    None
):
    values = NAMESPACED | {"metrics": {"authentication": True, "podMonitor": {"enabled": True}}}
    objects = render(values)
    operators, readers = sorted(of_kind(objects, "ClusterRole"), key=lambda role: len(role["metadata"]["name"]))
    assert granted([operators]) == EVERYWHERE | documented(WITH_AUTHENTICATION)
    assert readers["rules"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    of_readers = [
        b for b in of_kind(objects, "ClusterRoleBinding") if b["roleRef"]["name"] == readers["metadata"]["name"]
    ]
    account = "virtualflow-operator-metrics"
    assert [b["subjects"] for b in of_readers] == [
        [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]
    ]
    (secret,) = (s for s in of_kind(objects, "Secret") if s["type"] == "kubernetes.io/service-account-token")
    assert secret["metadata"]["annotations"] == {"kubernetes.io/service-account.name": account}
    (endpoint,) = only(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": secret["metadata"]["name"], "key": "token"}
    (plain,) = only(render(EVERYTHING), "ServiceMonitor")["spec"]["endpoints"]
    assert "authorization" not in plain


@with_helm
def test_the_rights_end_at_the_listed_namespaces() -> None:
    objects = render(NAMESPACED)
    assert granted(of_kind(objects, "ClusterRole")) == EVERYWHERE
    roles = {role["metadata"]["namespace"]: granted([role]) for role in of_kind(objects, "Role")}
    assert roles == {"team-a": OVER_JOBS, "team-b": OVER_JOBS, NAMESPACE: IN_ITS_OWN_NAMESPACE}


@with_helm
@each_set
def test_only_the_operator_is_bound_to_its_roles(values: Object) -> None:
    objects = render(values)
    account = only(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
    bindings = of_kind(objects, "RoleBinding") + of_kind(objects, "ClusterRoleBinding")
    roles = of_kind(objects, "Role") + of_kind(objects, "ClusterRole")
    bound = {
        (binding["roleRef"]["kind"], binding["metadata"].get("namespace"), binding["roleRef"]["name"])
        for binding in bindings
    }
    people = {"virtualflow-job-viewer", "virtualflow-job-editor"}
    assert bound == {
        (role["kind"], role["metadata"].get("namespace"), role["metadata"]["name"])
        for role in roles
        if role["metadata"]["name"] not in people
    }
    for binding in bindings:
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]


@with_helm
def test_people_who_may_view_or_edit_a_namespace_may_do_so_with_its_jobs() -> None:
    people = {
        role["metadata"]["name"]: role
        for role in of_kind(render(DEFAULTS), "ClusterRole")
        if "-job-" in role["metadata"]["name"]
    }
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    added_to = {
        name: {label.removeprefix(prefix) for label in role["metadata"]["labels"] if label.startswith(prefix)}
        for name, role in people.items()
    }
    assert added_to == {
        "virtualflow-job-viewer": {"view", "edit", "admin"},
        "virtualflow-job-editor": {"edit", "admin"},
    }
    assert granted([people["virtualflow-job-viewer"]]) == VIEWER
    assert granted([people["virtualflow-job-editor"]]) == EDITOR

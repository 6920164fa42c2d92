"""The operator on the cluster as a user installs it, and namespaces that go away again."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

from cluster import OPERATOR, RELEASE, ROOT, SYSTEM, Cluster, until
from cluster_jobs import OPERATOR_IMAGE, Job, digits

KINDS = (
    "namespaces,clusterroles,clusterrolebindings,persistentvolumes,customresourcedefinitions,"
    "validatingadmissionpolicies,validatingadmissionpolicybindings"
)
CRD = "virtualflowjobs.virtualflow.dev"
QUEUE_CRD = "virtualflowqueues.virtualflow.dev"


@dataclass(frozen=True)
class Installed:
    """The operator, as helm installed it."""

    cluster: Cluster
    first_job_seconds: float | None
    """From ``helm install`` to the first reconciled job; ``None``: it was there already."""


def has_crd(cluster: Cluster) -> bool:
    """Say whether the cluster knows VirtualFlowJobs already."""
    return bool(cluster.kubectl("get", "crd", CRD, "-o", "name", "--ignore-not-found"))


def install(cluster: Cluster, had_crd: bool) -> Installed:
    """Install the chart with two replicas and time it until a first job is reconciled."""
    repository, _, tag = OPERATOR_IMAGE.rpartition(":")
    values = {
        "image.repository": repository,
        "image.tag": tag,
        "operator.progressSeconds": "1",
        "operator.backoffSeconds": "1",
    }
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    chart = str(ROOT / "charts" / "virtualflow")
    flags = ["--take-ownership"] if had_crd else []
    begun = time.monotonic()
    cluster.helm("install", RELEASE, chart, "-n", SYSTEM, "--create-namespace", *sets, *flags)
    with temporary_namespace(cluster, "first") as namespace:
        first = Job(cluster, namespace, "first").create(digits("first"))

        def reconciled() -> bool:
            observed = first.status().get("observedGeneration") == 1
            return observed and len(first.pods("worker")) == 2 and len(first.pods("coordinator")) == 1

        until("the first job is reconciled", reconciled, 120, every=0.1)
        seconds = time.monotonic() - begun
    wait_for_operators(cluster)
    return Installed(cluster, seconds)


def wait_for_operators(cluster: Cluster) -> None:
    """Wait until both replicas are ready."""
    cluster.kubectl("-n", SYSTEM, "rollout", "status", f"deployment/{OPERATOR}", "--timeout=90s", timeout=100)


class temporary_namespace:  # noqa: N801 -- reads as a function
    """A namespace that is removed when the block ends, without waiting for it."""

    def __init__(self, cluster: Cluster, hint: str) -> None:
        self.cluster = cluster
        self.name = f"e2e-{hint[:30]}-{uuid.uuid4().hex[:5]}"

    def __enter__(self) -> str:
        self.cluster.kubectl("create", "namespace", self.name)
        self.cluster.kubectl("label", "namespace", self.name, "virtualflow-e2e=true")
        return self.name

    def __exit__(self, *_: object) -> None:
        self.cluster.kubectl("delete", "namespace", self.name, "--wait=false", check=False)


def remove_everything(cluster: Cluster, had_crd: bool) -> None:
    """Uninstall, remove the namespaces, and see that nothing is left; a definition that was there before stays."""
    cluster.kubectl("delete", "namespace", "-l", "virtualflow-e2e=true", "--timeout=120s", timeout=150, check=False)
    cluster.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait", check=False)
    cluster.kubectl("delete", "namespace", SYSTEM, "--timeout=120s", timeout=150, check=False)
    if not had_crd:
        crds = (CRD, QUEUE_CRD)
        cluster.kubectl("delete", "crd", *crds, "--ignore-not-found", "--timeout=60s", timeout=90, check=False)
    left = cluster.kubectl("get", KINDS, "-o", "name", timeout=30).split()
    ours = [
        name
        for name in left
        if ("virtualflow" in name or "/e2e-" in name) and not (had_crd and name.endswith((CRD, QUEUE_CRD)))
    ]
    assert ours == [], "the tests leave these behind"

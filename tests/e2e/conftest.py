"""Fixtures of the end-to-end tests: a cluster, the operator on it, a namespace for each test, and reference digests.

Everything that is made is removed in the end, and a test that fails shows what a person would look at.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import (
    ROOT,
    SYSTEM,
    Cluster,
    Faults,
    Object,
    Refused,
    command,
    environment,
    kind_available,
)
from cluster_jobs import OPERATOR_IMAGE, TRAINER_IMAGE, Job
from installation import Installed, has_crd, install, remove_everything, temporary_namespace, wait_for_operators
from kubernetes.config import ConfigException
from references import run_here, run_there, same_machine
from urllib3.exceptions import HTTPError

KIND = "virtualflow-e2e"
SHARED = Path(environment("VIRTUALFLOW_E2E_SHARED", "/tmp/virtualflow-e2e"))
"""A directory of this machine that all nodes see under the same path."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say of each test here that it needs a cluster, and begin with what a user does first."""
    first = [
        "test_quick_start",
        "test_rights",
        "test_lifecycle",
        "test_plugin",
        "test_latency",
        "test_hostile",
        "test_queue_bad_input",
        "test_sharing_a_cluster",
        "test_scale",
        "test_upgrade",
        "test_story",  # leaves a scheduler that has lost the API server
    ]
    here = [item for item in items if Path(item.path).parent == Path(__file__).parent]
    for item in here:
        item.add_marker(pytest.mark.e2e)
    order = {name: place for place, name in enumerate(first)}
    items.sort(key=lambda item: order.get(Path(item.path).stem, -1) if item in here else -1)


# --- the cluster ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster of KUBECONFIG, or a kind cluster of this run."""
    kubeconfig = os.environ.get("KUBECONFIG", "")
    if kubeconfig:
        for tool in ("kubectl", "helm"):
            if shutil.which(tool) is None:
                pytest.skip(f"needs {tool}: install it and put it on PATH")
        executable = os.environ.get("VIRTUALFLOW_E2E_FAULTS")
        origin = f"the cluster of KUBECONFIG={kubeconfig}"
        try:
            found = Cluster(kubeconfig, origin, Faults(executable) if executable else None)
        except (ConfigException, Refused, HTTPError) as error:
            pytest.skip(f"{origin} does not answer ({error}); start it or unset KUBECONFIG")
        print(f"\nend-to-end tests on {found.origin}: Kubernetes 1.{found.minor}, nodes {', '.join(found.nodes())}")
        yield found
        return
    if not kind_available():
        pytest.skip(
            "needs a cluster: set KUBECONFIG to one that has the images virtualflow-operator:dev and "
            "virtualflow-trainer:dev, or install Docker, kind, kubectl and helm and a kind cluster is made"
        )
    SHARED.mkdir(mode=0o777, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/kubeconfig"
        config = str(Path(__file__).with_name("kind.yaml"))
        command("kind", "create", "cluster", "--name", KIND, "--config", config, "--kubeconfig", path, timeout=600)
        try:
            command("make", "-C", ROOT, "image", timeout=1800)
            command("kind", "load", "docker-image", "--name", KIND, OPERATOR_IMAGE, TRAINER_IMAGE, timeout=600)
            yield Cluster(path, "a kind cluster of this run", Faults(None, KIND))
        finally:
            command("kind", "delete", "cluster", "--name", KIND, timeout=300)


@pytest.fixture(scope="session")
def installed(cluster: Cluster) -> Iterator[Installed]:
    """The chart installed by helm, with two replicas; removed in the end with everything that the tests made."""
    had_crd = has_crd(cluster)
    keep = bool(os.environ.get("VIRTUALFLOW_E2E_KEEP"))  # for those who run single tests again and again
    if cluster.helm("list", "-q", "-n", SYSTEM).split():
        if not keep:
            pytest.fail(f"{SYSTEM} has a release already; uninstall it, or set VIRTUALFLOW_E2E_KEEP=1 to test that one")
        wait_for_operators(cluster)
        yield Installed(cluster, None)
        return
    try:
        yield install(cluster, had_crd)
    finally:
        if not keep:
            remove_everything(cluster, had_crd)


@pytest.fixture
def namespace(installed: Installed, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of this test's own."""
    hint = re.sub(r"[^a-z0-9]+", "-", request.node.originalname.removeprefix("test_").lower()).strip("-")
    with temporary_namespace(installed.cluster, hint[:30].rstrip("-")) as name:
        request.node.stash[NAMESPACE] = name
        yield name


@pytest.fixture
def start(installed: Installed, namespace: str) -> Callable[[Object], Job]:
    """Apply a job's manifest in the test's namespace: ``start(digits("a"))``."""

    def apply(manifest: Object) -> Job:
        return Job(installed.cluster, namespace, manifest["metadata"]["name"]).create(manifest)

    return apply


# --- reference digests ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def reference(installed: Installed) -> Callable[[Object], str]:
    """The digest of an undisturbed run of a manifest: ``virtualflow run -f`` on this machine.

    Where this machine's torch or processor differs from the nodes', it is an undisturbed job with one worker instead.
    """
    known: dict[str, str] = {}
    alike = same_machine(installed.cluster)

    def digest(manifest: Object) -> str:
        text = json.dumps(manifest, sort_keys=True)
        if text not in known:
            known[text] = run_here(manifest) if alike else run_there(installed.cluster, manifest)
        return known[text]

    return digest


# --- what a failed test shows -----------------------------------------------------------------------------------------

NAMESPACE = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the state of the cluster to the report of a test that failed."""
    report = yield
    if report.failed and call.when == "call":
        setup = getattr(item, "funcargs", {}).get("installed")
        if setup is not None:
            report.sections.append(("cluster", setup.cluster.describe(item.stash.get(NAMESPACE, None))))
            report.sections.append(("coordinators", _coordinators(setup.cluster, item.stash.get(NAMESPACE, None))))
    return report


def _coordinators(cluster: Cluster, namespace: str | None) -> str:
    """Return what the coordinators in a namespace say."""
    said = []
    try:
        for job in cluster.items("vfj", namespace) if namespace else []:
            name = job["metadata"]["name"]
            try:
                said.append(f"{name}: {json.dumps(Job(cluster, str(namespace), name).coordinator_status(), indent=1)}")
            except (AssertionError, LookupError, subprocess.TimeoutExpired) as error:
                said.append(f"{name}: {error}")
    except (Refused, OSError) as error:
        said.append(str(error))
    return "\n".join(said)

"""The cluster that the end-to-end tests run on: what a person types (kubectl, helm) and what a test has to watch.

People's verbs go through kubectl, so that what is tested is what they type. Waiting and measuring goes through one HTTP
connection, because a new kubectl every tenth of a second would be the busiest process of a small machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import urllib3
from kubernetes import config

from virtualflow_operator.constants import GROUP, VERSION
from virtualflow_operator.k8s.nesting import cut

Object = dict[str, Any]
T = TypeVar("T")

ROOT = Path(__file__).parents[2]
SYSTEM = "virtualflow-system"
RELEASE = "virtualflow"
OPERATOR = "virtualflow-operator"
"""Name of the Deployment and of the Lease."""
OPERATOR_PODS = "app.kubernetes.io/component=operator"
COLLECTIONS = {
    "vfj": f"/apis/{GROUP}/{VERSION}",
    "vfq": f"/apis/{GROUP}/{VERSION}",
    "pods": "/api/v1",
    "services": "/api/v1",
    "secrets": "/api/v1",
    "events": "/api/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    "serviceaccounts": "/api/v1",
}
PLURALS = {"vfj": "virtualflowjobs", "vfq": "virtualflowqueues"}


class Refused(Exception):
    """The API server answered with an error."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text[:2000]}")
        self.code = code


class CommandFailed(AssertionError):
    """A command ended with an error."""


def command(*words: str | Path, stdin: str | None = None, timeout: float = 60, check: bool = True) -> str:
    """Run a command and return what it writes to stdout; raises CommandFailed with all that it wrote."""
    done = subprocess.run(
        [str(word) for word in words], input=stdin, capture_output=True, text=True, timeout=timeout, check=False
    )
    if check and done.returncode:
        raise CommandFailed(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def until(what: str, check: Callable[[], T | None], seconds: float, every: float = 0.2) -> T:
    """Return what ``check`` returns as soon as that is true; AssertionError when it takes more than ``seconds``.

    An API server that does not answer, or an object that is not there (yet), counts as not yet.
    """
    deadline, last = time.monotonic() + seconds, ""
    while True:
        try:
            found = check()
            if found:
                return found
            last = ""
        except (Refused, urllib3.exceptions.HTTPError, LookupError) as error:
            last = f" ({type(error).__name__}: {error})"
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {seconds:.0f} s in vain until {what}{last}")
        time.sleep(every)


class Cluster:
    """A reachable cluster with kubectl and helm at hand.

    Args:
        kubeconfig: path of the file that says where it is.
        origin: what it is, for people.
        faults: executable that breaks its machines, or None.
    """

    def __init__(self, kubeconfig: str, origin: str, faults: Faults | None) -> None:
        self.kubeconfig, self.origin, self._faults = kubeconfig, origin, faults
        self.client = config.new_client_from_config(kubeconfig)
        found = re.match(r"\d+", self.request("GET", "/version")["minor"])
        assert found is not None
        self.minor = int(found.group())
        """Minor version of its Kubernetes."""
        self.distant = False
        """Pods cannot be reached from this machine."""

    @property
    def faults(self) -> Faults:
        """What breaks its machines; a test that needs it is skipped where there is nothing."""
        if self._faults is None:
            import pytest

            pytest.skip(
                "it needs a cluster whose nodes can be switched off: a kind cluster (unset KUBECONFIG), or an "
                "executable with the verbs kill-node, start-node, stop-apiserver and start-apiserver in "
                "VIRTUALFLOW_E2E_FAULTS"
            )
        return self._faults

    # --- what a person types -----------------------------------------------------------------------------------------

    def kubectl(self, *words: str, stdin: str | None = None, timeout: float = 60, check: bool = True) -> str:
        """Run kubectl on this cluster."""
        return command("kubectl", "--kubeconfig", self.kubeconfig, *words, stdin=stdin, timeout=timeout, check=check)

    def helm(self, *words: str, timeout: float = 120, check: bool = True) -> str:
        """Run helm on this cluster."""
        return command("helm", "--kubeconfig", self.kubeconfig, *words, timeout=timeout, check=check)

    def apply(self, manifest: Object | Path, namespace: str, check: bool = True) -> str:
        """Do ``kubectl apply`` with a file or an object."""
        if isinstance(manifest, Path):
            return self.kubectl("apply", "-n", namespace, "-f", str(manifest), check=check)
        return self.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(manifest), check=check)

    # --- what a test watches -----------------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: object = None, timeout: float = 10, impersonate: str = "", **query: str
    ) -> Any:
        """Send a request to the API server and return the answer, JSON or text; raises Refused."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json, */*", "Content-Type": kind}
        if impersonate:
            headers["Impersonate-User"] = impersonate
        request = self.client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        response = self.client.call_api(*request, _request_timeout=timeout)
        data = response.read()
        text = data.decode() if isinstance(data, bytes) else str(data)
        if response.status >= 400:
            raise Refused(response.status, text)
        text = cut(text.encode()).decode()  # some objects of the tests are nested deeper than Python reads
        try:
            return json.loads(text)
        except ValueError:
            return text

    def post(self, path: str, text: str, timeout: float = 30) -> int:
        """Send that very text, which need not be JSON that a client would make; the HTTP status of the answer."""
        configuration = self.client.configuration
        headers = {"Content-Type": "application/json"}
        token = configuration.get_api_key_with_prefix("BearerToken")
        if token:
            headers["Authorization"] = token
        pool = self.client.rest_client.pool_manager
        answer = pool.request("POST", configuration.host + path, body=text, headers=headers, timeout=timeout)
        return int(answer.status)

    def path(self, kind: str, namespace: str | None, name: str = "") -> str:
        """Return where the API server keeps an object, or a collection without a name."""
        within = f"/namespaces/{namespace}" if namespace else ""
        return f"{COLLECTIONS[kind]}{within}/{PLURALS.get(kind, kind)}" + (f"/{name}" if name else "")

    def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """Return an object, None if there is none."""
        try:
            found: Object = self.request("GET", self.path(kind, namespace, name))
        except Refused as error:
            if error.code == 404:
                return None
            raise
        return found

    def items(self, kind: str, namespace: str | None = None, **query: str) -> list[Object]:
        """Return the objects of a kind; ``labelSelector`` selects."""
        items: list[Object] = self.request("GET", self.path(kind, namespace), **query)["items"]
        return items

    def nodes(self) -> list[str]:
        """Return the names of the nodes that are ready and take pods."""
        return [node["metadata"]["name"] for node in self.request("GET", "/api/v1/nodes")["items"] if _takes_pods(node)]

    # --- the operator ------------------------------------------------------------------------------------------------

    def operators(self) -> list[Object]:
        """Return the operator's pods that are not going away."""
        pods = self.items("pods", SYSTEM, labelSelector=OPERATOR_PODS)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def lease(self) -> Object:
        """Return the ``spec`` of the operator's lease."""
        lease = self.get("leases", SYSTEM, OPERATOR)
        return lease["spec"] if lease is not None else {}

    def leader(self) -> Object:
        """Return the pod of the operator that leads; LookupError if none does."""
        holder = self.lease().get("holderIdentity") or ""
        for pod in self.operators():
            name = pod["metadata"]["name"]
            if holder and name in holder:
                return pod
        raise LookupError(f"the lease is held by {holder or 'nobody'}, which is no pod of the operator")

    def fail_over(self) -> None:
        """Delete the leading operator's pod by force, and wait until another one leads."""
        leader = self.leader()["metadata"]["name"]
        self.kubectl("-n", SYSTEM, "delete", "pod", leader, "--force", "--grace-period=0")
        until(
            "another pod holds the lease",
            lambda: leader not in (self.lease().get("holderIdentity") or leader),
            60,
            every=0.1,
        )

    def metrics(self) -> Metrics:
        """Return what the leader counts."""
        name = self.leader()["metadata"]["name"]
        return Metrics(self.request("GET", self.path("pods", SYSTEM, f"{name}:8080") + "/proxy/metrics"))

    def processes(self, pod: Object) -> list[int]:
        """Return the process ids of a pod's containers, where they are processes of this machine, oldest first.

        Only those that are not the sandbox's own (``pause``).
        """
        uid = pod["metadata"]["uid"]
        marks = (uid, uid.replace("-", "_"))
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                groups = (directory / "cgroup").read_text()
                if any(mark in groups for mark in marks) and "pause" not in (directory / "cmdline").read_text():
                    found.append(int(directory.name))
            except OSError:
                continue
        return sorted(found)

    # --- when something fails ----------------------------------------------------------------------------------------

    def describe(self, namespace: str | None) -> str:
        """Return what a person would look at: jobs, events, pods, the operator, coordinators."""
        commands = [["get", "pods", "-n", SYSTEM, "-o", "wide"], ["get", "nodes"]]
        if namespace is not None:
            commands = [
                ["get", "vfj", "-n", namespace, "-o", "yaml"],
                ["get", "events", "-n", namespace, "--sort-by=.lastTimestamp"],
                ["get", "pods", "-n", namespace, "-o", "wide"],
                *commands,
            ]
        parts = []
        for words in commands:
            try:
                parts.append(f"$ kubectl {' '.join(words)}\n{self.kubectl(*words, check=False, timeout=20)}")
            except subprocess.TimeoutExpired:
                parts.append(f"$ kubectl {' '.join(words)}\n(no answer)")
        return "\n".join(parts)


def _takes_pods(node: Object) -> bool:
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))
    tainted = any(taint["effect"] != "PreferNoSchedule" for taint in node["spec"].get("taints") or [])
    return ready and not tainted and not node["spec"].get("unschedulable")


class Faults:
    """What breaks a cluster's machines: an executable with the verbs, or the containers of a kind cluster."""

    def __init__(self, executable: str | None, kind_name: str = "") -> None:
        self._executable, self._kind = executable, kind_name

    def kill_node(self, node: str) -> None:
        """Cut a node's power."""
        self._do("kill-node", ["docker", "kill", node], node)

    def start_node(self, node: str) -> None:
        """Switch a node on again."""
        self._do("start-node", ["docker", "start", node], node)

    def stop_apiserver(self) -> None:
        """Let the API server answer nobody."""
        self._do("stop-apiserver", ["docker", "pause", f"{self._kind}-control-plane"])

    def start_apiserver(self) -> None:
        """Let it answer again."""
        self._do("start-apiserver", ["docker", "unpause", f"{self._kind}-control-plane"])

    def _do(self, verb: str, docker: list[str], *arguments: str) -> None:
        words = [self._executable, verb, *arguments] if self._executable else docker
        # What it starts outlives these tests and their directory for passing files.
        surroundings = {key: value for key, value in os.environ.items() if key != "TMPDIR"}
        subprocess.run(words, env=surroundings, check=True, capture_output=True, timeout=180)


class Metrics:
    """A page of metrics in the text format of Prometheus."""

    def __init__(self, text: str) -> None:
        self.samples: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                self.samples[name] = float(value)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over all series of that name with these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for series, value in self.samples.items()
            if series.split("{")[0] == name and all(label in series for label in wanted)
        )

    def histogram(self, name: str) -> dict[float, float]:
        """Return the cumulative counts by upper bound, over all labels."""
        buckets: dict[float, float] = {}
        for series, value in self.samples.items():
            if series.startswith(f"{name}_bucket{{"):
                found = re.search(r'le="([^"]+)"', series)
                assert found is not None
                buckets[float(found.group(1))] = buckets.get(float(found.group(1)), 0.0) + value
        return buckets


def median_bound(before: Mapping[float, float], after: Mapping[float, float]) -> tuple[float, int]:
    """Return the upper bound of the bucket with the median of what came between two readings, and how many came."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = max(counts.values(), default=0.0)
    assert total > 0, "nothing was measured in between"
    return next(bound for bound, count in counts.items() if count >= total / 2), int(total)


def kind_available() -> bool:
    """Say whether a kind cluster can be made here."""
    if not all(shutil.which(tool) for tool in ("docker", "kind", "kubectl", "helm")):
        return False
    return subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False).returncode == 0


def environment(name: str, default: str) -> str:
    """Return a setting of the tests."""
    return os.environ.get(name) or default

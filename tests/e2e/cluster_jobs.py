"""Jobs of the end-to-end tests: their manifests, and what a test asks about one that runs."""

from __future__ import annotations

import base64
import copy
import inspect
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from cluster import ROOT, SYSTEM, Cluster, Object, environment, until

from virtualflow.protocol.certificates import Party
from virtualflow_operator.constants import IDENTITY_VOLUME
from virtualflow_operator.controllers.issuer import Issuer
from virtualflow_operator.settings import CertificateSettings

Files = dict[str, bytes]
"""Of an identity, by name."""

TRAINER_IMAGE = environment("VIRTUALFLOW_TRAINER_IMAGE", "virtualflow-trainer:dev")
OPERATOR_IMAGE = environment("VIRTUALFLOW_OPERATOR_IMAGE", "virtualflow-operator:dev")
MANIFEST = ROOT / "examples" / "digits.yaml"

PACED = """
import os, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook

def pace(*_):
    if not os.path.exists("/tmp/fast"):
        time.sleep(PAUSE)

register_optimizer_step_post_hook(pace)
sys.argv = ["examples/digits.py", *sys.argv[1:]]
sys.path.insert(0, "examples")
runpy.run_path("examples/digits.py", run_name="__main__")
"""
"""The digits example, unchanged but for a pause after each step, until somebody makes the file /tmp/fast."""


def digits(name: str, *, steps: int = 600, pause: float | None = None, **spec: Any) -> Object:
    """Return the job of examples/digits.yaml under another name.

    Args:
        name: the job's.
        steps: how long it trains.
        pause: seconds that each step is made to take longer, without any computing.
        spec: replaces fields of its ``spec``.
    """
    job: Object = yaml.safe_load(MANIFEST.read_text())
    job["metadata"]["name"] = name
    container = job["spec"]["workerGroups"][0]["template"]["spec"]["containers"][0]
    container["image"] = TRAINER_IMAGE
    container["args"] = ["--steps", str(steps)]
    if pause is not None:
        container["command"] = ["python", "-c", PACED.replace("PAUSE", str(pause))]
    job["spec"] |= spec
    return job


def script(name: str, code: str, **spec: Any) -> Object:
    """Return a job whose workers run a piece of Python."""
    job = digits(name, **spec)
    container(job)["command"], container(job)["args"] = ["python", "-c", code], []
    return job


def container(job: Object, group: int = 0) -> Object:
    """Return the container that trains, to be changed."""
    found: Object = job["spec"]["workerGroups"][group]["template"]["spec"]["containers"][0]
    return found


def spread(job: Object) -> Object:
    """Let workers be on different nodes, so that some are left when one is lost: the scheduler may put all on one."""
    labels = {"virtualflow.dev/job": job["metadata"]["name"], "virtualflow.dev/role": "worker"}
    for group in job["spec"]["workerGroups"]:
        group["template"]["spec"]["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels},
            }
        ]
    return job


def second_group(job: Object, name: str) -> Object:
    """Add a worker group like the first one and return it, to be changed."""
    group = copy.deepcopy(job["spec"]["workerGroups"][0]) | {"name": name}
    job["spec"]["workerGroups"].append(group)
    return group


def ask(address: str, identity: Mapping[str, bytes | str] | None, token: str) -> tuple[int, str]:
    """Ask the coordinator at an address for its status, by an identity or in plaintext with a token.

    Raises:
        TimeoutError: nobody answers.
    """
    import http.client
    import math
    import ssl

    from virtualflow.protocol.identity import IssuedIdentity

    connection = http.client.HTTPConnection(address, 7700, timeout=3)
    if identity is not None:
        files = {name: content.encode() if isinstance(content, str) else content for name, content in identity.items()}
        context = IssuedIdentity(lambda _: files, math.inf).client_context()
        connection = http.client.HTTPSConnection(address, 7700, timeout=3, context=context)
    try:
        connection.request("GET", "/v1/status", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (ssl.SSLError, ConnectionError) as error:
        return 0, str(error)
    finally:
        connection.close()


ASK = "from __future__ import annotations\nfrom collections.abc import Mapping\n" + inspect.getsource(ask)
"""The same, to be run in a pod."""


class Job:
    """A job on the cluster."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name

    def create(self, manifest: Object | Path) -> Job:
        """Do ``kubectl apply``."""
        self.cluster.apply(manifest, self.namespace)
        return self

    def kubectl(self, *words: str, timeout: float = 60) -> str:
        """Run kubectl in the job's namespace."""
        return self.cluster.kubectl("-n", self.namespace, *words, timeout=timeout)

    def patch(self, spec: Object) -> None:
        """Change fields of its ``spec``."""
        self.kubectl("patch", "vfj", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    # --- what is written about it ------------------------------------------------------------------------------------

    def status(self) -> Object:
        """Return its ``status``; LookupError if there is no such job."""
        job = self.cluster.get("vfj", self.namespace, self.name)
        if job is None:
            raise LookupError(f"there is no job {self.name}")
        status: Object = job.get("status") or {}
        return status

    def condition(self, kind: str) -> Object:
        """Return one of its conditions; LookupError if it has none of that type."""
        for condition in self.status().get("conditions", []):
            if condition["type"] == kind:
                found: Object = condition
                return found
        raise LookupError(f"no condition {kind}")

    def wait_phase(self, phase: str, seconds: float) -> Object:
        """Wait until it is in that phase and return its status; fails at once when it has failed instead."""

        def reached() -> Object | None:
            status = self.status()
            if status.get("phase") == "Failed" != phase:
                raise AssertionError(f"the job has failed: {status['conditions']}")
            return status if status.get("phase") == phase else None

        return until(f"{self.name} is {phase}", reached, seconds)

    def wait_condition(self, kind: str, reason: str, seconds: float) -> Object:
        """Wait until a condition has that reason and return it."""

        def reached() -> Object | None:
            condition = self.condition(kind)
            return condition if condition["reason"] == reason else None

        return until(f"{self.name} has {kind} with the reason {reason}", reached, seconds)

    def wait_training(self, workers: int, seconds: float = 90, beyond: int = 3) -> Object:
        """Wait until so many workers train and have made some steps together; the status then."""

        def settled() -> Object | None:
            status = self.status()
            if status.get("phase") in ("Complete", "Failed"):
                raise AssertionError(f"the job is {status['phase']} already: {status}")
            running = len([pod for pod in self.workers() if pod["status"].get("phase") == "Running"])
            return status if status.get("readyReplicas") == workers == running else None

        step = until(f"{workers} workers of {self.name} train", settled, seconds).get("step") or 0
        return self.wait_step(step + beyond, seconds)

    def wait_step(self, step: int, seconds: float = 60) -> Object:
        """Wait until it has made that many steps and return its status."""

        def made() -> Object | None:
            status = self.status()
            return status if (status.get("step") or 0) >= step else None

        return until(f"{self.name} has made {step} steps", made, seconds)

    def events(self) -> list[Object]:
        """Return the events on the job."""
        return self.cluster.items("events", self.namespace, fieldSelector=f"involvedObject.name={self.name}")

    # --- its pods ----------------------------------------------------------------------------------------------------

    def pods(self, role: str = "") -> list[Object]:
        """Return its pods, also those that end."""
        selector = f"virtualflow.dev/job={self.name}" + (f",virtualflow.dev/role={role}" if role else "")
        return self.cluster.items("pods", self.namespace, labelSelector=selector)

    def workers(self) -> list[Object]:
        """Return its workers' pods that are not going away."""
        return [pod for pod in self.pods("worker") if "deletionTimestamp" not in pod["metadata"]]

    def coordinator(self) -> Object:
        """Return its coordinator's pod; LookupError if none runs."""
        for pod in self.pods("coordinator"):
            if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") == "Running":
                return pod
        raise LookupError(f"{self.name} has no coordinator")

    def token(self) -> str:
        """Return the job's token, as the cluster's administrator may."""
        selector = f"--selector=virtualflow.dev/job={self.name}"
        template = "go-template={{range .items}}{{with .data.token}}{{. | base64decode}}{{end}}{{end}}"
        return self.kubectl("get", "secrets", selector, "-o", template).strip()

    def control(self) -> Files:
        """Return an identity like the operator's in this job, as whoever may read the operator's key can make one."""
        secret = self.cluster.get("secrets", SYSTEM, "virtualflow-operator-key")
        job = self.cluster.get("vfj", self.namespace, self.name)
        assert secret is not None
        assert job is not None
        issuer = Issuer([base64.b64decode(secret["data"]["key"]).strip()], CertificateSettings())
        return issuer.files_of(Party(job["metadata"]["uid"], "control", "test"), time.time())

    def identity_of(self, pod: Object) -> Files:
        """Return the identity of one of its pods, as whoever may read Secrets of the namespace has it."""
        (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == IDENTITY_VOLUME)
        secret = self.cluster.get("secrets", self.namespace, volume["projected"]["sources"][0]["secret"]["name"])
        assert secret is not None
        return {name: base64.b64decode(content) for name, content in secret["data"].items()}

    def coordinator_status(self, identity: Files | None = None) -> Object:
        """Return what its coordinator says to an identity, to one like the operator's if none is given."""
        status, text = self.ask_coordinator(identity or self.control())
        assert status == 200, text
        found: Object = json.loads(text)
        return found

    def ask_coordinator(self, identity: Files | None) -> tuple[int, str]:
        """Ask its coordinator for its status, by an identity or in plaintext with the job's token: HTTP status, text.

        The status is 0 where one of the two does not believe the other. Directly where pods can be reached from here,
        else from inside its pod.
        """
        pod, token = self.coordinator(), self.token()
        if not self.cluster.distant:
            try:
                return ask(pod["status"]["podIP"], identity, token)
            except TimeoutError:
                self.cluster.distant = True
        given = None if identity is None else {name: content.decode() for name, content in identity.items()}
        code = f"{ASK}\nimport json, sys\nprint(*ask('127.0.0.1', *json.load(sys.stdin)))"
        words = ("-n", self.namespace, "exec", "-i", pod["metadata"]["name"], "--", "python", "-c", code)
        status, _, body = self.cluster.kubectl(*words, stdin=json.dumps([given, token])).partition(" ")
        return int(status), body

    def go_fast(self) -> None:
        """Let a paced job make the rest of its steps without pauses."""
        for pod in self.workers():
            self.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", "open('/tmp/fast', 'w').close()")

"""The chart in a real API server, with real operators and the rights that it gives them: a second release, the move of
the first one, and a backup that is restored in another cluster, as the documentation has them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rendering import CHART, HELM
from running import OperatorProcess
from stage import SECONDS, job

import kube_apiserver
from ports import free_port
from virtualflow_operator.constants import LABEL_JOB
from virtualflow_operator.controllers.issuer import derive_token

pytestmark = [
    pytest.mark.skipif(HELM is None, reason="needs helm: put it on the PATH"),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl: put it on the PATH"),
    pytest.mark.skipif(not kube_apiserver.at_hand(), reason=kube_apiserver.HOW),
]
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "install.md"


def commands(heading: str, number: int = 0) -> str:
    """A block of the page, with the chart of the checkout."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    block = section.split("```sh")[number + 1].partition("```")[0]
    return block.replace("dist/virtualflow-0.1.0.tgz", str(CHART))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def read_metrics(port: int, authorization: str) -> tuple[int, str]:
    headers = {"Authorization": authorization} if authorization else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@dataclass(frozen=True)
class Shell:
    """A person at a cluster."""

    folder: Path
    kubeconfig: Path

    def run(self, commands: str, given: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            input=json.dumps(given),
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.folder)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def read(self, commands: str, given: Mapping[str, Any] | None = None) -> str:
        answer = self.run(commands, given)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def install(self, release: str, *flags: str) -> subprocess.CompletedProcess[str]:
        return self.run(f"helm install {release} {CHART} --namespace {release} --create-namespace {' '.join(flags)}")

    @contextlib.contextmanager
    def operator(
        self, release: str, account: str, *further: str, secret: str = "virtualflow-operator-key"
    ) -> Iterator[OperatorProcess]:
        """The operator of a release, with the rights of its account, until the end of the block."""
        config = json.loads(self.kubeconfig.read_text())
        token = self.read(f"kubectl --namespace {release} create token {account}").strip()
        config["users"][0]["user"] = {"token": token}
        own = self.folder / f"{release}.kubeconfig"
        own.write_text(json.dumps(config))
        data = self.read(f"kubectl --namespace {release} get secret {secret} -o jsonpath={{.data.key}}")
        (self.folder / f"{release}.key").write_bytes(base64.b64decode(data))
        flags = [f"--lease-namespace={release}", f"--lease-name={account}", "--lease-seconds=3", "--identity=one"]
        flags += ["--image=operator:test", "--health-port=0", "--metrics-port=0", *further]
        log = self.folder / f"{release}.log"
        process = OperatorProcess(own, log, [*flags, f"--key-file={self.folder / release}.key"], {})
        try:
            yield process
        except AssertionError as error:
            error.add_note(process.output()[-4_000:])
            raise
        finally:
            process.terminate()
            process.join()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Shell]:
    folder.mkdir(exist_ok=True)
    with kube_apiserver.api_server(folder) as kubeconfig:
        yield Shell(folder, kubeconfig)


@pytest.mark.slow
def test_a_second_release_for_every_namespace_is_refused_and_one_is_moved_with_its_key_and_jobs(tmp_path: Path) -> None:
    with cluster(tmp_path) as person:
        read = person.read
        first = person.install("virtualflow")
        assert first.returncode == 0, first.stderr
        read("kubectl create -f -", job("digits"))
        uid = read("kubectl get vfj digits -o jsonpath={.metadata.uid}")
        key = read("kubectl --namespace virtualflow get secret virtualflow-operator-key -o jsonpath={.data.key}")

        second = person.install("second", "--set crds.install=false")
        assert second.returncode != 0
        assert "release virtualflow in the namespace virtualflow takes care of the jobs of every" in second.stderr
        apart = person.install("apart", "--set crds.install=false", "--set 'namespaces={default}'")
        assert apart.returncode == 0, apart.stderr
        again = person.run(f"helm upgrade virtualflow {CHART} --namespace virtualflow")
        assert again.returncode == 0, again.stderr

        # A tool that renders the chart without asking the cluster.
        flags = "--set crds.install=false --set rbac.userRoles=false --set policy.enabled=false"
        read(f"helm template second {CHART} --namespace second {flags} > second.yaml")
        read("kubectl create namespace second; kubectl apply -f second.yaml")
        with person.operator("virtualflow", "virtualflow-operator") as one:
            until(lambda: read("kubectl get vfj digits -o jsonpath={.status.observedGeneration}") == "1")
            name = "second-virtualflow-operator"
            with person.operator("second", name, secret=f"{name}-key") as other:
                until(lambda: "another release takes care of every namespace" in other.output())
                assert "this process leads" in one.output()
                assert "cannot be seen" not in one.output() + other.output(), "the chart gives both the right to look"
        read("kubectl delete -f second.yaml")

        read(commands("Move"))
        assert read("kubectl get vfj digits -o jsonpath={.metadata.uid}") == uid
        assert read("kubectl --namespace training get secret virtualflow-key -o jsonpath={.data.key}") == key
        mounted = "{.spec.template.spec.volumes[0].secret.secretName}"
        deployment = "deployment training-virtualflow-operator"
        assert read(f"kubectl --namespace training get {deployment} -o jsonpath='{mounted}'") == "virtualflow-key"
        owner = "{.metadata.annotations.meta\\.helm\\.sh/release-name}"
        assert read(f"kubectl get crd virtualflowjobs.virtualflow.dev -o jsonpath='{owner}'") == "training"


@pytest.mark.slow
def test_metrics_are_shown_to_whom_the_api_server_lets_and_the_monitors_token_opens_nothing_else(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path) as person:
        installed = person.install("virtualflow", "--set metrics.authentication=true")
        assert installed.returncode == 0, installed.stderr
        port, token = free_port(), "kubectl --namespace virtualflow create token"
        reader = person.read(f"{token} virtualflow-operator-metrics").strip()
        operator = person.read(f"{token} virtualflow-operator").strip()
        headers = {"": 401, "Bearer nonsense": 401, f"Bearer {operator}": 403, f"Bearer {reader}": 200}
        flags = ["--metrics-authentication", f"--metrics-port={port}"]
        with person.operator("virtualflow", "virtualflow-operator", *flags) as process:
            until(lambda: "this process leads" in process.output())
            found = {header: read_metrics(port, header) for header in headers}
        assert {header: status for header, (status, _) in found.items()} == headers
        assert "virtualflow_build_info" in found[f"Bearer {reader}"][1]
        assert "virtualflow-operator may not get the nonResourceURL /metrics" in found[f"Bearer {operator}"][1]
        account = "--as=system:serviceaccount:virtualflow:virtualflow-operator-metrics"
        allowed = person.run(f"kubectl {account} auth can-i list pods --all-namespaces")
        assert allowed.stdout.strip() == "no"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq: put it on the PATH")
def test_a_backup_is_restored_in_another_cluster_and_its_jobs_resume_from_their_checkpoints(tmp_path: Path) -> None:
    checkpoint = {"checkpoint": {"volume": {"emptyDir": {}}}}
    with cluster(tmp_path / "old") as person:
        person.install("virtualflow")
        for name, spec in (
            ("digits", checkpoint),
            ("named", {"checkpoint": {"directory": "mine", "volume": {"emptyDir": {}}}}),
            ("over", {}),
        ):
            person.read("kubectl create -f -", job(name, **spec))
        person.read('kubectl patch vfj over --subresource=status --type=merge -p \'{"status": {"phase": "Complete"}}\'')
        queue = {"apiVersion": "virtualflow.dev/v1alpha1", "kind": "VirtualFlowQueue", "metadata": {"name": "shared"}}
        person.read("kubectl create -f -", queue | {"spec": {"capacity": 4}})
        former = person.read("kubectl get vfj digits -o jsonpath={.metadata.uid}")
        person.read(commands("Back up and restore"))
        key = person.read("kubectl --namespace virtualflow get secret virtualflow-operator-key -o jsonpath={.data.key}")
    with cluster(tmp_path / "new") as person:
        for name in ("jobs.json", "key.json"):
            shutil.copy(tmp_path / "old" / name, person.folder)
        person.read(commands("Back up and restore", 1))
        names = person.read("kubectl get vfq,vfj -o jsonpath={.items[*].metadata.name}")
        assert names.split() == ["shared", "digits", "named"], "what is over is not begun again"
        secret = "kubectl --namespace virtualflow get secret virtualflow-operator-key -o jsonpath={.data.key}"
        assert person.read(secret) == key
        with person.operator("virtualflow", "virtualflow-operator"):
            of_it = f"-l {LABEL_JOB}=digits,virtualflow.dev/role=worker"
            until(lambda: person.read(f"kubectl get pods {of_it} -o name"))
            (worker, *_) = json.loads(person.read(f"kubectl get pods {of_it} -o json"))["items"]
            secrets = json.loads(person.read(f"kubectl get secrets -l {LABEL_JOB}=digits -o json"))["items"]
            (token,) = (secret for secret in secrets if "token" in secret["data"])
        environment = {each["name"]: each.get("value") for each in worker["spec"]["containers"][0]["env"]}
        assert environment["VIRTUALFLOW_CHECKPOINT_DIR"].rpartition("/")[2] == former
        uid = person.read("kubectl get vfj digits -o jsonpath={.metadata.uid}")
        assert uid != former
        derived = derive_token(base64.b64decode(key), uid)
        assert base64.b64decode(token["data"]["token"]).decode() == derived
        assert person.read("kubectl get vfj named -o jsonpath={.spec.checkpoint.directory}") == "mine"

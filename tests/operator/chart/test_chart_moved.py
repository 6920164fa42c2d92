"""The chart in a real API server: a second release, and the move of the first one as the documentation has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rendering import CHART, HELM
from stage import job

import kube_apiserver

pytestmark = [
    pytest.mark.skipif(HELM is None, reason="needs helm: put it on the PATH"),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl: put it on the PATH"),
    pytest.mark.skipif(not kube_apiserver.at_hand(), reason=kube_apiserver.HOW),
]
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "install.md"


def test_a_second_release_for_every_namespace_is_refused_and_one_is_moved_with_its_key_and_jobs(tmp_path: Path) -> None:
    with kube_apiserver.api_server(tmp_path) as kubeconfig:
        surroundings = {**os.environ, "KUBECONFIG": str(kubeconfig), "HOME": str(tmp_path)}

        def shell(commands: str, given: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                ["bash", "-euc", commands],
                input=json.dumps(given),
                env=surroundings,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )

        def read(*words: str) -> str:
            answer = shell(" ".join(("kubectl", *words)))
            assert answer.returncode == 0, answer.stderr
            return answer.stdout

        def install(release: str, *flags: str) -> subprocess.CompletedProcess[str]:
            return shell(f"helm install {release} {CHART} --namespace {release} --create-namespace {' '.join(flags)}")

        first = install("virtualflow")
        assert first.returncode == 0, first.stderr
        assert shell("kubectl create -f -", job("digits")).returncode == 0
        uid = read("get vfj digits -o jsonpath={.metadata.uid}")
        key = read("--namespace virtualflow get secret virtualflow-operator-key -o jsonpath={.data.key}")

        second = install("second", "--set crds.install=false")
        assert second.returncode != 0
        assert "release virtualflow in the namespace virtualflow takes care of the jobs of every" in second.stderr
        apart = install("second", "--set crds.install=false", "--set 'namespaces={default}'")
        assert apart.returncode == 0, apart.stderr
        again = shell(f"helm upgrade virtualflow {CHART} --namespace virtualflow")
        assert again.returncode == 0, again.stderr

        section = PAGE.read_text().partition("## Move")[2]
        block = section.partition("```sh")[2].partition("```")[0]
        moved = shell(block.replace("dist/virtualflow-0.1.0.tgz", str(CHART)))
        assert moved.returncode == 0, moved.stderr
        assert read("get vfj digits -o jsonpath={.metadata.uid}") == uid
        assert read("--namespace training get secret virtualflow-key -o jsonpath={.data.key}") == key
        mounted = "{.spec.template.spec.volumes[0].secret.secretName}"
        deployment = "deployment training-virtualflow-operator"
        assert read(f"--namespace training get {deployment} -o jsonpath='{mounted}'") == "virtualflow-key"
        owner = "{.metadata.annotations.meta\\.helm\\.sh/release-name}"
        assert read(f"get crd virtualflowjobs.virtualflow.dev -o jsonpath='{owner}'") == "training"

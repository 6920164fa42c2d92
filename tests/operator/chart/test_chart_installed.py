"""What `helm test` runs in the cluster tells a release that works from one that does not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
from rendering import (
    CHART,
    DEFAULTS,
    only,
    render,
    with_helm,
)

HEALTHY: dict[str, str] = {
    "http://10.0.0.1:8081/healthz": "ok",
    "http://10.0.0.1:8081/readyz": "ok",
    "http://10.0.0.1:8080/metrics": 'virtualflow_build_info{version="0.1.0"} 1.0',
    "/apis/virtualflow.dev/v1alpha1": '{"resources": [{"name": "virtualflowjobs"}]}',
    "/apis/coordination.k8s.io/v1/namespaces/vf/leases/vf-operator": '{"spec": {"holderIdentity": "vf-operator-0"}}',
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script of the test pod, in its environment."""
    spec = importlib.util.spec_from_file_location("installed", CHART / "files" / "installed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LIMIT", -1.0)
    for name, value in {"SERVICE": "vf-operator", "NAMESPACE": "vf", "VF_OPERATOR_SERVICE_HOST": "10.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    return module


def answering(answers: Mapping[str, str]) -> Callable[[str], str]:
    def get(address: str) -> str:
        if address not in answers:
            raise ConnectionRefusedError(address)
        return answers[address]

    return get


def test_a_release_that_works_passes_its_test(installed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "get", answering(HEALTHY))
    monkeypatch.setattr(installed, "ask", answering(HEALTHY))
    assert installed.main() == 0


def test_metrics_that_ask_for_a_token_are_left_to_those_who_have_one(
    installed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = {address: answer for address, answer in HEALTHY.items() if not address.endswith("/metrics")}
    monkeypatch.setattr(installed, "get", answering(closed))
    monkeypatch.setattr(installed, "ask", answering(closed))
    assert installed.main() == 1
    monkeypatch.setenv("METRICS_AUTHENTICATION", "true")
    assert installed.main() == 0


@pytest.mark.parametrize(
    ("address", "answer", "told"),
    [
        ("http://10.0.0.1:8081/healthz", None, "healthz"),
        ("http://10.0.0.1:8081/readyz", None, "readyz"),
        ("http://10.0.0.1:8080/metrics", "up 1", "metrics of vf-operator"),
        ("/apis/virtualflow.dev/v1alpha1", '{"resources": []}', "crds.install=true"),
        ("/apis/coordination.k8s.io/v1/namespaces/vf/leases/vf-operator", '{"spec": {}}', "no operator leads"),
    ],
    ids=["dead", "not ready", "another service", "no definition", "no leader"],
)
def test_a_release_that_does_not_work_fails_its_test(
    address: str,
    answer: str | None,
    told: str,
    installed: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = {**HEALTHY, address: answer}
    given = answering({key: value for key, value in answers.items() if value is not None})
    monkeypatch.setattr(installed, "get", given)
    monkeypatch.setattr(installed, "ask", given)
    assert installed.main() == 1
    assert told in capsys.readouterr().out


@with_helm
def test_the_test_pod_runs_the_script_to_the_letter() -> None:
    (container,) = only(render(DEFAULTS), "Pod")["spec"]["containers"]
    script = (CHART / "files" / "installed.py").read_text()
    assert container["args"][0].replace("$$(", "$(").strip() == script.strip()

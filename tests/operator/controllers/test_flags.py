"""Flags and environment of the operator."""

from __future__ import annotations

from pathlib import Path

import pytest

from virtualflow.errors import ConfigurationError
from virtualflow_operator.controllers import flags
from virtualflow_operator.controllers.flags import OPTIONS, read_settings
from virtualflow_operator.settings import CertificateSettings, LeaseSettings, OperatorSettings

IMAGE = {"VIRTUALFLOW_OPERATOR_IMAGE": "virtualflow-operator:test"}


@pytest.fixture(autouse=True)
def outside_a_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    file = tmp_path / "namespace"
    monkeypatch.setattr(flags, "SERVICE_ACCOUNT_NAMESPACE", file)
    return file


def test_with_only_an_image_everything_is_as_written_down() -> None:
    settings = read_settings([], IMAGE)
    assert settings == OperatorSettings(image="virtualflow-operator:test")
    assert settings.namespaces == ()
    assert (settings.health_port, settings.metrics_port) == (8081, 8080)
    assert (settings.relist, settings.progress_interval, settings.queue.concurrency) == (300, 5, 16)
    assert (settings.crashes.backoff_first, settings.lease.duration, settings.lease.name) == (
        10,
        10,
        "virtualflow-operator",
    )


def test_a_flag_wins_over_the_environment() -> None:
    environment = IMAGE | {"VIRTUALFLOW_OPERATOR_LOG_LEVEL": "error", "VIRTUALFLOW_OPERATOR_CONCURRENCY": "4"}
    settings = read_settings(["--log-level=debug"], environment)
    assert (settings.log_level, settings.queue.concurrency) == ("debug", 4)


def test_the_arguments_of_another_program_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kopf", "run", "-m", "virtualflow_operator.controllers.watches"])
    monkeypatch.setenv("VIRTUALFLOW_OPERATOR_IMAGE", "from-the-environment")
    assert read_settings().image == "from-the-environment"


def test_every_setting_that_can_be_given_can_be_given_in_both_ways() -> None:
    values = {
        "namespaces": "team-a, team-b,team-a",
        "image": "example/operator:1@sha256:00",
        "image_pull_policy": "always",
        "image_pull_secrets": "pull.secret",
        "key_file": "/tmp/key",
        "other_key_file": "/tmp/other",
        "certificate_seconds": "3600",
        "renewal_seconds": "60",
        "allow_plaintext": "true",
        "lease_namespace": "system",
        "lease_name": "other",
        "lease_seconds": "20",
        "identity": "pod-1",
        "health_port": "1",
        "metrics_port": "2",
        "metrics_authentication": "true",
        "job_metrics": "false",
        "network_policies": "yes",
        "operator_labels": "app.kubernetes.io/name=virtualflow, plain=",
        "kueue": "true",
        "extra_taints": "example.com/spot,gone",
        "turns_directory": "/var/run/turns",
        "log_format": "json",
        "log_level": "warning",
        "resync_seconds": "60.5",
        "progress_seconds": "1",
        "unschedulable_seconds": "120",
        "concurrency": "2",
        "backoff_seconds": "0.5",
    }
    assert set(values) == {option.name for option in OPTIONS}
    by_flags = read_settings([f"--{name.replace('_', '-')}={value}" for name, value in values.items()], {})
    by_environment = read_settings(
        [], {f"VIRTUALFLOW_OPERATOR_{name.upper()}": value for name, value in values.items()}
    )
    assert by_flags == by_environment
    assert by_flags.namespaces == ("team-a", "team-b")
    assert by_flags.image_pull_policy == "Always"
    assert by_flags.operator_labels == {"app.kubernetes.io/name": "virtualflow", "plain": ""}
    assert by_flags.extra_taints == ("example.com/spot", "gone")
    assert by_flags.turns_directory == "/var/run/turns"
    assert by_flags.lease == LeaseSettings(name="other", namespace="system", identity="pod-1", duration=20)
    assert (by_flags.relist, by_flags.progress_interval, by_flags.crashes.backoff_first) == (60.5, 1, 0.5)
    assert by_flags.unschedulable_patience == 120
    assert by_flags.certificates == CertificateSettings(lifetime=3_600, renewal=60)
    assert (by_flags.allow_plaintext, by_flags.other_key_file) == (True, Path("/tmp/other"))
    assert (by_flags.job_metrics, by_flags.network_policies, by_flags.key_file) == (False, True, Path("/tmp/key"))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("namespaces", "a_b", "separated by commas"),
        ("namespaces", "Team", "separated by commas"),
        ("image", "two words", "one word"),
        ("image_pull_policy", "Sometimes", "Always, IfNotPresent, Never"),
        ("lease_seconds", "2", "from 3 to 3600"),
        ("lease_seconds", "1e1", "from 3 to 3600"),
        ("health_port", "65536", "from 0 to 65535"),
        ("health_port", "-1", "from 0 to 65535"),
        ("health_port", "8O8O", "from 0 to 65535"),
        ("job_metrics", "maybe", "true or false"),
        ("operator_labels", "app", "key=value"),
        ("operator_labels", "a b=c", "key=value"),
        ("extra_taints", "a/b/c", "separated by commas"),
        ("turns_directory", "turns", "an absolute path"),
        ("turns_directory", "/run/../etc", "an absolute path"),
        ("log_level", "loud", "debug, info, warning, error"),
        ("resync_seconds", "nan", "seconds from 1"),
        ("resync_seconds", "inf", "seconds from 1"),
        ("resync_seconds", "five", "seconds from 1"),
        ("unschedulable_seconds", "0", "seconds from 1"),
        ("concurrency", "0", "from 1"),
        ("concurrency", "99999999999999999999", "from 1"),
        ("backoff_seconds", "0", "from 0.1"),
        ("backoff_seconds", "301", "to 300"),
        ("certificate_seconds", "60", "from 600"),
        ("renewal_seconds", "-1", "from 0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_one_sentence_that_names_its_source(
    name: str, value: str, sentence: str
) -> None:
    variable, flag = f"VIRTUALFLOW_OPERATOR_{name.upper()}", "--" + name.replace("_", "-")
    with pytest.raises(ConfigurationError) as by_environment:
        read_settings([], IMAGE | {variable: value})
    with pytest.raises(ConfigurationError) as by_flag:
        read_settings([f"{flag}={value}"], IMAGE)
    assert str(by_environment.value).startswith(variable)
    assert str(by_flag.value).startswith(flag)
    for error in (by_environment, by_flag):
        assert sentence in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--image=x", "--health-port=9", "--metrics-port=9"], "are both 9"),
        (["--image=x", "--network-policies"], "--operator-labels"),
        ([], "--image or VIRTUALFLOW_OPERATOR_IMAGE"),
        (["--image=x", "--imagine=y"], "--help lists the flags"),
        (["--image=x", "surplus"], "--help lists the flags"),
        (["--image"], "--help lists the flags"),
        (["--log", "debug"], "--help lists the flags"),
    ],
    ids=["one port twice", "policies without labels", "no image", "unknown", "positional", "no value", "abbreviated"],
)
def test_what_does_not_fit_together_is_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        read_settings(arguments, {})


def test_empty_values_mean_the_default() -> None:
    environment = IMAGE | {f"VIRTUALFLOW_OPERATOR_{option.name.upper()}": "" for option in OPTIONS[2:]}
    assert read_settings([], environment) == OperatorSettings(image="virtualflow-operator:test")
    settings = read_settings(["--namespaces="], IMAGE | {"VIRTUALFLOW_OPERATOR_NAMESPACES": "a"})
    assert settings.namespaces == ()


def test_two_free_ports_may_be_asked_for() -> None:
    settings = read_settings(["--health-port=0", "--metrics-port=0"], IMAGE)
    assert (settings.health_port, settings.metrics_port) == (0, 0)


def test_what_kubernetes_says_about_services_is_not_taken_for_a_port() -> None:
    environment = IMAGE | {"VIRTUALFLOW_OPERATOR_METRICS_PORT": "tcp://10.0.0.1:9999"}
    assert read_settings([], environment).metrics_port == OperatorSettings.metrics_port


def test_in_a_pod_the_lease_is_in_the_pods_namespace(outside_a_pod: Path) -> None:
    outside_a_pod.write_text("virtualflow-system\n")
    assert read_settings([], IMAGE).lease.namespace == "virtualflow-system"
    assert read_settings(["--lease-namespace=here"], IMAGE).lease.namespace == "here"


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(["--help"], {})
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(option.flag in text for option in OPTIONS)

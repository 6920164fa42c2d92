"""What the user may tell the operator at its start, by flags and the environment, and how it is read.

A flag wins over its environment variable; an empty value of either means the default. The defaults and what each
setting means are in ``settings``.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.wording import suggest
from virtualflow_operator.settings import (
    BACKOFF_MOST,
    ENV_PREFIX,
    CertificateSettings,
    CrashSettings,
    LeaseSettings,
    LogFormat,
    LogLevel,
    OperatorSettings,
    PullPolicy,
    QueueSettings,
)

SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where a pod reads its own namespace."""


def read_settings(
    arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> OperatorSettings:
    """Read the settings of this process.

    Args:
        arguments: flags without the program's name; ``None``: none, because they belong to another program.
        environment: the process's own when absent.

    Raises:
        ConfigurationError: a flag or variable is wrong or missing; one sentence that says what to do.
    """
    given = vars(_parser().parse_args(list(arguments or ())))
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for option in OPTIONS:
        text, source = given[option.name], option.flag
        if text is None:
            text, source = _from_environment(option, environment), option.variable
        if text is not None and text.strip():
            try:
                values[option.name] = option.parse(text.strip())
            except ValueError as error:
                raise ConfigurationError(f"{source} is {text.strip()[:100]!r}: {error}") from None
    return _settle(values)


def _settle(values: dict[str, Any]) -> OperatorSettings:
    """Put what was given into its places and check what spans several."""
    if "lease_namespace" not in values and SERVICE_ACCOUNT_NAMESPACE.is_file():
        values["lease_namespace"] = SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip()
    groups: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    places = {option.name: option.place for option in OPTIONS}
    for name, value in values.items():
        group, _, member = places[name].rpartition(".")
        (groups.setdefault(group, {}) if group else own)[member] = value
    settings = OperatorSettings(
        **own,
        lease=LeaseSettings(**groups.get("lease", {})),
        queue=QueueSettings(**groups.get("queue", {})),
        crashes=CrashSettings(**groups.get("crashes", {})),
        certificates=CertificateSettings(**groups.get("certificates", {})),
    )
    if not settings.image:
        raise ConfigurationError(
            f"say which image coordinator pods run, with --image or {ENV_PREFIX}IMAGE; it is the operator's own"
        )
    if settings.health_port == settings.metrics_port != 0:
        raise ConfigurationError(
            f"--health-port and --metrics-port are both {settings.health_port}; give them two ports"
        )
    if settings.network_policies and not settings.operator_labels:
        raise ConfigurationError(
            f"--network-policies needs the labels of the operator's pods, with --operator-labels or "
            f"{ENV_PREFIX}OPERATOR_LABELS, as key=value,key=value"
        )
    return settings


class _Parser(argparse.ArgumentParser):
    """Says what is wrong by an error of ours, instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch(r"unrecognized arguments: (--?[^\s=]+).*", message)
        if unknown:
            message = f"there is no flag {unknown[1]}{suggest(unknown[1], self._option_string_actions)}"
        raise ConfigurationError(f"{message}; virtualflow-operator --help lists the flags")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="virtualflow-operator",
        description="Takes care of VirtualFlowJob resources.",
        epilog=f"Each flag has an environment variable: --log-level is {ENV_PREFIX}LOG_LEVEL.",
        allow_abbrev=False,
    )
    for option in OPTIONS:
        alone: dict[str, Any] = {"nargs": "?", "const": "true"} if option.parse is _boolean else {}
        parser.add_argument(option.flag, dest=option.name, help=option.help, metavar="VALUE", **alone)
    return parser


def _from_environment(option: Option, environment: Mapping[str, str]) -> str | None:
    text = environment.get(option.variable)
    # Kubernetes tells every container where each service is: one called virtualflow-operator-metrics sets
    # VIRTUALFLOW_OPERATOR_METRICS_PORT to tcp://10.0.0.1:8080, which nobody meant for us.
    if text is not None and option.name.endswith("_port") and text.startswith(("tcp://", "udp://")):
        return None
    return text


def _word(text: str) -> str:
    if any(character.isspace() for character in text):
        raise ValueError("give one word without blanks")
    return text


def _directory(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/"):
        raise ValueError("give an absolute path without ..")
    return text


def _boolean(text: str) -> bool:
    if text.lower() in {"true", "1", "yes", "on"}:
        return True
    if text.lower() in {"false", "0", "no", "off"}:
        return False
    raise ValueError("give true or false")


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise ValueError(f"give a whole number from {least} to {most}")
        return int(text)

    return parse


def _seconds(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise ValueError(f"give a number of seconds from {least:g} to {most:g}")
        return number

    return parse


def _choice(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        for choice in choices:
            if text.lower() == choice.lower():
                return choice
        raise ValueError(f"give one of {', '.join(choices)}")

    return parse


_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def _name(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"give {what}")
        return text

    return parse


def _list(pattern: re.Pattern[str], what: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not all(pattern.fullmatch(name) for name in names):
            raise ValueError(f"give {what}, separated by commas")
        return tuple(dict.fromkeys(names))

    return parse


def _labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not _QUALIFIED.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise ValueError("give labels as key=value, separated by commas")
        labels[key] = value
    return labels


class Option(NamedTuple):
    name: str
    place: str
    """The field of :class:`OperatorSettings`, or of one of its groups after a dot."""
    parse: Callable[[str], Any]
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()


_NAMES = "names of lower-case letters, digits and hyphens"

OPTIONS = (
    Option("namespaces", "namespaces", _list(_LABEL, _NAMES), "namespaces to take care of; all when absent"),
    Option("image", "image", _word, "image of coordinator pods; needed"),
    Option("image_pull_policy", "image_pull_policy", _choice(get_args(PullPolicy)), "of coordinator pods"),
    Option("image_pull_secrets", "image_pull_secrets", _list(_SUBDOMAIN, _NAMES), "of coordinator pods"),
    Option("key_file", "key_file", Path, "the key that the jobs' authorities and tokens are derived from"),
    Option("other_key_file", "other_key_file", Path, "another such key, while one takes the other's place"),
    Option(
        "certificate_seconds", "certificates.lifetime", _seconds(600, 31_536_000), "certificates are valid for so long"
    ),
    Option(
        "renewal_seconds",
        "certificates.renewal",
        _seconds(0, 15_768_000),
        "certificates are replaced after so long; 0: half of their life",
    ),
    Option("allow_plaintext", "allow_plaintext", _boolean, "whether jobs may do without certificates"),
    Option("lease_namespace", "lease.namespace", _name(_LABEL, "a namespace"), "where the Lease is; the pod's own"),
    Option("lease_name", "lease.name", _name(_SUBDOMAIN, "a name of lower-case letters"), "of the Lease"),
    Option("lease_seconds", "lease.duration", _whole(3, 3_600), "after which the Lease of a dead leader is free"),
    Option("identity", "lease.identity", _word, "of this replica; the pod's name"),
    Option("health_port", "health_port", _whole(0, 65_535), "port of /healthz and /readyz"),
    Option("metrics_port", "metrics_port", _whole(0, 65_535), "port of /metrics"),
    Option("metrics_authentication", "metrics_authentication", _boolean, "whether /metrics asks for a token"),
    Option("job_metrics", "job_metrics", _boolean, "whether each job has series of its own"),
    Option("network_policies", "network_policies", _boolean, "whether each job gets a NetworkPolicy"),
    Option("operator_labels", "operator_labels", _labels, "key=value,... of the operator's pods, for those policies"),
    Option("kueue", "kueue", _boolean, "whether Kueue admits jobs that name one of its queues"),
    Option("extra_taints", "extra_taints", _list(_QUALIFIED, "keys of taints"), "keys that announce a node's loss"),
    Option("turns_directory", "turns_directory", _directory, "on each node, where its turn server listens"),
    Option("log_format", "log_format", _choice(get_args(LogFormat)), "text or json"),
    Option("log_level", "log_level", _choice(get_args(LogLevel)), "debug, info, warning or error"),
    Option("resync_seconds", "relist", _seconds(1, 86_400), "each job is looked at this often without a cause"),
    Option("progress_seconds", "progress_interval", _seconds(0.1, 3_600), "between two writes of a job's progress"),
    Option(
        "unschedulable_seconds", "unschedulable_patience", _seconds(1, 3_600), "a node may be on its way for this long"
    ),
    Option("concurrency", "queue.concurrency", _whole(1, 1_000), "jobs reconciled at the same time"),
    Option(
        "backoff_seconds",
        "crashes.backoff_first",
        _seconds(0.1, BACKOFF_MOST),
        "before the first restart after a crash",
    ),
)

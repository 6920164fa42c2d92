"""The resource that an API server keeps jobs as, and what it says when it refuses something, in one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import urllib3
from kubernetes import client as kubernetes

from virtualflow.errors import ConfigurationError, VirtualFlowError

GROUP, VERSION, PLURAL, KIND = "virtualflow.dev", "v1alpha1", "virtualflowjobs", "VirtualFlowJob"
LABEL_JOB, LABEL_ROLE, WORKER, COORDINATOR = f"{GROUP}/job", f"{GROUP}/role", "worker", "coordinator"
REQUEST_SECONDS = 30.0
"""How long one request may take; a watch or a log that is followed begins anew after that much silence."""

Object = dict[str, Any]


class _Refusal(msgspec.Struct, frozen=True):
    """What is read of a ``Status`` of Kubernetes."""

    message: str = ""


@contextlib.contextmanager
def said(what: str, *, forbidden: str = "") -> Iterator[None]:
    """Say in one sentence what the API server has against ``what``; ``forbidden``: what else may be tried then."""
    try:
        yield
    except kubernetes.ApiException as error:
        raise ConfigurationError(f"cannot {what}: {why(error)}{forbidden * (error.status == 403)}") from None
    except urllib3.exceptions.HTTPError as error:
        raise VirtualFlowError(f"cannot {what}: the API server does not answer ({error})") from None


def why(error: kubernetes.ApiException) -> str:
    """What an API server says: the message of its ``Status``, or else the code."""
    try:
        sentence = msgspec.json.decode(error.body or "{}", type=_Refusal).message
    except (msgspec.MsgspecError, RecursionError):  # a proxy's page, or nothing
        sentence = ""
    return sentence or f"the API server answered {error.status} {error.reason}"

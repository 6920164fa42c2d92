"""Clients of an API server whose address a test knows, where the operator's own finds it in its configuration."""

from __future__ import annotations

from typing import Any

from kubernetes.aio.client import ApiClient

from virtualflow_operator.k8s.client import KubeApi, configure
from virtualflow_operator.settings import ApiSettings


def client_of(
    host: str, *, token: str | None = None, verify: bool = True, settings: ApiSettings | None = None, **options: Any
) -> KubeApi:
    """Return a client of the API server at ``host`` (http://127.0.0.1:8001), by bearer token if given."""
    settings = settings or ApiSettings()
    configuration = configure(settings, options.pop("too_deep", None))
    configuration.host = host
    configuration.verify_ssl = verify
    if token is not None:
        configuration.api_key["BearerToken"] = f"Bearer {token}"
    return KubeApi(ApiClient(configuration), settings, **options)

"""``virtualflow-operator``: the operator as a process.

Exit codes: 0 stopped by a signal; 1 it could not go on, or lost its lease; 2 it was started wrongly.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import kopf
from kubernetes.aio.config import ConfigException

from virtualflow.errors import ConfigurationError
from virtualflow_operator.controllers import watches
from virtualflow_operator.controllers.flags import read_settings
from virtualflow_operator.controllers.manager import read_key
from virtualflow_operator.k8s import KubeApi
from virtualflow_operator.observability import configure
from virtualflow_operator.settings import OperatorSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator until a signal; the exit code.

    Args:
        arguments: without the program's name; ``None``: those of this process.
    """
    try:
        settings = read_settings(sys.argv[1:] if arguments is None else arguments)
        read_key(settings)
    except ConfigurationError as error:
        print(f"virtualflow-operator: {error}", file=sys.stderr)
        return 2
    configure(settings.log_format, settings.log_level)
    try:
        asyncio.run(run(settings))
    except ConfigurationError as error:
        print(f"virtualflow-operator: {error}", file=sys.stderr)
        return 2
    except ConfigException as error:
        print(f"virtualflow-operator: no cluster to work on ({error}); set KUBECONFIG or run in a pod", file=sys.stderr)
        return 2
    return 0


async def run(settings: OperatorSettings) -> None:
    """Run kopf with our handlers.

    Raises:
        ConfigurationError: it could not start as it was told.
        ConfigException: neither a pod's service account nor a kubeconfig says where the API server is.
    """
    assert watches is not None  # importing it registers them
    await (await KubeApi.connect(settings.api)).close()
    stop = asyncio.Event()
    memo = kopf.Memo(operator_settings=settings, stop=stop)
    await kopf.operator(
        registry=kopf.get_default_registry(),
        memo=memo,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        stop_flag=stop,
    )
    fault: ConfigurationError | None = memo.get("fault")
    if fault is not None:
        raise fault


if __name__ == "__main__":
    sys.exit(main())

"""Where kopf wakes the operator: watches put keys on the work-queue, and nothing else.

Import this module and run kopf (``virtualflow-operator`` does; so does
``kopf run -m virtualflow_operator.controllers.watches -A``). There are no handlers of changes, timers or daemons: those
write into users' objects, and end silently when a write fails.

Exit codes: 0 stopped by a signal; 1 it could not go on, or lost its lease; 2 it was started wrongly.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, cast

import aiohttp
import kopf
from kubernetes.aio.config import ConfigException

from virtualflow.errors import ConfigurationError
from virtualflow_operator.api import Object
from virtualflow_operator.constants import GROUP, PLURAL, QUEUE_PLURAL, VERSION
from virtualflow_operator.controllers.flags import read_settings
from virtualflow_operator.controllers.manager import Manager, read_keys
from virtualflow_operator.k8s import OURS, KubeApi, WatchLines, WatchPace, bounded_response, leave_at_once
from virtualflow_operator.observability import configure as configure_logs
from virtualflow_operator.settings import ApiSettings, OperatorSettings

logger = logging.getLogger(__name__)

_STOPPING = 30.0
"""Seconds in which kopf cancels a start that has failed: until then nothing is watched."""
_ENDING = 10.0
"""Seconds in which kopf ends once all of ours has: where a watch has failed, as when the definitions are deleted under
it, kopf may wait for ever, with the lease given back and nobody to restart it."""
_SILENCE = 75.0
"""A watch of which nothing has come for so long is dead: once a minute the API server sends a bookmark."""
_ERROR = re.compile(rb'\s*\{\s*"type"\s*:\s*"ERROR"')
"""How the event of an error begins."""


class Undiffed(kopf.DiffBaseStorage):
    """Keeps nothing of objects, since no handler asks what has changed: to copy each of them at every event would be a
    quarter of the operator's work when jobs come in hundreds.
    """

    def build(self, *, body: kopf.Body, extra_fields: object = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        """Return what was known: nothing."""

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Write nothing into the object."""


class _Watches:
    """Lets each watch of a session begin at its pace, and lets none end the operator."""

    def __init__(self) -> None:
        self._paces: defaultdict[str, WatchPace] = defaultdict(WatchPace)

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        if request.url.query.get("watch") != "true":
            return await handler(request)
        await asyncio.sleep(self._paces[request.url.path].wait(time.monotonic()))
        response = await handler(request)
        response.content = cast(aiohttp.StreamReader, WatchLines(response.content, as_expired))
        return response


def as_expired(event: bytes) -> bytes:
    """Return an event of a watch, one of an error with the code 410 instead of its own.

    kopf lists and watches anew after 410, and ends at any other. A busy API server, or one that has just started,
    answers 504 where its cache has not come to the version yet ("Too large resource version").
    """
    if _ERROR.match(event) is None:
        return event
    error = json.loads(event)
    logger.warning("a watch ended, and begins with a list: %s", error["object"].get("message"))
    error["object"]["code"] = HTTPStatus.GONE
    return json.dumps(error).encode()


class WatchSession(kopf.AiohttpSession):
    """What kopf itself would connect with, but for three things.

    It reads only so deep: without that, one object would end its watch. A watch that ends as soon as it has begun
    begins anew after a wait: kopf itself asks again at once. And no error that the API server tells within a watch ends
    the operator.

    Equal to any other with the same credentials, by which kopf knows those that were refused before.
    """

    def __init__(self, info: kopf.ConnectionInfo, response_class: type[aiohttp.ClientResponse]) -> None:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            proxy=info.proxy_url,
            trust_env=info.trust_env,
            response_class=response_class,
            middlewares=(_Watches(),),
        )
        super().__init__(
            server=info.server,
            priority=info.priority,
            default_namespace=info.default_namespace,
            expiration=info.expiration,
            aiohttp_session=session,
        )
        object.__setattr__(self, "_info", info)  # the base class is frozen
        self._info: kopf.ConnectionInfo

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WatchSession) and self._info == other._info

    def __hash__(self) -> int:
        return hash(self._info)


@kopf.on.login()
async def log_in(memo: kopf.Memo, **about: Any) -> WatchSession | None:
    """Log in as the Kubernetes client would: as the pod's service account, or as a kubeconfig says."""

    def too_deep(kind: str, metadata: Object) -> None:
        manager: Manager | None = memo.get("manager")
        if manager is not None:
            manager.too_deep(kind, metadata)

    info = await asyncio.to_thread(kopf.login_via_client, **about)
    return WatchSession(info, bounded_response(too_deep)) if info is not None else None


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Wait for the lease, fill the caches, and begin; no watch is opened before this returns."""
    try:
        own = memo.get("operator_settings") or read_settings()
        configure(settings, own.api)
        memo["manager"] = await Manager.start(own)
    except ConfigurationError as error:
        if "stop" in memo:  # ``main`` says what is wrong; kopf has no public error for it
            memo["fault"] = error
            memo["stop"].set()
            await asyncio.sleep(_STOPPING)
        raise kopf.PermanentError(str(error)) from error  # to try again would not help


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    manager: Manager | None = memo.get("manager")
    if manager is not None:
        await manager.stop()
    asyncio.get_running_loop().call_later(_ENDING, leave_at_once, "kopf does not end")


@kopf.on.event(GROUP, VERSION, PLURAL)
async def on_job(event: Any, memo: kopf.Memo, **_: Any) -> None:
    memo["manager"].see_job(event["type"], event["object"])


@kopf.on.event("v1", "pods")
async def on_pod(event: Any, memo: kopf.Memo, **_: Any) -> None:
    memo["manager"].see_pod(event["type"], event["object"])


@kopf.on.event("v1", "services")
async def on_service(event: Any, memo: kopf.Memo, **_: Any) -> None:
    memo["manager"].see_service(event["type"], event["object"])


@kopf.on.event("v1", "nodes")
async def on_node(event: Any, memo: kopf.Memo, **_: Any) -> None:
    memo["manager"].see_node(event["type"], event["object"])


@kopf.on.event(GROUP, VERSION, QUEUE_PLURAL)
async def on_queue(event: Any, memo: kopf.Memo, **_: Any) -> None:
    memo["manager"].see_queue(event["type"], event["object"])


def configure(settings: kopf.OperatorSettings, api: ApiSettings) -> None:
    """Set kopf up as a shell that only watches."""
    settings.watching.label_selectors["v1", "pods"] = OURS
    settings.watching.label_selectors["v1", "services"] = OURS
    settings.watching.chunk_size = api.page
    settings.watching.reconnect_backoff = 0.5
    settings.watching.inactivity_timeout = _SILENCE
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.execution.default_backoff = 5
    settings.queueing.error_delays = (1, 2, 4, 8, 15, 30, 60)
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{GROUP}/unused"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = Undiffed()


# --- the process ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator until a signal; the exit code.

    Args:
        arguments: without the program's name; ``None``: those of this process.
    """
    try:
        settings = read_settings(sys.argv[1:] if arguments is None else arguments)
        read_keys(settings)
    except ConfigurationError as error:
        print(f"virtualflow-operator: {error}", file=sys.stderr)
        return 2
    configure_logs(settings.log_format, settings.log_level)
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

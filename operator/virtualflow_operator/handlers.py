"""Where kopf wakes the operator: watches put keys on the work-queue, and nothing else.

Import this module and run kopf (``virtualflow-operator`` does; ``kopf run -m virtualflow_operator.handlers -A`` works
as well). There are no handlers of changes, timers or daemons: those write into users' objects, and end silently when a
write fails.
"""

from __future__ import annotations

from typing import Any

import kopf

from virtualflow.errors import ConfigurationError
from virtualflow_operator.constants import GROUP, PLURAL, QUEUE_PLURAL, VERSION
from virtualflow_operator.operator import Operator
from virtualflow_operator.options import read_settings
from virtualflow_operator.resync import OURS


class Undiffed(kopf.DiffBaseStorage):
    """Keeps nothing of objects, since no handler asks what has changed: to copy each of them at every event would be a
    quarter of the operator's work when jobs come in hundreds.
    """

    def build(self, *, body: kopf.Body, extra_fields: object = None) -> kopf.BodyEssence:
        """Return nothing of the object."""
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        """Return what was known: nothing."""

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Write nothing into the object."""


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Wait for the lease, fill the caches, and begin; no watch is opened before this returns."""
    configure(settings)
    try:
        own = memo.get("operator_settings") or read_settings()
        memo["operator"] = await Operator.start(own)
    except ConfigurationError as error:
        raise kopf.PermanentError(str(error)) from error  # to try again would not help


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """End what runs and give the lease back."""
    operator: Operator | None = memo.get("operator")
    if operator is not None:
        await operator.stop()


@kopf.on.event(GROUP, VERSION, PLURAL)
async def on_job(event: Any, memo: kopf.Memo, **_: Any) -> None:
    """A job was made, changed or deleted."""
    memo["operator"].see_job(event["type"], event["object"])


@kopf.on.event("v1", "pods")
async def on_pod(event: Any, memo: kopf.Memo, **_: Any) -> None:
    """A pod of a job has changed."""
    memo["operator"].see_pod(event["type"], event["object"])


@kopf.on.event("v1", "services")
async def on_service(event: Any, memo: kopf.Memo, **_: Any) -> None:
    """A coordinator's service has changed."""
    memo["operator"].see_service(event["type"], event["object"])


@kopf.on.event("v1", "nodes")
async def on_node(event: Any, memo: kopf.Memo, **_: Any) -> None:
    """A node was cordoned, tainted, lost or found."""
    memo["operator"].see_node(event["type"], event["object"])


@kopf.on.event(GROUP, VERSION, QUEUE_PLURAL)
async def on_queue(event: Any, memo: kopf.Memo, **_: Any) -> None:
    """A queue was made, changed or deleted."""
    memo["operator"].see_queue(event["type"], event["object"])


def configure(settings: kopf.OperatorSettings) -> None:
    """Set kopf up as a shell that only watches."""
    settings.watching.label_selectors["v1", "pods"] = OURS
    settings.watching.label_selectors["v1", "services"] = OURS
    settings.watching.chunk_size = 500
    settings.watching.reconnect_backoff = 0.5
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

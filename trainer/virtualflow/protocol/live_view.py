"""What the live page of a job shows, the token that opens it, and its address.

The page is the coordinator's, at :data:`PAGE_PATH`, and knows nothing of the job. What it shows comes from
:data:`VIEW_PATH`, to whoever bears the view token (or the job's own): in parts, each sent only where it has changed.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated
from urllib.parse import urlencode

import msgspec

from virtualflow.protocol.http_api import Event, LostWorker, MemoryReport, Phase, WorkerStatus
from virtualflow.protocol.messages import (
    Base,
    Change,
    CheckpointState,
    Count,
    NonFinite,
    Sentence,
    Traceback,
    Version,
)
from virtualflow.protocol.metrics import Metric
from virtualflow.protocol.settings import MAX_CHANGES, MAX_LISTED, MAX_METRICS, MAX_WORKERS, Reproducibility

PAGE_PATH = "/ui"
"""The page: one for all jobs, without a token."""
VIEW_PATH = "/v1/view"


def view_token(token: str) -> str:
    """The token that opens the view of a job, and nothing else of it.

    Args:
        token: of the job; nobody can tell it from what this returns.
    """
    return hmac.new(token.encode(), b"virtualflow view", hashlib.sha256).hexdigest()


def page_address(coordinator: str, token: str, job: str) -> str:
    """The address of a job's live page, with all that it needs.

    The token stands behind a ``#``: browsers keep that to themselves, so that it is in no request and no log.

    Args:
        coordinator: ``http://host:port``.
        token: of the job; the address bears the view token instead.
        job: what the page calls it.
    """
    return f"{coordinator}{PAGE_PATH}#{urlencode({'token': view_token(token), 'job': job})}"


class ViewNow(Base, frozen=True, tag=False):
    """What changes with every step."""

    time: float
    """Unix time of the coordinator."""
    phase: Phase
    step: Count
    total_steps: Count | None
    epoch: Count
    metrics: Annotated[dict[str, Metric], msgspec.Meta(max_length=MAX_METRICS)]
    steps_per_second: float
    step_ms: float | None
    predicted_step_ms: float | None
    goodput: float | None
    """The share of the workers' time that went into steps that count, also under coordinators before this one."""
    worker_seconds: float
    """That time, of all workers together."""


class ViewJob(Base, frozen=True, tag=False):
    """Who computes what, and how it stands otherwise: fields are those of ``http_api.Status``."""

    generation: Count
    virtual_nodes: Count | None
    reproducibility: Reproducibility | None
    wanted: Count
    wanted_reason: Sentence
    workers: Annotated[tuple[WorkerStatus, ...], msgspec.Meta(max_length=2 * MAX_WORKERS)]
    """The first ones, by what they are assigned."""
    workers_total: Count
    lost: Annotated[tuple[LostWorker, ...], msgspec.Meta(max_length=MAX_LISTED)]
    """The latest."""
    proposed: Count | None
    reason: Sentence
    hold: Count | None
    error: Sentence | None
    traceback: Traceback | None
    digest: str | None
    non_finite: NonFinite | None
    checkpoint: CheckpointState | None
    memory: MemoryReport | None
    version: Version


class ViewLog(Base, frozen=True, tag=False):
    """What has happened; the oldest first."""

    changes: Annotated[tuple[Change, ...], msgspec.Meta(max_length=MAX_CHANGES)]
    """The latest."""
    changes_total: Count
    repeated_steps: Count
    """Of all changes that there were."""
    events: Annotated[tuple[Event, ...], msgspec.Meta(max_length=MAX_LISTED)]
    """The latest."""


class ViewSeries(Base, frozen=True, tag=False):
    """Figures over the steps, each a column as long as ``steps``; ``None``: none was told there."""

    steps: tuple[Count, ...]
    speed: tuple[float | None, ...]
    """Steps a second."""
    workers: tuple[float | None, ...]
    """Members of the generation."""
    metrics: dict[str, tuple[float | None, ...]]


_SAME = msgspec.Raw()


class View(Base, frozen=True, tag=False, omit_defaults=True):
    """The answer: where the training is, and the parts that whoever asks has not got.

    Parts travel as they were encoded, once for all who look.
    """

    have: str
    """What to ask with, the next time: ``?have=…``."""
    now: msgspec.Raw
    """A :class:`ViewNow`."""
    job: msgspec.Raw = _SAME
    """A :class:`ViewJob`; left out: it is as it was."""
    log: msgspec.Raw = _SAME
    """A :class:`ViewLog`."""
    series: msgspec.Raw = _SAME
    """A :class:`ViewSeries`."""

"""Other settings than the defaults for the runs that a test makes by ``vf.elastic``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from virtualflow.memory.activations import ActivationSettings
from virtualflow.worker import entry
from virtualflow.worker.settings import WorkerSettings

_in_force = [WorkerSettings()]


@contextmanager
def injected(**changes: dict[str, Any]) -> Iterator[None]:
    """Give runs these settings of each part, for example ``injected(reduction={"bucket": 256})``."""
    before = _in_force[0]
    inject(**changes)
    try:
        yield
    finally:
        _use(before)


def inject(**changes: dict[str, Any]) -> None:
    """The same for the rest of a process's life; what was injected before stays."""
    parts = {
        name: replace(getattr(_in_force[0], name) or ActivationSettings(), **values) for name, values in changes.items()
    }
    _use(replace(_in_force[0], **parts))


def _use(settings: WorkerSettings) -> None:
    _in_force[0] = settings
    # In place of the class and not around ``Run``: a frame of this file would stand in every error as the user's line.
    entry.WorkerSettings = lambda: settings  # type: ignore[assignment, attr-defined, misc]

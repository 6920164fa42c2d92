"""A worker or a coordinator as process 1 of a container: SIGTERM ends it from the beginning.

Linux ignores a signal that process 1 has no handler for. Until the training loop installs its own, a script that is
still importing would therefore not notice that its pod is to end, and be waited for until it is killed.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from types import FrameType

from virtualflow.protocol.settings import ENV_COORDINATOR

EXIT_CODE = 128 + signal.SIGTERM
"""How a shell shows the end of a process by that signal."""


def prepare_worker() -> None:
    """What process 1 does on ``import virtualflow``: nothing, unless it is a worker."""
    if os.environ.get(ENV_COORDINATOR, "").strip():
        obey_sigterm()


def obey_sigterm() -> None:
    """Give SIGTERM its usual meaning by a handler, unless somebody has decided about it already."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end_at_once)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """The handler."""
    os._exit(EXIT_CODE)


def raise_descriptor_limit() -> int:
    """Let this process have as many descriptors as it may; that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20

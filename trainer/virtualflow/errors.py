"""The errors that the library raises on purpose, so that callers can tell them from defects."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType


class VirtualFlowError(Exception):
    """Base of every error that the library raises on purpose."""

    shown = False
    """Whether the user has read it already (:func:`show`)."""


class ConfigurationError(VirtualFlowError, ValueError):
    """Something that the user asked for cannot be done; the message is one sentence that says what to do."""


class CoordinatorAbsent(ConfigurationError):
    """No coordinator answers where one was named."""


class CommunicatorBroken(VirtualFlowError):
    """A collective failed or was abandoned: the attempt is aborted and the next generation repeats it."""


def release_frames(error: BaseException) -> None:
    """Let go of what the functions held that an error came through: nobody needs their variables any more.

    An error that somebody keeps, as a :class:`~concurrent.futures.Future` does, keeps its traceback, and that the local
    variables of all those functions, often with the future among them. Such a circle waits for Python's collector of
    circles, which comes by how many objects there are, not by their bytes: a worker of 25 MB of gradients kept some
    300 MB more in this way.
    """
    known: set[int] = set()
    open_: list[BaseException | None] = [error]
    while open_:
        each = open_.pop()
        if each is not None and id(each) not in known:
            known.add(id(each))
            traceback.clear_frames(each.__traceback__)
            open_ += [each.__cause__, each.__context__]


class Damaged(CommunicatorBroken):
    """What has arrived is not what was sent."""


class Convicted(CommunicatorBroken):
    """A member came to wrong gradients: the others repeat the attempt without it."""

    def __init__(self, incarnation: str, reason: str) -> None:
        super().__init__(reason)
        self.incarnation = incarnation
        """Its process."""


class StatesDiffer(VirtualFlowError):
    """The workers have come to hold different states: nothing of the attempt was applied, and the job ends."""

    def __init__(self, reason: str, odd: Sequence[str]) -> None:
        super().__init__(reason)
        self.odd = tuple(odd)
        """The processes that differ from what more than half of all have; empty: there is no such majority."""


class NonFiniteMetric(VirtualFlowError):
    """A metric became NaN or infinite, and the job is to stop then."""


class LoaderEnded(VirtualFlowError, RuntimeError):
    """A process that loads samples has ended by itself, with an exit code: there is something in the script."""


class LoaderKilled(VirtualFlowError, RuntimeError):
    """A process that loads samples was killed by a signal, most often because its machine had run out of memory."""


class ScriptExited(VirtualFlowError):
    """The script ended itself by ``sys.exit()`` in the middle of the training."""


class Leave(SystemExit):
    """This worker's part is over before the end of the script; the process ends with ``code``.

    It is raised by iterating over the run, so that code after the training loop (saving the model, printing results)
    runs only in workers that saw the end of the training. ``finally`` blocks and context managers run as usual.
    """

    exit_code = 0

    def __init__(self, reason: str) -> None:
        super().__init__(self.exit_code)
        self.reason = reason


class Drained(Leave):
    """This worker was asked to leave and has handed over: exit code 0."""


class Profiled(Leave):
    """The device profile is written, which is all that the script was run for: exit code 0."""


class JobEnded(Leave):
    """The job was completed or stopped while this worker waited to join it: exit code 0."""


class JobFailed(Leave):
    """The job has failed elsewhere: exit code 1."""

    exit_code = 1


class Evicted(Leave):
    """The coordinator declared this process lost or refused it; it may be started again: exit code 75 (EX_TEMPFAIL)."""

    exit_code = 75


def show(error: VirtualFlowError) -> None:
    """Print an error that the library raised on purpose as its sentence, once."""
    if not error.shown:
        print(f"virtualflow: {error}", file=sys.stderr, flush=True)
        error.shown = True


class _PlainErrors:
    """The hook of :func:`show_errors_plainly`."""

    def __init__(self, former: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._former = former

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, VirtualFlowError):
            show(error)
        else:
            self._former(kind, error, trace)


def show_errors_plainly() -> None:
    """Let an error that the library raised on purpose end a script with its sentence, not with a traceback."""
    if not isinstance(sys.excepthook, _PlainErrors):
        sys.excepthook = _PlainErrors(sys.excepthook)

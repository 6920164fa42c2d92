"""What a worker leaves behind when it ends, for whoever started its process, and how that is read.

Kubernetes shows the first 4,096 bytes of a container's termination log in the pod's status, so what is written always
fits, whole and readable. It needs no coordinator: a worker that cannot reach one leaves its message all the same.
"""

from __future__ import annotations

import bisect
import logging
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from virtualflow._start import from_start
from virtualflow.errors import CoordinatorAbsent, Drained, Evicted, Leave, VirtualFlowError, describe
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import ENV_TERMINATION_LOG, MAX_TERMINATION_MESSAGE, MAX_TERMINATION_METRICS
from virtualflow.protocol.wording import Metric, as_metrics, printable

logger = logging.getLogger("virtualflow.worker")

EXIT_EVICTED = Evicted.exit_code
"""How a worker's process ends that the coordinator declared lost or refused: it may be started again."""

_SENTENCE = 1_000
"""Characters of an error or a reason; what is left over is the traceback's."""

_NAME = 100
"""Characters of a metric's name; a longer one is left out."""


class TerminationMessage(m.Base, frozen=True, tag="last-word", omit_defaults=True):
    """What a worker writes into its termination log when it ends; one that is killed writes nothing.

    ``done``: it saw the end of the training. ``left``: it was drained and has handed over, or all were stopped.
    ``failed``: the user's code raised, or what it asked for cannot be done. ``refused``: the coordinator declared
    it lost or did not admit it (:data:`EXIT_EVICTED`). ``ended``: the job is over or has failed elsewhere, or its
    coordinator stayed away.
    """

    kind: Literal["done", "left", "failed", "refused", "ended"]
    step: int = 0
    """Completed steps."""
    total_steps: int | None = None
    digest: str | None = None
    optimizer_digest: str | None = None
    metrics: dict[str, Metric] = msgspec.field(default_factory=dict)
    error: str | None = None
    """The exception and its message, or the sentence of an error raised on purpose."""
    traceback: str | None = None
    """Its end, as far as there is room."""
    reason: str | None = None
    """Why it left, was refused or ended."""
    non_finite: m.NonFinite | None = None
    """The first metric of the training that was not finite."""
    checkpoint: int | None = None
    """The step of the newest checkpoint that it has completed."""
    convicted: bool = False
    """It came to wrong gradients, or to a wrong state, as all have seen: its machine is in doubt."""
    does_not_fit: bool = False
    """Nothing fits into its budget of memory, and ``error`` says what would."""
    stopped_early: bool = False
    """The script has left the loop before the last step."""


class TerminationMessageWriter:
    """Writes the termination message of this process, if one is asked for; a later one takes its place."""

    def __init__(self) -> None:
        text = os.environ.get(ENV_TERMINATION_LOG, "").strip()
        # A loader process does not speak for its worker, not even one that only imports the script to begin.
        process = multiprocessing.current_process()
        helps = process.daemon or getattr(process, "_inheriting", False)
        self._path = from_start(text) if text and not helps else None
        self._process = os.getpid()
        """What the user's code forks does not, either."""

    @property
    def wanted(self) -> bool:
        return self._path is not None and self._process == os.getpid()

    def clear(self) -> None:
        """What was written is not true any more: the script goes on."""
        self._write_bytes(b"")

    def done(self, result: m.Done, total_steps: int | None) -> None:
        self._write(
            TerminationMessage(
                "done",
                step=result.step,
                total_steps=total_steps,
                digest=result.digest,
                optimizer_digest=result.optimizer_digest,
                metrics=result.metrics,
                non_finite=result.non_finite,
                stopped_early=result.stopped_early,
            )
        )

    def ended(
        self,
        error: BaseException,
        step: int = 0,
        total_steps: int | None = None,
        metrics: Mapping[str, float] | None = None,
        non_finite: m.NonFinite | None = None,
        checkpoint: int | None = None,
        stacks: str | None = None,
        convicted: bool = False,
        does_not_fit: bool = False,
    ) -> None:
        """An exception ends the process, or at least its training.

        Args:
            error: one that the library raised to end it, or anything else.
            non_finite: the first metric of the training that was not finite.
            stacks: where the threads of a process are that does not end by itself.
            does_not_fit: whether it ends because nothing fits into its budget of memory.
        """
        message = TerminationMessage(
            "failed",
            step=step,
            total_steps=total_steps,
            metrics=as_metrics(metrics or {}),
            non_finite=non_finite,
            checkpoint=checkpoint,
            traceback=stacks,
            convicted=convicted,
            does_not_fit=does_not_fit,
        )
        if isinstance(error, Leave):
            kind = "left" if isinstance(error, Drained) else "refused" if isinstance(error, Evicted) else "ended"
            message = msgspec.structs.replace(message, kind=kind, reason=error.reason)
        elif isinstance(error, CoordinatorAbsent):
            message = msgspec.structs.replace(message, kind="ended", reason=str(error))
        elif isinstance(error, VirtualFlowError):
            message = msgspec.structs.replace(message, error=describe(error))
        else:
            trace = "".join(traceback.format_exception(error))
            message = msgspec.structs.replace(message, error=describe(error), traceback=trace)
        self._write(message)

    def _write(self, message: TerminationMessage) -> None:
        if self.wanted:
            self._write_bytes(encode_termination_message(message))

    def _write_bytes(self, content: bytes) -> None:
        if not self.wanted or self._path is None:
            return
        try:
            # In place: Kubernetes mounts this very file. Without waiting: it might be a pipe that nobody reads.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(self._path, flags, 0o644)
            try:
                os.write(file, content)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            logger.warning("the termination message of this worker cannot be written to %s: %s", self._path, error)


# Of two kinds that are possible, the tag must say which it is.
_decoder = msgspec.json.Decoder(TerminationMessage | m.Heartbeat)


def decode_termination_message(text: str | bytes) -> TerminationMessage | None:
    """Read the content of a termination log; ``None``: something else's text, the end of a log."""
    try:
        message = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return message if isinstance(message, TerminationMessage) else None


def encode_termination_message(message: TerminationMessage) -> bytes:
    """JSON of at most ``MAX_TERMINATION_MESSAGE`` bytes; what is cut off is first the beginning of the traceback."""
    metrics = {printable(name): value for name, value in message.metrics.items() if len(printable(name)) <= _NAME}
    found = message.non_finite
    message = msgspec.structs.replace(
        message,
        metrics=dict(list(as_metrics(metrics).items())[:MAX_TERMINATION_METRICS]),
        non_finite=msgspec.structs.replace(found, metric=printable(found.metric)[:_NAME]) if found else None,
        error=printable(message.error)[:_SENTENCE] if message.error is not None else None,
        reason=printable(message.reason)[:_SENTENCE] if message.reason is not None else None,
        traceback=printable(message.traceback)[-MAX_TERMINATION_MESSAGE:] if message.traceback else None,
    )
    trace, error, reason = message.traceback or "", message.error or "", message.reason or ""
    numbers = list(message.metrics.items())
    # One after the other gives way until all fits; without any of them it always does.
    message = _fit(message, len(trace), lambda n: {"traceback": trace[len(trace) - n :] or None})
    message = _fit(message, len(numbers), lambda n: {"metrics": dict(numbers[:n])})
    message = _fit(message, len(reason), lambda n: {"reason": reason[:n] or None})
    return m.encode(_fit(message, len(error), lambda n: {"error": error[:n] or None}))


def _fit(message: TerminationMessage, length: int, part: Callable[[int], dict[str, Any]]) -> TerminationMessage:
    def size(n: int) -> int:
        return len(m.encode(msgspec.structs.replace(message, **part(n))))

    if len(m.encode(message)) <= MAX_TERMINATION_MESSAGE:
        return message
    fits = bisect.bisect_right(range(length), MAX_TERMINATION_MESSAGE, key=size) - 1
    return msgspec.structs.replace(message, **part(max(fits, 0)))

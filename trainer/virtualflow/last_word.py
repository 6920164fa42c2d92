"""What a worker leaves behind when it ends, for whoever started its process, and how that is read.

Kubernetes shows the first 4,096 bytes of a container's termination log in the pod's status, so what is written always
fits, whole and readable. It needs no coordinator: a worker that cannot reach one leaves its last word all the same.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from virtualflow import messages as m
from virtualflow.errors import CoordinatorAbsent, Drained, Evicted, Leave, VirtualFlowError
from virtualflow.settings import ENV_TERMINATION_LOG, MAX_LAST_METRICS, MAX_LAST_WORD

logger = logging.getLogger("virtualflow.worker")

_SENTENCE = 1_000
"""Characters of an error or a reason; what is left over is the traceback's."""

_NAME = 100
"""Characters of a metric's name; a longer one is left out."""


class LastWord(m.Base, frozen=True, tag="last-word", forbid_unknown_fields=False, omit_defaults=True):
    """What a worker writes into its termination log when it ends; one that is killed writes nothing.

    ``done``: it saw the end of the training. ``left``: it was drained and has handed over, or all were stopped.
    ``failed``: the user's code raised, or what it asked for cannot be done. ``refused``: the coordinator gave it up or
    did not admit it (exit code 75). ``ended``: the job is over or has failed elsewhere, or its coordinator stayed away.
    """

    kind: Literal["done", "left", "failed", "refused", "ended"]
    step: int = 0
    """Completed steps."""
    total_steps: int | None = None
    digest: str | None = None
    optimizer_digest: str | None = None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    error: str | None = None
    """The exception and its message, or the sentence of an error raised on purpose."""
    traceback: str | None = None
    """Its end, as far as there is room."""
    reason: str | None = None
    """Why it left, was refused or ended."""


class LastWordWriter:
    """Writes the last word of this process, or nothing where nobody asked for it; a later one takes its place."""

    def __init__(self) -> None:
        text = os.environ.get(ENV_TERMINATION_LOG, "").strip()
        # A loader process does not speak for its worker, not even one that only imports the script to begin.
        process = multiprocessing.current_process()
        helps = process.daemon or getattr(process, "_inheriting", False)
        self._path = Path(text) if text and not helps else None
        self._process = os.getpid()
        """What the user's code forks does not, either."""

    @property
    def wanted(self) -> bool:
        """Whether this process is to leave one."""
        return self._path is not None and self._process == os.getpid()

    def done(self, result: m.Done, total_steps: int | None) -> None:
        """The training is complete."""
        self._write(
            LastWord(
                "done",
                step=result.step,
                total_steps=total_steps,
                digest=result.digest,
                optimizer_digest=result.optimizer_digest,
                metrics=result.metrics,
            )
        )

    def ended(
        self,
        error: BaseException,
        step: int = 0,
        total_steps: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """An exception ends the process, or at least its training.

        Args:
            error: one that the library raised to end it, or anything else.
            step: completed steps.
            total_steps: of the whole training.
            metrics: those of the last step.
        """
        word = LastWord("failed", step=step, total_steps=total_steps, metrics=dict(metrics or {}))
        if isinstance(error, Leave):
            kind = "left" if isinstance(error, Drained) else "refused" if isinstance(error, Evicted) else "ended"
            word = msgspec.structs.replace(word, kind=kind, reason=error.reason)
        elif isinstance(error, CoordinatorAbsent):
            word = msgspec.structs.replace(word, kind="ended", reason=str(error))
        elif isinstance(error, VirtualFlowError):
            word = msgspec.structs.replace(word, error=str(error))
        else:
            line = traceback.format_exception_only(error)[-1].strip()
            word = msgspec.structs.replace(word, error=line, traceback="".join(traceback.format_exception(error)))
        self._write(word)

    def _write(self, word: LastWord) -> None:
        if not self.wanted or self._path is None:
            return
        try:
            # In place: Kubernetes mounts this very file. Without waiting: it might be a pipe that nobody reads.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(self._path, flags, 0o644)
            try:
                os.write(file, encode_last_word(word))
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            logger.warning("the last word of this worker cannot be written to %s: %s", self._path, error)


# Of two kinds that are possible, the tag must say which it is.
_decoder = msgspec.json.Decoder(LastWord | m.Heartbeat)


def decode_last_word(text: str | bytes) -> LastWord | None:
    """Read the content of a termination log; ``None``: it is no last word (the end of a log, something else's text)."""
    try:
        word = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return word if isinstance(word, LastWord) else None


def encode_last_word(word: LastWord) -> bytes:
    """JSON of at most ``MAX_LAST_WORD`` bytes; what is cut off is first the beginning of the traceback."""
    metrics = {
        _clean(name): value for name, value in word.metrics.items() if len(name) <= _NAME and math.isfinite(value)
    }
    word = msgspec.structs.replace(
        word,
        metrics=dict(list(metrics.items())[:MAX_LAST_METRICS]),
        error=_clean(word.error)[:_SENTENCE] if word.error is not None else None,
        reason=_clean(word.reason)[:_SENTENCE] if word.reason is not None else None,
        traceback=_clean(word.traceback)[-MAX_LAST_WORD:] if word.traceback else None,
    )
    trace, error, reason, numbers = (
        word.traceback or "",
        word.error or "",
        word.reason or "",
        list(word.metrics.items()),
    )
    # One after the other gives way until all fits; without any of them it always does.
    word = _fit(
        word, len(trace), lambda word, n: msgspec.structs.replace(word, traceback=trace[len(trace) - n :] or None)
    )
    word = _fit(word, len(numbers), lambda word, n: msgspec.structs.replace(word, metrics=dict(numbers[:n])))
    word = _fit(word, len(reason), lambda word, n: msgspec.structs.replace(word, reason=reason[:n] or None))
    word = _fit(word, len(error), lambda word, n: msgspec.structs.replace(word, error=error[:n] or None))
    return m.encode(word)


def _fit(word: LastWord, length: int, cut: Callable[[LastWord, int], LastWord]) -> LastWord:
    """``word`` with as much of a part, ``length`` long, as there is room for; ``cut`` leaves so much of it."""
    if len(m.encode(word)) <= MAX_LAST_WORD:
        return word
    fits, too_long = 0, length
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if len(m.encode(cut(word, middle))) <= MAX_LAST_WORD:
            fits = middle
        else:
            too_long = middle
    return cut(word, fits)


def _clean(text: str) -> str:
    """``text`` without halves of surrogate pairs, which JSON cannot hold."""
    return text.encode("utf-8", "replace").decode()

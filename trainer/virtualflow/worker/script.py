"""What the library knows of a script: what it has at hand that ought to be known, and why it ends itself. Pure."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

from torch.optim.swa_utils import AveragedModel

from virtualflow.errors import ConfigurationError, Drained, ScriptExited

_OURS = "virtualflow."
_IN_ORDER = (None, 0, 128 + signal.SIGTERM)
"""Exit codes of a script that ends because SIGTERM has told it to."""


def check_averages(known: Callable[[object], bool]) -> None:
    """See that no average of weights in reach of the script would be left behind."""
    for name, value in _variables(sys._getframe(1)):
        if isinstance(value, AveragedModel) and not known(value):
            raise ConfigurationError(
                f"the script keeps an average of weights in {name}, which a worker that joins or a checkpoint would "
                f'not have; pass it to vf.elastic: state={{"{name}": {name}}}'
            )


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The variables of the script's functions that are running, and the attributes of the objects in them."""
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(_OURS):
            for name, value in [*frame.f_locals.items()]:
                yield name, value
                if not isinstance(value, ModuleType | type):
                    yield from getattr(value, "__dict__", {}).items()
        frame = frame.f_back


def read_exit(
    error: SystemExit, completed_steps: int, total_steps: int | None, draining: bool, coordinated: bool
) -> BaseException:
    """What ends the training, as the library understands it.

    Args:
        error: what the script raised inside its ``with`` block.
        coordinated: whether others may train with it.

    Returns:
        ``Drained`` for one that was to leave; ``error`` itself for a script that runs alone, which may end when it
        likes; else ``ScriptExited``.
    """
    if draining and error.code in _IN_ORDER:
        drained = Drained("the script ended itself while this worker drained")
        drained.__cause__ = error
        return drained
    if not coordinated:
        return error
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    of_all = "" if total_steps is None else f" of {total_steps}"
    exited = ScriptExited(
        f"the script ended itself by sys.exit({'' if error.code is None else repr(error.code)}) after step "
        f"{completed_steps}{of_all}{where}, before the training was complete: leave the loop with break to stop all "
        "workers early, or raise an error"
    )
    exited.__cause__ = error
    return exited

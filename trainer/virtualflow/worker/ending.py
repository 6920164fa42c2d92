"""What it means that a script ends itself by ``sys.exit()`` while it trains. Pure."""

from __future__ import annotations

import signal
import traceback

from virtualflow.errors import Drained, ScriptExited

_IN_ORDER = (None, 0, 128 + signal.SIGTERM)
"""Exit codes of a script that ends because SIGTERM has told it to."""


def read_exit(
    error: SystemExit, completed_steps: int, total_steps: int | None, draining: bool, coordinated: bool
) -> BaseException:
    """What ends the training, as the library understands it.

    Args:
        error: what the script raised inside its ``with`` block.
        completed_steps: updates that have been applied.
        total_steps: of the whole training, if that is known.
        draining: whether this worker was asked to leave.
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

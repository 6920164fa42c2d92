"""What ``--schedule`` asks for: actions at steps, and how far the job may run so that each of them has its
effect.

Pure functions. Faults wait for each other: a job of 120 steps of 10 ms would be over before a new Python process can
import torch, so a scheduled job is held before the step of the next action until the one before it is in
effect. Workers that are resized, drained or lost go on training meanwhile; only the distance is limited.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.http_api import Status

GRAMMAR = "STEP:=N, STEP:kill, STEP:kill:K, STEP:term, STEP:hang, STEP:slow:K, STEP:fast, STEP:coordinator or STEP:all"


@dataclass(frozen=True)
class Resize:
    """Provide ``workers`` workers from now on."""

    workers: int


@dataclass(frozen=True)
class Kill:
    """SIGKILL the ``count`` workers that have served longest; they are replaced."""

    count: int


@dataclass(frozen=True)
class Term:
    """SIGTERM the worker that has served longest; it is replaced only if it was the last one."""


@dataclass(frozen=True)
class Hang:
    """SIGSTOP the worker that has served longest; it is replaced once the coordinator has declared it lost."""


@dataclass(frozen=True)
class Slow:
    """From now on the worker that has served longest runs a ``factor``-th of the time, as under a CPU quota."""

    factor: int


@dataclass(frozen=True)
class Fast:
    """All workers run all the time again."""


@dataclass(frozen=True)
class KillCoordinator:
    """SIGKILL the coordinator; it is started again."""


@dataclass(frozen=True)
class KillAll:
    """SIGKILL every worker at once; all are replaced and resume from a checkpoint."""


Action = Resize | Kill | Term | Hang | Slow | Fast | KillCoordinator | KillAll


@dataclass(frozen=True)
class Group:
    """What happens when the job has completed ``step`` steps, in the order in which it was written."""

    step: int
    actions: tuple[Action, ...]


def parse_schedule(text: str) -> tuple[Group, ...]:
    """Read ``"20:=4,40:kill:2"``: groups in ascending order of their steps; nothing but blanks gives none.

    Raises:
        ConfigurationError: the text is no schedule; the sentence names the entry.
    """
    entries = [entry.strip() for entry in text.split(",")]
    if entries == [""]:
        return ()
    actions = sorted((_parse_entry(entry) for entry in entries), key=lambda pair: pair[0])
    return tuple(
        Group(step, tuple(action for _, action in group)) for step, group in groupby(actions, key=lambda pair: pair[0])
    )


def _parse_entry(entry: str) -> tuple[int, Action]:
    match = re.fullmatch(r"([0-9]+):\s*(.+)", entry)
    if match is None:
        raise ConfigurationError(f"schedule entry {entry!r} is not understood; write {GRAMMAR}, separated by commas")
    step, word = int(match[1]), match[2]
    if step < 1:
        raise ConfigurationError(f"schedule entry {entry!r}: the first step that can be completed is step 1")
    plain: dict[str, Action] = {
        "kill": Kill(1),
        "term": Term(),
        "hang": Hang(),
        "fast": Fast(),
        "coordinator": KillCoordinator(),
        "all": KillAll(),
    }
    if word in plain:
        return step, plain[word]
    number = re.fullmatch(r"(=|kill:|slow:)([0-9]+)", word)
    if number is None:
        raise ConfigurationError(f"schedule entry {entry!r}: there is no action {word!r}; write {GRAMMAR}")
    count = int(number[2])
    if count < 1:
        what = "the factor" if number[1] == "slow:" else "the number of workers"
        raise ConfigurationError(f"schedule entry {entry!r}: {what} must be at least 1")
    made: dict[str, Action] = {"=": Resize(count), "kill:": Kill(count), "slow:": Slow(count)}
    return step, made[number[1]]


def most_workers(workers: int, schedule: Iterable[Group]) -> int:
    """The largest number of workers that the job is asked to have at any time."""
    resizes = (action.workers for group in schedule for action in group.actions if isinstance(action, Resize))
    return max(workers, *resizes, workers)


def hold_step(
    steps: Sequence[int], fired: int, in_effect: bool, total_steps: int | None, riding: int | None = None
) -> int | None:
    """The last step that the job may complete for now; ``None``: it runs freely.

    While a group of actions has yet to take effect, the job stops short of the step of the group after it;
    behind the last group it stops two steps before its end, because a planned change needs one step to ride
    on and one to show. The result is never below the step at which the next group fires, and a change that
    is ready gets the step that it rides on, so a hold cannot keep a schedule from going on.

    Args:
        steps: the step of each group, ascending.
        fired: how many groups have fired.
        in_effect: whether the last group that fired is in effect; without meaning while none has.
        total_steps: the length of the job, ``None`` while it is not known.
        riding: the last complete step, while a change is ready to be made by the next one; it may be only a part
            of what the last group asked for, and the rest (a worker that came later) waits for it.
    """
    waiting = fired if in_effect or fired == 0 else fired - 1
    if waiting >= len(steps):
        return None
    if waiting + 1 < len(steps):
        hold = steps[waiting + 1] - 1
    elif total_steps is None:
        hold = steps[waiting]
    else:
        hold = max(total_steps - 2, steps[waiting])
    if riding is not None:
        hold = max(hold, riding + 1)
    return None if total_steps is not None and hold >= total_steps else hold


def in_effect(status: Status | None, expected: Sequence[str | None], wanted: int) -> bool:
    """Whether membership is what was asked for: all that was done to the job is in effect.

    The members of the running generation, or of the proposed one when its communicator stands everywhere (the
    switch then rides on the next step), are exactly the processes that are expected.

    Args:
        status: the latest one of a living coordinator, or ``None``.
        expected: the incarnation of each process that virtual nodes should be assigned to, as it was started and
            neither asked to leave nor killed nor stopped; ``None`` for one that the coordinator does not list.
        wanted: how many there should be.
    """
    if status is None or len(expected) != wanted or None in expected:
        return False
    if status.virtual_nodes is None or status.phase not in ("training", "evaluating", "done"):
        return False
    if status.proposed is not None:
        # A lone worker that drains stays in until its replacement has entered beside it.
        leaving = {worker.incarnation for worker in status.workers if worker.state == "draining"}
        members = set(status.proposed_workers) - leaving if status.prepared else set()
    else:
        assigned = [worker for worker in status.workers if worker.assigned]
        if any(worker.state not in ("training", "done") for worker in assigned):
            return False
        members = {worker.incarnation for worker in assigned}
    present, processes = set(expected), max((len(worker.processes) for worker in status.workers), default=0)
    most = status.virtual_nodes // max(1, processes)
    if wanted <= most:
        return members == present
    return len(members) == most and members <= present

"""What must hold for the checkpoints of a job. Pure.

Each process writes down each rename in the checkpoints' directory: by a rename they appear, go, and pass from one
generation to the next. A checkpoint bears the number of a generation, and one of a lower number does not appear where
one of a higher number is. Its writer looks for one right before; what appears in the moment between that look and the
rename is harmless, and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from faults.checker import Number

_NAME = re.compile(r"step-(\d{8,15})\.(\d{1,15})\.(\d{1,15})")


@dataclass(frozen=True)
class Move:
    """A rename that has happened."""

    process: str
    at: float
    """When it was about to; seconds of the machine's monotonic clock."""
    done: float
    """When it was over."""
    source: str
    target: str
    looked: float | None
    """When its thread had begun to list the directory before."""


@dataclass
class Storage:
    """What the renames of a job show."""

    appeared: int = 0
    begun: dict[Number, int] = field(default_factory=dict)
    """The step of the checkpoint that a generation has taken over to begin from,"""
    begun_at: dict[Number, float] = field(default_factory=dict)
    """and when."""
    late: int = 0
    """Those that appeared between the look of their writer and its rename, beside one of a higher number."""
    faults: list[str] = field(default_factory=list)
    """What is wrong, in sentences."""


def read_mark(name: str) -> tuple[Number, int] | None:
    """The generation and the step of a checkpoint's name; ``None``: this is none."""
    match = _NAME.fullmatch(name)
    return ((int(match[2]), int(match[3])), int(match[1])) if match else None


def check_moves(moves: Iterable[Move], committed: Mapping[Number, Sequence[int]]) -> Storage:
    """Judge the checkpoints of a job.

    Args:
        moves: of all its processes.
        committed: the steps of each generation that made any.
    """
    storage = Storage()
    present: dict[tuple[Number, int], float] = {}
    """What is there, and since when."""
    own: dict[str, Number] = {}
    """The highest number that each process has written under."""
    for move in sorted(moves, key=lambda move: move.done):
        source, target = read_mark(move.source), read_mark(move.target)
        if target is not None:
            if source is None:
                _check_appearance(move, target, present, committed, storage)
            else:
                _check_adoption(move, source, target, storage)
            own[move.process] = max(target[0], own.get(move.process, (0, 0)))
            present[target] = move.done
        elif source is not None and (source[0] > own.get(move.process, (0, 0))):
            storage.faults.append(f"{move.process} has removed {move.source}, which bears a higher number than its own")
        if source is not None:
            present.pop(source, None)
    return storage


def _check_appearance(
    move: Move,
    mark: tuple[Number, int],
    present: Mapping[tuple[Number, int], float],
    committed: Mapping[Number, Sequence[int]],
    storage: Storage,
) -> None:
    storage.appeared += 1
    number, step = mark
    higher = {other: since for other, since in present.items() if other[0] > number}
    seen = [other for other, since in higher.items() if move.looked is None or since < move.looked]
    if seen:
        storage.faults.append(
            f"{move.process} has written {move.target} where there was one of generation {max(seen)[0][1]}"
        )
    elif higher:
        storage.late += 1
    reached = max((max(steps) for other, steps in committed.items() if other <= number), default=0)
    if step > reached:
        storage.faults.append(f"{move.process} has written {move.target}, and nobody had come to that step")


def _check_adoption(move: Move, source: tuple[Number, int], target: tuple[Number, int], storage: Storage) -> None:
    storage.begun[target[0]], storage.begun_at[target[0]] = target[1], move.done
    if target[1] != source[1] or target[0] <= source[0]:
        storage.faults.append(f"{move.process} has made {move.target} of {move.source}")

"""What must hold for the steps of a job, whatever happened to it. Pure.

The library's audit says which attempts counted, and the script writes down each step that it has seen. A step may be
committed in two generations only where the earlier one ends with it: it was the last of who was lost, and the others
have repeated it. That is asked of both. What checkpoints must obey follows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Number = tuple[int, int]
"""Of a generation: incarnation and counter."""


@dataclass(frozen=True)
class Commit:
    """A line of a process about one step."""

    process: str
    generation: Number
    step: int
    leader: bool = False
    digest: str = ""
    """Of the weights after it; empty where the line does not say."""
    asked: float = 0.0
    """When it was about to ask whether it leads; seconds of the machine's monotonic clock."""


@dataclass
class CheckResult:
    """What the lines of a job show."""

    steps: int = 0
    """The highest that was committed."""
    digests: int = 0
    """Lines whose weights were compared with the undisturbed run."""
    lineages: int = 0
    """Branches of which more than one step counts; 1 is right."""
    repeated: int = 0
    """Steps that were committed in two generations, as the last one of a branch that was lost."""
    faults: list[str] = field(default_factory=list)
    """What is wrong, in sentences."""


def check(
    audit: Iterable[Commit],
    log: Sequence[Commit],
    undisturbed: Sequence[str],
    anew: Mapping[Number, int] | None = None,
    lease: float = float("inf"),
) -> CheckResult:
    """Judge a job.

    Args:
        audit: the attempts that counted, as the library says.
        log: each step that the script has seen, with leader and digest.
        undisturbed: digests of a run that nothing happened to, of step 1 and on.
        anew: generations that went back on purpose, as nobody who had the state was left, and the step of the
            checkpoint that each began from; 0: from the beginning.
        lease: seconds after a step for which a worker may take itself for the leader though others have gone on.
    """
    verdict = CheckResult()
    audit, anew = list(audit), anew or {}
    _check_lineage(audit, anew, verdict)
    known = CheckResult()
    _check_lineage(log, anew, known)
    verdict.faults += [f"in the script's log, {sentence}" for sentence in known.faults]
    _check_leaders(log, lease, verdict)
    counted: dict[int, Number] = {}
    """Of each step, the first generation in which it was applied. Who was a step behind copies it in a later one."""
    for line in audit:
        counted[line.step] = min(line.generation, counted.get(line.step, line.generation))
    others: dict[str, list[int]] = defaultdict(list)
    """Steps of each process after which its weights were not those of the undisturbed run."""
    for line in log:
        if line.step not in counted or counted[line.step] > line.generation:
            verdict.faults.append(
                f"{line.process} has seen step {line.step} in generation {_shown(line.generation)}, and nobody had "
                "committed it"
            )
        if not line.digest:
            continue
        if line.step > len(undisturbed):
            verdict.faults.append(f"step {line.step} cannot be compared: the undisturbed run is shorter")
            break
        verdict.digests += 1
        if line.digest != undisturbed[line.step - 1]:
            others[line.process].append(line.step)
    for process, steps in others.items():
        verdict.faults.append(f"{process} has other weights after {len(steps)} steps, first after step {min(steps)}")
    return verdict


def _check_lineage(lines: Sequence[Commit], anew: Mapping[Number, int], verdict: CheckResult) -> None:
    steps: dict[Number, set[int]] = defaultdict(set)
    for line in lines:
        steps[line.generation].add(line.step)
    verdict.lineages = 1 if steps else 0
    highest: tuple[int, Number] | None = None
    for number in sorted(steps):
        first, last = min(steps[number]), max(steps[number])
        verdict.steps = max(verdict.steps, last)
        if len(steps[number]) != last - first + 1:
            verdict.faults.append(f"generation {_shown(number)} has left out a step between {first} and {last}")
        since = [other for other in anew if (highest is None or other > highest[1]) and other <= number]
        if since:
            begun = anew[max(since)]
            if first != begun + 1:
                verdict.faults.append(
                    f"generation {_shown(number)} was to begin from the checkpoint of step {begun}, and began with "
                    f"step {first}"
                )
        elif highest is not None:
            if first < highest[0]:
                verdict.lineages += 1
                verdict.faults.append(
                    f"generation {_shown(number)} began with step {first}, and {_shown(highest[1])} came to "
                    f"{highest[0]}: two lineages"
                )
            elif first > highest[0] + 1:
                verdict.faults.append(f"nobody has committed the steps between {highest[0]} and {first}")
            verdict.repeated += first == highest[0]
        elif first != 1:
            verdict.faults.append(f"the first generation began with step {first}")
        if highest is None or last >= highest[0] or since:
            highest = last, number


def _check_leaders(log: Sequence[Commit], lease: float, verdict: CheckResult) -> None:
    leaders: dict[tuple[int, Number], set[str]] = defaultdict(set)
    began: dict[Number, float] = {}
    arrived: dict[tuple[str, Number, int], float] = {}
    """When each process has first told of a step. Its lease counts from before that step's exchange."""
    for line in log:
        if line.leader:
            leaders[line.step, line.generation].add(line.process)
        began[line.generation] = min(line.asked, began.get(line.generation, line.asked))
        key = line.process, line.generation, line.step
        arrived[key] = min(line.asked, arrived.get(key, line.asked))
    for (step, number), names in sorted(leaders.items()):
        if len(names) > 1:
            verdict.faults.append(
                f"step {step} of generation {_shown(number)} has the leaders {', '.join(sorted(names))}"
            )
    for line in log:
        silent = line.asked - arrived[line.process, line.generation, line.step]
        newer = [at for number, at in began.items() if number > line.generation and at < line.asked]
        if line.leader and newer and silent > lease:
            verdict.faults.append(
                f"{line.process} took itself for the leader of generation {_shown(line.generation)} {silent:.1f} s "
                f"after its last step, and {line.asked - min(newer):.1f} s after others had gone on"
            )


def _shown(number: Number) -> str:
    return str(number[1])


# What must hold for the checkpoints of a job. Pure.
#
# Each process writes down each rename in the checkpoints' directory: by a rename they appear, go, and pass from one
# generation to the next. A checkpoint bears the number of a generation, and one of a lower number does not appear
# where one of a higher number is. Its writer looks for one right before; what appears in the moment between that look
# and the rename is harmless, and counted.

_NAME = re.compile(r"step-(\d{8,15})\.(\d{1,15})\.(\d{1,15})")


@dataclass(frozen=True)
class Rename:
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


def check_moves(moves: Iterable[Rename], committed: Mapping[Number, Sequence[int]]) -> Storage:
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
    move: Rename,
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


def _check_adoption(move: Rename, source: tuple[Number, int], target: tuple[Number, int], storage: Storage) -> None:
    storage.begun[target[0]], storage.begun_at[target[0]] = target[1], move.done
    if target[1] != source[1] or target[0] <= source[0]:
        storage.faults.append(f"{move.process} has made {move.target} of {move.source}")
